"""What buffer assignment comes to: allocations, the place of every buffer, and the bytes by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightship.frontends.hlo.alias import AliasSet
from tightship.frontends.hlo.buffers import Buffer
from tightship.frontends.hlo.live import LiveRanges
from tightship.planners.assign._allocate import Allocation

__all__ = ["Assignment", "between", "combine"]


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

    def _sum(self, *kinds: str) -> int:
        return sum(a.size for a in self.allocations if a.kind in kinds)

    @property
    def total(self) -> int:
        return sum(a.size for a in self.allocations)

    @property
    def temp(self) -> int:
        return sum(a.size for a in self.allocations if a.temporary)

    @property
    def arguments(self) -> int:
        return self._sum("parameter")

    @property
    def output(self) -> int:
        return sum(a.size for a in self.allocations if a.output)

    @property
    def alias(self) -> int:
        """Bytes of arguments that are outputs, too."""
        return sum(a.size for a in self.allocations if a.output and a.kind == "parameter")

    @property
    def constants(self) -> int:
        return self._sum("constant")

    @property
    def thread_local(self) -> int:
        return self._sum("thread-local")

    def place(self, buffer: Buffer) -> tuple[int, int] | None:
        """(allocation, offset in it)."""
        for k, a in enumerate(self.allocations):
            if buffer in a.held:
                return k, a.held[buffer]
        return None


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


def between(live: LiveRanges, group: AliasSet) -> list[tuple[int, int]]:
    """When the place of an alias set is taken after an instruction: [start, end), without overlaps."""
    found: list[tuple[int, int]] = []
    since = -1
    for r in sorted(
        (live.ranges[b] for b in group.buffers if b in live.ranges), key=lambda r: (r.start, r.end)
    ):
        start = max(r.start, since)
        if r.end > start:
            found.append((start, r.end))
            since = r.end
    return found
