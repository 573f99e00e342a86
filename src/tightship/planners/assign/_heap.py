"""One arena for temporaries as XLA's heap simulator fills it.

Buffers are replayed along the schedule: within a step all that begins is taken before anything that ends is given
back, unless a result is written over an operand that ends there. Then they are placed by decreasing size (spatial)
or by decreasing span of life over all that share a place (temporal), each into the smallest free chunk that fits it
in all lives of its group; the smaller heap wins. Source: XLA, ``HeapSimulator`` and
``GlobalDecreasingSizeBestFitHeap``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tightship.frontends.hlo.alias import AliasSet
from tightship.frontends.hlo.live import LiveRanges
from tightship.frontends.hlo.points_to import Buffer
from tightship.frontends.hlo.share import Sharing

__all__ = ["Group", "Member", "best_fit", "replay"]


@dataclass(slots=True)
class Member:
    """A buffer's stay in the heap, in events: [start, end)."""

    buffer: Buffer
    start: int
    end: int = -1


@dataclass(slots=True)
class Group:
    """Buffers at one place: ``members`` in the order they came; the first of them asked for the place."""

    size: int
    members: list[Member] = field(default_factory=list)

    @property
    def span(self) -> int:
        return max(m.end for m in self.members) - min(m.start for m in self.members)


def replay(
    live: LiveRanges, heap: Mapping[Buffer, AliasSet], sharing: Sharing, *, share: bool = True
) -> list[Group]:
    """Which temporaries share a place and when each is there. ``heap``: the buffers to place, with their sets."""
    defined: list[list[Buffer]] = [[] for _ in range(live.end + 1)]
    freed: list[dict[Buffer, None]] = [{} for _ in range(live.end + 1)]
    ends = {b: live.ranges[b].end for b in heap}
    ordered = sorted(heap, key=lambda b: (live.ranges[b].start, live.ranges[b].end, b.id))
    for buffer in ordered:
        defined[live.ranges[buffer].start].append(buffer)
        freed[live.ranges[buffer].end][buffer] = None
    groups: list[Group] = []
    of_set: dict[int, Group] = {}
    of: dict[Buffer, tuple[Group, Member]] = {}
    clock = 0
    for step in range(live.end + 1):
        for buffer in defined[step]:
            group = of_set.get(heap[buffer].id)
            if group is None and share and len(heap[buffer].buffers) == 1:
                taken = _operand(buffer, step, heap, ends, freed[step], sharing)
                if taken is not None:
                    group = of[taken][0]
                    of[taken][1].end = clock
                    clock += 1
                    del freed[step][taken]
                    ends[taken] = live.ranges[buffer].end
                    group.size = max(group.size, heap[buffer].size)
            elif group is None:
                of_set[heap[buffer].id] = group = Group(heap[buffer].size)
                groups.append(group)
            if group is None:
                of_set[heap[buffer].id] = group = Group(heap[buffer].size)
                groups.append(group)
            member = Member(buffer, clock)
            clock += 1
            group.members.append(member)
            of[buffer] = (group, member)
        for buffer in freed[step]:
            of[buffer][1].end = clock
            clock += 1
    return groups


def _operand(
    buffer: Buffer,
    step: int,
    heap: Mapping[Buffer, AliasSet],
    ends: Mapping[Buffer, int],
    freed: Mapping[Buffer, None],
    sharing: Sharing,
) -> Buffer | None:
    """The operand that ends here and that the buffer may be written over, if there is one."""
    node = buffer.node
    if node.opcode == "copy":
        return None
    for operand in node.operands:
        found = operand.at[0]
        if (
            found in freed
            and found in heap
            and len(heap[found].buffers) == 1
            and ends[found] == step
            and found.node in node.operands
            and sharing.allowed(found.node, found.index, node, buffer.index)
        ):
            return found
    return None


def best_fit(groups: Sequence[Group], alignment: int) -> tuple[list[int], int]:
    """Offsets of the groups, in their order, and the bytes of the heap."""
    spatial = sorted(range(len(groups)), key=lambda k: _spatial(groups[k]))
    temporal = sorted(range(len(groups)), key=lambda k: _temporal(groups[k]))
    found = [_fit(groups, order, alignment) for order in (spatial, temporal)]
    return min(found, key=lambda f: f[1])


def _spatial(g: Group) -> tuple[int, int, int]:
    first = g.members[0]
    return -g.size, first.start - first.end, first.buffer.id


def _temporal(g: Group) -> tuple[int, int, int]:
    return -g.span, -g.size, g.members[0].buffer.id


def _fit(groups: Sequence[Group], order: Sequence[int], alignment: int) -> tuple[list[int], int]:
    offsets = [0] * len(groups)
    total = 0
    placed = _Placed(sum(len(g.members) for g in groups))
    for k in order:
        group = groups[k]
        if not group.size:
            continue
        used = placed.during(group.members)
        offsets[k] = _smallest(used, group.size, alignment)
        total = max(total, offsets[k] + group.size)
        for m in group.members:
            placed.add(m.start, m.end, offsets[k], offsets[k] + group.size)
    return offsets, total


def _smallest(used: list[tuple[int, int]], size: int, alignment: int) -> int:
    """The lowest offset in the smallest gap between the used chunks that takes ``size`` bytes."""
    best, at, top = None, 0, 0
    for start, end in sorted(used):
        if start > top:
            room = start - at
            if room >= size and (best is None or room < best[0]):
                best = (room, at)
        if end > top:
            top = end
            at = -(-top // alignment) * alignment
    return at if best is None else best[1]


class _Placed:
    """What lies where and when; asked for all that lies within some time. Short lives are found by bucket."""

    WIDTH = 64

    def __init__(self, count: int) -> None:
        self.count = 0
        self.table = np.zeros((4, max(count, 1)), dtype=np.int64)
        self.buckets: dict[int, list[tuple[int, int, int, int]]] = {}
        self.long: list[int] = []

    def add(self, start: int, end: int, low: int, high: int) -> None:
        self.table[:, self.count] = (start, end, low, high)
        self.count += 1
        if end - start > self.WIDTH:
            self.long.append(self.count - 1)
        else:
            self.buckets.setdefault(start // self.WIDTH, []).append((start, end, low, high))

    def during(self, members: Sequence[Member]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for m in members:
            if m.end - m.start > 64 * self.WIDTH or len(self.long) > 8 * self.WIDTH:
                found += self._scan(m.start, m.end)
                continue
            for start, end, low, high in (self.table[:, k].tolist() for k in self.long):
                if start < m.end and end > m.start:
                    found.append((low, high))
            for bucket in range(m.start // self.WIDTH - 1, m.end // self.WIDTH + 1):
                for start, end, low, high in self.buckets.get(bucket, ()):
                    if start < m.end and end > m.start:
                        found.append((low, high))
        return found

    def _scan(self, since: int, until: int) -> list[tuple[int, int]]:
        starts, ends, low, high = self.table[:, : self.count]
        hit = (starts < until) & (ends > since)
        return list(zip(low[hit].tolist(), high[hit].tolist(), strict=True))
