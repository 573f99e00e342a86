"""Exact placement against brute force, its proofs, its limits, and published problems at their capacities."""

import _thread
import itertools
import threading
from dataclasses import replace

import pytest
from hypothesis import given

from support.placing import assert_right, optimum, packing, planted, problems, stepped
from tightship.plan import Buffer, Problem
from tightship.planners.place import exact, portfolio
from tightship.planners.place.problem import frame

ENOUGH = exact.Options(work_limit=300_000, time_limit=None, threads=1)

CAPACITY = 1_048_576

# Twenty bytes are the most alive at one time, and there is no way to put these into twenty.
TIGHT = ((0, 1, 11), (1, 2, 7), (0, 3, 4), (2, 3, 4), (1, 4, 3), (3, 4, 8), (2, 5, 3), (0, 5, 5), (4, 5, 10))


def tight(scale: int = 1, more: tuple[Buffer, ...] = ()) -> Problem:
    return Problem(tuple(Buffer(f"t{k}", lo, up, scale * z) for k, (lo, up, z) in enumerate(TIGHT)) + more)


@given(problem=problems(most=6, plain=True))
def test_is_optimal_and_proves_it(problem: Problem) -> None:
    solution = exact.plan(problem, ENOUGH)
    assert_right(problem, solution)
    assert solution.arena == solution.lower_bound == optimum(problem)


@given(problem=problems(most=6))
def test_is_optimal_and_proves_it_with_alignments_and_pins(problem: Problem) -> None:
    solution = exact.plan(problem, ENOUGH)
    assert_right(problem, solution)
    assert solution.arena == solution.lower_bound == optimum(problem)


@pytest.mark.parametrize("scale", [1, 7, 1000])
def test_proves_a_bound_above_the_peak_load(scale: int) -> None:
    problem = tight(scale)
    solution = exact.plan(problem, ENOUGH)
    assert_right(problem, solution)
    assert frame(problem).bound == 20 * scale
    assert solution.arena == solution.lower_bound == 21 * scale


def test_parts_that_share_no_time_are_proved_apart() -> None:
    later = tuple(
        replace(b, id=f"later {b.id}", lower=b.lower + 9, upper=b.upper + 9) for b in tight().buffers
    )
    solution = exact.plan(tight(more=later), ENOUGH)
    assert solution.arena == solution.lower_bound == 21


@pytest.mark.parametrize("seed", range(4))
def test_fills_what_can_be_filled(seed: int) -> None:
    solution = exact.plan(planted(60, seed), ENOUGH)
    assert solution.arena == solution.lower_bound == 64


def test_ends_within_the_capacity() -> None:
    problem = planted(60, 3)
    start = exact.plan(problem, replace(ENOUGH, work_limit=0))
    best = exact.plan(problem, ENOUGH)
    assert best.arena < start.arena  # there is something to search for
    within = exact.plan(replace(problem, capacity=start.arena), ENOUGH)
    assert (within.arena <= start.arena, within.work <= start.work) == (True, True)
    assert exact.plan(problem, replace(ENOUGH, capacity=best.arena)).arena == best.arena


@pytest.mark.parametrize("seed", range(4))
def test_threads_do_not_change_the_answer(seed: int) -> None:
    problem = planted(90, seed)
    one, two, three = (exact.plan(problem, replace(ENOUGH, threads=k, seed=seed)) for k in (1, 2, 3))
    assert one.offsets == two.offsets == three.offsets
    assert (one.lower_bound, one.work) == (two.lower_bound, two.work) == (three.lower_bound, three.work)


@pytest.mark.parametrize("seed", range(4))
def test_more_work_is_never_worse(seed: int) -> None:
    problem = planted(90, seed)
    by_work = [exact.plan(problem, replace(ENOUGH, work_limit=10**k)) for k in range(6)]
    for less, more in itertools.pairwise(by_work):
        assert more.arena <= less.arena
        assert more.lower_bound >= less.lower_bound


@pytest.mark.parametrize("seed", range(4))
def test_pinned_buffers_are_packed_around(seed: int) -> None:
    free = planted(60, seed)
    offsets = exact.plan(free, ENOUGH).offsets
    rows = enumerate(zip(free.buffers, offsets, strict=True))
    problem = Problem(tuple(replace(b, pinned=x) if k % 4 == seed else b for k, (b, x) in rows))
    solution = exact.plan(problem, ENOUGH)
    assert_right(problem, solution)
    assert solution.arena == solution.lower_bound == 64


def test_no_time_is_enough_for_an_answer() -> None:
    problem = planted(90, 1)
    assert_right(problem, exact.plan(problem, exact.Options(time_limit=0.0)))


def test_can_be_interrupted() -> None:
    problem = stepped(40, 1)
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        exact.plan(problem, exact.Options(work_limit=10**12, time_limit=None))


@pytest.mark.parametrize("case", "ABCDF")
def test_published_problems_are_packed_into_their_capacity(case: str) -> None:
    problem = replace(packing(f"{case}.{CAPACITY}"), capacity=CAPACITY)
    solution = portfolio.plan(problem, portfolio.Options(time_limit=None))
    assert_right(problem, solution)


def test_published_problems_are_packed_beyond_their_capacity() -> None:
    limits = portfolio.Options(time_limit=None)
    c, d = packing(f"C.{CAPACITY}"), replace(packing(f"D.{CAPACITY}"), capacity=1_026_048)
    best = portfolio.plan(c, limits)
    assert best.arena == best.lower_bound == 1_039_360
    assert portfolio.plan(d, limits).arena <= 1_026_048
