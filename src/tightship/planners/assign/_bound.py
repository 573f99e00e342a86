"""A total that no assignment of a schedule goes below.

What is never given back (read-only arguments, constants, thread-local buffers), and what outputs and donated
arguments take, are there in any case. What else is alive while an instruction runs lies in those that are idle
then, or in the heap. A buffer lies in one of them whole: only those as large as it is can take it. So for any size,
the buffers of at least that size, less the idle outputs and donated arguments of at least that size, are in the heap;
the most over all sizes and instructions is a bound. A result that may be written over an operand that ends there
counts for what is larger of the two. Source: ours; with size 0 and between instructions it is the usual one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from tightship.frontends.hlo.alias import AliasSet
from tightship.frontends.hlo.buffers import Buffer
from tightship.frontends.hlo.live import LiveRanges
from tightship.frontends.hlo.share import Sharing
from tightship.planners.assign._allocate import Allocation

__all__ = ["lower_bound"]

_CELLS = 50_000_000
"""Sizes times steps that are looked at; where there are more, only the largest sizes are."""


def lower_bound(live: LiveRanges, allocations: Sequence[Allocation], sharing: Sharing) -> int:
    """Bytes. Time: steps times different sizes."""
    fixed = [a for a in allocations if a.read_only or a.kind == "thread-local"]
    hosts = [a.size for a in allocations if not a.read_only and a.kind in ("parameter", "output")]
    never = {b for a in fixed for b in a.held}
    groups = [g for g in live.sets if g.size and g.buffers[0] not in never]
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for group in groups:
        for start, end in while_running(live, group):
            changes[group.size] += [(start, group.size), (end + 1, -group.size)]
    for step, nbytes in _written_over(live, groups, sharing):
        changes[nbytes] += [(step, -nbytes), (step + 1, nbytes)]
    return sum(a.size for a in fixed) + sum(hosts) + _in_heap(changes, hosts, live.end + 2)


def _in_heap(changes: dict[int, list[tuple[int, int]]], hosts: Sequence[int], steps: int) -> int:
    """The most that no host can take. ``changes``: (step, bytes more alive from there on) of buffers by size."""
    sizes = sorted(changes, reverse=True)
    kept = max(1, _CELLS // steps)
    alive = np.zeros(steps, dtype=np.int64)
    most = 0
    for k, size in enumerate(sizes):
        step, nbytes = np.array(changes[size], dtype=np.int64).T
        np.add.at(alive, step, nbytes)
        if k < kept or k == len(sizes) - 1:
            room = sum(h for h in hosts if h >= size) if k < len(sizes) - 1 else sum(hosts)
            most = max(most, int(np.cumsum(alive).max()) - room)
    return most


def while_running(live: LiveRanges, group: AliasSet) -> list[tuple[int, int]]:
    """When an alias set is alive while instructions run: [first, last] step, without overlaps."""
    found: list[tuple[int, int]] = []
    ranges = (live.ranges[b] for b in group.buffers if b in live.ranges)
    for start, end in sorted((r.start, r.end) for r in ranges):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _written_over(
    live: LiveRanges, groups: Sequence[AliasSet], sharing: Sharing
) -> Iterator[tuple[int, int]]:
    """(step, bytes) for each result that may lie where an operand ends: at most so much is counted twice."""
    of = {b: g for g in groups for b in g.buffers if b in live.ranges}
    for new, group in of.items():
        start, user = live.ranges[new].start, new.node
        if user.opcode == "copy" or not user.operands:
            continue
        operands = {b: n for n in user.operands for b in n.at}
        saved = 0
        for old in operands:
            if old is new or old not in of or of[old] is group:
                continue
            r = live.ranges[old]
            if r.end == start > r.start and over(live, old, new, sharing):
                saved = max(saved, min(group.size, of[old].size))
        if saved:
            yield start, saved


def over(live: LiveRanges, old: Buffer, new: Buffer, sharing: Sharing) -> bool:
    """Whether ``new`` may be written over ``old``, which ends where it begins."""
    user = new.node
    if old is new or user.opcode == "copy":
        return False
    where = [live.ranges[old].last, (old.node, old.index)]
    return any(n in user.operands and sharing.allowed(n, i, user, new.index) for n, i in where)
