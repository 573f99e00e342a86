"""One arena for temporaries as XLA's heap simulator fills it.

Buffers are replayed along the schedule: within a step all that begins is taken before anything that ends is given
back, unless a result is written over an operand that ends there. Then planner ``xla-heap`` places them. Source: XLA,
``HeapSimulator``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tightship.baselines import xla_heap
from tightship.hlo.alias import AliasSet
from tightship.hlo.dataflow import Buffer
from tightship.hlo.in_place import Sharing
from tightship.hlo.liveness import LiveRanges

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
    """Offsets of the groups, in their order, and the bytes of the heap: those of planner ``xla-heap``."""
    found = [0] * len(groups)
    placed = ((m.buffer.id, m.start, m.end, k) for k, g in enumerate(groups) if g.size for m in g.members)
    members = sorted((m for m in placed if m[2] > m[1]), key=lambda m: m[0])
    if not members:
        return found, 0
    _, start, end, group = zip(*members, strict=True)
    offsets, size, _ = xla_heap.offsets(
        start, end, [groups[k].size for k in group], group=group, alignment=alignment
    )
    for k, offset in zip(group, offsets.tolist(), strict=True):
        found[k] = offset
    return found, size


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
