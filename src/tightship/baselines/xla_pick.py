"""Which step ``xla`` takes next: the original's rescan of all earlier ops, and a queue kept up to date."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol, cast

from tightship.baselines.xla_tracker import Buffer, Item, Split, Tracker

__all__ = ["Picker", "Queue", "Rescan"]


class Picker(Protocol):
    """Chooses a group of items to repeat; is told what became of it. ``work`` counts items looked at."""

    work: int

    def pick(self, now: Item) -> list[Item] | None: ...
    def taken(self, splits: Sequence[Split]) -> None: ...
    def refused(self, item: Item) -> None: ...
    def ended(self, item: Item) -> None: ...


class Rescan:
    """XLA's own way: of every run of up to ``block`` neighbours among the ops already run, the cheapest by
    limit / gain. Longer runs are looked at only when no shorter one gains anything."""

    def __init__(self, tracker: Tracker, block: int, limit: int) -> None:
        self.tracker, self.block, self.limit = tracker, block, limit
        self.work = 0

    def pick(self, now: Item) -> list[Item] | None:
        low = high = 1
        while high <= self.block:
            if found := self._best(now, low, high):
                return found
            low, high = high + 1, 2 * high
        return None

    def _best(self, now: Item, low: int, high: int) -> list[Item] | None:
        t = self.tracker
        ran: list[Item] = []
        for place in t.usage:
            if place is now:
                break
            ran.append(cast(Item, place))
        best: tuple[int, list[Item]] | None = None
        for i in range(len(ran)):
            group: list[Item] = []
            for x in ran[i : i + high]:
                self.work += 1
                if not t.candidate(x):
                    break
                group.append(x)
                if len(group) < low:
                    continue
                gain = self.gain(group)
                if gain > 0:
                    cost = self.cost(group, gain)
                    if best is None or cost < best[0]:
                        best = cost, group.copy()
        return best[1] if best else None

    def gain(self, group: Sequence[Item]) -> int:
        """Bytes freed here by repeating a group (R7, R8)."""
        t = self.tracker
        if any(t.indirect[b.storage] for x in group for b in x.made):
            return 0
        first = t.target(group[-1])
        total = 0
        for x in group:
            total += t.freed(x)
            at = t.target(x) or first
            for s in t.reads_again(x) if at else ():
                b = t.buffer_at(s, cast(Item, at))
                if t.dead(b) and b.item not in group:
                    total -= b.size
        return total

    def cost(self, group: Sequence[Item], gain: int) -> int:
        """R9; a group none of whose results has been used yet is only moved."""
        return 0 if all(self.tracker.unused(x) for x in group) else self.limit // gain

    def taken(self, splits: Sequence[Split]) -> None:
        pass

    def refused(self, item: Item) -> None:
        pass

    def ended(self, item: Item) -> None:
        pass


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
        self._lose(item, at, group, lost)
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
            self._lose(b.item, at, group, lost)

    def _lose(self, item: Item, at: Item, group: Sequence[Item], lost: dict[int, Buffer]) -> None:
        t = self.tracker
        for s in t.reads_again(item):
            b = t.buffer_at(s, at)
            if t.dead(b) and b.item not in group:
                lost[s] = b

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
