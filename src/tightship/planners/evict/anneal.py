"""Simulated annealing over groups of repeated tensors, from the best of many seeds; the default.

Problem: choose gaps to recompute; minimise seconds of recomputation, peak within the limit. Measure: the exact
simulated peak and time of every candidate. Source: Kirkpatrick et al. 1983; moving isomorphic layers together is
ours. Seeds: keep everything, checkpoints as people set them and as blocks are found, saved sets by price and mixed
of two layer by layer, the ladder from each side of the limit, what
the frame's archive has. Guarantee: never worse than any seed, nor than what was found for less memory on the same
frame; the same seed and work limit give the same plan. Complexity: a replay per candidate, anytime. Known limits:
no proof of optimality; the gap to the lower bound is reported instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightship.planners.evict import blocks, checkpoint, greedy, keep, ladder, min_cut
from tightship.planners.evict._frame import OFFLOAD, Decision, Frame, Progress

__all__ = ["Options", "plan"]

_HEATS = (0.001, 0.01)
"""First temperatures of the runs, in step times."""


_CHECKPOINTS = tuple(checkpoint.Options(depth, selective) for depth in (1, 2) for selective in (False, True))


@dataclass(frozen=True, slots=True)
class Options:
    """``work``: ops simulated at most (this makes a plan reproducible). ``seconds``: wall clock at most.
    ``starts``: how many annealing runs share the work. ``seed``: of the random moves."""

    work: int = 150_000_000
    seconds: float = 8.0
    starts: int = 2
    seed: int = 0


def plan(
    frame: Frame, limit: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found within the work limit, or before Ctrl-C: the frame's archive says if it came."""
    o = options or Options()
    until = time.perf_counter() + o.seconds
    all_kept = keep.plan(frame, limit)
    if all_kept.met or not len(frame.gaps):
        return all_kept
    found = [all_kept]
    try:
        for d in _search(frame, limit, o, all_kept, until, progress):
            found.append(d)
            if frame.archive.stopped:
                break
    except KeyboardInterrupt:
        frame.archive.stopped = True
    best = all_kept
    for d in found:
        best = d if d.beats(best) else best
    frame.archive.offer(best)
    return replace(best, work=o.work)


def _search(
    frame: Frame, limit: int, o: Options, all_kept: Decision, until: float, progress: Progress | None
) -> Iterator[Decision]:
    """Seeds, then annealing from the best of them, then from the others."""
    seeds = []
    for d in _seeds(frame, limit, o, all_kept, until, progress):
        seeds.append(d)
        yield d
    seeds = sorted((d for d in seeds if d.valid), key=lambda d: (not d.met, d.extra if d.met else d.peak))
    best, share = seeds[0], o.work // 2 // o.starts
    for n in range(o.starts):
        start = best if n == 0 else seeds[n % len(seeds)]
        left = max(0.0, until - time.perf_counter()) / (o.starts - n)
        run = frame.engine.anneal(
            frame.groups, limit, start.evict, _HEATS[n % len(_HEATS)], share, 0.8 * left, o.seed + n, progress
        )
        found = frame.found(run)
        yield found
        if found.met:
            found = ladder.relaxed(frame, limit, found, share // 8, 0.1 * left)
            yield found
        best = found if found.beats(best) else best


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
    frame: Frame, limit: int, o: Options, all_kept: Decision, until: float, progress: Progress | None
) -> Iterator[Decision]:
    """What annealing may start from."""

    def part(share: float) -> tuple[int, float]:
        return int(o.work * share), share * max(0.0, until - time.perf_counter())

    found = [all_kept]

    def seed(d: Decision) -> Decision:
        found.append(d)
        return d

    for d in _saved_sets(frame, limit):
        yield seed(d)
        if time.perf_counter() > until:
            return
    for d in min_cut.between(frame, limit):
        work, seconds = part(0.05)
        yield seed(ladder.relaxed(frame, limit, d, work, seconds) if d.met else d)
        if time.perf_counter() > until:
            return
    _, seconds = part(0.2)
    yield seed(blocks.plan(frame, limit, blocks.Options(work=o.work // 4, seconds=seconds)))
    work, seconds = part(0.1)
    yield seed(greedy.plan(frame, limit, greedy.Options(work, seconds), progress))
    # Up from below the limit is done by giving back, down from above it by the ladder.
    over = sorted((d for d in found if d.valid and not d.met), key=lambda d: d.peak)
    starts = [all_kept] if not over or over[0] is all_kept else [over[0], all_kept]
    for d in starts:
        work, seconds = part(0.1)
        yield seed(ladder.climb(frame, limit, d.evict, ladder.Options(work, seconds), progress))
    met = sorted((d for d in found if d.met), key=lambda d: d.extra)
    for d in met[:2]:
        work, seconds = part(0.03)
        yield ladder.relaxed(frame, limit, d, work, seconds)
