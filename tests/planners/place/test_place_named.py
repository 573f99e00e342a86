"""Planners named after other systems, against what those do, written down once more and slowly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.placing import packing, planted, problems
from tightship.baselines import xla_heap
from tightship.errors import BadInput
from tightship.plan import Buffer, Problem
from tightship.planners import planners
from tightship.planners.place import orders
from tightship.planners.place.problem import frame

INFINITE = 2**63


@st.composite
def colocated(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """(lower, upper, size, set), in the order of ids."""
    rows = []
    for _ in range(draw(st.integers(1, 9))):
        lower = draw(st.integers(0, 12))
        rows.append(
            (lower, lower + draw(st.integers(1, 6)), draw(st.integers(0, 9)), draw(st.integers(0, 6)))
        )
    return rows


def heap(rows: list[tuple[int, int, int, int]], unit: int, spatial: bool) -> tuple[dict[int, int], int]:
    """XLA's algorithm, chunk by chunk, on bytes."""
    members: dict[int, list[int]] = {}
    for k, row in enumerate(rows):
        members.setdefault(row[3], []).append(k)
    size = {s: max(rows[k][2] for k in ks) for s, ks in members.items()}
    head = {s: min(ks, key=lambda k: (rows[k][0], k)) for s, ks in members.items()}

    def key(s: int) -> tuple[int, int, int]:
        lower, upper = rows[head[s]][:2]
        if spatial:
            return -size[s], lower - upper, head[s]
        return lower - max(rows[k][1] for k in members[s]), -size[s], head[s]

    placed: list[tuple[int, int, int, int]] = []  # lower, upper, offset, end
    at: dict[int, int] = {}
    for s in sorted(members, key=key):
        if not size[s]:
            at[s] = 0
            continue
        mine = [rows[k][:2] for k in members[s]]
        taken = sorted((x, y) for lo, up, x, y in placed if any(lo < b and a < up for a, b in mine))
        chunks, offset = [], 0
        for x, y in taken:
            if x - offset >= size[s]:
                chunks.append((x - offset, offset))
            offset = max(offset, -(-y // unit) * unit)
        chunks.append((INFINITE - offset, offset))
        at[s] = min(chunks)[1]
        placed += [(a, b, at[s], at[s] + size[s]) for a, b in mine]
    return at, max((at[s] + size[s] for s in at), default=0)


@given(rows=colocated(), unit=st.sampled_from((1, 4, 8)))
def test_L08_the_xla_heap_is_that_of_xla(rows: list[tuple[int, int, int, int]], unit: int) -> None:  # noqa: N802
    lower, upper, size, group = zip(*rows, strict=True)
    offsets, arena, order = xla_heap.offsets(lower, upper, size, group=group, alignment=unit)
    both = {name: heap(rows, unit, name == "spatial") for name in ("spatial", "temporal")}
    assert arena == both[order][1] == min(a for _, a in both.values())
    assert order == ("spatial" if both["spatial"][1] <= both["temporal"][1] else "temporal")
    assert offsets.tolist() == [both[order][0][row[3]] for row in rows]


@given(problems(plain=True))
def test_L08_the_xla_planner_gives_what_its_function_gives(problem: Problem) -> None:  # noqa: N802
    columns = zip(*((b.lower, b.upper, b.size) for b in problem.buffers), strict=True)
    lower, upper, size = columns if problem.buffers else ((), (), ())
    offsets, arena, _ = xla_heap.offsets(lower, upper, size)
    solution = planners("place")["xla-heap"].plan(problem)
    assert (solution.offsets, solution.arena) == (tuple(offsets.tolist()), arena)


def test_the_xla_heap_refuses_what_is_no_problem() -> None:
    with pytest.raises(BadInput, match="different lengths"):
        xla_heap.offsets([0], [1], [1, 2])
    with pytest.raises(BadInput, match="empty live range"):
        xla_heap.offsets([1], [1], [1])


@pytest.mark.parametrize("rule", orders.SKIES)
@given(problem=problems(plain=True))
def test_a_skyline_takes_everything_once(rule: str, problem: Problem) -> None:
    order = orders.skyline(frame(problem).arrays, rule)
    assert sorted(order.tolist()) == list(range(len(problem.buffers)))


def test_the_longest_skyline_is_built_as_described() -> None:
    rows = [(0, 9, 2), (0, 3, 5), (3, 9, 1), (4, 8, 3), (3, 6, 3)]
    order = orders.skyline(
        frame(Problem(tuple(Buffer(str(k), *r) for k, r in enumerate(rows)))).arrays, "longest"
    )
    # The first covers all. Above it the longest again; then [3, 9) is at 3 and [0, 3) at 2: the second fits there.
    assert order.tolist() == [0, 2, 1, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_a_skyline_beats_the_order_by_size_where_all_is_full(seed: int) -> None:
    problem = planted(150, seed, height=500)
    named = planners("place")
    assert named["skyline"].plan(problem).arena < named["greedy-by-size"].plan(problem).arena


def test_a_skyline_reaches_the_bound_of_resnet50() -> None:
    solution = planners("place")["skyline"].plan(packing("resnet50"))
    assert np.isclose(solution.arena / solution.lower_bound, 1.0, atol=0.001)
