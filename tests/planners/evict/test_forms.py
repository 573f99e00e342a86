"""Packing and copying out beside recomputation: the engine costs what the replay of its steps costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.chains import chain
from support.strategies import random_graph
from tightship.analysis.bounds import lower_bound
from tightship.graph import Graph, Op, Storage, Value
from tightship.machine import Machine
from tightship.plan import Plan
from tightship.planners.evict import anneal, ladder
from tightship.planners.evict.problem import COMPRESS, KEEP, OFFLOAD, EvictionProblem
from tightship.planners.layout import lay_out
from tightship.simulate import baseline, extra_bytes, replay
from tightship.verify import verify

HUGE = 1 << 60
ALL = ("recompute", "compress", "offload")
SLOW = Machine(offload=300.0, fetch=200.0, latency=0.1, pack=(900.0,) * 9, unpack=(700.0,) * 9)
BUSY = replace(SLOW, begin=0.07, beside=0.002)


def problem_of(graph: Graph, machine: Machine = SLOW, **more: object) -> EvictionProblem:
    graph = replace(graph, machine=machine)
    return EvictionProblem(graph, tuple(range(len(graph.ops))), **({"means": ALL, "lossy": True} | more))


def checked(problem: EvictionProblem, bits: np.ndarray, limit: int) -> None:
    graph = problem.graph
    found = problem.cost(bits, limit)
    if not found.valid:
        return
    base = replay(graph, baseline(graph))
    steps = problem.steps(bits, limit)
    line = replay(graph, steps)
    assert line.peak == found.peak
    assert line.time == pytest.approx(base.time + found.extra)
    assert line.host_peak == found.host
    layout = lay_out(graph, steps)
    made = Plan(
        graph.digest, steps, layout.residences, None, line.peak, base.peak, graph.static_bytes, layout.arena,
        layout.handed, 0, line.time, base.time, host=layout.host, lossy=True,
    )  # fmt: skip
    assert verify(graph, made) == []


@pytest.mark.parametrize("seed", range(60))
def test_any_decision_costs_what_its_steps_cost_and_is_verified(seed: int) -> None:
    problem = problem_of(random_graph(seed, 10 + seed), (SLOW, BUSY)[seed % 2])
    base = replay(problem.graph, baseline(problem.graph))
    rng = np.random.default_rng(seed)
    for kinds in ((KEEP, COMPRESS), (KEEP, OFFLOAD), tuple(range(6)), (0, 0, *range(6))):
        bits = rng.choice(np.array(kinds, np.uint8), len(problem.gaps))
        for part in (2.0, 0.7):
            checked(
                problem,
                bits,
                problem.graph.static_bytes + int(part * (base.peak - problem.graph.static_bytes)),
            )


@pytest.mark.parametrize("seed", [0, 11, 19, 21, 37])
def test_many_copies_beside_ops_that_run_later(seed: int) -> None:
    """What came back for an op that runs later goes again; what is sent while it comes back is waited for."""
    graph = random_graph(seed, 30)
    rng = np.random.default_rng(5)
    for machine in (SLOW, BUSY, Machine(), Machine(begin=1e-3)):
        problem = EvictionProblem(
            replace(graph, machine=machine), tuple(range(len(graph.ops))), means=ALL, lossy=True
        )
        for _ in range(60):
            others = rng.choice([0, 0, 1, 2, 3, 4], len(problem.gaps))
            bits = np.where(rng.random(len(problem.gaps)) < 0.4, OFFLOAD, others).astype(np.uint8)
            checked(problem, bits, HUGE)


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_what_is_unpacked_for_an_op_that_runs_later_goes_again(seed: int) -> None:
    """Also where nothing is copied out, and it cannot be made again."""
    problem = problem_of(random_graph(seed, 30), means=("recompute", "compress"))
    rng = np.random.default_rng(seed)
    for _ in range(60):
        others = rng.choice([0, 1, 2, 3], len(problem.gaps))
        bits = np.where(rng.random(len(problem.gaps)) < 0.4, COMPRESS, others).astype(np.uint8)
        checked(problem, bits, HUGE)


def test_a_transfer_that_overlaps_costs_nothing() -> None:
    graph = replace(chain(20), machine=Machine(offload=1e12, fetch=1e12, latency=0.0))
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), means=("offload",))
    bits = np.where(problem.gaps[:, 2] - problem.gaps[:, 1] > 6, OFFLOAD, KEEP).astype(np.uint8)
    found = problem.cost(bits, HUGE)
    assert found.extra == pytest.approx(0.0, abs=1e-6)
    assert found.peak < replay(graph, baseline(graph)).peak
    assert found.host > 0


def touched(graph: Graph) -> int:
    """The most that one op touches, and results at the end: in this order nothing can need less."""
    uses, size = graph.uses, [s.size for s in graph.storages]
    rows = [{*uses.reads[k], *uses.defines[k]} - graph.static for k in range(len(graph.ops))]
    bytes_ = [sum(size[s] for s in row) + extra_bytes(op) for row, op in zip(rows, graph.ops, strict=True)]
    return graph.static_bytes + max(*bytes_, sum(size[s] for s in graph.kept - graph.static))


@pytest.mark.parametrize("seed", range(40))
def test_copies_reach_every_limit_down_to_what_one_op_touches(seed: int) -> None:
    """Also where a copy has to be waited for at once, and where the contents are still to be written to."""
    problem = problem_of(
        random_graph(seed, 10 + seed), (SLOW, BUSY)[seed % 2], means=("recompute", "offload")
    )
    graph, least = problem.graph, touched(problem.graph)
    base = replay(graph, baseline(graph)).peak
    for limit in (least, (least + base) // 2):
        found = problem.cost(problem.wherever(OFFLOAD), limit)
        assert found.valid and found.peak <= max(limit, least)
        checked(problem, found.evict, limit)
    assert anneal.plan(problem, least, anneal.Options(work=60_000)).met


def test_what_copies_take_from_ops_is_paid_for_each_and_small_ones_are_not_made() -> None:
    """Ops of 1 s, copies of 0.1 s; each takes 0.5 s from the ops: to run an op of less again is cheaper."""
    graph = chain(20)
    free, dear = (Machine(offload=6400.0, fetch=6400.0, latency=0.09, begin=b) for b in (0.0, 0.5))
    found = {}
    for machine in (free, dear):
        problem = problem_of(replace(graph, ops=tuple(replace(o, time=1.0) for o in graph.ops)), machine)
        bits = np.where(problem.gaps[:, 2] - problem.gaps[:, 1] > 6, OFFLOAD, KEEP).astype(np.uint8)
        copies = sum(s.kind in ("offload", "fetch") for s in problem.steps(bits))
        assert copies and problem.cost(bits, HUGE).extra == pytest.approx(machine.begin * copies)
        base = replay(problem.graph, baseline(problem.graph)).peak
        found[machine.begin] = ladder.plan(problem, base * 2 // 3, ladder.Options(work=1_000_000))
    assert found[0.0].met and found[0.5].met
    assert found[0.0].extra == pytest.approx(0.0) and found[0.0].host > 0
    assert found[0.5].extra > 0.0


def test_what_is_not_left_to_the_planner_is_decided_so() -> None:
    graph = chain(12)
    kept = {s: ("keep",) for s in range(1, 4)}
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), only=kept)
    base = replay(graph, baseline(graph)).peak
    found = anneal.plan(problem, base * 3 // 4, anneal.Options(work=300_000))
    again = {s for step in problem.steps(found.evict) for s in step.storages if step.kind == "recompute"}
    assert found.met and again and not again & set(kept)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), only={3: ("offload",)})
    assert problem.boundary == 12
    sent = [
        s for step in problem.steps(problem.nothing(), base) for s in step.storages if step.kind == "offload"
    ]
    assert sent == [3]


def test_more_ways_out_of_memory_reach_less_at_no_more_time() -> None:
    graph = chain(40)
    base = replay(graph, baseline(graph)).peak
    few = anneal.Options(work=2_000_000)
    order = tuple(range(len(graph.ops)))
    again = anneal.plan(EvictionProblem(graph, order), base // 3, few)
    both = anneal.plan(EvictionProblem(graph, order, means=ALL, lossy=True), base // 3, few)
    assert again.met and both.met and both.extra <= again.extra


def test_the_host_pool_is_not_exceeded() -> None:
    graph = replace(chain(30), machine=Machine(offload=1e12, fetch=1e12, latency=0.0))
    base = replay(graph, baseline(graph)).peak
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), means=("offload",), host=64 * 5)
    found = ladder.plan(problem, base - 64 * 4, ladder.Options(work=1_000_000))
    assert found.met and replay(graph, problem.steps(found.evict, base - 64 * 4)).host_peak <= 64 * 5


def test_results_may_wait_outside_until_the_end() -> None:
    """The op at the end needs room that the results before it have, who are wanted only after it."""
    ops = tuple(Op(f"f{k}", "f", (0,), (k + 1,), time=1.0, workspace=400 if k == 5 else 0) for k in range(6))
    storages = (Storage("x", 64, "input"), *(Storage(f"y{k}", 64) for k in range(6)))
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    graph = Graph(ops, values, storages, (0,), tuple(range(1, 7)))
    problem = EvictionProblem(graph, tuple(range(6)), means=("offload",))
    bound = lower_bound(graph, least=dict.fromkeys(range(7), 0))
    found = ladder.plan(problem, bound, ladder.Options(work=1_000_000))
    assert found.met and found.peak == bound == 64 + 64 + 400
    assert replay(graph, baseline(graph)).peak == 7 * 64 + 400
    checked(problem, found.evict, bound)
