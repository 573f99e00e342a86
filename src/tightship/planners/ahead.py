"""Gathers between ranks that begin ahead of where they are read, on a stream of their own.

A plan whose steps all wait for one another is given: each gather is taken out of its place and begun so early that it
has ended when its result is first read, as far as bytes allow; the last ones first, as what follows a gather on its
stream says when it has to have ended. How far ahead follows from seconds, as XLA's latency hiding scheduler has it,
and from the bytes that are left at each step. Everything else stays in its order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from tightship.graph import Graph
from tightship.plan import Step
from tightship.simulate import Timeline

__all__ = ["STREAM", "begun_ahead"]

STREAM = 2
"""Of gathers; 1 has copies to and from the host."""
_SENT = "_c10d_functional.all_gather_into_tensor.default"


def _beside(target: str) -> bool:
    """Whether ops of this name may run on a stream of their own: they change nothing, and send by themselves."""
    return target.endswith(_SENT)


def begun_ahead(graph: Graph, line: Timeline, limit: int) -> tuple[Step, ...] | None:
    """The steps of ``line`` with gathers begun ahead within ``limit`` bytes; None where there is none to begin."""
    steps = line.steps
    rows = [i for i, step in enumerate(steps) if _may_move(graph, step)]
    if not rows:
        return None
    gathers = set(rows)
    seconds = [line.ends[i] - line.begins[i] if not s.stream else 0.0 for i, s in enumerate(steps)]
    clock = [0.0, *accumulate(0.0 if i in gathers else t for i, t in enumerate(seconds))]
    level = np.array(line.during, dtype=np.int64)
    moves: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    following = clock[-1]
    for i in reversed(rows):
        (made,) = steps[i].storages or graph.uses.defines[steps[i].op]
        found = _readers(graph, steps, i, made)
        if not found:
            continue
        due = min(clock[found[0]], following)
        begin = due - seconds[i]
        at = max(_earliest(graph, steps, i, made), min(i, bisect_right(clock, begin) - 1), 0)
        size = graph.storages[made].size
        full = np.flatnonzero(level[at:i] + size > limit)
        at += int(full[-1]) + 1 if len(full) else 0
        if at == i and found[0] == i + 1:
            continue
        level[at:i] += size
        following = min(begin, following)
        moves[i], readers[i] = at, found
    return _moved(steps, moves, readers) if moves else None


def _may_move(graph: Graph, step: Step) -> bool:
    if step.kind not in ("compute", "recompute") or step.stream or step.saves or step.reuses:
        return False
    made = step.storages or graph.uses.defines[step.op]
    return _beside(graph.ops[step.op].target) and len(made) == 1 and made[0] not in graph.static


def _touched(graph: Graph, step: Step) -> tuple[set[int], set[int]]:
    """What a step reads, and what it makes, writes or ends."""
    if step.kind not in ("compute", "recompute"):
        own = set(step.storages)
        return (own, own if step.kind in ("free", "fetch", "decompress") else set())
    uses = graph.uses
    return {*uses.reads[step.op], *uses.mutates[step.op]}, {*uses.defines[step.op], *uses.mutates[step.op]}


def _readers(graph: Graph, steps: Sequence[Step], i: int, made: int) -> list[int]:
    """The first step on each stream that uses what step ``i`` has made, up to the first on stream 0."""
    found: dict[int, int] = {}
    for j in range(i + 1, len(steps)):
        reads, writes = _touched(graph, steps[j])
        if made in reads or made in writes:
            found.setdefault(steps[j].stream, j)
            if not steps[j].stream:
                break
    return sorted(found.values()) if 0 in found else []


def _earliest(graph: Graph, steps: Sequence[Step], i: int, made: int) -> int:
    """Before which step ``i`` may not begin: the last that writes what it reads, or has to do with what it makes."""
    op, inputs = graph.ops[steps[i].op], {*graph.uses.reads[steps[i].op]}
    for j in range(i - 1, -1, -1):
        reads, writes = _touched(graph, steps[j])
        if inputs & writes or made in reads or made in writes:
            return j + 1
        if steps[j].kind == "compute" and steps[j].op in op.control:
            return j + 1
    return 0


def _moved(steps: Sequence[Step], moves: dict[int, int], readers: dict[int, list[int]]) -> tuple[Step, ...]:
    """The steps in their new order, with the waits that follow from it."""
    early: dict[int, list[int]] = {}
    for i in sorted(moves):
        early.setdefault(moves[i], []).append(i)
    order = [i for at in range(len(steps)) for i in (*early.get(at, ()), *(() if at in moves else (at,)))]
    place = {i: k for k, i in enumerate(order)}
    more: dict[int, list[int]] = {}
    for i, found in readers.items():
        for j in found:
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
