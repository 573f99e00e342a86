"""The rules of a plan: one table of codes, sentences and checks, from which the verifier runs and the docs are made.

A new rule is a row here and, unless a check that is there finds it on its way, a function of the `Inspection`.

Times are replayed here, too, streams side by side, by the rules that `plan` states; wrong steps take no time, as what
is wrong with them is found elsewhere.

`sound` looks first, in the core and in a tenth of the time: at a plan of which nothing is wrong, no rule is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf
from typing import Any

import numpy as np

from tightship import _core
from tightship.errors import Rule, Violation
from tightship.graph import Graph, alignment_of, distinct
from tightship.machine import LOSSY
from tightship.plan import FORMS, Plan, Step
from tightship.verify.codecs import Codecs
from tightship.verify.facts import Ledger, extra_of, facts_of, unplanned_need
from tightship.verify.lanes import Clocks
from tightship.verify.placement import PLACEMENT_RULES
from tightship.verify.residences import check_residences
from tightship.verify.steps import COPIES, Inspection, Replay, has_effects

__all__ = [
    "PLACEMENT_RULES",
    "PLAN_RULES",
    "agree",
    "elapsed",
    "sound",
    "verify",
]


_CLOSE = 1e-9
"""Two ways of adding up the same seconds differ by less than this share of them."""


def agree(stated: float, counted: float) -> bool:
    """Whether two sums of the same seconds are the same, but for rounding; what is no number agrees with nothing."""
    return stated == counted or abs(stated - counted) <= _CLOSE * max(abs(stated), abs(counted)) < inf


def elapsed(graph: Graph, steps: Sequence[Step]) -> float:
    """Seconds until the last stream ends."""
    ended: list[float] = []
    clock = {0: 0.0}
    for i, step in enumerate(steps):
        took, lost = _seconds(graph, step)
        begins = clock.get(step.stream, 0.0)
        for w in step.waits:
            if 0 <= w < i:
                begins = max(begins, ended[w])
        beside = step.kind in COPIES and step.stream != 0
        if beside:  # stream 0 begins the copy, and loses time to it
            begins = max(begins, clock[0])
        ended.append(begins + took)
        clock[step.stream] = ended[-1]
        if beside:
            clock[0] += lost
    return max(clock.values())


def _seconds(graph: Graph, step: Step) -> tuple[float, float]:
    """What a step takes on its stream, and what its copies take from stream 0 if that is another one."""
    machine = graph.machine
    if step.kind in ("compute", "recompute"):
        if not 0 <= step.op < len(graph.ops):
            return 0.0, 0.0
        op = graph.ops[step.op]
        moves = 1 if step.saves else 0  # to set a state aside, set another and put the first back is three
        if step.kind == "recompute" and op.random:
            moves += 3
        return op.time + moves * machine.state, 0.0
    took = lost = 0.0
    if step.kind in COPIES:
        for s in step.storages:
            if 0 <= s < len(graph.storages):
                size = graph.storages[s].size
                took += machine.seconds(step.kind, size, step.codec)
                lost += machine.lost(size)
    return took, lost


_DEEPEST = 100
"""Plans lie in one another no deeper."""

_ROUNDING = 1e-6
"""The share of a time by which a bound of it, found by a solver, may be above it."""


def verify(graph: Graph, plan: Plan, depth: int = 0) -> list[Violation]:
    """Everything wrong with ``plan`` as a plan for ``graph``, itself inside of ``depth`` others; of one code, at most
    ``facts.PER_CODE`` (in each plan inside it, too)."""
    if sound(graph, plan):
        return []
    ledger, facts, clocks = Ledger(), facts_of(graph), Clocks(plan.steps)
    replay = Replay(graph, facts, plan.steps, clocks, ledger, plan.lossy)
    inspection = Inspection(graph, plan, facts, clocks, replay, ledger, depth)
    for check in dict.fromkeys(rule.check for rule in PLAN_RULES):
        check(inspection)
    return ledger.violations


def sound(graph: Graph, plan: Plan) -> bool:
    """Whether nothing is wrong with a plan, by the verifier's own replay in the core. False also where that does not
    know what the plan does (plans inside of it, pools of the planner's own): the rules are then asked."""
    if plan.inner or plan.digest != graph.digest:
        return False
    try:
        if any(s.stream and s.kind in ("compute", "recompute") for s in plan.steps):
            return False
        steps = _steps_as_columns(graph, plan)
        found = None if steps is None else _core.verified(_graph_as_columns(graph, steps), steps)
    except (TypeError, OverflowError, ValueError):  # numbers that are none, or beyond all bounds
        return False
    if found is None:
        return False
    peak, unplanned, static, handed, host, took = found
    once = sum(graph.columns.time.tolist())
    placed = static + plan.arena + handed
    return (
        (plan.peak, plan.peak_before, plan.static) == (peak, static + unplanned, static)
        and plan.handed == handed
        and (bool(plan.residences) or (not plan.arena and plan.host in (0, host)))
        and (plan.budget is None or max(peak, placed) <= plan.budget)
        and (plan.host_budget is None or max(plan.host, host) <= plan.host_budget)
        and agree(plan.time, took)
        and agree(plan.time_before, once)
        and plan.time_bound <= took * (1 + _ROUNDING)
        and plan.lower_bound <= peak
        and 0 <= plan.moved <= len(graph.ops)
    )


_KINDS = ("compute", "recompute", "free", "offload", "fetch", "compress", "decompress")
_POOLS = ("device", "host", "out")


def _steps_as_columns(graph: Graph, plan: Plan) -> dict[str, Any] | None:
    """Steps and residences; None for what the core's replay does not know, and for what cannot be packed."""
    steps, rows = plan.steps, plan.residences
    kind, form = _core.codes(steps, "kind", _KINDS), _core.codes(steps, "form", FORMS)
    pool, shape = _core.codes(rows, "pool", _POOLS), _core.codes(rows, "form", FORMS)
    form[kind != _KINDS.index("free")] = 0  # of no other step does it say anything
    if any((column == _UNKNOWN).any() for column in (kind, form, pool, shape)):
        return None
    copies = np.flatnonzero(kind > _KINDS.index("free")).tolist()
    if not _packable(graph, plan, [steps[i] for i in copies if steps[i].kind == "compress"]):
        return None
    seconds, lost = np.zeros(len(kind)), np.zeros(len(kind))
    lossy = np.zeros(len(kind), dtype=np.uint8)
    for i in copies:
        seconds[i], lost[i] = _seconds(graph, steps[i])
        lossy[i] = steps[i].codec in LOSSY
    names = ("storage", "start", "end", "size", "offset", "request", "first", "last")
    return {
        "kind": kind, "form": form, "seconds": seconds, "lost": lost, "lossy": lossy, "pool": pool, "shape": shape,
        "saves": _core.flags(steps, "saves"), "arena": plan.arena, "host": plan.host,
        **{name: _core.integers(steps, name) for name in ("op", "nbytes", "stream")},
        **{name: _core.rows(steps, name) for name in ("storages", "waits", "reuses")},
        **{name: _core.integers(rows, name) for name in names},
    }  # fmt: skip


_UNKNOWN = 255


def _packable(graph: Graph, plan: Plan, steps: Sequence[Step]) -> bool:
    """Whether each storage that is packed can be packed so, once it has been written for the last time."""
    if not steps:
        return True
    codecs, count = Codecs(graph, facts_of(graph)), len(graph.storages)
    wanted = {(s, step.codec, step.nbytes) for step in steps for s in step.storages}
    return all(0 <= s < count and not codecs.fault(s, codec, n, plan.lossy) for s, codec, n in wanted)


def _graph_as_columns(graph: Graph, steps: dict[str, Any]) -> dict[str, Any]:
    """``effect``: of ops that run again, also by their names."""
    columns, inner = graph.columns, dict[int, int]()
    effect, extra = columns.effect.copy(), columns.workspace.copy()
    again = distinct(steps["op"][steps["kind"] == 1])
    for k in again[(again >= 0) & (again < len(graph.ops))].tolist():
        effect[k] |= has_effects(graph.ops[k].target)
    for k in np.flatnonzero(_core.lengths(graph.ops, "calls")).tolist():
        extra[k] = extra_of(graph.ops[k], inner)
    devices = {op.device for op in graph.ops}
    known = {f.name: getattr(columns, f.name) for f in fields(columns)}
    alignment = max(map(alignment_of, devices), default=alignment_of("cpu"))
    more = {"effect": effect, "extra": extra, "alignment": alignment, "move": float(graph.machine.state)}
    return known | more


def _identity(i: Inspection) -> None:
    if i.plan.digest != i.graph.digest:
        i.note("unknown", i.graph.name, f"the plan was made for another graph than {i.graph.name!r}")


def _steps(i: Inspection) -> None:
    i.replay.run()


def _peaks(i: Inspection) -> None:
    plan = i.plan
    before = i.facts.static_bytes + unplanned_need(i.graph, i.facts)
    for name, counted, where in (
        ("peak", i.replay.peak, "its steps reach"),
        ("peak_before", before, "the graph's own order has"),
        ("static", i.facts.static_bytes, "the graph's inputs have"),
    ):
        if (stated := getattr(plan, name)) != counted:
            i.note("peak-mismatch", name, f"the plan states {stated} bytes as {name}, {where} {counted}")


def _budgets(i: Inspection) -> None:
    graph, plan = i.graph, i.plan
    outside = max(plan.host, i.replay.host_peak)
    if plan.host_budget is not None and outside > plan.host_budget:
        message = f"{outside} bytes are needed on the host, its budget is {plan.host_budget}"
        i.note("over-budget", graph.name, message)
    placed = i.facts.static_bytes + plan.arena + plan.handed
    if plan.budget is not None and max(i.replay.peak, placed) > plan.budget:
        message = (
            f"the peak is {i.replay.peak} bytes, all that is placed {placed}; the budget is {plan.budget}"
        )
        i.note("over-budget", graph.name, message)


def _times(i: Inspection) -> None:
    plan = i.plan
    took, once = elapsed(i.graph, plan.steps), sum(op.time for op in i.graph.ops)
    if not agree(plan.time, took):
        i.note("time-mismatch", "time", f"the plan states {plan.time} s as its time, its steps take {took} s")
    if not agree(plan.time_before, once):
        message = f"the plan states {plan.time_before} s as the unplanned time, the ops take {once} s"
        i.note("time-mismatch", "time_before", message)
    if not plan.time_bound <= took * (1 + _ROUNDING):
        message = f"the time bound of {plan.time_bound} s is above the time of {took} s"
        i.note("bound", i.graph.name, message)


def _bound(i: Inspection) -> None:
    if i.plan.lower_bound > i.replay.peak:
        message = f"the lower bound of {i.plan.lower_bound} bytes is above the peak of {i.replay.peak}"
        i.note("bound", i.graph.name, message)


def _counts(i: Inspection) -> None:
    if not 0 <= i.plan.moved <= len(i.graph.ops):
        message = f"the plan states that it moves {i.plan.moved} of {len(i.graph.ops)} ops"
        i.note("count-mismatch", "moved", message)


def _residences(i: Inspection) -> None:
    if i.plan.residences:
        check_residences(i)
        return
    # Without residences there are no bytes that they span; on the host, those in use may be stated instead.
    for name in ("arena", "handed", "host"):
        nbytes = getattr(i.plan, name)
        if nbytes and not (name == "host" and nbytes == i.replay.host_peak):
            i.note("peak-mismatch", name, f"the plan states {nbytes} bytes as {name}, and has no residences")


def _inner(i: Inspection) -> None:
    """Plans of what ops run inside themselves are checked like any other; their violations name the op."""
    graph, plan = i.graph, i.plan
    if plan.inner and i.depth >= _DEEPEST:
        i.note("inner", graph.name, f"plans lie more than {_DEEPEST} deep in one another")
        return
    need: dict[int, int] = {}
    for row in plan.inner:
        if not 0 <= row.op < len(graph.ops):
            i.note("unknown", str(row.op), f"there is no op {row.op} to run a graph")
            continue
        inside = verify(row.graph, row.plan, i.depth + 1)
        where = f"inside {graph.ops[row.op].name}: "
        i.ledger.violations += [replace(v, message=where + v.message) for v in inside]
        need[row.op] = need.get(row.op, 0) + max(0, row.plan.peak - row.plan.static)
    for k, nbytes in need.items():
        op = graph.ops[k]
        if nbytes > op.workspace:
            message = (
                f"the graph that {op.name} runs needs {nbytes} bytes, the op's workspace has {op.workspace}"
            )
            i.note("inner", op.name, message)


PLAN_RULES = (
    Rule(
        "unknown",
        "An index, kind, form or stream does not exist, or the plan is for another graph.",
        _identity,
    ),
    Rule("missing-op", "An op of the graph is not computed.", _steps),
    Rule("repeated-op", "An op is computed, not recomputed, a second time.", _steps),
    Rule("order", "Ops break a control edge, or the order of random ops among themselves.", _steps),
    Rule("hazard", "Ops on one storage run out of order: one would see too few or too many writes.", _steps),
    Rule(
        "use-before-definition",
        "An op uses a storage, or a view of one, before the op that makes it.",
        _steps,
    ),
    Rule("not-resident", "An op or a copy uses a form that is not there.", _steps),
    Rule("already-resident", "A step makes a form that is there already.", _steps),
    Rule("stale", "Restored contents are not those wanted: a later write is missing, or is in.", _steps),
    Rule(
        "impure-recompute",
        "A recomputed op is random without a saved state, has effects, writes the caller's bytes, or never ran.",
        _steps,
    ),
    Rule(
        "codec",
        "A compressed form is one that no codec makes of these values, has another size, comes before the last "
        "write, or is lossy where the plan allows no loss.",
        _steps,
    ),
    Rule(
        "reuse",
        "A result takes the place of what its op may not overwrite, of what is the caller's or not there, or does "
        "not lie exactly there.",
        _steps,
    ),
    Rule("foreign-free", "A step frees what is the caller's or is not there.", _steps),
    Rule("lost-output", "When the plan ends, a result is not there in its last version.", _steps),
    Rule("leak", "When the plan ends, something besides the results is there.", _steps),
    Rule("lane", "A step on another stream may still be using the bytes: a wait is missing.", _steps),
    Rule("missing-residence", "A residence that the steps imply has no place.", _residences),
    Rule(
        "wrong-residence",
        "A residence is none that the steps imply, or has another end, size, pool or event.",
        _residences,
    ),
    Rule("overlap", "Two residences use the same bytes at the same time.", _residences),
    Rule("misaligned", "An offset is no multiple of what the graph's device asks for.", _residences),
    Rule(
        "out-of-bounds",
        "Bytes lie before or beyond the arena or the plan's bytes of the host pool.",
        _residences,
    ),
    Rule(
        "over-budget", "The peak, or the bytes placed, are over the budget; likewise on the host.", _budgets
    ),
    Rule(
        "peak-mismatch",
        "``peak``, ``peak_before``, ``static``, ``arena``, ``handed`` or ``host`` is not what steps and residences "
        "give.",
        _peaks,
    ),
    Rule(
        "time-mismatch",
        "``time`` or ``time_before`` is not what the steps, or the ops once each, take.",
        _times,
    ),
    Rule("count-mismatch", "``moved`` is no number of the graph's ops.", _counts),
    Rule("inner", "What an op runs inside itself needs more than the op's workspace.", _inner),
    Rule("bound", "The claimed lower bound of the peak, or of the time, is above it.", _bound),
)
"""In the order of the steps, the places, the sums. A plan without any residence is a decision only and is checked
without placement."""
