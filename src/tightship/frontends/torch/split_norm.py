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
        for one, share in zip(means, shares, strict=True):
            off = aten.sub.Tensor(one, mean)
            aten.addcmul_.default(variance, off, off, value=share)
        count = sum(images) * parts[0][0][0, 0].numel()
        for running, new, factor in (
            (running_mean, mean, 1.0), (running_var, variance, count / max(count - 1, 1)),
        ):  # fmt: skip
            if running is not None:
                aten.mul_.Tensor(running, 1 - momentum)
                aten.add_.Tensor(running, new, alpha=momentum * factor)
        spread = aten.rsqrt.default(aten.add.Scalar(variance, eps))
    for i, args in enumerate(parts):
        with at(i):
            made = aten.native_batch_norm.default(args[0], weight, bias, mean, variance, False, 0.0, eps)[0]
        keep(i, made)
    return mean, spread


def normalized_backward(
    parts: Sequence[Sequence[Any]], at: At, keep: Keep
) -> tuple[torch.Tensor, torch.Tensor]:
    """``native_batch_norm_backward`` of slices, likewise: the gradients of scale and shift."""
    _, x, weight, _, _, mean, spread, _, eps, _ = parts[0]
    ones = [1.0] * len(parts)
    scales, shifts = list[torch.Tensor](), list[torch.Tensor]()
    with at(-1):  # such that the op, not in training, takes the saved spread for the variance's
        variance = aten.sub.Scalar(aten.pow.Tensor_Scalar(spread, -2), eps)
    for i, args in enumerate(parts):
        with at(i):
            _, scale, shift = aten.native_batch_norm_backward.default(
                _wide(args[0]),
                _wide(args[1]),
                None,
                mean,
                variance,
                None,
                None,
                False,
                eps,
                [False, True, True],
            )
        scales.append(scale)
        shifts.append(shift)
    with at(-1):
        scale, shift = _added(scales, ones), _added(shifts, ones)
        count = sum(len(args[0]) for args in parts) * x[0, 0].numel()
        sizes = [1, -1, *[1] * (x.ndim - 2)]

        def along(t: torch.Tensor) -> torch.Tensor:
            return aten.view.default(t, sizes)

        center, lost = along(mean), along(aten.div.Scalar(shift, count))
        slope = along(aten.mul.Scalar(aten.mul.Tensor(scale, spread), -1 / count))
        factor = along(spread if weight is None else aten.mul.Tensor(spread, weight))
    for i, args in enumerate(parts):
        with at(i):
            made = aten.sub.Tensor(args[1], center)
            aten.mul_.Tensor(made, slope)
            aten.add_.Tensor(made, args[0])
            aten.sub_.Tensor(made, lost)
            aten.mul_.Tensor(made, factor)
            if made.dtype != args[0].dtype:
                made = aten._to_copy.default(made, dtype=args[0].dtype)
        keep(i, made)
    return scale, shift


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits as float32, as the op itself has them."""
    if x.dtype in (torch.bfloat16, torch.float16):
        wide: torch.Tensor = aten._to_copy.default(x, dtype=torch.float32)
        return wide
    return x


def _added(rows: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """The sum of so much of each, in their order."""
    total: torch.Tensor = aten.mul.Scalar(rows[0], shares[0])
    for row, share in zip(rows[1:], shares[1:], strict=True):
        aten.add_.Tensor(total, row, alpha=share)
    return total
