"""Steps of one graph within so many bytes: which op runs when, and which of them twice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible
from tightship.frontends.jax_ops import ELEMENTWISE, FREE, Ops
from tightship.graph import Graph, aligned
from tightship.integrations.jax_policies import Steps
from tightship.plan import Step
from tightship.planners import default
from tightship.simulate import extras

__all__ = ["TIGHTENED", "Schedules", "check_steps", "fused_peak", "peak_of", "plan_steps", "whole_steps"]

_SPARE = 256
"""This part of the least bytes is added to them where less was asked for: their last ones may cost whole loops."""
_MANY, _ENOUGH, _TIMES = 1_000_000, 250_000, 1000
"""Searches of so much work are many in a step with loops: each simulates so many ops at most, or this many times its
graph if that is more. With more nothing better was found in bodies of loops. Steps without loops have few searches:
of some small ones less work finds plans with more operations."""
_DROPPED = 64
"""Repetitions of repetitions that are tried to be left out."""
TIGHTENED = 3
"""How often a plan is looked for at the least peak that was reached."""


@dataclass(frozen=True)
class _Known:
    """A plan of a graph that was looked for in ``beyond`` bytes, by so much work, and takes ``need``."""

    beyond: float
    work: int
    need: int
    steps: Steps

    def answers(self, beyond: float, work: int) -> bool:
        """Whether no better one would be found: it is within fewer bytes, too, or the least there is for more."""
        return (
            work <= self.work and beyond <= self.beyond and (self.need <= beyond or self.need > self.beyond)
        )


@dataclass
class Schedules:
    """Plans of graphs, of those that are alike once: what loops run inside is asked for again and again, in the bytes
    that each plan around it leaves."""

    _known: dict[Any, list[_Known]] = field(default_factory=dict)

    def within(self, graph: Graph, beyond: float, work: int) -> Steps:
        """`plan_steps`, or what is known."""
        if beyond == math.inf:
            return plan_steps(graph, beyond, work)
        costs = tuple((op.workspace, op.time) for op in graph.ops)  # which a digest leaves out
        known = self._known.setdefault((graph.digest, costs), [])
        found = next((k for k in known if k.answers(beyond, work)), None)
        if found is None:
            steps = plan_steps(graph, beyond, work)
            found = _Known(beyond, work, peak_of(graph, steps) - graph.static_bytes, steps)
            known.append(found)
        return found.steps


def plan_steps(graph: Graph, beyond: float, work: int) -> Steps:
    """Which op runs when, so that the graph takes ``beyond`` bytes beyond what it is given; as near as plans come in
    searches of ``work`` each, or less for few ops."""
    given = [(False, op) for op in range(len(graph.ops))]
    if beyond == math.inf or peak_of(graph, given) <= graph.static_bytes + beyond:
        return given
    limit, least = graph.static_bytes + int(beyond), int(aligned(lower_bound(graph)))
    if limit < least:  # for which nothing is found, slowly
        limit = least + (least - graph.static_bytes) // _SPARE
    work = min(work, max(_ENOUGH, _TIMES * len(graph.ops))) if work <= _MANY else work
    options = default.Options(order="given", place=False, seconds=60.0, work=work, gap=0.01)
    for _ in range(TIGHTENED):
        try:
            made = default.plan(graph, limit, options, prove=False)  # nobody reads its bound
            break
        except Infeasible as error:
            limit = max(error.best_peak, error.lower_bound)
            limit += (limit - graph.static_bytes) // _SPARE
    else:
        return given
    steps = [(s.kind == "recompute", s.op) for s in made.steps if s.kind in ("compute", "recompute")]
    return _fewer(graph, steps, limit)


def _fewer(graph: Graph, steps: Steps, limit: int) -> Steps:
    """The steps without what is made again although it could have stayed since the last time: all of it, or one
    repetition after the other, the dearest first."""
    seen: set[int] = set()
    more = []
    for i, (twice, op) in enumerate(steps):
        if twice and op in seen:
            more.append(i)
        if twice:
            seen.add(op)

    def without(gone: set[int]) -> Steps:
        return [s for i, s in enumerate(steps) if i not in gone]

    def within(gone: set[int]) -> bool:
        return peak_of(graph, without(gone)) <= limit

    if not more or within(set(more)):
        return without(set(more))
    gone: set[int] = set()
    for i in sorted(more, key=lambda i: -graph.ops[steps[i][1]].time)[:_DROPPED]:
        if within(gone | {i}):
            gone.add(i)
    return without(gone)


def whole_steps(graph: Graph, steps: Steps) -> tuple[Step, ...]:
    """The steps of a plan: what is done again replaces what there was, and all is freed after its last use."""
    reads, defines = graph.uses.reads, graph.uses.defines
    frees: list[list[int]] = [[] for _ in steps]
    last = dict.fromkeys(graph.kept, len(steps))
    for i in reversed(range(len(steps))):
        op = steps[i][1]
        for s in defines[op]:
            end = last.pop(s, i)
            if end < len(steps):
                frees[end].append(s)
        for s in reads[op]:
            if s not in graph.static:
                last.setdefault(s, i)
    made = []
    for (twice, op), dead in zip(steps, frees, strict=True):
        made.append(Step("recompute", op, tuple(defines[op])) if twice else Step("compute", op))
        if dead:
            made.append(Step("free", -1, tuple(dead)))
    return tuple(made)


def peak_of(graph: Graph, steps: Steps) -> int:
    """The peak of `whole_steps`, without a replay."""
    reads, defines, size = graph.uses.reads, graph.uses.defines, [s.size for s in graph.storages]
    change = [0] * (len(steps) + 1)
    last = dict.fromkeys(graph.kept, len(steps))
    for i in reversed(range(len(steps))):
        op = steps[i][1]
        for s in defines[op]:
            change[i] += size[s]
            end = last.pop(s, i)
            if end < len(steps):
                change[end + 1] -= size[s]
        for s in reads[op]:
            if s not in graph.static:
                last.setdefault(s, i)
    live, peak, extra = graph.static_bytes, graph.static_bytes, extras(graph).tolist()
    for (_, op), more in zip(steps, change, strict=False):
        live += more
        peak = max(peak, live + extra[op])
    return peak


def fused_peak(ops: Ops, steps: Steps) -> int:
    """The peak of `whole_steps` beyond what is given, where what is made again element by element and read element by
    element is fused into its readers, as XLA does: it takes no bytes, and what it reads is there until they ran."""
    graph, equations = ops.graph, ops.program.equations
    reads, defines, size = graph.uses.reads, graph.uses.defines, [s.size for s in graph.storages]
    names = [equations[row[-1]].name for row in ops.members]
    element_by_element = [name in ELEMENTWISE or name in FREE for name in names]
    fuses = [own or name.startswith("reduce_") for own, name in zip(element_by_element, names, strict=True)]
    maker = dict[int, int]()  # the step that made a storage last
    sources: list[list[int]] = []
    readers: list[list[int]] = [[] for _ in steps]
    for i, (_, op) in enumerate(steps):
        sources.append([maker[s] for s in reads[op] if s in maker])
        for k in sources[i]:
            readers[k].append(i)
        maker |= dict.fromkeys(defines[op], i)
    results = {maker[s] for s in graph.kept if s in maker}
    until = [len(steps) if i in results else i for i in range(len(steps))]
    fused = [False] * len(steps)
    for i in reversed(range(len(steps))):
        twice, op = steps[i]
        inside = readers[i] and i not in results and all(fuses[steps[k][1]] for k in readers[i])
        fused[i] = bool(twice and element_by_element[op] and inside)
        # Readers that are fused pass on how long what they read is there.
        until[i] = max([until[i], *(until[k] if fused[k] else k for k in readers[i])])
    change = [0] * (len(steps) + 2)
    for i, (_, op) in enumerate(steps):
        if not fused[i]:
            nbytes = sum(size[s] for s in defines[op])
            change[i] += nbytes
            change[until[i] + 1] -= nbytes
    live, peak, extra = 0, 0, extras(graph).tolist()
    for i, (_, op) in enumerate(steps):
        live += change[i]
        peak = max(peak, live if fused[i] else live + extra[op])
    return peak


def check_steps(graph: Graph, steps: Steps) -> None:
    """Raises ``ValueError`` for steps that are none of the graph's."""
    there = {v for v, x in enumerate(graph.values) if graph.storages[x.storage].kind == "parameter"}
    ran: set[int] = set()
    for twice, op in steps:
        if not 0 <= op < len(graph.ops) or twice != (op in ran) or not set(graph.ops[op].inputs) <= there:
            raise ValueError("no steps of this graph")
        ran.add(op)
        there |= set(graph.ops[op].outputs)
    if len(ran) != len(graph.ops):
        raise ValueError("steps are missing")
