"""The beam against every order there is, and against the graph's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import graphs
from tightship import api
from tightship.analysis.bounds import lower_bound
from tightship.analysis.order import is_legal, predecessors
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.order import beam
from tightship.simulate import baseline, replay


def peak(graph, order=None):
    return replay(graph, baseline(graph, order)).peak


def fan(branches: int, large: int = 1024, small: int = 64) -> Graph:
    """Branches that make much and keep little, all the large first."""
    values, storages, ops = [Value("x", 0)], [Storage("x", 64)], []

    def made(name: str, size: int, inputs: tuple[int, ...]) -> int:
        storages.append(Storage(name, size))
        values.append(Value(name, len(storages) - 1))
        ops.append(Op(name, "op", inputs, (len(values) - 1,)))
        return len(values) - 1

    big = [made(f"large{k}", large, (0,)) for k in range(branches)]
    end = made("end", 64, tuple(made(f"small{k}", small, (b,)) for k, b in enumerate(big)))
    return Graph(tuple(ops), tuple(values), tuple(storages), (0,), (end,))


def test_a_known_optimum_is_found_and_proved():
    graph = fan(6)
    assert peak(graph) == 64 + 6 * 1024 + 64
    found = beam.found(graph)
    assert found.peak == 64 + 5 * 64 + 1024 + 64 and found.optimal
    assert is_legal(graph, found.order) and peak(graph, found.order) == found.peak


def legal_orders(before, done=()):
    if len(done) == len(before):
        yield done
    for k, row in enumerate(before):
        if k not in done and all(b in done for b in row):
            yield from legal_orders(before, (*done, k))


@settings(max_examples=25)
@given(graphs(max_ops=6))
def test_no_order_is_better_than_one_that_is_called_optimal(graph):
    found = beam.found(graph)
    assert is_legal(graph, found.order) and peak(graph, found.order) == found.peak <= peak(graph)
    best = min(peak(graph, order) for order in legal_orders(predecessors(graph)))
    assert found.peak == best and found.optimal
    assert lower_bound(graph, recompute=False) <= best


@settings(max_examples=40)
@given(graphs(max_ops=60), st.sampled_from([0, 50, 5000]))
def test_any_work_gives_a_legal_order_never_worse_and_the_same_each_time(graph, work):
    options = beam.Options(work=work)
    found = beam.found(graph, options)
    assert is_legal(graph, found.order) and peak(graph, found.order) <= peak(graph)
    assert beam.found(graph, options) == found and beam.plan(graph, options) == found.order


@settings(max_examples=20)
@given(graphs(max_ops=40))
def test_more_work_is_never_worse(graph):
    peaks = [beam.found(graph, beam.Options(work=w)).peak for w in (20, 200, 2000, 20000)]
    assert peaks == sorted(peaks, reverse=True)


def test_graphs_that_are_too_large_keep_their_order(monkeypatch):
    monkeypatch.setattr(beam, "MOST", 5)
    graph = fan(6)
    assert beam.found(graph) == beam.Found(tuple(range(13)), peak(graph), False, 0)


def test_it_is_what_graphs_that_only_compute_results_are_planned_with():
    planned = api.plan_graph(fan(12)).plan
    assert planned.planner.startswith("beam+") and planned.peak == 64 + 11 * 64 + 1024 + 64
    assert planned.moved > 0 and planned.handed == 0


@pytest.mark.parametrize("ops", [0, 1])
def test_next_to_nothing(ops):
    graph = fan(2)
    small = Graph(graph.ops[:ops], graph.values, graph.storages, graph.inputs, ())
    assert beam.found(small).order == tuple(range(ops))
