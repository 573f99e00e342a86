"""Which ops run again when, and how long every copy of what they make stays: the facts of a frame for that.

The ops keep their order; before the op at position *p* (stage *p*), earlier ones may run again, in their order. So
every run has a moment of its own: ``p * (n + 1) + k`` for the op at position *k* in stage *p*, its first run being
in stage *k*. A **copy** is what one run makes of a storage, and stays for one interval. Every read finds a copy that
began before it and has not ended. The copies at one moment, and the workspace of the op that runs, share the memory.
Ops that write one storage together (in place) run again together, as a **unit**.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tightship.plan import Step
from tightship.planners.evict._frame import EVICT, KEEP, Frame
from tightship.simulate import extra_bytes

__all__ = ["Retention", "Runs", "Unit"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops that run again together, by position; what they make, as (storage, position of the op that defines it,
    position of the last that writes it); what they read of others, as (storage, position); the stages in which they
    may run again; whether they may do so without having run at their place; seconds of one run."""

    at: tuple[int, ...]
    makes: tuple[tuple[int, int, int], ...]
    reads: tuple[tuple[int, int], ...]
    stages: range
    late: bool
    time: float


@dataclass(frozen=True, slots=True)
class Runs:
    """By unit: whether it runs at its place, and the stages in which it runs again."""

    first: tuple[bool, ...]
    again: tuple[tuple[int, ...], ...]


class Retention:
    """A frame as units and the reads between them. Bytes and seconds are those of its graph."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.graph, self.order = frame, frame.graph, frame.order
        self.n = len(frame.order)
        self.place = {k: at for at, k in enumerate(frame.order)}
        empty = (s for s, x in enumerate(self.graph.storages) if not x.size)
        self.held = self.graph.static | frozenset(empty)
        """Storages whose stay is nobody's choice: the caller's, and those of no bytes."""

    def moment(self, stage: Any, at: int) -> Any:
        return stage * (self.n + 1) + at

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """By the position of their first op."""
        root = list(range(self.n))

        def find(k: int) -> int:
            while root[k] != k:
                k = root[k]
            return k

        for s, writers in enumerate(self.graph.uses.writers):
            for w in writers[1:] if s not in self.graph.static else ():
                a, b = find(self.place[writers[0]]), find(self.place[w])
                root[max(a, b)] = min(a, b)
        rows: dict[int, list[int]] = defaultdict(list)
        for at in range(self.n):
            rows[find(at)].append(at)
        return tuple(self._unit(tuple(row)) for row in rows.values())

    def _unit(self, row: tuple[int, ...]) -> Unit:
        uses, ops = self.graph.uses, self.graph.ops
        made = {s: at for at in row for s in uses.defines[self.order[at]]}
        reads, again, end = [], True, self.n
        for at in row:
            k = self.order[at]
            again &= ops[k].pure and all(s in made or s in ops[k].updates for s in uses.mutates[k])
            for s, need in zip(uses.reads[k], uses.needs[k], strict=True):
                if s in made or s in ops[k].updates:
                    continue
                if s in self.graph.static:
                    changes = [self.place[w] for w in uses.writers[s][need:]]
                    end = min((end, *changes))  # what the caller's storage held until then is gone after it
                    continue
                again &= need == len(uses.writers[s])  # contents that are still to change are not made again
                if s not in self.held:
                    reads.append((s, at))
        stages = range(row[-1] + 1, end + 1) if again else range(0)
        first = self.order[row[0]]
        alone = len(row) == 1 and not uses.mutates[first] and first not in self._fixed
        read = bool(made) and all(s not in self.held and uses.readers[s] for s in made)
        late = bool(stages) and alone and read
        makes = tuple((s, at, max(self.place[w] for w in uses.writers[s])) for s, at in made.items())
        seconds = sum(ops[self.order[at]].time for at in row)
        return Unit(row, makes, tuple(reads), stages, late, seconds)

    @cached_property
    def _fixed(self) -> frozenset[int]:
        """Ops that others wait for, though no value says so."""
        return frozenset((*self.frame.chained, *(c for o in self.graph.ops for c in o.control)))

    @cached_property
    def unit_at(self) -> dict[int, int]:
        """The unit of each position."""
        return {at: u for u, unit in enumerate(self.units) for at in unit.at}

    @cached_property
    def first_reads(self) -> tuple[tuple[int, int, int], ...]:
        """What first runs read of finished storages, as (storage, position, unit), and what must be there at the end
        (unit -1). What is not finished is there anyway: a first copy stays at least until it is."""
        ready = {s: last for unit in self.units for s, _, last in unit.makes}
        rows = [
            (s, at, self.unit_at[at])
            for at, k in enumerate(self.order)
            for s in self.graph.uses.reads[k]
            if s not in self.held and at > ready[s]
        ]
        return (*rows, *((s, self.n, -1) for s in sorted(self.graph.kept - self.held)))

    @cached_property
    def stays(self) -> dict[int, int]:
        """By storage: the position up to which its first copy has to stay, because that was asked for."""
        out: dict[int, int] = {}
        for (s, _, to), may in zip(self.frame.gaps.tolist(), self.frame.engine.allowed.tolist(), strict=True):
            if not may >> EVICT & 1 and may >> KEEP & 1:
                out[s] = max(out.get(s, 0), to)
        return out

    @cached_property
    def workspace(self) -> tuple[int, ...]:
        """By position: bytes the op there needs beyond its results."""
        return tuple(extra_bytes(self.graph.ops[k]) for k in self.order)

    def runs(self, steps: Sequence[Step]) -> Runs:
        """The runs in a plan's steps."""
        first = [False] * len(self.units)
        again: list[list[int]] = [[] for _ in self.units]
        stage = 0
        for step in steps:
            if step.kind not in ("compute", "recompute"):
                continue
            at = self.place[step.op]
            u = self.unit_at[at]
            if step.kind == "compute" and at >= stage:
                stage, first[u] = at + 1, True
            elif self.units[u].at[0] == at and stage not in again[u]:
                again[u].append(stage)
        return Runs(tuple(first), tuple(map(tuple, again)))
