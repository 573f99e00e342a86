"""The best packing found so far, kept when a search is ended by Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import numpy as np

from tightship.options import option
from tightship.plan import Problem, Solution
from tightship.planners.place.problem import FREE, Frame, Ints

__all__ = ["Best", "Interrupted", "Limits", "SearchOptions", "stacked", "watched"]

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
    units = np.unique(a.alignment[free])
    if len(units) <= 1:  # no time at all, however many there are
        unit = int(units.max(initial=1))
        room = np.where(free, -(-a.size // unit) * unit, 0)
        return np.where(free, -(-top // unit) * unit + np.cumsum(room) - room, offsets)
    for i in np.flatnonzero(free).tolist():
        unit = int(a.alignment[i])
        offsets[i] = -(-top // unit) * unit
        top = int(offsets[i] + a.size[i])
    return offsets
