"""Pack a placement problem with any placement planner: pools, gaps, hints and a packing to beat are taken care of.

A planner places in one arena. Groups, conflicts and gaps every planner knows exactly. Planners that search are
followed by a first fit that takes the hints. What comes out has passed ``check_solution``.

Several pools and heaps are placements in one arena each, one after the other:

Problem: buffers that may lie in some pools, the first in their list being the best; pools of limited capacity; heaps
of limited size. Every buffer goes to its first pool; what does not fit spills to the next of its list, where it may
make others spill in turn. Who has no other pool left goes first, pinned buffers before all. A pool with a heap limit
fills one heap after the other. Source: ours, after what XLA's heap simulator and TVM's pools do. Guarantee: none but
that a buffer only moves down its list. Complexity: a placement for each pool that buffers spill into, each time.
Known limits: greedy in who spills.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tightship.errors import BadInput, VerificationFailed
from tightship.options import option
from tightship.plan import Pool, Problem, Solution
from tightship.planners import PlannerInfo, planner
from tightship.planners.place.orders import Interrupted, by_size, watched
from tightship.planners.place.problem import Ints, hinted, load, merge, related
from tightship.verify.placement import check_solution

__all__ = ["DEFAULT", "Interrupted", "Search", "check_pools", "pack", "spans", "spill", "watched"]

DEFAULT = "portfolio"


@dataclass(frozen=True, slots=True)
class Search:
    """When a search ends. The same seed and work give the same answer unless the time ended it. Planners that do not
    search need none of them."""

    seed: int = option(0, "where the search begins")
    work: int = option(200_000, "buffers that each search may place")
    seconds: float = option(10.0, "time in all")


def pack(
    problem: Problem,
    planner_name: str = DEFAULT,
    search: Search | None = None,
    *,
    baseline: Sequence[int] | None = None,
) -> Solution:
    """Offsets for a problem, checked. ``baseline``: offsets of a packing that the answer is not worse than.

    Raises ``Interrupted``, a ``KeyboardInterrupt``, with the best so far when Ctrl-C ends a search."""
    run, limits = _Run(planner(planner_name, "place")), search or Search()
    if baseline is not None and problem.pools:
        raise BadInput("cannot be used with pools: a baseline is a packing in one arena", place="baseline")
    if baseline is not None:
        _check_baseline(problem, baseline)
    if problem.pools:
        began = time.perf_counter()
        until = began + limits.seconds
        solution = spill(problem, lambda part: _one_arena(part, run, _within(limits, until)))
        solution = replace(solution, seconds=time.perf_counter() - began)
    else:
        solution = _one_arena(problem, run, limits)
    if baseline is not None and (arena := _arena(problem, baseline)) < solution.arena:
        solution = replace(solution, offsets=tuple(map(int, baseline)), arena=arena, planner="baseline")
    # Whether a capacity is met is the answer, not a fault of it.
    if wrong := [v for v in check_solution(problem, solution) if v.code != "over-capacity"]:
        raise VerificationFailed(wrong, f"planner {solution.planner!r}")
    if run.interrupted:
        raise Interrupted(solution)
    return solution


@dataclass(slots=True)
class _Run:
    """A planner, and whether Ctrl-C has ended its search: then what is left to do is done without searching."""

    info: PlannerInfo
    interrupted: bool = False

    @property
    def searches(self) -> bool:
        return not self.interrupted and "work_limit" in self._names

    @property
    def _names(self) -> set[str]:
        return {f.name for f in dataclasses.fields(self.info.options)}

    def plan(self, problem: Problem, search: Search, seconds: float) -> Solution:
        """The planner's answer; the search's limits are its options, as far as it has them."""
        if self.interrupted:
            seconds = 0.0
        given = {"seed": search.seed, "work_limit": search.work, "time_limit": seconds}
        options = self.info.options(**{name: value for name, value in given.items() if name in self._names})
        try:
            solution: Solution = self.info.plan(problem, options)
        except Interrupted as end:
            self.interrupted, solution = True, end.solution
        return solution


def _one_arena(problem: Problem, run: _Run, limits: Search) -> Solution:
    solution = run.plan(problem, limits, limits.seconds)
    if run.searches and any(b.hint is not None for b in problem.buffers):
        solution = _hinted(problem, solution, limits)
    return solution


def _within(limits: Search, until: float) -> Search:
    """Limits of one of several placements: a part of the time that is left."""
    return replace(limits, seconds=max(0.05, (until - time.perf_counter()) / 3))


def _hinted(problem: Problem, solution: Solution, search: Search) -> Solution:
    """The packing that follows the hints, where it is as small."""
    began = time.perf_counter()
    found = hinted(problem, solution.arena + 1, max(search.seconds - solution.seconds, 0.0))
    solution = replace(solution, seconds=solution.seconds + time.perf_counter() - began)
    if found is None:
        return solution
    offsets = tuple(found.tolist())
    return replace(solution, offsets=offsets, arena=_arena(problem, offsets), planner="hints")


def _check_baseline(problem: Problem, offsets: Sequence[int]) -> None:
    arena = _arena(problem, offsets)
    wrong = check_solution(replace(problem, capacity=None), Solution(tuple(map(int, offsets)), arena))
    if wrong:
        raise BadInput(f"wrong packing: {wrong[0].message}", place="baseline")


def _arena(problem: Problem, offsets: Sequence[int]) -> int:
    return max((x + b.size for b, x in zip(problem.buffers, offsets, strict=False)), default=0)


# --- pools ---


Place = Callable[[Problem], Solution]
Spot = tuple[int, int]
"""A heap by number and an offset in it."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Buffers that lie at one offset, by index, and the pools they may lie in."""

    members: tuple[int, ...]
    pools: tuple[str, ...]
    pinned: bool


