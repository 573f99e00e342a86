"""A bound on the time of any plan from several moments taken together, as a linear program without a solver.

`moment_chain` adds up what stretches between moments cost, each by itself. Here they share what they decide. Ops
*k1*, *k2*, … each of which every order runs before the next one divide the time. For the stretch between any two of
them, or from one to the end, there is the network of `bounds.Relaxation.moment`: what is needed in it was in memory
when it began, or is made by ops that run again. Of all those networks

- a version of a storage is in memory at a moment, or not, for all stretches that begin with it; together they fit;
- one that is in memory at a moment was needed in every stretch that ends with it and began when it was made already;
- an op runs again in a stretch at most as often as in the shortest stretches that it consists of, together: that is
  what costs, so that repetitions in stretches one after the other add up.

All of that holds for every order and any number of repetitions. What is in memory as a whole or not at all fills less
of the room than parts do: rows of mixed integer rounding (Nemhauser and Wolsey 1988) say so for the largest storages.
The program without whole numbers is bounded by its dual (`cpp/linear_bound.h`): any prices prove something, so that
no solver has to be right, or to finish. A first program of many moments, with the shortest stretches and those to the
end, says at which of them memory has a price; the second one has those, and all stretches between them.

Complexity: a network for every stretch, and rounds of the dual method, each linear in all of them; a few tenths of a
second for some hundred ops. Known limits: what a stretch needs between its ends beyond its parts is not seen, and
memory is divided among storages in fractions, as far as rounding does not forbid it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.bounds import Moment, Relaxation, relaxation, single_moments
from tightship.analysis.moment_chain import ChainBound
from tightship.analysis.order import reached
from tightship.graph import Graph, distinct
from tightship.options import NEVER, Deadline
from tightship.simulate import Timeline, unplanned

__all__ = ["linked_bound"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SPREAD, _FULL, _MOST, _NETWORKS = 16, 8, 24, 16_000
"""Moments of the first program that are spread over what is above the budget, and over what is full in the plan; of
the second one, at most, and ops in all of its networks."""
_FILLED = 0.9
"""The part of the budget from which on a moment of the plan is full."""
_FIRST, _SECOND = 60_000_000, 300_000_000
"""Entries of the programs times rounds of the dual method, at most."""
_SIZES, _PARTS = 30, (20, 50)
"""Sizes from the largest down by which a room is rounded, and parts of the room that they are not smaller than, in
both programs."""
_UNIT = 100.0
"""What all ops together cost in the programs."""
_SAFE = 1 - 1e-9


def linked_bound(
    graph: Graph, budget: int, line: Timeline, known: float, *, redraw: bool = True,
    least: Mapping[int, int] | None = None, in_place: bool = True, deadline: Deadline = NEVER,
) -> float:  # fmt: skip
    """Seconds no plan within ``budget`` bytes can stay under: ``known``, or more where moments taken together prove
    it. ``line`` is a plan within the budget, which says where memory is scarce. At the ``deadline``, the best bound
    so far."""
    total, most = (
        math.fsum(graph.columns.time),
        min(_MOST, math.isqrt(2 * _NETWORKS // max(1, len(graph.ops)))),
    )
    if most < 2 or not total < known < math.inf:
        return known
    found = single_moments(graph, budget, redraw=redraw, least=least, in_place=in_place, deadline=deadline)
    if not found or deadline.over:
        return known
    relaxed = relaxation(graph, least, redraw=redraw, in_place=in_place)
    moments = _scarce(relaxed, budget, line, max(found, key=found.__getitem__))
    if len(moments) < 2:
        return known
    enough, best = line.time / total - 1, known
    first = _Program(relaxed, moments, budget, between=False, deadline=deadline)
    part, prices = first.proved(enough, _FIRST, deadline)
    best = max(best, total * (1 + part))
    if best < line.time and not deadline.over:
        dear = sorted(np.argsort(-prices, kind="stable")[:most].tolist())
        second = _Program(relaxed, [moments[i] for i in dear], budget, between=True, deadline=deadline)
        best = max(best, total * (1 + second.proved(enough, _SECOND, deadline)[0]))
    return best


def _scarce(relaxed: Relaxation, budget: int, line: Timeline, top: int) -> list[int]:
    """Ops one after the other at whose moments memory may be scarce: where they themselves need most of those that
    are above the budget unplanned, and where most is in memory of those that are full in the plan; and ``top``."""
    before = unplanned(relaxed.graph)
    over = {s.op for s, n in zip(before.steps, before.levels, strict=True) if s.op >= 0 and n > budget}
    rows = ChainBound(None, relaxed).through(top, over)
    level = {s.op: n for s, n in zip(line.steps, line.levels, strict=True) if s.kind == "compute"}
    own = dict(enumerate(relaxed.own.tolist()))
    full = [k for k in rows if level.get(k, 0) >= _FILLED * budget]
    chosen = {top, *_spread(rows, own, _SPREAD), *_spread(full, level, _FULL)}
    return [k for k in rows if k in chosen]


def _spread(rows: Sequence[int], value: Mapping[int, int], count: int) -> Collection[int]:
    """The op of the most value in each of so many parts."""
    ends = [len(rows) * i // count for i in range(count + 1)]
    return {max(rows[a:b], key=value.__getitem__) for a, b in pairwise(ends) if b > a}


class _Program:
    """Rows and columns of a linear program whose columns lie between ``low`` and ``high``. By moment: the columns of
    versions in memory (``held``), those of ops that run again in the stretch from it to the next one (``runs``), and
    which rows say that all fits (``rooms``)."""

    def __init__(
        self, relaxed: Relaxation, moments: Sequence[int], budget: int, *, between: bool, deadline: Deadline
    ) -> None:
        self.relaxed, self.moments, self.budget = relaxed, moments, budget
        self.ops, self.versions, self.end = len(relaxed.graph.ops), len(relaxed.versions.size), len(moments)
        self.low: list[Floats] = []
        self.high: list[Floats] = []
        self.cost: list[Floats] = []
        self.limit: list[Floats] = []
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.columns = self.rows = 0
        self.held = np.full((self.end, self.versions), -1, dtype=np.int64)
        self.runs = np.full((self.end, self.ops), -1, dtype=np.int64)
        self.seconds = relaxed.seconds * _UNIT
        self.parts = _PARTS[between]
        self.rooms: list[tuple[int, int]] = []
        for i in reversed(range(self.end)):
            for j in range(i + 1, self.end + 1):
                if (between or j in (i + 1, self.end)) and not deadline.over:
                    self._stretch(i, j)
            self.rooms.insert(0, self._room(i))

    def _new(
        self, count: int, *, low: Floats | float = 0.0, high: Floats | float = 1.0, cost: Floats | float = 0.0
    ) -> Ints:
        for column, value in ((self.low, low), (self.high, high), (self.cost, cost)):
            column.append(np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)))
        self.columns += count
        return np.arange(self.columns - count, self.columns)

    def _at_most(self, *terms: tuple[Ints, float]) -> None:
        """A row for each entry of the terms, whose sum is at most 0."""
        count = len(terms[0][0])
        at = np.arange(self.rows, self.rows + count)
        self.entries += [(at, columns, np.full(count, factor)) for columns, factor in terms]
        self.limit.append(np.zeros(count))
        self.rows += count

    def _stretch(self, i: int, j: int) -> None:
        """The network from moment ``i`` to moment ``j`` or to the end, as far as something leads there. Its nodes are
        columns, 0 on the side of the sink."""
        n, relaxed = self.ops, self.relaxed
        at = relaxed.moment(self.moments[i], self.moments[j] if j < self.end else None)
        need, make = 2 + n, 2 + n + self.versions
        tail, head = at.tail.astype(np.int64), at.head.astype(np.int64)
        there = np.zeros(self.versions, dtype=np.bool_)
        there[tail[(tail >= need) & (tail < make)] - need] = True
        later = self.held[j] >= 0 if j < self.end else np.zeros(self.versions, dtype=np.bool_)
        later = np.flatnonzero(later & there)
        wanted = head[tail == 0]
        seen = _led_to(at, relaxed.nodes, distinct(np.concatenate((wanted, need + later))))
        column = np.full(relaxed.nodes, -1, dtype=np.int64)
        ran = (head == 1) & seen[tail]
        self._ops(i, j, tail[ran] - 2, at.seconds[ran], column)
        needs = np.flatnonzero(seen[need:make])
        always = np.zeros(relaxed.nodes)
        always[wanted] = 1.0
        column[need + needs] = self._new(len(needs), low=always[need + needs])
        writes = (tail >= make) & seen[tail]
        column[tail[writes]] = column[head[writes]]  # a version is made when its op runs
        reads = (tail >= 2) & (tail < need) & (head > 1) & seen[tail]
        self._at_most((column[tail[reads]], 1.0), (column[head[reads]], -1.0))
        new = needs[self.held[i, needs] < 0]
        self.held[i, new] = self._new(len(new))
        self._at_most((column[need + needs], 1.0), (column[make + needs], -1.0), (self.held[i, needs], -1.0))
        if j < self.end:
            self._at_most((self.held[j, later], 1.0), (column[need + later], -1.0))

    def _ops(self, i: int, j: int, ops: Ints, seconds: Ints, column: Ints) -> None:
        """Columns of the ops of a stretch; where it consists of several, they run no more than in those together."""
        counted, high = ops[seconds > 0], np.where(seconds < 0, 0.0, 1.0)
        if j == i + 1:
            column[2 + ops] = self._new(
                len(ops), high=high, cost=np.where(seconds > 0, self.seconds[ops], 0.0)
            )
            self.runs[i, counted] = column[2 + counted]
            return
        column[2 + ops] = self._new(len(ops), high=high)
        terms = [(column[2 + counted], 1.0)]
        for k in range(i, j):
            new = counted[self.runs[k, counted] < 0]
            self.runs[k, new] = self._new(len(new), cost=self.seconds[new])
            terms.append((self.runs[k, counted], -1.0))
        self._at_most(*terms)

    def _room(self, i: int) -> tuple[int, int]:
        """Rows that say that what is in memory at moment ``i`` fits: as it is, and rounded."""
        held, first = np.flatnonzero(self.held[i] >= 0), self.rows
        size, room = self.relaxed.versions.size[held], self.budget - int(self.relaxed.own[self.moments[i]])
        self._fits(self.held[i, held], size / self.budget, room / self.budget)
        large = size[(size * self.parts > room) & (size > 0)]
        for unit in distinct(large)[::-1][:_SIZES].tolist():
            rest = room % unit
            parts = size // unit + np.maximum(0, size % unit - rest) / (unit - rest)
            self._fits(self.held[i, held], parts * _SAFE, room // unit)
        return first, self.rows

    def _fits(self, columns: Ints, factors: Floats, limit: float) -> None:
        some = factors > 0
        self.entries.append((np.full(int(some.sum()), self.rows), columns[some], factors[some]))
        self.limit.append(np.array([float(limit)]))
        self.rows += 1

    def proved(self, enough: float, work: int, deadline: Deadline) -> tuple[float, Floats]:
        """The part of the time that recomputation takes at least, and what the room of each moment does to it."""
        if not self.columns:  # its deadline ended before the first stretch
            return 0.0, np.zeros(len(self.rooms))
        row, column, factor = (np.concatenate(rows) for rows in zip(*self.entries, strict=True))
        order = np.argsort(row, kind="stable")
        first = np.searchsorted(row[order], np.arange(self.rows + 1)).astype(np.int64)
        low, high, cost, limit = (
            np.concatenate(rows) for rows in (self.low, self.high, self.cost, self.limit)
        )
        value, prices = _core.linear_bound(
            (first, column[order].astype(np.int32)), factor[order], limit, cost, low, high,
            work // max(1, len(row)), enough * _UNIT, deadline.left,
        )  # fmt: skip
        weight = np.array([float((prices[a:b] * limit[a:b]).sum()) for a, b in self.rooms])
        return max(0.0, value) / _UNIT * _SAFE, weight


def _led_to(at: Moment, nodes: int, start: Ints) -> NDArray[np.bool_]:
    """Nodes of a network, but for source and sink, that are in ``start`` or that something there leads to."""
    order = np.argsort(at.tail, kind="stable")
    first = np.searchsorted(at.tail[order], np.arange(nodes + 1)).astype(np.int64)
    seen = reached(start.tolist(), (first, at.head[order]))
    seen[start] = True
    seen[:2] = False
    return seen
