"""Samples at other batch sizes, without data: what a step would be given."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch.structure import flatten, map_leaves

__all__ = ["batch_size", "batched", "resized"]


def batch_size(sample: Any, dim: int = 0) -> int:
    """The size of dimension ``dim`` that most of the sample's tensors share. Raises ``BadInput`` if none has it."""
    sizes = [x.shape[dim] for x in flatten(sample) if isinstance(x, torch.Tensor) and x.dim() > dim]
    if not sizes:
        which = "first dimension" if not dim else f"dimension {dim}"
        raise BadInput(f"a sample has tensors whose {which} is the batch", type(sample).__name__, "sample")
    return int(Counter(sizes).most_common(1)[0][0])


def batched(sample: Any, dim: int = 0) -> tuple[int, int]:
    """How many of the sample's tensors have the batch as a dimension, and how many tensors there are."""
    was, tensors = batch_size(sample, dim), [x for x in flatten(sample) if isinstance(x, torch.Tensor)]
    return sum(_at(x, was, dim) is not None for x in tensors), len(tensors)


def resized(sample: Any, batch: int, dim: int = 0) -> Any:
    """The sample with ``batch`` in place of its batch size wherever that is dimension ``dim`` of a tensor, or the
    first one of a tensor that has no such dimension; all tensors on the meta device."""
    was = batch_size(sample, dim)

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        at, shape = _at(x, was, dim), list(x.shape)
        if at is not None:
            shape[at] = batch
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    return map_leaves(leaf, sample)


def _at(x: torch.Tensor, was: int, dim: int) -> int | None:
    """Which dimension of a tensor is the batch."""
    if x.dim() > dim:
        return dim if x.shape[dim] == was else None
    return 0 if x.dim() and x.shape[0] == was else None
