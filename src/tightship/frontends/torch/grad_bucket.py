"""A bucket of gradients, as communication hooks of DistributedDataParallel are given it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import distributed as dist

from tightship.errors import BadInput

__all__ = ["GradBucket"]


class GradBucket:
    """Stands for torch's ``GradBucket``, which Python cannot make: the gradients of ``parameters`` behind one another
    in a row. A parameter without a gradient adds zeros."""

    def __init__(self, index: int, parameters: Sequence[torch.Tensor], *, last: bool) -> None:
        first = parameters[0]
        self._index, self._last, self._parameters = index, last, [*parameters]
        self._offsets = [0, *accumulate(p.numel() for p in parameters)]
        self._buffer = torch.empty(self._offsets[-1], dtype=first.dtype, device=first.device)
        for p, row in zip(parameters, self._rows(self._buffer), strict=True):
            row.zero_() if p.grad is None else row.copy_(p.grad)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Hooks may ask whether they are given a bucket."""
        return dist.GradBucket

    def index(self) -> int:
        """Of the bucket, in the order in which they are sent."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients in a row."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Puts another row in its place, for what is asked next."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Those of the parameters, in the row, in their shapes."""
        return [
            self._buffer[start : start + p.numel()].view(p.shape)
            for p, start in zip(self._parameters, self._offsets, strict=False)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Whose gradients they are."""
        return [*self._parameters]

    def is_last(self) -> bool:
        """Whether none is sent behind it."""
        return self._last

    def _rows(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each gradient's part of a row; elements lie as those of the parameter do."""
        rows = []
        for p, start in zip(self._parameters, self._offsets, strict=False):
            part = buffer[start : start + p.numel()]
            dense = torch.empty_like(p, device="meta").stride() == p.stride()
            rows.append(part.as_strided(p.shape, p.stride()) if dense else part.view(p.shape))
        return rows

    def hand_back(self, result: Any, hook: str) -> None:
        """What a hook has made of the bucket, to the gradients that are there. Raises ``BadInput`` for something
        else than a row as long as the bucket's."""
        if not isinstance(result, torch.Tensor) or result.shape != (self._offsets[-1],):
            what = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            rule = f"a communication hook's future holds a row of {self._offsets[-1]} elements, as its bucket has"
            raise BadInput(rule, what, hook)
        for p, row in zip(self._parameters, self._rows(result), strict=True):
            if p.grad is not None:
                p.grad.copy_(row)
