"""Plans that run on the ordinary heap, where an arena needs more than the budget or costs more time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tightship.errors import Infeasible
from tightship.execute.script import device_of
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import default

__all__ = ["ONLY_ON_HEAP", "faster_on_heap", "on_cpu", "plan_on_heap"]

ONLY_ON_HEAP = "an arena does not fit the budget, the peak does: the plan runs on the ordinary heap"

_SLOWER, _HANDED = 0.01, 100
"""By what part of the unplanned time a plan with an arena may be slower than one on the heap, and what part of the
budget results outside are at least, as its inverse, where that is looked at."""


def plan_on_heap(graph: Graph, budget: int | None, options: default.Options) -> Plan:
    """Where only the peak is within a budget, and what an arena needs is not."""
    plan = default.plan(graph, budget, replace(options, place=False))
    return replace(plan, notes=(*plan.notes, ONLY_ON_HEAP))


def on_cpu(graph: Graph) -> bool:
    return device_of(graph) in (None, "cpu")


def faster_on_heap(graph: Graph, limit: int, plan: Plan, on_heap: Callable[[], Plan]) -> Plan:
    """A ``plan`` with an arena, or, where that takes less time, the one ``on_heap``: an arena keeps what it spans
    while results lie beside it, all gradients at last. On the CPU alone: PyTorch's own allocators need more than is
    in use."""
    least = _SLOWER * plan.time_before
    plain = all(s.kind in ("compute", "recompute", "free") for s in plan.steps)
    large = plan.arena and plan.handed * _HANDED >= limit
    if not (plain and large and on_cpu(graph)) or plan.time <= plan.time_bound + least:
        return plan
    try:
        heap = on_heap()
    except Infeasible:  # without places, no result lies where an input of its op lay
        return plan
    if heap.time > plan.time - least:
        return plan
    slower, now = (100 * (p.time / p.time_before - 1) for p in (plan, heap))
    note = f"with an arena it would take {slower:+.1f} % time, not {now:+.1f} %: it runs on the ordinary heap"
    return replace(heap, notes=(*heap.notes, note))
