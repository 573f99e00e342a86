"""Batch norm in slices of images: what it normalizes with is of all of them, so that slices are gone through twice.

Means and variances of slices are combined as Chan, Golub and LeVeque do ("Updating formulae and a pairwise algorithm
for computing sample variances", 1979), in the order of the slices; then each slice is normalized on its own. The
backward pass adds up what the gradients of scale and shift are, then computes each slice's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["At", "Keep", "normalized", "normalized_backward"]

aten = torch.ops.aten

At = Callable[[int], AbstractContextManager[None]]
"""Where the ops for a slice are called; -1: those that are of no slice."""
Keep = Callable[[int, torch.Tensor], None]
"""Takes the first result of a slice."""


def normalized(parts: Sequence[Sequence[Any]], at: At, keep: Keep) -> tuple[torch.Tensor, torch.Tensor]:
    """``native_batch_norm`` of slices, from the arguments of each call, in training: what it saves for the backward
    pass. Running statistics are updated in place."""
    _, weight, bias, running_mean, running_var, _, momentum, eps = parts[0]
    images = [len(args[0]) for args in parts]
    shares = [n / sum(images) for n in images]
    means, variances = list[torch.Tensor](), list[torch.Tensor]()
    for i, args in enumerate(parts):
        with at(i):
            mean, variance = aten.batch_norm_update_stats.default(_wide(args[0]), None, None, 0.0)
        means.append(mean)
        variances.append(variance)
    with at(-1):
        mean = _added(means, shares)
        variance = _added(variances, shares)
        for part, share in zip(means, shares, strict=True):
            off = aten.sub.Tensor(part, mean)
            aten.addcmul_.default(variance, off, off, value=share)
        count = sum(images) * parts[0][0][0, 0].numel()
        for running, new, unbiased in (
            (running_mean, mean, 1.0), (running_var, variance, count / max(count - 1, 1)),
        ):  # fmt: skip
            if running is not None:
                aten.mul_.Tensor(running, 1 - momentum)
                aten.add_.Tensor(running, new, alpha=momentum * unbiased)
        spread = aten.rsqrt.default(aten.add.Scalar(variance, eps))
        kept = parts[0][0].dtype if weight is None else weight.dtype
        mean, spread = _as(mean, kept), _as(spread, kept)
        # scaled by the spread as saved and not by one made of the variance anew, which rounds otherwise
        factor, one = (
            spread if weight is None else aten.mul.Tensor(spread, weight),
            aten.ones_like.default(mean),
        )
    for i, args in enumerate(parts):
        with at(i):
            made = aten.native_batch_norm.default(args[0], factor, bias, mean, one, False, 0.0, 0.0)[0]
        keep(i, made)
    return mean, spread


def normalized_backward(
    parts: Sequence[Sequence[Any]], at: At, keep: Keep
) -> tuple[torch.Tensor, torch.Tensor]:
    """``native_batch_norm_backward`` of slices, likewise: the gradients of scale and shift."""
    _, x, weight, _, _, mean, spread, _, _, _ = parts[0]
    others = [d for d in range(x.ndim) if d != 1]
    count = sum(len(args[0]) for args in parts) * x[0, 0].numel()
    scales, shifts = list[torch.Tensor](), list[torch.Tensor]()

    def along(t: torch.Tensor) -> torch.Tensor:
        """A number for each channel, to be broadcast."""
        made: torch.Tensor = aten.view.default(t, [1, -1, *[1] * (x.ndim - 2)])
        return made

    with at(-1):
        exact, center = _wide(spread), along(_wide(mean))
    for i, args in enumerate(parts):
        with at(i):
            off = aten.sub.Tensor(args[1], center)
            aten.mul_.Tensor(off, args[0])
            scales.append(aten.sum.dim_IntList(off, others))
            shifts.append(aten.sum.dim_IntList(args[0], others, dtype=exact.dtype))
    with at(-1):
        ones = [1.0] * len(parts)
        scale, shift = aten.mul.Tensor(_added(scales, ones), exact), _added(shifts, ones)
        slope = aten.mul.Scalar(aten.mul.Tensor(scale, exact), -1 / count)
        factor = exact if weight is None else aten.mul.Tensor(exact, weight)
        lost = aten.div.Scalar(shift, count)
        scale, shift = _as(scale, mean.dtype), _as(shift, mean.dtype)
        slope, factor, lost = (along(_as(t, mean.dtype)) for t in (slope, factor, lost))
        center = along(mean)
    for i, args in enumerate(parts):
        with at(i):
            made = aten.sub.Tensor(args[1], center)
            aten.mul_.Tensor(made, slope)
            aten.add_.Tensor(made, args[0])
            aten.sub_.Tensor(made, lost)
            aten.mul_.Tensor(made, factor)
            made = _as(made, args[0].dtype)
        keep(i, made)
    return scale, shift


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Numbers as the op itself adds them up: in float64 on the CPU."""
    return _as(x, torch.float64 if x.device.type == "cpu" else torch.float32)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == dtype:
        return x
    made: torch.Tensor = aten._to_copy.default(x, dtype=dtype)
    return made


def _added(rows: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """The sum of so much of each, in their order."""
    total: torch.Tensor = aten.mul.Scalar(rows[0], shares[0])
    for row, share in zip(rows[1:], shares[1:], strict=True):
        aten.add_.Tensor(total, row, alpha=share)
    return total
