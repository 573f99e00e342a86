"""Simulated annealing over groups of repeated tensors, from the best of many seeds; the default.

Problem: choose gaps to recompute; minimise seconds of recomputation, peak within the limit. Measure: the exact
simulated peak and time of every candidate. Source: Kirkpatrick et al. 1983; moving isomorphic layers together is
ours. Seeds: keep everything, checkpoints as people set them and as blocks are found, saved sets by price and mixed
of two layer by layer, the ladder from each side of the limit, what
the frame's archive has. Guarantee: never worse than any seed, nor than what was found for less memory on the
same frame; the same seed and work limit give the same plan, and more work goes on where less of it ends. Complexity:
a replay per candidate, anytime. Known limits: no proof of optimality; the gap to the lower bound is reported instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightship.baselines import chain, checkpoint, min_cut
from tightship.planners.evict import blocks, greedy, keep, ladder
from tightship.planners.evict.problem import OFFLOAD, Decision, Frame, Progress

__all__ = ["Options", "plan"]

_FIRST, _GROWTH = 8_000_000, 2
"""Ops simulated in the first annealing run, and how much longer each next one is. What a run does depends on no limit
of work, so that with more of it the same things are tried, and then more."""
_HEAT, _HOTTEST = 6.0, 0.1
"""The first temperature of every run, in step times: over the number of gaps, and at most."""
_MIX, _CHAIN, _BLOCKS = 7_500_000, 7_500_000, 37_500_000
_GREEDY, _LADDER, _RELAX = 15_000_000, 15_000_000, 4_500_000
"""Ops simulated at most for one seed of each kind."""


_CHECKPOINTS = tuple(checkpoint.Options(depth, selective) for depth in (1, 2) for selective in (False, True))


@dataclass(frozen=True, slots=True)
class Options:
    """``work``: ops simulated at most (this makes a plan reproducible). ``seconds``: wall clock at most. ``seed``: of
    the random moves."""

    work: int = 150_000_000
    seconds: float = 8.0
    seed: int = 0


@dataclass
class _Purse:
    """What is left of work and time."""

    work: int
    until: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.until - time.perf_counter())

    @property
    def empty(self) -> bool:
        return self.work <= 0 or self.seconds <= 0

    def part(self, work: int, seconds: float) -> tuple[int, float]:
        """So much work and such a share of the time, or what is left."""
        return max(0, min(work, self.work)), seconds * self.seconds

    def paid(self, found: Decision) -> Decision:
        self.work -= found.work
        return found


def plan(
    frame: Frame, limit: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found within the work limit, or before Ctrl-C: the frame's archive says if it came."""
    o = options or Options()
    purse = _Purse(o.work, time.perf_counter() + o.seconds)
    all_kept = keep.plan(frame, limit)
    if all_kept.met or not len(frame.gaps):
        return all_kept
    best = all_kept
    try:
        for d in _search(frame, limit, o, all_kept, purse, progress):
            best = d if d.beats(best) else best
            told = progress is not None and progress(best.peak, best.extra, best.met)
            if told or frame.archive.stopped:
                break
    except KeyboardInterrupt:
        frame.archive.stopped = True
    frame.archive.offer(best)
    return replace(best, work=o.work)


def _search(
    frame: Frame, limit: int, o: Options, all_kept: Decision, purse: _Purse, progress: Progress | None
) -> Iterator[Decision]:
    """Seeds, then annealing from the best so far, again and again and longer and longer."""
    best = all_kept
    for d in _seeds(frame, limit, all_kept, purse, progress):
        best = d if d.beats(best) else best
        yield d
    heat, size, n = min(_HOTTEST, _HEAT / len(frame.gaps)), _FIRST, 0
    while not purse.empty:
        work, seconds = purse.part(size, 0.9)
        run = frame.engine.anneal(
            frame.groups, *frame.twins, limit, best.evict, heat, size, work, seconds, o.seed + n, progress
        )
        found = purse.paid(frame.found(run))
        yield found
        if found.met:
            found = purse.paid(ladder.relaxed(frame, limit, found, *purse.part(size // 8, 0.5)))
            yield found
        best = found if found.beats(best) else best
        size, n = size * _GROWTH, n + 1


def _saved_sets(frame: Frame, limit: int) -> Iterator[Decision]:
    """What was found for other limits, everything outside, what people keep by hand, and minimum cuts."""
    yield from frame.archive.around(limit, frame)
    if (outside := frame.wherever(OFFLOAD)).any():  # the least memory there is in this order
        yield frame.cost(outside, limit)
    for by_hand in _CHECKPOINTS:
        bits = checkpoint.dropped(frame, by_hand)
        if bits.any():
            yield frame.cost(bits, limit)
    yield from min_cut.family(frame, limit)


def _seeds(
    frame: Frame, limit: int, all_kept: Decision, purse: _Purse, progress: Progress | None
) -> Iterator[Decision]:
    """What annealing may start from."""
    found = [all_kept]

    def seed(d: Decision) -> Decision:
        found.append(d)
        return d

    for d in _saved_sets(frame, limit):
        yield seed(d)
        if purse.empty:
            return
    for d in min_cut.between(frame, limit, purse.until):
        work, seconds = purse.part(_MIX, 0.05)
        yield seed(purse.paid(ladder.relaxed(frame, limit, d, work, seconds)) if d.met else d)
        if purse.empty:
            return
    work, seconds = purse.part(_CHAIN, 0.05)
    yield seed(purse.paid(chain.plan(frame, limit, chain.Options(work=work, seconds=seconds))))
    work, seconds = purse.part(_BLOCKS, 0.2)
    yield seed(blocks.plan(frame, limit, blocks.Options(work=work, seconds=seconds)))
    work, seconds = purse.part(_GREEDY, 0.1)
    yield seed(purse.paid(greedy.plan(frame, limit, greedy.Options(work, seconds), progress)))
    # Up from below the limit is done by giving back, down from above it by the ladder.
    over = sorted((d for d in found if d.valid and not d.met), key=lambda d: d.peak)
    starts = [all_kept] if not over or over[0] is all_kept else [over[0], all_kept]
    for d in starts:
        work, seconds = purse.part(_LADDER, 0.1)
        yield seed(purse.paid(ladder.climb(frame, limit, d.evict, ladder.Options(work, seconds), progress)))
    met = sorted((d for d in found if d.met), key=lambda d: d.extra)
    for d in met[:2]:
        yield purse.paid(ladder.relaxed(frame, limit, d, *purse.part(_RELAX, 0.03)))
