"""Verify a plan: every rule it breaks, by name.

The verifier replays a plan by its own means and shares no code with planners or the simulator. Work is
near-linear in steps and residences.

=======================  ================================================================================
unknown                  an index, kind, form or stream that does not exist; a plan for another graph
missing-op, repeated-op  every op of the graph is computed exactly once
order                    control edges, and the order of random ops among themselves
hazard                   ops on one storage run out of order: one would see too few or too many writes
use-before-definition    an op uses a storage, or a view of one, before the op that makes it
not-resident             an op or a copy uses a form that is not there
already-resident         a step makes a form that is there already
stale                    restored contents are not those wanted (a later write is missing, or is in)
impure-recompute         recomputing what is random and has no saved state, has effects, writes the caller's bytes, or
                         never ran
codec                    a packed form that no codec makes of these values, of another size, before the last write, or
                         lossy where the plan allows no loss
reuse                    a result takes the place of what its op may not overwrite, or of what is the caller's or not
                         there; or it does not lie exactly there
foreign-free             freeing what is the caller's or is not there
lost-output, leak        when the plan ends, results are there in their last version, and nothing else is
lane                     a step on another stream may still be using the bytes: a wait is missing
missing-residence        a stay that the steps imply has no place
wrong-residence          a residence that is no stay, or has another end, size, pool or event
overlap                  two residences use the same bytes at the same time
misaligned               an offset that is no multiple of what the graph's device asks for
out-of-bounds            bytes before or beyond the arena, or the plan's bytes of the host pool
over-budget              the plan has a budget, and its peak or the bytes it places are over it; likewise on the host
peak-mismatch            ``peak``, ``peak_before``, ``static``, ``arena``, ``handed`` or ``host`` is not what steps
                         and residences give
time-mismatch            ``time`` is not what the steps take, or ``time_before`` not what the ops take once each
count-mismatch           ``moved`` is no number of the graph's ops
inner                    what an op runs inside itself needs more than the op's workspace
bound                    the claimed bound of the peak, or of the time, is above it, so it is none
=======================  ================================================================================

A plan without any residence is a decision only and is checked without placement. Plans of what ops run inside
themselves (``Plan.inner``) are checked like any other; their violations name the op.
"""

from __future__ import annotations

from dataclasses import replace

from tightship.errors import VerificationFailed
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.verify.facts import Facts, Ledger, facts_of, unplanned_need
from tightship.verify.lanes import Clocks
from tightship.verify.residences import check_residences
from tightship.verify.steps import Replay
from tightship.verify.times import agree, elapsed
from tightship.violation import Violation

__all__ = ["CODES", "check", "verify"]

_DEEPEST = 100
"""Plans lie in one another no deeper."""

_ROUNDING = 1e-6
"""The share of a time by which a bound of it, found by a solver, may be above it."""

CODES = (
    "unknown",
    "missing-op",
    "repeated-op",
    "order",
    "hazard",
    "use-before-definition",
    "not-resident",
    "already-resident",
    "stale",
    "impure-recompute",
    "codec",
    "reuse",
    "foreign-free",
    "lost-output",
    "leak",
    "lane",
    "missing-residence",
    "wrong-residence",
    "overlap",
    "misaligned",
    "out-of-bounds",
    "over-budget",
    "peak-mismatch",
    "time-mismatch",
    "count-mismatch",
    "inner",
    "bound",
)


def verify(graph: Graph, plan: Plan) -> list[Violation]:
    """Everything wrong with ``plan`` as a plan for ``graph``; of one code, at most ``ledger.PER_CODE`` (in each plan
    inside it, too)."""
    return _verify(graph, plan, 0)


def _verify(graph: Graph, plan: Plan, depth: int) -> list[Violation]:
    ledger = Ledger()
    if plan.digest != graph.digest:
        ledger.add("unknown", -1, (graph.name,), f"the plan was made for another graph than {graph.name!r}")
    facts = facts_of(graph)
    clocks = Clocks(plan.steps)
    replay = Replay(graph, facts, plan.steps, clocks, ledger, plan.lossy)
    replay.run()
    _totals(graph, plan, facts, replay, ledger)
    if plan.residences:
        check_residences(graph, facts, plan, replay, clocks, ledger)
    else:
        _nothing_placed(plan, replay, ledger)
    return ledger.found + _inner(graph, plan, depth)


