"""The core's packings against first fit and best fit as they are defined, its bounds, and real problems."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.placing import assert_right, lowest, optimum, packing, problems, smallest_hole, stepped
from tightship.errors import BadInput
from tightship.plan import Buffer, Problem
from tightship.planners.place import orders, portfolio
from tightship.planners.place.greedy import GREEDY
from tightship.planners.place.orders import Best, by_breadth, by_start
from tightship.planners.place.problem import frame, most_alive


@pytest.mark.parametrize(("best_fit", "definition"), [(False, lowest), (True, smallest_hole)])
@given(problem=problems(), data=st.data())
def test_packs_as_defined(best_fit, definition, problem: Problem, data: st.DataObject) -> None:
    f = frame(problem)
    order = data.draw(st.permutations(range(len(problem.buffers))))
    offsets, _ = f.placer.pack(np.array(order, dtype=np.int64), best_fit=best_fit)
    placed = [(b, b.pinned) for b in problem.buffers if b.pinned is not None]
    for k in order:
        b = problem.buffers[k]
        if b.pinned is not None or not b.size:
            continue
        assert offsets[k] == definition(b, placed)
        placed.append((b, int(offsets[k])))


def assert_sweeps_as_it_packs(problem: Problem) -> None:
    f = frame(problem)
    order = by_start(f.arrays)
    packed, _ = f.placer.pack(order, best_fit=False)
    swept, complete = f.placer.sweep(order)
    assert complete
    assert swept.tolist() == packed.tolist()
    assert f.placer.sweep(order, seconds=0.0)[1] is (len(order) == 0)


@given(problems())
def test_a_sweep_is_first_fit_by_start(problem: Problem) -> None:
    assert_sweeps_as_it_packs(Problem(tuple(replace(b, pinned=None) for b in problem.buffers)))


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_is_first_fit_by_start_with_many_holes(seed: int) -> None:
    assert_sweeps_as_it_packs(stepped(6000, seed))


def test_many_are_ordered_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = frame(stepped(300, 3)).arrays
    every = [order(arrays).tolist() for order, _ in GREEDY]
    monkeypatch.setattr(orders, "_AT_ONCE", 0)
    assert [order(arrays).tolist() for order, _ in GREEDY] == every


@given(problems())
def test_what_a_search_begins_with_is_right(problem: Problem) -> None:
    f = frame(problem)
    assert_right(problem, f.solution(Best(f).offsets, "stacked"))


@given(problems(plain=True))
def test_the_bound_is_the_peak_load(problem: Problem) -> None:
    loads = [sum(b.size for b in problem.buffers if b.lower <= t < b.upper) for t in range(-3, 16)]
    assert frame(problem).bound == max(loads)


@given(problems(most=5))
def test_alignments_and_pins_never_lift_the_bound_above_the_optimum(problem: Problem) -> None:
    assert frame(problem).bound <= optimum(problem)


def test_alignments_lift_the_bound() -> None:
    buffers = tuple(Buffer(str(k), 0, 1, 10, alignment=64) for k in range(3))
    solution = portfolio.plan(Problem(buffers))
    assert (solution.lower_bound, solution.arena) == (138, 138)


@given(problems(plain=True))
def test_breadth_takes_the_broadest_time_first(problem: Problem) -> None:
    bs = problem.buffers
    left, expected = dict.fromkeys(range(len(bs))), []

    def alive(t: int) -> list[int]:
        return [k for k, b in enumerate(bs) if b.lower <= t < b.upper]

    for t in sorted({b.lower for b in bs}, key=lambda t: (-sum(bs[k].size for k in alive(t)), t)):
        now = sorted((k for k in alive(t) if k in left), key=lambda k: (-bs[k].size, bs[k].lower, k))
        expected += now
        for k in now:
            del left[k]
    assert by_breadth(frame(problem).arrays).tolist() == expected


def test_offsets_takes_arrays() -> None:
    offsets, arena, bound = portfolio.offsets([0, 3, 0, 9, 0], [3, 9, 9, 21, 21], [4, 4, 4, 4, 4])
    assert (arena, bound) == (12, 12)
    assert offsets.dtype == np.int64
    assert len(offsets) == 5


def test_offsets_of_nothing() -> None:
    offsets, arena, bound = portfolio.offsets([], [], [])
    assert (len(offsets), arena, bound) == (0, 0, 0)


def test_offsets_wants_arrays_of_one_length() -> None:
    with pytest.raises(BadInput, match="different shapes"):
        portfolio.offsets([0], [1, 2], [4])


def test_an_order_is_a_permutation() -> None:
    f = frame(Problem((Buffer("a", 0, 1, 1), Buffer("b", 0, 1, 1))))
    for wrong in ([0, 0], [0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="order"):
            f.placer.pack(np.array(wrong, dtype=np.int64), best_fit=True)


def test_most_alive() -> None:
    columns = [np.array(c, dtype=np.int64) for c in ([0, 1, 5], [2, 6, 9], [10, 20, 30])]
    assert most_alive(*columns) == 50


def test_a_time_limit_of_nothing_still_gives_an_answer() -> None:
    rng = np.random.default_rng(0)
    lower = rng.integers(0, 500, 2000)
    upper, size = lower + rng.integers(1, 60, 2000), rng.integers(1, 99, 2000)
    _, arena, bound = portfolio.offsets(lower, upper, size, time_limit=0.0)
    assert arena >= bound


def test_resnet50_is_packed_to_its_bound_with_proof() -> None:
    solution = portfolio.plan(packing("resnet50"))
    assert solution.arena == solution.lower_bound == 1_515_472_556
    assert solution.optimal


def test_pangu_is_packed_within_a_hundredth_of_its_bound() -> None:
    solution = portfolio.plan(packing("pangu_2.6B"), portfolio.Options(work_limit=1, time_limit=None))
    assert solution.lower_bound == 5_530_099_775
    assert solution.arena <= 1.01 * solution.lower_bound
