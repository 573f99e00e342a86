"""Orders in which greedy placement takes buffers. Each is a permutation; ties go by lower, then by index.

`Best` keeps the best packing found so far, also when a search is ended by Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tightship import _core
from tightship.graph import distinct
from tightship.options import option
from tightship.plan import Problem, Solution
from tightship.planners.place.problem import FREE, Arrays, Frame, Ints

__all__ = [
    "SKIES",
    "Best",
    "Interrupted",
    "Limits",
    "Order",
    "SearchOptions",
    "by_area",
    "by_breadth",
    "by_conflicts",
    "by_length",
    "by_size",
    "by_size_then_conflicts",
    "by_size_then_start",
    "by_start",
    "given",
    "peak_first",
    "skyline",
    "stacked",
    "watched",
    "xla_spatial",
    "xla_temporal",
]


_AT_ONCE = 100_000
"""Entries that are sorted by all keys in one call."""

Order = Callable[[Arrays], Ints]


def _sorted(*keys: npt.NDArray[Any]) -> Ints:
    if len(keys[0]) <= _AT_ONCE:
        return np.lexsort(keys[::-1]).astype(np.int64)
    order = np.arange(len(keys[0]), dtype=np.int64)
    for key in keys[::-1]:  # key by key, so that Ctrl-C need not wait for all
        order = order[np.argsort(key[order], kind="stable")]
    return order


def given(a: Arrays) -> Ints:
    return np.arange(a.count, dtype=np.int64)


def by_size(a: Arrays) -> Ints:
    """Largest first, longest first among equals."""
    return _sorted(-a.size, a.lower - a.upper, a.lower)


def by_size_then_start(a: Arrays) -> Ints:
    """Largest first, earliest first among equals (networks have many equals)."""
    return _sorted(-a.size, a.lower)


def by_start(a: Arrays) -> Ints:
    """As they come alive, largest first among equals."""
    return _sorted(a.lower, -a.size)


def by_length(a: Arrays) -> Ints:
    """Longest-lived first, largest first among equals."""
    return _sorted(a.lower - a.upper, -a.size, a.lower)


def conflicts(a: Arrays) -> Ints:
    """For every buffer, how many are alive at the same time as it (itself included)."""
    begun = np.searchsorted(np.sort(a.lower), a.upper)
    ended = np.searchsorted(np.sort(a.upper), a.lower, side="right")
    return (begun - ended).astype(np.int64)


def by_conflicts(a: Arrays) -> Ints:
    """Most conflicts first, largest first among equals."""
    return _sorted(-conflicts(a), -a.size, a.lower)


def by_size_then_conflicts(a: Arrays) -> Ints:
    """Largest first, most conflicts among equals, then the last given."""
    return _sorted(-a.size, -conflicts(a), -given(a))


def by_area(a: Arrays) -> Ints:
    """Largest product of size and conflicts first: large buffers that are in many others' way."""
    return _sorted(-_area(a), a.lower)


def by_breadth(a: Arrays) -> Ints:
    """Those alive at the broadest time first (breadth: bytes alive), largest first among them; and so on."""
    return _sorted(_breadth_rank(a), -a.size, a.lower)


def peak_first(a: Arrays, stack: str, rest: str) -> Ints:
    """Those alive at the broadest time first, stacked by one key, then the others by another.

    Keys: ``size`` and ``area`` (largest first), ``length`` (longest), ``start`` (earliest), ``end`` (latest).
    """
    keys = {
        "size": -a.size,
        "area": -_area(a),
        "length": a.lower - a.upper,
        "start": a.lower,
        "end": -a.upper,
    }
    at_peak = _breadth_rank(a) == 0
    return _sorted(~at_peak, np.where(at_peak, keys[stack], keys[rest]), a.lower)


def xla_spatial(a: Arrays) -> Ints:
    """Largest first, then longest-lived, then as given."""
    return _sorted(-a.size, a.lower - a.upper)


def xla_temporal(a: Arrays) -> Ints:
    """Longest-lived first, then largest, then as given."""
    return _sorted(a.lower - a.upper, -a.size)


SKIES = ("longest", "largest", "snug")


def skyline(a: Arrays, rule: str) -> Ints:
    """The order in which a skyline is built; ``rule``: whom its lowest stretch takes, one of ``SKIES``."""
    placer = _core.Placer(a.lower, a.upper, a.size, a.alignment, a.pinned)
    return np.asarray(placer.skyline(SKIES.index(rule)))


def _area(a: Arrays) -> npt.NDArray[np.float64]:
    return a.size.astype(np.float64) * conflicts(a)


