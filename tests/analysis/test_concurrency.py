"""Orders beyond the total one, against what they mean: every execution that is allowed."""

# ruff: noqa: N802

from collections.abc import Iterator
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies import graphs, random_order
from support.zoo import captured
from tightship.analysis.concurrency import (
    ancestors,
    in_sequence,
    in_streams,
    interference,
    members,
    precede,
    reusing,
    touching,
    waves,
)
from tightship.analysis.moments import peak_of
from tightship.analysis.order import is_legal, predecessors
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.layout import in_any_order, in_order, in_steps
from tightship.planners.packing import Search, pack
from tightship.simulate import replay
from tightship.verify.placement import check_solution


def executions(waits: tuple[tuple[int, ...], ...]) -> Iterator[dict[int, int]]:
    """When each op runs, in every sequence that is allowed, also with two neighbors at the same time."""
    for order in permutations(range(len(waits))):
        at = {k: 2 * i for i, k in enumerate(order)}
        if all(at[b] < at[k] for k, row in enumerate(waits) for b in row):
            yield at
            for one, two in pairwise(order):
                if one not in waits[two]:
                    yield at | {one: at[two]}


def meet(graph: Graph, at: dict[int, int]) -> set[frozenset[int]]:
    """Pairs of storages that are alive at one time of an execution, by definition."""
    touched, definer = touching(graph), graph.uses.definer
    spans = {}
    for s in range(len(graph.storages)):
        times = [at[k] for k in members(touched[s])]
        first = at[definer[s]] if definer[s] >= 0 else -1
        stays = s in graph.static | graph.kept
        spans[s] = (first, 2 * len(at) if stays else max(times, default=first))
    return {
        frozenset((s, t))
        for s in spans
        for t in spans
        if s < t and max(spans[s][0], spans[t][0]) <= min(spans[s][1], spans[t][1])
    }


def pairs(rows: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset((s, t)) for s, row in enumerate(rows) for t in members(row)}


@given(graphs(max_ops=4, updates=0.2), st.data())
@settings(max_examples=150, deadline=None)
def test_L06_storages_interfere_when_they_meet_in_some_execution(graph: Graph, data: st.DataObject) -> None:
    if len(graph.ops) > 5:
        return
    streams = [data.draw(st.integers(0, 1)) for _ in graph.ops]
    for waits in (predecessors(graph), in_streams(graph, streams), in_sequence(graph)):
        really = set().union(*(meet(graph, at) for at in executions(waits)))
        assert pairs(interference(graph, waits)) == really


@given(graphs(max_ops=30), st.integers(0, 2**32))
@settings(max_examples=60)
def test_L05_who_is_an_ancestor_comes_first_in_every_order(graph: Graph, seed: int) -> None:
    before = ancestors(predecessors(graph))
    at = {k: i for i, k in enumerate(random_order(graph, seed))}
    for k in range(len(before)):
        assert all(at[b] < at[k] for b in members(before[k]))
        assert precede(before[k], k, before)
    assert pairs(interference(graph, in_sequence(graph))) <= pairs(interference(graph, predecessors(graph)))


def test_streams_keep_their_own_order_and_wait_for_one_another_where_data_says_so() -> None:
    graph = captured("lstm")
    one = in_streams(graph, [0] * len(graph.ops))
    assert pairs(interference(graph, one)) == pairs(interference(graph, in_sequence(graph)))
    two = in_streams(graph, [k % 2 for k in range(len(graph.ops))])
    sets = [pairs(interference(graph, waits)) for waits in (one, two, predecessors(graph))]
    assert sets[0] <= sets[1] <= sets[2]
    with pytest.raises(BadInput, match="1 streams for"):
        in_streams(graph, [0])


@given(graphs(max_ops=30), st.integers(1, 5))
@settings(max_examples=60)
def test_waves_run_what_does_not_wait_for_one_another(graph: Graph, width: int) -> None:
    waits = predecessors(graph)
    step = waves(waits, width)
    assert all(step[b] < step[k] for k, row in enumerate(waits) for b in row)
    assert all(step.count(at) <= width for at in set(step))
    assert set(step) == set(range(max(step) + 1))
    assert waves(waits, 1) == tuple(range(len(waits)))


def test_at_least_one_op_runs_at_a_time() -> None:
    with pytest.raises(BadInput, match="at least one op"):
        waves(((),), 0)


@given(graphs(max_ops=20), st.integers(0, 2**32))
@settings(max_examples=40)
def test_an_arena_for_any_order_is_right_in_every_order(graph: Graph, seed: int) -> None:
    life = in_any_order(graph)
    packed = pack(life.problem, search=Search(work=300, seconds=60.0))
    at = {(s, k if s < 0 else -1): x for s, k, x in zip(life.storages, life.ops, packed.offsets, strict=True)}
    there = in_order(graph, random_order(graph, seed))
    offsets = tuple(at[s, k if s < 0 else -1] for s, k in zip(there.storages, there.ops, strict=True))
    wrong = check_solution(there.problem, type(packed)(offsets, packed.arena))
    assert wrong == []


@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm"])
def test_arenas_of_the_three_orders_of_real_models(name: str) -> None:
    graph = captured(name)
    quick = Search(work=20_000, seconds=20.0)
    arenas = [
        pack(life.problem, search=quick)
        for life in (in_order(graph), in_steps(graph, 4), in_any_order(graph))
    ]
    total = sum(b.size for b in in_order(graph).problem.buffers)
    assert arenas[0].lower_bound <= arenas[2].arena < total
    assert arenas[1].arena < total
    assert all(a.lower_bound <= a.arena for a in arenas)


@settings(deadline=None, max_examples=60)
@given(graphs(14, overwrites=0.9), st.integers(0, 999))
def test_what_takes_the_place_of_an_input_in_every_order_takes_no_bytes(graph: Graph, seed: int) -> None:
    """Orders of the graph with such results are orders of the graph, and plans in them need no more bytes."""
    reused = reusing(graph)
    order = random_order(reused, seed)
    assert is_legal(graph, order)
    problem = EvictionProblem(graph, order)
    steps = problem.lower(problem.cost(problem.nothing(), 1 << 60), 1 << 60)
    assert replay(graph, steps).peak <= peak_of(reused, order) <= peak_of(graph, order)