def check_pools(problem: Problem) -> None:
    """Raise ``BadInput`` for pools that break a rule."""
    known: set[str] = set()
    for pool in problem.pools:
        if pool.name in known:
            raise BadInput(f"duplicate pool {pool.name!r}", place="Problem.pools")
        known.add(pool.name)
        if (pool.capacity is not None and pool.capacity < 0) or (pool.heap is not None and pool.heap < 1):
            rule = f"capacity {pool.capacity}, heap {pool.heap}: at least 0 and 1 bytes are needed"
            raise BadInput(rule, place=f"pool {pool.name!r}")
    if problem.capacity is not None:
        rule = f"capacity {problem.capacity} with pools: give each pool its own"
        raise BadInput(rule, place="Problem.capacity")
    for b in problem.buffers:
        for name in b.pools:
            if name not in known:
                rule = f"unknown pool {name!r}; there are {', '.join(sorted(known))}"
                raise BadInput(rule, place=f"buffer {b.id!r}")


def spill(problem: Problem, place: Place) -> Solution:
    """Offsets and homes. What fits nowhere lies beyond the capacity of the last pool it may go to."""
    check_pools(problem)
    units = _units(problem)
    pools = {pool.name: pool for pool in problem.pools}
    choice = [0] * len(units)
    spots: dict[str, dict[int, Spot]] = {name: {} for name in pools}
    planner, work, seconds = "", 0, 0.0

    def placed(part: Problem) -> Solution:
        nonlocal planner, work, seconds
        made = place(part)
        planner, work, seconds = made.planner, work + made.work, seconds + made.seconds
        return made

    waiting = [name for name in pools if any(u.pools[0] == name for u in units)]
    while waiting:
        name = waiting.pop(0)
        here = [k for k, u in enumerate(units) if u.pools[choice[k]] == name]
        last = {k for k in here if choice[k] + 1 == len(units[k].pools)}
        spots[name] = _fill_pool(problem, pools[name], units, here, last, placed)
        for k in here:
            if k not in spots[name] and k not in last:
                choice[k] += 1
                if (after := units[k].pools[choice[k]]) not in waiting:
                    waiting.append(after)
    offsets, homes = [0] * len(problem.buffers), [("", 0)] * len(problem.buffers)
    for k, u in enumerate(units):
        name = u.pools[choice[k]]
        if k not in spots[name]:
            spots[name][k] = _beyond(problem, units, spots[name], k)
        for i in u.members:
            homes[i], offsets[i] = (name, spots[name][k][0]), spots[name][k][1]
    if any(choice):
        planner = f"{planner}+spill"
    arena = sum(spans(problem, offsets, homes).values())
    return Solution(tuple(offsets), arena, load(problem), planner, seconds, work, tuple(homes))


