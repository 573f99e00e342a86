"""Which ops must run before which: data, hazards on shared storages, the random chain, effects, control.

`Tables` have what list schedulers ask of a graph, `Ordered` is the answer of a search for an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightship.graph import Graph
from tightship.simulate import extra_bytes

__all__ = [
    "Mask",
    "Ordered",
    "Tables",
    "backward_start",
    "is_legal",
    "predecessors",
    "reached",
    "successors",
    "tables",
]


Mask = NDArray[np.bool_]


def predecessors(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each op the ops that must run earlier in every legal order (direct edges only).

    Per value: who reads it waits for the op it is a result of, also where that op only makes a view. Per storage: a
    reader waits for the last write before it (RAW), a writer for that write (WAW) and for the readers in between
    (WAR). Ops that draw random numbers keep their order, so do ops with effects.
    """
    uses = graph.uses
    n = len(graph.storages)
    last_write = [-1] * n
    readers: list[list[int]] = [[] for _ in range(n)]
    last_random = last_effect = -1
    out = []
    for k, op in enumerate(graph.ops):
        before = set(op.control)
        before.update(uses.maker[v] for v in op.inputs)
        before.update(last_write[s] for s in uses.reads[k])
        for s in uses.mutates[k]:
            before.update(readers[s])
        for s in (*uses.mutates[k], *uses.defines[k]):
            last_write[s] = k
            readers[s] = []
        for s in uses.reads[k]:
            if last_write[s] != k:
                readers[s].append(k)
        if op.random:
            before.add(last_random)
            last_random = k
        if op.effect:
            before.add(last_effect)
            last_effect = k
        before.discard(-1)
        out.append(tuple(sorted(before)))
    return tuple(out)


def successors(before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The same edges, seen from the other end."""
    out: list[list[int]] = [[] for _ in before]
    for k, row in enumerate(before):
        for b in row:
            out[b].append(k)
    return tuple(tuple(r) for r in out)


def reached(start: Iterable[int], edges: Sequence[Sequence[int]]) -> Mask:
    """Which ops are reached from ``start`` along edges; a start only if one leads to it."""
    seen = bytearray(len(edges))
    stack = list(start)
    while stack:
        for b in edges[stack.pop()]:
            if not seen[b]:
                seen[b] = 1
                stack.append(b)
    return np.frombuffer(seen, dtype=np.uint8).astype(np.bool_)


def is_legal(graph: Graph, order: Sequence[int]) -> bool:
    """Whether ``order`` has every op once and after all it must wait for."""
    at = {k: i for i, k in enumerate(order)}
    if len(at) != len(graph.ops) or len(order) != len(graph.ops):
        return False
    return all(at[b] < at[k] for k, row in enumerate(predecessors(graph)) for b in row)


def backward_start(graph: Graph, order: Sequence[int]) -> int:
    """The position that divides forward and backward with the fewest ops on the wrong side, the last of those; the
    end where there is no backward. An order may take ops of the backward early: what an op is about to overwrite."""
    late = [graph.ops[k].phase != "forward" for k in order]
    if all(graph.ops[k].phase != "backward" for k in order):
        return len(order)
    wrong = least = late.count(False)  # all of them on the late side
    best = 0
    for i, backward in enumerate(late, start=1):
        wrong += 1 if backward else -1
        if wrong <= least:
            best, least = i, wrong
    return best


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
