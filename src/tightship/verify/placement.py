"""Verify a placement: every rule it breaks, by name, sharing no code with any planner.

Two buffers of one heap overlap when, at some time, bytes that are alive of the one are alive bytes of the other:
within a gap, those of its window alone. Members of a group do not overlap each other. Whether there are any
is found for all at once (``disjoint``); if so, which, by a sweep over time with what is alive kept in order of
offset. Buffers in conflict overlap when they share bytes at all; found by a sweep over the bytes. A buffer found to
overlap is reported with everything it overlaps at that moment and then left out of the sweep, so that n wrong
buffers do not give n² lines.

``disjoint`` asks whether any of many rectangles overlap, all at once, by a binary tree over the times at which
rectangles begin; each lies at the O(log n) highest nodes that its time covers. Two that meet in time meet at a node
where one lies and the other lies at it or below it. So none overlap exactly when, at every node, those that lie
there are disjoint in bytes, from one another and from all that lie below. All nodes of a level are looked at
together: O(n log² n) in all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tightship.errors import Rule, Violation
from tightship.plan import Buffer, Problem, Solution

__all__ = ["PLACEMENT_RULES", "check_solution", "disjoint"]


Ints = npt.NDArray[np.int64]


def disjoint(since: Ints, until: Ints, start: Ints, end: Ints) -> bool:
    """Whether no two of the rectangles [since, until) x [start, end) share a point."""
    solid = np.flatnonzero((since < until) & (start < end))
    by_time = solid[
        np.argsort(since[solid], kind="stable")
    ]  # what is near in the tree is near in memory, too
    since, until, start, end = (column[by_time] for column in (since, until, start, end))
    count = len(since)
    begins = np.append(True, since[1:] != since[:-1])[:count]
    first, last = np.cumsum(begins) - 1, np.searchsorted(since[begins], until)
    by_start = np.argsort(start, kind="stable")
    rank = np.empty(count, dtype=np.int64)
    rank[by_start] = np.arange(count)
    rising, left, right = np.arange(count), first, last
    for level in range(64):
        here = left < right
        rising, left, right = rising[here], left[here], right[here]
        if not len(rising):
            break
        odd_left = left % 2 == 1
        odd_right = (right % 2 == 1) & (left + odd_left < right)
        nodes = np.concatenate((left[odd_left], right[odd_right] - 1))
        keys = nodes * count + rank[np.concatenate((rising[odd_left], rising[odd_right]))]
        left, right = (left + odd_left) // 2, (right - odd_right) // 2
        keys.sort()
        node, at = keys // count, by_start[keys % count]
        if ((node[1:] == node[:-1]) & (end[at[:-1]] > start[at[1:]])).any():
            return False
        for edge in (first >> level, (last - 1) >> level):
            below = np.flatnonzero((edge << level < first) | ((edge + 1) << level > last))
            key = edge[below] * count + rank[below]
            if _touch((keys, node, start[at], end[at]), key, edge[below], start[below], end[below]):
                return False
    return True


def _touch(lying: tuple[Ints, Ints, Ints, Ints], key: Ints, edge: Ints, start: Ints, end: Ints) -> bool:
    """Whether one of the spans [start, end) below a node ``edge`` meets one of those that lie there. ``lying``: their
    keys, sorted, nodes, starts and ends."""
    keys, node, low, high = lying
    if not len(keys):
        return False
    after = np.searchsorted(keys, key)
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(keys) - 1)
    below = (node[before] == edge) & (high[before] > start) & (low[before] < end)
    above = (node[after] == edge) & (high[after] > start) & (low[after] < end)
    return bool(below.any() or above.any())


_FEW = 32  # conflicts of a buffer, on average, up to which each is turned alone
_COLUMNS = 128  # bytes of each row of conflicts that are turned at a time

Home = tuple[str, int]
"""A pool by name and one of its heaps by number."""


class _Placed(NamedTuple):
    """Buffer ``number`` of the problem at ``offset`` of ``home``."""

    number: int
    buffer: Buffer
    offset: int
    home: Home

    def __str__(self) -> str:
        pool, heap = self.home
        where = (f" of pool {pool!r}" if pool else "") + (f", heap {heap}" if heap else "")
        return f"buffer {self.buffer.id!r} at [{self.offset}, {self.offset + self.buffer.size}){where}"


@dataclass(frozen=True)
class _Case:
    """A solution of a problem under inspection, and its buffers as they lie."""

    problem: Problem
    solution: Solution
    homes: Sequence[Home]
    placed: list[_Placed]


def check_solution(problem: Problem, solution: Solution) -> list[Violation]:
    """Everything that is wrong with ``solution``; nothing, if it is right."""
    homes: Sequence[Home] = solution.homes if problem.pools else [("", 0)] * len(problem.buffers)
    rows = zip(range(len(problem.buffers)), problem.buffers, solution.offsets, homes, strict=False)
    case = _Case(problem, solution, homes, list(map(_Placed._make, rows)))
    checks = dict.fromkeys(rule.check for rule in PLACEMENT_RULES)
    return [violation for check in checks for violation in check(case)]


def _by_home(placed: Sequence[_Placed]) -> dict[Home, list[_Placed]]:
    by_home: dict[Home, list[_Placed]] = {}
    for p in placed:
        by_home.setdefault(p.home, []).append(p)
    return by_home


def _sums(case: _Case) -> Iterator[Violation]:
    """What the arena claims, and what there is room for."""
    problem, solution, by_home = case.problem, case.solution, _by_home(case.placed)
    tops = {home: max(p.offset + p.buffer.size for p in there) for home, there in by_home.items()}
    if problem.pools and sum(tops.values()) > solution.arena:
        message = f"the heaps span {sum(tops.values())} bytes together, the arena claims {solution.arena}"
        yield Violation("out-of-bounds", -1, (), message)
    for pool in problem.pools:
        mine = {heap: top for (name, heap), top in sorted(tops.items()) if name == pool.name}
        if pool.capacity is not None and sum(mine.values()) > pool.capacity:
            message = f"pool {pool.name!r} spans {sum(mine.values())} bytes, its capacity is {pool.capacity}"
            yield Violation("over-capacity", -1, (pool.name,), message)
        for heap, top in mine.items():
            if top > (top if pool.heap is None else pool.heap):
                message = f"heap {heap} of pool {pool.name!r} spans {top} bytes, a heap has {pool.heap}"
                yield Violation("over-capacity", -1, (pool.name,), message)
    if problem.capacity is not None and solution.arena > problem.capacity:
        message = f"the arena is {solution.arena} bytes, the capacity {problem.capacity}"
        yield Violation("over-capacity", -1, (), message)
    if solution.lower_bound > solution.arena:
        message = f"the claimed lower bound is {solution.lower_bound} bytes, the arena only {solution.arena}"
        yield Violation("bound", -1, (), message)


def _counts(case: _Case) -> Iterator[Violation]:
    problem, solution, homes = case.problem, case.solution, case.homes
    known, given = len(problem.buffers), len(solution.offsets)
    for buffer in problem.buffers[given:]:
        yield Violation("missing", buffer.lower, (buffer.id,), f"buffer {buffer.id!r} has no offset")
    for k in range(known, given):
        message = f"offset {solution.offsets[k]} is number {k + 1}, but the problem has {known} buffers"
        yield Violation("unknown", -1, (f"#{k}",), message)
    for buffer in problem.buffers[len(homes) : given]:
        yield Violation("missing", buffer.lower, (buffer.id,), f"buffer {buffer.id!r} has no pool")
    for k in range(known, len(homes)):
        message = f"pool {homes[k][0]!r} is number {k + 1}, but the problem has {known} buffers"
        yield Violation("unknown", -1, (f"#{k}",), message)


def _each(case: _Case) -> Iterator[Violation]:
    """What is wrong with one buffer, whatever the others do."""
    arena = case.solution.arena
    for p in case.placed:
        b, at = p.buffer, p.offset
        if at < 0 or at + b.size > arena:
            yield Violation("out-of-bounds", b.lower, (b.id,), f"{p} is not within the arena [0, {arena})")
        if at % b.alignment:
            yield Violation(
                "misaligned", b.lower, (b.id,), f"{p} does not start at a multiple of {b.alignment}"
            )
        if b.pinned is not None and at != b.pinned:
            yield Violation("moved-pin", b.lower, (b.id,), f"{p} is pinned to offset {b.pinned}")


def _groups(case: _Case) -> Iterator[Violation]:
    first: dict[str, _Placed] = {}
    for p in case.placed:
        if not p.buffer.group:
            continue
        other = first.setdefault(p.buffer.group, p)
        if (p.offset, p.home) != (other.offset, other.home):
            message = f"{p} and {other} are of group {p.buffer.group!r}, which shares an offset"
            yield Violation("colocation-broken", p.buffer.lower, (p.buffer.id, other.buffer.id), message)


def _pools(case: _Case) -> Iterator[Violation]:
    known = {pool.name: pool for pool in case.problem.pools}
    for p in case.placed if known else ():
        name, heap = p.home
        allowed = p.buffer.pools or tuple(known)
        if not name and name not in known:
            yield Violation("missing", p.buffer.lower, (p.buffer.id,), f"{p} has no pool")
            continue
        if name not in known or heap < 0 or (heap and known[name].heap is None):
            message = f"{p}: there is no such pool or heap (pools: {', '.join(known)})"
        elif name not in allowed:
            message = f"{p} may lie in {', '.join(allowed)} only"
        else:
            continue
        yield Violation("wrong-pool", p.buffer.lower, (p.buffer.id,), message)


# --- overlaps of what is alive ---


def _shared_bytes(case: _Case) -> Iterator[Violation]:
    by_home = _by_home(case.placed)
    overlaps = [v for there in by_home.values() for v in _overlaps(there)]
    yield from overlaps
    if not case.problem.conflicts:
        return
    named = {frozenset(v.subjects) for v in overlaps}
    rows_of = _symmetric(case.problem.conflicts, len(case.problem.buffers))
    for there in by_home.values():
        yield from (v for v in _conflicts(there, rows_of) if frozenset(v.subjects) not in named)


class _Part(NamedTuple):
    """Bytes ``[start, end)`` that ``owner`` has alive during ``[since, until)``."""

    owner: _Placed
    since: int
    until: int
    start: int
    end: int


def _parts(owner: _Placed) -> Iterator[_Part]:
    """A buffer's life cut where its gaps begin and end; where gaps overlap, what all their windows share."""
    b = owner.buffer
    if b.lower >= b.upper:
        return
    if not b.gaps:
        if b.size > 0:
            yield _Part(owner, b.lower, b.upper, owner.offset, owner.offset + b.size)
        return
    cuts = {b.lower, b.upper}
    for gap in b.gaps:
        cuts |= {min(max(time, b.lower), b.upper) for time in (gap.lower, gap.upper)}
    for since, until in pairwise(sorted(cuts)):
        start, end = 0, b.size
        for gap in b.gaps:
            if gap.lower <= since < gap.upper:
                low, high = gap.window or (0, 0)
                start, end = max(start, low), min(end, high)
        if start < end:
            yield _Part(owner, since, until, owner.offset + start, owner.offset + end)


