"""From decisions to plans: what cannot be carried out reaches no replay, and no planner uses a way without leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tightship
from support.chains import chain
from support.strategies import random_graph
from tightship import api
from tightship.errors import BadInput, Infeasible, TightshipError, Unsupported
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners import planners
from tightship.planners.evict.lowering import Run, decide
from tightship.planners.evict.problem import DROP, MEANS, Decision, EvictionProblem
from tightship.planners.frontier import others
from tightship.verify import verify

EVICT = sorted(set(planners("evict")) - {"exact"})
QUICK = {"seconds": 2.0, "work": 200_000}


def statistics() -> Graph:
    """An op reads running statistics that a later one updates: what it makes cannot be made again."""
    names = ("x", "stat", "h", "u", "f", "f2", "k", "o")
    storages = tuple(Storage(n, 640) for n in names)
    values = tuple(Value(n, k) for k, n in enumerate(names))
    ops = (
        Op("norm", "bn", (0,), (2,), (1,), (1,)),
        Op("use", "mul", (2, 1), (3,)),
        Op("f", "mul", (3,), (4,)),
        Op("f2", "mul", (4,), (5,)),
        Op("norm2", "bn", (5,), (6,), (1,), (1,), phase="backward"),
        Op("b", "mul", (6, 3), (7,), phase="backward"),
    )
    return Graph(ops, values, storages, (0, 1), (7,), "statistics")


def written_late() -> Graph:
    """What a block keeps for the backward is written there: a checkpoint of the block runs its writer too early."""
    storages = tuple(Storage(n, 640) for n in ("x", "a", "b", "c", "d"))
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    ops = (
        Op("a", "mul", (0,), (1,), module="layer.0.x", time=1.0),
        Op("b", "mul", (1,), (2,), module="layer.0.x", time=1.0),
        Op("c", "mul", (2,), (3,), module="layer.1.x", time=1.0),
        Op("read", "mul", (1, 3), (4,), phase="backward", time=1.0),
        Op("write", "add_", (4, 1), (), (1,), phase="backward", time=1.0),
    )
    return Graph(ops, values, storages, (0,), (4,), "written late")


def problem_of(graph: Graph, **fields: object) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))), **fields)  # type: ignore[arg-type]


def test_what_is_not_valid_has_no_steps() -> None:
    problem = problem_of(chain(6))
    good = problem.cost(problem.wherever(DROP), 0)
    assert problem.lower(good) == problem.steps(good.evict)
    for d in (replace(good, valid=False), replace(good, valid=False, steps=problem.lower(good))):
        with pytest.raises(Unsupported, match="cannot be recomputed"):
            problem.lower(d)


def test_runs_that_the_replay_refuses_are_a_decision_that_is_not_valid() -> None:
    graph = chain(4)
    runs = [Run(0, again=True), *(Run(k) for k in range(len(graph.ops)))]
    d = decide(problem_of(graph), 1 << 40, runs)
    assert not d.valid and not d.met


@pytest.mark.parametrize("name", EVICT)
@pytest.mark.parametrize("budget", [None, "100%", "60%", 0])
def test_every_planner_gives_a_verified_plan_or_says_why_not(name: str, budget: object) -> None:
    for graph in (statistics(), written_late(), *(random_graph(seed, 30, stats=0.3) for seed in range(4))):
        try:
            made = api.plan_graph(graph, budget, evict=name, order="given", **QUICK).plan
        except Infeasible as no:
            assert no.best_peak > no.budget or (no.placed or 0) > no.budget
            assert no.best_peak >= no.lower_bound
            continue
        except BadInput as error:
            assert "allow" in str(error)
            continue
        assert verify(graph, made) == []


@pytest.mark.parametrize("name", EVICT)
@pytest.mark.parametrize("allow", ["recompute", "offload", "compress", "recompute,compress"])
def test_no_planner_uses_a_way_without_leave(name: str, allow: str) -> None:
    graph = chain(12)
    try:
        made = api.plan_graph(graph, "70%", evict=name, allow=allow, order="given", **QUICK).plan
    except Infeasible:
        return
    except BadInput as error:
        assert "allow" in str(error)
        return
    assert {k for k in MEANS if made.count(k)} <= set(allow.split(","))


def test_leave_is_the_frame_s_and_what_its_hints_name() -> None:
    graph = chain(12)
    decided = planners("evict")["offload"].plan(problem_of(graph), 0)
    assert isinstance(decided, Decision) and any(s.kind == "offload" for s in decided.steps or ())
    with pytest.raises(BadInput, match=r"allow: .*offload.*allowed: recompute"):
        problem_of(graph).lower(decided)
    assert problem_of(graph, means=("offload",)).lower(decided) == decided.steps
    assert problem_of(graph, only={1: ("offload",)}).lower(decided) == decided.steps
    assert problem_of(graph).lower(decided, means=tuple(MEANS)) == decided.steps


def test_policies_make_again_what_is_written_late() -> None:
    graph = written_late()
    said: list[str] = []
    rows = others(
        problem_of(graph, in_place=False), {"all": frozenset(range(5)), "none": frozenset()}, said.append
    )
    assert {"all", "none", "per block"} <= {o.name for o in rows} and said == []
    assert tightship.frontier(graph, points=3, **QUICK).notes == ()


@pytest.mark.parametrize("name", sorted(set(api.systems()) - {"evict/exact"}))
def test_no_bytes_are_a_budget(name: str) -> None:
    graph = chain(8)
    try:
        made = api.plan_named(graph, name, 0).plan
    except TightshipError:
        return
    assert made.budget == 0 and not made.met
