"""Which ops must run before which: data, hazards on shared storages, the random chain, effects, control.

`Rows` are such relations as arrays, found once for each graph; `deepest_first` says in which order an op's reads are
best made. `Tables` have what list schedulers ask of a graph,
`Ordered` is the answer of a search for an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.graph import Graph, Rows
from tightship.simulate import extras

__all__ = [
    "Mask",
    "Ordered",
    "Rows",
    "Tables",
    "backward_start",
    "csr",
    "deepest_first",
    "dependents",
    "edges",
    "hardest_first",
    "is_legal",
    "once",
    "pairs",
    "predecessors",
    "reached",
    "successors",
    "tables",
]


Mask = NDArray[np.bool_]


def csr(lists: Sequence[Sequence[int]]) -> Rows:
    """Rows of integers as start offsets and one flat array (compressed sparse rows)."""
    start = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, lists), dtype=np.int64, count=len(lists)), out=start[1:])
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(start[-1]))
    return start, flat


def pairs(rows: Rows) -> NDArray[np.int64]:
    """The same as pairs (row, integer)."""
    start, flat = rows
    return np.stack([np.repeat(np.arange(len(start) - 1), np.diff(start)), flat], axis=1)


def once(graph: Graph, name: str, find: Callable[[Graph], Any]) -> Any:
    """What ``find`` says of the graph, asked for once and kept with it by that name."""
    known = graph.__dict__  # where cached properties are kept as well
    if name not in known:
        known[name] = find(graph)
    return known[name]


def predecessors(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each op the ops that must run earlier in every legal order (direct edges only).

    Per value: who reads it waits for the op it is a result of, also where that op only makes a view. Per storage: a
    reader waits for the last write before it (RAW), a writer for that write (WAW) and for the readers in between
    (WAR). Ops that draw random numbers keep their order, so do ops with effects.
    """
    found: tuple[tuple[int, ...], ...] = once(
        graph, "_predecessors", lambda g: _core.tuples(edges(g, forward=False))
    )
    return found


def dependents(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each op the ops that wait for it: `predecessors`, seen from the other end."""
    found: tuple[tuple[int, ...], ...] = once(
        graph, "_dependents", lambda g: _core.tuples(edges(g, forward=True))
    )
    return found


def edges(graph: Graph, *, forward: bool) -> Rows:
    """`dependents` (``forward``) or `predecessors` as arrays."""
    found: Rows
    if forward:
        found = once(graph, "_forward", lambda g: _core.successors(edges(g, forward=False)))
    else:
        found = once(graph, "_backward", lambda g: g.uses.facts.predecessors())
    return found


def successors(before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The same edges, seen from the other end."""
    out: list[list[int]] = [[] for _ in before]
    for k, row in enumerate(before):
        for b in row:
            out[b].append(k)
    return tuple(tuple(r) for r in out)


def reached(start: Iterable[int], along: Rows) -> Mask:
    """Which ops are reached from ``start`` along edges; a start only if one leads to it."""
    return np.asarray(_core.reached(np.array(list(start), dtype=np.int32), along)).astype(np.bool_)


def is_legal(graph: Graph, order: Sequence[int]) -> bool:
    """Whether ``order`` has every op once and after all it must wait for."""
    if len(order) != len(graph.ops) or set(order) != set(range(len(order))):
        return False
    at = np.empty(len(order), dtype=np.int64)
    at[np.array(order, dtype=np.int64)] = np.arange(len(order))
    after, before = pairs(edges(graph, forward=False)).T
    return bool((at[before] < at[after]).all())


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
    scratch = extras(graph).tolist()
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
        dependents(graph) if before == predecessors(graph) else successors(before),
        size,
        uses.readers,
        tuple(s in kept for s in range(len(size))),
        sum(size[s] for s in kept - static),
    )


def deepest_first(graph: Graph) -> tuple[Rows, Rows]:
    """What each op reads, and how many writes of it, in the order in which making it again takes the least memory:
    first that of which the most is needed beyond its own bytes (Sethi and Ullman 1970), where everything of less than
    half of the largest one's bytes is there."""
    uses, facts, size = graph.uses, graph.uses.facts, graph.columns.size.tolist()
    most = [max((size[s] for s in row if uses.definer[s] >= 0), default=0) for row in uses.reads]
    starts, at = facts.reads[0], np.arange(len(facts.reads[1]))
    for bits in sorted({n.bit_length() for k, n in enumerate(most) if len(uses.reads[k]) > 1}):
        rows, _ = _by_need(graph, (1 << bits) // 4)
        for k, n in enumerate(most):
            if n.bit_length() == bits and len(rows[k]) > 1:
                at[starts[k] : starts[k + 1]] = starts[k] + np.array(rows[k])
    return (starts, facts.reads[1][at]), (facts.needs[0], facts.needs[1][at])


def hardest_first(graph: Graph) -> NDArray[np.int32]:
    """The storages, first those that take most beyond their own bytes to be made, where everything of less than a
    quarter of the largest one's bytes is there: so made one after the other, the most is needed while the least is
    there (Liu 1987)."""
    size = graph.columns.size
    made = size[graph.uses.facts.definer >= 0]
    _, takes = _by_need(graph, int(made.max(initial=0)) // 4)
    definer = graph.uses.facts.definer
    most = np.where(definer >= 0, np.array([*takes, 0], dtype=np.int64)[definer], 0)
    return np.argsort(size - most, kind="stable").astype(np.int32)


def _by_need(graph: Graph, there: int) -> tuple[list[list[int]], list[int]]:
    """By op, the order of its reads as `deepest_first` has it, storages of fewer bytes than ``there`` being there,
    and what every op takes."""
    uses, size, beside = graph.uses, graph.columns.size.tolist(), extras(graph).tolist()
    need = [0] * len(size)  # bytes that making a storage takes, its own among them
    rows: list[list[int]] = []
    takes: list[int] = []
    for k, op in enumerate(graph.ops):
        reads, made = uses.reads[k], uses.defines[k]
        rows.append(sorted(range(len(reads)), key=lambda j: size[reads[j]] - need[reads[j]]))
        held = most = 0
        for s in (reads[j] for j in rows[-1]):
            if need[s] and s not in uses.mutates[k]:
                most = max(most, held + need[s])
                held += size[s]
        over = sum({a: size[a] for a, _ in op.overwrites if need[a]}.values())
        total = sum(size[s] for s in made)
        most = max(most, held + total + beside[k] - min(over, total))
        takes.append(most)
        for s in (*made, *uses.mutates[k]):
            if size[s] >= there and s not in graph.static:
                need[s] = max(need[s], most)
    return rows, takes
