"""All the others, cheapest first, until one reaches the lower bound (the default).

Problem: offsets for buffers with known live ranges. Minimised: the arena; with a capacity, any arena within it is
enough. Source: algorithm portfolios. Guarantee: never worse than any other planner here given the same seed and
limits (unless the time limit or a capacity stops it first); stops with proof at the lower bound, which exact
search may raise. Complexity: that of its parts; fifteen greedy packings, O(n log n) set operations each, come
before any search. Known limits: those of its parts; exact search leaves out problems that are large or have
pins, and these are only climbed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tightship.errors import BadInput
from tightship.plan import Problem, Solution
from tightship.planners.place import exact, hill_climb
from tightship.planners.place._frame import FREE, Arrays, Frame, Ints, frame, from_arrays
from tightship.planners.place._greedy import best_greedy

__all__ = ["Options", "offsets", "plan"]

TREES = 20
"""A plan's trees may do so many times the work that a climb may do: they get further by it."""


@dataclass(frozen=True, slots=True)
class Options:
    """``work_limit``: buffers each search may place; ``time_limit``: seconds over all, None for none.
    ``capacity``: an arena that is small enough (None: the problem's; if it has none, as small as possible).

    The same seed and work limit give the same answer on any number of ``threads``, unless the time limit stopped
    it."""

    seed: int = 0
    work_limit: int = 200_000
    time_limit: float | None = 10.0
    threads: int = 2
    capacity: int | None = None


def plan(problem: Problem, options: Options | None = None) -> Solution:
    o = options or Options()
    if o.capacity is None:
        o = replace(o, capacity=problem.capacity)
    f = frame(problem)
    best, bound = _best(f, o, TREES * o.work_limit)
    return exact.with_bound(f, problem, bound).solution(best, "portfolio")


def offsets(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    time_limit: float | None = 2.0,
    work_limit: int = 200_000,
    seed: int = 0,
) -> tuple[Ints, int, int]:
    """Offsets, arena and lower bound of a problem given as arrays, without alignments and pins."""
    columns = [np.ascontiguousarray(x, dtype=np.int64) for x in (lower, upper, size)]
    count = len(columns[2])
    if any(c.shape != (count,) for c in columns):
        raise BadInput("lower, upper and size are of one length", tuple(c.shape for c in columns), "offsets")
    ones, free = np.ones(count, dtype=np.int64), np.full(count, FREE, dtype=np.int64)
    f = from_arrays(Arrays(columns[0], columns[1], columns[2], ones, free))
    o = Options(seed=seed, work_limit=work_limit, time_limit=time_limit)
    best, bound = _best(f, o, work_limit)
    return best, f.arena(best), bound


def _best(f: Frame, o: Options, trees: int) -> tuple[Ints, int]:
    """The best of all attempts, the first of equals, and the lower bound. ``trees``: work of the exact search."""
    enough = max(f.bound, o.capacity or 0)
    best, how = best_greedy(f, enough, o.time_limit)
    limits = exact.Options(o.seed, trees, o.time_limit, o.threads, o.capacity)
    best, bound, _ = exact.search(f, limits, best)
    enough = max(enough, bound)
    climbing = hill_climb.Options(o.seed, o.work_limit, o.time_limit)
    for order, best_fit in dict.fromkeys((how, hill_climb.START)):
        if f.arena(best) <= enough or f.seconds_left(o.time_limit) <= 0:
            break
        attempt = hill_climb.climb(f, climbing, order, best_fit)
        if f.arena(attempt) < f.arena(best):
            best = attempt
    return best, bound
