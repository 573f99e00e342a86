"""Views from metadata, and running taped ops on real tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from tightship.frontends.torch.program import Ref

__all__ = ["derive", "evaluate", "flat", "substitute"]


class Metadata(Protocol):
    """Shape, stride and offset (elements) of a value; ``dtype`` is a ``torch.dtype`` or its name."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...


def _dtype(name: Any) -> torch.dtype:
    return name if isinstance(name, torch.dtype) else getattr(torch, name)


def derive(tensor: torch.Tensor, base: Metadata, value: Metadata) -> torch.Tensor:
    """The tensor of ``value``, given the tensor of ``base``, another value of the same storage.

    Offsets are taken relative to the base: the caller's tensor may start elsewhere in its storage than it did
    when the program was captured (a slice of a data set).
    """
    if (base.dtype, base.shape, base.stride, base.offset) == (
        value.dtype,
        value.shape,
        value.stride,
        value.offset,
    ):
        return tensor
    dtype = _dtype(value.dtype)
    if dtype == tensor.dtype:
        offset = tensor.storage_offset() + value.offset - base.offset
        return torch.as_strided(tensor, value.shape, value.stride, offset)
    start = (tensor.storage_offset() - base.offset) * tensor.element_size()
    offset = start // dtype.itemsize + value.offset
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, value.shape, value.stride)


def substitute(tree: Any, read: Any) -> Any:
    """An argument tree with ``read(value)`` in place of every ``Ref``."""
    if type(tree) is Ref:
        return read(tree.value)
    if isinstance(tree, (list, tuple)):
        return type(tree)(substitute(x, read) for x in tree)
    if isinstance(tree, dict):
        return {k: substitute(x, read) for k, x in tree.items()}
    return tree


def flat(out: Any) -> list[Any]:
    """A call's result as a flat list, in the order of ``Call.results``."""
    if isinstance(out, (list, tuple)):
        return [x for o in out for x in flat(o)]
    return [out]


def evaluate(
    records: Iterable[Any],
    values: Any,
    bases: Mapping[int, int],
    tensors: Mapping[int, torch.Tensor],
    wanted: Iterable[int],
) -> list[torch.Tensor]:
    """Run ``records`` in order on ``tensors`` (by value) and return the tensors of the values ``wanted``.

    ``values`` are indexed by value and have a ``storage``; ``bases`` gives each storage's base value.
    """
    held: dict[int, torch.Tensor] = {values[v].storage: t for v, t in tensors.items()}
    base = {values[v].storage: v for v in tensors} | {s: b for s, b in bases.items() if s not in held}

    def read(v: int) -> torch.Tensor:
        s = values[v].storage
        return derive(held[s], values[base[s]], values[v])

    with torch.no_grad():
        for r in records:
            out = r.fn(*substitute(r.args, read), **substitute(r.kwargs, read))
            for v, t in zip(r.results, flat(out), strict=True):
                if v >= 0:
                    held[values[v].storage] = t
        return [read(v) for v in wanted]
