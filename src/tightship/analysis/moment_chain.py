"""Bounds on the time of any plan from several moments at once: by sums, or by integer programming (extra ``solver``).

`bounds.time_bound` looks at one moment and at parts of storages: what it takes to make again half of what does not
fit counts half. Here ops *k1*, *k2*, … each of which every order runs before the next one divide the time. At the
moment *kj* first runs, what is in memory fits beside what that op touches. Between two moments, those ops run for the
first time that descend from the one and precede the other; what they read, and what is in memory at the second
moment, was in memory at the first one, or is made in between by ops that run for the first time or again. Ops
that had to run before *kj* cost their seconds once in every stretch in which they run again. All of that holds for
every order and any number of repetitions; what else a stretch needs between its ends, and the second run of an op
within one stretch, is left out, so that the least cost is a bound. Source: the stages of Checkmate (Jain et al.
2020), few of them and without an order. Complexity: exponential; some hundred ops take tenths of a second.

`chain_bound` needs no solver. It leaves out that what is in memory at one moment was needed in the stretch before:
then every stretch is a network of its own, and what they cost adds up. Each is bounded by the cuts of `bounds` and by
branching on whether a storage is in memory as a whole or not (Land and Doig 1960); which moments to take is a longest
path. The first stretches to be looked into are those of the path that is longest with what is not known assumed to
cost what a cut within the bytes costs; where that path is known as it is, no other is longer.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightship.analysis.bounds import Moment, Priced, Relaxation, relaxation, single_moments
from tightship.analysis.order import Mask, reached
from tightship.cached import cached_property
from tightship.graph import Graph, distinct
from tightship.options import NEVER, Deadline
from tightship.simulate import unplanned

__all__ = ["ChainBound", "chain_bound"]

Ints = NDArray[np.int64]

_TICKS = 1_000_000_000_000
"""Integer time that all ops together come to; what an op takes is rounded down."""
_COUNTS = (1, 2, 4, 8, 16)
"""Moments of the chains that are looked at, one after the other."""
_LONGEST = 3600.0
_SAFE = 1 - 1e-10
_STRETCHES, _OPS, _LARGE = 16, 80_000, 2_000
"""Moments of a path, at most, and ops in all networks between two of them together; graphs of more ops than the last
have one moment, as their cuts take too long."""
_EDGES, _BRANCHES = 2_000_000, 300
"""Edges in all cuts of the stretches of a path that are looked into, and branches of one of them."""
_SIZES = 12
"""Sizes of storages from the largest down to which a room is rounded."""
_LITTLE = 1e-4
"""Part of the time that is not worth looking for."""


class ChainBound:
    """Bounds for plans of a relaxation's graph. ``cp_model``: that of OR-tools."""

    def __init__(self, cp_model: Any, relaxed: Relaxation) -> None:
        self.cp, self.relaxed, self.graph = cp_model, relaxed, relaxed.graph
        self.reads = defaultdict[int, list[int]](list)
        for op, v in relaxed.versions.reads.tolist():
            self.reads[op].append(v)
        self.maker: list[int] = relaxed.versions.maker.tolist()

    def extra(self, budget: int, effort: float, deadline: Deadline = NEVER, top: int = -1) -> float:
        """Seconds of recomputation that every plan within ``budget`` bytes takes, by what the solver proves in
        ``effort`` deterministic seconds for each chain; 0 where it proves nothing. ``top``: the op whose moment shows
        the most by itself, which is looked at alone, and with the fullest moment before it."""
        best, rows, own = 0.0, self.chain, self.relaxed.own.tolist()
        chains = [[top], [self._fullest(top), top]] if top >= 0 else []
        for count in takewhile(lambda n: n <= len(rows), _COUNTS):
            ends = [len(rows) * i // count for i in range(count + 1)]
            chains.append([max(rows[a:b], key=own.__getitem__) for a, b in pairwise(ends)])
        for ops in chains:
            if deadline.over or math.isinf(best):
                break
            if ops[0] >= 0:
                best = max(best, _Stretches(self, ops, budget).solve(effort, deadline))
        return best

    def _fullest(self, op: int) -> int:
        """The op before ``op`` that most bytes are there beside where nothing is recomputed; -1: there is none."""
        line, before = unplanned(self.graph), self.before(op)
        rows = [(n, s.op) for s, n in zip(line.steps, line.levels, strict=True) if s.op >= 0 and before[s.op]]
        return max(rows, default=(0, -1))[1]

    @cached_property
    def chain(self) -> list[int]:
        """Ops each of which precedes the next one, from the backward where there is one: the one that most ops
        precede, then of those before it the same."""
        graph = self.graph
        late = [k for k, op in enumerate(graph.ops) if op.phase != "forward"] or list(range(len(graph.ops)))
        before = {k: self.before(k) for k in late}
        count = {k: int(mask.sum()) for k, mask in before.items()}
        rows: list[int] = []
        while late:
            rows.append(max(late, key=lambda k: (count[k], k)))
            late = [k for k in late if before[rows[-1]][k]]
        return rows[::-1]

    def through(self, op: int, among: Collection[int]) -> list[int]:
        """The ops of the chain that are ``among`` those and precede ``op`` or come after it, and ``op``."""
        before, after = self.before(op), self.after(op)
        first = [k for k in self.chain if k in among and before[k]]
        return [*first, op, *(k for k in self.chain if k in among and after[k])]

    def before(self, op: int) -> Mask:
        return self._along(op, self.relaxed._backward)

    def after(self, op: int) -> Mask:
        return self._along(op, self.relaxed._forward)

    def _along(self, op: int, rows: Any) -> Mask:
        mask = reached((op,), rows)
        mask[op] = False
        return mask


class _Stretches:
    """The integer program of some moments: for each stretch that begins with one, whether a version of a storage is
    needed in it (``need``), in memory at its begin (``held``), and which ops run in it."""

    def __init__(self, of: ChainBound, ops: Sequence[int], budget: int) -> None:
        self.of, self.ops, self.last = of, ops, len(ops) - 1
        self.model = of.cp.CpModel()
        relaxed = of.relaxed
        self.before, self.after = [of.before(k) for k in ops], [of.after(k) for k in ops]
        self.needs: dict[tuple[int, int], Any] = {}
        self.runs: dict[tuple[int, int], Any] = {}
        self.held: list[list[tuple[int, Any]]] = [[] for _ in ops]
        self.cost: list[Any] = []
        self.there = [self._touched(k) for k in ops]
        self.todo: list[tuple[int, int, bool]] = []  # stretch, op or version, whether it is an op
        for j in range(len(ops)):
            wanted = {v for o in self._first(j) for v in of.reads[o]}
            wanted |= set(of.reads[ops[j + 1]]) if j < self.last else set(relaxed.versions.results.tolist())
            for v in sorted(wanted):
                if (need := self._need(j, v)) is not None:
                    self.model.add(need == 1)
        while self.todo:
            j, what, is_op = self.todo.pop()
            self._op(j, what) if is_op else self._version(j, what)
        for j, k in enumerate(ops):
            room = budget - int(relaxed.own[k])
            self.model.add(sum(int(relaxed.versions.size[v]) * there for v, there in self.held[j]) <= room)
        self.model.minimize(sum(self.cost))

    def _touched(self, op: int) -> frozenset[int]:
        """What is there at the moment of an op whatever else is: what it reads and makes."""
        relaxed, there = self.of.relaxed, self.of.relaxed.versions.touched[op]
        over = relaxed.written_over(op)  # a result may lie in its place
        return there - {over}

    def _first(self, j: int) -> list[int]:
        """Ops that run for the first time in a stretch, in every order."""
        mask = self.after[j] if j == self.last else self.after[j] & self.before[j + 1]
        return [int(k) for k in mask.nonzero()[0]]

    def _need(self, j: int, v: int) -> Any:
        """Whether a version is needed in a stretch; None where it is there in any case."""
        maker = self.of.maker[v]
        if v in self.there[j] or (self.after[j][maker] and (j == self.last or self.before[j + 1][maker])):
            return None
        if (j, v) not in self.needs:
            self.needs[j, v] = self.model.new_bool_var("")
            self.todo.append((j, v, False))
        return self.needs[j, v]

    def _run(self, j: int, op: int) -> Any:
        if (j, op) not in self.runs:
            self.runs[j, op] = self.model.new_bool_var("")
            self.todo.append((j, op, True))
        return self.runs[j, op]

    def _version(self, j: int, v: int) -> None:
        """A version that is needed was there, or the op that makes it runs, as far as it can in this stretch."""
        m, need, maker = self.model, self.needs[j, v], self.of.maker[v]
        if j < self.last and (self.after[j + 1][maker] or maker == self.ops[j + 1]):
            return  # it is made later
        ways = [self._run(j, maker)]
        if not self.after[j][maker]:
            held = m.new_bool_var("")
            self.held[j].append((v, held))
            ways.append(held)
            if j and (earlier := self._need(j - 1, v)) is not None:
                m.add_implication(held, earlier)
        m.add_bool_or([*ways, need.negated()])

    def _op(self, j: int, op: int) -> None:
        """An op reads what is needed for that; one that ran before costs its time."""
        relaxed, run = self.of.relaxed, self.runs[j, op]
        if self.before[j][op] or op == self.ops[j]:
            if not relaxed.again[op]:
                self.model.add(run == 0)
                return
            part = self.of.graph.ops[op].time / relaxed.total if relaxed.total else 0.0
            self.cost.append(int(part * _TICKS * _SAFE) * run)
        for v in self.of.reads[op]:
            if (need := self._need(j, v)) is not None:
                self.model.add_implication(run, need)

    def solve(self, effort: float, deadline: Deadline = NEVER) -> float:
        """Seconds that the solver proves."""
        solver = self.of.cp.CpSolver()
        p = solver.parameters
        p.max_deterministic_time, p.num_workers, p.interleave_search, p.random_seed = effort, 8, True, 0
        p.max_time_in_seconds = min(deadline.left, _LONGEST)
        p.catch_sigint_signal = False  # it would leave Ctrl-C to the system, which ends the process
        status = solver.solve(self.model)
        if status == self.of.cp.INFEASIBLE:
            return float("inf")
        return max(0.0, solver.best_objective_bound) / _TICKS * self.of.relaxed.total * _SAFE


def chain_bound(
    graph: Graph, budget: int, *, redraw: bool = True, least: Mapping[int, int] | None = None,
    in_place: bool = True, deadline: Deadline = NEVER,
) -> float:  # fmt: skip
    """Seconds no plan within ``budget`` bytes can stay under: those of `bounds.time_bound`, or more where several
    moments, or storages that are in memory as a whole or not at all, ask for it. At the ``deadline``, the best bound
    so far."""
    found = single_moments(graph, budget, redraw=redraw, least=least, in_place=in_place, deadline=deadline)
    best, total = max(found.values(), default=0.0), math.fsum(graph.columns.time)
    count = min(_STRETCHES, math.isqrt(2 * _OPS // max(1, len(graph.ops))))
    if not 0 < best < math.inf or len(graph.ops) > _LARGE:
        return total + best
    relaxed = relaxation(graph, least, redraw=redraw, in_place=in_place)
    top = max(found, key=found.__getitem__)
    best = max(best, _Path(relaxed, [top], budget, deadline).longest())
    line = unplanned(graph)
    over = {step.op for step, n in zip(line.steps, line.levels, strict=True) if n > budget}
    chains, own = ChainBound(None, relaxed), relaxed.own.tolist()
    rows_of = [k for k in chains.chain if k in over], chains.through(top, over)
    for rows in dict.fromkeys(map(tuple, rows_of)):
        ends = [len(rows) * i // count for i in range(count + 1)]
        parts = [rows[a:b] for a, b in pairwise(ends) if b > a]
        ops = [top if top in part else max(part, key=own.__getitem__) for part in parts]
        best = max(best, _Path(relaxed, ops, budget, deadline).longest())
    return total + best


class _Path:
    """Stretches between any two of some moments (``ops``): seconds that each takes at least (``low``), and that it
    takes at least as far as is known yet, or would if a cut within the bytes were the best one (``high``)."""

    def __init__(self, relaxed: Relaxation, ops: Sequence[int], budget: int, deadline: Deadline) -> None:
        self.relaxed, self.ops, self.deadline, self.work = relaxed, ops, deadline, _EDGES
        self.at: dict[tuple[int, int], tuple[Moment, int]] = {}
        self.first: dict[tuple[int, int], Priced] = {}
        for i, k in enumerate(self.ops):
            for j in range(i + 1, len(self.ops) + 1):
                if deadline.over:
                    return
                at = relaxed.moment(k, self.ops[j] if j < len(self.ops) else None)
                self.at[i, j] = at, budget - at.own
                self.first[i, j] = relaxed.priced(at, at.bytes, budget - at.own, deadline)
        self.low = {ij: p.seconds for ij, p in self.first.items()}
        self.high = {ij: max(p.seconds, p.within) for ij, p in self.first.items()}

    def longest(self) -> float:
        """Seconds that the stretches of a path take together."""
        if len(self.first) < len(self.ops) * (len(self.ops) + 1) // 2:  # the deadline was first
            return 0.0
        known: set[tuple[int, int]] = set()
        while self.work > 0 and not self.deadline.over:
            most, path = self._path(self.high)
            new = [ij for ij in path if ij not in known]
            if not new or most <= self._path(self.low)[0] + _LITTLE * self.relaxed.total:
                break
            for ij in new:
                known.add(ij)
                self.low[ij] = self.high[ij] = max(self.low[ij], self._whole(ij))
        return self._path(self.low)[0]

    def _path(self, seconds: Mapping[tuple[int, int], float]) -> tuple[float, list[tuple[int, int]]]:
        n = len(self.ops)
        best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])] * (n + 1)
        for i in reversed(range(n)):
            ways = ((seconds[i, j] + best[j][0], [(i, j), *best[j][1]]) for j in range(i + 1, n + 1))
            best[i] = max(ways, key=lambda way: way[0])
        return max(best, key=lambda way: way[0])

    def _whole(self, ij: tuple[int, int]) -> float:
        """Seconds of a stretch where every storage is in memory as a whole or not at all: as it is, or by what the
        largest storages alone fill."""
        (at, room), most = self.at[ij], (self.first[ij], self.at[ij][0].bytes, self.at[ij][1])
        best = self._branched(at, *most)
        for nbytes, left in _rounded(at.bytes, room):
            found = self.relaxed.priced(at, nbytes, left, self.deadline)
            self.work -= found.cuts * len(nbytes)
            if found.seconds > most[0].seconds:
                most = found, nbytes, left
        return max(best, self._branched(at, *most)) if most[0] is not self.first[ij] else best

    def _branched(self, at: Moment, p: Priced, nbytes: Ints, room: int) -> float:
        """As far as the branches with the least bounds prove, from bytes and a room priced as ``p``."""
        within, count = p.within, 0
        heap = [(p.seconds, count, p.edge, nbytes, room)]
        while heap[0][2] >= 0 and heap[0][0] < within * (1 - 1e-9) and self.work > 0:
            if count >= _BRANCHES or self.deadline.over:
                break
            least, _, edge, nbytes, room = heapq.heappop(heap)
            for value, left in ((0, room - int(nbytes[edge])), (-1, room)):
                branch = nbytes.copy()
                branch[edge] = value
                p = self.relaxed.priced(at, branch, left, self.deadline)
                count, within = count + 1, min(within, p.within)
                self.work -= p.cuts * len(branch)
                heapq.heappush(heap, (max(least, p.seconds), count, p.edge, branch, left))
        return min(heap[0][0], within * (1 - 1e-9))


def _rounded(nbytes: Ints, room: int) -> Iterator[tuple[Ints, int]]:
    """Bytes of the largest storages alone, and the room that these can fill: whole ones come to multiples of what
    divides all of them (Gomory 1958)."""
    sizes = distinct(nbytes[nbytes > 0])[::-1]
    for n, least in enumerate(sizes[:_SIZES].tolist(), 1):
        unit = int(np.gcd.reduce(sizes[:n]))
        if room % unit:
            yield np.where((nbytes > 0) & (nbytes < least), 0, nbytes), room - room % unit
