"""Order, eviction and placement composed into one verified plan; what `tightship plan` uses.

Problem: the fastest plan whose peak, and whose arena, fit the budget. Measure: seconds, bytes. Source: the parts
named in ``Options``. Guarantee: the plan is verified; peak and static set plus arena are within the budget, or
``Infeasible`` is raised with the least peak reached; of graphs of few ops it is the best there is. Complexity: that
of the parts. Known limits: decides order first, evictions second, offsets last; when offsets do not fit, evictions
are searched again under a lower budget, and in some other orders.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from tightship.analysis.moments import peak_of
from tightship.errors import BadInput
from tightship.garbage import garbage_waits
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.planners import PlannerInfo, floor, run
from tightship.planners.clock import PREPARED, Clock
from tightship.planners.default_options import (
    EXACT,
    ROUNDING,
    STREAM,
    Options,
    PlanOptions,
    allows_stream,
    divide_allow,
    least_time,
    order_of,
    problem_of,
    read_options,
    seconds_left,
    without_split,
)
from tightship.planners.evict.problem import MEANS, EvictionProblem, Progress
from tightship.planners.search import Search, displaced, top_of_peak
from tightship.simulate import replay, unplanned
from tightship.units import Budget, resolve_budget

__all__ = [
    "EXACT",
    "ROUNDING",
    "STREAM",
    "Interrupted",
    "Options",
    "PlanOptions",
    "allows_stream",
    "displaced",
    "divide_allow",
    "least_time",
    "order_of",
    "plan",
    "plan_alone",
    "plan_steps",
    "problem_of",
    "read_options",
    "seconds_left",
    "top_of_peak",
    "without_split",
]


class Interrupted(KeyboardInterrupt):
    """The search was ended by Ctrl-C; ``plan`` is the best it had found, verified."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


@garbage_waits()  # planning makes many objects, keeps most and makes few cycles
def plan(
    graph: Graph,
    budget: Budget | str | int | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    problem: EvictionProblem | None = None,
    like: Sequence[tuple[Graph, Plan]] = (),
    prove: bool = True,
) -> Plan:
    """A verified plan for ``budget`` (bytes, text with a unit, or a percentage of the unplanned peak; none:
    keep everything, in the better order). ``problem``: the graph in an order decided before, so that several budgets
    share what is found. ``like``: plans of other graphs, the latest first; the search begins with the order and the
    evictions of the first one that has the same ops, in whatever sizes, and ends as near to the bound on the time as
    that one is to its own. ``prove``: the bound that the search begins with is one of several moments, and a higher
    one is looked for where the plan that was found is far above it; without, of each moment alone, which is sooner
    there, and searches that end by ``gap`` may take longer.

    The bound on the time comes first; the search ends where no plan is faster by more than ``gap``, where more of it
    gains nothing, or at a limit: the plan's ``termination``.

    Raises ``Infeasible`` with budget, lower bound, least peak reached and what makes it up; after Ctrl-C
    ``Interrupted`` with the best plan so far, or ``KeyboardInterrupt`` where none fits yet; ``BadInput`` for a budget
    or a gap that is none.
    """
    o = options or Options()
    if not o.gap >= 0:
        raise BadInput("a gap is a part of the time, 0 or more", o.gap, "gap")
    clock = Clock(o.seconds)
    before = unplanned(graph)
    clock.replayed(before)
    budget = resolve_budget(budget, before.peak, static=graph.static_bytes)
    known = next((p for g, p in like if floor.same_ops(g, graph)), None) if problem is None else None
    far = o.gap
    if known is not None and peak_of(graph, floor.order_in(known)) <= before.peak:
        problem = problem_of(graph, floor.order_in(known), o)
        floor.seed(problem, known)
        if 0 < known.time_bound < math.inf:
            far = max(o.gap, known.time / known.time_bound - 1)
    elif problem is None:
        order = order_of(graph, o, before.peak, clock.search.part(PREPARED), budget)
        problem = problem_of(graph, order, o)
    search = Search(graph, problem, o, before, budget, clock.search.part(PREPARED), far, quick=not prove)
    found, layout = search.ahead(*search.fit(progress, clock), progress, clock)
    if prove:
        search.prove_more(found.timeline, clock)
    name = f"{o.order}+{o.evict}" + "+portfolio" * o.place
    ended = "interrupted" if search.interrupted else search.ended(found)
    made = replace(search.verified(found.steps, found.timeline, layout, name, clock.began), termination=ended)
    if search.interrupted:
        raise Interrupted(made)
    return made


def plan_steps(problem: EvictionProblem, steps: Sequence[Step], o: Options, planner: str) -> Plan:
    """A verified plan that does what ``steps`` say, placed; its budget is what it needs."""
    graph, began = problem.graph, time.perf_counter()
    line, placement = replay(graph, steps), floor.Placement(graph, o.place, o.hand_out, o.seed)
    layout = placement.layout(steps)
    budget = placement.needs(line, layout)
    search = Search(graph, problem, o, unplanned(graph), budget)
    return search.verified(steps, line, layout, planner, began)


def plan_alone(
    graph: Graph, info: PlannerInfo, options: Any, budget: Budget | str | int | None = None
) -> Plan:
    """The verified plan of one eviction planner by itself, in the graph's own order; without a budget it does all
    that it would do for no memory at all. The plan says whether it meets the budget; ``meta`` has ``options``.

    Raises ``Unsupported`` where the planner's decision cannot be carried out on this graph."""
    began = time.perf_counter()
    peak = unplanned(graph).peak
    budget = resolve_budget(budget, peak, static=graph.static_bytes)
    lossy = bool(getattr(options, "lossy", False))
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), lossy=lossy)
    steps = run.evict(info, problem, budget or 0, options, means=MEANS).steps
    used = dict.fromkeys(s.kind for s in steps if s.kind in MEANS)  # what the bounds allow for
    problem = replace(problem, means=tuple(dict.fromkeys(("recompute", *used))))
    whole = any(op.phase == "update" for op in graph.ops)  # the results of a whole step leave the arena
    made = plan_steps(problem, steps, Options(lossy=lossy, hand_out=whole), info.name)
    meta = made.meta | {info.name: asdict(options)}
    return replace(made, budget=budget, meta=meta, seconds=time.perf_counter() - began)
