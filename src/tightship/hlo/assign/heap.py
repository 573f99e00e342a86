"""One arena for temporaries: who shares a place and when each is there, as XLA's heap simulator has it and further.

Buffers are replayed along the schedule: within a step all that begins is taken before anything that ends is given
back, unless a result is written over an operand that ends there. Then planner ``xla-heap`` places them. Source: XLA,
``HeapSimulator``.

XLA writes a result over an operand that is an instruction's own, and neither of them one of several buffers at one
place. As legal (``join_in_place``) are operands that come out of tuples, and buffers that loops, branches or donation
keep together, as long as no other two of the buffers at both places are alive at one time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tightship.baselines import xla_heap
from tightship.hlo.alias import AliasSet, Sharing
from tightship.hlo.assign.allocate import Allocation, Assignment, thread_locals
from tightship.hlo.assign.bound import lower_bound
from tightship.hlo.dataflow import Buffer
from tightship.hlo.liveness import LiveRanges, joined, over
from tightship.planners.place import problem

__all__ = [
    "Group",
    "Member",
    "assembled",
    "best_fit",
    "join_in_place",
    "most_alive",
    "replay",
    "stays",
]


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


def replay(live: LiveRanges, heap: Mapping[Buffer, AliasSet], sharing: Sharing) -> list[Group]:
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
            if group is None and len(heap[buffer].buffers) == 1:
                taken = _operand(buffer, step, heap, ends, freed[step], sharing)
                if taken is not None:
                    group = of[taken][0]
                    of[taken][1].end = clock
                    clock += heap[taken].size > 0
                    del freed[step][taken]
                    ends[taken] = live.ranges[buffer].end
                    group.size = max(group.size, heap[buffer].size)
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


def assembled(
    live: LiveRanges,
    sharing: Sharing,
    fixed: Sequence[Allocation],
    groups: Sequence[Group],
    placed: tuple[Sequence[int], int],
    target: str,
) -> Assignment:
    """The assignment of ``fixed`` allocations and a heap of the groups, ``placed`` at offsets in so many bytes."""
    offsets, size = placed
    heap = Allocation("heap", size)
    for group, offset in zip(groups, offsets, strict=True):
        heap.held.update((m.buffer, offset) for m in group.members)
    every = (*fixed, *([heap] if heap.held else ()), *thread_locals(live))
    fragmentation = size - most_alive(stays(groups))
    return Assignment(live, target, every, fragmentation, lower_bound(live, every, sharing), "tight")


def stays(groups: Sequence[Group]) -> list[tuple[int, int, int]]:
    """(start, end, bytes) of all times, half-open, at which the place of a group is taken."""
    return [
        (start, end, group.size)
        for group in groups
        for start, end in joined((m.start, m.end) for m in group.members if m.end > m.start)
    ]


def most_alive(lives: Iterable[tuple[int, int, int]]) -> int:
    """The most bytes alive at once; ``lives`` are (start, end, bytes), half-open."""
    rows = np.array([row for row in lives if row[1] > row[0]], dtype=np.int64).reshape(-1, 3)
    return problem.most_alive(*map(np.ascontiguousarray, rows.T))


_PAIRS = 10_000
"""Pairs of buffers at two places beyond which the places stay two."""


def join_in_place(groups: Sequence[Group], live: LiveRanges, sharing: Sharing) -> list[Group]:
    """The groups, those of one size joined of which one is written over the other."""
    found: dict[int, Group] = dict(enumerate(groups))
    of = {m.buffer: k for k, g in found.items() for m in g.members}
    for new in sorted(of, key=lambda b: (live.ranges[b].start, b.id)):
        for old in _operands(new, live):
            k, n = of.get(old, -1), of[new]
            if k in (-1, n) or found[k].size != found[n].size or not over(live, old, new, sharing):
                continue
            if _legal(found[k], found[n], live, sharing):
                members = sorted((*found[k].members, *found.pop(n).members), key=lambda m: m.start)
                found[k] = Group(found[k].size, members)
                of.update((m.buffer, k) for m in members)
                break
    return list(found.values())


def _operands(new: Buffer, live: LiveRanges) -> list[Buffer]:
    """What ends where ``new`` begins, of all that the instruction is given."""
    start = live.ranges[new].start
    given = dict.fromkeys(b for n in new.node.operands for b in n.at if b in live.ranges)
    return [b for b in given if live.ranges[b].end == start > live.ranges[b].start]


def _legal(a: Group, b: Group, live: LiveRanges, sharing: Sharing) -> bool:
    """Whether the members of both may lie at one place."""
    if len(a.members) * len(b.members) > _PAIRS:
        return False
    for x in a.members:
        p = live.ranges[x.buffer]
        for y in b.members:
            q = live.ranges[y.buffer]
            if p.start > q.end or q.start > p.end:
                continue
            first, second = (x.buffer, y.buffer) if p.end == q.start else (y.buffer, x.buffer)
            r = live.ranges[first]
            if (
                r.end != live.ranges[second].start
                or r.start == r.end
                or not over(live, first, second, sharing)
            ):
                return False
    return True
