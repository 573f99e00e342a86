"""Batches and results: nested containers to flat tensors, and back."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch.program import Ref

__all__ = ["BatchSpec", "Results", "flatten", "map_leaves"]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of ``tree`` with ``fn`` applied to its leaves, visited in a fixed order.

    Containers are lists, tuples (named ones too), mappings (``BatchEncoding`` and other ``UserDict``s,
    ``ModelOutput``) and dataclasses; everything else is a leaf.
    """
    if isinstance(tree, (Ref, Results.Position)):  # dataclasses, but leaves
        return fn(tree)
    if isinstance(tree, UserDict):
        new = copy.copy(tree)
        new.data = {k: map_leaves(fn, v) for k, v in tree.data.items()}
        return new
    if isinstance(tree, Mapping):
        items = {k: map_leaves(fn, v) for k, v in tree.items()}
        if type(tree) is dict:
            return items
        return type(tree)(**items) if _is_dataclass(tree) else type(tree)(items)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(fn, x) for x in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, x) for x in tree)
    if _is_dataclass(tree):
        new = copy.copy(tree)
        for f in dataclasses.fields(tree):
            object.__setattr__(new, f.name, map_leaves(fn, getattr(tree, f.name)))
        return new
    return fn(tree)


def _is_dataclass(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _shape_of(tree: Any) -> Any:
    """The containers of ``tree`` without its leaves, comparable by equality."""
    if isinstance(tree, Mapping):
        return type(tree).__qualname__, tuple((k, _shape_of(v)) for k, v in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree).__qualname__, tuple(_shape_of(x) for x in tree)
    if _is_dataclass(tree):
        names = [f.name for f in dataclasses.fields(tree)]
        return type(tree).__qualname__, tuple((n, _shape_of(getattr(tree, n))) for n in names)
    return None


def flatten(tree: Any) -> list[Any]:
    """The leaves of ``tree``, in the order in which ``Slot.key`` of inputs counts them."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves


@dataclass(frozen=True)
class BatchSpec:
    """What a batch must look like to be given to a captured step.

    ``leaves`` holds (dtype, shape, stride, device) for tensors and the value itself for everything else.
    """

    containers: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(batch: Any) -> BatchSpec:
        return BatchSpec(_shape_of(batch), tuple(_described(x) for x in flatten(batch)))

    def fits(self, batch: Any) -> bool:
        return self.misfit(batch) is None

    def misfit(self, batch: Any) -> str | None:
        """What is different about ``batch``, or None if a captured step can take it."""
        if _shape_of(batch) != self.containers:
            return "the batch's structure"
        for k, (leaf, known) in enumerate(zip(flatten(batch), self.leaves, strict=True)):
            now = _described(leaf)
            if type(now) is not type(known) or now != known:
                return f"leaf {k} of the batch: {now} instead of {known}"
        return None


@dataclass(frozen=True)
class _TensorLeaf:
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _TensorLeaf(leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()), str(leaf.device))
    return leaf


@dataclass(frozen=True)
class Results:
    """How a program's results are put together: ``tree`` has a position where a result goes."""

    tree: Any

    @dataclass(frozen=True)
    class Position:
        index: int

    @staticmethod
    def of_refs(tree: Any) -> tuple[Results, list[int]]:
        """``tree`` holds ``Ref``s; returns the spec and the values in order."""
        values: list[int] = []

        def leaf(x: Any) -> Any:
            if type(x) is not Ref:
                return x
            values.append(x.value)
            return Results.Position(len(values) - 1)

        return Results(map_leaves(leaf, tree)), values

    def unflatten(self, tensors: Any) -> Any:
        """The caller's structure with ``tensors`` in their places. Raises ``BadInput`` if there are too few."""

        def leaf(x: Any) -> Any:
            if type(x) is not Results.Position:
                return x
            if x.index >= len(tensors):
                raise BadInput("a program hands back all of its results", len(tensors), f"result {x.index}")
            return tensors[x.index]

        return map_leaves(leaf, self.tree)