def _breadth_rank(a: Arrays) -> Ints:
    """For every buffer, the rank of the broadest time it is alive at: 0 for those alive at the peak."""
    if not a.count:
        return given(a)
    times = distinct(a.lower)  # the bytes alive grow at no other time
    first, last = np.searchsorted(times, a.lower), np.searchsorted(times, a.upper)
    change = np.zeros(len(times) + 1, dtype=np.int64)
    np.add.at(change, first, a.size)
    np.add.at(change, last, -a.size)
    rank = np.empty(len(times), dtype=np.int64)
    rank[np.argsort(-np.cumsum(change)[:-1], kind="stable")] = np.arange(len(times))
    return _range_min(rank, first, last)


def _range_min(values: Ints, first: Ints, last: Ints) -> Ints:
    """min(values[first:last]) for every pair, from minima over ranges of powers of two."""
    level = np.frexp((last - first).astype(np.float64))[1] - 1
    result = np.empty(len(first), dtype=np.int64)
    row = values
    for k in range(int(level.max(initial=0)) + 1):
        at = level == k
        result[at] = np.minimum(row[first[at]], row[last[at] - (1 << k)])
        row = np.minimum(row[: -(1 << k)], row[1 << k :])
    return result


Watcher = Callable[[int, int], None]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a search ends: whichever limit is reached first. The same seed and work limit give the same answer unless
    the time limit ended it."""

    seed: int = option(0, "where the search begins")
    work_limit: int = option(200_000, "buffers that each search may place")
    time_limit: float | None = option(10.0, "seconds in all, None for no limit")


@dataclass(frozen=True, slots=True)
class SearchOptions(Limits):
    """The same on any number of threads, and an arena that is small enough."""

    threads: int = option(2, "threads that search; the answer does not depend on their number")
    capacity: int | None = option(
        None,
        "arena in bytes that is small enough (None: the problem's; if it has none, as small as possible)",
    )


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """``watcher(arena, bound)``, in bytes, is told of every better packing that is found inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Interrupted(KeyboardInterrupt):
    """A search was interrupted; ``solution`` is the best that it had found."""

    def __init__(self, solution: Solution) -> None:
        super().__init__()
        self.solution = solution


@dataclass(slots=True)
class Best:
    """Offsets, their arena, and the lower bound as far as it is known. Begins with every buffer in bytes of its
    own, which takes no time."""

    frame: Frame
    offsets: Ints = field(init=False)
    arena: int = field(init=False)
    bound: int = field(init=False)
    first: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.offsets = stacked(self.frame)
        self.arena = self.frame.arena(self.offsets)
        self.bound = self.frame.bound

    @property
    def cutoff(self) -> int:
        """An arena from which on a packing is not worth taking."""
        return self.arena + self.first

    def offer(self, offsets: Ints, arena: int) -> bool:
        """Take what is smaller; of equals the first that was offered stays."""
        if arena >= self.cutoff:
            return False
        self.offsets, self.arena, self.first = offsets, arena, False
        if (watcher := _watcher.get()) is not None:
            watcher(arena, self.bound)
        return True

    def search(self, problem: Problem, planner: str, go: Callable[[], None]) -> Solution:
        """The best when ``go`` is over. Raises ``Interrupted`` with it when Ctrl-C ended that."""
        try:
            go()
        except KeyboardInterrupt:
            raise Interrupted(self._solution(planner)) from None
        return self._solution(planner)

    def go_on(self) -> None:
        """Raise ``KeyboardInterrupt`` if the core has been told to stop."""
        if self.frame.placer.interrupted:
            raise KeyboardInterrupt

    def _solution(self, planner: str) -> Solution:
        return replace(self.frame, bound=self.bound).solution(self.offsets, planner)


def stacked(f: Frame) -> Ints:
    """Every free buffer in bytes of its own, above all that are pinned."""
    a = f.arrays
    free = (a.pinned == FREE) & (a.size > 0)
    top = int(np.where(a.pinned == FREE, 0, a.pinned + a.size).max(initial=0))
    offsets = np.where(a.pinned == FREE, 0, a.pinned)
    units = distinct(a.alignment[free])
    if len(units) <= 1:  # no time at all, however many there are
        unit = int(units.max(initial=1))
        room = np.where(free, -(-a.size // unit) * unit, 0)
        return np.where(free, -(-top // unit) * unit + np.cumsum(room) - room, offsets)
    for i in np.flatnonzero(free).tolist():
        unit = int(a.alignment[i])
        offsets[i] = -(-top // unit) * unit
        top = int(offsets[i] + a.size[i])
    return offsets