def _united(group: Sequence[_Placed]) -> Iterator[_Part]:
    """The parts of a group, bytes that several members have alive counted once."""
    parts = [part for p in group for part in _parts(p)]
    cuts = sorted({time for part in parts for time in (part.since, part.until)})
    for since, until in pairwise(cuts):
        alive = [part for part in parts if part.since <= since and until <= part.until]
        alive.sort(key=lambda part: (part.start, -part.end))
        k = 0
        while k < len(alive):
            first, end = alive[k], alive[k].end
            while k < len(alive) and alive[k].start < end:
                end = max(end, alive[k].end)
                k += 1
            yield _Part(first.owner, since, until, first.start, end)


def _overlaps(placed: Sequence[_Placed]) -> Iterator[Violation]:
    """Of buffers in one heap."""
    simple = [p for p in placed if not p.buffer.group and not p.buffer.gaps]
    groups: dict[object, list[_Placed]] = {}
    for p in placed if len(simple) < len(placed) else ():
        if p.buffer.group or p.buffer.gaps:
            groups.setdefault(p.buffer.group or p.number, []).append(p)
    parts = [part for g in groups.values() for part in (_united(g) if len(g) > 1 else _parts(g[0]))]
    if _disjoint(simple, parts):
        return
    parts += [part for p in simple for part in _parts(p)]
    # Ends before starts at the same time: live ranges are half-open.
    events = [(p.until, 0, k) for k, p in enumerate(parts)] + [(p.since, 1, k) for k, p in enumerate(parts)]
    events.sort()
    alive: list[tuple[int, int]] = []  # (start, index of the part), sharing no bytes
    wrong: set[int] = set()
    for _, begins, k in events:
        part = parts[k]
        at = bisect_left(alive, (part.start, k))
        if not begins:
            if at < len(alive) and alive[at] == (part.start, k):
                del alive[at]
            continue
        if part.owner.number in wrong:
            continue
        clashes = list(_clashes(parts, alive, at, part))
        for other in clashes:
            yield _overlap(part, parts[other])
        if clashes:
            wrong.add(part.owner.number)
        else:
            insort(alive, (part.start, k))


