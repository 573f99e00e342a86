"""Blocks of a chain: what each costs adds up, and the program takes the best of what adds up."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from support.chains import chain as line
from support.strategies import random_graph
from tightship.baselines import chain
from tightship.baselines.chain import Chain
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.evict.problem import DROP, EVICT, KEEP, PASS, EvictionProblem
from tightship.simulate import baseline, replay

HUGE = 1 << 60


def layers(count: int, mask: bool = False) -> EvictionProblem:
    """Layers x -> a -> w -> x' with a dear op, a large cheap one and an addition; the backward reads x, a and w. With
    ``mask`` something small that is made first goes to all of them."""
    storages, ops = [Storage("x0", 64, "input")], []

    def op(name: str, size: int, time: float, reads: tuple[int, ...], phase: str) -> int:
        storages.append(Storage(name, size))
        ops.append(Op(name, name[0], reads, (len(storages) - 1,), time=time, phase=phase))
        return len(storages) - 1

    x, made = 0, []
    common = (op("mask", 32, 1.0, (x,), "forward"),) if mask else ()
    for k in range(count):
        a = op(f"a{k}", 64, 8.0, (x, *common), "forward")
        w = op(f"w{k}", 256, 1.0, (a,), "forward")
        after = op(f"x{k + 1}", 64, 1.0, (x, w), "forward")
        made.append((x, a, w))
        x = after
    last = loss = op("loss", 64, 1.0, (x,), "forward")
    for k, (x, a, w) in reversed(list(enumerate(made))):
        last = op(f"b{k}", 64, 2.0, (last, w, a), "backward")
        last = op(f"c{k}", 64, 2.0, (last, x), "backward")
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    graph = Graph(tuple(ops), values, tuple(storages), (0,), (loss, last))
    return EvictionProblem(graph, tuple(range(len(ops))))


@pytest.mark.parametrize("mask", [False, True])
def test_a_chain_is_cut_where_only_one_storage_goes_on(mask: bool) -> None:
    problem = layers(8, mask)
    found = Chain(problem, 16)
    assert found.length >= 8
    for c in found.cuts[1:-1]:
        across = [s for s in range(len(found.size)) if 0 <= found.made[s] < c <= found.read[s]]
        names = {problem.graph.storages[s].name for s in across} - {"mask"}
        assert len(names) == 1
        assert all(
            problem.graph.storages[s].size == 64 for s in across if problem.graph.storages[s].name != "mask"
        )


def test_what_blocks_cost_adds_up() -> None:
    """Any choice beside any other: bytes and seconds are those of the engine."""
    problem = layers(6)
    blocks = Chain(problem, 12)
    choices = blocks.choices(10)
    assert max(map(len, choices)) > 1
    rng = np.random.default_rng(0)
    for _ in range(100):
        pick = [row[rng.integers(len(row))] for row in choices]
        bits = problem.nothing()
        for gaps, c in zip(blocks.gaps, pick, strict=True):
            bits[gaps] = c.bits
        before = np.cumsum([0, *(c.keeps for c in pick)])
        found = problem.cost(bits, HUGE)
        assert found.extra == pytest.approx(sum(c.time for c in pick))
        assert found.peak <= max(int(b) + c.peak for b, c in zip(before, pick, strict=False))


def test_no_product_of_choices_is_better() -> None:
    """Among those that need no more than the limit by what the blocks need each."""
    problem = layers(5)
    blocks = Chain(problem, 10)
    every = []
    for pick in product(*blocks.choices(10)):
        before = np.cumsum([0, *(c.keeps for c in pick)])
        needs = max(int(b) + c.peak for b, c in zip(before, pick, strict=False))
        every.append((needs, sum(c.time for c in pick)))
    for limit in sorted({needs for needs, _ in every}):
        least = min(seconds for needs, seconds in every if needs <= limit)
        found = chain.plan(layers(5), limit, chain.Options(blocks=10, slots=2000))
        assert found.met and found.extra <= least + 1e-9


def test_in_little_memory_runs_of_blocks_are_run_again_inside_of_one_another() -> None:
    graph = line(40)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    everything = replay(graph, baseline(graph)).peak
    kept_by_roots = 64 * (2 * 7 + 6)
    assert kept_by_roots < everything // 2
    found = chain.plan(problem, kept_by_roots)
    assert found.met and found.extra <= 80
    assert {KEEP, EVICT} <= set(found.evict.tolist()) <= {KEEP, EVICT, PASS, DROP}


def test_where_there_is_no_chain_nothing_is_proposed() -> None:
    forward = line(8)
    rows = tuple(op for op in forward.ops if op.phase == "forward")
    graph = Graph(
        rows, forward.values[: len(rows) + 1], forward.storages[: len(rows) + 1], (0,), (len(rows),)
    )
    assert not list(chain.family(EvictionProblem(graph, tuple(range(len(rows)))), 1))


@pytest.mark.parametrize("seed", range(12))
def test_any_graph_may_be_asked_about(seed: int) -> None:
    graph = random_graph(seed, 50)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    base = replay(graph, baseline(graph)).peak
    for found in chain.family(problem, graph.static_bytes + (base - graph.static_bytes) // 2):
        if found.valid:
            assert replay(graph, problem.steps(found.evict)).peak == found.peak
