"""Sparse gradients of embeddings: two strided tensors, rows and what each gets, until the update puts them together.

Autograd makes such a gradient, adds several up and hands it to the parameter by a handful of ops
(torch/csrc/autograd/functions/accumulate_grad.h, torch/csrc/autograd/input_buffer.cpp). What makes the two parts is
recorded; sums, and leaving out rows of padding, after which the number of rows follows from data, are done with the
update. The copy that eager makes of a gradient that it
cannot take over changes nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch import compat

__all__ = ["Pair", "SparseGradients"]

_aten = torch.ops.aten
_MAKE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_NOT, _SELECT = _aten.ne.Scalar, _aten.index.Tensor
_EMBEDDINGS = ("EmbeddingBackward0", "EmbeddingBagBackward0")


class Pair(NamedTuple):
    """``rows`` (1, n) says which rows of a table get the ``values`` (n, …), but ``padding``; rows may come several
    times."""

    rows: torch.Tensor
    values: torch.Tensor
    padding: int | None = None


class SparseGradients:
    """Those of one capture, by the fake tensor that stands for each; ``recording`` is the mode that records ops."""

    def __init__(self, recording: AbstractContextManager[Any]) -> None:
        self._recording = recording
        self._known: dict[int, tuple[torch.Tensor, tuple[Pair, ...]]] = {}
        self._parts: dict[int, tuple[torch.Tensor, tuple[Pair, ...]]] = {}
        """Stand-ins for the parts of a sum, or with padding, which autograd takes out and puts together again."""
        self._stays: tuple[torch.Tensor, int] | None = None
        """A stand-in for the mask of what is not padding, and the padding, of the gradient that is being made."""

    def terms(self, gradient: object) -> tuple[Pair, ...]:
        """What a sparse gradient is the sum of, each added to the sum of those behind it; empty for other tensors."""
        found = self._known.get(id(gradient))
        return () if found is None else found[1]

    def instead(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op of the backward pass returns that makes or asks of a sparse gradient; ``NotImplemented`` for any
        other op, or one whose bits would be others."""
        if fn is _MAKE:
            sparse_dims, _, shape, rows, values = args[:5]
            padding, self._stays = self._stays and self._stays[1], None
            terms = self._parts[id(rows)][1] if id(rows) in self._parts else (Pair(rows, values, padding),)
            return self._made(shape, terms) if sparse_dims == 1 else NotImplemented
        if fn in (_NOT, _SELECT) and compat.backward_node() in _EMBEDDINGS:
            return self._unfiltered(fn, args)
        if any(id(x) in self._parts for x in args):
            if fn in _SAME:
                return args[0]
            raise Unplannable(
                f"{fn} on the parts of a sum of sparse gradients, or of one with padding",
                "which rows it has follows from data",
                "sparse=False in the embedding",
            )  # fmt: skip
        if fn is _aten._embedding_bag_backward.default and _is_sparse_bag(args, kwargs):
            with self._recording:
                return _sparse_bag(*args, **kwargs)
        given = [self.terms(x) for x in args if isinstance(x, torch.Tensor)]
        if not given or not all(given):
            return NotImplemented
        first, shape = given[0], args[0].shape
        if fn in (_aten.clone.default, *_SAME):
            return self._made(shape, first)
        if fn is _aten.add.Tensor and len(given) == 2 and len(first) == 1 and not kwargs:
            return self._made(shape, first + given[1])
        if fn in _PARTS:
            plain = len(first) == 1 and first[0].padding is None
            return first[0][_PARTS[fn]] if plain else self._part(first, _PARTS[fn])
        if len(first) > 1:
            return NotImplemented
        number = first[0].rows.shape[1]
        if first[0].padding is not None:
            return NotImplemented
        return {_aten._nnz.default: number, _aten.is_coalesced.default: number < 2}.get(fn, NotImplemented)

    def _unfiltered(self, fn: Any, args: tuple[Any, ...]) -> Any:
        """All rows, where ``embedding_sparse_backward`` leaves out those of padding."""
        if fn is _NOT:
            self._stays = torch.empty_like(args[0], dtype=torch.bool), args[1]
            return self._stays[0]
        given, (mask,) = args
        if self._stays is None or mask is not self._stays[0]:
            return NotImplemented
        with self._recording:
            return given.reshape(-1, *given.shape[mask.dim() :])

    def _made(self, shape: Any, terms: tuple[Pair, ...]) -> torch.Tensor:
        made = compat.sparse_tensor(shape, terms[0].rows, terms[0].values)
        self._known[id(made)] = made, terms  # kept, so that nothing else gets its id
        return made

    def _part(self, terms: tuple[Pair, ...], number: int) -> torch.Tensor:
        """A stand-in, of another size than the part has."""
        made = torch.empty_like(terms[0][number])
        self._parts[id(made)] = made, terms
        return made


_SAME = (_aten.detach.default, _aten.alias.default)

_PARTS = {
    _aten._indices.default: 0, _aten.indices.default: 0, _aten._values.default: 1, _aten.values.default: 1,
}  # fmt: skip


def _is_sparse_bag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [a.name for a in _aten._embedding_bag_backward.default._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}["sparse"])


def _sparse_bag(
    grad: Any, indices: Any, offsets: Any, bags: Any, bag_size: Any, _most: Any, weights: int, scale: bool,
    mode: int, _sparse: bool, per_sample: Any, padding: int = -1,
) -> Any:  # fmt: skip
    """As the kernel (``_embedding_bag_backward`` in aten/src/ATen/native/EmbeddingBag.cpp), by the ops that it is
    made of; sums of integers are exact in any order."""
    if indices.numel() and not bags.numel():
        bags = torch.zeros(indices.shape[0] + 1, dtype=offsets.dtype, device=offsets.device)
        bags.index_add_(0, offsets, torch.ones_like(offsets))
        bags[:1] -= 1
        bags = bags.cumsum(0, dtype=offsets.dtype)[: indices.shape[0]]
    return _aten._embedding_bag_sparse_backward(
        grad, indices, offsets, bags, bag_size, weights, scale, mode, per_sample, padding
    )
