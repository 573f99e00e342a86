"""The greedy packings that come before any search: twenty orders, most of them given up early.

Of very many buffers the first answer is a sweep through time, as an allocator at run time would go: a tenth of the
time of the others, so that there is one worth having when time is short.
"""

from __future__ import annotations

import numpy as np

from tightship import _core
from tightship.baselines import xla_heap
from tightship.planners.place import hill_climb, orders, peak_first, skyline
from tightship.planners.place.best_of import Best
from tightship.planners.place.problem import FREE

__all__ = ["GREEDY", "MANY", "Packing", "best_greedy"]

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

SOME, MANY = 1_000, 20_000
"""Buffers beyond which there is a sweep first, and the skyline is left to its own planner."""

MANY_GREEDY: tuple[Packing, ...] = (
    (orders.by_size_then_start, False),
    *(p for p in GREEDY if p not in skyline.GREEDY and p != (orders.by_size_then_start, False)),
)
"""For many: first the one that goes through memory in order of time where sizes are equal, so that it is fast."""

MOST_PLACED = 2_000_000
"""Packings are tried until so many buffers are placed: all up to a hundred thousand buffers, two of a million."""

LEAST_TIME = 0.02
"""Seconds for the first packing, whatever the limit: it is so much better than none."""

ORDER_TIME = 2e-6
"""Seconds, for each buffer, that are left to begin with another order: making one is not ended by the time."""


def best_greedy(best: Best, enough: int, time_limit: float | None) -> Packing:
    """Improves the best, and returns how it was packed. Ends at an arena of ``enough`` bytes, and by the time."""
    f, count = best.frame, best.frame.arrays.count
    packings, needed = (MANY_GREEDY, ORDER_TIME * count) if count > MANY else (GREEDY, 0.0)
    how = packings[0]
    if count > SOME:
        _sweep(best)
    for k, (order, best_fit) in enumerate(packings):
        over = k * count >= MOST_PLACED or f.seconds_left(time_limit) <= needed
        if not best.first and (best.arena <= enough or over):
            break
        by = order(f.arrays)  # takes a part of the time
        left = max(f.seconds_left(time_limit), LEAST_TIME if best.first else 0.0)
        offsets, arena = f.placer.pack(by, best_fit=best_fit, cutoff=best.cutoff, seconds=left)
        if best.offer(offsets, int(arena)):
            how = order, best_fit
    return how


def _sweep(best: Best) -> None:
    """A first packing, of buffers alive in their whole live ranges; whatever the time limit. None where there may be
    conflicts beside these."""
    f, a = best.frame, best.frame.arrays
    if (a.pinned == FREE).all() and (not f.related or f.placer.by_time):
        placer = _core.Placer(a.lower, a.upper, a.size, a.alignment, a.pinned) if f.related else f.placer
        offsets, _ = placer.sweep(orders.by_start(a))
        best.offer(np.asarray(offsets), f.arena(offsets))
