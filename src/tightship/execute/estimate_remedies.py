"""What would make a loop fit the memory there is: each way estimated or planned, none a rule of thumb.

``now`` is the loop's `Estimate`, ``asked`` what it answers: ``asked.answer()`` estimates a loop that is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from tightship.baselines.torch_allocator_settings import Settings
from tightship.errors import Infeasible, TightshipError
from tightship.execute import profile
from tightship.execute.blocks import blocks
from tightship.frontends.torch import compat_distributed
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.structure import batch_size, map_leaves
from tightship.planners import default
from tightship.planners.batch import LARGEST
from tightship.units import Budget

__all__ = ["Remedy", "batches_within", "remedies_of", "with_batch"]


@dataclass(frozen=True)
class Remedy:
    """What would make it fit: its ``name``, the ``peak`` in bytes that it comes to (with context and libraries),
    whether that fits, and what it costs."""

    name: str
    peak: int
    fits: bool
    cost: str


def remedies_of(now: Any, asked: Any, limit: int, seconds: float) -> Iterator[Remedy]:
    beside = now.total - now.peak
    if asked.trains and not asked.checkpoint and blocks(asked.model):
        other = replace(asked, checkpoint=True).answer()
        more = other.flops / now.flops - 1 if now.flops else 0.0
        cost = f"{more:.0%} more operations, bit-identical"
        yield Remedy("a checkpoint around each block", other.total, other.fits(limit), cost)
    if now.total <= limit and now._fragments(limit):
        fits = not now._fragments(limit, Settings(expandable_segments=True))
        yield Remedy("PYTORCH_ALLOC_CONF=expandable_segments:True", now.total, fits, "bit-identical")
    if asked.loop is None:
        yield from _smaller_batch(now, asked, limit)
        divided = isinstance(asked.model, DistributedDataParallel) or compat_distributed.distributed_by(
            asked.model
        )
        plain = asked.trains and asked.accumulate == 1 and asked.autocast is None and not divided
        if plain and asked.loss_fn is not None:
            yield from _own_plan(asked, limit, beside, seconds)


def _smaller_batch(now: Any, asked: Any, limit: int) -> Iterator[Remedy]:
    """The largest batch that fits, found by estimates of batches that a straight line through two of them says."""
    try:
        size = batch_size(asked.sample)
        best, known = batches_within(now, asked, limit)
    except (TightshipError, RuntimeError, ValueError, IndexError, TypeError):  # it runs at no such size
        return
    if best is None:
        yield Remedy("a batch of 1", known[1], False, "too much even so")
        return
    if best != size:
        yield Remedy(f"a batch of {best}", known[best], True, f"instead of {size}")


def batches_within(
    now: Any, asked: Any, limit: int, most: int = LARGEST
) -> tuple[int | None, dict[int, int]]:
    """The largest batch up to ``most`` whose bytes are within ``limit``, and the bytes of all that were tried."""
    size = batch_size(asked.sample)
    known = {size: now.needs(limit)}

    def total(n: int) -> int:
        if n not in known:
            known[n] = replace(asked, sample=with_batch(asked.sample, size, n)).answer().needs(limit)
        return known[n]

    total(max(1, size // 2) if size > 1 else 2)
    best = _largest(known, total, limit, most)
    if best is None:
        total(1)
    return best, known


def _largest(
    known: dict[int, int], total: Callable[[int], int], limit: int, most: int = LARGEST
) -> int | None:
    """The largest size whose bytes are within ``limit``: on a straight line through what is nearest, and every other
    time in the middle between what fits and what does not, as bytes may be flat below and steep beyond."""
    for k in range(_TRIES):
        fitting = [n for n in known if known[n] <= limit]
        beyond = [n for n in known if known[n] > limit]
        low, high = max(fitting, default=0), min(beyond, default=0)
        if low >= most:
            total(most)
            break
        if high and high - low <= max(1, low // 64):
            break
        a, b = sorted(known, key=lambda n: abs(known[n] - limit))[:2]
        slope = (known[a] - known[b]) / (a - b)
        if high:
            line = slope > 0 and k % 2 == 0
            guess = int(a + (limit - known[a]) / slope) if line else (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
        else:
            guess = int(a + (limit - known[a]) / slope) if slope > 0 else 2 * low
            guess = min(max(guess, low + 1), _GROWTH * low, most)
        if guess < 1 or guess in known:
            break
        total(guess)
    return max((n for n in known if known[n] <= limit and n <= most), default=None)


_TRIES: Final = 24
_GROWTH: Final = 8


def with_batch(sample: Any, was: int, size: int) -> Any:
    """The sample with ``size`` rows in the place of ``was``, repeated or left out, wherever that is the first
    dimension of a tensor."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != was:
            return copy.copy(x) if isinstance(x, torch.Tensor) else x
        times = -(-size // was)
        return x.detach().repeat(times, *[1] * (x.dim() - 1))[:size].clone()

    return map_leaves(leaf, sample)


def _own_plan(asked: Any, limit: int, beside: int, seconds: float) -> Iterator[Remedy]:
    """A plan of `tightship.fit`, or the least that one needs."""
    name, budget = "tightship.fit", Budget(bytes=max(0, limit - beside))
    try:
        program = capture_step(asked.model, asked.loss_fn, asked.optimizer, asked.sample)
        program = profile.model(program)
        plan = default.plan(program.graph, budget, default.read_options({"seconds": seconds}, "estimate"))
    except Infeasible as no:
        yield Remedy(name, no.best_peak + beside, False, "the least peak of a plan that was found")
    except TightshipError as no:
        yield Remedy(name, 0, False, f"no plan: {no}")
    else:
        slower = plan.time / plan.time_before - 1 if plan.time_before else 0.0
        cost = f"{slower:+.0%} of a step's time (modeled), bit-identical"
        yield Remedy(name, plan.peak + beside, True, cost)
