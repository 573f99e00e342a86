"""Temporaries into outputs and donated parameters, wherever nothing else is alive.

While the most bytes of temporaries are alive, the largest of them that some allocation can take moves there, at the
lowest offset that is free all its life; until none can. A result may be written over an operand only at its offset.
"""

from __future__ import annotations

from collections.abc import Sequence

from tightship.frontends.hlo.buffers import Buffer
from tightship.frontends.hlo.live import LiveRanges
from tightship.frontends.hlo.share import Sharing
from tightship.planners.assign._allocate import Allocation
from tightship.planners.assign._heap import Group

__all__ = ["host", "hostable"]

_CELLS = 10_000_000
"""Steps of all buffers together beyond which hosts are chosen as XLA does."""

_TRIES = 4_000
"""Moves that are tried at most, so that large modules take no longer than small ones."""


def hostable(live: LiveRanges) -> bool:
    """Whether the module is small enough to look at every buffer at every step."""
    return sum(r.end - r.start + 1 for r in live.ranges.values()) <= _CELLS


def host(
    live: LiveRanges, sharing: Sharing, groups: Sequence[Group], into: Sequence[Allocation], alignment: int
) -> list[Group]:
    """The groups that stay in the heap; the others are held by the allocations in ``into`` afterwards."""
    hosts = sorted(
        (_Host(a, live, sharing, alignment) for a in into if a.kind != "tuple"), key=lambda h: h.size
    )
    left = dict(enumerate(groups))
    profile = _Profile(groups, live)
    refused: set[int] = set()
    tries = 0
    while tries < _TRIES:
        at_peak = [k for k in profile.at_peak() if k in left and k not in refused]
        if not at_peak:
            break
        k = max(at_peak, key=lambda k: (groups[k].size, -k))
        tries += 1
        if any(h.take(groups[k]) for h in hosts):
            del left[k]
            profile.remove(k)
        else:
            refused.add(k)
    return list(left.values())


class _Profile:
    """Bytes alive at each step, and who they are at the highest."""

    def __init__(self, groups: Sequence[Group], live: LiveRanges) -> None:
        self.size = [g.size for g in groups]
        self.steps: list[set[int]] = []
        self.bytes = [0] * (live.end + 1)
        self.alive: list[dict[int, None]] = [{} for _ in range(live.end + 1)]
        self.of: list[list[int]] = []
        for k, group in enumerate(groups):
            mine: dict[int, None] = {}
            for m in group.members:
                r = live.ranges[m.buffer]
                mine.update(dict.fromkeys(range(r.start, r.end + 1)))
            self.of.append(list(mine))
            for step in mine:
                self.bytes[step] += group.size
                self.alive[step][k] = None

    def at_peak(self) -> list[int]:
        most = max(self.bytes, default=0)
        return list(self.alive[self.bytes.index(most)]) if most else []

    def remove(self, k: int) -> None:
        for step in self.of[k]:
            self.bytes[step] -= self.size[k]
            del self.alive[step][k]


class _Host:
    """An allocation with what lies in it: (start, end, low, high, buffer), ends included."""

    def __init__(self, allocation: Allocation, live: LiveRanges, sharing: Sharing, alignment: int) -> None:
        self.allocation, self.live, self.sharing, self.alignment = allocation, live, sharing, alignment
        self.size = allocation.size
        self.held: list[tuple[int, int, int, int, Buffer]] = []
        for b in allocation.held:
            if b in live.ranges:
                r = live.ranges[b]
                self.held.append((r.start, r.end, 0, allocation.size, b))

    def take(self, group: Group) -> bool:
        """Put the group at the lowest offset that is free whenever one of its members is alive."""
        if group.size > self.size or not group.size:
            return False
        clashes = [
            (low, high, self._over(held, m.buffer))
            for m in group.members
            for start, end, low, high, held in self.held
            if start <= self.live.ranges[m.buffer].end and end >= self.live.ranges[m.buffer].start
        ]
        offset = self._offset(group, clashes)
        if offset is None:
            return False
        for m in group.members:
            r = self.live.ranges[m.buffer]
            self.held.append((r.start, r.end, offset, offset + group.size, m.buffer))
            self.allocation.held[m.buffer] = offset
        return True

    def _offset(self, group: Group, clashes: list[tuple[int, int, bool]]) -> int | None:
        at = 0
        for low, high, over in sorted(clashes):
            if (
                over
                and low == at
                and all(lo == at or lo >= at + group.size or hi <= at for lo, hi, _ in clashes)
            ):
                continue
            if low < at + group.size and high > at:
                at = -(-high // self.alignment) * self.alignment
        return at if at + group.size <= self.size else None

    def _over(self, held: Buffer, new: Buffer) -> bool:
        """Whether the two only meet where one is written over the other; not for members of larger alias sets."""
        a, b = self.live.ranges[held], self.live.ranges[new]
        first, second = (held, new) if a.end == b.start else (new, held)
        before, after = self.live.ranges[first], self.live.ranges[second]
        if before.end != after.start or before.start >= before.end or first.nbytes != second.nbytes:
            return False
        node, index = before.last
        user = second.node
        return (
            user.opcode != "copy"
            and node in user.operands
            and self.sharing.allowed(node, index, user, second.index)
        )
