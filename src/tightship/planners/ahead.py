"""Gathers between ranks, and copies of what streams, that run beside other ops, on streams of their own.

A plan whose steps all wait for one another is given. Each gather, and each fetch from the host, is taken out of its
place, put where its result is first read, and from there begun so early that it has ended by then, as far as bytes
allow; the last ones first, as what follows on its stream says when it has to have ended. A store to the host begins
in its place, and what it reads is freed when it has ended, as far as bytes allow. How far ahead, and how late,
follows from seconds, as XLA's latency hiding scheduler has it, and from the bytes that are left at each step. All
else stays in its order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tightship.graph import Graph
from tightship.plan import Step
from tightship.simulate import Timeline, extra_bytes

__all__ = ["COPIES", "STREAM", "begun_ahead", "largest_gather", "runs_beside"]

STREAM = 2
"""Of gathers; 1 has copies to and from the host that are steps by themselves."""
COPIES = 3
"""Of ops that copy what streams: one stream, as they share a link."""
_SENT = "_c10d_functional.all_gather_into_tensor.default"
FETCH, STORE = "tightship.fetch", "tightship.store"
"""Targets of the ops that copy what streams."""


def _ahead_on(target: str) -> int:
    """The stream on which ops of this name may begin ahead, 0 where they may not: they change nothing, and send or
    copy by themselves."""
    return STREAM if target.endswith(_SENT) else COPIES * (target == FETCH)


def runs_beside(graph: Graph) -> bool:
    """Whether there is an op that may run on a stream of its own."""
    return any(_ahead_on(op.target) or op.target == STORE for op in graph.ops)


def largest_gather(graph: Graph) -> int:
    """Bytes of the largest result of a gather that may begin ahead; 0 where there is none."""
    made = (graph.uses.defines[k] for k, op in enumerate(graph.ops) if _ahead_on(op.target) == STREAM)
    return max((graph.storages[s].size for row in made for s in row), default=0)


def begun_ahead(graph: Graph, line: Timeline, limit: int) -> tuple[Step, ...] | None:
    """The steps of ``line`` with gathers and copies beside other ops within ``limit`` bytes; None where there is none
    to begin."""
    steps = line.steps
    if any(step.stream for step in steps):  # copies to the host end when they like, and bytes with them
        return None
    rows, stores = _movable(graph, steps), _stores(graph, steps)
    touches = _Touches(graph, steps, rows) if rows else None
    gathers = [row for i in rows if touches is not None and (row := touches.gather(i)) is not None]
    if not gathers and not stores:
        return None
    took = [line.ends[i] - line.begins[i] for i in range(len(steps))]
    own = {row.step for row in gathers} | stores.keys()
    clock = [0.0, *accumulate(0.0 if i in own else t for i, t in enumerate(took))]
    storing = [0.0, *accumulate(t if i in stores else 0.0 for i, t in enumerate(took))]
    level = np.array(line.during, dtype=np.int64)
    for row in gathers:  # each is made where it is needed, and no sooner
        level[row.step : row.latest] -= row.size
    places: dict[int, int] = {}
    following: dict[int, float] = {}
    for row in sorted(gathers, key=lambda row: row.latest, reverse=True):
        due = min(clock[row.latest], following.get(row.stream, clock[-1]))
        begin = due - took[row.step]
        at = max(row.earliest, min(row.latest, bisect_right(clock, begin) - 1), 0)
        if row.stream == COPIES and stores:  # those that begin meanwhile are copied first
            begin -= storing[row.latest] - storing[at]
            at = max(row.earliest, min(row.latest, bisect_right(clock, begin) - 1), 0)
        full = np.flatnonzero(level[at : row.latest] + row.size > limit)
        at += int(full[-1]) + 1 if len(full) else 0
        level[at : row.latest] += row.size
        if at < row.latest:
            following[row.stream] = begin
        places[row.step] = at
    moves = {row.step: row.waiters for row in gathers if places[row.step] < row.latest}
    frees = _freed_late(
        stores, _stored(stores, places.keys() & moves, places, clock, took), clock, level, limit
    )
    moves |= {i: row.waiters for i, row in stores.items()}
    return _moved(
        graph, steps, [row.step for row in sorted(gathers, key=lambda r: r.latest)], places, frees, moves
    )


class _Gather(NamedTuple):
    """``step`` can be between ``earliest`` and ``latest``, and is waited for by the steps ``waiters``: the first ones
    that read what it makes, and that end or write what it reads."""

    step: int
    stream: int
    earliest: int
    latest: int
    waiters: tuple[int, ...]
    size: int


class _Store(NamedTuple):
    """What it reads is ended by step ``free`` and used by nobody in between."""

    free: int
    waiters: tuple[int, ...]
    size: int


def _movable(graph: Graph, steps: Sequence[Step]) -> list[int]:
    """Steps that gather or fetch one tensor and ask for no other bytes, but of what others of them make."""
    following = {k for op in graph.ops for k in op.control}
    alone = {
        k
        for k, op in enumerate(graph.ops)
        if _ahead_on(op.target) and op.outputs and len(graph.uses.defines[k]) == 1
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
        stream = _ahead_on(self.graph.ops[step.op].target)
        return _Gather(i, stream, earliest, latest, waiters, self.graph.storages[made].size)


def _stores(graph: Graph, steps: Sequence[Step]) -> dict[int, _Store]:
    """By step, those whose input is ended before anything else uses it."""
    found = [i for i, s in enumerate(steps) if s.kind == "compute" and graph.ops[s.op].target == STORE]
    if not found:
        return {}
    uses: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        reads, changes = _touched(graph, step)
        for s in {*reads, *changes}:
            uses.setdefault(s, []).append(i)
    rows = {}
    for i in found:
        op = graph.ops[steps[i].op]
        source = graph.values[op.inputs[0]].storage
        then = uses[source][bisect_right(uses[source], i) :]
        last = steps[then[0]] if then else None
        if last is None or last.kind != "free" or last.form != "full" or last.storages != (source,):
            continue
        later = [row[k] for s in op.mutates if (k := bisect_right(row := uses[s], i)) < len(row)]
        rows[i] = _Store(then[0], tuple(sorted({then[0], *later})), graph.storages[source].size)
    return rows


def _stored(
    stores: dict[int, _Store],
    ahead: Iterable[int],
    places: dict[int, int],
    clock: Sequence[float],
    took: Sequence[float],
) -> dict[int, float]:
    """When each store has ended: copies run one after the other, in the order in which they begin."""
    ends, until = {}, 0.0
    for at, i in sorted([*((places[i], i) for i in ahead), *((i, i) for i in stores)]):
        ends[i] = until = max(clock[at], until) + took[i]
    return ends


def _freed_late(
    stores: dict[int, _Store], ends: dict[int, float], clock: Sequence[float], level: np.ndarray, limit: int
) -> dict[int, int]:
    """Before which step what each store reads is freed; ``level`` is changed."""
    found = {}
    for i, row in stores.items():
        at = max(bisect_left(clock, ends[i]), row.free + 1)
        full = np.flatnonzero(level[row.free + 1 : at] + row.size > limit)
        at = row.free + 1 + int(full[0]) if len(full) else min(at, len(level))
        level[row.free + 1 : at] += row.size
        found[row.free] = at
    return found


def _moved(
    graph: Graph,
    steps: Sequence[Step],
    gathers: Sequence[int],
    places: dict[int, int],
    frees: dict[int, int],
    moves: dict[int, tuple[int, ...]],
) -> tuple[Step, ...]:
    """The steps in their new order, with the waits that follow from it: ``gathers`` and ``frees`` before the steps
    that are said, ``moves`` on their streams, waited for by others."""
    early: dict[int, list[int]] = {}
    for i, at in (*frees.items(), *((i, places[i]) for i in gathers)):
        early.setdefault(at, []).append(i)
    gone = places.keys() | frees.keys()
    order = [
        i
        for at in range(len(steps) + 1)
        for i in (*early.get(at, ()), *(() if at in gone or at == len(steps) else (at,)))
    ]
    place = {i: k for k, i in enumerate(order)}
    more: dict[int, list[int]] = {}
    for i, waiters in moves.items():
        for j in waiters:
            more.setdefault(j, []).append(place[i])
    made: list[Step] = []
    last = -1  # of stream 0
    for k, i in enumerate(order):
        waits = tuple(sorted({*(place[w] for w in steps[i].waits), *more.get(i, ())}))
        if i in moves:
            begun = {*waits} if last < 0 else {*waits, last}
            stream = _ahead_on(graph.ops[steps[i].op].target) or COPIES
            made.append(replace(steps[i], stream=stream, waits=tuple(sorted(begun))))
            continue
        made.append(steps[i] if waits == steps[i].waits else replace(steps[i], waits=waits))
        if not steps[i].stream:
            last = k
    return tuple(made)
