"""Writes under masks, as graphs of torch.compile have them: so that what they ask for does not follow from how much
is set.

A part of ``compat``, under the same rule as `compat_inductor`. Eager and Inductor leave ``x[mask] = v`` and the
gradient of ``masked_scatter`` to kernels that count what is set first, and ask for as much. What is written to all
places alike is a choice element by element (`torch.where`); of what is written to one place each, the places are sums
of the mask. The numbers are the same: they are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from tightship.frontends.torch.compat import is_dense

__all__ = ["decompositions", "is_mask", "masked_writes", "set_by_values"]

_ATEN: Final = torch.ops.aten
_MASKS: Final = (torch.bool, torch.uint8)


def decompositions() -> dict[Any, Any]:
    """What Inductor decomposes by itself, and writes under masks."""
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), **masked_writes()}


def masked_writes() -> dict[Any, Any]:
    """What is written under masks, as choices and sums."""
    return {
        _ATEN.index_put.default: _index_put,
        _ATEN.masked_scatter_backward.default: _masked_scatter_backward,
    }


def is_mask(dtype: torch.dtype) -> bool:
    """Whether an index of this type says where, rather than which."""
    return dtype in _MASKS


def set_by_values(shape: Sequence[int], at: int, covered: int, values: Sequence[int]) -> int | None:
    """How many places a mask must have, by what is written there: the mask covers ``covered`` dimensions of ``shape``
    from ``at`` on, and is the only index. None where the same is written at each place."""
    after = len(shape) - at - covered
    count = values[len(values) - after - 1] if len(values) > after else 1
    return None if count == 1 else int(count)


def _index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> Any:
    given = [(k, i) for k, i in enumerate(indices) if i is not None]
    sizes = (*x.shape, *values.shape)
    if len(given) != 1 or not is_mask(given[0][1].dtype) or any(isinstance(n, torch.SymInt) for n in sizes):
        return NotImplemented
    ((at, mask),) = given
    if set_by_values(x.shape, at, mask.ndim, values.shape) is not None:
        return NotImplemented
    after = x.ndim - at - mask.ndim
    if values.ndim > after:  # its dimension of places has one element, and becomes those that the mask covers
        before = values.shape[: values.ndim - after - 1]
        values = values.reshape(*before, *[1] * mask.ndim, *values.shape[values.ndim - after :])
    mask = mask.to(torch.bool).reshape(*mask.shape, *[1] * after)
    made = torch.where(mask, x + values if accumulate else values, x)
    # The formula of `where` goes by the numbers, its kernel by the mask first: they agree where all lie alike.
    lies_as_x = all(t.is_contiguous() for t in (mask, values, x)) or not is_dense(x)
    return made if lies_as_x else _ATEN.copy.default(torch.empty_like(x), made)


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> Any:
    if any(isinstance(n, torch.SymInt) for n in (*grad.shape, *sizes)):
        return NotImplemented
    flat = mask.expand_as(grad).reshape(-1)
    count = math.prod(sizes)
    places = torch.where(flat, flat.cumsum(0) - 1, count)  # what is not set goes to a place of its own
    return grad.new_zeros(count + 1).scatter(0, places, grad.reshape(-1))[:count].reshape(sizes)
