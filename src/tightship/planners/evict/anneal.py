"""Simulated annealing over groups of repeated tensors, from the best of many seeds; the default.

Problem: choose gaps to recompute; minimize seconds of recomputation, peak within the budget. Measure: the exact
simulated peak and time of every candidate. Source: Kirkpatrick et al. 1983; moving isomorphic layers together is
ours. Seeds: keep everything, checkpoints as people set them and as blocks are found, saved sets by price and mixed
of two layer by layer, the ladder from each side of the budget, what the problem's archive has. Guarantee: never worse
than any seed, nor than what was found for less memory on the same problem; the same seed and work limit give the same
plan, and more work goes on where less of it ends. Complexity: a replay per candidate, anytime. Known limits: no proof
of optimality; the gap to the lower bound is reported instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightship.baselines import chain, checkpoint, min_cut
from tightship.options import option
from tightship.planners.evict import blocks, greedy, keep, ladder
from tightship.planners.evict.problem import OFFLOAD, Decision, EvictionProblem, Progress, best_of

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
    """Limits of the search, and its seed."""

    work: int = option(150_000_000, "ops simulated at most; makes a plan reproducible")
    seconds: float = option(8.0, "wall clock at most")
    seed: int = option(0, "seed of the random moves")


@dataclass
class _Effort:
    """What is left of work and time."""

    work: int
    until: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.until - time.perf_counter())

    @property
    def empty(self) -> bool:
        return self.work <= 0 or self.seconds <= 0

    def share(self, work: int, seconds: float) -> tuple[int, float]:
        """So much work and such a share of the time, or what is left."""
        return max(0, min(work, self.work)), seconds * self.seconds

    def spend(self, found: Decision) -> Decision:
        self.work -= found.work
        return found


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found within the work limit, or before Ctrl-C: the problem's archive says if it came."""
    o = options or Options()
    effort = _Effort(o.work, time.perf_counter() + o.seconds)
    all_kept = keep.plan(problem, budget)
    if all_kept.met or not len(problem.gaps):
        return all_kept
    best = all_kept
    try:
        for d in _search(problem, budget, o, all_kept, effort, progress):
            best = best_of((best, d))
            told = progress is not None and progress(best.peak, best.extra, best.met)
            if told or problem.archive.stopped:
                break
    except KeyboardInterrupt:
        problem.archive.stopped = True
    problem.archive.offer(best)
    return replace(best, work=o.work)


def _search(
    problem: EvictionProblem,
    budget: int,
    o: Options,
    all_kept: Decision,
    effort: _Effort,
    progress: Progress | None,
) -> Iterator[Decision]:
    """Seeds, then annealing from the best so far, again and again and longer and longer."""
    best = all_kept
    for d in _seeds(problem, budget, all_kept, effort, progress):
        best = best_of((best, d))
        yield d
    heat, size, n = min(_HOTTEST, _HEAT / len(problem.gaps)), _FIRST, 0
    while not effort.empty:
        work, seconds = effort.share(size, 0.9)
        run = problem.engine.anneal(
            problem.groups,
            *problem.isomorphic_layers,
            budget,
            best.evict,
            heat,
            size,
            work,
            seconds,
            o.seed + n,
            progress,
        )
        found = effort.spend(problem.decision(run))
        yield found
        if found.met:
            found = effort.spend(ladder.relaxed(problem, budget, found, *effort.share(size // 8, 0.5)))
            yield found
        best = best_of((best, found))
        size, n = size * _GROWTH, n + 1


def _saved_sets(problem: EvictionProblem, budget: int) -> Iterator[Decision]:
    """What was found for other limits, everything outside, what people keep by hand, and minimum cuts."""
    yield from problem.archive.around(budget, problem)
    if (outside := problem.wherever(OFFLOAD)).any():  # the least memory there is in this order
        yield problem.cost(outside, budget)
    for by_hand in _CHECKPOINTS:
        bits = checkpoint.dropped(problem, by_hand)
        if bits.any():
            yield problem.cost(bits, budget)
    yield from min_cut.family(problem, budget)


def _seeds(
    problem: EvictionProblem, budget: int, all_kept: Decision, effort: _Effort, progress: Progress | None
) -> Iterator[Decision]:
    """What annealing may start from."""
    found = [all_kept]

    def offer(d: Decision) -> Decision:
        found.append(d)
        return d

    for d in _saved_sets(problem, budget):
        yield offer(d)
        if effort.empty:
            return
    for d in min_cut.between(problem, budget, effort.until):
        work, seconds = effort.share(_MIX, 0.05)
        yield offer(effort.spend(ladder.relaxed(problem, budget, d, work, seconds)) if d.met else d)
        if effort.empty:
            return
    work, seconds = effort.share(_CHAIN, 0.05)
    yield offer(effort.spend(chain.plan(problem, budget, chain.Options(work=work, seconds=seconds))))
    work, seconds = effort.share(_BLOCKS, 0.2)
    yield offer(blocks.plan(problem, budget, blocks.Options(work=work, seconds=seconds)))
    work, seconds = effort.share(_GREEDY, 0.1)
    yield offer(effort.spend(greedy.plan(problem, budget, greedy.Options(work, seconds), progress)))
    # Up from below the budget is done by giving back, down from above it by the ladder.
    over = sorted((d for d in found if d.valid and not d.met), key=lambda d: d.peak)
    starts = [all_kept] if not over or over[0] is all_kept else [over[0], all_kept]
    for d in starts:
        work, seconds = effort.share(_LADDER, 0.1)
        yield offer(
            effort.spend(ladder.climb(problem, budget, d.evict, ladder.Options(work, seconds), progress))
        )
    met = sorted((d for d in found if d.met), key=lambda d: d.extra)
    for d in met[:2]:
        yield effort.spend(ladder.relaxed(problem, budget, d, *effort.share(_RELAX, 0.03)))
