"""What lies idle at a peak is recomputed for its next use: never more bytes, and plans that are right."""

from __future__ import annotations

import numpy as np
import pytest

from support.strategies import random_graph
from tightship.graph import Graph, Op, Storage, Value
from tightship.options import NEVER
from tightship.plan import Step
from tightship.planners import run
from tightship.planners.evict.problem import EVICT, EvictionProblem
from tightship.planners.shave import shaved
from tightship.simulate import baseline, replay
from tightship.verify import verify


@pytest.mark.parametrize("in_place", (False, True))
def test_never_more_bytes_and_verified(in_place: bool) -> None:
    rng, lower = np.random.default_rng(1), 0
    for seed in range(60):
        graph = random_graph(seed, 10 + seed % 20, updates=0.3)
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))), in_place=in_place)
        bits = problem.nothing()
        bits[((problem.engine.allowed >> EVICT & 1) > 0) & (rng.random(len(bits)) < 0.5)] = EVICT
        steps = problem.steps(bits)
        if not steps:
            continue
        before = replay(graph, steps)
        after = shaved(graph, before, NEVER)
        once = {s for step in after.steps if step.kind == "recompute" for s in step.storages}
        once -= {s for step in steps if step.kind == "recompute" for s in step.storages}
        kept = shaved(graph, before, NEVER, once)
        assert once.isdisjoint(s for step in kept.steps if step.kind == "recompute" for s in step.storages)
        assert after.peak <= before.peak and (
            after is before or after.peak < before.peak or after.time >= before.time
        )
        assert verify(graph, run.decision_plan(graph, after.steps, after)) == []
        lower += after.peak < before.peak
    assert lower >= 10


def layers_with_a_table(layers: int, table: int, large: int) -> Graph:
    """Layers that each read a table once before and once after something large, of which it is no part."""
    names = [("x", 64), ("half", table // 2), ("table", table)]
    ops = [Op("half", "half", (0,), (1,), time=1.0), Op("table", "table", (1,), (2,), time=1.0)]
    last = 0
    for k in range(layers):
        first = len(names)
        names += [(f"a{k}", 64), (f"w{k}", large), (f"b{k}", 64), (f"y{k}", 64)]
        a, w, b, y = range(first, first + 4)
        ops += [
            Op(f"a{k}", "a", (last, 2), (a,), time=1.0),
            Op(f"w{k}", "w", (a,), (w,), time=1.0),
            Op(f"b{k}", "b", (w,), (b,), time=1.0),
            Op(f"y{k}", "y", (b, 2), (y,), time=1.0),
        ]
        last = y
    storages = tuple(Storage(n, size, "temporary" if k else "input") for k, (n, size) in enumerate(names))
    values = tuple(Value(n, k) for k, (n, _) in enumerate(names))
    return Graph(tuple(ops), values, storages, (0,), (last,))


def test_a_table_that_every_layer_reads_is_not_beside_what_is_large() -> None:
    graph = layers_with_a_table(5, 256, 4096)
    before = replay(graph, baseline(graph))
    after = shaved(graph, before, NEVER)
    assert before.peak - after.peak == 256
    assert verify(graph, run.decision_plan(graph, after.steps, after)) == []
    made = [graph.ops[s.op].name for s in after.steps if s.kind == "recompute"]
    assert made == ["half", "table"] * 5  # before the table's use after each of the large ones


def test_what_nothing_reads_any_more_is_freed_where_its_last_use_was() -> None:
    graph = layers_with_a_table(2, 256, 4096)
    steps = list(baseline(graph))
    at = next(i for i, s in enumerate(steps) if s.kind == "free" and 2 in s.storages)
    late = [*steps[:at], *steps[at + 1 :], Step("free", storages=steps[at].storages)]
    assert shaved(graph, replay(graph, late), NEVER).peak == shaved(graph, replay(graph, steps), NEVER).peak
