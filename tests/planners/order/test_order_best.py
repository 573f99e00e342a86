"""The least peak of all ways: against every order there is, against each way, and as what plans begin with."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chains import fan
from support.optimum import least_peak, least_peak_of_tree
from support.strategies import graphs, random_graph
from tightship import api
from tightship.analysis.moments import Moments
from tightship.analysis.order import is_legal
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners import planners
from tightship.planners.order import best, cuts
from tightship.simulate import baseline, replay

ALL = planners("order")


def peak(graph, order=None):
    return replay(graph, baseline(graph, order)).peak


@settings(max_examples=120)
@given(graphs(max_ops=7))
def test_up_to_seven_ops_it_is_the_best_there_is_and_says_so(graph):
    found = best.solve(graph)
    assert is_legal(graph, found.order)
    assert peak(graph, found.order) == found.peak == found.bound == least_peak(graph)


@settings(max_examples=20)
@given(graphs(max_ops=11))
def test_a_bound_is_never_above_the_best_order(graph):
    found = best.solve(graph, best.Options(work=1))
    assert found.bound <= least_peak(graph) <= found.peak == peak(graph, found.order)


@settings(max_examples=25)
@given(graphs(max_ops=60), st.sampled_from([1, 50_000]))
def test_it_is_never_worse_than_the_given_order_or_any_list_scheduler(graph, work):
    made = peak(graph, best.plan(graph, best.Options(work=work)))
    for name in ("sink", "lpmf", "bfs", "dfs"):
        assert made <= peak(graph, ALL[name].plan(graph))
    assert made <= peak(graph)


@settings(max_examples=25)
@given(graphs(max_ops=60))
def test_cuts_never_raise_a_peak_and_know_when_they_are_done(graph):
    search = cuts.Search(Moments(graph), 200_000)
    lowered = search.lower(range(len(graph.ops)))
    assert is_legal(graph, lowered.order)
    assert peak(graph, lowered.order) == lowered.peak <= peak(graph)
    assert lowered.bound <= lowered.peak
    further = search.kick(lowered, seed=3)
    assert is_legal(graph, further.order) and further.peak <= lowered.peak


def test_cuts_find_what_lies_several_ops_ahead():
    """Without any other start, half of the random graphs of 30 ops come to an order that is proved to be the best."""
    optimal = 0
    for seed in range(40):
        graph = random_graph(seed, 30)
        search = cuts.Search(Moments(graph), 20_000)
        lowered = search.lower(range(len(graph.ops)))
        assert lowered.peak <= peak(graph)
        optimal += lowered.optimal
    assert optimal >= 20


def test_it_is_what_plans_begin_with():
    planned = api.plan_graph(fan(12)).plan
    assert planned.planner.startswith("best+") and planned.peak == 64 + 11 * 64 + 1024 + 64
    assert planned.moved > 0 and planned.handed == 0


def test_an_order_that_cannot_be_better_stays():
    """Of equal peaks the graph's own order is the one, where nothing is trained."""
    graph = fan(1)
    assert best.plan(graph) == tuple(range(len(graph.ops)))


@pytest.mark.parametrize("seed", range(3))
def test_more_work_is_never_worse(seed):
    graph = random_graph(seed, 80)
    peaks = [best.solve(graph, best.Options(work=w)).peak for w in (1, 50_000, 200_000, 600_000)]
    assert peaks == sorted(peaks, reverse=True)


def tree(parents: list[int], sizes: list[int]) -> Graph:
    """Ops that each read what their children make."""
    storages = (Storage("x", 64), *(Storage(f"s{k}", size) for k, size in enumerate(sizes)))
    values = tuple(Value(s.name, j) for j, s in enumerate(storages))
    children = [tuple(c + 1 for c in range(k) if parents[c] == k) for k in range(len(sizes))]
    ops = tuple(Op(f"op{k}", "op", row or (0,), (k + 1,)) for k, row in enumerate(children))
    return Graph(ops, values, storages, (0,), (len(sizes),))


@pytest.mark.parametrize("ops", [6, 9, 30, 80])
def test_on_trees_the_bound_and_the_order_are_about_the_known_optimum(ops):
    rng = random.Random(ops)
    for _ in range(4):
        parents = [rng.randrange(k + 1, min(ops, k + 9)) for k in range(ops - 1)] + [ops]
        sizes = [64 * rng.randint(1, 100) for _ in range(ops)]
        graph, least = tree(parents, sizes), 64 + least_peak_of_tree(parents, sizes)
        if ops < 10:
            assert least == least_peak(graph)
        found = best.solve(graph)
        assert found.bound <= least <= found.peak <= 1.05 * least


@settings(max_examples=25)
@given(graphs(max_ops=40), st.integers(0, 8))
def test_less_work_does_where_any_order_within_some_bytes_does(graph, part):
    full = best.solve(graph, best.Options(work=20_000))
    enough = full.bound + (peak(graph) - full.bound) * part // 8
    found = best.solve(graph, best.Options(work=20_000, enough=enough))
    assert found.peak <= max(enough, full.peak) or found.bound > enough
    assert is_legal(graph, found.order)
