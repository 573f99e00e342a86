"""What planners of orders share: what list schedulers ask of a graph, and the answer of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightship.analysis.order import predecessors, successors
from tightship.graph import Graph
from tightship.simulate import extra_bytes

__all__ = ["Ordered", "Tables", "tables"]


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order, its peak in bytes, a bound on the peak of every order, and the ops tried."""

    order: tuple[int, ...]
    peak: int
    bound: int
    work: int = 0

    @property
    def optimal(self) -> bool:
        return self.peak <= self.bound


@dataclass(frozen=True, slots=True)
class Tables:
    """By op: ``makes`` (bytes of its results, with its workspace), ``loses`` (those of them that are gone after it:
    nobody reads them), ``reads`` (storages that are not the caller's), ``before`` and ``after`` (ops). A reader waits
    for the op that makes a storage, also where another one wrote it since. By storage: ``size``, ``readers``, and
    ``stays`` (a result of the graph). ``results``: bytes of those that stay."""

    makes: tuple[int, ...]
    loses: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    size: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    stays: tuple[bool, ...]
    results: int


def tables(graph: Graph, waits: Sequence[Sequence[int]] | None = None) -> Tables:
    """A graph's tables; several schedulers may share them. ``waits``: its `predecessors`, where they are known."""
    uses, static, kept = graph.uses, graph.static, graph.kept
    size = tuple(s.size for s in graph.storages)
    scratch = [extra_bytes(op) for op in graph.ops]
    reads = tuple(tuple(s for s in row if s not in static) for row in uses.reads)
    before = tuple(
        tuple(sorted({*row, *(uses.definer[s] for s in read)}))
        for row, read in zip(waits or predecessors(graph), reads, strict=True)
    )
    unread = [0 if uses.readers[s] or s in kept else n for s, n in enumerate(size)]
    return Tables(
        tuple(x + sum(size[s] for s in d) for x, d in zip(scratch, uses.defines, strict=True)),
        tuple(x + sum(unread[s] for s in d) for x, d in zip(scratch, uses.defines, strict=True)),
        reads,
        before,
        successors(before),
        size,
        uses.readers,
        tuple(s in kept for s in range(len(size))),
        sum(size[s] for s in kept - static),
    )
