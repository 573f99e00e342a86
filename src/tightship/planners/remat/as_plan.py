"""A rematerialised module as a Plan of the graph it came from, so that the verifier can judge it.

The plan is the entry computation's; those of what loops, branches and calls run lie inside it (``Plan.inner``), and
are workspace of their call. A plan has one copy of a storage at a time; a run whose results are all still resident
is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tightship.frontends.hlo.module import Module
from tightship.graph import Graph
from tightship.plan import Inner, Plan, Step
from tightship.planners.remat._cost import work_of
from tightship.planners.remat._counted import Counted, counted
from tightship.planners.remat.bound import bounds
from tightship.planners.remat.peak import CALLING, peaks, result_bytes
from tightship.planners.remat.xla import Remade
from tightship.simulate import baseline, replay
from tightship.verify import check

__all__ = ["as_plan", "graph_before"]


def as_plan(
    module: Module, made: Remade, planner: str, least: Mapping[str, int] | None = None
) -> tuple[Graph, Plan]:
    """The graph of ``module``'s entry as it is counted, and a verified plan that runs it as ``made`` does; ``least``
    are the bounds of its computations.

    Bytes are without the module's result and tables of addresses, which the caller owns.
    """
    least = bounds(module) if least is None else least
    after, work = peaks(made.module), work_of(module)
    known: dict[str, tuple[Graph, Plan]] = {}

    def of(name: str) -> tuple[Graph, Plan]:
        if name not in known:
            at = counted(module, name, after, work, once=False)
            calling = [(k, c) for k, i in enumerate(at.ops) if i.opcode in CALLING for c in i.called]
            inner = tuple(Inner(k, *of(c)) for k, c in calling)
            known[name] = at.graph, _planned(at, made, planner, least[name], inner)
        return known[name]

    graph, plan = of(module.entry.name)
    check(graph, plan)
    return graph, plan


def graph_before(module: Module) -> Graph:
    """The graph of ``module``'s entry as it is counted without any plan: what it calls is as it was, too."""
    return counted(module, module.entry.name, peaks(module), work_of(module), once=False).graph


def _planned(at: Counted, made: Remade, planner: str, least: int, inner: tuple[Inner, ...]) -> Plan:
    graph, steps = at.graph, tuple(_steps(at, made))
    before, line = replay(graph, baseline(graph)), replay(graph, steps)
    entry = at.computation.entry
    return Plan(
        digest=graph.digest,
        steps=steps,
        budget=made.limit - result_bytes(at.module) if made.met and entry else None,
        peak=line.peak,
        peak_before=before.peak,
        static=graph.static_bytes,
        lower_bound=least,
        time=line.time,
        time_before=before.time,
        planner=planner,
        inner=inner,
    )


def _steps(at: Counted, made: Remade) -> Iterator[Step]:
    graph, uses = at.graph, at.graph.uses
    number = {i.name: k for k, i in enumerate(at.ops)}
    written = made.module.by_name[at.computation.name].instructions
    runs = [number.get(made.origin.get(i.name, i.name), -1) for i in written]
    runs = [k for k in runs if k >= 0]
    last: dict[int, int] = {}  # of each storage, the run at which it is free until it is made again
    ends: dict[int, list[int]] = {}
    for t in reversed(range(len(runs))):
        for s in uses.reads[runs[t]]:
            last.setdefault(s, t)
        for s in uses.defines[runs[t]]:
            ends.setdefault(last.pop(s, t), []).append(s)
    ran: set[int] = set()
    resident = set(graph.static)
    for t, k in enumerate(runs):
        new = tuple(s for s in uses.defines[k] if s not in resident)
        if k not in ran:
            yield Step("compute", op=k)
        elif new:
            yield Step("recompute", op=k, storages=new)
        ran.add(k)
        resident.update(new)
        gone = [s for s in ends.get(t, ()) if s not in graph.kept and s not in graph.static and s in resident]
        if gone:
            resident.difference_update(gone)
            yield Step("free", storages=tuple(sorted(set(gone))))
