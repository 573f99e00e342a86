"""Packing with any planner: gaps, hints and baselines."""

import _thread
import random
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import relating
from support.placing import optimum, planted, problems
from tightship.errors import BadInput
from tightship.plan import Buffer, Gap, Problem, Solution
from tightship.planners import planners
from tightship.planners.packing import Interrupted, Search, pack, watched
from tightship.planners.place import portfolio
from tightship.verify.placement import check_solution

QUICK = Search(work=400, seconds=60.0)


@st.composite
def gapped(draw: st.DrawFn, most: int = 8) -> Problem:
    """Small problems with gaps; pins are those that lie rightly whatever the gaps."""
    buffers = []
    for b in draw(problems(most=most)).buffers:
        gaps = []
        for lower, upper in relating.spans(draw, b.lower, b.upper, 4):
            low = draw(st.integers(0, max(b.size - 1, 0)))
            window = (low, draw(st.integers(low + 1, b.size))) if b.size and draw(st.booleans()) else None
            gaps.append(Gap(lower, upper, window))
        hint = draw(st.sampled_from((None, None, 0, 4, 17)))
        buffers.append(replace(b, gaps=tuple(gaps), hint=hint))
    return Problem(tuple(buffers))


def bare(problem: Problem) -> Problem:
    return Problem(tuple(replace(b, gaps=(), hint=None) for b in problem.buffers))


def turns(count: int, seed: int) -> Problem:
    """Buffers that sleep for most of their life, so that many fit into the gaps of others."""
    rng = random.Random(seed)
    buffers = []
    for k in range(count):
        lower = rng.randrange(100)
        upper = lower + rng.randrange(20, 90)
        gap = Gap(lower + rng.randrange(1, 5), upper - rng.randrange(1, 5))
        buffers.append(Buffer(f"b{k}", lower, upper, rng.randrange(1, 500), rng.choice((1, 8)), gaps=(gap,)))
    return Problem(tuple(buffers))


@pytest.mark.parametrize("name", planners("place"))
@given(problem=gapped())
@settings(max_examples=40)
def test_every_planner_packs_problems_with_gaps_rightly(name: str, problem: Problem) -> None:
    solution = pack(problem, name, QUICK)
    assert check_solution(problem, solution) == []
    assert solution.arena == max(
        (x + b.size for b, x in zip(problem.buffers, solution.offsets, strict=True)), default=0
    )


@given(gapped(most=5))
@settings(max_examples=60)
def test_gaps_never_cost_anything_and_the_bound_is_one(problem: Problem) -> None:
    solution = pack(problem, search=QUICK)
    assert solution.lower_bound <= solution.arena
    least = optimum(bare(problem))  # of what is harder
    assert solution.lower_bound <= least
    assert solution.arena <= pack(bare(problem), search=QUICK).arena


@pytest.mark.parametrize("seed", range(3))
def test_buffers_lie_in_the_gaps_of_others(seed: int) -> None:
    problem = turns(120, seed)
    with_gaps, without = (
        pack(problem, search=Search(work=6_000, seconds=60.0)),
        pack(bare(problem), search=QUICK),
    )
    assert check_solution(problem, with_gaps) == []
    assert with_gaps.planner in ("portfolio", "portfolio+gaps")
    assert with_gaps.lower_bound <= with_gaps.arena < 0.8 * without.arena
    again = pack(problem, search=Search(work=6_000, seconds=60.0))
    assert (again.offsets, again.work) == (with_gaps.offsets, with_gaps.work)


@given(gapped(most=5))
@settings(max_examples=60)
def test_every_order_of_first_fit_is_no_better(problem: Problem) -> None:
    """With gaps but no windows in them, some order of first fit is optimal; the search goes through all."""
    plain = Problem(
        tuple(
            replace(b, hint=None, pinned=None, gaps=tuple(Gap(g.lower, g.upper) for g in b.gaps))
            for b in problem.buffers
        )
    )
    solution = pack(plain, search=Search(work=50_000, seconds=60.0))
    assert solution.arena == relating.optimum(plain)
    assert solution.optimal


def test_two_that_take_turns_share_their_bytes() -> None:
    a = Buffer("a", 0, 10, 8, gaps=(Gap(3, 6),))
    b = Buffer("b", 3, 6, 8)
    solution = pack(Problem((a, b)))
    assert (solution.arena, solution.lower_bound, solution.optimal) == (8, 8, True)
    half = replace(a, gaps=(Gap(3, 6, (0, 4)),))
    assert pack(Problem((half, b))).arena == 12


def test_a_planner_that_does_not_search_keeps_to_whole_live_ranges() -> None:
    a, b = Buffer("a", 0, 10, 8, gaps=(Gap(3, 6),)), Buffer("b", 3, 6, 8)
    solution = pack(Problem((a, b)), "naive")
    assert (solution.arena, solution.lower_bound, solution.planner) == (16, 8, "naive")
    assert portfolio.plan(Problem((a, b))).lower_bound == 8


