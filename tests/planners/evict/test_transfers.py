"""The baselines that copy out, or pack, without running anything again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.chains import chain
from support.lowering import costs
from support.verifying import decided
from tightship.graph import Graph, Value
from tightship.machine import Machine
from tightship.planners.evict import compress, offload
from tightship.planners.evict.lowering import longest_transfers, lower, overlap
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.layout import lay_out
from tightship.simulate import baseline, replay
from tightship.verify import verify


def problem(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def quick(graph: Graph) -> Graph:
    """Ops take a second; a copy of 64 bytes half a second."""
    return replace(graph, machine=Machine(offload=128.0, fetch=128.0, latency=0.0))


def test_copies_beside_the_ops_cost_nothing() -> None:
    graph = quick(chain(20))
    base = replay(graph, baseline(graph))
    found = offload.plan(problem(graph), base.peak // 2)
    assert found.met and found.extra == 0 and found.steps is not None
    assert not {s.kind for s in found.steps} & {"recompute", "compress"}
    plan = replace(decided(found.steps, graph), **costs(graph, found.steps))
    assert plan.peak == found.peak and verify(graph, plan) == []


def test_when_overlap_is_too_much_ops_wait_and_the_wait_is_what_it_costs() -> None:
    graph = replace(chain(20), machine=Machine(offload=64 / 4, fetch=64 / 4, latency=0.0))
    base = replay(graph, baseline(graph))
    order = tuple(range(len(graph.ops)))
    copies = overlap(graph, order, longest_transfers(graph, order))
    beside = replay(graph, lower(graph, order, transfers=copies))
    apart = offload.plan(problem(graph), 0)
    assert apart.peak < beside.peak < base.peak
    assert apart.extra == replay(graph, apart.steps or ()).time - base.time > beside.time - base.time


def test_no_more_is_copied_out_than_asked_for_or_allowed() -> None:
    graph = quick(chain(20))
    base = replay(graph, baseline(graph)).peak
    few = offload.plan(problem(graph), base - 64)
    assert few.met and few.runs < offload.plan(problem(graph), 0).runs
    limited = offload.plan(problem(graph), 0, offload.Options(host=128))
    assert limited.runs == 2 and replay(graph, limited.steps or ()).host_peak <= 128


def booleans(n: int) -> Graph:
    """A chain whose forward makes 4,096 booleans each."""
    graph = chain(n, 4096)
    values = [
        Value(v.name, v.storage, "bool" if v.name.startswith("f") else "float32", (4096,), (1,))
        for v in graph.values
    ]
    return replace(graph, values=tuple(values))


def test_what_packs_is_packed_and_comes_back() -> None:
    graph = booleans(20)
    base = replay(graph, baseline(graph)).peak
    found = compress.plan(problem(graph), 0)
    steps = found.steps or ()
    assert found.peak < base - 15 * (4096 - 512) and {s.codec for s in steps if s.codec} == {"bits"}
    layout = lay_out(graph, steps)
    plan = replace(
        decided(steps, graph),
        **costs(graph, steps),
        residences=layout.residences,
        arena=layout.arena,
        handed=layout.handed,
    )
    assert plan.peak == found.peak and verify(graph, plan) == []
    assert compress.plan(problem(chain(20)), 0).runs == 0


@pytest.mark.parametrize("n", [3, 7, 30])
def test_every_choice_of_copies_verifies(n: int) -> None:
    graph = quick(chain(n))
    order = tuple(range(len(graph.ops)))
    can = longest_transfers(graph, order)
    for k in range(0, len(can) + 1, max(1, len(can) // 5)):
        for chosen in (can[:k], overlap(graph, order, can[:k])):
            steps = lower(graph, order, transfers=chosen)
            layout = lay_out(graph, steps)
            plan = replace(
                decided(steps, graph), **costs(graph, steps), residences=layout.residences,
                arena=layout.arena, handed=layout.handed, host=layout.host,
            )  # fmt: skip
            assert verify(graph, plan) == []
