"""Every eviction planner, found by name: legal steps, honest costs, reproducible."""

from __future__ import annotations

from dataclasses import fields

import pytest

from support.chains import chain
from support.strategies import random_graph
from tightship.graph import Graph
from tightship.planners import PlannerInfo, planner, planners
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import baseline, replay

NAMES = sorted(planners("evict"))


def module(name: str) -> PlannerInfo:
    return planner(name, "evict")


def options(info: PlannerInfo) -> object:
    if info.name == "exact":
        pytest.importorskip("ortools")
    small = {"work": 300_000, "seconds": 20.0, "effort": 0.05}
    return info.options(**{f.name: small[f.name] for f in fields(info.options) if f.name in small})


def graphs() -> list[Graph]:
    return [chain(12), chain(40), *(random_graph(s, 60) for s in range(6))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [0.9, 0.6, 0.3])
def test_steps_replay_to_what_the_planner_believed(name: str, part: float) -> None:
    m = module(name)
    for graph in graphs():
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
        base = replay(graph, baseline(graph))
        limit = graph.static_bytes + int(part * (base.peak - graph.static_bytes))
        found = m.plan(problem, limit, options(m))
        if not found.valid:
            assert not found.met
            continue
        line = replay(graph, found.steps or problem.steps(found.evict))
        assert line.peak == found.peak
        assert line.time == pytest.approx(base.time + found.extra)
        assert found.met == (found.peak <= limit)


@pytest.mark.parametrize("name", NAMES)
def test_enough_memory_costs_nothing(name: str) -> None:
    m = module(name)
    if name == "blocks" or name == "min-cut":
        pytest.skip("a fixed saved set: evicts whatever the limit")
    for graph in graphs():
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
        found = m.plan(problem, replay(graph, baseline(graph)).peak, options(m))
        assert found.met and found.extra == 0


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_and_work_give_the_same_plan(name: str) -> None:
    m = module(name)
    graph = chain(30)
    base = replay(graph, baseline(graph))
    runs = []
    for _ in range(2):
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
        found = m.plan(problem, base.peak // 2, options(m))
        runs.append((found.steps or problem.steps(found.evict), found.extra))
    assert runs[0] == runs[1]


def test_the_default_is_never_worse_than_its_seeds() -> None:
    for graph in graphs():
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
        base = replay(graph, baseline(graph))
        limit = graph.static_bytes + (base.peak - graph.static_bytes) // 2
        best = module("anneal").plan(problem, limit, options(module("anneal")))
        for name in ("keep", "greedy", "blocks", "min-cut"):
            m = module(name)
            assert not m.plan(problem, limit, options(m)).beats(best), name