def test_pins_may_lie_in_one_anothers_gaps() -> None:
    a = Buffer("a", 0, 10, 8, pinned=0, gaps=(Gap(3, 6, (0, 4)),))
    b = Buffer("b", 3, 6, 4, pinned=4)
    c = Buffer("c", 0, 3, 4)
    assert pack(Problem((a, b, c))).offsets == (0, 4, 8)
    with pytest.raises(BadInput, match="shares bytes"):
        pack(Problem((a, replace(b, pinned=3), c)))


@pytest.mark.parametrize(
    ("buffer", "rule"),
    [
        (Buffer("x", 0, 4, 8, gaps=(Gap(3, 5),)), r"not within the live range \[0, 4\)"),
        (Buffer("x", 0, 4, 8, gaps=(Gap(2, 2),)), "not within the live range"),
        (Buffer("x", 0, 4, 8, gaps=(Gap(1, 3), Gap(2, 4))), "overlaps another"),
        (Buffer("x", 0, 4, 8, gaps=(Gap(1, 3, (4, 9)),)), r"bytes \[0, 8\)"),
        (Buffer("x", 0, 4, 8, gaps=(Gap(1, 3, (4, 4)),)), "window"),
        (Buffer("x", 0, 4, 8, 4, 6, gaps=(Gap(1, 3),)), "multiple of the alignment"),
        (Buffer("x", 0, 4, 8, 1, -4, gaps=(Gap(1, 3),)), "pinned offset"),
        (Buffer("x", 0, 4, 8, 0, gaps=(Gap(1, 3),)), "alignment 0 is below 1"),
        (Buffer("x", 0, 4, -8, gaps=(Gap(1, 3),)), "negative size -8"),
    ],
)
def test_refuses_gaps_that_are_none(buffer: Buffer, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        pack(Problem((buffer,)))


def test_hints_are_followed_where_they_cost_nothing() -> None:
    a, b = Buffer("a", 0, 2, 4, hint=4), Buffer("b", 0, 2, 4, hint=0)
    assert pack(Problem((a, b))).offsets == (4, 0)
    assert pack(Problem((replace(a, hint=1), b))).arena == 8
    assert pack(Problem((replace(a, hint=2**40), b))).arena == 8


def test_is_never_worse_than_a_baseline() -> None:
    problem = Problem(tuple(Buffer(str(k), k, k + 2, 4) for k in range(6)))
    best = (0, 4, 0, 4, 0, 4)
    solution = pack(problem, "naive", baseline=best)
    assert (solution.offsets, solution.arena, solution.planner) == (best, 8, "baseline")
    assert pack(problem, baseline=(0, 4, 8, 12, 16, 20)).arena == 8
    for wrong in ((0, 0, 4, 0, 4, 0), (0, 4), (-4, 4, 0, 4, 0, 4)):
        with pytest.raises(BadInput, match="wrong packing"):
            pack(problem, baseline=wrong)


def test_a_planners_answer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from tightship.errors import VerificationFailed

    monkeypatch.setattr(portfolio, "plan", lambda p, o=None: Solution((0, 0), 4, planner="wrong"))
    with pytest.raises(VerificationFailed, match=r"planner .wrong.: the plan is not valid"):
        pack(Problem((Buffer("a", 0, 2, 4), Buffer("b", 1, 3, 4))))


@pytest.mark.parametrize("gaps", [False, True])
def test_an_interrupt_gives_the_best_so_far(gaps: bool) -> None:
    problem = planted(600, 1, height=5000)  # far more than a search comes to an end with
    if gaps:
        first = problem.buffers[0]
        cut = replace(first, upper=first.upper + 2, gaps=(Gap(first.upper, first.upper + 1),))
        problem = replace(problem, buffers=(cut, *problem.buffers[1:]))
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    with pytest.raises(Interrupted) as caught:
        pack(problem, search=Search(work=10**12, seconds=1e6))
    assert check_solution(problem, caught.value.solution) == []
    greedy = pack(problem, "greedy-by-size")
    assert caught.value.solution.arena <= greedy.arena


def test_a_watcher_is_told_of_every_better_packing() -> None:
    problem = Problem(tuple(Buffer(str(k), k % 7, k % 7 + 3 + k % 5, 64 * (1 + k % 9)) for k in range(60)))
    told: list[tuple[int, int]] = []
    with watched(lambda arena, bound: told.append((arena, bound))):
        made = pack(problem, "portfolio", Search(work=2_000))
    assert told and told[-1][0] == made.arena and all(bound <= arena for arena, bound in told)
    assert [arena for arena, _ in told] == sorted({arena for arena, _ in told}, reverse=True)
    pack(problem, "portfolio", Search(work=2_000))
    assert told[-1][0] == made.arena  # nobody watches any more
