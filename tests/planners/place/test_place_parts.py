"""Placement in parts: what it packs is what pairs of buffers tell, and it takes many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.relating import overlapping, pooled, related
from tightship import _core
from tightship.plan import Buffer, Gap, Problem
from tightship.planners import planners
from tightship.planners.packing import Search, pack
from tightship.planners.place import related as parts_by_pairs
from tightship.planners.place.problem import merge
from tightship.planners.place.related import parts_of, placer_of
from tightship.verify.placement import check_solution

QUICK = Search(work=300, seconds=60.0)


def placers(problem: Problem) -> tuple[parts_by_pairs.LoosePlacer, parts_by_pairs.LoosePlacer]:
    """Of one problem: by pairs, and in parts."""
    merged, became = merge(problem)
    rows = [(b.size, b.alignment, -1 if b.pinned is None else b.pinned) for b in merged.buffers]
    size, alignment, pinned = (
        np.ascontiguousarray(c) for c in np.array(rows, dtype=np.int64).reshape(-1, 3).T
    )
    lower, upper = (
        np.array(c, dtype=np.int64)
        for c in ([b.lower for b in merged.buffers], [b.upper for b in merged.buffers])
    )
    parts = parts_of(merged, lower, upper, size)
    by_pairs = placer_of(problem, became, (size, alignment, pinned), parts)
    most, parts_by_pairs.MOST_PARTS = parts_by_pairs.MOST_PARTS, -1
    try:
        in_parts = placer_of(problem, became, (size, alignment, pinned), parts)
    finally:
        parts_by_pairs.MOST_PARTS = most
    assert isinstance(by_pairs.core, _core.RelatedPlacer) and isinstance(in_parts.core, _core.PartPlacer)
    return by_pairs, in_parts


@given(related(), st.data())
@settings(max_examples=200)
def test_parts_are_packed_as_pairs_are(problem: Problem, data: st.DataObject) -> None:
    count = len(merge(problem)[0].buffers)
    order = np.array(data.draw(st.permutations(range(count))), dtype=np.int64)
    hint = np.array([data.draw(st.integers(-1, 20)) for _ in range(count)], dtype=np.int64)
    one, two = placers(problem)
    assert one.clash == two.clash == -1
    for best_fit in (False, True):
        (x, arena), (y, other) = (p.pack(order, best_fit=best_fit) for p in (one, two))
        assert (x.tolist(), arena) == (y.tolist(), other)
        assert one.fill(order, best_fit, 20).tolist() == two.fill(order, best_fit, 20).tolist()
    (x, arena), (y, other) = (p.hinted(order, hint, 10**6) for p in (one, two))
    assert (x.tolist(), arena) == (y.tolist(), other)
    (x, _), (y, _) = (p.climb(order, False, 1, 60, 9.0, 0) for p in (one, two))
    assert x.tolist() == y.tolist()


@pytest.mark.parametrize("name", planners("place"))
@given(problem=related() | pooled())
@settings(max_examples=40)
def test_every_planner_places_in_parts_rightly(name: str, problem: Problem) -> None:
    most, parts_by_pairs.MOST_PARTS = parts_by_pairs.MOST_PARTS, -1
    try:
        solution = pack(problem, name, QUICK)
    finally:
        parts_by_pairs.MOST_PARTS = most
    assert all(v.code == "over-capacity" for v in check_solution(problem, solution))
    assert overlapping(problem, solution) == set()


def test_of_very_many_buffers_too_some_lie_in_the_gaps_of_others() -> None:
    """Ten thousand that sleep while ten thousand others live: by pairs these would be too many."""
    count = 10_000
    hosts = [Buffer(f"h{k}", k, k + 30, 64, gaps=(Gap(k + 5, k + 25),)) for k in range(count)]
    guests = [Buffer(f"g{k}", k + 8, k + 20, 64) for k in range(count)]
    problem = Problem((*hosts, *guests))
    solution = pack(problem, search=Search(work=1_000, seconds=60.0))
    assert check_solution(problem, solution) == []
    assert solution.lower_bound == 64 * (10 + 12)
    assert solution.arena < 64 * 30  # all hosts alive at one time