def spans(
    problem: Problem, offsets: Sequence[int], homes: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """By pool and heap, the bytes that what lies in it spans."""
    tops: dict[tuple[str, int], int] = {}
    for b, x, home in zip(problem.buffers, offsets, homes, strict=True):
        tops[home] = max(tops.get(home, 0), x + b.size)
    return tops


def _units(problem: Problem) -> list[_Unit]:
    merged, became = merge(problem)
    members: list[list[int]] = [[] for _ in merged.buffers]
    for i, k in enumerate(became):
        members[k].append(i)
    every = tuple(pool.name for pool in problem.pools)
    rows = []
    for b, mine in zip(merged.buffers, members, strict=True):
        pools = tuple(dict.fromkeys(b.pools)) or every
        rows.append(_Unit(tuple(mine), pools if b.pinned is None else pools[:1], b.pinned is not None))
    return rows


def _fill_pool(
    problem: Problem, pool: Pool, units: Sequence[_Unit], here: Sequence[int], last: set[int], place: Place
) -> dict[int, Spot]:
    """Where those lie that fit, heap by heap."""
    spots: dict[int, Spot] = {}
    left, room, heap = list(here), pool.capacity, 0
    while left:
        limit = min((n for n in (room, pool.heap) if n is not None), default=None)
        found = _fill_heap(problem, units, left, last, limit, place)
        if not found:
            break
        spots |= {k: (heap, x) for k, x in found.items()}
        left = [k for k in left if k not in found and not units[k].pinned]  # pins are of the first heap
        if pool.heap is None:
            break
        top = max(x + _size(problem, units[k]) for k, x in found.items())
        room = None if room is None else room - top
        heap += 1
    return spots


def _fill_heap(
    problem: Problem,
    units: Sequence[_Unit],
    left: Sequence[int],
    last: set[int],
    limit: int | None,
    place: Place,
) -> dict[int, int]:
    """Offsets of those that end within the limit: of the planner's packing of all, if those who cannot go
    elsewhere are among them, else of them alone; and then of whom there is room for beside."""

    def solve(chosen: Sequence[int]) -> dict[int, int]:
        made = place(_part(problem, units, chosen, {}))
        offsets = iter(made.offsets)
        rows = {k: min(next(offsets) for _ in units[k].members) for k in chosen}  # one offset for all
        return {k: x for k, x in rows.items() if limit is None or x + _size(problem, units[k]) <= limit}

    found = solve(left)
    if len(found) == len(left) or limit is None:
        return found
    if any(k in last and k not in found for k in left):
        found = solve([k for k in left if k in last])
    part = _part(problem, units, left, found)
    f = related(part)
    # Who has no other pool first, largest first among them.
    order = by_size(f.arrays)
    urgent = np.array([k in last for k in left])
    order = np.concatenate([order[urgent[order]], order[~urgent[order]]])
    offsets: Ints = f.placer.fill(order, best_fit=True, capacity=limit)
    return {
        k: int(x)
        for k, x in zip(left, offsets, strict=True)
        if x >= 0 and x + _size(problem, units[k]) <= limit
    }


def _part(problem: Problem, units: Sequence[_Unit], chosen: Sequence[int], at: dict[int, int]) -> Problem:
    """The problem of some units alone, pinned where they already lie."""
    keep = [(i, at.get(k)) for k in chosen for i in units[k].members]
    buffers = []
    for i, x in keep:
        b = problem.buffers[i]
        pinned = b.pinned if x is None else x
        buffers.append(b if not b.pools and pinned == b.pinned else replace(b, pools=(), pinned=pinned))
    return Problem(tuple(buffers), conflicts=_rows(problem.conflicts, [i for i, _ in keep]))


def _rows(conflicts: Sequence[int], keep: Sequence[int]) -> tuple[int, ...]:
    if not conflicts:
        return ()
    count = len(conflicts)
    width = -(-count // 8)
    packed = np.frombuffer(b"".join(conflicts[i].to_bytes(width, "little") for i in keep), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(keep), width), axis=1, bitorder="little")[:, list(keep)]
    return tuple(
        int.from_bytes(row.tobytes(), "little") for row in np.packbits(bits, axis=1, bitorder="little")
    )


def _beyond(problem: Problem, units: Sequence[_Unit], spots: dict[int, Spot], k: int) -> Spot:
    """A place above everything in the last heap."""
    heap = max((h for h, _ in spots.values()), default=0)
    pins = [b.pinned for i in units[k].members if (b := problem.buffers[i]).pinned is not None]
    if pins:
        return 0, pins[0]
    top = max((x + _size(problem, units[j]) for j, (h, x) in spots.items() if h == heap), default=0)
    unit = int(np.lcm.reduce([problem.buffers[i].alignment for i in units[k].members]))
    return heap, -(-top // unit) * unit


def _size(problem: Problem, unit: _Unit) -> int:
    return max(problem.buffers[i].size for i in unit.members)
