"""What nothing reads before it is evicted runs later instead of twice."""

from __future__ import annotations

import numpy as np
import pytest

from support.strategies import random_graph
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Plan
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.layout import lay_out
from tightship.simulate import baseline, replay
from tightship.verify import verify

HUGE = 1 << 60


def late_pair(control: tuple[int, ...] = ()) -> Graph:
    """x -> a -> b, both read only at the end; c and d in between."""
    names = ("x", "a", "b", "c", "d", "e")
    storages = tuple(Storage(n, 64) for n in names)
    values = tuple(Value(n, i) for i, n in enumerate(names))
    ops = (
        Op("a", "t", (0,), (1,), time=1.0),
        Op("b", "t", (1,), (2,), time=1.0),
        Op("c", "t", (0,), (3,), time=1.0, control=control),
        Op("d", "t", (3,), (4,), time=1.0),
        Op("e", "t", (2, 4), (5,), time=1.0),
    )
    return Graph(ops, values, storages, (0,), (5,))


def evicted(problem: EvictionProblem, *storages: int) -> np.ndarray:
    return np.array([int(s in storages) for s in problem.gaps[:, 0]], dtype=np.uint8)


def test_a_chain_that_is_read_late_moves_as_a_whole_and_costs_nothing() -> None:
    graph = late_pair()
    problem = EvictionProblem(graph, tuple(range(5)))
    bits = evicted(problem, 2)
    steps = problem.steps(bits)
    assert [(s.kind, s.op) for s in steps if s.kind != "free"] == [("compute", k) for k in (2, 3, 0, 1, 4)]
    found = problem.cost(bits, HUGE)
    assert (found.extra, found.runs) == (0.0, 0)
    assert replay(graph, steps).time == replay(graph, baseline(graph)).time


def test_what_another_op_waits_for_stays_at_its_place() -> None:
    graph = late_pair(control=(1,))
    problem = EvictionProblem(graph, tuple(range(5)))
    found = problem.cost(evicted(problem, 2), HUGE)
    assert found.runs == 1 + 1  # a was gone after b had read it


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_any_decision_are_verified_and_cost_what_the_engine_said(seed: int) -> None:
    graph = random_graph(seed, 10 + seed)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    rng = np.random.default_rng(seed)
    base = replay(graph, baseline(graph))
    for _ in range(6):
        bits = (
            (rng.random(len(problem.gaps)) < rng.random()) * rng.integers(1, 3, len(problem.gaps))
        ).astype(np.uint8)
        found = problem.cost(bits, HUGE)
        if not found.valid:
            continue
        steps = problem.steps(bits)
        line = replay(graph, steps)
        assert (line.peak, line.time) == (found.peak, pytest.approx(base.time + found.extra))
        layout = lay_out(graph, steps)
        made = Plan(
            graph.digest, steps, layout.residences, None, line.peak, base.peak, graph.static_bytes,
            layout.arena, layout.handed, 0, line.time, base.time,
        )  # fmt: skip
        assert [v for v in verify(graph, made) if "bound" not in v.code] == []
