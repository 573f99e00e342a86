"""What the placement planners share: a checked problem as arrays, its lower bound, and the way back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tightship import _core
from tightship.errors import BadInput
from tightship.plan import Problem, Solution
from tightship.planners.place.groups import merge
from tightship.planners.place.parts import check_gaps
from tightship.planners.place.related import parts_of, placer_of

__all__ = [
    "Arrays",
    "Frame",
    "Ints",
    "frame",
    "from_arrays",
    "hinted",
    "is_plain",
    "load",
    "most_alive",
    "related",
]

Ints = npt.NDArray[np.int64]

FREE = -1
"""``Arrays.pinned`` of a buffer that may go anywhere."""

MAX_TOTAL = 2**62
"""Offsets are signed 64-bit integers in the core; this leaves room to add any two of them."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """A placement problem, one entry per buffer."""

    lower: Ints
    upper: Ints
    size: Ints
    alignment: Ints
    pinned: Ints

    @property
    def count(self) -> int:
        return len(self.size)


@dataclass(frozen=True, slots=True)
class Frame:
    """A checked problem, the core's working memory for it, its lower bound, and when work on it began.

    ``became``, where buffers were joined: the entry of the arrays that each buffer of the problem is part of.
    ``related``: the placer knows who is in whose way, beyond whole live ranges."""

    arrays: Arrays
    placer: Any
    bound: int
    began: float
    became: tuple[int, ...] = ()
    related: bool = False

    def solution(self, offsets: Ints, planner: str) -> Solution:
        every = offsets[np.array(self.became, dtype=np.int64)] if self.became else offsets
        return Solution(
            offsets=tuple(every.tolist()),
            arena=self.arena(offsets),
            lower_bound=self.bound,
            planner=planner,
            seconds=time.perf_counter() - self.began,
            work=int(self.placer.work),
        )

    def arena(self, offsets: Ints) -> int:
        return int((offsets + self.arrays.size).max(initial=0))

    def seconds_left(self, limit: float | None) -> float:
        """Of ``limit``, what a search may take: handing out so many offsets takes a while, too."""
        spent = time.perf_counter() - self.began + HANDING_OUT * self.arrays.count
        return float("inf") if limit is None else limit - spent


HANDING_OUT = 3e-7
"""Seconds for each buffer between the end of a search and its answer in Python."""


def frame(problem: Problem) -> Frame:
    """Check a problem of one arena and prepare it for the core."""
    if problem.pools:
        raise BadInput("a planner places in one arena; `pack` goes from pool to pool", len(problem.pools))
    if not is_plain(problem):
        return related(problem)
    began = time.perf_counter()
    return from_arrays(_arrays(problem), names=[b.id for b in problem.buffers], began=began)


def is_plain(problem: Problem) -> bool:
    """Whether live ranges tell all of who is in whose way."""
    return (
        not problem.conflicts
        and not any(map(attrgetter("gaps"), problem.buffers))
        and not any(map(attrgetter("group"), problem.buffers))
    )


def related(problem: Problem) -> Frame:
    """The same for a problem with groups, conflicts and gaps, by pairs of buffers or in parts."""
    began = time.perf_counter()
    merged, became = merge(problem)
    check_gaps(merged)
    arrays, names = _arrays(merged), [b.id for b in merged.buffers]
    _check(arrays, names)
    parts = parts_of(merged, arrays.lower, arrays.upper, arrays.size)
    placer = placer_of(problem, became, (arrays.size, arrays.alignment, arrays.pinned), parts)
    _check_pins(placer.clash, arrays, names)
    alone = _least(_apart(arrays, parts))
    least = max(placer.peak, alone, int((arrays.size + np.maximum(arrays.pinned, 0)).max(initial=0)))
    return Frame(arrays, placer, least, began, became if merged.buffers else (), related=True)


def hinted(problem: Problem, below: int, seconds: float) -> Ints | None:
    """Offsets that follow the hints, from the lowest on; None if their arena is not below, or time was short."""
    f = related(problem)
    merged, became = merge(problem)
    hints = np.array([FREE if b.hint is None else b.hint for b in merged.buffers], dtype=np.int64)
    order = np.lexsort((-f.arrays.size, hints, hints == FREE)).astype(np.int64)
    offsets, arena = f.placer.hinted(order, hints, below, seconds)
    return None if arena >= below else np.asarray(offsets)[np.array(became, dtype=np.int64)]


def _arrays(problem: Problem) -> Arrays:
    buffers = problem.buffers

    def column(name: str) -> Ints:
        return np.fromiter(map(attrgetter(name), buffers), dtype=np.int64, count=len(buffers))

    pins = list(map(attrgetter("pinned"), buffers))
    given = [pin for pin in pins if pin is not None]
    if given and (least := min(given)) < 0:
        raise BadInput("a pinned offset is not negative", least, f"buffer {buffers[pins.index(least)].id!r}")
    try:
        pinned = np.array([FREE if pin is None else pin for pin in pins], dtype=np.int64)
        return Arrays(column("lower"), column("upper"), column("size"), column("alignment"), pinned)
    except OverflowError:
        raise BadInput("times and sizes are 64-bit integers", place="Problem.buffers") from None


def from_arrays(arrays: Arrays, names: list[str] | None = None, *, began: float | None = None) -> Frame:
    """The same of arrays. ``began``: when work on the problem did, if not now."""
    began = time.perf_counter() if began is None else began
    _check(arrays, names)
    placer = _core.Placer(arrays.lower, arrays.upper, arrays.size, arrays.alignment, arrays.pinned)
    _check_pins(placer.clash, arrays, names)
    return Frame(arrays, placer, max(placer.peak, _bound(arrays)), began)


def _apart(a: Arrays, parts: Ints) -> Arrays:
    """Every part a buffer of its own, free to lie anywhere (of pinned ones where it is): a bound of that is one of
    the whole."""
    owner, since, until, low, high = (np.ascontiguousarray(c) for c in parts.T)
    pinned = np.where(a.pinned[owner] == FREE, FREE, a.pinned[owner] + low)
    return Arrays(since, until, high - low, np.gcd(a.alignment[owner], low), pinned)


def _least(a: Arrays) -> int:
    return max(most_alive(a.lower, a.upper, a.size), _bound(a))


def _check_pins(clash: int, arrays: Arrays, names: list[str] | None) -> None:
    if clash >= 0:
        rule = "pinned buffers that are alive together share no bytes"
        raise BadInput(rule, int(arrays.pinned[clash]), _name(clash, names))


def most_alive(lower: Ints, upper: Ints, weight: Ints) -> int:
    """The largest sum of weights alive at one time."""
    return int(_core.lower_bound(lower, upper, weight)) if len(weight) else 0


def load(problem: Problem) -> int:
    """The most bytes alive at one time, wherever they lie: without alignments and pins."""
    merged, _ = merge(problem)
    a = _arrays(merged)
    _, since, until, low, high = (
        np.ascontiguousarray(c) for c in parts_of(merged, a.lower, a.upper, a.size).T
    )
    return most_alive(since, until, high - low)


def _bound(a: Arrays) -> int:
    """What pins and alignments force beyond the peak load."""
    if not a.count:
        return 0
    pins = int(np.where(a.pinned == FREE, 0, a.pinned + a.size).max())
    unit = int(np.gcd.reduce(a.alignment))
    if unit == 1:
        return pins
    # Every offset is a multiple of `unit`, so each buffer but the one on top takes whole units.
    whole = -(-a.size // unit) * unit
    return max(pins, most_alive(a.lower, a.upper, whole) - int((whole - a.size).max()))


def _name(index: int, names: list[str] | None) -> str:
    return f"buffer {names[index]!r}" if names else f"buffer {index}"


def _check(a: Arrays, names: list[str] | None) -> None:
    rules = (
        ("a live range [lower, upper) is not empty", a.lower >= a.upper, a.lower),
        ("a size is not negative", a.size < 0, a.size),
        ("an alignment is at least 1", a.alignment < 1, a.alignment),
        ("a pinned offset is a multiple of the alignment",
         (a.pinned != FREE) & (a.pinned % np.maximum(a.alignment, 1) != 0), a.pinned),
    )  # fmt: skip
    for rule, broken, value in rules:
        if broken.any():
            i = int(broken.argmax())
            raise BadInput(rule, int(value[i]), _name(i, names))
    total = sum(map(float, (a.size.sum(dtype=float), a.alignment.sum(dtype=float), a.pinned.max(initial=0))))
    if total >= MAX_TOTAL:
        raise BadInput("all sizes together are below 2^62 bytes", int(total), "placement problem")
