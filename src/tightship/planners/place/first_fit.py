"""Buffers as they come alive, each at the lowest offset that is free.

Problem: offsets for buffers with known live ranges. Minimised: the arena. Source: first fit, what a run-
time allocator without knowledge of the future does (Robson 1977). Guarantee: within O(log n) of the lower
bound (Kierstead). Complexity: O(n log n) set operations in practice. Known limits: short-lived buffers end
up between long-lived ones (fragmentation).
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.plan import Problem, Solution
from tightship.planners.place.orders import by_start
from tightship.planners.place.problem import FREE, frame

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    order, pinned = by_start(f.arrays), (f.arrays.pinned != FREE).any()
    if pinned or f.related:
        offsets, _ = f.placer.pack(order, best_fit=False)
    else:
        offsets, _ = f.placer.sweep(order)
    return f.solution(offsets, "first-fit")
