"""Samples at other batch sizes, without data: what a step would be given."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch.structure import flatten, map_leaves

__all__ = ["batch_size", "resized"]


def batch_size(sample: Any) -> int:
    """The first dimension that most of the sample's tensors share. Raises ``BadInput`` if none has a dimension."""
    sizes = [x.shape[0] for x in flatten(sample) if isinstance(x, torch.Tensor) and x.dim()]
    if not sizes:
        raise BadInput(
            "a sample has tensors whose first dimension is the batch", type(sample).__name__, "sample"
        )
    return int(Counter(sizes).most_common(1)[0][0])


def resized(sample: Any, batch: int) -> Any:
    """The sample with ``batch`` in place of its batch size wherever that is a tensor's first dimension; all tensors
    on the meta device."""
    was = batch_size(sample)

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        first = batch if x.dim() and x.shape[0] == was else None
        shape = x.shape if first is None else (first, *x.shape[1:])
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    return map_leaves(leaf, sample)
