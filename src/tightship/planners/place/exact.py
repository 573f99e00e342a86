"""Tree search with explained failures and restarts, from the best greedy packing on.

Problem: offsets for buffers with known live ranges. Minimized: the arena; with a capacity, any arena within it is
enough. Source: the canonical placements, inference and dominance of MiniMalloc (Moffitt, "MiniMalloc: A
Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023); conflict-directed
backjumping (Prosser 1993) over what cannot fit, and restarts with other preferences (Gomes et al. 1998), are
added. Guarantee: optimal, and so proved, if given the time; never worse than any greedy planner here. What was
refuted raises the lower bound. Complexity: exponential; in
practice within some thousand placements on networks, each linear in the buffers alive at the same time. Known
limits: problems of more than ``MOST_BUFFERS``, or ``MOST_PAIRS`` pairs of them alive together, are packed greedily
only; proofs other than by the peak load are rare beyond a hundred buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tightship.options import option
from tightship.plan import Problem, Solution
from tightship.planners.place.greedy import best_greedy
from tightship.planners.place.orders import Best, SearchOptions, conflicts
from tightship.planners.place.problem import Frame, Ints, frame

__all__ = ["MOST_PAIRS", "Options", "plan", "search"]

MOST_BUFFERS = 20_000
MOST_PAIRS = 8_000_000
"""Of buffers alive together, counted both ways: 32 MB."""


@dataclass(frozen=True, slots=True)
class Options(SearchOptions):
    """More work never gives a worse answer."""

    work_limit: int = option(4_000_000, "work of the search trees, about a microsecond each")


def plan(problem: Problem, options: Options | None = None) -> Solution:
    o, best = _with_capacity(options or Options(), problem), Best(frame(problem))

    def go() -> None:
        best_greedy(best, max(best.bound, o.capacity or 0), o.time_limit)
        search(best, o)

    return best.search(problem, "exact", go)


def search(best: Best, o: Options) -> Ints:
    """Improves the best and the lower bound; returns the indices of buffers that prove the bound (none: it is the
    one that was known before)."""
    f, goal, nothing = best.frame, max(best.bound, o.capacity or 0), np.empty(0, dtype=np.int64)
    if best.arena <= goal or not _searchable(f):
        return nothing
    offsets, bound, proof = f.placer.exact(
        best.offsets,
        seed=o.seed,
        work=o.work_limit,
        seconds=max(f.seconds_left(o.time_limit), 0.0),
        goal=goal,
        wanted=o.capacity is not None and goal == o.capacity,
        threads=o.threads,
    )
    best.offer(offsets, f.arena(offsets))
    proved = bound > best.bound
    best.bound = max(best.bound, int(bound))
    best.go_on()
    return np.asarray(proof) if proved else nothing


def _searchable(f: Frame) -> bool:
    few = f.arrays.count <= MOST_BUFFERS  # asked first: counting takes its time, too
    return f.related or (few and int(conflicts(f.arrays).sum()) <= MOST_PAIRS)


def _with_capacity(o: Options, problem: Problem) -> Options:
    return o if o.capacity is not None else replace(o, capacity=problem.capacity)
