"""The greedy packings that come before any search: fifteen orders, most of them given up early."""

from __future__ import annotations

import time

from tightship.planners.place import _orders as orders
from tightship.planners.place import hill_climb, peak_first
from tightship.planners.place._frame import Frame, Ints

__all__ = ["GREEDY", "Packing", "best_greedy", "pack"]

Packing = tuple[orders.Order, bool]
"""An order, and whether each buffer goes into the smallest hole that fits (True) or into the first."""

GREEDY: tuple[Packing, ...] = (
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
"""Those that usually win first."""

NO_CUTOFF = 2**63 - 1


def best_greedy(f: Frame, enough: int, time_limit: float | None) -> tuple[Ints, Packing]:
    """The best offsets, the first of equals, and how they were packed. Ends at an arena of ``enough`` bytes, and
    when the time left is less than the slowest packing took: a packing is not interrupted."""
    best, arena, how = *pack(f, GREEDY[0]), GREEDY[0]
    slowest = time.perf_counter() - f.began
    for greedy in GREEDY[1:]:
        if arena <= enough or f.seconds_left(time_limit) <= slowest:
            break
        began = time.perf_counter()
        attempt, reached = pack(f, greedy, cutoff=arena)
        slowest = max(slowest, time.perf_counter() - began)
        if reached < arena:
            best, arena, how = attempt, reached, greedy
    return best, how


def pack(f: Frame, greedy: Packing, cutoff: int = NO_CUTOFF) -> tuple[Ints, int]:
    """Offsets and arena; given up, with an arena beyond all, where it would be ``cutoff`` or more."""
    order, best_fit = greedy
    offsets, arena = f.placer.pack(order(f.arrays), best_fit=best_fit, cutoff=cutoff)
    return offsets, int(arena)
