"""The order of the ops of a program in slices: slice by slice, as far as they need nothing of other slices."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tightship.frontends.torch.capture.tape import Record, Tape

__all__ = [
    "Part",
    "Tag",
    "ordered",
]

aten = torch.ops.aten


Part = tuple[int, int] | None
"""Chain and slice whose part of a whole is touched; None: all of it."""


@dataclass
class Tag:
    """Where a record of the new program comes from: the chain, by its seed, and the slice (-1: none). ``parts`` are
    the whole storages of which it touches nothing but the slice's part."""

    chain: int
    slice: int
    parts: frozenset[int] = field(default=frozenset())


def ordered(tape: Tape, tags: Sequence[Tag]) -> list[Record]:
    """The records, slice by slice as far as they need nothing of other slices: what slices wait for first, then each
    slice's ops as soon as they can run, then the rest."""
    records = tape.records
    after = _followers(tape, tags)
    waits = [0] * len(records)
    for row in after:
        for j in row:
            waits[j] += 1
    cut = [tag.slice >= 0 for tag in tags]
    behind, before = _reached(after, cut), _reached(_reversed(after), cut)

    def key(j: int) -> tuple[int, int, int]:
        if cut[j]:
            return 1, tags[j].slice, j
        return (0, 0, j) if before[j] and not behind[j] else (2, 0, j)

    ready = [key(j) for j in range(len(records)) if not waits[j]]
    heapq.heapify(ready)
    order: list[Record] = []
    while ready:
        j = heapq.heappop(ready)[2]
        order.append(records[j])
        for n in after[j]:
            waits[n] -= 1
            if not waits[n]:
                heapq.heappush(ready, key(n))
    return _allocated_late(tape, order)


def _allocated_late(tape: Tape, order: Sequence[Record]) -> list[Record]:
    """Wholes that slices write into are there from the first of these on."""
    waiting = {tape.storage(r.results[0]): r for r in order if r.fn is aten.empty_strided.default}
    rows: list[Record] = []
    for r in order:
        if r.fn is aten.empty_strided.default:
            continue
        for s in dict.fromkeys((*r.writes, *(tape.storage(v) for v in r.reads))):
            if s in waiting:
                rows.append(waiting.pop(s))
        rows.append(r)
    return [*waiting.values(), *rows]


def _reversed(after: Sequence[Sequence[int]]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in after]
    for j, row in enumerate(after):
        for n in row:
            rows[n].append(j)
    return rows


def _reached(after: Sequence[Sequence[int]], start: Sequence[bool]) -> list[bool]:
    """What can be reached from the marked ones."""
    found = [False] * len(after)
    work = [n for j, marked in enumerate(start) if marked for n in after[j]]
    while work:
        j = work.pop()
        if not found[j]:
            found[j] = True
            work += after[j]
    return found


def _followers(tape: Tape, tags: Sequence[Tag]) -> list[list[int]]:
    """Which records have to run behind each: readers behind what has written before, writers behind both. Slices that
    touch their own parts of a whole are in nobody's way. Random ops and effects keep their order."""
    after: list[set[int]] = [set() for _ in tags]
    writes: dict[int, list[tuple[int, Part]]] = {}  # by storage: record, and the part that it writes
    reads: dict[int, list[tuple[int, Part]]] = {}
    chained = -1
    for j, (r, tag) in enumerate(zip(tape.records, tags, strict=True)):

        def part(s: int, tag: Tag = tag) -> Part:
            return (tag.chain, tag.slice) if s in tag.parts else None

        def behind(rows: list[tuple[int, Part]], p: Part, j: int = j) -> None:
            for n, q in rows:
                if n != j and (p is None or q is None or p[0] != q[0] or p == q):
                    after[n].add(j)

        read = {tape.storage(v) for v in r.reads}
        written = {tape.storage(v) for v in r.results if v >= 0} | set(r.writes)
        for s in read | written:
            behind(writes.get(s, []), part(s))
        for s in written:
            behind(reads.get(s, []), part(s))
            writes.setdefault(s, []).append((j, part(s)))
        for s in read:
            reads.setdefault(s, []).append((j, part(s)))
        if r.random or r.effect:
            if chained >= 0:
                after[chained].add(j)
            chained = j
    return [sorted(row) for row in after]
