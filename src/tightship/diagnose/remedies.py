"""The default planner, and where it finds no plan, what else would have given one: tried, not guessed.

Each remedy is a short search of its own for the same budget: without a hint, with random ops recomputed, with
lossless and lossy compression, with offloading. What none of them can reach is known from bounds. Every search that
fails names the least budget that it has a plan for, and that plan is made. Known limits: a remedy that a twentieth of
the search finds no plan for may have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Protocol

from tightship.analysis.bounds import lower_bound
from tightship.analysis.packing import packings
from tightship.errors import Enough, Infeasible
from tightship.graph import Graph
from tightship.options import NEVER, Deadline
from tightship.plan import Plan
from tightship.planners import default
from tightship.planners.default import Options
from tightship.planners.evict.problem import Progress
from tightship.planners.hints import parse_hints
from tightship.units import Budget, format_bytes

__all__ = ["LeastPlans", "advised", "least_plan", "remedies"]

_PART = 20
"""A remedy has one such part of the search's work and time."""
_SEARCH = 0.8
"""What the search may take of the time; the rest is for what else may help."""
_HINTS = 4
"""So many hints are tried to be left out, one at a time."""


class LeastPlans(Protocol):
    """Where the plans of the least budgets that were found are kept, by graph and options."""

    def within(self, graph: Graph, o: Options, budget: int) -> Plan | None:
        """One that was kept, verified, if there is one within the budget."""

    def offer(self, graph: Graph, o: Options, plan: Plan) -> int:
        """Keeps a plan unless a lesser one is kept; returns the least budget."""


def advised(
    graph: Graph,
    budget: Budget | str | int | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    like: Sequence[tuple[Graph, Plan]] = (),
    least: LeastPlans | None = None,
) -> Plan:
    """As `default.plan`; an ``Infeasible`` says what was tried and would help, and which budget is enough. An
    interrupt ends the trials, and so does the end of the time, of which a part is left for them. A budget that is
    named once is enough later, too, where ``least`` keeps what was found."""
    o = options or Options()
    deadline = Deadline.after(o.seconds)
    try:
        return default.plan(graph, budget, replace(o, seconds=o.seconds * _SEARCH), progress, like=like)
    except Infeasible as no:
        kept = least.within(graph, o, no.budget) if least is not None else None
        if kept is not None:
            return kept
        texts, enough = remedies(graph, no, o, deadline, least)
        raise no.with_advice(texts).with_enough(enough) from None


def least_plan(graph: Graph, no: Infeasible, o: Options) -> Plan | None:
    """The plan of the least bytes that a search which failed has reached, if it can be made again."""
    needs = no.best_peak if no.placed is None else no.placed
    if needs <= no.budget:
        return None
    try:
        return default.plan(graph, needs, replace(o, seconds=0.0, work=1))  # what was reached is known
    except Infeasible:
        return None


def _enough(graph: Graph, no: Infeasible, o: Options, least: LeastPlans | None) -> int | None:
    """Bytes that a plan is known for by now."""
    plan = least_plan(graph, no, o)
    if plan is None or plan.budget is None:
        return None
    return plan.budget if least is None else least.offer(graph, o, plan)


def remedies(
    graph: Graph, no: Infeasible, o: Options, deadline: Deadline = NEVER, least: LeastPlans | None = None
) -> tuple[tuple[str, ...], tuple[Enough, ...]]:
    """What would help, with what it gives; then what the error says of batches and of what nothing helps against.
    With the budgets that are enough: for these options, and for others that get by with less."""
    try:
        own = _enough(graph, no, o, least)
    except KeyboardInterrupt:
        return no.advice, ()
    enough = [] if own is None else [Enough(own)]
    rest = [text for text in no.advice if not text.startswith(("offloading", "compression"))]
    away = int(lower_bound(graph, least=dict.fromkeys(range(len(graph.storages)), 0)))
    if away > no.budget:
        return tuple(rest), tuple(enough)
    tried = []
    try:
        for name, other in _others(graph, o):
            if deadline.over:
                tried.append(f"{name}, and what else there is: not tried, the time is over")
                break
            text, nbytes = _outcome(graph, no.budget, _short(other, deadline), least)
            tried.append(f"{name}: {text}")
            if nbytes is not None and (own is None or nbytes < own):
                enough.append(Enough(nbytes, _changed(o, other)))
    except KeyboardInterrupt:
        tried.append("interrupted: nothing more was tried")
    return (*tried, *rest), tuple(enough)


def _changed(o: Options, other: Options) -> tuple[tuple[str, object], ...]:
    """The options in which ``other`` is not ``o``."""
    names = [f.name for f in fields(o) if getattr(o, f.name) != getattr(other, f.name)]
    return tuple((name, getattr(other, name)) for name in names)


def _short(o: Options, deadline: Deadline) -> Options:
    seconds = min(deadline.left, max(0.2, o.seconds / _PART))
    return replace(o, seconds=seconds, work=max(1, o.work // _PART))


def _others(graph: Graph, o: Options) -> Iterator[tuple[str, Options]]:
    """Options that allow more than ``o``, each by its name."""
    hints = [f"{pattern}={way}" for pattern, way in parse_hints(o.hints)]
    for hint in hints[:_HINTS]:
        yield f"without the hint {hint}", replace(o, hints=",".join(h for h in hints if h != hint))
    if len(hints) > 1:
        yield "without any hint", replace(o, hints="")
    has = {way.strip() for way in o.allow.split(",")}
    if not (o.redraw or "redraw" in has) and any(op.random and op.state for op in graph.ops):
        yield "recomputing dropout (redraw)", replace(o, redraw=True)
    if "compress" not in has and packings(graph):
        yield _allowing(o, "lossless compression", "compress")
    if not o.lossy and packings(graph, lossy=True).keys() - packings(graph).keys():
        name, other = _allowing(o, "compression to bfloat16", "compress")
        yield f"{name[:-1]}, lossy)", replace(other, lossy=True)
    if "offload" not in has:
        yield _allowing(o, "offloading", "offload")


def _allowing(o: Options, name: str, way: str) -> tuple[str, Options]:
    ways = dict.fromkeys([*filter(None, (w.strip() for w in o.allow.split(","))), way])
    allow = ",".join(ways)
    return f"{name} (allow={allow})", replace(o, allow=allow)


def _outcome(graph: Graph, limit: int, o: Options, least: LeastPlans | None) -> tuple[str, int | None]:
    """What a short search comes to, and the bytes that are enough then where ``limit`` is not."""
    try:
        plan = default.plan(graph, limit, o)
    except Infeasible as no:
        enough = _enough(graph, no, o, least)
        if no.impossible:
            return f"not enough, no plan needs less than {format_bytes(no.lower_bound)} then", enough
        needed = format_bytes(no.best_peak if no.placed is None else no.placed)
        return f"not enough in a short search, which reached {needed}", enough
    extra = 100 * (plan.time / plan.time_before - 1) if plan.time_before else 0.0
    beside = [f"{format_bytes(plan.host)} outside"] if plan.host else []
    return ", ".join([f"fits, {extra:+.1f} % time", *beside]), None
