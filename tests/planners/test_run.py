"""Planners are called in one way, and what they answer is verified whoever wrote them."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.chains import chain
from tightship.errors import VerificationFailed
from tightship.graph import Graph
from tightship.planners import PlannerInfo, default, planner, planners, run, search
from tightship.planners.evict.problem import Decision, EvictionProblem
from tightship.planners.run import EvictPlanner, OrderPlanner, PlacePlanner


def problem(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


@pytest.mark.parametrize(
    ("group", "protocol"), [("order", OrderPlanner), ("evict", EvictPlanner), ("place", PlacePlanner)]
)
def test_all_planners_of_a_group_have_one_signature(group: str, protocol: type) -> None:
    def shape(function: object) -> list[bool]:
        rows = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [p.default is p.empty for p in rows if p.name != "self"]

    for name, info in planners(group).items():
        assert shape(info.plan) == shape(protocol.__call__), name


def test_an_eviction_that_breaks_a_rule_is_refused_by_the_name_of_its_planner() -> None:
    def leaks(
        problem: EvictionProblem, budget: int, options: object = None, progress: object = None
    ) -> Decision:
        kept = problem.cost(problem.nothing(), budget)
        return replace(kept, steps=tuple(s for s in problem.steps(kept.evict) if s.kind != "free"))

    info = replace(planner("keep", "evict"), name="leaks", plan=leaks)
    with pytest.raises(VerificationFailed, match=r"leaks for .*\n.*leak"):
        run.evict(info, problem(chain(6)), 1 << 40)


def test_a_refused_plan_is_no_answer_for_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for a graph has to have been verified: else it would stand in the way wherever it looks faster."""

    def forgets(
        problem: EvictionProblem, budget: int, options: object = None, progress: object = None
    ) -> Decision:
        kept = problem.cost(problem.nothing(), budget)
        steps = list(problem.steps(kept.evict))
        return replace(kept, steps=tuple(s for s in steps if s.kind != "free"), met=True)

    graph, right = chain(40), planner
    o = default.Options(work=100_000, seconds=30.0, hand_out=False, evict="forgets", order="given")
    bad = replace(planner("keep", "evict"), name="forgets", plan=forgets)
    monkeypatch.setattr(
        search, "planner", lambda name, group: bad if name == "forgets" else right(name, group)
    )
    full = default.plan(chain(40), None, replace(o, evict="anneal")).peak
    with pytest.raises(VerificationFailed, match="forgets"):
        default.plan(graph, 10 * full, o)
    assert not any(kept.plans for kept in graph.__dict__["_reached"].values())
    assert default.plan(graph, 10 * full, replace(o, evict="anneal")).met


def test_an_order_that_breaks_a_rule_is_refused_by_the_name_of_its_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backwards(name: str, group: str) -> PlannerInfo:
        return replace(
            planner("sink", "order"), plan=lambda graph, options=None: (*range(len(graph.ops)),)[::-1]
        )

    monkeypatch.setattr(run, "planner", backwards)
    with pytest.raises(VerificationFailed, match="backwards for"):
        run.order("backwards", chain(6))


def test_a_decision_that_cannot_be_carried_out_keeps_everything_where_that_is_asked_for() -> None:
    def invalid(
        problem: EvictionProblem, budget: int, options: object = None, progress: object = None
    ) -> Decision:
        return replace(problem.cost(problem.nothing(), budget), valid=False)

    graph = chain(6)
    info = replace(planner("keep", "evict"), plan=invalid)
    kept = run.evict(info, problem(graph), 1 << 40, or_keep=True)
    assert kept.decision.valid and not kept.decision.runs
    assert default.plan(graph).peak == kept.timeline.peak


def test_what_other_packages_add_is_read_again_only_when_the_import_path_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes longer than a small plan."""
    asked = []
    known = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **by: asked.append(by) or known(**by))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p] + [str(tmp_path)])
    before = planners()
    asked.clear()
    assert all(planners() == before and planners("evict") for _ in range(10))
    assert not asked
    (tmp_path / "another.dist-info").mkdir()
    assert planners() == before
    assert len(asked) == 1
