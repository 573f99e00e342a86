"""The placement verifier finds what is wrong, and only that."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support import relating
from support.placing import overlapping, problems
from tightship.plan import Buffer, Gap, Pool, Problem, Solution
from tightship.planners import planner
from tightship.verify import placement as verify_placement
from tightship.verify.placement import PLACEMENT_RULES, check_solution, disjoint

A = Buffer("a", 0, 4, 10)
B = Buffer("b", 2, 6, 10, alignment=5)
C = Buffer("c", 4, 8, 10, pinned=0)
GOOD = Problem((A, B, C), capacity=20), Solution((0, 10, 0), 20, lower_bound=20)
G = Buffer("g", 0, 4, 4, group="both", pools=("fast",))
H = Buffer("h", 2, 6, 8, group="both")
J = Buffer("i", 8, 9, 8)
POOLS = Pool("fast", 20, 8), Pool("slow", 8)
IN_POOLS = (
    Problem((G, H, J), conflicts=(0, 4, 2), pools=POOLS),
    Solution((0, 0, 0), 16, homes=(("fast", 0), ("fast", 0), ("fast", 1))),
)

CODES = [rule.code for rule in PLACEMENT_RULES]


def codes(problem: Problem, solution: Solution) -> set[str]:
    return {v.code for v in check_solution(problem, solution)}


def test_nothing_is_wrong_with_what_is_right() -> None:
    assert check_solution(*GOOD) == []
    assert check_solution(*IN_POOLS) == []


BROKEN = {
    "missing": {"offsets": (0, 10)},
    "unknown": {"offsets": (0, 10, 0, 4)},
    "out-of-bounds": {"arena": 19, "lower_bound": 0},
    "misaligned": {"offsets": (0, 11, 0), "arena": 20, "lower_bound": 0},
    "moved-pin": {"offsets": (0, 10, 20), "arena": 30},
    "colocation-broken": {},
    "wrong-pool": {},
    "overlap": {"offsets": (5, 10, 0)},
    "over-capacity": {"arena": 21},
    "bound": {"lower_bound": 21},
}


def test_every_code_is_broken_here() -> None:
    assert tuple(BROKEN) == tuple(CODES)


BROKEN_IN_POOLS = (
    ("missing", {"homes": (("fast", 0), ("fast", 0))}),
    ("unknown", {"homes": (*IN_POOLS[1].homes, ("fast", 0))}),
    ("out-of-bounds", {"arena": 15}),
    ("colocation-broken", {"offsets": (4, 0, 0)}),
    ("colocation-broken", {"homes": (("fast", 0), ("slow", 0), ("fast", 1)), "arena": 20}),
    ("wrong-pool", {"homes": (("slow", 0), ("slow", 0), ("fast", 1))}),
    ("wrong-pool", {"homes": (("fast", 0), ("fast", 0), ("there", 0))}),
    ("wrong-pool", {"homes": (("fast", 0), ("fast", 0), ("slow", 1))}),
    ("overlap", {"homes": (("fast", 0), ("fast", 0), ("fast", 0))}),
    ("over-capacity", {"offsets": (0, 0, 1), "homes": (("fast", 0), ("fast", 0), ("slow", 0)), "arena": 17}),
    ("over-capacity", {"offsets": (4, 4, 0), "arena": 20}),
)


@pytest.mark.parametrize(("code", "broken"), BROKEN_IN_POOLS)
def test_a_broken_solution_in_pools_is_found(code: str, broken: dict[str, Any]) -> None:
    problem, solution = IN_POOLS
    assert codes(problem, replace(solution, **broken)) == {code}


def test_says_what_is_wrong_with_groups_and_conflicts() -> None:
    problem, solution = IN_POOLS
    (found,) = check_solution(problem, replace(solution, homes=(("fast", 0),) * 3))
    assert found.subjects == ("i", "h")
    assert "may be alive together in another order, share bytes [0, 8)" in found.message
    (found,) = check_solution(problem, replace(solution, offsets=(4, 0, 0)))
    assert found.message == (
        "buffer 'h' at [0, 8) of pool 'fast' and buffer 'g' at [4, 8) of pool 'fast' are of group 'both', "
        "which shares an offset"
    )


@pytest.mark.parametrize("code", [c for c in CODES if BROKEN[c]])
def test_a_broken_solution_is_found(code: str) -> None:
    problem, solution = GOOD
    assert code in codes(problem, replace(solution, **BROKEN[code]))


def test_bytes_before_the_arena_are_out_of_bounds() -> None:
    assert "out-of-bounds" in codes(GOOD[0], replace(GOOD[1], offsets=(-1, 10, 0)))


def test_says_who_when_and_which_bytes() -> None:
    (violation,) = check_solution(Problem((A, B)), Solution((5, 10), 20))
    assert (violation.code, violation.step, violation.subjects) == ("overlap", 2, ("b", "a"))
    assert violation.message == (
        "buffer 'b' at [10, 20) and buffer 'a' at [5, 15) share bytes [10, 15) during [2, 4)"
    )


@pytest.mark.parametrize("few", [-1, 32])
def test_a_conflict_said_of_one_of_two_holds_for_both(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_placement, "_FEW", few)
    count = 1100
    buffers = tuple(Buffer(str(k), k, k + 1, 4) for k in range(count))
    for i, j in ((0, 1099), (1099, 0), (1023, 1024), (1030, 5)):
        rows = tuple(1 << j if k == i else 0 for k in range(count))
        offsets = tuple(0 if k in (i, j) else 4 for k in range(count))
        (found,) = check_solution(Problem(buffers, conflicts=rows), Solution(offsets, 8))
        assert set(found.subjects) == {str(i), str(j)}


def test_touching_is_not_overlapping() -> None:
    problem = Problem((Buffer("a", 0, 2, 4), Buffer("b", 2, 4, 4), Buffer("c", 0, 4, 4)))
    assert check_solution(problem, Solution((0, 0, 4), 8)) == []


def test_an_empty_buffer_overlaps_nothing() -> None:
    problem = Problem((Buffer("a", 0, 2, 0), Buffer("b", 0, 4, 4)))
    assert check_solution(problem, Solution((2, 0), 4)) == []


@given(problems(), st.data())
def test_finds_an_overlap_exactly_when_there_is_one(problem: Problem, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, 40)) for _ in problem.buffers)
    solution = Solution(offsets, arena=100)
    found = {frozenset(v.subjects) for v in check_solution(problem, solution) if v.code == "overlap"}
    really = overlapping(problem, solution)
    assert found <= really
    assert bool(found) == bool(really)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 12), st.integers(0, 4)), max_size=9
    )
)
def test_disjoint_is_what_it_says(rows: list[tuple[int, int, int, int]]) -> None:
    boxes = [(t, t + life, x, x + size) for t, life, x, size in rows]
    pairs = combinations([b for b in boxes if b[0] < b[1] and b[2] < b[3]], 2)
    meet = any(max(a[0], b[0]) < min(a[1], b[1]) and max(a[2], b[2]) < min(a[3], b[3]) for a, b in pairs)
    columns = np.array(boxes, dtype=np.int64).reshape(-1, 4).T
    assert disjoint(*columns) != meet


def test_what_is_too_large_for_the_core_is_verified_too() -> None:
    problem = Problem((Buffer("a", 0, 2, 2**63), Buffer("b", 1, 3, 4)))
    assert codes(problem, Solution((0, 2**63 - 1), 2**64)) == {"overlap"}
    assert codes(problem, Solution((0, 2**63), 2**64)) == set()


@given(problems(plain=True), st.data())
def test_a_buffer_moved_onto_another_is_found(problem: Problem, data: st.DataObject) -> None:
    solution = planner("naive", "place").plan(problem)
    assert check_solution(problem, solution) == []
    pairs = [
        (i, j)
        for i, a in enumerate(problem.buffers)
        for j, b in enumerate(problem.buffers)
        if i != j and max(a.lower, b.lower) < min(a.upper, b.upper)
    ]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))
    moved = list(solution.offsets)
    moved[i] = moved[j]
    found = check_solution(problem, replace(solution, offsets=tuple(moved)))
    assert any(v.code == "overlap" and problem.buffers[i].id in v.subjects for v in found)


# --- gaps ---


@st.composite
def gapped(draw: st.DrawFn, most: int = 8) -> Problem:
    """Small problems whose buffers have gaps with and without windows."""
    buffers = []
    for b in draw(problems(most=most)).buffers:
        gaps = []
        for lower, upper in relating.spans(draw, b.lower, b.upper, 4):
            low = draw(st.integers(0, b.size))
            window = draw(st.sampled_from((None, (low, draw(st.integers(low, b.size))))))
            gaps.append(Gap(lower, upper, window))
        buffers.append(replace(b, pinned=None, gaps=tuple(gaps)))
    return Problem(tuple(buffers))


def really_overlapping(problem: Problem, offsets: tuple[int, ...]) -> set[frozenset[str]]:
    pairs = combinations(zip(problem.buffers, offsets, strict=True), 2)
    times = range(-4, 17)
    return {
        frozenset((a.id, b.id))
        for (a, x), (b, y) in pairs
        if any(relating.alive(a, x, t) & relating.alive(b, y, t) for t in times)
    }


@given(gapped(), st.data())
def test_knows_gaps_and_windows_as_they_are_defined(problem: Problem, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, 20)) for _ in problem.buffers)
    violations = check_solution(problem, Solution(offsets, arena=100))
    found = {frozenset(v.subjects) for v in violations if v.code == "overlap"}
    really = really_overlapping(problem, offsets)
    assert found <= really
    named = {v.subjects[0] for v in violations if v.code == "overlap"}
    assert all(pair & named for pair in really)  # nothing is left out but what was reported


@given(gapped(most=2), st.data())
def test_of_two_buffers_it_is_exact(problem: Problem, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, 9)) for _ in problem.buffers)
    found = [v for v in check_solution(problem, Solution(offsets, arena=100)) if v.code == "overlap"]
    assert {frozenset(v.subjects) for v in found} == really_overlapping(problem, offsets)
    for v in found:
        a, b = (
            next((c, x) for c, x in zip(problem.buffers, offsets, strict=True) if c.id == s)
            for s in v.subjects
        )
        shared = relating.alive(*a, v.step) & relating.alive(*b, v.step)
        assert f"share bytes [{min(shared)}, {max(shared) + 1})" in v.message


def test_a_gap_makes_room_for_another_and_a_window_takes_it_back() -> None:
    guest = Buffer("guest", 3, 5, 8)
    for window, wrong in ((None, False), ((0, 2), False), ((6, 8), True)):
        host = Buffer("host", 0, 10, 8, gaps=(Gap(3, 5, window),))
        found = check_solution(Problem((host, guest)), Solution((0, 2), 10))
        assert [v.subjects for v in found] == ([("guest", "host")] if wrong else [])


def test_overlapping_gaps_leave_what_their_windows_share() -> None:
    host = Buffer("host", 0, 10, 8, gaps=(Gap(2, 6, (0, 4)), Gap(4, 8, (2, 8))))
    for start, wrong in ((0, False), (1, True), (3, True), (4, False)):
        found = check_solution(Problem((host, Buffer("guest", 4, 6, 2))), Solution((0, start), 10))
        assert bool(found) == wrong, start


# --- groups, conflicts and pools ---


@given(relating.related() | relating.pooled(), st.data())
@settings(max_examples=300)
def test_knows_groups_conflicts_and_pools_as_they_are_defined(problem: Problem, data: st.DataObject) -> None:
    units: dict[object, tuple[int, tuple[str, int]]] = {}
    homes = [(p.name, h) for p in problem.pools for h in range(2 if p.heap else 1)] or [("", 0)]
    spots = []
    for k, b in enumerate(problem.buffers):
        drawn = data.draw(st.integers(0, 9)), data.draw(st.sampled_from(homes))
        spots.append(units.setdefault(b.group or k, drawn))
    solution = Solution(
        tuple(x for x, _ in spots), 10**6, homes=tuple(h for _, h in spots) if problem.pools else ()
    )
    violations = check_solution(problem, solution)
    found = {frozenset(v.subjects) for v in violations if v.code == "overlap"}
    really = relating.overlapping(problem, solution)
    group = {b.id: b.group or b.id for b in problem.buffers}
    together = {frozenset(group[name] for name in pair) for pair in really}
    assert {frozenset(group[name] for name in pair) for pair in found} <= together
    named = {group[v.subjects[0]] for v in violations if v.code == "overlap"}
    assert all(pair & named for pair in together)  # nothing is left out but what was reported
    allowed = all(not b.pools or h in b.pools for b, (_, (h, _)) in zip(problem.buffers, spots, strict=True))
    assert ("wrong-pool" in {v.code for v in violations}) != allowed
