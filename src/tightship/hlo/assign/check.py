"""Whether an assignment is right, by means of its own: not a line of what made it is asked.

Every buffer of the schedule has a place in one allocation, all of an alias set the same; bytes of two buffers alive
at one time are apart, but for a result over an operand that ends there and may be written over; nothing else
lies in a parameter that is not donated, or in a constant. Overlaps are found by ``check_solution``, with time in half
instructions: a buffer is alive from the first half of the one that makes it to the second half of its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tightship.errors import VerificationFailed
from tightship.hlo.alias import AliasSet
from tightship.hlo.assign.allocate import Allocation, Assignment
from tightship.hlo.dataflow import Buffer as Logical
from tightship.hlo.in_place import TARGETS, Sharing
from tightship.hlo.liveness import LiveRanges
from tightship.plan import Buffer, Problem, Solution
from tightship.verify.placement import check_solution
from tightship.violation import Violation

__all__ = ["check", "violations"]


def check(made: Assignment, sharing: Sharing) -> None:
    """Raises ``VerificationFailed`` with everything that is wrong."""
    wrong = list(violations(made, sharing))
    if wrong:
        raise VerificationFailed(wrong, f"buffer assignment of {made.live.points.module.name!r}")


def violations(made: Assignment, sharing: Sharing) -> Iterator[Violation]:
    """Everything that is wrong with an assignment."""
    of: dict[Logical, tuple[int, int]] = {}
    for k, allocation in enumerate(made.allocations):
        for buffer, offset in allocation.held.items():
            if buffer in of:
                yield Violation("twice", -1, (str(buffer),), f"buffer {str(buffer)!r} has two places")
            of[buffer] = (k, offset)
    yield from _places(made, of)
    sets = {b: g for g in made.live.sets for b in g.buffers}
    for k, allocation in enumerate(made.allocations):
        yield from _read_only(sets, k, allocation)
        yield from _overlaps(made, sets, allocation, sharing)


def _places(made: Assignment, of: Mapping[Logical, tuple[int, int]]) -> Iterator[Violation]:
    for buffer in made.live.ranges:
        if buffer not in of:
            yield Violation("missing", -1, (str(buffer),), f"buffer {str(buffer)!r} has no place")
    for group in made.live.sets:
        places = {of[b] for b in group.buffers if b in of}
        if len(places) > 1:
            message = f"buffers that are one lie at {sorted(places)}"
            yield Violation("apart", -1, tuple(map(str, group.buffers)), message)


def _read_only(sets: Mapping[Logical, AliasSet], k: int, allocation: Allocation) -> Iterator[Violation]:
    if not allocation.read_only:
        return
    owners = {sets[b].id for b in allocation.held}
    if len(owners) > 1:
        message = f"allocation {k} ({allocation.kind}) is not to be written, but holds {len(owners)} buffers"
        yield Violation("written", -1, tuple(map(str, allocation.held)), message)


def _overlaps(
    made: Assignment, sets: Mapping[Logical, AliasSet], allocation: Allocation, sharing: Sharing
) -> Iterator[Violation]:
    live = made.live
    held = [(b, offset) for b, offset in allocation.held.items() if b in live.ranges]
    if len(held) < 2:
        for buffer, offset in held:
            if offset + buffer.nbytes > allocation.size:
                yield Violation(
                    "out-of-bounds", -1, (str(buffer),), f"{buffer} ends beyond {allocation.size}"
                )
        return
    starts: dict[tuple[int, int], list[Logical]] = {}
    for buffer, offset in held:
        starts.setdefault((live.ranges[buffer].start, offset), []).append(buffer)
    buffers, offsets = [], []
    for buffer, offset in held:
        r = live.ranges[buffer]
        upper = 2 * r.end + 2
        after = starts.get((r.end, offset), [])
        if r.end > r.start and any(_over(live, buffer, new, sharing) for new in after):
            upper = 2 * r.end
        group = str(sets[buffer].id) if len(sets[buffer].buffers) > 1 else ""
        size = sets[buffer].size
        if size:
            alignment = TARGETS[made.target] if allocation.kind == "heap" else 1
            buffers.append(
                Buffer(f"{buffer.id}:{buffer}", 2 * r.start, upper, size, alignment=alignment, group=group)
            )
            offsets.append(offset)
    yield from check_solution(Problem(tuple(buffers)), Solution(tuple(offsets), allocation.size))


def _over(live: LiveRanges, old: Logical, new: Logical, sharing: Sharing) -> bool:
    """Whether ``new`` is written over ``old``, which ends there."""
    node, index = live.ranges[old].last
    user = new.node
    if old is new or user.opcode == "copy":
        return False
    where = [(node, index), (old.node, old.index)]
    return any(n in user.operands and sharing.allowed(n, i, user, new.index) for n, i in where)
