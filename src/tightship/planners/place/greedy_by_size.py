"""Largest buffer first, each into the smallest hole that fits.

Problem: offsets for buffers with known live ranges. Minimised: the arena. Source: greedy by size with best
fit, as in TensorFlow Lite and AITemplate (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural
Net Inference", 2020). Guarantee: none better than the sum of sizes; in practice within a few per cent of
the lower bound on neural networks. Complexity: O(n log n) set operations in practice, because bytes taken
are kept as joined spans per range of time. Known limits: a hole that a later, smaller buffer would need is
not kept free for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.plan import Problem, Solution
from tightship.planners.place.orders import by_size
from tightship.planners.place.problem import frame

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    offsets, _ = f.placer.pack(by_size(f.arrays), best_fit=True)
    return f.solution(offsets, "greedy-by-size")
