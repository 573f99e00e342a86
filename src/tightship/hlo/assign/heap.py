"""One arena for temporaries: who shares a place and when each is there, as XLA's heap simulator has it and further.

Buffers are replayed along the schedule: within a step all that begins is taken before anything that ends is given
back, unless a result is written over an operand that ends there. Then planner ``xla-heap`` places them. Source: XLA,
``HeapSimulator``.

XLA writes a result over an operand that is an instruction's own, and neither of them one of several buffers at one
place. As legal (``join_in_place``) are operands that come out of tuples, and buffers that loops, branches or donation
keep together, as long as no other two of the buffers at both places are alive at one time.

``lower_bound`` is a total that no assignment of a schedule goes below. What is never given back (read-only arguments,
constants, thread-local buffers), and what outputs and donated arguments take (the *hosts*), are there in any case.
What else is alive while an instruction runs lies in hosts that are idle then, or in the heap. A buffer lies in one of
them whole, so only those as large as it is can take it: for any size, the buffers of at least that size, less the
idle hosts of at least that size, are in the heap; the most over all sizes and instructions is a bound. Where that is
highest, it is sharpened by what each host can take at best: of the buffers that are never in the way of its own, a
sum of sizes that it has room for. Two of which one may be written over the other count for the larger. Source: ours;
with size 0 and between instructions it is the usual one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from tightship.baselines import xla_heap
from tightship.cached import cached_property
from tightship.hlo.alias import AliasSet, Sharing
from tightship.hlo.assign.allocate import Allocation, Assignment, thread_locals
from tightship.hlo.dataflow import Buffer
from tightship.hlo.liveness import LiveRanges, joined, over
from tightship.planners.place import problem

__all__ = [
    "Group",
    "Member",
    "assembled",
    "best_fit",
    "join_in_place",
    "lower_bound",
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


_CELLS = 50_000_000
"""Sizes times steps that are looked at; where there are more, only the largest sizes are."""

_SHARPENED = 8
"""Steps at which the bound is sharpened."""

_SHARPENED_UP_TO = 200_000
"""Buffers times hosts beyond which it is not."""

_PARTS = 64
"""A buffer below this part of a host counts as if it could be cut."""


def lower_bound(live: LiveRanges, allocations: Sequence[Allocation], sharing: Sharing) -> int:
    """Bytes. Time: steps times different sizes."""
    fixed = [a for a in allocations if a.read_only or a.kind == "thread-local"]
    return sum(a.size for a in fixed) + _Bound(live, allocations, sharing).least()


@dataclass
class _Bound:
    """``saved``: (step, bytes) that results written over operands make count twice at most."""

    live: LiveRanges
    allocations: Sequence[Allocation]
    sharing: Sharing
    hosts: list[tuple[Allocation, AliasSet]] = field(init=False)
    groups: list[AliasSet] = field(init=False)
    saved: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        of = {b: g for g in self.live.sets for b in g.buffers}
        never = {b for a in self.allocations if a.read_only or a.kind == "thread-local" for b in a.held}
        self.groups = [g for g in self.live.sets if g.size and g.buffers[0] not in never]
        self.hosts = [
            (a, of[next(b for b in a.held if self._own(b))])
            for a in self.allocations
            if a.size and not a.read_only and a.kind in ("parameter", "output")
        ]
        self.saved = list(self._written_over())

    def _own(self, b: Buffer) -> bool:
        points = self.live.points
        entry = b.node.opcode == "parameter" and b.node.computation is points.module.entry
        return entry or b in points.live_out

    def least(self) -> int:
        """Hosts and heap together."""
        sizes = [a.size for a, _ in self.hosts]
        most, steps = self._in_heap(sizes)
        if sizes and len(sizes) * len(self.groups) <= _SHARPENED_UP_TO:
            most = max([most, *map(self._sharpened, steps)])
        return sum(sizes) + most

    def _in_heap(self, hosts: Sequence[int]) -> tuple[int, list[int]]:
        """The most bytes of at least some size that hosts of that size cannot take, and the steps where that is."""
        changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for group in self.groups:
            for start, end in self.stays[group]:
                changes[group.size] += [(start, group.size), (end + 1, -group.size)]
        for step, nbytes in self.saved:
            changes[nbytes] += [(step, -nbytes), (step + 1, nbytes)]
        steps = self.live.end + 2
        alive, best = np.zeros(steps, dtype=np.int64), np.zeros(steps, dtype=np.int64)
        sizes = sorted(changes, reverse=True)
        for k, size in enumerate(sizes):
            step, nbytes = np.array(changes[size], dtype=np.int64).T
            np.add.at(alive, step, nbytes)
            if k < _CELLS // steps or k == len(sizes) - 1:
                room = sum(h for h in hosts if h >= size)
                np.maximum(best, np.cumsum(alive) - room, out=best)
        return int(best.max()), np.argsort(-best, kind="stable")[:_SHARPENED].tolist()

    @cached_property
    def stays(self) -> Mapping[AliasSet, list[tuple[int, int]]]:
        """[first, last] steps at which each alias set is alive, those that touch joined."""
        return {group: self.live.alive(group.buffers, gap=1) for group in self.groups}

    def _written_over(self) -> Iterator[tuple[int, int]]:
        ranges = self.live.ranges
        of = {b: g for g in self.groups for b in g.buffers if b in ranges}
        for new, group in of.items():
            start, user = ranges[new].start, new.node
            if user.opcode == "copy":
                continue
            saved = 0
            for old in dict.fromkeys(b for n in user.operands for b in n.at):
                if old not in of or of[old] is group or not ranges[old].end == start > ranges[old].start:
                    continue
                if over(self.live, old, new, self.sharing):
                    saved = max(saved, min(group.size, of[old].size))
            if saved:
                yield start, saved

    def _sharpened(self, step: int) -> int:
        """The same at one step, with what each host can take at best."""
        own = {g for _, g in self.hosts}
        alive = [g for g in self.groups if _meets(self.stays[g], [(step, step)]) and g not in own]
        saved = [nbytes for at, nbytes in self.saved if at == step]
        idle = [(a.size, g) for a, g in self.hosts if not _meets(self.stays[g], [(step, step)])]
        fits = [[x.size for x in alive if not _in_the_way(self.stays[x], self.stays[g])] for _, g in idle]
        most = 0
        for least in sorted({g.size for g in alive}, reverse=True):
            nbytes = sum(g.size for g in alive if g.size >= least) - sum(s for s in saved if s >= least)
            if nbytes <= most:
                continue
            for (size, _), found in zip(idle, fits, strict=True):
                nbytes -= _room(size, [s for s in found if s >= least])
                if nbytes <= most:
                    break
            most = max(most, nbytes)
        return most


def _meets(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    return any(p <= s and r <= q for p, q in a for r, s in b)


def _in_the_way(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    """Whether both are alive at one time, other than where one ends as the other begins."""
    return any(p <= s and r <= q and q != r and s != p for p, q in a for r, s in b)


def _room(size: int, sizes: Sequence[int]) -> int:
    """The most bytes of buffers of these sizes that fit into ``size`` side by side, or a little more."""
    inside = Counter(s for s in sizes if s <= size)
    small = sum(s * n for s, n in inside.items() if s * _PARTS < size)
    large = {s: min(n, size // s) for s, n in inside.items() if s * _PARTS >= size}
    unit = gcd(*large) if large else 1
    sums, kept = 1, (1 << (size // unit + 1)) - 1
    for s, n in large.items():
        for _ in range(n):
            sums |= sums << (s // unit) & kept
    return min(size, (sums.bit_length() - 1) * unit + small)
