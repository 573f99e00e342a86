"""A total that no assignment of a schedule goes below.

What is never given back (read-only arguments, constants, thread-local buffers), and what outputs and donated
arguments take (the *hosts*), are there in any case. What else is alive while an instruction runs lies in hosts that
are idle then, or in the heap. A buffer lies in one of them whole, so only those as large as it is can take it: for
any size, the buffers of at least that size, less the idle hosts of at least that size, are in the heap; the most
over all sizes and instructions is a bound. Where that is highest, it is sharpened by what each host can take at
best: of the buffers that are never in the way of its own, a sum of sizes that it has room for. Two of which one may
be written over the other count for the larger. Source: ours; with size 0 and between instructions it is the usual
one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

import numpy as np

from tightship.hlo.alias import AliasSet, Sharing
from tightship.hlo.assign.allocate import Allocation
from tightship.hlo.dataflow import Buffer
from tightship.hlo.liveness import LiveRanges, over

__all__ = ["lower_bound"]

_CELLS = 50_000_000
"""Sizes times steps that are looked at; where there are more, only the largest sizes are."""

_SHARPENED = 8
"""Steps at which the bound is sharpened."""

_PAIRS = 200_000
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
        if sizes and len(sizes) * len(self.groups) <= _PAIRS:
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
