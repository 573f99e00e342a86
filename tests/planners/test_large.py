"""Plans of graphs with many layers: near the bound whatever the clock says, and every stage ends at its deadline."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest

from support.chains import wide_layers
from tightship import _core
from tightship.analysis.bounds import Relaxation, lower_bound, time_bound
from tightship.analysis.order import csr, dependents, is_legal, predecessors, reached
from tightship.baselines import min_cut
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.planners import clock, default, planner, run
from tightship.planners.evict import anneal
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import baseline, replay, unplanned

OVER = Deadline(0.0)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return wide_layers(1500)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_without_any_time_a_plan_of_many_layers_is_near_the_bound(
    graph: Graph, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved sets mixed layer by layer come first, and have time of their own."""
    monkeypatch.setattr(anneal, "_MIXED", 1.0)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    budget = int(share * unplanned(graph).peak)
    found = anneal.plan(problem, budget, anneal.Options(seconds=0.0))
    once = sum(op.time for op in graph.ops)
    assert found.met and once + found.extra <= 1.005 * time_bound(graph, budget)


def test_few_replays_find_how_many_layers_are_mixed(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    calls = []
    cost = EvictionProblem.cost

    def counted(self: EvictionProblem, *args: object) -> object:
        calls.append(1)
        return cost(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EvictionProblem, "cost", counted)
    assert next(min_cut.between(problem, unplanned(graph).peak // 2)).met
    assert len(calls) <= 16


def test_cuts_are_taken_once_for_all_budgets(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    peak = unplanned(graph).peak
    first = [d.extra for d in min_cut.between(problem, peak // 2)]
    known = len(problem.archive.cuts)
    assert [d.extra for d in min_cut.between(problem, peak // 2)] == first
    assert len(problem.archive.cuts) == known


def test_at_its_deadline_a_bound_is_less_and_still_a_bound(graph: Graph) -> None:
    budget = unplanned(graph).peak // 2
    least, most = lower_bound(graph, deadline=OVER), lower_bound(graph)
    assert max(Relaxation(graph).own) <= least <= most
    once = math.fsum(op.time for op in graph.ops)
    assert once <= time_bound(graph, budget, deadline=OVER) < time_bound(graph, budget)


@pytest.mark.parametrize("name", ["best", "cuts", "beam"])
def test_at_its_deadline_an_order_is_legal(name: str) -> None:
    graph = wide_layers(40)
    assert is_legal(graph, run.order(name, graph, OVER))
    assert {f for f in planner(name, "order").options.__dataclass_fields__} >= {"seconds"}


def test_a_minimum_cut_that_is_stopped_says_less_than_the_cut_has() -> None:
    rng = np.random.default_rng(0)
    n, m = 200, 2000
    tail, head = (rng.integers(0, n, m).astype(np.int32) for _ in range(2))
    capacity = rng.integers(1, 1000, m)
    value, near = _core.min_cut(n, tail, head, capacity, 0, 1)
    less, none = _core.min_cut(n, tail, head, capacity, 0, 1, 0.0)
    assert 0 <= less <= value and len(near) == n and len(none) == 0


def test_saved_sets_end_at_the_deadline(graph: Graph) -> None:
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    assert not len(problem.engine.priced_cut(problem.boundary, 1e6, 0.0))
    assert len(list(min_cut.family(problem, 0, deadline=OVER))) == 3  # at price 0 nothing flows
    assert len(list(min_cut.between(problem, unplanned(graph).peak // 2, OVER))) == 0


def test_what_is_reached_along_edges() -> None:
    edges = csr([(1, 2), (3,), (3,), (), (0,)])
    assert np.flatnonzero(reached((1, 2), edges)).tolist() == [3]
    assert np.flatnonzero(reached((4,), edges)).tolist() == [0, 1, 2, 3]
    assert not reached((), edges).any()


def test_facts_of_a_graph_are_found_once(graph: Graph) -> None:
    assert unplanned(graph) is unplanned(graph) == replay(graph, baseline(graph))
    assert predecessors(graph) is predecessors(graph) and dependents(graph) is dependents(graph)


def test_planning_leaves_the_collector_as_it_was() -> None:
    graph = wide_layers(6)
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            default.plan(graph, "60%", default.Options(seconds=1.0, work=100_000))
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_a_search_has_a_part_of_the_time_even_where_the_rest_takes_longer_than_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rest in (0.0, 1e12):
        monkeypatch.setattr(clock, "_REST", rest)
        made = clock.Clock(1000.0)
        made.replayed(unplanned(wide_layers(40)))
        assert made.began + 200 < made.search.at <= made.deadline.at
        assert (made.search.at == made.deadline.at) is (rest == 0.0)
