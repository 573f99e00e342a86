"""A skyline raised from the bottom: at its lowest stretch, a buffer that is alive within it.

Problem: offsets for buffers with known live ranges. Minimised: the arena. Source: Sekiyama, Imai, Negishi and
Raymond, "Profile-guided memory optimization for deep neural networks" (2018), after the best-fit skyline of Burke,
Kendall and Whitwell (2004): the lowest stretch takes the longest-lived buffer that fits into it; where none does,
it is raised to its lower neighbour. Two more rules: the largest (bytes times time), and the most snug (touching the
ends of the stretch). The best of the three, each buffer finally as low as it goes. Guarantee: none. Complexity: every
step looks at the buffers that fit into a stretch, quadratic at worst. Known limits: pins, alignments and gaps are
honoured, but not looked at when the order is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tightship.plan import Problem, Solution
from tightship.planners.place import orders
from tightship.planners.place.problem import frame

__all__ = ["GREEDY", "Options", "plan"]

GREEDY: tuple[tuple[orders.Order, bool], ...] = tuple(
    (partial(orders.skyline, rule=rule), False) for rule in orders.SKIES
)


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    packings = [f.placer.pack(order(f.arrays), best_fit=best_fit) for order, best_fit in GREEDY]
    return f.solution(min(packings, key=lambda p: p[1])[0], "skyline")