def _clashes(parts: list[_Part], alive: list[tuple[int, int]], at: int, part: _Part) -> Iterator[int]:
    """Who of those alive shares bytes with ``part``; ``at`` is where it would stand among them."""
    if at:
        _, below = alive[at - 1]
        if parts[below].end > part.start:
            yield below
    while at < len(alive) and alive[at][0] < part.end:
        yield alive[at][1]
        at += 1


def _overlap(new: _Part, old: _Part) -> Violation:
    start, end = max(new.start, old.start), min(new.end, old.end)
    since, until = max(new.since, old.since), min(new.until, old.until)
    message = f"{new.owner} and {old.owner} share bytes [{start}, {end}) during [{since}, {until})"
    return Violation("overlap", since, (new.owner.buffer.id, old.owner.buffer.id), message)


# --- whether there is any overlap ---


def _disjoint(simple: Sequence[_Placed], parts: Sequence[_Part]) -> bool:
    """Whether of buffers without groups and gaps, and parts of the others, no two overlap; False also where their
    numbers are too large to say."""

    def column(rows: Sequence[object], name: str) -> npt.NDArray[np.int64]:
        return np.fromiter(map(attrgetter(name), rows), dtype=np.int64, count=len(rows))

    try:
        since, until, size, start = (
            column(simple, name) for name in ("buffer.lower", "buffer.upper", "buffer.size", "offset")
        )
        alone = since, until, start, start + size
        columns = [
            np.concatenate((a, column(parts, name))) for a, name in zip(alone, _Part._fields[1:], strict=True)
        ]
    except OverflowError:
        return False
    return bool((start + size >= start).all()) and disjoint(*columns)


