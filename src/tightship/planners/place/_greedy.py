"""The greedy packings that come before any search: twenty orders, most of them given up early."""

from __future__ import annotations

from tightship.planners.place import _orders as orders
from tightship.planners.place import hill_climb, peak_first, skyline, xla_heap
from tightship.planners.place._best import Best

__all__ = ["GREEDY", "Packing", "best_greedy"]

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
    *xla_heap.GREEDY,
    *skyline.GREEDY,
)
"""Those that usually win first."""

MOST_PLACED = 3_000_000
"""Packings are tried until so many buffers are placed: all up to 200,000 buffers, three of a million."""

MOST_SKYLINE = 20_000
"""Buffers; for more, the skyline planner alone takes the time that it needs."""

LEAST_TIME = 0.02
"""Seconds for the first packing, whatever the limit: it is so much better than none."""


def best_greedy(best: Best, enough: int, time_limit: float | None) -> Packing:
    """Improves the best, and returns how it was packed. Ends at an arena of ``enough`` bytes, and by the time."""
    f, how = best.frame, GREEDY[0]
    for k, (order, best_fit) in enumerate(GREEDY):
        over = best.arena <= enough or k * f.arrays.count >= MOST_PLACED or f.seconds_left(time_limit) <= 0
        if k and over:
            break
        if (order, best_fit) in skyline.GREEDY and f.arrays.count > MOST_SKYLINE:
            continue
        by = order(f.arrays)  # takes a part of the time
        left = max(f.seconds_left(time_limit), 0.0 if k else LEAST_TIME)
        offsets, arena = f.placer.pack(by, best_fit=best_fit, cutoff=best.cutoff, seconds=left)
        if best.offer(offsets, int(arena)):
            how = order, best_fit
    return how
