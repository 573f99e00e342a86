"""First fit among parts of buffers: what lets a buffer lie in the gaps of others.

Slower than the core's packing (quadratic, in NumPy), which knows whole live ranges only: an addition to it for
problems of up to a few thousand buffers. A search ends at its work limit (buffers placed) or its deadline.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tightship.plan import Problem
from tightship.planners.place import _orders as orders
from tightship.planners.place._frame import FREE, Arrays, Ints

__all__ = ["Fitter", "Limits"]

ORDERS = (
    orders.by_size_then_start,
    orders.by_size,
    orders.by_area,
    orders.by_length,
    orders.by_breadth,
    orders.by_conflicts,
    orders.by_start,
    orders.given,
)
HISTORY = 20
"""Rounds back that a climbing packing is compared with (late acceptance)."""


@dataclass
class Limits:
    """Buffers that may still be placed, and the time until which."""

    work: int
    deadline: float
    used: int = field(default=0)

    @property
    def over(self) -> bool:
        return self.used >= self.work or time.perf_counter() >= self.deadline


class Fitter:
    """One problem, its buffers cut into parts."""

    def __init__(self, problem: Problem) -> None:
        self.buffers = problem.buffers
        cuts = [list(b.parts()) if b.size else [] for b in problem.buffers]
        self.first = np.cumsum([0, *map(len, cuts)])
        table = np.array([p for c in cuts for p in c], dtype=np.int64).reshape(-1, 4)
        self.since, self.until, self.low, self.high = (np.ascontiguousarray(c) for c in table.T)
        self.pinned = [(k, b.pinned) for k, b in enumerate(problem.buffers) if b.pinned is not None]
        self.free = [k for k, b in enumerate(problem.buffers) if b.pinned is None]
        self.size = np.array([b.size for b in problem.buffers], dtype=np.int64)
        self.best: Ints | None = None  # what ``improve`` has found so far

    def arena(self, offsets: Ints) -> int:
        return int((offsets + self.size).max(initial=0))

    def pack(self, order: Sequence[int], limits: Limits, *, below: int, hints: bool = False) -> Ints | None:
        """Offsets by first fit in this order, or, with ``hints``, at the hint where that is free. None when the
        arena would not be below ``below``, or a limit is reached."""
        offsets = np.zeros(len(self.buffers), dtype=np.int64)
        taken = _Taken(self)
        for k, pinned in self.pinned:
            offsets[k] = pinned
            taken.add(k, pinned)
        for k in order:
            if limits.over:
                return None
            limits.used += 1
            b = self.buffers[k]
            usable = hints and b.hint is not None and b.hint + b.size < below
            offset = taken.offset(k, b.hint if usable else None)
            if offset + b.size >= below:
                return None
            offsets[k] = offset
            taken.add(k, offset)
        return offsets

    def improve(self, start: Ints, bound: int, limits: Limits, seed: int) -> None:
        """``best``: that of ``start``, first fit in several orders, and of changing the best order."""
        self.best, order = start, self._by(start)
        for attempt in self._orders(start):
            if self.arena(self.best) <= bound or limits.over:
                return
            found = self.pack(attempt, limits, below=self.arena(self.best))
            if found is not None:
                self.best, order = found, attempt
        self._climb(self.best, order, bound, limits, random.Random(seed))

    def hinted(self, limits: Limits, *, below: int) -> Ints | None:
        """A packing that follows the hints: those who have one first, from the lowest on."""
        hint = [b.hint for b in self.buffers]
        order = sorted(self.free, key=lambda k: (hint[k] is None, hint[k] or 0, -self.buffers[k].size, k))
        return self.pack(order, limits, below=below, hints=True)

    def _by(self, offsets: Ints) -> list[int]:
        return sorted(self.free, key=lambda k: (int(offsets[k]), k))

    def _orders(self, start: Ints) -> Iterator[list[int]]:
        yield self._by(start)  # lowers what can be lowered, as it lies
        b = self.buffers
        columns = ([x.lower for x in b], [x.upper for x in b], [x.size for x in b], [x.alignment for x in b])
        pins = [FREE if x.pinned is None else x.pinned for x in b]
        arrays = Arrays(*(np.array(c, dtype=np.int64) for c in (*columns, pins)))
        for by in ORDERS:
            yield [k for k in by(arrays).tolist() if b[k].pinned is None]

    def _climb(self, now: Ints, order: list[int], bound: int, limits: Limits, rng: random.Random) -> None:
        """Again and again, place what makes up the top of the arena earlier."""
        history, least = [self.arena(now)] * HISTORY, self.arena(now)
        round_ = 0
        while least > bound and not limits.over:
            round_ += 1
            tops = [i for i, k in enumerate(order) if now[k] + self.size[k] == self.arena(now)]
            if not tops or tops[-1] == 0:
                break  # pinned, or nothing is in its way
            i = rng.choice([t for t in tops if t])
            moved = order.copy()
            moved.insert(rng.randrange(i), moved.pop(i))
            found = self.pack(moved, limits, below=history[round_ % HISTORY] + 1)
            if found is not None:
                now, order = found, moved
                if self.arena(now) < least:
                    self.best, least = now, self.arena(now)
            history[round_ % HISTORY] = self.arena(now)


class _Taken:
    """The parts placed so far."""

    def __init__(self, fitter: Fitter) -> None:
        self.fitter, self.count = fitter, 0
        size = len(fitter.since)
        self.since, self.until, self.start, self.end = (np.empty(size, dtype=np.int64) for _ in range(4))

    def add(self, k: int, offset: int) -> None:
        f = self.fitter
        mine = slice(f.first[k], f.first[k + 1])
        at = slice(self.count, self.count + mine.stop - mine.start)
        self.since[at], self.until[at] = f.since[mine], f.until[mine]
        self.start[at], self.end[at] = offset + f.low[mine], offset + f.high[mine]
        self.count = at.stop

    def offset(self, k: int, hint: int | None) -> int:
        """The lowest aligned offset at which nothing is shared, or the hint if nothing is there."""
        f, n, unit = self.fitter, self.count, self.fitter.buffers[k].alignment
        mine = slice(f.first[k], f.first[k + 1])
        meets = (self.since[:n] < f.until[mine, None]) & (self.until[:n] > f.since[mine, None])
        own, other = np.nonzero(meets)
        # Between these two, exclusive, an offset would make the pair share bytes.
        after = self.start[other] - f.high[mine][own]
        before = self.end[other] - f.low[mine][own]
        if hint is not None and hint % unit == 0 and not ((after < hint) & (hint < before)).any():
            return hint
        order = np.argsort(after)
        after = after[order]
        reach = np.maximum.accumulate(np.concatenate(([0], before[order])))
        candidates = -(-reach // unit) * unit
        fits = candidates[:-1] <= after
        return int(candidates[int(fits.argmax())] if fits.any() else candidates[-1])
