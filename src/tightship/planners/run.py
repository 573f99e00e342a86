"""How planners of orders and evictions are called: one signature per group, and every answer is verified.

An author of a planner verifies nothing: what `order` and `evict` give back has passed ``tightship.verify``, or
``VerificationFailed`` names the planner. (`planners.packing.pack` does the same for planners of places.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from tightship.analysis.order import is_legal
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.options import NEVER, Deadline
from tightship.plan import Plan, Problem, Solution, Step
from tightship.planners import PlannerInfo, planner
from tightship.planners.evict.lowering import drop_dead_copies, drop_dead_runs, save_random_states
from tightship.planners.evict.problem import Decision, EvictionProblem, Progress
from tightship.simulate import Timeline, baseline, replay, unplanned
from tightship.verify import check

__all__ = ["EvictPlanner", "Evicted", "OrderPlanner", "PlacePlanner", "decision_plan", "evict", "order"]


class OrderPlanner(Protocol):
    """``plan`` of a planner in ``order/``: a legal order of the graph's ops."""

    def __call__(self, graph: Graph, options: Any = None) -> tuple[int, ...]: ...


class EvictPlanner(Protocol):
    """``plan`` of a planner in ``evict/``: what leaves memory so that the peak is within ``budget`` bytes, the static
    set included, or the least peak reached."""

    def __call__(
        self, problem: EvictionProblem, budget: int, options: Any = None, progress: Progress | None = None
    ) -> Decision: ...


class PlacePlanner(Protocol):
    """``plan`` of a planner in ``place/``: an offset for every buffer."""

    def __call__(self, problem: Problem, options: Any = None) -> Solution: ...


@dataclass(frozen=True, slots=True)
class Evicted:
    """What a planner decided, the verified steps that carry it out, and what they cost."""

    decision: Decision
    steps: tuple[Step, ...]
    timeline: Timeline


def order(name: str, graph: Graph, deadline: Deadline = NEVER, enough: int | None = None) -> tuple[int, ...]:
    """The order of the planner called ``name``, verified. At the ``deadline``, the best found so far, where the
    planner's options have ``seconds``; ``enough``: bytes for which any order within them does, where they have it."""
    info = planner(name, "order")
    call: OrderPlanner = info.plan
    known = {"seconds": None if deadline is NEVER else deadline.left, "enough": enough}
    given = {f.name: known[f.name] for f in fields(info.options) if known.get(f.name) is not None}
    found = call(graph, info.options(**given)) if given else call(graph)
    if not is_legal(graph, found):  # the verifier says what is wrong
        _verified(graph, baseline(graph, found), name)
    return found


def evict(
    info: PlannerInfo,
    problem: EvictionProblem,
    budget: int,
    options: Any = None,
    progress: Progress | None = None,
    *,
    graph: Graph | None = None,
    means: Collection[str] | None = None,
    or_keep: bool = False,
    verify: bool = True,
) -> Evicted:
    """What the planner ``info`` decides for ``budget``, lowered and verified (without ``verify`` replayed: whoever
    makes a plan of the steps has that verified).

    ``graph``: the one with random ops, where the problem's takes them for pure ones; ``means`` as for
    `EvictionProblem.lower`; ``or_keep``: keep everything where the decision cannot be carried out, which otherwise
    raises ``Unsupported``."""
    call: EvictPlanner = info.plan
    decision = call(problem, budget, options, progress)
    if or_keep and not decision.valid:
        decision = problem.cost(problem.nothing(), budget)
    graph = graph or problem.graph
    steps = drop_dead_copies(problem.lower(decision, budget, means))
    if problem.deep:  # lets results go
        steps = drop_dead_runs(graph, steps, problem.chained)
    steps = save_random_states(graph, steps)
    return Evicted(decision, steps, _verified(graph, steps, info.name, lossy=problem.lossy, verify=verify))


def _verified(
    graph: Graph, steps: tuple[Step, ...], planner: str, *, lossy: bool = False, verify: bool = True
) -> Timeline:
    """What the steps cost. Raises ``VerificationFailed`` with all that is wrong with them."""
    try:
        line = replay(graph, steps)
    except BadInput:  # the replay says what is wrong first, the verifier everything, and whose plan it is
        check(graph, Plan(graph.digest, steps, planner=planner))
        raise
    if verify:
        check(graph, decision_plan(graph, steps, line, planner, lossy=lossy))
    return line


def decision_plan(
    graph: Graph, steps: Sequence[Step], line: Timeline, planner: str = "", *, lossy: bool = False
) -> Plan:
    """The plan of some steps, with nothing placed."""
    before = unplanned(graph)
    return Plan(
        digest=graph.digest,
        steps=tuple(steps),
        peak=line.peak,
        peak_before=before.peak,
        static=graph.static_bytes,
        time=line.time,
        time_before=before.time,
        lossy=lossy,
        planner=planner,
    )
