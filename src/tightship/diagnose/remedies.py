"""The default planner, and where it finds no plan, what else would have given one: tried, not guessed.

Each remedy is a short search of its own for the same budget: without a hint, with random ops recomputed, with
lossless and lossy compression, with offloading. What none of them can reach is known from bounds. Known limits: a
remedy that a twentieth of the search finds no plan for may have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tightship.analysis.bounds import lower_bound
from tightship.analysis.packing import packings
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.options import NEVER, Deadline
from tightship.plan import Plan
from tightship.planners import default
from tightship.planners.default import Options
from tightship.planners.evict.problem import Progress
from tightship.planners.hints import parse_hints
from tightship.units import Budget, format_bytes

__all__ = ["advised", "remedies"]

_PART = 20
"""A remedy has one such part of the search's work and time."""
_SEARCH = 0.8
"""What the search may take of the time; the rest is for what else may help."""
_HINTS = 4
"""So many hints are tried to be left out, one at a time."""


def advised(
    graph: Graph,
    budget: Budget | str | int | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    like: Sequence[tuple[Graph, Plan]] = (),
) -> Plan:
    """As `default.plan`; an ``Infeasible`` says what was tried and would help. An interrupt ends the trials, and so
    does the end of the time, of which a part is left for them."""
    o = options or Options()
    deadline = Deadline.after(o.seconds)
    try:
        return default.plan(graph, budget, replace(o, seconds=o.seconds * _SEARCH), progress, like=like)
    except Infeasible as no:
        raise no.with_advice(remedies(graph, no, o, deadline)) from None


def remedies(graph: Graph, no: Infeasible, o: Options, deadline: Deadline = NEVER) -> tuple[str, ...]:
    """What would help, with what it gives; then what the error says of batches and of what nothing helps against."""
    rest = [text for text in no.advice if not text.startswith(("offloading", "compression"))]
    away = int(lower_bound(graph, least=dict.fromkeys(range(len(graph.storages)), 0)))
    if away > no.budget:
        return tuple(rest)
    tried = []
    try:
        for name, other in _others(graph, o):
            if deadline.over:
                tried.append(f"{name}, and what else there is: not tried, the time is over")
                break
            tried.append(f"{name}: {_outcome(graph, no.budget, _short(other, deadline))}")
    except KeyboardInterrupt:
        tried.append("interrupted: nothing more was tried")
    return (*tried, *rest)


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
    if "redraw" not in has and any(op.random and op.state for op in graph.ops):
        yield _allowing(o, "recomputing dropout", "redraw")
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


def _outcome(graph: Graph, limit: int, o: Options) -> str:
    try:
        plan = default.plan(graph, limit, o)
    except Infeasible as no:
        if no.impossible:
            return f"not enough, no plan needs less than {format_bytes(no.lower_bound)} then"
        needed = format_bytes(no.placed if no.placed and no.best_peak <= limit else no.best_peak)
        return f"not enough in a short search, which reached {needed}"
    extra = 100 * (plan.time / plan.time_before - 1) if plan.time_before else 0.0
    beside = [f"{format_bytes(plan.host)} outside"] if plan.host else []
    return ", ".join([f"fits, {extra:+.1f} % time", *beside])