def _inner(graph: Graph, plan: Plan, depth: int) -> list[Violation]:
    if plan.inner and depth >= _DEEPEST:
        return [Violation("inner", -1, (graph.name,), f"plans lie at most {_DEEPEST} deep in one another")]
    found: list[Violation] = []
    need: dict[int, int] = {}
    for row in plan.inner:
        if not 0 <= row.op < len(graph.ops):
            found.append(Violation("unknown", -1, (str(row.op),), f"there is no op {row.op} to run a graph"))
            continue
        name = graph.ops[row.op].name
        for v in _verify(row.graph, row.plan, depth + 1):
            found.append(replace(v, message=f"inside {name}: {v.message}"))
        need[row.op] = need.get(row.op, 0) + max(0, row.plan.peak - row.plan.static)
    for k, nbytes in need.items():
        op = graph.ops[k]
        if nbytes > op.workspace:
            message = (
                f"what {op.name} runs inside itself needs {nbytes} bytes, its workspace has {op.workspace}"
            )
            found.append(Violation("inner", -1, (op.name,), message))
    return found


def check(graph: Graph, plan: Plan) -> None:
    """Raise ``VerificationFailed`` if anything is wrong."""
    found = verify(graph, plan)
    if found:
        raise VerificationFailed(found, place=f"{plan.planner or 'plan'} for {graph.name!r}")


def _totals(graph: Graph, plan: Plan, facts: Facts, replay: Replay, ledger: Ledger) -> None:
    peak = replay.peak
    if plan.peak != peak:
        message = f"the plan says its peak is {plan.peak} bytes, its steps reach {peak}"
        ledger.add("peak-mismatch", -1, ("peak",), message)
    before = facts.static_bytes + unplanned_need(graph, facts)
    if plan.peak_before != before:
        message = f"the plan says the unplanned peak is {plan.peak_before} bytes, the graph's own order has {before}"
        ledger.add("peak-mismatch", -1, ("peak_before",), message)
    if plan.static != facts.static_bytes:
        message = f"the plan says {plan.static} bytes are static, the graph has {facts.static_bytes}"
        ledger.add("peak-mismatch", -1, ("static",), message)
    if plan.lower_bound > peak:
        message = f"a lower bound of {plan.lower_bound} bytes is above the peak of {peak}"
        ledger.add("bound", -1, (graph.name,), message)
    outside = max(plan.host, replay.host_peak)
    if plan.host_budget is not None and outside > plan.host_budget:
        message = f"the host budget is {plan.host_budget} bytes; {outside} are needed there"
        ledger.add("over-budget", -1, (graph.name,), message)
    _times(graph, plan, ledger)
    if not 0 <= plan.moved <= len(graph.ops):
        message = f"the plan says it moves {plan.moved} of {len(graph.ops)} ops"
        ledger.add("count-mismatch", -1, ("moved",), message)
    placed = facts.static_bytes + plan.arena + plan.handed
    if plan.budget is not None and max(peak, placed) > plan.budget:
        message = f"the budget is {plan.budget} bytes; the peak is {peak}, all that is placed {placed}"
        ledger.add("over-budget", -1, (graph.name,), message)


def _times(graph: Graph, plan: Plan, ledger: Ledger) -> None:
    took, once = elapsed(graph, plan.steps), sum(op.time for op in graph.ops)
    if not agree(plan.time, took):
        message = f"the plan says it takes {plan.time} s, its steps take {took} s"
        ledger.add("time-mismatch", -1, ("time",), message)
    if not agree(plan.time_before, once):
        message = f"the plan says the unplanned time is {plan.time_before} s, the ops take {once} s"
        ledger.add("time-mismatch", -1, ("time_before",), message)
    if not plan.time_bound <= took * (1 + _ROUNDING):
        message = f"a time bound of {plan.time_bound} s is above the time of {took} s"
        ledger.add("bound", -1, (graph.name,), message)


def _nothing_placed(plan: Plan, replay: Replay, ledger: Ledger) -> None:
    """Without residences there are no bytes that they span; on the host, those in use may be said instead."""
    for name in ("arena", "handed", "host"):
        nbytes = getattr(plan, name)
        if nbytes and not (name == "host" and nbytes == replay.host_peak):
            message = f"the plan says {nbytes} bytes of {name}, and has no residences"
            ledger.add("peak-mismatch", -1, (name,), message)
