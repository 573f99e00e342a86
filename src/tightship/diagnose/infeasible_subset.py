"""Why a capacity cannot be met: a few buffers that are alive together and larger than it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightship.plan import Buffer, Problem
from tightship.planners.place.problem import cut, merge

__all__ = ["Clash", "clash"]


@dataclass(frozen=True, slots=True)
class Clash:
    """Buffers that are alive at ``time``, by id and largest first, and the bytes that they need together.

    None of them can be left out: without any one of them, the rest is within the capacity."""

    time: int
    ids: tuple[str, ...]
    nbytes: int


def clash(problem: Problem, capacity: int) -> Clash | None:
    """Those of the buffers alive at the peak that prove that ``capacity`` cannot be met; None if they do not."""
    parts = [b for b in cut(merge(problem)[0]).buffers if b.size > 0]
    unit = math.gcd(*(b.alignment for b in parts))
    # Every offset is a multiple of the unit, so each but the one on top takes whole units.
    whole = [replace(b, size=-(-b.size // unit) * unit) for b in parts] if unit > 1 else parts
    time, alive = _peak(whole)
    alive.sort(key=lambda k: (-parts[k].size, k))

    def need(members: Sequence[int]) -> int:
        slack = max((whole[k].size - parts[k].size for k in members), default=0)
        return sum(whole[k].size for k in members) - slack

    count = next((n for n in range(1, len(alive) + 1) if need(alive[:n]) > capacity), None)
    if count is None:
        return None
    members = alive[:count]
    for k in reversed(alive[:count]):
        fewer = [m for m in members if m != k]
        if need(fewer) > capacity:
            members = fewer
    return Clash(time, tuple(_said(problem, parts[k], time) for k in members), need(members))


def _said(problem: Problem, part: Buffer, time: int) -> str:
    """Of a group, the largest member that is alive."""
    group = next(b.group for b in problem.buffers if b.id == part.id)
    alive = [b for b in problem.buffers if group and b.group == group and b.lower <= time < b.upper]
    return max(alive, key=lambda b: b.size).id if alive else part.id


def _peak(buffers: Sequence[Buffer]) -> tuple[int, list[int]]:
    """The first time at which most bytes are alive, and which buffers are."""
    events = sorted([(b.upper, -b.size) for b in buffers] + [(b.lower, b.size) for b in buffers])
    load = most = peak = 0
    for time, change in events:  # ends come before starts of the same time
        load += change
        if load > most:
            most, peak = load, time
    return peak, [k for k, b in enumerate(buffers) if b.lower <= peak < b.upper]
