"""What every placement planner promises, checked on all that are found by name."""

import dataclasses

import pytest
from hypothesis import given, settings

from support.placing import assert_right, optimum, packing, problems, solve, stepped
from tightship.errors import BadInput
from tightship.plan import Buffer, Problem
from tightship.planners import planner, planners

PLANNERS = planners("place")
WORK = 3_000


@pytest.mark.parametrize("name", PLANNERS)
class TestEveryPlanner:
    @given(problem=problems())
    def test_places_rightly(self, name: str, problem: Problem) -> None:
        assert_right(problem, solve(name, problem, work=200))

    @given(problem=problems(most=5))
    @settings(max_examples=40)
    def test_does_not_beat_the_optimum_and_the_bound_is_none_above_it(
        self, name: str, problem: Problem
    ) -> None:
        solution, best = solve(name, problem, work=200), optimum(problem)
        assert solution.lower_bound <= best <= solution.arena

    @pytest.mark.parametrize("seed", range(3))
    def test_places_larger_problems_rightly(self, name: str, seed: int) -> None:
        problem = stepped(300, seed)
        assert_right(problem, solve(name, problem))

    def test_same_seed_and_work_same_answer(self, name: str) -> None:
        problem = stepped(120, 7)
        first, second = solve(name, problem, seed=5), solve(name, problem, seed=5)
        assert (first.offsets, first.work) == (second.offsets, second.work)

    def test_runs_with_its_defaults(self, name: str) -> None:
        info = PLANNERS[name]
        problem = stepped(12, 1)  # so few that all searches end by themselves
        solution = info.plan(problem)
        assert_right(problem, solution)
        assert solution.planner == name
        assert solution == dataclasses.replace(info.plan(problem, info.options()), seconds=solution.seconds)

    def test_has_no_problem_with_nothing(self, name: str) -> None:
        assert solve(name, Problem(())).arena == 0

    def test_is_documented(self, name: str) -> None:
        doc = " ".join(PLANNERS[name].documentation.split())
        for part in ("Problem:", "Minimized:", "Source:", "Guarantee:", "Complexity:", "Known limits:"):
            assert part in doc
        assert dataclasses.is_dataclass(PLANNERS[name].options)
        assert PLANNERS[name].options.__dataclass_params__.frozen

    @pytest.mark.parametrize("case", ["A.1048576", "B.1048576", "C.1048576", "D.1048576", "F.1048576"])
    def test_places_published_problems_rightly(self, name: str, case: str) -> None:
        problem = packing(case)
        assert_right(problem, solve(name, problem))

    @pytest.mark.parametrize(
        ("buffer", "rule"),
        [
            (Buffer("x", 3, 3, 1), "live range"),
            (Buffer("x", 0, 1, -1), "negative size -1"),
            (Buffer("x", 0, 1, 1, alignment=0), "alignment 0 is below 1"),
            (Buffer("x", 0, 1, 1, pinned=-4), "negative offset -4"),
            (Buffer("x", 0, 1, 1, alignment=4, pinned=6), "no multiple of the alignment"),
            (Buffer("x", 0, 1, 5, pinned=8), "shares bytes"),
            (Buffer("x", 0, 1, 2**62), "below 2\\^62"),
            (Buffer("x", 0, 1, 2**70), "beyond 64 bits"),
        ],
    )
    def test_refuses_what_is_no_problem(self, name: str, buffer: Buffer, rule: str) -> None:
        good = Buffer("good", 0, 2, 4, pinned=10)
        with pytest.raises(BadInput, match=rule):
            solve(name, Problem((good, buffer)))


@given(problem=problems())
@settings(max_examples=60)
def test_the_portfolio_is_never_worse_than_any_other(problem: Problem) -> None:
    arenas = {name: solve(name, problem, work=200).arena for name in PLANNERS}
    assert arenas["portfolio"] == min(arenas.values())


@pytest.mark.parametrize("seed", range(4))
def test_the_portfolio_is_never_worse_than_any_other_on_larger_problems(seed: int) -> None:
    problem = stepped(150, seed)
    arenas = {name: solve(name, problem).arena for name in PLANNERS}
    assert arenas["portfolio"] == min(arenas.values())


def test_an_unknown_planner_is_named_with_those_there_are() -> None:
    with pytest.raises(BadInput, match="portfolio"):
        planner("best-possible", "place")


def test_planners_are_found_by_their_files() -> None:
    assert (
        PLANNERS["greedy-by-size"].summary == "Largest buffer first, each into the smallest hole that fits."
    )
    assert all(info.group == "place" and info.summary.endswith((".", ")")) for info in PLANNERS.values())
    assert not any(name.startswith("-") for name in PLANNERS)
    assert set(PLANNERS) <= {name.rpartition("/")[2] for name in planners()}
