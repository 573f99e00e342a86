"""Cuts at one op against every set of ops that may have run before it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.optimum import least_peak
from support.strategies import graphs, random_graph, random_order
from tightship.analysis.moments import Moments, runs_of
from tightship.analysis.order import is_legal, predecessors
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Step
from tightship.planners.evict.problem import EVICT, EvictionProblem
from tightship.simulate import baseline, replay


def mask(n: int, ops) -> np.ndarray:
    made = np.zeros(n, dtype=bool)
    made[list(ops)] = True
    return made


def closed(graph: Graph, k: int):
    """All sets of ops that may have run just before op ``k``."""
    before, n = predecessors(graph), len(graph.ops)
    for bits in range(1 << n):
        done = {j for j in range(n) if bits >> j & 1}
        if k not in done and set(before[k]) <= done and all(set(before[j]) <= done for j in done):
            yield done


@settings(max_examples=40)
@given(graphs(max_ops=40), st.integers(0, 2**32 - 1))
def test_bytes_along_an_order_are_those_of_the_replay(graph, seed):
    order = random_order(graph, seed)
    steps = baseline(graph, order)
    line = replay(graph, steps)
    expected = [d for d, step in zip(line.during, steps, strict=True) if step.kind == "compute"]
    moments = Moments(graph)
    assert moments.during(order).tolist() == expected
    for i, k in enumerate(order):
        assert moments.bytes(k, mask(len(order), order[:i])) == expected[i]


@settings(max_examples=40)
@given(graphs(max_ops=7), st.data())
def test_no_set_of_ops_passes_an_op_with_less_than_its_cut(graph, data):
    moments, n = Moments(graph), len(graph.ops)
    k = data.draw(st.integers(0, n - 1))
    sets = list(closed(graph, k))
    cost = {frozenset(done): moments.bytes(k, mask(n, done)) for done in sets}
    found = moments.passing(k)
    assert found.bytes == min(cost.values()) == cost[frozenset(np.flatnonzero(found.done).tolist())]
    # Of equal ones the nearest to what was there.
    first = data.draw(st.sampled_from(sets))
    near = moments.passing(k, mask(n, first))
    chosen = frozenset(np.flatnonzero(near.done).tolist())
    assert cost[chosen] == near.bytes == found.bytes
    assert len(chosen ^ first) == min(len(s ^ first) for s, c in cost.items() if c == near.bytes)


@settings(max_examples=30)
@given(graphs(max_ops=7), st.data())
def test_a_price_weighs_bytes_against_moves_and_limits_are_kept(graph, data):
    moments, n = Moments(graph), len(graph.ops)
    k = data.draw(st.integers(0, n - 1))
    sets = list(closed(graph, k))
    first, price = data.draw(st.sampled_from(sets)), data.draw(st.sampled_from([64, 640]))
    found = moments.passing(k, mask(n, first), price)
    weighed = {frozenset(s): moments.bytes(k, mask(n, s)) + price * len(s ^ first) for s in sets}
    assert weighed[frozenset(np.flatnonzero(found.done).tolist())] == min(weighed.values())
    low = data.draw(st.sampled_from(sets))
    high = data.draw(st.sampled_from([s for s in sets if low <= s]))
    inside = moments.passing(k, within=(mask(n, low), mask(n, high)))
    assert low <= set(np.flatnonzero(inside.done).tolist()) <= high
    assert inside.bytes == min(moments.bytes(k, mask(n, s)) for s in sets if low <= s <= high)


@settings(max_examples=40)
@given(graphs(max_ops=8))
def test_no_order_ends_or_passes_with_less(graph):
    moments, best = Moments(graph), least_peak(graph)
    assert moments.at_end() <= best
    assert max(moments.passing(k).bytes for k in range(len(graph.ops))) <= best
    if len(graph.ops) == 1:
        assert moments.at_end() == best


def test_huge_sizes_are_not_rounded():
    """Two results of 2^40 bytes and a little more are told apart by their last 64 bytes."""
    sizes = [64, 2**40 + 64, 2**40, 64, 64, 64]
    storages = tuple(Storage(f"s{j}", n) for j, n in enumerate(sizes))
    values = tuple(Value(f"v{j}", j) for j in range(len(sizes)))
    rows = [((0,), 1), ((0,), 2), ((1,), 3), ((2,), 4), ((3, 4), 5)]
    ops = tuple(Op(f"op{k}", "op", reads, (out,)) for k, (reads, out) in enumerate(rows))
    moments = Moments(Graph(ops, values, storages, (0,), (5,)))
    found = moments.passing(0)
    assert found.bytes == 64 + 2**40 + 64 and not found.done.any()
    assert moments.passing(4).bytes == 64 * 4


@pytest.mark.parametrize("ops", [0, 1])
def test_next_to_nothing(ops):
    storages, values = (Storage("x", 64), Storage("y", 128)), (Value("x", 0), Value("y", 1))
    made = tuple(Op(f"op{k}", "op", (0,), (1,)) for k in range(ops))
    graph = Graph(made, values, storages, (0,), (1,) if ops else ())
    assert Moments(graph).during(range(ops)).tolist() == [192] * ops
    assert Moments(graph).at_end() == 64 + 128 * ops and is_legal(graph, range(ops))


@settings(max_examples=30)
@given(graphs(max_ops=30))
def test_runs_of_a_plan_that_keeps_everything_are_its_ops(graph):
    runs = runs_of(graph, baseline(graph))
    n = len(graph.ops)
    assert runs.ops == tuple(range(n)) == runs.order(range(n)) and all(runs.first)
    assert runs.moments.during(range(n)).tolist() == Moments(graph).during(range(n)).tolist()


@pytest.mark.parametrize("in_place", [False, True])
def test_runs_of_a_plan_need_no_more_than_its_steps(in_place):
    """Less, where a step keeps what nothing reads any more."""
    again = 0
    for seed in range(20):
        graph = random_graph(seed, 24, updates=0.1)
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))), in_place=in_place)
        bits = problem.nothing()
        bits[(problem.engine.allowed >> EVICT & 1) > 0] = EVICT
        if not problem.cost(bits, 1 << 60).valid:
            continue
        steps = problem.steps(bits)
        line, runs = replay(graph, steps), runs_of(graph, steps)
        taken = [n for n, step in zip(line.during, steps, strict=True) if step.kind != "free"]
        assert is_legal(graph, runs.order(range(len(runs.ops))))
        assert all(a <= b for a, b in zip(runs.moments.during(range(len(runs.ops))), taken, strict=True))
        again += len(runs.ops) > len(graph.ops)
    assert again >= 5


def test_steps_that_copy_have_no_runs():
    graph = random_graph(0, 8)
    assert runs_of(graph, (*baseline(graph), Step("offload", -1, (1,)))) is None
