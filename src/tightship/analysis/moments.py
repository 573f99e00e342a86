"""The least that is in memory while one op runs, over all orders, nothing recomputed: a minimum cut.

At the moment op *k* runs, its ancestors have run, it and its descendants have not; of all other ops any set may
have, so long as whatever an op of the set waits for is in it too. A storage is in memory when the op that makes it
has run and one that reads it has not, or when it is a result. The set with the fewest bytes is a closure (Picard
1976), found as a minimum cut: no order passes *k* with less. The largest of these bounds the peak of every order,
and the set says which ops to run before *k*.

`runs_of` sees the steps of a plan that recomputes in the same way: every run is an op of its own, every stay in
memory a storage. So the runs of a plan can be put into another order with a lower peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.order import Mask, Rows, csr, edges, pairs, predecessors, reached
from tightship.graph import Graph, distinct
from tightship.plan import Step
from tightship.simulate import extras

__all__ = ["Moments", "Passing", "Runs", "peak_of", "runs_of"]

_ENDLESS = 1 << 60

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Passing:
    """The least bytes with which an op can be passed, static set included, and the ops that then ran before it."""

    bytes: int
    done: Mask


class Moments:
    """A graph's dependencies and storages as arrays: the bytes along an order, and cuts at any op."""

    def __init__(self, graph: Graph) -> None:
        facts = graph.uses.facts
        # Storages that come into being, with bytes.
        size = graph.columns.size
        definer = facts.definer.astype(np.int64)
        kept = np.zeros(len(size), dtype=np.bool_)
        kept[list(graph.kept)] = True
        made = np.flatnonzero((definer >= 0) & (size > 0))
        number = np.full(len(size), -1, dtype=np.int64)
        number[made] = np.arange(len(made))
        reads = pairs(facts.readers)
        reads[:, 0] = number[reads[:, 0]]
        self._set(
            graph.static_bytes,
            (size[made], definer[made], kept[made]),
            reads[reads[:, 0] >= 0],
            edges(graph, forward=False),
            edges(graph, forward=True),
            extras(graph),
        )

    def _set(
        self,
        static_bytes: int,
        made: tuple[Ints, Ints, Mask],
        reads: Ints,
        backward: Rows,
        forward: Rows,
        extra: Ints,
    ) -> None:
        """``made``: of every storage the size, the op that makes it, whether it is a result; ``reads``: (storage,
        op), by storage; ``extra``: bytes beside storages while each op runs."""
        self.ops, self.static_bytes = len(extra), static_bytes
        self.size, self.definer, self.kept = made
        self.reads = reads
        # Storages that are read, with the first of their rows in ``reads``; those that end.
        read = self.reads[:, 0]
        self._rows = np.flatnonzero(np.diff(read, prepend=-1))
        self._read = read[self._rows]
        self._ends = np.flatnonzero(~self.kept)
        self._backward, self._forward = backward, forward
        self.waits = pairs(self._backward)
        self.extra = extra
        self.makes = np.bincount(self.definer, self.size, self.ops).astype(np.int64)

    @classmethod
    def of(
        cls,
        static_bytes: int,
        made: tuple[Ints, Ints, Mask],
        reads: Ints,
        waits: Sequence[Sequence[int]],
        extra: Ints,
    ) -> Moments:
        """As of a graph with these storages and ops (see `_set`); ``waits``: by op, those it has to run after."""
        moments, backward = cls.__new__(cls), csr(waits)
        moments._set(static_bytes, made, reads, backward, _core.successors(backward), extra)
        return moments

    def during(self, order: Sequence[int] | Ints) -> Ints:
        """Bytes in use while each op of an order runs, by position: those of `simulate.replay`."""
        n = self.ops
        ops = np.asarray(order, dtype=np.int64)
        at = np.empty(n, dtype=np.int64)
        at[ops] = np.arange(n)
        begin = at[self.definer]
        end = begin.copy()
        if len(self.reads):
            end[self._read] = np.maximum.reduceat(at[self.reads[:, 1]], self._rows)
        ended = np.zeros(n + 1, dtype=np.int64)
        np.add.at(ended, end[self._ends] + 1, self.size[self._ends])
        return self.static_bytes + np.cumsum(self.makes[ops] - ended[:n]) + self.extra[ops]

    def bytes(self, k: int, done: Mask) -> int:
        """Bytes in use while op ``k`` runs after the ops ``done``."""
        later = self.kept.copy()
        later[self.reads[~done[self.reads[:, 1]], 0]] = True
        held = int(self.size[done[self.definer] & later].sum())
        return self.static_bytes + held + int(self.makes[k] + self.extra[k])

    def at_end(self) -> int:
        """Bytes that every order has in use while its last op runs: all results are there, with what the op
        touches."""
        touched = self.makes + self.extra
        np.add.at(touched, self.reads[:, 1], self.size[self.reads[:, 0]])
        twice = np.bincount(self.definer[self.kept], self.size[self.kept], self.ops).astype(np.int64)
        np.add.at(twice, self.reads[:, 1], (self.size * self.kept)[self.reads[:, 0]])
        last = np.flatnonzero(np.diff(self._forward[0]) == 0)
        held = self.static_bytes + int(self.size[self.kept].sum())
        return held + (int((touched - twice)[last].min()) if len(last) else 0)

    def passing(
        self,
        k: int,
        first: Mask | None = None,
        price: int = 0,
        within: tuple[Mask, Mask] | None = None,
    ) -> Passing:
        """The least with which op ``k`` can be passed. Of equal sets the one that differs least from the ops
        ``first``; with a ``price``, in bytes for each op that differs, fewer differ for more bytes. ``within``: ops
        that have run in any case, and ops that may have run."""
        done, never = reached((k,), self._backward), reached((k,), self._forward)
        if within is not None:
            done |= within[0]
            never |= ~within[1]
        never[k] = True
        free = ~(done | never)
        if not free.any():
            return Passing(self.bytes(k, done), done)
        cut = _Network(self.ops)
        scale, weight = self._weights(first, price)
        made, reader = self.definer, self.reads[:, 1]
        late = self.kept.copy()  # will be read after the moment, whatever runs before it
        late[self.reads[never[reader], 0]] = True
        there = done[made]
        must = np.flatnonzero(free[made] & late)
        cut.edges(cut.op(made[must]), 1, self.size[must] * scale)
        may = (there | free[made]) & ~late
        pairs = self.reads[may[self.reads[:, 0]] & free[reader]]
        held = distinct(pairs[:, 0])
        cut.edges(np.where(there[held], 0, cut.op(made[held])), cut.storage(held), self.size[held] * scale)
        cut.edges(cut.storage(pairs[:, 0]), cut.op(pairs[:, 1]), _ENDLESS)
        waits = self.waits[free[self.waits[:, 0]] & free[self.waits[:, 1]]]
        cut.edges(cut.op(waits[:, 0]), cut.op(waits[:, 1]), _ENDLESS)
        if first is not None and weight:
            cut.edges(0, cut.op(np.flatnonzero(free & first)), weight)
            cut.edges(cut.op(np.flatnonzero(free & ~first)), 1, weight)
        done |= free & cut.near(len(self.size))
        return Passing(self.bytes(k, done), done)

    def _weights(self, first: Mask | None, price: int) -> tuple[int, int]:
        """What a byte and an op that differs weigh in the cut; the latter 0 where numbers would become too large."""
        if first is None:
            return 1, 0
        most = (_ENDLESS >> 2) // max(1, int(self.size.sum()), price * self.ops)
        return (
            (min(self.ops, most) + 1, 1 + price * (min(self.ops, most) + 1))
            if most >= self.ops
            else (1, price)
        )


