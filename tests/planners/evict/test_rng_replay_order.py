"""Random ops that may run again still draw first in the order of the graph."""

from __future__ import annotations

import pytest

from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.default import Options, plan
from tightship.verify import verify


def drawn(n: int) -> Graph:
    """Masks drawn early and read late only: for recomputation alone, each could be drawn when it is read."""
    names = ["x", *(f"m{k}" for k in range(n)), *(f"y{k}" for k in range(n))]
    storages = tuple(Storage(name, 1 << 16) for name in names)
    values = tuple(Value(name, i) for i, name in enumerate(names))
    ops = [Op(f"m{k}", "draw", (0,), (1 + k,), random=True, state=64, time=1.0) for k in range(n)]
    for k in range(n):
        ops.append(Op(f"y{k}", "y", (1 + n + k - 1 if k else 0, n - k), (1 + n + k,), time=1.0))
    return Graph(tuple(ops), values, storages, (0,), (2 * n,))


@pytest.mark.parametrize("budget", ["40%", "60%", "80%"])
def test_first_draws_keep_their_order(budget: str) -> None:
    graph = drawn(12)
    made = plan(graph, budget, Options(work=300_000, seconds=30.0))
    assert verify(graph, made) == [] and made.met
    first = [s.op for s in made.steps if s.kind == "compute" and graph.ops[s.op].random]
    assert first == sorted(first)
    assert any(s.kind == "recompute" and graph.ops[s.op].random for s in made.steps)


def test_saved_states_are_part_of_what_a_plan_needs() -> None:
    """Where the states that a plan saves are all that is missing, another plan is searched for: never one that is
    slower than those for less."""
    graph = drawn(12)
    o = Options(work=300_000, seconds=30.0, place=False, hand_out=False)
    made = plan(graph, "60%", o)
    assert sum(s.saves for s in made.steps) > 0
    less = plan(graph.with_ops(graph.ops), made.peak * 9 // 10, o)  # nothing is known of it
    for short in (1, 64):
        graph = graph.with_ops(graph.ops)
        again = plan(graph, made.peak - short, o)
        assert again.met and verify(graph, again) == []
        assert again.time <= less.time
