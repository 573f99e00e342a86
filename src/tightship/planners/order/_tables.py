"""What list schedulers ask of a graph: bytes that ops make and end, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tightship.analysis.order import predecessors, successors
from tightship.graph import Graph
from tightship.simulate import extra_bytes

__all__ = ["Tables", "tables"]


@dataclass(frozen=True, slots=True)
class Tables:
    """By op: ``makes`` (bytes of its results, with its workspace), ``reads`` (storages that are not the caller's),
    ``before`` and ``after`` (ops). A reader waits for the op that makes a storage, also where another one wrote it
    since. By storage: ``size``, ``readers``, and ``stays`` (a result of the graph)."""

    makes: tuple[int, ...]
    scratch: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    size: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    stays: tuple[bool, ...]

    def unread(self, defines: Iterable[int]) -> int:
        """Bytes of storages that nobody reads and that do not stay."""
        return sum(self.size[s] for s in defines if not self.readers[s] and not self.stays[s])


def tables(graph: Graph) -> Tables:
    uses, static = graph.uses, graph.static
    size = tuple(s.size for s in graph.storages)
    scratch = tuple(extra_bytes(op) for op in graph.ops)
    reads = tuple(tuple(s for s in row if s not in static) for row in uses.reads)
    before = tuple(
        tuple(sorted({*row, *(uses.definer[s] for s in read)}))
        for row, read in zip(predecessors(graph), reads, strict=True)
    )
    return Tables(
        tuple(x + sum(size[s] for s in d) for x, d in zip(scratch, uses.defines, strict=True)),
        scratch,
        reads,
        before,
        successors(before),
        size,
        uses.readers,
        tuple(s in graph.kept for s in range(len(size))),
    )
