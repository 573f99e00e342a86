"""Why a capacity cannot be met: a few buffers that have no placement within it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightship.plan import Buffer, Problem
from tightship.planners.place.problem import cut, merge

__all__ = ["InfeasibleSubset", "infeasible_subset", "infeasible_subset_of_pools", "too_large"]


@dataclass(frozen=True, slots=True)
class InfeasibleSubset:
    """Buffers, by id, that need ``nbytes`` together, more than there are; most of them are alive at ``time``."""

    time: int
    ids: tuple[str, ...]
    nbytes: int


def infeasible_subset(problem: Problem, capacity: int) -> InfeasibleSubset | None:
    """Buffers that prove that ``capacity`` cannot be met; None: nothing is proved.

    They are alive at the peak, largest first, and without any one of them the rest is within the capacity."""
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
    return InfeasibleSubset(
        time, tuple(_alive_member(problem, parts[k], time) for k in members), need(members)
    )


def infeasible_subset_of_pools(problem: Problem) -> InfeasibleSubset | None:
    """Buffers that prove that the capacities cannot be met: too many for all pools, or for the one pool that they
    may go to."""
    limits = [pool.capacity for pool in problem.pools]
    total = None if None in limits else sum(c or 0 for c in limits)
    if subset := _without_pools(problem.buffers, total):
        return subset
    everywhere = tuple(pool.name for pool in problem.pools)
    for pool in problem.pools:
        bound_to = [b for b in problem.buffers if (b.pools or everywhere) == (pool.name,)]
        heap = pool.heap if len(bound_to) == 1 else None
        if subset := _without_pools(bound_to, pool.capacity) or _without_pools(bound_to, heap):
            return subset
        for b in bound_to:
            if pool.heap is not None and b.size > pool.heap:
                return InfeasibleSubset(b.lower, (b.id,), b.size)
    return None


def too_large(problem: Problem) -> tuple[Buffer, ...]:
    """The buffers that have no room even alone: neither in the arena nor in any pool that they may go to."""
    limits = {pool.name: min(_known(pool.capacity), _known(pool.heap)) for pool in problem.pools}
    every = tuple(limits)

    def room(b: Buffer) -> float:
        names = (b.pools or every) if b.pinned is None else (b.pools or every)[:1]
        return max((limits[name] for name in names), default=_known(problem.capacity))

    return tuple(b for b in problem.buffers if (b.pinned or 0) + b.size > room(b))


def _known(limit: int | None) -> float:
    return math.inf if limit is None else limit


def _without_pools(buffers: Sequence[Buffer], limit: int | None) -> InfeasibleSubset | None:
    if limit is None:
        return None
    anywhere = Problem(tuple(replace(b, pools=()) if b.pools else b for b in buffers))
    return infeasible_subset(anywhere, limit)


def _alive_member(problem: Problem, part: Buffer, time: int) -> str:
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
