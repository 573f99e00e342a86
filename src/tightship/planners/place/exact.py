"""Tree search with explained failures and restarts, from the best greedy packing on.

Problem: offsets for buffers with known live ranges. Minimised: the arena; with a capacity, any arena within it is
enough. Source: the canonical placements, inference and dominance of MiniMalloc (Moffitt, "MiniMalloc: A
Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023); conflict-directed
backjumping (Prosser 1993) over what cannot fit, and restarts with other preferences (Gomes et al. 1998), are
added. Guarantee: optimal, and so proved, if given the time; never worse than any greedy planner here. What was
refuted raises the lower bound, and ``clash`` names the buffers that cannot fit. Complexity: exponential; in
practice within some thousand placements on networks, each linear in the buffers alive at the same time. Known
limits: problems of more than ``MOST_BUFFERS``, or ``MOST_PAIRS`` pairs of them alive together, are packed greedily
only; proofs other than by the peak load are rare beyond a hundred buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tightship.options import option
from tightship.plan import Buffer, Problem, Solution
from tightship.planners.place.best_of import Best, SearchOptions
from tightship.planners.place.greedy import best_greedy
from tightship.planners.place.orders import conflicts
from tightship.planners.place.problem import Frame, Ints, cut, frame, merge

__all__ = ["MOST_PAIRS", "Clash", "Options", "clash", "plan", "search"]

MOST_BUFFERS = 20_000
MOST_PAIRS = 8_000_000
"""Of buffers alive together, counted both ways: 32 MB."""


@dataclass(frozen=True, slots=True)
class Options(SearchOptions):
    """More work never gives a worse answer."""

    work_limit: int = option(4_000_000, "work of the search trees, about a microsecond each")


@dataclass(frozen=True, slots=True)
class Clash:
    """Buffers, by id, that have no placement within ``capacity`` together; most of them alive at ``time``."""

    capacity: int
    time: int
    ids: tuple[str, ...]


def plan(problem: Problem, options: Options | None = None) -> Solution:
    o, best = _with_capacity(options or Options(), problem), Best(frame(problem))

    def go() -> None:
        best_greedy(best, max(best.bound, o.capacity or 0), o.time_limit)
        search(best, o)

    return best.search(problem, "exact", go)


def search(best: Best, o: Options) -> Ints:
    """Improves the best and the lower bound; returns the indices of buffers that prove the bound (none: it is the
    one that was known before)."""
    f, goal, nothing = best.frame, max(best.bound, o.capacity or 0), np.empty(0, dtype=np.int64)
    if best.arena <= goal or not _searchable(f):
        return nothing
    offsets, bound, proof = f.placer.exact(
        best.offsets,
        seed=o.seed,
        work=o.work_limit,
        seconds=max(f.seconds_left(o.time_limit), 0.0),
        goal=goal,
        wanted=o.capacity is not None and goal == o.capacity,
        threads=o.threads,
    )
    best.offer(offsets, f.arena(offsets))
    proved = bound > best.bound
    best.bound = max(best.bound, int(bound))
    best.go_on()
    return np.asarray(proof) if proved else nothing


def clash(problem: Problem, capacity: int, options: Options | None = None) -> Clash | None:
    """Why a capacity that the peak load is within cannot be met. None: not proved within the limits.

    The set found is made smaller, one buffer at a time, with what is left of the limits."""
    o = replace(options or Options(), capacity=capacity)
    began = frame(problem)
    members = _refuted(cut(merge(problem)[0]).buffers, o)  # gaps only make it easier
    if members is None:
        return None
    for b in sorted(members, key=lambda b: (b.size * (b.upper - b.lower), b.id)):
        left = began.seconds_left(o.time_limit)
        if left <= 0:
            break
        if b in members:
            limits = replace(o, work_limit=max(o.work_limit // 100, 1), time_limit=min(left, 1.0))
            fewer = _refuted(tuple(m for m in members if m is not b), limits)
            members = members if fewer is None else fewer
    times = sorted({b.lower for b in members})
    load = [sum(b.size for b in members if b.lower <= t < b.upper) for t in times]
    return Clash(capacity, times[load.index(max(load))], tuple(dict.fromkeys(b.id for b in members)))


def _refuted(buffers: tuple[Buffer, ...], o: Options) -> tuple[Buffer, ...] | None:
    """Those that are proved not to fit, all alive at one time if that is why."""
    f = frame(Problem(buffers))
    if o.capacity is not None and f.bound > o.capacity:
        return buffers
    best = Best(f)
    best_greedy(best, max(f.bound, o.capacity or 0), o.time_limit)
    proof = search(best, o)
    if o.capacity is None or best.bound <= o.capacity:
        return None
    return tuple(b for i, b in enumerate(buffers) if i in set(proof.tolist()) or b.pinned is not None)


def _searchable(f: Frame) -> bool:
    few = f.arrays.count <= MOST_BUFFERS  # asked first: counting takes its time, too
    return f.related or (few and int(conflicts(f.arrays).sum()) <= MOST_PAIRS)


def _with_capacity(o: Options, problem: Problem) -> Options:
    return o if o.capacity is not None else replace(o, capacity=problem.capacity)
