"""Buffers alive at the broadest time first, each into the smallest hole that fits.

Problem: offsets for buffers with known live ranges. Minimised: the arena. Source: TensorFlow Lite's greedy
by breadth (Pisarchyk and Lee 2020): operations by the bytes alive at them, the buffers of each by size.
Guarantee: the broadest time is packed without a hole; none for the arena. Complexity: O(n log n) set
operations in practice. Known limits: what lies at the broadest time is stacked by size alone, whatever its
live range.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.plan import Problem, Solution
from tightship.planners.place.orders import by_breadth
from tightship.planners.place.problem import frame

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    offsets, _ = f.placer.pack(by_breadth(f.arrays), best_fit=True)
    return f.solution(offsets, "by-breadth")
