"""A rematerialised module as a Plan of the graph it came from, so that the verifier can judge it.

The entry computation alone: computations it calls are workspace of their call. A plan has one copy of a storage at
a time; a run whose results are all still resident is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tightship.analysis.bounds import lower_bound
from tightship.frontends.hlo.module import Module
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.planners.remat._cost import work_of
from tightship.planners.remat._counted import Counted
from tightship.planners.remat.peak import peaks, result_bytes
from tightship.planners.remat.search import may_repeat
from tightship.planners.remat.xla import Remade
from tightship.simulate import baseline, replay
from tightship.verify import check

__all__ = ["as_plan", "graph_before"]


def as_plan(module: Module, made: Remade, planner: str) -> tuple[Graph, Plan]:
    """The graph of ``module``'s entry as it is counted, and a verified plan that runs it as ``made`` does.

    Bytes are without the module's result and tables of addresses, which the caller owns.
    """
    counted = _counted(module, peaks(made.module))
    graph = counted.graph
    steps = tuple(_steps(counted, made))
    before, line = replay(graph, baseline(graph)), replay(graph, steps)
    plan = Plan(
        digest=graph.digest,
        steps=steps,
        budget=made.limit - result_bytes(module) if made.met else None,
        peak=line.peak,
        peak_before=before.peak,
        static=graph.static_bytes,
        lower_bound=int(lower_bound(graph)),
        time=line.time,
        time_before=before.time,
        planner=planner,
    )
    check(graph, plan)
    return graph, plan


def graph_before(module: Module) -> Graph:
    """The graph of ``module``'s entry as it is counted without any plan: what it calls is as it was, too."""
    return _counted(module, peaks(module)).graph


def _counted(module: Module, callees: Mapping[str, int]) -> Counted:
    return Counted(module, module.entry, callees, work_of(module).seconds, lambda i: may_repeat(module, i))


def _steps(counted: Counted, made: Remade) -> Iterator[Step]:
    graph, uses = counted.graph, counted.graph.uses
    number = {i.name: k for k, i in enumerate(counted.ops)}
    runs = [number.get(made.origin.get(i.name, i.name), -1) for i in made.module.entry.instructions]
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
