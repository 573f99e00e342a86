"""What buffer assignment comes to: allocations, the place of every buffer, and the bytes by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightship.frontends.hlo.live import LiveRanges
from tightship.frontends.hlo.points_to import Buffer
from tightship.planners.assign._allocate import Allocation

__all__ = ["Assignment", "combine", "fragmentation"]


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


def fragmentation(size: int, lives: Sequence[tuple[int, int, int]]) -> int:
    """Bytes of a heap beyond the most alive in it; ``lives`` are (start, end, bytes)."""
    events = sorted([(s, 1, n) for s, e, n in lives if e > s] + [(e, 0, n) for s, e, n in lives if e > s])
    now = most = 0
    for _, begins, n in events:
        now += n if begins else -n
        most = max(most, now)
    return size - most
