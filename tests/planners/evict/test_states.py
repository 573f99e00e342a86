"""Paths through states: the best plan of a small graph, as trying everything by other means finds it."""

from __future__ import annotations

import pytest

from support.optimum import optimum
from support.strategies import random_graph
from tightship.errors import BadInput
from tightship.frontends.builder import GraphBuilder
from tightship.graph import Graph, Op
from tightship.planners import run
from tightship.planners.evict import states
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.layout import lay_out
from tightship.simulate import baseline, replay
from tightship.verify import check

MODES = {"peak": (False, False), "arena": (True, False), "out": (True, True)}


def problem_of(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def graphs(mode: str) -> list[Graph]:
    if mode == "peak":
        return [random_graph(seed, n, updates=0.1) for seed in range(15) for n in (3, 4, 5, 6)]
    return [
        random_graph(seed, n, updates=0.1, largest=3, requests=0.0) for seed in range(5) for n in (2, 3, 4)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_the_fastest_plan_is_found_for_every_optimum_and_none_below_the_least(mode: str) -> None:
    place, out = MODES[mode]
    o, count, costly = states.Options(place=place, hand_out=out), 0, 0
    for graph in graphs(mode):
        try:
            points = optimum(graph, place=place, hand_out=out, most=800 if place else 20_000)
        except RuntimeError:
            continue
        problem = problem_of(graph)
        for point in points:
            found = states.shortest(problem, point.nbytes, o)
            assert found.complete and found.steps is not None, graph.name
            assert found.extra == pytest.approx(point.extra), graph.name
            line = replay(graph, found.steps)
            check(graph, run.decision_plan(graph, found.steps, line))
            assert line.peak <= point.nbytes
            assert line.time - replay(graph, baseline(graph)).time == pytest.approx(point.extra)
            if place:
                layout = lay_out(graph, found.steps, hand_out=out)
                assert graph.static_bytes + layout.arena + layout.handed <= point.nbytes, graph.name
            count, costly = count + 1, costly + (point.extra > 0)
        below = states.shortest(problem, points[-1].nbytes - 1, o)
        assert below.complete and below.steps is None, graph.name
    assert count >= 8 and (place or costly >= 6)


def test_without_work_nothing_is_found_and_nothing_proved() -> None:
    graph = random_graph(3, 6)
    found = states.shortest(problem_of(graph), 1 << 40, states.Options(work=1))
    assert found.steps is None and not found.complete


def test_a_path_that_takes_longer_than_the_cutoff_is_no_path() -> None:
    graph = next(g for g in graphs("peak") if optimum(g)[-1].extra > 0)
    least = optimum(graph)[-1]
    for cutoff, there in ((least.extra, True), (least.extra / 2, False)):
        found = states.shortest(problem_of(graph), least.nbytes, states.Options(), cutoff)
        assert (found.steps is not None) == there and found.complete


def test_graphs_of_more_ops_than_bits_are_kept_as_they_are() -> None:
    graph = random_graph(1, 70)
    problem = problem_of(graph)
    assert not states.searchable(problem)
    assert not states.plan(problem, 0).met
    with pytest.raises((ValueError, BadInput), match="64"):
        states.shortest(problem, 0, states.Options())


@pytest.mark.parametrize("mode", MODES)
def test_an_op_with_many_results_costs_no_more_work_than_there_may_be(mode: str) -> None:
    """Which of 40 results stay after a recomputation is a choice of 2^40 for one op."""
    b = GraphBuilder()
    many = [b.tensor(f"m{k}", 512) for k in range(40)]
    more, last = b.tensor("more", 512), b.tensor("last", 512)
    b.op(Op("split", "split", (), tuple(many), time=1.0))
    b.op(Op("one", "one", tuple(many[:1]), (more,), time=1.0))
    b.op(Op("all", "all", (*many, more), (last,), time=1.0))
    place, out = MODES[mode]
    found = states.shortest(
        problem_of(b.graph([last], "many")), 40 * 512, states.Options(work=10_000, place=place, hand_out=out)
    )
    assert found.steps is None and found.work <= 10_000
