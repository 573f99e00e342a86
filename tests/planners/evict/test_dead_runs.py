"""No run of which nothing is read before its op runs again."""

from __future__ import annotations

import numpy as np
import pytest

from support.strategies import random_graph
from tightship.analysis.order import is_legal
from tightship.graph import Graph
from tightship.plan import Step
from tightship.planners import run
from tightship.planners.evict.lowering import drop_dead_runs
from tightship.planners.evict.problem import MEANS, EvictionProblem
from tightship.simulate import replay
from tightship.verify import verify


def in_vain(graph: Graph, steps: tuple[Step, ...]) -> int:
    """Runs of pure ops without effects in place of which nothing is read until the next one."""
    uses, found = graph.uses, 0
    for i, step in enumerate(steps):
        if step.kind not in ("compute", "recompute") or not graph.ops[step.op].pure or uses.mutates[step.op]:
            continue
        made = set(step.storages if step.kind == "recompute" else uses.defines[step.op])
        for later in steps[i + 1 :]:
            if later.op == step.op and later.kind == "recompute":
                found += 1
                break
            ran = later.kind in ("compute", "recompute")
            touched = {*uses.reads[later.op], *uses.mutates[later.op]} if ran else set(later.storages)
            if touched & made and later.kind != "free":
                break
    return found


def plans(seed: int, means: tuple[str, ...]):
    graph = random_graph(seed, 8 + seed)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), means=means)
    for deep in (problem, problem.deeper(problem.order)):
        rng = np.random.default_rng(seed)
        choices = [0, *(way for name in means for way in MEANS[name])]
        for _ in range(6):
            evict = rng.choice(choices, size=len(deep.gaps)).astype(np.uint8)
            if deep.cost(evict, 1 << 60).valid:
                yield graph, deep.steps(evict)


@pytest.mark.parametrize("means", [("recompute",), ("recompute", "offload")])
@pytest.mark.parametrize("seed", range(30))
def test_plans_without_runs_in_vain_are_legal_and_no_worse(seed: int, means: tuple[str, ...]) -> None:
    for graph, steps in plans(seed, means):
        kept = drop_dead_runs(graph, steps)
        before, after = replay(graph, steps), replay(graph, kept)
        assert after.peak <= before.peak and after.time <= before.time + 1e-12
        assert verify(graph, run.decision_plan(graph, kept, after)) == []
        assert drop_dead_runs(graph, kept) == kept
        assert is_legal(graph, tuple(step.op for step in kept if step.kind == "compute"))


def test_there_are_such_runs_in_what_searches_decide() -> None:
    rows = [(graph, steps) for seed in range(30) for graph, steps in plans(seed, ("recompute",))]
    before = sum(in_vain(graph, steps) for graph, steps in rows)
    after = sum(in_vain(graph, drop_dead_runs(graph, steps)) for graph, steps in rows)
    assert (
        after < before
    )  # what is left reads what is written over later, or takes the place of what it reads


def test_a_result_that_stays_of_a_run_in_vain_stays_of_the_next_one() -> None:
    """What an op makes beside the result that is let go, and nobody frees, comes of the run that is left."""
    for seed in range(30):
        for graph, steps in plans(seed, ("recompute",)):
            kept = drop_dead_runs(graph, steps)
            there: set[int] = set()
            for step in kept:
                if step.kind == "compute":
                    there |= set(graph.uses.defines[step.op])
                elif step.kind == "recompute":
                    there |= set(step.storages)
                elif step.kind == "free":
                    there -= set(step.storages)
            assert graph.kept - graph.static <= there
