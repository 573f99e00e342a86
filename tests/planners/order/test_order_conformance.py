"""What every planner of orders keeps to, without being told which there are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from support.chains import chain
from support.strategies import graphs, random_graph
from tightship.analysis.order import is_legal
from tightship.graph import Graph, Storage, Value
from tightship.planners import planners

ALL = planners("order")


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25)
@given(graph=graphs(max_ops=40))
def test_an_order_is_legal_and_the_same_each_time(name, graph):
    order = ALL[name].plan(graph)
    assert is_legal(graph, order) and isinstance(order, tuple)
    assert ALL[name].plan(graph, ALL[name].options()) == order


@pytest.mark.parametrize("name", ALL)
def test_next_to_nothing_and_hundreds_in_a_row(name):
    nothing = Graph((), (Value("x", 0),), (Storage("x", 64),), (0,), (0,))
    assert ALL[name].plan(nothing) == ()
    assert ALL[name].plan(chain(1)) == (0, 1)
    for graph in (chain(600), random_graph(1, 400)):
        assert is_legal(graph, ALL[name].plan(graph))


@pytest.mark.parametrize("name", ALL)
def test_it_says_what_it_is(name):
    told = __import__(ALL[name].plan.__module__, fromlist=["plan"]).__doc__
    for word in ("Problem:", "Measure:", "Source:", "Guarantee:", "Complexity:", "Known limits:"):
        assert word in told
