"""Which buffers get allocations of their own, and which may lie in those: XLA's rules before its heap.

Largest first: constants, the entry's parameters, buffers of computations applied element by element and tuples'
tables of addresses each get an allocation. What remains may take one that is there already, as a whole, when nothing
in it is alive at the same time: an operand's, else the smallest of those that results and donated parameters have. A
result that finds none gets one; anything else is a temporary. Source: XLA, ``BufferAssigner``.

An ``Assignment`` is what it comes to: allocations, the place of every buffer, and the bytes by kind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from tightship.cached import cached_property
from tightship.hlo.alias import AliasSet, Sharing
from tightship.hlo.dataflow import Buffer, Node
from tightship.hlo.liveness import LiveRanges
from tightship.hlo.shape import Index

__all__ = ["Allocation", "Assignment", "allocate", "combine", "thread_locals"]


@dataclass(frozen=True)
class Assignment:
    """``allocations`` with what they hold; sizes are bytes. ``lower_bound``: a total that no assignment of this
    schedule can go below. ``heap_fragmentation``: bytes of the heap beyond the most that is alive in it."""

    live: LiveRanges
    target: str
    allocations: tuple[Allocation, ...]
    heap_fragmentation: int
    lower_bound: int
    planner: str
    seconds: float = 0.0

    def _sum(self, counted: Callable[[Allocation], bool]) -> int:
        return sum(a.size for a in self.allocations if counted(a))

    @property
    def total(self) -> int:
        return self._sum(lambda a: True)

    @property
    def temp(self) -> int:
        return self._sum(lambda a: a.temporary)

    @property
    def arguments(self) -> int:
        return self._sum(lambda a: a.kind == "parameter")

    @property
    def output(self) -> int:
        return self._sum(lambda a: a.output)

    @property
    def alias(self) -> int:
        """Bytes of arguments that are outputs, too."""
        return self._sum(lambda a: a.output and a.kind == "parameter")

    @property
    def constants(self) -> int:
        return self._sum(lambda a: a.kind == "constant")

    @property
    def thread_local(self) -> int:
        return self._sum(lambda a: a.kind == "thread-local")


def combine(allocations: Sequence[Allocation], alignment: int) -> list[Allocation]:
    """XLA's last step: all temporaries of a memory space end to end in one allocation, each aligned."""
    kept, temporary = _partition(list(allocations))
    merged: dict[int, Allocation] = {}
    for a in temporary:
        into = merged.get(a.space)
        if into is None:
            merged[a.space] = Allocation("heap", a.size, a.space, held=dict(a.held))
            continue
        base = -(-into.size // alignment) * alignment
        into.size = base + a.size
        into.held.update((b, base + offset) for b, offset in a.held.items())
    return [*kept, *merged.values()]


def _partition(found: list[Allocation]) -> tuple[list[Allocation], list[Allocation]]:
    """``std::partition`` by exchanging from both ends: which temporary comes last decides what is rounded up."""
    first, last = 0, len(found)
    while True:
        while first < last and not found[first].temporary:
            first += 1
        while first < last and found[last - 1].temporary:
            last -= 1
        if first >= last:
            return found[:first], found[first:]
        found[first], found[last - 1] = found[last - 1], found[first]
        first, last = first + 1, last - 1


@dataclass(eq=False)
class Allocation:
    """``kind``: parameter, constant, thread-local, output, tuple or heap. ``donated``: a parameter whose bytes
    an output has; ``output``: something in it is there at the end. ``held``: where each buffer lies in it."""

    kind: str
    size: int
    space: int = 0
    donated: bool = False
    output: bool = False
    number: int = -1
    held: dict[Buffer, int] = field(default_factory=dict)
    lives: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def read_only(self) -> bool:
        return self.kind == "constant" or (self.kind == "parameter" and not self.donated)

    @property
    def temporary(self) -> bool:
        return self.kind in ("tuple", "heap") and not self.output

    def hold(self, group: AliasSet, live: LiveRanges) -> None:
        for buffer in group.buffers:
            self.held[buffer] = 0
            if buffer in live.ranges:
                r = live.ranges[buffer]
                self.lives.append((r.start, r.end, buffer.id))
        self.lives.sort()


class _Open:
    """Allocations that others may lie in, and quickly those of them that may have room at a time.

    Of each the first and the last life are kept in arrays: who is alive strictly within one of them, or for so long
    that both lie within, has no room. The others have to be asked."""

    def __init__(self) -> None:
        self.all: list[Allocation] = []
        self.number: dict[Allocation, int] = {}
        self.table = np.zeros((5, 16), dtype=np.int64)

    def append(self, a: Allocation) -> None:
        if len(self.all) == self.table.shape[1]:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], axis=1)
        self.number[a] = len(self.all)
        self.all.append(a)
        self.changed(a)

    def changed(self, a: Allocation) -> None:
        k = self.number.get(a)
        if k is not None:
            self.table[:, k] = (*a.lives[0][:2], *a.lives[-1][:2], a.size)

    def candidates(self, start: int, end: int, size: int) -> Iterator[Allocation]:
        """The smallest first, which is the last."""
        since, until, since_last, until_last, room = self.table[:, : len(self.all)]
        free = (
            ((end <= since) | (start >= until))
            & ((end <= since_last) | (start >= until_last))
            & (room >= size)
        )
        return (self.all[k] for k in np.flatnonzero(free)[::-1].tolist())


