"""Placement problems with groups, conflicts and pools for tests, and what is right of them by definition."""

import itertools
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from tightship.plan import Buffer, Gap, Pool, Problem, Solution

TIMES = range(-3, 20)


def spans(draw: st.DrawFn, lower: int, upper: int, most: int) -> list[tuple[int, int]]:
    """Up to ``most - 1`` spans of time between two times, one after the other, some of which touch."""
    cuts = sorted(draw(st.sets(st.integers(lower, upper), max_size=most)))
    return list(pairwise(cuts))[:: draw(st.integers(1, 2))]


@st.composite
def related(draw: st.DrawFn, most: int = 7, windows: bool = True) -> Problem:
    """Small problems with groups, gaps, conflicts, alignments and pins that can be met."""
    buffers: list[Buffer] = []
    groups = draw(st.sampled_from(((), ("g",), ("g", "h"))))
    for k in range(draw(st.integers(0, most))):
        lower = draw(st.integers(-3, 8))
        upper = lower + draw(st.integers(1, 6))
        size, alignment = draw(st.integers(0, 9)), draw(st.sampled_from((1, 1, 2, 4)))
        group = draw(st.sampled_from(("", *groups)))
        gaps = []
        for since, until in spans(draw, lower, upper, 3):
            low = draw(st.integers(0, max(size - 1, 0)))
            window = (low, size) if windows and size and not group and draw(st.booleans()) else None
            gaps.append(Gap(since, until, window))
        buffers.append(Buffer(f"b{k}", lower, upper, size, alignment, None, tuple(gaps), None, group))
    rows = [0] * len(buffers)
    if draw(st.booleans()):
        for i, j in itertools.combinations(range(len(buffers)), 2):
            if draw(st.integers(0, 3)) == 0:
                rows[i] |= 1 << j
                rows[j] |= 1 << i
    problem = Problem(tuple(buffers), conflicts=tuple(rows) if any(rows) else ())
    for k in range(len(buffers)):
        if not buffers[k].group and draw(st.integers(0, 5)) == 0:
            b = replace(buffers[k], pinned=4 * draw(st.integers(0, 4)))
            others = [(j, c, c.pinned) for j, c in enumerate(buffers) if c.pinned is not None]
            if not any(shares(problem, (k, b, b.pinned), other) for other in others):
                buffers[k] = b
                problem = replace(problem, buffers=tuple(buffers))
    return problem


@st.composite
def pooled(draw: st.DrawFn, most: int = 7) -> Problem:
    """Problems with two or three pools; the last has room for everything."""
    problem = draw(related(most=most))
    count = draw(st.integers(2, 3))
    pools = [
        Pool(f"p{k}", draw(st.integers(0, 20)), draw(st.sampled_from((None, None, 7, 12))))
        for k in range(count - 1)
    ]
    pools.append(Pool("last", None, draw(st.sampled_from((None, None, 9)))))
    buffers = []
    for b in problem.buffers:
        lists = [(), ("last",), ("p0", "last"), tuple(p.name for p in pools)]
        choice = ("last",) if b.pinned is not None else () if b.group else draw(st.sampled_from(lists))
        size = min(b.size, 9 - (b.pinned or 0)) if b.pinned is not None and pools[-1].heap else b.size
        buffers.append(replace(b, pools=choice) if size == b.size else replace(b, pinned=None, pools=choice))
    return replace(problem, buffers=tuple(buffers), pools=tuple(pools))


def alive(b: Buffer, offset: int, t: int) -> set[int]:
    """Every byte that a buffer has alive at a time."""
    if not b.lower <= t < b.upper:
        return set()
    now = set(range(b.size))
    for gap in b.gaps:
        if gap.lower <= t < gap.upper:
            now &= set(range(*gap.window)) if gap.window else set()
    return {offset + byte for byte in now}


def shares(problem: Problem, one: tuple[int, Buffer, int], two: tuple[int, Buffer, int]) -> bool:
    """The definition of an overlap, of two buffers of one heap."""
    (i, a, x), (j, b, y) = one, two
    if a.group and a.group == b.group:
        return False
    if problem.conflicts and problem.conflicts[i] >> j & 1:
        return bool(set(range(x, x + a.size)) & set(range(y, y + b.size)))
    return any(alive(a, x, t) & alive(b, y, t) for t in TIMES)


def overlapping(problem: Problem, solution: Solution) -> set[frozenset[str]]:
    homes = solution.homes or [("", 0)] * len(problem.buffers)
    rows = zip(range(len(problem.buffers)), problem.buffers, solution.offsets, homes, strict=True)
    pairs = itertools.combinations(rows, 2)
    return {frozenset((p[1].id, q[1].id)) for p, q in pairs if p[3] == q[3] and shares(problem, p[:3], q[:3])}


def optimum(problem: Problem) -> int:
    """The least arena, by first fit in every order (some order is optimal where gaps have no windows)."""
    units: dict[object, list[int]] = {}
    for k, b in enumerate(problem.buffers):
        units.setdefault(b.group or k, []).append(k)
    pinned = [u for u in units.values() if problem.buffers[u[0]].pinned is not None]
    free = [u for u in units.values() if problem.buffers[u[0]].pinned is None]
    start = {k: problem.buffers[k].pinned or 0 for u in pinned for k in u}
    least = None
    for order in itertools.permutations(free):
        placed = dict(start)
        for unit in order:
            offset = 0
            while not _fits(problem, unit, offset, placed):
                offset += 1
            placed |= dict.fromkeys(unit, offset)
        arena = max((x + problem.buffers[k].size for k, x in placed.items()), default=0)
        least = arena if least is None else min(least, arena)
    return least or 0


def _fits(problem: Problem, unit: list[int], offset: int, placed: dict[int, int]) -> bool:
    b = problem.buffers
    if any(offset % b[k].alignment for k in unit):
        return False
    return not any(shares(problem, (k, b[k], offset), (j, b[j], x)) for k in unit for j, x in placed.items())
