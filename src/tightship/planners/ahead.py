"""Gathers between ranks that begin ahead of where they are read, on a stream of their own.

A plan whose steps all wait for one another is given: each gather is taken out of its place, put where its result is
first read, and from there begun so early that it has ended by then, as far as bytes allow; the last ones first, as
what follows a gather on its stream says when it has to have ended. How far ahead follows from seconds, as XLA's
latency hiding scheduler has it, and from the bytes that are left at each step. All else stays in its order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tightship.graph import Graph
from tightship.plan import Step
from tightship.simulate import Timeline, extra_bytes

__all__ = ["STREAM", "begun_ahead", "largest_gather"]

STREAM = 2
"""Of gathers; 1 has copies to and from the host."""
_SENT = "_c10d_functional.all_gather_into_tensor.default"


def _beside(target: str) -> bool:
    """Whether ops of this name may run on a stream of their own: they change nothing, and send by themselves."""
    return target.endswith(_SENT)


def largest_gather(graph: Graph) -> int:
    """Bytes of the largest result of an op that may begin ahead; 0 where there is none."""
    made = (graph.uses.defines[k] for k, op in enumerate(graph.ops) if _beside(op.target))
    return max((graph.storages[s].size for row in made for s in row), default=0)


def begun_ahead(graph: Graph, line: Timeline, limit: int) -> tuple[Step, ...] | None:
    """The steps of ``line`` with gathers begun ahead within ``limit`` bytes; None where there is none to begin."""
    steps = line.steps
    if any(step.stream for step in steps):  # copies to the host end when they like, and bytes with them
        return None
    rows = _movable(graph, steps)
    touches = _Touches(graph, steps, rows) if rows else None
    gathers = [row for i in rows if touches is not None and (row := touches.gather(i)) is not None]
    if not gathers:
        return None
    own = {row.step for row in gathers}
    seconds = [0.0 if s.stream or i in own else line.ends[i] - line.begins[i] for i, s in enumerate(steps)]
    clock = [0.0, *accumulate(seconds)]
    level = np.array(line.during, dtype=np.int64)
    for row in gathers:  # each is made where it is needed, and no sooner
        level[row.step : row.latest] -= row.size
    places: dict[int, tuple[_Gather, int]] = {}
    following = clock[-1]
    for row in sorted(gathers, key=lambda row: row.latest, reverse=True):
        due = min(clock[row.latest], following)
        begin = due - (line.ends[row.step] - line.begins[row.step])
        at = max(row.earliest, min(row.latest, bisect_right(clock, begin) - 1), 0)
        full = np.flatnonzero(level[at : row.latest] + row.size > limit)
        at += int(full[-1]) + 1 if len(full) else 0
        level[at : row.latest] += row.size
        following = min(begin, following) if at < row.latest else following
        places[row.step] = row, at
    return _moved(steps, places)


class _Gather(NamedTuple):
    """``step`` can be between ``earliest`` and ``latest``, and is waited for by the steps ``waiters``: the first ones
    that read what it makes, and that end or write what it reads."""

    step: int
    earliest: int
    latest: int
    waiters: tuple[int, ...]
    size: int


def _movable(graph: Graph, steps: Sequence[Step]) -> list[int]:
    """Steps that gather one tensor and ask for no other bytes, but of what others of them make."""
    following = {k for op in graph.ops for k in op.control}
    alone = {
        k
        for k, op in enumerate(graph.ops)
        if _beside(op.target) and len(op.outputs) == len(graph.uses.defines[k]) == 1
        if not (op.control or op.mutates or op.random or op.overwrites or extra_bytes(op) or k in following)
        if all(request.storage >= 0 for request in op.requests)
    }
    made = {s for k in alone for s in graph.uses.defines[k]}
    alone = {
        k for k in alone if not made & {*graph.uses.reads[k]} and not {*graph.uses.defines[k]} & graph.static
    }
    found = []
    for i, step in enumerate(steps):
        runs = step.kind == "compute" or (step.kind == "recompute" and step.storages)
        if runs and step.op in alone and not (step.stream or step.saves or step.reuses):
            found.append(i)
    return found


def _touched(graph: Graph, step: Step) -> tuple[set[int], set[int]]:
    """What a step reads, and what it makes, writes or ends."""
    if step.kind not in ("compute", "recompute"):
        own = set(step.storages)
        return (own, own if step.kind in ("free", "fetch", "decompress") else set())
    uses = graph.uses
    written = {*uses.mutates[step.op]}
    return {*uses.reads[step.op], *written}, {*uses.defines[step.op], *written, *(a for a, _ in step.reuses)}


class _Touches:
    """At which steps storages that gathers read or make are used at all, and written, made or ended."""

    def __init__(self, graph: Graph, steps: Sequence[Step], rows: Sequence[int]) -> None:
        self.graph, self.steps = graph, steps
        self.uses: dict[int, list[int]] = {s: [] for i in rows for s in self._of(i)}
        self.changes: dict[int, list[int]] = {s: [] for s in self.uses}
        self.first: dict[int, int] = {}  # by op
        self.makers: dict[int, list[int]] = {}  # of values, views among them
        for k, op in enumerate(graph.ops):
            for v in op.outputs:
                self.makers.setdefault(v, []).append(k)
        for i, step in enumerate(steps):
            reads, changes = _touched(graph, step)
            for s in {*reads, *changes} & self.uses.keys():
                self.uses[s].append(i)
            for s in changes & self.uses.keys():
                self.changes[s].append(i)
            if step.kind == "compute":
                self.first[step.op] = i

    def _of(self, i: int) -> tuple[int, ...]:
        step, uses = self.steps[i], self.graph.uses
        return (*uses.reads[step.op], *uses.defines[step.op])

    def gather(self, i: int) -> _Gather | None:
        """None where nothing on stream 0 uses what step ``i`` makes."""
        step, uses = self.steps[i], self.graph.uses
        (made,) = step.storages or uses.defines[step.op]
        readers: dict[int, int] = {}
        for j in self.uses[made][bisect_right(self.uses[made], i) :]:
            readers.setdefault(self.steps[j].stream, j)
            if not self.steps[j].stream:
                break
        if 0 not in readers:
            return None
        inputs = [self.changes[s] for s in uses.reads[step.op]]
        before = [row[: bisect_left(row, i)] for row in (*inputs, self.uses[made])]
        then = [row[bisect_right(row, i) :] for row in inputs]
        makers = [self.first[k] for v in self.graph.ops[step.op].inputs for k in self.makers.get(v, ())]
        earliest = max([row[-1] for row in before if row] + makers, default=-1) + 1
        latest = min([row[0] for row in then if row] + [*readers.values()])
        waiters = tuple(sorted({*readers.values(), *(row[0] for row in then if row)}))
        return _Gather(i, earliest, latest, waiters, self.graph.storages[made].size)


def _moved(steps: Sequence[Step], places: dict[int, tuple[_Gather, int]]) -> tuple[Step, ...]:
    """The steps in their new order, with the waits that follow from it."""
    early: dict[int, list[int]] = {}
    for i, (_, at) in sorted(places.items(), key=lambda item: item[1][0].latest):
        early.setdefault(at, []).append(i)
    order = [i for at in range(len(steps)) for i in (*early.get(at, ()), *(() if at in places else (at,)))]
    place = {i: k for k, i in enumerate(order)}
    moves = {i for i, (row, at) in places.items() if at < row.latest}
    more: dict[int, list[int]] = {}
    for i in moves:
        for j in places[i][0].waiters:
            more.setdefault(j, []).append(place[i])
    made: list[Step] = []
    last = -1  # of stream 0
    for k, i in enumerate(order):
        waits = tuple(sorted({*(place[w] for w in steps[i].waits), *more.get(i, ())}))
        if i in moves:
            begun = {*waits} if last < 0 else {*waits, last}
            made.append(replace(steps[i], stream=STREAM, waits=tuple(sorted(begun))))
            continue
        made.append(steps[i] if waits == steps[i].waits else replace(steps[i], waits=waits))
        if not steps[i].stream:
            last = k
    return tuple(made)