# --- overlaps of what may be alive in another order ---


def _symmetric(rows: Sequence[int], count: int) -> list[int]:
    """Bit sets in which j is of k's when k is of j's."""
    width = -(-count // 8)
    mask = (1 << count) - 1
    if sum(row.bit_count() for row in rows) < _FEW * count:
        both = [row & mask for row in rows[:count]] + [0] * (count - len(rows))
        for k, row in enumerate(rows[:count]):
            for j in _members(row & mask):
                both[j] |= 1 << k
        return both
    packed = b"".join((row & mask).to_bytes(width, "little") for row in rows[:count])
    packed += bytes(width * (count - len(rows[:count])))
    table = np.frombuffer(packed, dtype=np.uint8).reshape(count, width)
    both = []
    for at in range(0, width, _COLUMNS):  # a byte for every bit of some columns at a time
        bits = np.unpackbits(table[:, at : at + _COLUMNS], axis=1, bitorder="little")[:, : count - 8 * at]
        there = np.packbits(bits.T, axis=1, bitorder="little")
        mine = (int.from_bytes(row.tobytes(), "little") for row in table[8 * at : 8 * at + len(there)])
        both += (
            row | int.from_bytes(column.tobytes(), "little") for row, column in zip(mine, there, strict=True)
        )
    return both


def _conflicts(placed: Sequence[_Placed], rows: Sequence[int]) -> Iterator[Violation]:
    """Of buffers in one heap: a sweep over its bytes."""
    solid = {p.number: p for p in placed if p.buffer.size > 0}
    events = [(p.offset + p.buffer.size, 0, k) for k, p in solid.items()]
    events += [(p.offset, 1, k) for k, p in solid.items()]
    there = 0  # bit set of those that have the byte the sweep is at
    for byte, begins, k in sorted(events):
        if not begins:
            there &= ~(1 << k)
            continue
        clashes = [solid[j] for j in _members(there & rows[k])]
        clashes = [c for c in clashes if not c.buffer.group or c.buffer.group != solid[k].buffer.group]
        for other in clashes:
            yield _conflict(solid[k], other, byte)
        if not clashes:
            there |= 1 << k


def _conflict(new: _Placed, old: _Placed, start: int) -> Violation:
    end = min(p.offset + p.buffer.size for p in (new, old))
    message = f"{new} and {old}, which may be alive together in another order, share bytes [{start}, {end})"
    return Violation("overlap", new.buffer.lower, (new.buffer.id, old.buffer.id), message)


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


PLACEMENT_RULES = (
    Rule("missing", "A buffer of the problem has no offset, or no pool.", _counts),
    Rule("unknown", "An offset, or a pool, belongs to no buffer of the problem.", _counts),
    Rule("out-of-bounds", "Bytes lie before offset 0 or beyond the arena.", _each),
    Rule("misaligned", "An offset is no multiple of its buffer's alignment.", _each),
    Rule("moved-pin", "A pinned buffer lies elsewhere.", _each),
    Rule("colocation-broken", "Buffers of one group do not share an offset of one heap.", _groups),
    Rule("wrong-pool", "A buffer lies in a pool it may not lie in, or in one that does not exist.", _pools),
    Rule("overlap", "Two buffers share bytes while both are, or may be, alive.", _shared_bytes),
    Rule("over-capacity", "The arena is larger than the capacity of the problem, a pool or a heap.", _sums),
    Rule("bound", "The claimed lower bound is above the arena.", _sums),
)
