"""The default planner's decisions without its placement: for plans that run on the ordinary heap."""

from __future__ import annotations

import time

from tightship.analysis.bounds import lower_bound
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import default
from tightship.planners.evict._frame import Frame
from tightship.simulate import baseline, replay
from tightship.verify import check

__all__ = ["plan_on_heap"]


def plan_on_heap(graph: Graph, limit: int | None, options: default.Options) -> Plan:
    """A verified plan whose peak is within ``limit`` bytes; where anything lies is the allocator's business.

    Raises ``Infeasible`` as the default planner does.
    """
    began = time.perf_counter()
    before = replay(graph, baseline(graph))
    order = default.order_of(graph, options, before.peak)
    frame = Frame(graph, order)
    bound = int(lower_bound(graph))
    decision = default._evict(frame, before.peak if limit is None else limit, options, None)
    steps = decision.steps or frame.steps(decision.evict)
    line = replay(graph, steps)
    if limit is not None and not decision.met:
        raise default._infeasible(graph, limit, bound, line, steps)
    made = Plan(
        digest=graph.digest,
        steps=tuple(steps),
        budget=limit,
        peak=line.peak,
        peak_before=before.peak,
        static=graph.static_bytes,
        lower_bound=bound,
        time=line.time,
        time_before=before.time,
        planner=f"{options.order}+{options.evict}",
        seconds=time.perf_counter() - began,
        moved=default._moved(order),
    )
    check(graph, made)
    return made
