"""The largest batch whose step fits a budget: bisection over graphs of one step at different batch sizes.

Problem: the largest size of the batch for which a plan meets the budget. Measure: as of the default planner.
Guarantee: the answer comes with its verified plan; the next larger size tried had none that was found. Complexity: a
capture and a plan for each size tried, about a dozen. Known limits: takes the least memory to grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tightship.errors import BadInput, Infeasible
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import default
from tightship.units import Budget, parse_budget

__all__ = ["LARGEST", "MaxBatch", "max_batch"]

LARGEST = 1 << 20
_CLOSE = 64
"""Sizes above this are found to within one part in so many."""


@dataclass(frozen=True)
class MaxBatch:
    """``batch`` is the largest size found, ``plan`` fits its ``graph``; ``tried`` says of each size whether there was
    a plan (True) or not."""

    batch: int
    plan: Plan
    graph: Graph
    tried: dict[int, bool] = field(default_factory=dict)


def max_batch(
    graph_of: Callable[[int], Graph],
    budget: Budget | str | int,
    options: default.Options | None = None,
    *,
    start: int = 1,
    say: Callable[[str], None] | None = None,
) -> MaxBatch:
    """The largest batch that fits ``budget`` bytes. ``graph_of(n)`` is the step at batch size ``n``, ``start`` the
    size to begin with.

    Raises ``Infeasible`` if not even a batch of 1 fits, ``BadInput`` for a budget that is a percentage.
    """
    limit = parse_budget(budget)
    if limit.bytes is None:
        raise BadInput("the budget for the largest batch is a number of bytes", str(limit), "budget")
    found: dict[int, tuple[Graph, Plan] | Infeasible] = {}

    def fits(n: int) -> bool:
        if n not in found:
            if say is not None:
                say(f"a batch of {n}")
            graph = graph_of(n)
            try:
                found[n] = graph, default.plan(graph, limit, options)
            except Infeasible as no:
                found[n] = no
        return not isinstance(found[n], Infeasible)

    low, high = 0, max(1, start)
    while high < LARGEST and fits(high):
        low, high = high, min(2 * high, LARGEST)
    while high - low > max(1, low // _CLOSE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    best = found[max(low, 1)]
    if isinstance(best, Infeasible):
        raise best
    return MaxBatch(
        low, best[1], best[0], {n: not isinstance(f, Infeasible) for n, f in sorted(found.items())}
    )
