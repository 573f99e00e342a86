"""A bound on the time of any plan from several moments at once, by integer programming (extra ``solver``).

`bounds.time_bound` looks at one moment and at parts of storages: what it takes to make again half of what does not
fit counts half. Here ops *k1*, *k2*, … each of which every order runs before the next one divide the time. At the
moment *kj* first runs, what is in memory fits beside what that op touches. Between two moments, those ops run for the
first time that descend from the one and precede the other; what they read, and what is in memory at the second
moment, was in memory at the first one, or is made in between by ops that run for the first time or again. Ops
that had to run before *kj* cost their seconds once in every stretch in which they run again. All of that holds for
every order and any number of repetitions; what else a stretch needs between its ends, and the second run of an op
within one stretch, is left out, so that the least cost is a bound. Source: the stages of Checkmate (Jain et al.
2020), few of them and without an order. Complexity: exponential; some hundred ops take tenths of a second.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from tightship.analysis.bounds import Relaxation
from tightship.analysis.order import Mask, reached
from tightship.options import NEVER, Deadline

__all__ = ["ChainBound"]

_TICKS = 1_000_000_000_000
"""Integer time that all ops together come to; what an op takes is rounded down."""
_COUNTS = (1, 2, 4, 8, 16)
"""Moments of the chains that are looked at, one after the other."""
_LONGEST = 3600.0
_SAFE = 1 - 1e-10


class ChainBound:
    """Bounds for plans of a relaxation's graph. ``cp_model``: that of OR-tools."""

    def __init__(self, cp_model: Any, relaxed: Relaxation) -> None:
        self.cp, self.relaxed, self.graph = cp_model, relaxed, relaxed.graph
        self.reads, self.writes = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for op, s in relaxed._reads.tolist():
            self.reads[op].append(s)
        for s, op in relaxed._writes.tolist():
            self.writes[s].append(op)

    def extra(self, budget: int, effort: float, deadline: Deadline = NEVER) -> float:
        """Seconds of recomputation that every plan within ``budget`` bytes takes, by what the solver proves in
        ``effort`` deterministic seconds for each chain; 0 where it proves nothing."""
        best, rows, own = 0.0, self.chain, self.relaxed.own.tolist()
        for count in _COUNTS:
            if deadline.over or math.isinf(best) or count > len(rows):
                break
            ends = [len(rows) * i // count for i in range(count + 1)]
            ops = [max(rows[a:b], key=own.__getitem__) for a, b in pairwise(ends)]
            best = max(best, _Stretches(self, ops, budget).solve(effort, deadline))
        return best

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

    def before(self, op: int) -> Mask:
        return self._along(op, self.relaxed._backward)

    def after(self, op: int) -> Mask:
        return self._along(op, self.relaxed._forward)

    def _along(self, op: int, rows: Any) -> Mask:
        mask = reached((op,), rows)
        mask[op] = False
        return mask


class _Stretches:
    """The integer program of some moments: for each stretch that begins with one, whether a storage is needed in it
    (``need``), in memory at its begin (``held``), and which ops run in it."""

    def __init__(self, of: ChainBound, ops: Sequence[int], budget: int) -> None:
        self.of, self.ops, self.last = of, ops, len(ops) - 1
        self.model = of.cp.CpModel()
        graph, relaxed = of.graph, of.relaxed
        self.before, self.after = [of.before(k) for k in ops], [of.after(k) for k in ops]
        self.needs: dict[tuple[int, int], Any] = {}
        self.runs: dict[tuple[int, int], Any] = {}
        self.held: list[list[tuple[int, Any]]] = [[] for _ in ops]
        self.cost: list[Any] = []
        self.there = [self._touched(k) for k in ops]
        self.todo: list[tuple[int, int, bool]] = []  # stretch, op or storage, whether it is an op
        for j in range(len(ops)):
            wanted = {s for o in self._first(j) for s in of.reads[o]}
            wanted |= set(of.reads[ops[j + 1]]) if j < self.last else set(graph.kept)
            for s in sorted(wanted):
                if (need := self._need(j, s)) is not None:
                    self.model.add(need == 1)
        while self.todo:
            j, what, is_op = self.todo.pop()
            self._op(j, what) if is_op else self._storage(j, what)
        for j, k in enumerate(ops):
            room = budget - int(relaxed.own[k])
            self.model.add(sum(int(relaxed.waits[s]) * there for s, there in self.held[j]) <= room)
        self.model.minimize(sum(self.cost))

    def _touched(self, op: int) -> set[int]:
        """What is there at the moment of an op whatever else is: the caller's, and what it reads and makes."""
        uses, relaxed = self.of.graph.uses, self.of.relaxed
        there = {*uses.reads[op], *uses.defines[op], *self.of.graph.static}
        if (
            len(relaxed.pairs.get(op, ())) == 1
        ):  # a result may lie in its place; of several it is not known which
            there.discard(relaxed.pairs[op][0][0])
        return there

    def _first(self, j: int) -> list[int]:
        """Ops that run for the first time in a stretch, in every order."""
        mask = self.after[j] if j == self.last else self.after[j] & self.before[j + 1]
        return [int(k) for k in mask.nonzero()[0]]

    def _need(self, j: int, s: int) -> Any:
        """Whether a storage is needed in a stretch; None where it is there in any case."""
        definer = self.of.graph.uses.definer[s]
        if s in self.there[j] or definer < 0:
            return None
        if self.after[j][definer] and (j == self.last or self.before[j + 1][definer]):
            return None
        if (j, s) not in self.needs:
            self.needs[j, s] = self.model.new_bool_var("")
            self.todo.append((j, s, False))
        return self.needs[j, s]

    def _run(self, j: int, op: int) -> Any:
        if (j, op) not in self.runs:
            self.runs[j, op] = self.model.new_bool_var("")
            self.todo.append((j, op, True))
        return self.runs[j, op]

    def _storage(self, j: int, s: int) -> None:
        """A storage that is needed was there, or all that write it run, as far as they can in this stretch."""
        m, need = self.model, self.needs[j, s]
        made = m.new_bool_var("")
        ways = [made]
        if not self.after[j][self.of.graph.uses.definer[s]]:
            held = m.new_bool_var("")
            self.held[j].append((s, held))
            ways.append(held)
            if j and (earlier := self._need(j - 1, s)) is not None:
                m.add_implication(held, earlier)
        m.add_bool_or([*ways, need.negated()])
        for op in self.of.writes[s]:
            if j == self.last or not (self.after[j + 1][op] or op == self.ops[j + 1]):
                m.add_implication(made, self._run(j, op))

    def _op(self, j: int, op: int) -> None:
        """An op reads what is needed for that; one that ran before costs its time."""
        relaxed, run = self.of.relaxed, self.runs[j, op]
        if self.before[j][op] or op == self.ops[j]:
            if not relaxed.again[op]:
                self.model.add(run == 0)
                return
            part = self.of.graph.ops[op].time / relaxed.total if relaxed.total else 0.0
            self.cost.append(int(part * _TICKS * _SAFE) * run)
        for s in self.of.reads[op]:
            if (need := self._need(j, s)) is not None:
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
