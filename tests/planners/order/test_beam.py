"""The beam against every order there is, and against the graph's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chains import fan
from support.optimum import least_peak
from support.strategies import graphs
from tightship.analysis.bounds import lower_bound
from tightship.analysis.order import is_legal
from tightship.graph import Graph
from tightship.planners.order import beam
from tightship.simulate import baseline, replay


def peak(graph, order=None):
    return replay(graph, baseline(graph, order)).peak


def test_a_known_optimum_is_found_and_proved():
    graph = fan(6)
    assert peak(graph) == 64 + 6 * 1024 + 64
    found = beam.solve(graph)
    assert found.peak == 64 + 5 * 64 + 1024 + 64 and found.optimal
    assert is_legal(graph, found.order) and peak(graph, found.order) == found.peak


@settings(max_examples=25)
@given(graphs(max_ops=7))
def test_no_order_is_better_than_one_that_is_called_optimal(graph):
    found = beam.solve(graph)
    assert is_legal(graph, found.order) and peak(graph, found.order) == found.peak <= peak(graph)
    best = least_peak(graph)
    assert found.peak == best and found.optimal
    assert lower_bound(graph, recompute=False) <= best


@settings(max_examples=40)
@given(graphs(max_ops=60), st.sampled_from([0, 50, 5000]))
def test_any_work_gives_a_legal_order_never_worse_and_the_same_each_time(graph, work):
    options = beam.Options(work=work)
    found = beam.solve(graph, options)
    assert is_legal(graph, found.order) and peak(graph, found.order) <= peak(graph)
    assert beam.solve(graph, options) == found and beam.plan(graph, options) == found.order


@settings(max_examples=20)
@given(graphs(max_ops=40))
def test_more_work_is_never_worse(graph):
    peaks = [beam.solve(graph, beam.Options(work=w)).peak for w in (20, 200, 2000, 20000)]
    assert peaks == sorted(peaks, reverse=True)


def test_graphs_that_are_too_large_keep_their_order(monkeypatch):
    monkeypatch.setattr(beam, "MOST", 5)
    graph = fan(6)
    found = beam.solve(graph)
    assert (found.order, found.peak, found.optimal, found.work) == (tuple(range(13)), peak(graph), False, 0)


@pytest.mark.parametrize("ops", [0, 1])
def test_next_to_nothing(ops):
    graph = fan(2)
    small = Graph(graph.ops[:ops], graph.values, graph.storages, graph.inputs, ())
    assert beam.solve(small).order == tuple(range(ops))
