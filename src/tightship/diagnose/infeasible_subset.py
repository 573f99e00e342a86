"""Why a capacity cannot be met: a few buffers that have no placement within it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightship.plan import Buffer, Problem
from tightship.planners.place import exact
from tightship.planners.place.greedy import best_greedy
from tightship.planners.place.orders import Best
from tightship.planners.place.problem import cut, frame, merge

__all__ = ["InfeasibleSubset", "infeasible_subset", "infeasible_subset_of_pools"]


@dataclass(frozen=True, slots=True)
class InfeasibleSubset:
    """Buffers, by id, that need ``nbytes`` together, more than there are; most of them are alive at ``time``."""

    time: int
    ids: tuple[str, ...]
    nbytes: int


def infeasible_subset(
    problem: Problem, capacity: int, search: exact.Options | None = None
) -> InfeasibleSubset | None:
    """Buffers that prove that ``capacity`` cannot be met; None: nothing is proved.

    They are alive at the peak, largest first, and without any one of them the rest is within the capacity. With
    ``search``, where the peak proves nothing, exact search refutes subsets within these limits."""
    found = _at_peak(problem, capacity)
    return found if found or search is None else _by_search(problem, replace(search, capacity=capacity))


def infeasible_subset_of_pools(problem: Problem) -> InfeasibleSubset | None:
    """Buffers that prove that the capacities cannot be met: too many for all pools, or for the one pool that they
    may go to."""
    limits = [pool.capacity for pool in problem.pools]
    if None not in limits and (
        found := infeasible_subset(_without_pools(problem.buffers), sum(c or 0 for c in limits))
    ):
        return found
    for pool in problem.pools:
        bound_to = [
            b for b in problem.buffers if (b.pools or tuple(p.name for p in problem.pools)) == (pool.name,)
        ]
        for limit in (pool.capacity, None if len(bound_to) != 1 else pool.heap):
            if (
                limit is not None
                and bound_to
                and (found := infeasible_subset(_without_pools(bound_to), limit))
            ):
                return found
        for b in bound_to:
            if pool.heap is not None and b.size > pool.heap:
                return InfeasibleSubset(b.lower, (b.id,), b.size)
    return None


def _without_pools(buffers: Sequence[Buffer]) -> Problem:
    return Problem(tuple(replace(b, pools=()) if b.pools else b for b in buffers))


def _at_peak(problem: Problem, capacity: int) -> InfeasibleSubset | None:
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


def _by_search(problem: Problem, o: exact.Options) -> InfeasibleSubset | None:
    """The set found is made smaller, one buffer at a time, with what is left of the limits."""
    began = frame(problem)
    found = _refuted(cut(merge(problem)[0]).buffers, o)  # gaps only make it easier
    if found is None:
        return None
    for b in sorted(found[0], key=lambda b: (b.size * (b.upper - b.lower), b.id)):
        left = began.seconds_left(o.time_limit)
        if left <= 0:
            break
        if b in found[0]:
            limits = replace(o, work_limit=max(o.work_limit // 100, 1), time_limit=min(left, 1.0))
            found = _refuted(tuple(m for m in found[0] if m is not b), limits) or found
    members, nbytes = found
    times = sorted({b.lower for b in members})
    load = [sum(b.size for b in members if b.lower <= t < b.upper) for t in times]
    return InfeasibleSubset(times[load.index(max(load))], tuple(dict.fromkeys(b.id for b in members)), nbytes)


def _refuted(buffers: tuple[Buffer, ...], o: exact.Options) -> tuple[tuple[Buffer, ...], int] | None:
    """Those that are proved not to fit, all alive at one time if that is why, and the bytes proved."""
    f, capacity = frame(Problem(buffers)), o.capacity or 0
    if f.bound > capacity:
        return buffers, f.bound
    best = Best(f)
    best_greedy(best, max(f.bound, capacity), o.time_limit)
    proof = set(exact.search(best, o).tolist())
    if best.bound <= capacity:
        return None
    return tuple(b for i, b in enumerate(buffers) if i in proof or b.pinned is not None), best.bound
