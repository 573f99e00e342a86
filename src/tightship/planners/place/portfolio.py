"""All the others, cheapest first, until one reaches the lower bound (the default).

Problem: offsets for buffers with known live ranges. Minimized: the arena; with a capacity, any arena within it is
enough. Source: algorithm portfolios. Guarantee: never worse than any other planner here given the same seed and
limits (unless the time limit or a capacity stops it first, or there are so many buffers that some packings are left
out: ``_greedy``); stops with proof at the lower bound, which exact search may raise. Complexity: that of its parts;
twenty greedy packings, O(n log n) set operations each, come before any search. Known limits: those of its parts;
exact search leaves out problems of many thousand buffers, which are climbed and then searched exactly in windows of
a few dozen; beyond ``MANY`` buffers, without a capacity, it stops within a thousandth of the bound.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tightship.baselines import tvm_hill_climb
from tightship.errors import BadInput
from tightship.plan import Problem, Solution
from tightship.planners.place import exact, hill_climb
from tightship.planners.place.greedy import MANY, START, best_greedy
from tightship.planners.place.orders import Best
from tightship.planners.place.orders import SearchOptions as Options
from tightship.planners.place.problem import FREE, Arrays, Ints, frame, from_arrays

__all__ = ["Options", "offsets", "plan"]

LEAST_WINDOWED = 1_000
"""Below that, the exact search does as well with all buffers as with a few dozen at a time."""

CLOSE = 1_000
"""Of many buffers, an arena so near to the bound, as a part of it, is as good as the bound: more would not pay."""

LEAST_ROUNDS = 10
"""Packings that climbing has work for, or of many buffers it is left out."""

TREES = 20
"""A plan's trees may do so many times the work that a climb may do: they get further by it."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    o = options or Options()
    if o.capacity is None:
        o = replace(o, capacity=problem.capacity)
    best = Best(frame(problem))
    return best.search(problem, "portfolio", lambda: _improve(best, o, TREES * o.work_limit))


def offsets(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    time_limit: float | None = 2.0,
    work_limit: int = 200_000,
    seed: int = 0,
    capacity: int | None = None,
) -> tuple[Ints, int, int]:
    """Offsets, arena and lower bound of a problem given as arrays, without alignments and pins."""
    columns = [np.ascontiguousarray(x, dtype=np.int64) for x in (lower, upper, size)]
    count = len(columns[2])
    if any(c.shape != (count,) for c in columns):
        shapes = [c.shape for c in columns]
        raise BadInput(f"different shapes {shapes} of lower, upper and size", place="offsets")
    ones, free = np.ones(count, dtype=np.int64), np.full(count, FREE, dtype=np.int64)
    f = from_arrays(Arrays(columns[0], columns[1], columns[2], ones, free))
    o = Options(seed=seed, work_limit=work_limit, time_limit=time_limit, capacity=capacity)
    best = Best(f)
    _improve(best, o, work_limit)
    return best.offsets, best.arena, best.bound


def _improve(best: Best, o: Options, trees: int) -> None:
    """All attempts, one after the other. ``trees``: work of the exact search."""
    f, count = best.frame, best.frame.arrays.count
    near = f.bound + f.bound // CLOSE if count > MANY and o.capacity is None else f.bound
    enough = max(near, o.capacity or 0)

    def done() -> bool:
        return best.arena <= max(best.bound, enough) or f.seconds_left(o.time_limit) <= 0

    how = best_greedy(best, enough, o.time_limit)
    exact.search(best, exact.Options(o.seed, trees, o.time_limit, o.threads, o.capacity))
    climbs = count <= MANY or o.work_limit >= LEAST_ROUNDS * count
    for order, best_fit in dict.fromkeys((how, START)) if climbs else ():
        if not done():
            hill_climb.climb(best, hill_climb.Options(o.seed, o.work_limit, o.time_limit), order, best_fit)
    if not done() and not f.related and count >= LEAST_WINDOWED:
        left = f.seconds_left(o.time_limit)
        found = f.placer.windows(best.offsets, seed=o.seed, work=o.work_limit, seconds=left, goal=enough)
        best.offer(found, f.arena(found))
        best.go_on()
    if not done() and climbs:
        tvm_hill_climb.climb(best, tvm_hill_climb.Options(o.seed, o.work_limit, o.time_limit))
