"""Which block of the schedule to rematerialize next: XLA's rescan of all that ran, and a queue."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar, cast

from tightship.baselines.xla_tracker import Buffer, Item, Split, Tracker

__all__ = ["Candidates", "Choice", "Queue", "Rescan"]

N = TypeVar("N")

Choice = tuple[str, list[N]]
"""How a block of neighbors leaves memory (recompute, compress, offload), and the block."""


class Candidates(Protocol[N]):
    """What the rescan asks while an item of the schedule runs, be it of a graph or of a module of HLO."""

    def ran(self) -> Sequence[N]:
        """The items that have run, in order, without the one running now."""

    def candidate(self, item: N) -> bool:
        """Whether it may be rematerialized at all (R6)."""

    def released(self, item: N) -> int | None:
        """Bytes of its results that are live (R7); None: it may not be rematerialized now."""

    def revived(self, item: N, block: Sequence[N]) -> int:
        """Bytes of operands that are dead and would have to live again, but for those made in ``block`` (R7, R8)."""

    def unused(self, item: N) -> bool:
        """Whether nothing that has run used its results: rematerializing it is only a move (R9)."""

    def offered(self, way: str, item: N) -> int:
        """Bytes given back by compressing or offloading its result (R12, R13); 0: it cannot be."""


class Rescan(Generic[N]):
    """XLA's own way: of every block of up to ``block`` neighbors that have run, the cheapest by limit / gain. Longer
    blocks are looked at only when no shorter one gains anything, and no more than ``effort`` times as many of them as
    of single items. ``work`` counts items looked at."""

    def __init__(
        self,
        candidates: Candidates[N],
        block: int,
        limit: int,
        effort: int = 1 << 62,
        ways: Sequence[str] = ("recompute",),
    ) -> None:
        self.candidates, self.block, self.limit, self.effort = candidates, block, limit, effort
        single = [way for way in ("compress", "offload", "recompute") if way in ways]
        self.ways = single, [way for way in single if way == "recompute"]
        self.work = 0
        self.begin()

    def begin(self) -> None:
        """Another item of the schedule runs: effort is counted anew."""
        self.single = self.longer = 0

    def pick(self) -> Choice[N] | None:
        """The block to rematerialize, or None when nothing gains anything any more."""
        low = high = 1
        while high <= self.block and self.longer <= self.effort * self.single:
            if found := self._cheapest(low, high):
                return found
            low, high = high + 1, 2 * high
        return None

    def _cheapest(self, low: int, high: int) -> Choice[N] | None:
        ran, best, least, looked = self.candidates.ran(), None, 0, 0
        for i in range(len(ran)):
            block: list[N] = []
            for item in ran[i : i + high]:
                self.work += 1
                if not self.candidates.candidate(item):
                    break
                block.append(item)
                if len(block) < low:
                    continue
                for way in self.ways[len(block) > 1]:
                    looked += 1
                    gain = self.gain(block) if way == "recompute" else self.candidates.offered(way, item)
                    if gain > 0:
                        cost = self.cost(block, gain) if way == "recompute" else self.limit // gain
                        if best is None or cost < least:
                            best, least = (way, block.copy()), cost
        if low == 1:
            self.single += looked
        else:
            self.longer += looked
        return best

    def gain(self, block: Sequence[N]) -> int:
        """Bytes freed here by rematerializing a block (R7, R8)."""
        total = 0
        for item in block:
            released = self.candidates.released(item)
            if released is None:
                return 0
            total += released - self.candidates.revived(item, block)
        return total

    def cost(self, block: Sequence[N], gain: int) -> int:
        """R9; a block none of whose results has been used yet is only moved."""
        return 0 if all(map(self.candidates.unused, block)) else self.limit // gain


class Queue:
    """Candidates by seconds per byte gained (R17, R18). Whatever makes one better (its own users change, a
    dead operand revives) gives it its place anew at once; what makes it worse is noticed when it comes up. One
    that gains nothing now, or whose step was refused, waits twice as many over-full ops each time. Graphs
    without times are charged the bytes an op reads and makes instead."""

    def __init__(self, tracker: Tracker, block: int) -> None:
        self.tracker, self.block = tracker, block
        self.work = 0
        self.round = 0
        self.last: Item | None = None
        self.heap: list[tuple[float, int, int, Item]] = []
        self.key: dict[Item, tuple[float, int, int]] = {}
        self.parked: list[tuple[int, int, Item]] = []
        self.strikes: dict[Item, int] = {}
        self.busy: list[Item] = []
        self.watch: list[dict[Item, None]] = [{} for _ in tracker.buffers]
        self.time = _seconds(tracker)

    def pick(self, now: Item) -> list[Item] | None:
        if now is not self.last:
            self.last = now
            self.round += 1
            while self.parked and self.parked[0][0] <= self.round:
                self.touch(heappop(self.parked)[2])
        while self.heap:
            cost, loss, number, item = heappop(self.heap)
            key = (cost, loss, number)
            if self.key.get(item) != key:
                continue
            del self.key[item]
            found = self.value(item)
            if any(self.tracker.in_use(b) for b in item.made):
                self.busy.append(item)
            elif found is None:
                self.refused(item)
            if found is None:
                continue
            if found[0] <= key:
                return found[1]
            self._push(item, found[0])
        return None

    def touch(self, item: Item) -> None:
        """Give a candidate its place anew."""
        found = None if item.gone else self.value(item)
        if found is None:
            self.key.pop(item, None)
        elif self.key.get(item) != found[0]:
            self._push(item, found[0])

    def _push(self, item: Item, key: tuple[float, int, int]) -> None:
        self.key[item] = key
        heappush(self.heap, (*key, item))

    def value(self, item: Item) -> tuple[tuple[float, int, int], list[Item]] | None:
        """The best group that ends in ``item``: it and, one by one, producers of its dead operands (R8, R20)."""
        t = self.tracker
        if item.gone or not t.candidate(item) or not (total := t.freed(item)):
            return None
        at = cast(Item, t.target(item))
        group, lost = [item], dict[int, Buffer]()
        best: tuple[tuple[float, int, int], list[Item]] | None = None
        lost |= {b.storage: b for b in t.dead_operands(item, at, group)}
        while True:
            self.work += 1
            gain = total - sum(b.size for b in lost.values()) if lost else total
            if gain > 0:
                key = (self._cost(group) / gain, -gain, item.number)
                if best is None or key < best[0]:
                    best = key, group.copy()
            if not lost or len(group) == self.block:
                return best
            b = max(lost.values(), key=lambda b: (b.size, -b.storage))
            if not t.candidate(b.item):
                return best
            group.append(b.item)
            total += t.freed(b.item)
            for own in b.item.made:
                lost.pop(own.storage, None)
            lost |= {d.storage: d for d in t.dead_operands(b.item, at, group)}

    def _cost(self, group: Sequence[Item]) -> float:
        """Time of the runs added: a move adds none (R9)."""
        t = self.tracker
        if len(group) == 1:
            return 0.0 if t.unused(group[0]) else self.time[group[0].op]
        moves: set[Item] = set()
        for x in sorted(group, key=lambda i: -i.key):
            users = (u for b in x.made for u in b.users[: b.done])
            if t.droppable(x) and all(u in moves for u in users):
                moves.add(x)
        return sum(self.time[x.op] for x in group if x not in moves)

    def refused(self, item: Item) -> None:
        """Let a candidate wait."""
        self.strikes[item] = strikes = self.strikes.get(item, 0) + 1
        heappush(self.parked, (self.round + (1 << min(strikes, 40)), item.number, item))

    def taken(self, splits: Sequence[Split]) -> None:
        again: dict[Item, None] = {}
        for s in splits:
            again[s.source] = None
            for b, _ in s.extended:
                again[b.item] = None
                if b.remaining == 1:  # it was dead: whoever reads it no longer loses it
                    self._forget(self.watch[b.storage])
                    again.update(self.watch[b.storage])
        for item in again:
            self.touch(item)

    def _forget(self, watch: dict[Item, None]) -> None:
        for x in [x for x in watch if x.gone or not self.tracker.wanted(x)]:
            del watch[x]

    def ended(self, item: Item) -> None:
        for x in self.busy:
            self.touch(x)
        self.busy = []
        if self.tracker.may[item.op] and self.tracker.wanted(item):
            for s in item.reads:
                self.watch[s][item] = None
            self.touch(item)


def _seconds(tracker: Tracker) -> list[float]:
    uses, size = tracker.uses, tracker.size
    if any(op.time for op in tracker.graph.ops):
        return [op.time for op in tracker.graph.ops]
    rows = zip(uses.reads, uses.defines, strict=True)
    return [float(sum(size[s] for s in (*reads, *made))) for reads, made in rows]
