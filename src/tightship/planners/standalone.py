"""One eviction planner by itself, with options of its own: the graph's own order, its decision, a place for all."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import PlannerInfo
from tightship.planners.default import Options, adopted
from tightship.planners.evict.problem import MEANS, Decision, Frame
from tightship.simulate import baseline, replay
from tightship.units import Budget, resolve_budget

__all__ = ["alone"]


def alone(graph: Graph, info: PlannerInfo, chosen: Any, budget: Budget | str | int | None = None) -> Plan:
    """The verified plan of what ``info`` decides for ``budget``; without one it does all that it would do for no
    memory at all. The plan says whether it meets the budget; ``meta`` has the planner's options by its name.

    Raises ``Unsupported`` where the planner's decision cannot be carried out on this graph."""
    began = time.perf_counter()
    peak = replay(graph, baseline(graph)).peak
    limit = resolve_budget(budget, peak, static=graph.static_bytes)
    lossy = bool(getattr(chosen, "lossy", False))
    frame = Frame(graph, tuple(range(len(graph.ops))), lossy=lossy)
    decision: Decision = info.plan(frame, limit or 0, chosen)
    steps = frame.lower(decision, graph.static_bytes if limit is None else limit, tuple(MEANS))
    means = tuple(
        dict.fromkeys(("recompute", *(s.kind for s in steps if s.kind in MEANS)))
    )  # what bounds allow
    whole = any(op.phase == "update" for op in graph.ops)  # the results of a whole step leave the arena
    made = adopted(replace(frame, means=means), steps, Options(lossy=lossy, hand_out=whole), info.name)
    return replace(
        made,
        budget=limit,
        lossy=lossy,
        meta=made.meta | {info.name: asdict(chosen)},
        seconds=time.perf_counter() - began,
    )
