"""Verify a placement: every rule it breaks, by name, sharing no code with any planner.

=============  ==============================================================
missing        a buffer of the problem has no offset
unknown        an offset belongs to no buffer of the problem
out-of-bounds  bytes before offset 0 or beyond the arena
misaligned     an offset is no multiple of its buffer's alignment
moved-pin      a pinned buffer lies elsewhere
overlap        two buffers alive at the same time share bytes
over-capacity  the arena is larger than the problem's capacity
bound          the claimed lower bound is above the arena, so it is none
=============  ==============================================================

Two buffers overlap when, at some time, bytes that are alive of the one are alive bytes of the other: within a
gap, those of the gap's window alone. Overlaps are found by a sweep over time with what is alive kept in order
of offset. A buffer found to overlap is reported with everything it overlaps at that moment and then left out
of the sweep, so that n wrong buffers do not give n² lines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tightship.plan import Buffer, Problem, Solution
from tightship.violation import Violation

__all__ = ["CODES", "check_solution"]

CODES = (
    "missing",
    "unknown",
    "out-of-bounds",
    "misaligned",
    "moved-pin",
    "overlap",
    "over-capacity",
    "bound",
)


def check_solution(problem: Problem, solution: Solution) -> list[Violation]:
    """Everything that is wrong with ``solution``; nothing, if it is right."""
    placed = list(zip(problem.buffers, solution.offsets, strict=False))
    found = list(_counts(problem, solution))
    for buffer, offset in placed:
        found += _alone(buffer, offset, solution.arena)
    found += _overlaps(placed)
    if problem.capacity is not None and solution.arena > problem.capacity:
        message = f"the arena is {solution.arena} bytes, the capacity {problem.capacity}"
        found.append(Violation("over-capacity", -1, (), message))
    if solution.lower_bound > solution.arena:
        message = f"the claimed lower bound is {solution.lower_bound} bytes, the arena only {solution.arena}"
        found.append(Violation("bound", -1, (), message))
    return found


def _counts(problem: Problem, solution: Solution) -> Iterator[Violation]:
    known, given = len(problem.buffers), len(solution.offsets)
    for buffer in problem.buffers[given:]:
        yield Violation("missing", buffer.lower, (buffer.id,), f"buffer {buffer.id!r} has no offset")
    for k in range(known, given):
        message = f"offset {solution.offsets[k]} is number {k + 1}, but the problem has {known} buffers"
        yield Violation("unknown", -1, (f"#{k}",), message)


def _alone(b: Buffer, offset: int, arena: int) -> Iterator[Violation]:
    """What is wrong with one buffer, whatever the others do."""
    if offset < 0 or offset + b.size > arena:
        message = f"{_bytes(b, offset)} is not within the arena [0, {arena})"
        yield Violation("out-of-bounds", b.lower, (b.id,), message)
    if offset % b.alignment:
        message = f"{_bytes(b, offset)} does not start at a multiple of {b.alignment}"
        yield Violation("misaligned", b.lower, (b.id,), message)
    if b.pinned is not None and offset != b.pinned:
        message = f"{_bytes(b, offset)} is pinned to offset {b.pinned}"
        yield Violation("moved-pin", b.lower, (b.id,), message)


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes ``[start, end)`` that buffer number ``owner`` has alive during ``[since, until)``."""

    owner: int
    since: int
    until: int
    start: int
    end: int


def _parts(owner: int, b: Buffer, offset: int) -> Iterator[_Part]:
    """A buffer's life cut where its gaps begin and end; where gaps overlap, what all their windows share."""
    if b.lower >= b.upper:
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
            yield _Part(owner, since, until, offset + start, offset + end)


def _overlaps(placed: list[tuple[Buffer, int]]) -> Iterator[Violation]:
    parts = [p for k, (b, offset) in enumerate(placed) for p in _parts(k, b, offset)]
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
        if part.owner in wrong:
            continue
        clashes = list(_clashes(parts, alive, at, part))
        for other in clashes:
            yield _overlap(placed, part, parts[other])
        if clashes:
            wrong.add(part.owner)
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


def _overlap(placed: list[tuple[Buffer, int]], new: _Part, old: _Part) -> Violation:
    (b, x), (c, y) = placed[new.owner], placed[old.owner]
    start, end = max(new.start, old.start), min(new.end, old.end)
    since, until = max(new.since, old.since), min(new.until, old.until)
    message = f"{_bytes(b, x)} and {_bytes(c, y)} share bytes [{start}, {end}) during [{since}, {until})"
    return Violation("overlap", since, (b.id, c.id), message)


def _bytes(b: Buffer, offset: int) -> str:
    return f"buffer {b.id!r} at [{offset}, {offset + b.size})"
