"""Buffers with the most conflicts first, each into the smallest hole that fits.

Problem: offsets for buffers with known live ranges. Minimised: the arena. Source: TVM's and the ARM Ethos-U
compilers' greedy by conflicts. Guarantee: none. Complexity: O(n log n) set operations in practice. Known
limits: sizes only break ties, so a large short-lived buffer comes late and finds no hole.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.plan import Problem, Solution
from tightship.planners.place.orders import by_conflicts
from tightship.planners.place.problem import frame

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    offsets, _ = f.placer.pack(by_conflicts(f.arrays), best_fit=True)
    return f.solution(offsets, "by-conflicts")
