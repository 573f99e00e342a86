"""Tree search with explained failures and restarts, from the best greedy packing on.

Problem: offsets for buffers with known live ranges. Minimised: the arena; with a capacity, any arena within it is
enough. Source: the canonical placements, inference and dominance of MiniMalloc (Moffitt, "MiniMalloc: A
Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023); conflict-directed
backjumping (Prosser 1993) over what cannot fit, and restarts with other preferences (Gomes et al. 1998), are
added. Guarantee: optimal, and so proved, if given the time; never worse than any greedy planner here. What was
refuted raises the lower bound, and ``clash`` names the buffers that cannot fit. Complexity: exponential; in
practice within some thousand placements on networks, each linear in the buffers alive at the same time. Known
limits: problems of more than ``MOST_PAIRS`` pairs of buffers alive together are packed greedily only; proofs
other than by the peak load are rare beyond a hundred buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tightship.plan import Buffer, Problem, Solution
from tightship.planners.place._frame import Frame, Ints, frame
from tightship.planners.place._greedy import best_greedy
from tightship.planners.place._groups import merge
from tightship.planners.place._orders import conflicts
from tightship.planners.place._parts import cut

__all__ = ["MOST_PAIRS", "Clash", "Options", "clash", "plan", "search", "with_bound"]

MOST_PAIRS = 8_000_000
"""Of buffers alive together, counted both ways: 32 MB, and about 4,000 buffers of a network."""


@dataclass(frozen=True, slots=True)
class Options:
    """``work_limit``: of the trees, about a microsecond each; ``time_limit``: seconds over all, None for none.
    ``capacity``: an arena that is small enough (None: the problem's; if it has none, as small as possible).

    The same seed and work limit give the same answer on any number of ``threads``, unless the time limit ended
    it; more work never gives a worse one."""

    seed: int = 0
    work_limit: int = 4_000_000
    time_limit: float | None = 10.0
    threads: int = 2
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Clash:
    """Buffers, by id, that have no placement within ``capacity`` together; most of them alive at ``time``."""

    capacity: int
    time: int
    ids: tuple[str, ...]


def plan(problem: Problem, options: Options | None = None) -> Solution:
    o = _with_capacity(options or Options(), problem)
    f = frame(problem)
    start, _ = best_greedy(f, max(f.bound, o.capacity or 0), o.time_limit)
    better, bound, _ = search(f, o, start)
    return with_bound(f, problem, bound).solution(better, "exact")


def with_bound(f: Frame, problem: Problem, bound: int) -> Frame:
    """With gaps, what was proved is proved of whole live ranges only, and so is no bound of the problem's."""
    loose = not f.related and any(b.gaps for b in problem.buffers)
    return f if loose else replace(f, bound=bound)


def search(f: Frame, o: Options, start: Ints) -> tuple[Ints, int, Ints]:
    """Offsets no worse than ``start``, a lower bound, and the indices of buffers that prove it (none: it is the
    bound that was known before)."""
    goal, nothing = max(f.bound, o.capacity or 0), np.empty(0, dtype=np.int64)
    if f.arena(start) <= goal or not _searchable(f):
        return start, f.bound, nothing
    left = max(f.seconds_left(o.time_limit), 0.0)
    wanted = o.capacity is not None and goal == o.capacity
    offsets, bound, proof = f.placer.exact(
        start,
        seed=o.seed,
        work=o.work_limit,
        seconds=left,
        goal=goal,
        wanted=wanted,
        threads=o.threads,
    )
    return (offsets, int(bound), proof) if bound > f.bound else (offsets, f.bound, nothing)


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
    start, _ = best_greedy(f, max(f.bound, o.capacity or 0), o.time_limit)
    _, bound, proof = search(f, o, start)
    if o.capacity is None or bound <= o.capacity:
        return None
    return tuple(b for i, b in enumerate(buffers) if i in set(proof.tolist()) or b.pinned is not None)


def _searchable(f: Frame) -> bool:
    return f.related or int(conflicts(f.arrays).sum()) <= MOST_PAIRS


def _with_capacity(o: Options, problem: Problem) -> Options:
    return o if o.capacity is not None else replace(o, capacity=problem.capacity)
