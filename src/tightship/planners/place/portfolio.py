"""All the others, cheapest first, until one reaches the lower bound (the default).

Problem: offsets for buffers with known live ranges. Minimised: the arena. Source: algorithm portfolios.
Guarantee: never worse than any other planner here given the same seed and limits (unless the time limit
stops it first); stops with proof at the lower bound. Complexity: that of its parts; fifteen greedy
packings, O(n log n) set operations each, come before any search. Known limits: when the best arena is above
the lower bound, nothing is proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tightship.errors import BadInput
from tightship.plan import Problem, Solution
from tightship.planners.place import _orders as orders
from tightship.planners.place import hill_climb, peak_first
from tightship.planners.place._frame import FREE, Arrays, Frame, Ints, frame, from_arrays

__all__ = ["Options", "offsets", "plan"]

GREEDY: tuple[tuple[orders.Order, bool], ...] = (
    hill_climb.START,
    (orders.by_size_then_start, False),
    *peak_first.GREEDY,
    (orders.by_size, True),
    (orders.by_breadth, True),
    (orders.by_area, False),
    (orders.by_length, True),
    (orders.by_conflicts, True),
    (orders.by_start, False),
    (orders.by_start, True),
    (orders.given, False),
)
"""Orders, each with best fit (True) or first fit, those that usually win first."""


@dataclass(frozen=True, slots=True)
class Options:
    """``work_limit``: buffers each search may place; ``time_limit``: seconds over all, None for none.

    The same seed and work limit give the same answer unless the time limit stopped it."""

    seed: int = 0
    work_limit: int = 200_000
    time_limit: float | None = 10.0


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    return f.solution(_best(f, options or Options()), "portfolio")


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
    best = _best(f, Options(seed=seed, work_limit=work_limit, time_limit=time_limit))
    return best, f.arena(best), f.bound


def _best(f: Frame, o: Options) -> Ints:
    """The best of all attempts, the first of equals."""
    start = GREEDY[0]
    best, arena = _pack(f, start)

    def done() -> bool:
        return arena <= f.bound or f.seconds_left(o.time_limit) <= 0

    for greedy in GREEDY[1:]:
        if done():
            return best
        attempt, reached = _pack(f, greedy, cutoff=arena)
        if reached < arena:
            best, arena, start = attempt, reached, greedy
    climbing = hill_climb.Options(o.seed, o.work_limit, o.time_limit)
    for order, best_fit in dict.fromkeys((start, hill_climb.START)):
        if done():
            return best
        attempt = hill_climb.climb(f, climbing, order, best_fit)
        if f.arena(attempt) < arena:
            best, arena = attempt, f.arena(attempt)
    return best


def _pack(f: Frame, greedy: tuple[orders.Order, bool], cutoff: int = 2**63 - 1) -> tuple[Ints, int]:
    """Offsets and arena; given up, with an arena beyond all, where it would be ``cutoff`` or more."""
    order, best_fit = greedy
    offsets, arena = f.placer.pack(order(f.arrays), best_fit=best_fit, cutoff=cutoff)
    return offsets, int(arena)
