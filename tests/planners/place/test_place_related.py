"""Groups, conflicts and pools: what every placement planner promises of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.placing import planted, solve
from support.relating import optimum, overlapping, pooled, related
from tightship.diagnose.infeasible_subset import infeasible_subset_of_pools
from tightship.errors import BadInput
from tightship.plan import Buffer, Gap, Pool, Problem
from tightship.planners import planners
from tightship.planners.packing import Search, pack
from tightship.verify.placement import check_solution

PLANNERS = planners("place")
QUICK = Search(work=300, seconds=60.0)


def by_pairs(problem: Problem) -> bool:
    return bool(problem.conflicts) or any(b.group for b in problem.buffers)


@pytest.mark.parametrize("name", PLANNERS)
class TestEveryPlanner:
    @given(problem=related())
    @settings(max_examples=40)
    def test_places_groups_and_conflicts_rightly(self, name: str, problem: Problem) -> None:
        solution = solve(name, problem, work=200) if by_pairs(problem) else pack(problem, name, QUICK)
        assert check_solution(problem, solution) == []
        assert overlapping(problem, solution) == set()
        tops = (x + b.size for b, x in zip(problem.buffers, solution.offsets, strict=True))
        assert solution.arena == max(tops, default=0) >= solution.lower_bound

    @given(problem=related(most=5, windows=False))
    @settings(max_examples=30)
    def test_does_not_beat_the_optimum_and_the_bound_is_none_above_it(
        self, name: str, problem: Problem
    ) -> None:
        solution, best = pack(problem, name, QUICK), optimum(problem)
        assert solution.lower_bound <= best <= solution.arena

    @given(problem=pooled())
    @settings(max_examples=40)
    def test_places_in_pools_rightly(self, name: str, problem: Problem) -> None:
        solution = pack(problem, name, QUICK)
        wrong = check_solution(problem, solution)
        biggest = max((b.size for b in problem.buffers), default=0)
        if problem.pools[-1].heap is None or biggest <= problem.pools[-1].heap:
            assert wrong == []  # there is room for all in the last pool
        assert all(v.code == "over-capacity" for v in wrong)
        assert overlapping(problem, solution) == set()

    def test_the_same_again(self, name: str) -> None:
        problem = crowd(60)
        first, second = (solve(name, problem, seed=3) for _ in range(2))
        assert check_solution(problem, first) == []
        assert (first.offsets, first.work) == (second.offsets, second.work)
        one, two = (pack(replace(problem, pools=(Pool("a", 900), Pool("b"))), name, QUICK) for _ in range(2))
        assert (one.offsets, one.homes) == (two.offsets, two.homes)


def crowd(count: int) -> Problem:
    """Buffers of many sizes, in groups of three every so often, with a few conflicts."""
    buffers = tuple(
        Buffer(
            f"b{k}",
            k * 7 % 90,
            k * 7 % 90 + 5 + k % 11,
            10 + k * 13 % 97,
            group="" if k % 4 else f"g{k // 12}",
        )
        for k in range(count)
    )
    rows = [0] * count
    for k in range(0, count - 9, 5):
        rows[k] |= 1 << (k + 9)
        rows[k + 9] |= 1 << k
    return Problem(buffers, conflicts=tuple(rows))


@given(related(most=5, windows=False))
@settings(max_examples=150)
def test_exact_search_agrees_with_brute_force(problem: Problem) -> None:
    if problem.buffers and not by_pairs(problem):
        problem = replace(problem, conflicts=(0,) * len(problem.buffers))
    solution = solve("exact", problem, work=100_000)
    assert solution.arena == optimum(problem)
    assert solution.optimal


@given(related())
@settings(max_examples=40)
def test_the_portfolio_is_never_worse_than_any_other(problem: Problem) -> None:
    arenas = {name: solve(name, problem, work=200).arena for name in PLANNERS if by_pairs(problem)}
    assert not arenas or arenas["portfolio"] == min(arenas.values())


def test_a_search_that_was_not_completed_proves_nothing() -> None:
    filled = planted(60, 2)
    problem = replace(filled, conflicts=(0,) * len(filled.buffers))
    solution = solve("exact", problem, work=50)
    assert check_solution(problem, solution) == []
    assert solution.lower_bound == 64 < solution.arena


def test_members_of_a_group_share_an_offset_and_leave_room_for_others() -> None:
    a, b = Buffer("a", 0, 4, 10, group="g"), Buffer("b", 8, 12, 6, group="g")
    c, d = Buffer("c", 4, 8, 10), Buffer("d", 8, 12, 4)
    for name in PLANNERS:
        solution = solve(name, Problem((a, b, c, d)))
        assert solution.offsets[0] == solution.offsets[1]
        assert name == "naive" or (solution.arena, solution.lower_bound) == (10, 10)


def test_a_conflict_keeps_two_apart_that_never_meet() -> None:
    buffers = Buffer("a", 0, 1, 4), Buffer("b", 1, 2, 4), Buffer("c", 2, 3, 4)
    assert pack(Problem(buffers)).arena == 4
    solution = pack(Problem(buffers, conflicts=(0b110, 0b001, 0b001)))
    assert (solution.arena, solution.lower_bound) == (8, 8)
    assert pack(Problem(buffers, conflicts=(0b110, 0b101, 0b011))).lower_bound == 12


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_conflicts_of_many_are_kept_apart_whatever_the_time(seconds: float) -> None:
    count = 1_500
    rows = tuple((1 << k + 1) % (1 << count) | (1 << k) >> 1 for k in range(count))
    buffers = tuple(Buffer(f"b{k}", k, k + 1, 4 + k % 5) for k in range(count))
    problem = Problem(buffers, conflicts=rows)
    solution = pack(problem, search=Search(work=300, seconds=seconds))
    assert check_solution(problem, solution) == []
    assert solution.lower_bound == 8 + 7


@pytest.mark.parametrize(
    ("one", "two", "rule"),
    [
        ({"pinned": 0}, {"pinned": 8}, "pinned to different offsets"),
        ({"pinned": 4}, {"alignment": 8}, "no multiple of 8"),
        ({"gaps": (Gap(1, 2, (0, 2)),)}, {}, "gap with a window"),
        ({"gaps": (Gap(5, 6),)}, {}, "not within the live range"),
    ],
)
def test_members_that_cannot_share_an_offset_are_refused(one: dict, two: dict, rule: str) -> None:
    a, b = Buffer("a", 0, 4, 8, group="g"), Buffer("b", 6, 9, 8, group="g")
    with pytest.raises(BadInput, match=rule):
        pack(Problem((replace(a, **one), replace(b, **two))))


def test_hints_are_followed_by_groups_too() -> None:
    a, b = Buffer("a", 0, 2, 4, hint=4, group="g"), Buffer("b", 2, 4, 2, group="g")
    c = Buffer("c", 0, 4, 4)
    assert pack(Problem((a, b, c))).offsets == (4, 4, 0)


# --- pools ---


def test_what_does_not_fit_spills_to_the_next_pool() -> None:
    buffers = tuple(Buffer(f"b{k}", 0, 1, 4) for k in range(5))
    pools = Pool("fast", 8), Pool("near", 4), Pool("far")
    solution = pack(Problem(buffers, pools=pools))
    assert sorted(home for home, _ in solution.homes) == ["far", "far", "fast", "fast", "near"]
    assert solution.arena == solution.lower_bound == 20
    assert solution.planner == "portfolio+spill"


def test_who_has_no_other_pool_goes_first_and_pins_before_all() -> None:
    big = Buffer("big", 0, 1, 8)
    small = Buffer("small", 0, 1, 2, pools=("fast",))
    pin = Buffer("pin", 0, 1, 4, pinned=4, pools=("fast",))
    solution = pack(Problem((big, small, pin), pools=(Pool("fast", 8), Pool("slow"))))
    assert [home for home, _ in solution.homes] == ["slow", "fast", "fast"]


def test_a_heap_is_no_larger_than_its_limit() -> None:
    buffers = tuple(Buffer(f"b{k}", 0, 1, 4) for k in range(5))
    solution = pack(Problem(buffers, pools=(Pool("gpu", None, 8),)))
    assert sorted(heap for _, heap in solution.homes) == [0, 0, 1, 1, 2]
    assert check_solution(Problem(buffers, pools=(Pool("gpu", 20, 8),)), solution) == []
    tight = pack(Problem(buffers, pools=(Pool("gpu", 12, 8), Pool("host"))))
    assert sorted(name for name, _ in tight.homes) == ["gpu"] * 3 + ["host"] * 2


def test_says_who_does_not_fit_into_the_pools() -> None:
    buffers = tuple(Buffer(f"b{k}", k, k + 3, 4, pools=("fast",)) for k in range(4))
    problem = Problem(buffers, pools=(Pool("fast", 8), Pool("slow")))
    solution = pack(problem)
    assert {v.code for v in check_solution(problem, solution)} == {"over-capacity"}
    found = infeasible_subset_of_pools(problem)
    assert found is not None and found.nbytes == 12 and len(found.ids) == 3


@pytest.mark.parametrize(
    ("problem", "rule"),
    [
        (Problem((Buffer("a", 0, 1, 4, pools=("x",)),), pools=(Pool("p"),)), "unknown pool .x.; there are p"),
        (Problem((), pools=(Pool("p"), Pool("p"))), "duplicate pool .p."),
        (Problem((), pools=(Pool("p", -1),)), "capacity -1"),
        (Problem((), 4, pools=(Pool("p"),)), "capacity 4 with pools"),
        (
            Problem(
                (
                    Buffer("a", 0, 1, 4, group="g", pools=("p",)),
                    Buffer("b", 1, 2, 4, group="g", pools=("q",)),
                ),
                pools=(Pool("p"), Pool("q")),
            ),
            "no pool in common",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(problem: Problem, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        pack(problem)


def test_a_planner_alone_knows_one_arena() -> None:
    with pytest.raises(BadInput, match="one arena"):
        solve("portfolio", Problem((), pools=(Pool("p"),)))


@given(st.integers(0, 40))
def test_a_larger_capacity_never_spills_what_a_smaller_one_held_alone(capacity: int) -> None:
    buffers = tuple(Buffer(f"b{k}", 0, 1, 3 + k) for k in range(4))
    solution = pack(Problem(buffers, pools=(Pool("fast", capacity), Pool("slow"))), search=QUICK)
    held = sum(b.size for b, (pool, _) in zip(buffers, solution.homes, strict=True) if pool == "fast")
    assert held <= capacity
    assert held == 18 or capacity < 18