def peak_of(graph: Graph, order: Sequence[int]) -> int:
    """The most bytes in use along an order, nothing recomputed: that of `simulate.replay`."""
    return int(Moments(graph).during(order).max(initial=graph.static_bytes))


class _Network:
    """Nodes: 0 the source (has run), 1 the sink (has not), then ops, then storages."""

    def __init__(self, ops: int) -> None:
        self.ops = ops
        self.rows: list[tuple[Ints, Ints, Ints]] = []

    def op(self, k: Ints) -> Ints:
        return k + 2

    def storage(self, s: Ints) -> Ints:
        return s + 2 + self.ops

    def edges(self, tail: Ints | int, head: Ints | int, capacity: Ints | int) -> None:
        a, b, c = np.broadcast_arrays(np.atleast_1d(tail), np.atleast_1d(head), np.atleast_1d(capacity))
        self.rows.append((a, b, c))

    def near(self, storages: int) -> Mask:
        """Which ops are on the source's side of a minimum cut."""
        tail, head, capacity = (np.concatenate(column) for column in zip(*self.rows, strict=True))
        _, near = _core.min_cut(
            2 + self.ops + storages,
            tail.astype(np.int32),
            head.astype(np.int32),
            capacity.astype(np.int64),
            0,
            1,
        )
        return np.asarray(near[2 : 2 + self.ops], dtype=np.bool_)


@dataclass(frozen=True)
class Runs:
    """The runs of a plan's steps: the op of each, whether it is that op's ``first`` run, what its results are written
    over (``reuses``); which stay in memory of a storage the first run of an op touches, by (storage, op); of each
    stay the storage (``stored``); and what is in memory in any order of theirs."""

    ops: tuple[int, ...]
    first: tuple[bool, ...]
    reuses: tuple[tuple[tuple[int, int], ...], ...]
    stays: Mapping[tuple[int, int], int]
    stored: tuple[int, ...]
    moments: Moments

    def order(self, runs: Sequence[int]) -> tuple[int, ...]:
        """The order of the ops' first runs in an order of all runs."""
        return tuple(self.ops[i] for i in runs if self.first[i])

    def steps(self, runs: Sequence[int]) -> tuple[Step, ...]:
        """All runs as steps, in an order in which no storage stays twice at a time: each stay ends with the last run
        that touches it, which a result may be written over if its op could do so before."""
        m, at = self.moments, np.empty(len(runs), dtype=np.int64)
        at[list(runs)] = np.arange(len(runs))
        last = at[m.definer]
        np.maximum.at(last, m.reads[:, 0], at[m.reads[:, 1]])
        ends: list[list[int]] = [[] for _ in runs]
        made: list[list[int]] = [[] for _ in runs]
        for stay, (end, maker) in enumerate(zip(last.tolist(), m.definer.tolist(), strict=True)):
            made[maker].append(self.stored[stay])
            if not m.kept[stay]:
                ends[end].append(self.stored[stay])
        found: list[Step] = []
        for i, gone in zip(runs, ends, strict=True):
            taken = tuple(pair for pair in self.reuses[i] if pair[0] in gone)
            over = {a for a, _ in taken}
            kind, left = "compute" if self.first[i] else "recompute", () if self.first[i] else tuple(made[i])
            found.append(Step(kind, self.ops[i], left, reuses=taken))
            if freed := tuple(s for s in gone if s not in over):
                found.append(Step("free", storages=freed))
        return tuple(found)


