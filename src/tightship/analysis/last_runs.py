"""A lower bound on the peak from the last runs of ops: what has to be in memory when large ops run for the last time.

Moments of first runs (`bounds`) say little of results: at an op's first run none has to be made yet, and at the end,
when all are there, nothing large runs. But take any set of ops. Whatever the plan, one of them, *k*, is the last of
the set that runs. While it does, what it reads and makes is in memory, with its workspace and the static set. After
that no op of the set runs again, so every result is in memory at that moment, or is made later by ops outside of the
set from what is in memory then. The fewest bytes with which that can be, what *k* touches being free, are a minimum
cut; with what *k* touches they are the least with which *k* can be the last. No plan needs less than the least over
all *k* of the set.

By then every op of the set has run, and all that it waits for: of those, ones that can run but once do not run
again either. That holds for every order, any number of repetitions and every set. A large set leaves little that can
be made afterwards, but has small ops; a small one has large ops alone. For a number of bytes, ops that can be the
last with no more are taken away until none can, as cores of graphs are found (Matula and Beck 1983): what is left is
the largest set that proves the number, and where nothing is left, no set does. Numbers are tried from above, as few
ops can be in their sets.

What *k* may write a result over need not be there beside it, and counts like any other storage. What waits in fewer
bytes, packed or moved out, counts with those. Complexity: some minimum cuts for each large op, as long as work is
left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.order import reached
from tightship.options import NEVER, Deadline

if TYPE_CHECKING:
    from tightship.analysis.bounds import Relaxation

__all__ = ["last_run_bound"]

_ENDLESS = 1 << 60
_PARTS, _HALVES = 12, 3
"""Numbers that are tried from above, and between the first that is proved and the one before it."""
_EDGES, _LARGE = 30_000_000, 5_000
"""Edges of all cuts together, at most, and ops of graphs that are looked at."""


def last_run_bound(relaxed: Relaxation, least: int, deadline: Deadline = NEVER) -> tuple[int, int]:
    """Bytes that no plan can stay under, ``least`` or more, which is known to be such a number, and the op that can
    be the last of a set with these (-1: ``least`` is not surpassed)."""
    if len(relaxed.own) > _LARGE:
        return least, -1
    if relaxed.last_runs is None:
        cuts = _LastRuns(relaxed, deadline)
        best, at, most = least, -1, int(relaxed.own.max()) + cuts.base
        part = max(1, (most - least) // _PARTS)
        for level in range(most - part, least - 1, -part):  # the sets of high ones are small
            best, at = max((best, at), cuts.passed(level))
            if best > least:
                break
            most = level
        for _ in range(_HALVES if best > least else 0):
            level = (best + most) // 2
            value, op = cuts.passed(level)
            best, at = max((best, at), (value, op))
            most = most if value else level
        if deadline.over:
            return best, at
        relaxed.last_runs = best, at
    return max((least, -1), relaxed.last_runs)


class _LastRuns:
    """The network of what has to be in memory for the results to be there, or to be made, at the end. Nodes: 0 the
    source, 1 the sink, then ops, storages needed, storages to be made. ``work``: edges that may still be cut;
    ``touched``: by op, the bytes of what it reads and makes that may count in a cut; ``base``: the cut when no op
    runs any more."""

    def __init__(self, relaxed: Relaxation, deadline: Deadline) -> None:
        graph, uses = relaxed.graph, relaxed.uses
        self.relaxed, self.deadline, self.work = relaxed, deadline, _EDGES
        n, m = len(graph.ops), len(graph.storages)
        there = (uses.facts.definer >= 0) & ~relaxed.static
        reads, writes = relaxed._reads, relaxed._writes
        reads, writes = reads[there[reads[:, 1]]], writes[there[writes[:, 0]]]
        results = np.array(sorted(graph.kept - graph.static), dtype=np.int64)
        results, held, ops = results[there[results]], np.flatnonzero(there), np.arange(n)
        need, make = 2 + n, 2 + n + m
        tail: list[NDArray[np.int64]] = [
            0 * results,
            2 + reads[:, 0],
            make + writes[:, 0],
            need + held,
            2 + ops,
        ]
        head = [need + results, need + reads[:, 1], 2 + writes[:, 1], make + held, 0 * ops + 1]
        self.tail, self.head = (np.concatenate(rows).astype(np.int32) for rows in (tail, head))
        endless = np.full(len(results) + len(reads) + len(writes), _ENDLESS)
        self.capacity = np.concatenate([endless, relaxed.waits[held], np.zeros(n, np.int64)])
        self.first_op = len(endless) + len(held)
        self.edge = np.full(m, -1, dtype=np.int64)
        self.edge[held] = len(endless) + np.arange(len(held))
        self.free = [self._edges((*uses.reads[k], *uses.defines[k]), k) for k in range(n)]
        self.touched = np.array([self.capacity[e].sum() for e in self.free], dtype=np.int64)
        self.once = np.flatnonzero(~relaxed.again)
        self.base = self._cut(np.ones(n, dtype=np.bool_))

    def passed(self, level: int) -> tuple[int, int]:
        """The least bytes with which an op of the largest set that proves more than ``level`` is the last, and that
        op; 0 where there is none, or no work left to tell."""
        own = self.relaxed.own
        inside = own + self.base > level  # no cut is more without an op
        while inside.any():
            over = self._over(inside)
            value = own + np.maximum(0, self._cut(over) - self.touched)
            value[~inside] = _ENDLESS
            for k in np.flatnonzero(value <= level).tolist():
                value[k] = own[k] + self._cut(over, k)
            if self.work <= 0 or self.deadline.over:
                break
            if (out := value <= level).any():
                inside &= ~out
            else:
                return int(value.min()), int(value.argmin())
        return 0, -1

    def _over(self, inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Ops that do not run any more when the last one of a set has."""
        if not len(self.once):
            return inside
        over = inside.copy()
        before = reached(np.flatnonzero(inside).tolist(), self.relaxed._backward)
        over[self.once[before[self.once]]] = True
        return over

    def _edges(self, touched: Sequence[int], k: int) -> NDArray[np.int64]:
        """The edges of what op ``k`` touches and what is there in any case while it runs."""
        pairs = self.relaxed.pairs.get(k, ())
        over = pairs[0][0] if len(pairs) == 1 else -1  # of several it is not known which is written over
        edges = self.edge[sorted({s for s in touched if s != over})]
        return edges[edges >= 0]

    def _cut(self, over: NDArray[np.bool_], k: int = -1) -> int:
        """Bytes of what has to be in memory when none of the ops ``over`` runs any more, beside what op ``k``
        touches; 0 where no work is left."""
        if self.work <= 0:
            return 0
        self.work -= len(self.tail)
        capacity = self.capacity.copy()
        capacity[self.first_op + np.flatnonzero(over)] = _ENDLESS
        if k >= 0:
            capacity[self.free[k]] = 0
        value, _ = _core.min_cut(self.relaxed.nodes, self.tail, self.head, capacity, 0, 1)
        return int(value)
