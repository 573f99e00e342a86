"""Random ops run again from saved states: planners decide as if they were pure, the verifier sees the states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.chains import chain
from support.lowering import costs
from tightship.analysis.bounds import time_bound
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.planners.evict import greedy
from tightship.planners.evict.lowering import pure_random_ops, save_random_states
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.layout import lay_out
from tightship.simulate import baseline, replay
from tightship.verify import verify

STATE = 64


def dice(n: int) -> Graph:
    """A chain whose every third forward op is random."""
    graph = chain(n, 256)
    ops = [
        replace(op, random=True, state=STATE) if op.phase == "forward" and k % 3 == 0 else op
        for k, op in enumerate(graph.ops)
    ]
    assert any(op.random for op in ops)
    return graph.with_ops(tuple(ops))


@pytest.mark.parametrize("part", [0.8, 0.5])
def test_what_is_drawn_again_has_its_state_saved_once_and_freed_last(part: float) -> None:
    graph = dice(30)
    problem = EvictionProblem(pure_random_ops(graph), tuple(range(len(graph.ops))))
    base = replay(graph, baseline(graph)).peak
    limit = graph.static_bytes + int(part * (base - graph.static_bytes))
    found = greedy.plan(problem, limit)
    steps = save_random_states(graph, problem.steps(found.evict))
    again = {s.op for s in steps if s.kind == "recompute" and graph.ops[s.op].random}
    assert again
    assert {s.op for s in steps if s.saves} == again == {s.op for s in steps if s.form == "state"}
    line = replay(graph, steps)
    assert line.peak <= found.peak + STATE * len(again)
    layout = lay_out(graph, steps)
    plan = Plan(
        graph.digest, steps, layout.residences, arena=layout.arena, handed=layout.handed, **costs(graph, steps)
    )  # fmt: skip
    assert verify(graph, plan) == []
    bare = replace(plan, steps=tuple(replace(s, saves=False) for s in steps))
    assert "impure-recompute" in {v.code for v in verify(graph, bare)}


def test_waits_follow_the_steps_they_are_for() -> None:
    graph = dice(6)
    k = next(k for k, op in enumerate(graph.ops) if op.random)
    (s,) = graph.uses.defines[k]
    first = [*baseline(graph)[: k + 1], Step("free", storages=(s,)), Step("recompute", op=k, storages=(s,))]
    steps = (*first, Step("offload", storages=(s,), stream=1, waits=(len(first) - 1,)))
    out = save_random_states(graph, steps)
    assert out[-2] == Step("free", op=k, form="state")
    assert out[-1].waits == (len(out) - 2,)  # the copy may lie where the state was


def test_a_state_larger_than_what_it_brings_back_is_not_saved() -> None:
    graph = dice(6)
    heavy = graph.with_ops(tuple(replace(op, state=op.state * 2) for op in graph.ops))
    assert pure_random_ops(heavy) == heavy and pure_random_ops(graph) != graph


def test_nothing_random_nothing_changed() -> None:
    graph = chain(8)
    assert pure_random_ops(graph) == graph and save_random_states(graph, baseline(graph)) == baseline(graph)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_prices_a_saved_state_as_the_replay_does(seed: int) -> None:
    graph = dice(30)
    graph = replace(graph, machine=replace(graph.machine, state=1 / 64))
    chained = tuple(k for k, op in enumerate(graph.ops) if op.random)
    problem = EvictionProblem(pure_random_ops(graph), tuple(range(len(graph.ops))), chained=chained)
    evict = np.random.default_rng(seed).integers(0, 2, len(problem.gaps), dtype=np.uint8)
    found = problem.cost(evict, 1 << 60)
    steps = save_random_states(graph, problem.steps(evict))
    again = [s.op for s in steps if s.kind == "recompute" and graph.ops[s.op].random]
    assert again and len(again) == len(set(again))
    line = replay(graph, steps)
    assert found.extra == pytest.approx(line.time - replay(graph, baseline(graph)).time)
    assert time_bound(graph, line.peak) <= line.time
