"""A rematerialized module as a Plan of the graph it came from, so that the verifier can judge it.

The plan is the entry computation's; those of what loops, branches and calls run lie inside it (``Plan.inner``), and
are workspace of their call. A plan has one copy of a storage at a time; a run whose results are all still resident
is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tightship.analysis.packing import Packing, packings
from tightship.baselines.xla_remat import Result
from tightship.cached import cached_property
from tightship.graph import Graph
from tightship.hlo.module import Module, check_copies
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.lower import Lowering, bounds, without_dead
from tightship.hlo.remat.peak import peaks, result_bytes
from tightship.machine import LOSSY
from tightship.plan import Inner, Plan, Step
from tightship.planners.default import displaced
from tightship.simulate import baseline, replay
from tightship.verify import check

__all__ = ["as_plan", "graph_before"]


def as_plan(
    module: Module, made: Result, planner: str, least: Mapping[str, int] | None = None
) -> tuple[Graph, Plan]:
    """The graph of ``module``'s entry as it is counted, and a verified plan that runs it as ``made`` does; ``least``
    are the bounds of its computations.

    Bytes are without the module's result and tables of addresses, which the caller owns.
    """
    check_copies(module)  # the verifier judges what each call runs
    least = bounds(module) if least is None else least
    # The dead instructions that the written module has no more (R15) are not run, so the graph is without them, too.
    module = without_dead(module, {i.name for c in made.module.computations for i in c.instructions})
    after, work = peaks(made.module), work_of(module)
    known: dict[str, tuple[Graph, Plan]] = {}

    def of(name: str) -> tuple[Graph, Plan]:
        if name not in known:
            at = Lowering(module, name, after, work)
            calling = [(k, c) for k, i in enumerate(at.ops) if i.row.holds for c in i.called]
            inner = tuple(Inner(k, *of(c)) for k, c in calling)
            known[name] = at.graph, _planned(at, made, planner, least[name], inner)
        return known[name]

    graph, plan = of(module.entry.name)
    check(graph, plan)
    return graph, plan


def graph_before(module: Module) -> Graph:
    """The graph of ``module``'s entry as it is counted without any plan: what it calls is as it was, too."""
    check_copies(module)
    return Lowering(module, module.entry.name, peaks(module), work_of(module)).graph


def _planned(at: Lowering, made: Result, planner: str, least: int, inner: tuple[Inner, ...]) -> Plan:
    graph, steps = at.graph, _steps(at, made)
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
        moved=displaced(tuple(step.op for step in steps if step.kind == "compute")),
        inner=inner,
        host=line.host_peak,
        lossy=any(step.codec in LOSSY for step in steps),
    )


_Form = tuple[int, str]
_READS = {"offload": "full", "offloaded": "full", "fetch": "host", "fetched": "full"}
_READS |= {"compress": "full", "decompress": "packed"}
_MAKES = {"offload": "host", "fetch": "full", "compress": "packed", "decompress": "full"}


def _steps(at: Lowering, made: Result) -> tuple[Step, ...]:
    """What the written computation does, step by step; every form is freed after its last use."""
    happens = list(_happens(at, made))
    uses = at.graph.uses
    last: dict[_Form, int] = {}  # of each form, when it is free until it is recomputed
    gone: dict[int, list[_Form]] = {}
    for t in reversed(range(len(happens))):
        kind, which = happens[t]
        reads = [(s, "full") for s in uses.reads[which]] if kind == "run" else [(which, _READS[kind])]
        makes = [(s, "full") for s in uses.defines[which]] if kind == "run" else []
        makes += [(which, _MAKES[kind])] if kind in _MAKES else []
        for form in reads:
            last.setdefault(form, t)
        for form in makes:
            gone.setdefault(last.pop(form, t), []).append(form)
    steps = _Steps(at.graph)
    for t, (kind, which) in enumerate(happens):
        steps.happen(kind, which)
        steps.free(gone.get(t, ()))
    return tuple(steps.found)


def _happens(at: Lowering, made: Result) -> Iterator[tuple[str, int]]:
    """("run", op) or (what is done with a storage, storage), in the order of the written computation."""
    number = {i.name: k for k, i in enumerate(at.ops)}
    for i in made.module.by_name[at.computation.name].instructions:
        if i.name in made.transfers:
            kind, buffer = made.transfers[i.name]
            yield kind, at.storage[buffer]
        elif (k := number.get(made.origin.get(i.name, i.name), -1)) >= 0:
            yield "run", k


class _Steps:
    """Steps with what they wait for: copies go on a stream of their own."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.found = graph, list[Step]()
        self.resident: set[_Form] = {(s, "full") for s in graph.static}
        self.ran: set[int] = set()
        self.latest = -1  # on the stream of ops
        self.out: dict[int, int] = {}  # copies out and back that nothing has waited for
        self.back: dict[int, int] = {}

    @cached_property
    def packings(self) -> Mapping[int, Packing]:
        return packings(self.graph, lossy=True)

    def emit(self, step: Step) -> int:
        self.found.append(step)
        if not step.stream:
            self.latest = len(self.found) - 1
        return len(self.found) - 1

    def waits(self, read: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.back.pop(s) for s in read if s in self.back))

    def happen(self, kind: str, which: int) -> None:
        if kind == "run":
            self.run(which)
            return
        s = (which,)
        if kind in _MAKES:
            self.resident.add((which, _MAKES[kind]))
        before = (self.latest,) if self.latest >= 0 else ()
        if kind == "offload":
            waits = (*before, *self.waits(s))
            self.out[which] = self.emit(Step("offload", storages=s, stream=1, waits=waits))
        elif kind == "fetch":
            self.back[which] = self.emit(Step("fetch", storages=s, stream=1, waits=before))
        elif kind == "compress":
            p = self.packings[which]
            self.emit(Step("compress", storages=s, nbytes=p.nbytes, codec=p.codec, waits=self.waits(s)))
        elif kind == "decompress":
            self.emit(Step("decompress", storages=s, codec=self.packings[which].codec))

    def run(self, k: int) -> None:
        uses = self.graph.uses
        new = tuple(s for s in uses.defines[k] if (s, "full") not in self.resident)
        if k not in self.ran:
            self.emit(Step("compute", op=k, waits=self.waits(uses.reads[k])))
        elif new:
            self.emit(Step("recompute", op=k, storages=new, waits=self.waits(uses.reads[k])))
        self.ran.add(k)
        self.resident.update((s, "full") for s in new)

    def free(self, forms: Iterable[_Form]) -> None:
        for form in ("full", "packed", "host"):
            found = {s for s, f in forms if f == form and (s, f) in self.resident}
            gone = sorted(found if form != "full" else found - self.graph.kept - self.graph.static)
            if not gone:
                continue
            self.resident.difference_update((s, form) for s in gone)
            waits: tuple[int, ...] = ()
            if form == "full":
                out = [self.out.pop(s) for s in gone if s in self.out]
                waits = tuple(sorted((*out, *self.waits(gone))))
            self.emit(Step("free", storages=tuple(gone), form=form, stream=int(form == "host"), waits=waits))
