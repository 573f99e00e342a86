"""What the placement planners share: a checked problem as arrays, its lower bound, and the way back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tightship import _core
from tightship.errors import BadInput
from tightship.plan import Problem, Solution
from tightship.planners.place._parts import cut

__all__ = ["Arrays", "Frame", "Ints", "frame", "from_arrays", "most_alive"]

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
    """A checked problem, the core's working memory for it, its lower bound, and when work on it began."""

    arrays: Arrays
    placer: Any
    bound: int
    began: float

    def solution(self, offsets: Ints, planner: str) -> Solution:
        return Solution(
            offsets=tuple(offsets.tolist()),
            arena=self.arena(offsets),
            lower_bound=self.bound,
            planner=planner,
            seconds=time.perf_counter() - self.began,
            work=int(self.placer.work),
        )

    def arena(self, offsets: Ints) -> int:
        return int((offsets + self.arrays.size).max(initial=0))

    def seconds_left(self, limit: float | None) -> float:
        return float("inf") if limit is None else limit - (time.perf_counter() - self.began)


def frame(problem: Problem) -> Frame:
    """Check a problem and prepare it for the core."""
    buffers = problem.buffers
    rows = [(b.lower, b.upper, b.size, b.alignment, FREE if b.pinned is None else b.pinned) for b in buffers]
    for b in buffers:
        if b.pinned is not None and b.pinned < 0:
            raise BadInput("a pinned offset is not negative", b.pinned, f"buffer {b.id!r}")
    try:
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    except OverflowError:
        raise BadInput("times and sizes are 64-bit integers", place="Problem.buffers") from None
    columns = [np.ascontiguousarray(c) for c in table.T]
    made = from_arrays(Arrays(*columns), names=[b.id for b in buffers])
    if any(b.gaps for b in buffers):  # they are alive in their whole live range here, which proves less
        made = replace(made, bound=min(made.bound, frame(cut(problem)).bound))
    return made


def from_arrays(arrays: Arrays, names: list[str] | None = None) -> Frame:
    began = time.perf_counter()
    _check(arrays, names)
    placer = _core.Placer(arrays.lower, arrays.upper, arrays.size, arrays.alignment, arrays.pinned)
    if placer.clash >= 0:
        i = placer.clash
        raise BadInput(
            "pinned buffers that are alive together share no bytes", int(arrays.pinned[i]), _name(i, names)
        )
    return Frame(arrays, placer, max(placer.peak, _bound(arrays)), began)


def most_alive(lower: Ints, upper: Ints, weight: Ints) -> int:
    """The largest sum of weights alive at one time."""
    return int(_core.lower_bound(lower, upper, weight)) if len(weight) else 0


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
