"""The least that is in memory while one op runs, over all orders, nothing recomputed: a minimum cut.

At the moment op *k* runs, its ancestors have run, it and its descendants have not; of all other ops any set may
have, so long as whatever an op of the set waits for is in it too. A storage is in memory when the op that makes it
has run and one that reads it has not, or when it is a result. The set with the fewest bytes is a closure (Picard
1976), found as a minimum cut: no order passes *k* with less. The largest of these bounds the peak of every order,
and the set says which ops to run before *k*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.order import Mask, edges, pairs, reached
from tightship.graph import Graph
from tightship.simulate import extras

__all__ = ["Moments", "Passing", "peak_of"]

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
        self.ops = len(graph.ops)
        self.static_bytes = graph.static_bytes
        # Storages that come into being, with bytes.
        size = graph.columns.size
        definer = facts.definer.astype(np.int64)
        kept = np.zeros(len(size), dtype=np.bool_)
        kept[list(graph.kept)] = True
        made = np.flatnonzero((definer >= 0) & (size > 0))
        self.size, self.definer, self.kept = size[made], definer[made], kept[made]
        number = np.full(len(size), -1, dtype=np.int64)
        number[made] = np.arange(len(made))
        reads = pairs(facts.readers)
        reads[:, 0] = number[reads[:, 0]]
        self.reads = reads[reads[:, 0] >= 0]
        # Storages that are read, with the first of their rows in ``reads``; those that end.
        self._read, self._rows = np.unique(self.reads[:, 0], return_index=True)
        self._ends = np.flatnonzero(~self.kept)
        self._backward, self._forward = (edges(graph, forward=forward) for forward in (False, True))
        self.waits = pairs(self._backward)
        self.extra = extras(graph)
        self.makes = np.bincount(self.definer, self.size, self.ops).astype(np.int64)

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
        held = np.unique(pairs[:, 0])
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
