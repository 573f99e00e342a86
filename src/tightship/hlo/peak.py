"""The peak of a module as every verb counts it: with its results, without its parameters; and who makes it up.

This is how XLA's rematerialization counts (R1-R4, R14). Tables of addresses count, too, which graphs do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightship.graph import Graph, Storage, Value
from tightship.hlo.module import Computation, Module
from tightship.hlo.remat.peak import (
    PointsTo,
    bytes_in_use,
    device_bytes,
    live_ranges,
    module_peak,
    peaks,
    result_bytes,
)
from tightship.hlo.shape import Index
from tightship.plan import Plan
from tightship.simulate import baseline, replay

__all__ = ["Peak", "Resident", "peak_of", "plan_with_results", "with_results"]


@dataclass(frozen=True)
class Resident:
    """The buffer that ``instruction`` of ``computation`` defines at ``index``; ``result``: of the module."""

    computation: str
    instruction: str
    index: Index
    nbytes: int
    result: bool = False


@dataclass(frozen=True)
class Peak:
    """``instruction`` of ``computation`` runs when the most bytes are resident: those of ``residents``."""

    computation: str
    instruction: str
    residents: tuple[Resident, ...]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.residents)


def peak_of(module: Module) -> Peak:
    """Where a scheduled module needs the most bytes, and what they are."""
    entry, root = module.entry, module.entry.root
    made = PointsTo(entry).sets[root.name]
    parts = [(made[index], device_bytes(part)) for index, part in root.shape.positions]
    results = (Resident(entry.name, *buffer, nbytes, True) for buffer, nbytes in parts if nbytes)
    inside = _peak_in(module, entry, peaks(module))
    return replace(inside, residents=(*results, *inside.residents))


def _peak_in(module: Module, c: Computation, least: Mapping[str, int]) -> Peak:
    """The same of one computation, beyond its parameters and its result; what it calls needs ``least``."""
    use = bytes_in_use(module, c, least)
    at = use.index(max(use))
    i = c.instructions[at]
    alive = (b for b, begin, end in live_ranges(module, c) if begin <= at <= end and b.size)
    residents = [Resident(c.name, b.definer, b.index, b.size) for b in alive]
    called = i.called if i.row.holds else ()
    inside = [_peak_in(module, module.by_name[x], least) for x in called if least[x]]
    deepest = max(inside, key=lambda p: p.nbytes, default=Peak(c.name, i.name, ()))
    return replace(deepest, residents=(*residents, *(r for p in inside for r in p.residents)))


def with_results(module: Module, graph: Graph) -> Graph:
    """The graph of a module's entry with the bytes it does not count: results, and tables of addresses."""
    nbytes = module_peak(module) - replay(graph, baseline(graph)).peak
    last = len(graph.storages)
    return replace(
        graph,
        storages=(*graph.storages, Storage("results", nbytes, "output")),
        values=(*graph.values, Value("results", last)),
        inputs=(*graph.inputs, len(graph.values)),
    )


def plan_with_results(module: Module, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """``graph`` and its plan with the same bytes; no bound is claimed of tables of addresses."""
    counted = with_results(module, graph)
    more = counted.storages[-1].size
    made = replace(
        plan,
        digest=counted.digest,
        static=counted.static_bytes,
        peak=plan.peak + more,
        peak_before=plan.peak_before + more,
        budget=None if plan.budget is None else plan.budget + more,
        lower_bound=plan.lower_bound + result_bytes(module),
    )
    return counted, made
