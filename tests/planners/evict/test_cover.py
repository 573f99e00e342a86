"""Graphs without layers, and lives of every length: the excess is covered in a few hundred replays, and every stage
of the search ends in time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chains import wide_layers
from support.strategies import graphs
from tightship.graph import Graph, Op, Storage, Value
from tightship.options import Deadline
from tightship.planners import default, run
from tightship.planners.evict import anneal, ladder
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.order import best, lpmf
from tightship.simulate import replay, unplanned
from tightship.verify import verify

KIB = 1024


def irregular(ops: int, seed: int = 0, phases: bool = False) -> Graph:
    """Ops that read one to three results, mostly of late, some from long ago; with ``phases`` each is read again by a
    backward, in the opposite order."""
    rng = random.Random(seed)
    storages, made = [Storage("x", 64 * KIB, "input")], list[Op]()

    def op(reads: tuple[int, ...], size: int, phase: str) -> None:
        storages.append(Storage(f"s{len(made)}", size))
        made.append(
            Op(f"op{len(made)}", "test", reads, (len(storages) - 1,), time=rng.random() * 1e-3, phase=phase)
        )

    forward = ops // 2 if phases else ops
    for _ in range(forward):
        last = len(storages) - 1
        near = [max(0, last - int(rng.expovariate(0.4))) for _ in range(rng.randint(1, 3))]
        old = rng.random() < 0.25
        op(
            tuple(dict.fromkeys([*near, rng.randrange(last + 1)] if old else near)),
            64 * rng.randint(1, 16_000),
            "forward",
        )
    for k in reversed(range(forward)) if phases else ():
        op((len(storages) - 1, k + 1), storages[k + 1].size, "backward")
    values = tuple(Value(s.name, n) for n, s in enumerate(storages))
    return Graph(tuple(made), values, tuple(storages), (0,), (len(storages) - 1,))


def problem_of(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


@pytest.mark.parametrize(
    "share, phases", [(0.95, False), (0.9, False), (0.9, True), (0.8, True), (0.7, True)]
)
def test_excess_is_covered_in_a_few_hundred_replays(share: float, phases: bool) -> None:
    graph = irregular(2_000, phases=phases)
    problem = problem_of(graph)
    budget = int(share * unplanned(graph).peak)
    found = problem.decision(problem.engine.cover(budget, problem.nothing(), 10**9, 600.0, None))
    assert found.met and found.work < 100 * len(graph.ops)
    line = replay(graph, problem.steps(found.evict))
    assert line.peak == found.peak <= budget
    assert line.time == pytest.approx(unplanned(graph).time + found.extra)


@given(graphs(40), st.integers(30, 99), st.integers(0, 1 << 20), st.booleans())
def test_covering_never_makes_things_worse(graph: Graph, share: int, work: int, deep: bool) -> None:
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), deep=deep)
    kept = problem.cost(problem.nothing(), 0)
    budget = kept.peak * share // 100
    result = problem.engine.cover(budget, problem.nothing(), work, 60.0, None)
    found = problem.decision(result)
    assert found.valid and found.peak <= kept.peak
    exact = problem.cost(found.evict, budget)
    assert (exact.peak, exact.extra, exact.met) == (found.peak, found.extra, found.met)
    again = problem.engine.cover(budget, problem.nothing(), work, 60.0, None)
    assert np.array_equal(again[0], found.evict) and again[2] == found.work
    assert verify_steps(graph, problem, found.evict) == []


def verify_steps(graph: Graph, problem: EvictionProblem, evict: Any) -> list[Any]:
    steps = problem.steps(evict)
    return verify(graph, run.decision_plan(graph, steps, replay(graph, steps)))


def test_covering_ends_at_its_limits_with_what_it_has() -> None:
    graph = irregular(1_000)
    problem, budget = problem_of(graph), unplanned(graph).peak // 2
    none = problem.engine.cover(budget, problem.nothing(), 0, 600.0, None)
    assert not none[0].any() and not none[3]
    told: list[int] = []

    def stop(peak: int, extra: float, met: bool) -> bool:
        told.append(peak)
        return True

    problem.engine.cover(budget, problem.nothing(), 10**9, 600.0, stop)
    assert len(told) == 1


def test_a_plan_of_an_irregular_graph_fits() -> None:
    graph = irregular(1_500)
    made = default.plan(graph, "92%", default.Options(seconds=600.0, work=12_000_000, order="given"))
    assert made.met and made.count("recompute") > 0 and verify(graph, made) == []


def test_where_work_does_not_do_for_every_row_the_ladder_begins_with_batches() -> None:
    graph = irregular(2_000, phases=True)
    problem, budget = problem_of(graph), int(0.8 * unplanned(graph).peak)
    work = 400 * len(graph.ops)
    assert work < len(problem.rows[0]) * len(graph.ops)
    found = ladder.climb(problem, budget, problem.nothing(), ladder.Options(work, 600.0))
    assert found.met and found.work <= work


def test_while_nothing_fits_seeds_end_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(wide_layers(60))
    looked: list[int] = []
    cost = EvictionProblem.cost

    def counted(self: EvictionProblem, *args: object) -> object:
        looked.append(1)
        return cost(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EvictionProblem, "cost", counted)
    counts = []
    for least in (0.0, 600.0):
        monkeypatch.setattr(anneal, "_MIXED", least)
        looked.clear()
        assert not anneal.plan(problem, 1, anneal.Options(seconds=0.0)).met
        counts.append(len(looked))
    assert counts[0] <= 8 < counts[1]


def test_a_list_scheduler_that_has_no_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = irregular(200, seed=1)
    began: list[int] = []
    schedule = lpmf.schedule
    monkeypatch.setattr(lpmf, "schedule", lambda *a: began.append(1) or schedule(*a))
    run.order("best", graph, Deadline.after(600.0))
    assert began == [1]
    monkeypatch.setattr(best, "_SCHEDULED", 600.0)
    run.order("best", graph, Deadline.after(600.0))
    assert began == [1]
