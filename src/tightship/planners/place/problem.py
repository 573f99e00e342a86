"""What the placement planners share: a checked problem as arrays, its lower bound, and the way back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tightship import _core
from tightship.errors import BadInput
from tightship.plan import Buffer, Gap, Problem, Solution
from tightship.planners.place.related import parts_of, placer_of

__all__ = [
    "Arrays",
    "Frame",
    "Ints",
    "NoOptions",
    "cut",
    "frame",
    "from_arrays",
    "hinted",
    "load",
    "merge",
    "most_alive",
    "related",
]

Ints = npt.NDArray[np.int64]

FREE = -1
"""``Arrays.pinned`` of a buffer that may go anywhere."""

EMPTY, ALIGNMENT = "empty live range from {} on", "alignment {} is below 1"

MAX_TOTAL = 2**62
"""Offsets are signed 64-bit integers in the core; this leaves room to add any two of them."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """No choices."""


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
        raise BadInput(
            f"{len(problem.pools)} pools: a planner places in one arena; `pack` goes from pool to pool"
        )
    if not _is_plain(problem):
        return related(problem)
    began = time.perf_counter()
    return from_arrays(_arrays(problem), names=[b.id for b in problem.buffers], began=began)


def _is_plain(problem: Problem) -> bool:
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
        raise BadInput(f"negative offset {least}", place=f"buffer {buffers[pins.index(least)].id!r}")
    try:
        pinned = np.array([FREE if pin is None else pin for pin in pins], dtype=np.int64)
        return Arrays(column("lower"), column("upper"), column("size"), column("alignment"), pinned)
    except OverflowError:
        raise BadInput("time or size beyond 64 bits", place="Problem.buffers") from None


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
        rule = (
            f"offset {int(arrays.pinned[clash])}: shares bytes with another pinned buffer alive at one time"
        )
        raise BadInput(rule, place=_name(clash, names))


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
        (EMPTY, a.lower >= a.upper, a.lower),
        ("negative size {}", a.size < 0, a.size),
        (ALIGNMENT, a.alignment < 1, a.alignment),
        ("pinned offset {} is no multiple of the alignment",
         (a.pinned != FREE) & (a.pinned % np.maximum(a.alignment, 1) != 0), a.pinned),
    )  # fmt: skip
    for rule, broken, value in rules:
        if broken.any():
            i = int(broken.argmax())
            raise BadInput(rule.format(int(value[i])), place=_name(i, names))
    total = sum(map(float, (a.size.sum(dtype=float), a.alignment.sum(dtype=float), a.pinned.max(initial=0))))
    if total >= MAX_TOTAL:
        raise BadInput(
            f"too large: sizes add up to {int(total)}, not below 2^62 bytes", place="placement problem"
        )


# --- groups and gaps ---


def merge(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """The problem without groups and conflicts, and for every buffer of the problem the one that it became.

    A merged buffer has the id of its first member, the windows of those alive, and everything that one of them
    asks for. Raises ``BadInput`` for members that cannot share an offset.
    """
    _check_parts(problem)
    if not any(b.group for b in problem.buffers):
        return replace(problem, conflicts=()), tuple(range(len(problem.buffers)))
    first: dict[str, int] = {}
    members: list[list[int]] = []
    became: list[int] = []
    for k, b in enumerate(problem.buffers):
        at = first.setdefault(b.group, len(members)) if b.group else len(members)
        if at == len(members):
            members.append([])
        members[at].append(k)
        became.append(at)
    groups = [[problem.buffers[k] for k in rows] for rows in members]
    buffers = tuple(_merged(g) if len(g) > 1 else replace(g[0], group="") for g in groups)
    return replace(problem, buffers=buffers, conflicts=()), tuple(became)


def _merged(group: Sequence[Buffer]) -> Buffer:
    name = group[0].group

    def fault(rule: str, b: Buffer) -> BadInput:
        return BadInput(f"{rule} (colocation group {name!r})", place=f"buffer {b.id!r}")

    for b in group:
        if any(gap.window for gap in b.gaps):
            raise fault("gap with a window: members of a group have none", b)
    alignment = math.lcm(*(b.alignment for b in group))
    pins = {b.pinned: b for b in group if b.pinned is not None}
    if len(pins) > 1:
        raise fault(f"members pinned to different offsets {sorted(pins)}", list(pins.values())[1])
    for offset, b in pins.items():
        if offset % alignment:
            raise fault(f"pinned offset {offset} is no multiple of {alignment}, as all members ask for", b)
    pools = next((b.pools for b in group if b.pools), ())
    for b in group:
        if b.pools:
            pools = tuple(p for p in pools if p in b.pools)
        if b.pools and not pools:
            raise fault(f"no pool in common with other members, only {', '.join(b.pools)}", b)
    hint = next((b.hint for b in group if b.hint is not None), None)
    lower, upper, size = min(b.lower for b in group), max(b.upper for b in group), max(b.size for b in group)
    gaps = _merged_gaps(group, size)
    return Buffer(group[0].id, lower, upper, size, alignment, next(iter(pins), None), gaps, hint, "", pools)


def _merged_gaps(group: Sequence[Buffer], size: int) -> tuple[Gap, ...]:
    """Where less than the largest member is alive."""
    parts = sorted(p for b in group for p in b.parts())
    cuts = sorted({t for b in group for t in (b.lower, b.upper)} | {t for p in parts for t in p[:2]})
    alive: list[tuple[int, int]] = []  # (until, bytes)
    gaps: list[Gap] = []
    k = 0
    for since, until in pairwise(cuts):
        while k < len(parts) and parts[k][0] <= since:
            alive.append((parts[k][1], parts[k][3]))
            k += 1
        alive = [a for a in alive if a[0] > since]
        most = max((nbytes for _, nbytes in alive), default=0)
        if most == size:
            continue
        window = (0, most) if most else None
        if gaps and gaps[-1].upper == since and gaps[-1].window == window:
            gaps[-1] = Gap(gaps[-1].lower, until, window)
        else:
            gaps.append(Gap(since, until, window))
    return tuple(gaps)


def _check_parts(problem: Problem) -> None:
    """Raise ``BadInput`` for gaps that break a rule, and for what cannot be checked once buffers are in parts."""
    for b in problem.buffers:
        if not b.gaps and not b.group:
            continue
        fault = b.gap_fault
        if b.lower >= b.upper:
            fault = EMPTY.format(b.lower)
        elif b.alignment < 1:
            fault = ALIGNMENT.format(b.alignment)
        elif b.pinned is not None and (b.pinned < 0 or b.pinned % b.alignment):
            fault = f"pinned offset {b.pinned} is negative or no multiple of the alignment"
        if fault:
            raise BadInput(fault, place=f"buffer {b.id!r}")


def cut(problem: Problem) -> Problem:
    """Every part a buffer of its own, free to lie anywhere (pinned ones lie where they are): without gaps it asks for
    fewer bytes, so any bound of it is one."""
    return replace(
        problem, buffers=tuple(c for b in problem.buffers for c in (_parts(b) if b.gaps else (b,)))
    )


def _parts(b: Buffer) -> Iterator[Buffer]:
    for since, until, low, high in b.parts():
        pinned = None if b.pinned is None else b.pinned + low
        yield Buffer(b.id, since, until, high - low, math.gcd(b.alignment, low), pinned)
