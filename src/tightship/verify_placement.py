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

Overlaps are found by a sweep over time with the buffers alive kept in order of offset. A buffer found to
overlap is reported with everything it overlaps at that moment and then left out of the sweep, so that n wrong
buffers do not give n² lines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

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


def _overlaps(placed: list[tuple[Buffer, int]]) -> Iterator[Violation]:
    # Ends before starts at the same time: live ranges are half-open.
    events: list[tuple[int, int, int]] = []
    for k, (b, _) in enumerate(placed):
        if b.size > 0 and b.lower < b.upper:
            events += [(b.upper, 0, k), (b.lower, 1, k)]
    events.sort()
    alive: list[tuple[int, int]] = []  # (offset, index), sharing no bytes
    for _, begins, k in events:
        buffer, offset = placed[k]
        at = bisect_left(alive, (offset, k))
        if not begins:
            if at < len(alive) and alive[at] == (offset, k):
                del alive[at]
            continue
        clashes = list(_clashes(placed, alive, at, offset, offset + buffer.size))
        for other in clashes:
            yield _overlap(placed, k, other)
        if not clashes:
            insort(alive, (offset, k))


def _clashes(
    placed: list[tuple[Buffer, int]], alive: list[tuple[int, int]], at: int, start: int, end: int
) -> Iterator[int]:
    """Who of those alive has bytes in [start, end); ``at`` is where ``start`` would stand among them."""
    if at:
        below, k = alive[at - 1]
        if below + placed[k][0].size > start:
            yield k
    while at < len(alive) and alive[at][0] < end:
        yield alive[at][1]
        at += 1


def _overlap(placed: list[tuple[Buffer, int]], new: int, old: int) -> Violation:
    (b, x), (c, y) = placed[new], placed[old]
    start, end = max(x, y), min(x + b.size, y + c.size)
    since, until = max(b.lower, c.lower), min(b.upper, c.upper)
    message = f"{_bytes(b, x)} and {_bytes(c, y)} share bytes [{start}, {end}) during [{since}, {until})"
    return Violation("overlap", since, (b.id, c.id), message)


def _bytes(b: Buffer, offset: int) -> str:
    return f"buffer {b.id!r} at [{offset}, {offset + b.size})"
