"""What is alive at the peak first, as one stack without a hole, then the others where they fit.

Problem: offsets for buffers with known live ranges. Minimised: the arena. Source: ours. In a training step
the buffers alive at the peak are mostly saved activations, last made first freed: stacked with the last to
die at the bottom, what they free after the peak is one growing hole (and so, before the peak, with the
first to live at the bottom). Guarantee: no hole at the peak; none for the arena. Complexity: a greedy
packing for each of five orders. Known limits: on problems without one marked peak no better than any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tightship.plan import Problem, Solution
from tightship.planners.place import orders
from tightship.planners.place.problem import frame

__all__ = ["Options", "plan"]

GREEDY: tuple[tuple[orders.Order, bool], ...] = tuple(
    (partial(orders.peak_first, stack=stack, rest=rest), best_fit)
    for stack, rest, best_fit in (
        ("end", "area", True),
        ("start", "size", False),
        ("length", "size", False),
        ("size", "length", False),
        ("end", "length", False),
    )
)
"""Orders, each with best fit (True) or first fit."""


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    packings = (f.placer.pack(order(f.arrays), best_fit=best_fit)[0] for order, best_fit in GREEDY)
    return f.solution(min(packings, key=f.arena), "peak-first")
