"""One arena for temporaries as XLA's heap simulator fills it.

Buffers are replayed along the schedule: within a step all that begins is taken before anything that ends is given
back, unless a result is written over an operand that ends there. Then they are placed by decreasing size (spatial)
or by decreasing span of life over all that share a place (temporal), each into the smallest free chunk that fits it
in all lives of its group; the smaller heap wins. Source: XLA, ``HeapSimulator`` and
``GlobalDecreasingSizeBestFitHeap``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from tightship import _core
from tightship.frontends.hlo.alias import AliasSet
from tightship.frontends.hlo.buffers import Buffer
from tightship.frontends.hlo.live import LiveRanges
from tightship.frontends.hlo.share import Sharing

__all__ = ["Group", "Member", "best_fit", "most_alive", "replay", "stays_of"]


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
    """Which temporaries share a place and when each is there. ``heap``: the buffers to place, with their sets.

    As in XLA, a buffer without bytes is no event: it does not make others live longer."""
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
                    clock += heap[taken].size > 0
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
            clock += heap[buffer].size > 0
            group.members.append(member)
            of[buffer] = (group, member)
        for buffer in freed[step]:
            of[buffer][1].end = clock
            clock += heap[buffer].size > 0
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
    spatial = _fit(groups, sorted(range(len(groups)), key=lambda k: _spatial(groups[k])), alignment)
    if spatial[1] <= most_alive((s, e, g.size) for g in groups for s, e in stays_of(g)):
        return spatial  # nothing is smaller, and of two alike the first is taken
    temporal = _fit(groups, sorted(range(len(groups)), key=lambda k: _temporal(groups[k])), alignment)
    return min(spatial, temporal, key=lambda f: f[1])


def _spatial(g: Group) -> tuple[int, int, int]:
    first = g.members[0]
    return -g.size, first.start - first.end, first.buffer.id


def _temporal(g: Group) -> tuple[int, int, int]:
    return -g.span, -g.size, g.members[0].buffer.id


def _fit(groups: Sequence[Group], order: Sequence[int], alignment: int) -> tuple[list[int], int]:
    stays = [stays_of(g) for g in groups]
    first = np.cumsum([0, *map(len, stays)], dtype=np.int64)
    flat = np.array([s for row in stays for s in row], dtype=np.int64).reshape(-1, 2)
    size = np.array([g.size for g in groups], dtype=np.int64)
    start, end = np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1])
    offsets = _core.best_fit(start, end, first, size, np.array(order, dtype=np.int64), alignment)
    found: list[int] = offsets.tolist()
    return found, max((o + g.size for o, g in zip(found, groups, strict=True) if g.size), default=0)


def stays_of(group: Group) -> list[tuple[int, int]]:
    """[start, end) in which the group's place is taken, those that overlap joined."""
    found: list[tuple[int, int]] = []
    since = -1
    for m in sorted(group.members, key=lambda m: m.start):
        start = max(m.start, since)
        if m.end > start:
            found.append((start, m.end))
            since = m.end
    return found


def most_alive(lives: Iterable[tuple[int, int, int]]) -> int:
    """The most bytes alive at once; ``lives`` are (start, end, bytes), half-open."""
    changes: dict[int, int] = {}
    for start, end, nbytes in lives:
        changes[start] = changes.get(start, 0) + nbytes
        changes[end] = changes.get(end, 0) - nbytes
    return max(accumulate(changes[t] for t in sorted(changes)), default=0)