def runs_of(graph: Graph, steps: Sequence[Step], *, apart: bool = False) -> Runs | None:
    """The runs of steps that compute, recompute and free; None for others. What an op writes over in place of an
    input counts once wherever it runs, which in another order may be too little. ``apart``: two stays of a storage
    follow one another in every order."""
    builder = _Runs(graph, apart)
    for step in steps:
        if step.kind == "free":
            for s in step.storages if step.form == "full" else ():
                builder.here.pop(s, None)
        elif step.kind in ("compute", "recompute"):
            builder.run(step)
        else:
            return None
    return builder.result()


class _Runs:
    """`runs_of`, step after step; ``here``: the stays in memory by storage."""

    def __init__(self, graph: Graph, apart: bool) -> None:
        self.graph, self.uses, self.before = graph, graph.uses, predecessors(graph)
        self.apart = apart
        self.users: dict[int, set[int]] = {}  # by storage: the runs that touch its last stay
        self.size, self.scratch = graph.columns.size.tolist(), extras(graph).tolist()
        self.written = {s for row in self.uses.mutates for s in row}
        self.here: dict[int, int] = {}
        self.last_write: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}  # since then
        self.at = [-1] * len(graph.ops)
        self.ops: list[int] = []
        self.first: list[bool] = []
        self.extra: list[int] = []
        self.waits: list[list[int]] = []
        self.reuses: list[tuple[tuple[int, int], ...]] = []
        self.made: list[tuple[int, int]] = []  # by stay: bytes, run
        self.stored: list[int] = []
        self.reads: set[tuple[int, int]] = set()
        self.stays: dict[tuple[int, int], int] = {}

    def run(self, step: Step) -> None:
        k, i, first = step.op, len(self.ops), step.kind == "compute"
        waits = {self.at[b] for b in self.before[k]} if first else {self.at[k]}
        waits |= self._reads(k, i, first) | self._hazards(k, i, first)
        extra = self.scratch[k] - sum(self.size[a] for a, _ in step.reuses)
        for a, _ in step.reuses:
            self.here.pop(a, None)
        for s in self.uses.defines[k]:
            if first or s in step.storages:
                self.here[s] = len(self.made)
                self.made.append((self.size[s], i))
                self.stored.append(s)
                waits |= self.users.get(s, set()) if self.apart else set()
                self.users[s] = {i}
            else:
                extra += self.size[s]
            if first:
                self.stays[s, k] = self.here[s]
        if first:
            self.at[k] = i
        self.ops.append(k)
        self.first.append(first)
        self.reuses.append(step.reuses)
        self.extra.append(extra)
        self.waits.append(sorted(waits - {i, -1}))

    def _reads(self, k: int, i: int, first: bool) -> set[int]:
        """The runs that make what op ``k`` reads."""
        found = set()
        for s in self.uses.reads[k]:
            if s in self.here:
                stay = self.here[s]
                self.reads.add((stay, i))
                self.users[s].add(i)
                found.add(self.made[stay][1])
                if first:
                    self.stays[s, k] = stay
        return found

    def _hazards(self, k: int, i: int, first: bool) -> set[int]:
        """The runs that op ``k`` has to come after as it writes over what they read, or reads what they wrote."""
        found = set()
        updates = () if first else self.graph.ops[k].updates
        for s in self.written.intersection(self.uses.reads[k]):
            found.add(self.last_write.get(s, -1))
            if s in self.uses.mutates[k] and s not in updates:
                found.update(self.readers.pop(s, ()))
                self.last_write[s] = i
            else:
                self.readers.setdefault(s, []).append(i)
        return found

    def result(self) -> Runs:
        size, maker = np.array(self.made, dtype=np.int64).reshape(-1, 2).T
        kept = np.zeros(len(size), dtype=np.bool_)
        kept[[stay for s, stay in self.here.items() if s in self.graph.kept]] = True
        reads = np.array(sorted(self.reads), dtype=np.int64).reshape(-1, 2)
        extra = np.array(self.extra, dtype=np.int64)
        moments = Moments.of(self.graph.static_bytes, (size, maker, kept), reads, self.waits, extra)
        rows = tuple(self.ops), tuple(self.first), tuple(self.reuses)
        return Runs(*rows, self.stays, tuple(self.stored), moments)
