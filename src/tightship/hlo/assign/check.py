"""Whether an assignment is right: a placement problem with a pool for each allocation, judged by its verifier.

Nothing that made the assignment is asked. Time is in half instructions: a buffer is alive from the first half of
the one that makes it to the second half of its last, unless a result is written over it there. Alias sets are groups;
what is not to be written (constants, parameters that are not donated) is alive all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tightship.errors import VerificationFailed, Violation
from tightship.hlo.alias import TARGETS, AliasSet, Sharing
from tightship.hlo.assign.allocate import Assignment
from tightship.hlo.dataflow import Buffer as Logical
from tightship.hlo.liveness import LiveRanges, over
from tightship.plan import Buffer, Pool, Problem, Solution
from tightship.verify.placement import check_solution

__all__ = ["check", "violations"]


def check(made: Assignment, sharing: Sharing) -> None:
    """Raises ``VerificationFailed`` with everything that is wrong."""
    wrong = list(violations(made, sharing))
    if wrong:
        raise VerificationFailed(wrong, f"buffer assignment of {made.live.points.module.name!r}")


def violations(made: Assignment, sharing: Sharing) -> Iterator[Violation]:
    """Everything that is wrong with an assignment."""
    held = [b for a in made.allocations for b in a.held]
    once = set(held)
    for buffer in held if len(once) < len(held) else ():
        if buffer not in once:
            yield Violation("twice", -1, (str(buffer),), f"buffer {str(buffer)!r} has two places")
        once.discard(buffer)
    placed = set(held)
    for buffer in made.live.ranges:
        if buffer not in placed:
            yield Violation("missing", -1, (str(buffer),), f"buffer {str(buffer)!r} has no place")
    yield from check_solution(*_placement(made, sharing))


def _placement(made: Assignment, sharing: Sharing) -> tuple[Problem, Solution]:
    live = made.live
    sets = {b: g for g in live.sets for b in g.buffers}
    pools, buffers, offsets, homes = [], [], [], []
    for k, allocation in enumerate(made.allocations):
        pool = Pool(f"{k} ({allocation.kind})", allocation.size)
        pools.append(pool)
        at = {b: offset for b, offset in allocation.held.items() if b in live.ranges and sets[b].size}
        ends = _ends(live, at, sharing)
        for b, offset in at.items():
            since, until = 2 * live.ranges[b].start, ends[b]
            if allocation.read_only:
                since, until = 0, 2 * live.end + 2
            alignment = TARGETS[made.target] if allocation.kind == "heap" else 1
            buffers.append(_buffer(b, sets[b], since, until, alignment, pool))
            offsets.append(offset)
            homes.append((pool.name, 0))
    problem = Problem(tuple(buffers), pools=tuple(pools))
    return problem, Solution(tuple(offsets), made.total, homes=tuple(homes))


def _buffer(b: Logical, group: AliasSet, since: int, until: int, alignment: int, pool: Pool) -> Buffer:
    name = str(group.id) if len(group.buffers) > 1 else ""
    return Buffer(f"{b.id}:{b}", since, until, group.size, alignment, group=name, pools=(pool.name,))


def _ends(live: LiveRanges, at: Mapping[Logical, int], sharing: Sharing) -> dict[Logical, int]:
    """When each buffer of an allocation ends: before the last instruction's result where that is written over it."""
    begin: dict[tuple[int, int], list[Logical]] = {}
    for buffer, offset in at.items():
        begin.setdefault((live.ranges[buffer].start, offset), []).append(buffer)
    ends = {}
    for buffer, offset in at.items():
        r = live.ranges[buffer]
        results = begin.get((r.end, offset), []) if r.end > r.start else []
        written_over = any(over(live, buffer, new, sharing) for new in results)
        ends[buffer] = 2 * r.end if written_over else 2 * r.end + 2
    return ends