@dataclass
class Assigner:
    """The pass over all alias sets of the sequential computations."""

    live: LiveRanges
    sharing: Sharing
    hosting: bool = True
    allocations: list[Allocation] = field(default_factory=list)
    heap: dict[Buffer, AliasSet] = field(default_factory=dict)
    of: dict[Buffer, Allocation] = field(default_factory=dict)
    open: _Open = field(default_factory=_Open)

    @cached_property
    def donated(self) -> frozenset[tuple[int, Index]]:
        """Positions of parameters that an output has."""
        return frozenset((n, i) for n, i, _ in self.live.points.module.aliases.values())

    def run(self) -> None:
        live_out = self.live.points.live_out
        for group in _ordered(self.live):
            out = any(b in live_out for b in group.buffers)
            if self._own(group):
                continue
            if (self.hosting or out or group.buffers[0].shape.is_tuple) and self._reuse(group, out):
                continue
            if out:
                self.open.append(self._new("output", group))
            elif group.buffers[0].shape.memory_space:
                self._new("heap", group)  # in other memory than the heap's
            else:
                self.heap.update((b, group) for b in group.buffers)
        for buffer in live_out:
            if buffer in self.of:
                self.of[buffer].output = True

    def _new(self, kind: str, group: AliasSet) -> Allocation:
        made = Allocation(kind, group.size, group.buffers[0].shape.memory_space)
        made.hold(group, self.live)
        self.allocations.append(made)
        self.of.update((b, made) for b in group.buffers)
        return made

    def _own(self, group: AliasSet) -> bool:
        entry = self.live.points.module.entry
        for buffer in group.buffers:
            node = buffer.node
            if node.opcode == "constant":
                self._new("constant", group)
                return True
            if node.opcode == "parameter" and node.computation is entry:
                made = self._new("parameter", group)
                made.number = node.instruction.parameter_number
                made.donated = (made.number, buffer.index) in self.donated
                if made.donated:
                    self.open.append(made)
                return True
        return False

    def _reuse(self, group: AliasSet, out: bool) -> bool:
        for buffer in group.buffers:
            if buffer.shape.is_tuple:
                self._new("tuple", group)
                return True
            if not buffer.index:
                for operand in buffer.node.operands:
                    found = self.of.get(operand.at[0])
                    if found is not None and self._fits(found, group, out):
                        return True
        lives = [self.live.ranges[b] for b in group.buffers if b in self.live.ranges]
        free = self.open.candidates(min(r.start for r in lives), max(r.end for r in lives), group.size)
        return any(self._fits(a, group, out) for a in free)

    def _fits(self, into: Allocation, group: AliasSet, out: bool) -> bool:
        if into.read_only or into.kind == "tuple" or group.size > into.size:
            return False
        if into.space != group.buffers[0].shape.memory_space or (out and into.size != group.size):
            return False
        if any(self._clashes(into, buffer) for buffer in group.buffers):
            return False
        into.hold(group, self.live)
        self.open.changed(into)
        self.of.update((b, into) for b in group.buffers)
        return True

    def _clashes(self, into: Allocation, new: Buffer) -> bool:
        copies = new.node.opcode == "copy" and any(
            b in into.held for operand in new.node.operands for b in operand.at
        )
        if new not in self.live.ranges or copies:
            return True
        r = self.live.ranges[new]
        at = bisect_right(into.lives, (r.end, self.live.end + 1, 0))
        while at and into.lives[at - 1][1] >= r.start:
            at -= 1
            if self._interfere(self.live.points.buffers[into.lives[at][2]], new):
                return True
        return False

    def _interfere(self, old: Buffer, new: Buffer) -> bool:
        a, b = self.live.ranges[old], self.live.ranges[new]
        if a.start > b.end or b.start > a.end:
            return False
        if a.end == b.start:
            return not self._over(new, a.last)
        if b.end == a.start:
            return not self._over(old, b.last)
        return True

    def _over(self, user: Buffer, operand: tuple[Node, tuple[int, ...]]) -> bool:
        node, index = operand
        return (
            user.node.opcode != "copy"
            and node in user.node.operands
            and self.sharing.allowed(node, index, user.node, user.index)
        )


def allocate(live: LiveRanges, sharing: Sharing, *, hosting: bool = True) -> Assigner:
    """Allocations of everything but temporaries, which ``heap`` names. Without ``hosting`` temporaries take no
    part of what outputs and donated parameters have."""
    made = Assigner(live, sharing, hosting)
    made.run()
    return made


def _ordered(live: LiveRanges) -> list[AliasSet]:
    """By size, outputs before others, then by where the first of them is defined; callers before callees."""
    points = live.points
    names = {c.name for c in points.sequential}
    callers_first = (points.post_order[c.name] for c in reversed(points.sequential))
    rank = {node: k for k, node in enumerate(chain.from_iterable(callers_first))}
    groups = [g for g in live.sets if g.buffers[0].node.computation.name in names]

    def key(group: AliasSet) -> tuple[int, bool, int]:
        out = any(b in points.live_out for b in group.buffers)
        first = min(rank.get(b.node, len(rank)) for b in group.buffers)
        return -group.size, not out, first

    return sorted(groups, key=key)


def thread_locals(live: LiveRanges) -> list[Allocation]:
    """What computations applied element by element need: an allocation for each of their alias sets."""
    names = {c.name for c in live.points.embedded}
    found = []
    for group in live.sets:
        if group.buffers[0].node.computation.name in names:
            constant = any(b.node.opcode == "constant" for b in group.buffers)
            made = Allocation("constant" if constant else "thread-local", group.size)
            made.hold(group, live)
            found.append(made)
    return found
