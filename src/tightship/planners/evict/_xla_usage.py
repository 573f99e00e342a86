"""The schedule of ``xla``: items in order, and the bytes in use while each runs.

A list of blocks of up to 256 items. Inserting, removing, adding to a range and the maximum of a range touch
two blocks item by item and the rest through one number per block, so each costs about the square root of the
length, most of it inside numpy. Order is decided by (block, rank), which an insertion changes for one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Place", "Usage"]

_FULL = 256
_NONE = -(1 << 62)
"""The maximum over nothing; adding real sizes to it never makes it count."""


class Place:
    """Anything that stands in the schedule."""

    __slots__ = ("block", "rank")

    block: _Block
    rank: int

    @property
    def key(self) -> int:
        """Compares as the schedule does, until the next insertion."""
        return self.block.number << 9 | self.rank


class _Block:
    __slots__ = ("items", "number", "use")

    def __init__(self, items: list[Place], use: NDArray[np.int64], number: int) -> None:
        self.items, self.number = items, number
        self.use = np.zeros(_FULL + 1, dtype=np.int64)
        self.use[: len(items)] = use
        self.renumber(0)

    def renumber(self, start: int) -> None:
        for rank in range(start, len(self.items)):
            item = self.items[rank]
            item.block, item.rank = self, rank


class Usage:
    """Items in schedule order with a number of bytes each."""

    def __init__(self, items: Sequence[Place], use: NDArray[np.int64]) -> None:
        half = _FULL // 2
        cuts = range(0, max(len(items), 1), half)
        self.blocks = [_Block(list(items[a : a + half]), use[a : a + half], n) for n, a in enumerate(cuts)]
        self.shift = np.zeros(len(self.blocks), dtype=np.int64)
        self.top = np.full(len(self.blocks), _NONE, dtype=np.int64)
        for b in self.blocks:
            self._refresh(b)

    def __iter__(self) -> Iterator[Place]:
        for b in self.blocks:
            yield from b.items

    def _refresh(self, b: _Block) -> None:
        n = len(b.items)
        self.top[b.number] = b.use[:n].max() + self.shift[b.number] if n else _NONE

    def value(self, item: Place) -> int:
        return int(item.block.use[item.rank]) + int(self.shift[item.block.number])

    def first(self) -> Place | None:
        return next(iter(self), None)

    def following(self, item: Place) -> Place | None:
        """The item right after ``item``."""
        b, rank = item.block, item.rank + 1
        while rank >= len(b.items):
            if b.number + 1 == len(self.blocks):
                return None
            b, rank = self.blocks[b.number + 1], 0
        return b.items[rank]

    def insert(self, item: Place, before: Place, value: int) -> None:
        b, rank = before.block, before.rank
        n = len(b.items)
        b.items.insert(rank, item)
        b.use[rank + 1 : n + 1] = b.use[rank:n].copy()
        b.use[rank] = value - int(self.shift[b.number])
        b.renumber(rank)
        if n + 1 > _FULL:
            self._split(b)
        self._refresh(item.block)

    def _split(self, b: _Block) -> None:
        half, n = len(b.items) // 2, b.number
        rest = _Block(b.items[half:], b.use[half : len(b.items)], n + 1)
        del b.items[half:]
        self.blocks.insert(n + 1, rest)
        for i in range(n + 2, len(self.blocks)):
            self.blocks[i].number = i
        self.shift = np.insert(self.shift, n + 1, self.shift[n])
        self.top = np.insert(self.top, n + 1, 0)
        self._refresh(b)
        self._refresh(rest)

    def remove(self, item: Place) -> None:
        b, rank = item.block, item.rank
        n = len(b.items)
        del b.items[rank]
        b.use[rank : n - 1] = b.use[rank + 1 : n].copy()
        b.renumber(rank)
        self._refresh(b)

    def add(self, after: Place, last: Place, delta: int) -> None:
        """Add to every item behind ``after``, up to and including ``last``."""
        a, b = after.block, last.block
        if a is b:
            a.use[after.rank + 1 : last.rank + 1] += delta
            self._refresh(a)
            return
        a.use[after.rank + 1 : len(a.items)] += delta
        b.use[: last.rank + 1] += delta
        self._refresh(a)
        self._refresh(b)
        self.shift[a.number + 1 : b.number] += delta
        self.top[a.number + 1 : b.number] += delta

    def peak(self) -> int:
        return int(self.top.max())

    def most(self, after: Place | None, until: Place, *, last: bool = True) -> int:
        """The most of any item behind ``after`` (None: from the start) up to ``until``; without that one if not
        ``last``."""
        b, stop = until.block, until.rank + last
        first = self.blocks[0] if after is None else after.block
        start = 0 if after is None else after.rank + 1
        if first is b:
            return self._part(b, start, stop)
        found = max(self._part(first, start, len(first.items)), self._part(b, 0, stop))
        between = self.top[first.number + 1 : b.number]
        return max(found, int(between.max())) if len(between) else found

    def _part(self, b: _Block, start: int, stop: int) -> int:
        part = b.use[start:stop]
        return int(part.max()) + int(self.shift[b.number]) if len(part) else _NONE
