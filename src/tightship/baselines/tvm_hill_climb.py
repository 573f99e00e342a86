"""TVM's hill climb: first fit by size, then five hundred swaps of two buffers that may be in the way of the top.

Problem: offsets for buffers with known live ranges. Minimized: the arena. Source: ``hill_climb`` of Apache TVM's
unified static memory planner: the order is by size, then by conflicts, then by name, each descending; a buffer that
makes up the top of the arena is picked; one of its conflicts that comes before it is swapped with another such, or,
three times out of four, with a conflict of any of its conflicts that comes before that one. What is not smaller is
taken with a probability that falls with the number of attempts and how much larger it is, else the swap is undone.
TVM returns the last one that it accepted, this planner the smallest. Guarantee: never worse than first fit in that
order. Complexity: one greedy packing an attempt. Known limits: half a thousand attempts in one neighborhood; our
``hill-climb`` goes further.
"""

from __future__ import annotations

import random

import numpy as np

from tightship.plan import Problem, Solution
from tightship.planners.place import orders
from tightship.planners.place.orders import Best
from tightship.planners.place.orders import Limits as Options
from tightship.planners.place.problem import FREE, Arrays, Ints, frame

__all__ = ["ATTEMPTS", "START", "Options", "climb", "plan"]

PLANNER = "place/tvm-hill-climb"
"""Its group and its name on the command line."""

ATTEMPTS = 500
SECOND_LEVEL = 75
"""Percent of the swaps that look at the conflicts of conflicts."""

START: tuple[orders.Order, bool] = (orders.by_size_then_conflicts, False)


def plan(problem: Problem, options: Options | None = None) -> Solution:
    best, o = Best(frame(problem)), options or Options()
    return best.search(problem, "tvm-hill-climb", lambda: climb(best, o))


def climb(best: Best, o: Options) -> None:
    """Improves the best."""
    f, rng = best.frame, random.Random(o.seed)
    a = f.arrays
    order, swapped, most = START[0](a), (0, 0), f.placer.work + o.work_limit
    offsets, now = np.zeros(a.count, dtype=np.int64), 0
    for attempt in range(ATTEMPTS):
        left = f.seconds_left(o.time_limit)
        if attempt and (best.arena <= f.bound or left <= 0 or f.placer.work >= most):
            return
        found, arena = f.placer.pack(order, best_fit=False, seconds=max(left, 0.02))
        if not attempt or arena < now or rng.randrange(100) < 50 * (arena - now) // arena // attempt:
            offsets, now = found, int(arena)
            best.offer(found, now)
        else:
            _swap(order, *swapped)
        chosen = _choose(a, order, offsets, rng)
        if chosen is None:
            return  # nothing is in the way of the top
        swapped = chosen
        _swap(order, *swapped)


def _swap(order: Ints, i: int, j: int) -> None:
    order[i], order[j] = order[j], order[i]


def _choose(a: Arrays, order: Ints, offsets: Ints, rng: random.Random) -> tuple[int, int] | None:
    """The places in the order of two buffers to swap; None: there is nothing to choose from."""
    place = np.empty(a.count, dtype=np.int64)
    place[order] = np.arange(a.count)
    tops = np.where(a.size > 0, offsets + a.size, -1)
    highest = np.flatnonzero((tops == tops.max(initial=-1)) & (a.pinned == FREE))
    if not len(highest):
        return None
    first = _before(a, place, int(rng.choice(highest.tolist())))
    if not len(first):
        return 0, 0  # tried again with another of the top
    one = rng.choice(first)
    second = first
    if rng.randrange(100) < SECOND_LEVEL:
        via = rng.choice(first)
        second = _before(a, place, int(order[via])) or first
    return one, rng.choice(second)


def _before(a: Arrays, place: Ints, i: int) -> list[int]:
    """The places, before its own, of those alive together with buffer i."""
    meets = (a.lower < a.upper[i]) & (a.upper > a.lower[i]) & (a.pinned == FREE)
    return sorted(place[meets & (place < place[i])].tolist())
