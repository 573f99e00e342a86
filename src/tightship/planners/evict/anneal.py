"""Simulated annealing over groups of repeated tensors, from the best seed; the default.

Problem: choose gaps to recompute; minimise seconds of recomputation, peak within the limit. Measure: the exact
simulated peak and time of every candidate. Source: Kirkpatrick et al. 1983; moving isomorphic layers together is
ours. Seeds: keep everything, checkpoint per block, the minimal saved set, greedy. Guarantee: never worse than
any seed; the same seed and work limit give the same plan. Complexity: a replay per candidate, anytime. Known
limits: no proof of optimality; the gap to the lower bound is reported instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightship.planners.evict import blocks, greedy, keep, min_cut
from tightship.planners.evict._frame import Decision, Frame, Progress

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """``work``: ops simulated at most (this makes a plan reproducible). ``seconds``: wall clock at most.
    ``starts``: how many annealing runs share the work. ``seed``: of the random moves."""

    work: int = 80_000_000
    seconds: float = 8.0
    starts: int = 2
    seed: int = 0


def plan(
    frame: Frame, limit: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found within the work limit."""
    o = options or Options()
    all_kept = keep.plan(frame, limit)
    if all_kept.met or not len(frame.gaps):
        return all_kept
    few = greedy.Options(work=o.work // 4, seconds=o.seconds / 4)
    seeds = [
        min_cut.plan(frame, limit),
        blocks.plan(frame, limit),
        greedy.plan(frame, limit, few, progress),
    ]
    best = all_kept
    for seed in seeds:
        best = seed if seed.beats(best) else best
    ranked = sorted(seeds, key=lambda d: (not d.met, d.extra if d.met else d.peak))
    share = o.work // o.starts
    for n in range(o.starts):
        start = ranked[n % len(ranked)] if n else best
        found = frame.found(
            frame.engine.anneal(
                frame.groups, limit, start.evict, share, 0.8 * o.seconds / o.starts, o.seed + n, progress
            )
        )
        if found.met:
            found = _relaxed(frame, limit, found, share // 4, 0.1 * o.seconds / o.starts)
        best = found if found.beats(best) else best
    return replace(best, work=o.work)


def _relaxed(frame: Frame, limit: int, found: Decision, work: int, seconds: float) -> Decision:
    for groups in (frame.groups, frame.singles):
        found = frame.found(frame.engine.relax(groups, limit, found.evict, work, seconds))
    return found
