"""Views are ordered like any value: nobody reads one before the op that makes it, whatever its storage says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import graphs, random_graph
from tightship.analysis.order import is_legal, predecessors
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Plan, Step
from tightship.planners import planner, planners
from tightship.planners.evict.problem import DROP, EvictionProblem
from tightship.simulate import baseline, replay
from tightship.verify import verify

MAKE, VIEW, READ = range(3)


def viewed(base: str = "made") -> Graph:
    """``v`` is a view of ``a``, which an op makes or the caller owns; ``read`` reads the view only."""
    storages = (Storage("x", 64, "input"), Storage("a", 128), Storage("out", 64))
    values = (
        Value("x", 0, "float32", (16,), (1,)),
        Value("a", 1, "float32", (32,), (1,)),
        Value("v", 1 if base == "made" else 0, "float32", (4, 4), (4, 1)),
        Value("out", 2, "float32", (16,), (1,)),
    )
    ops = (
        Op("make", "make", (0,), (1,)),
        Op("view", "view", (1 if base == "made" else 0,), (2,)),
        Op("read", "read", (2,), (3,)),
    )
    return Graph(ops, values, storages, (0,), (3,), f"view of what is {base}")


def split() -> Graph:
    """An op that makes ``y`` and, beside it, a view of ``x``, which is read where ``y`` is not wanted yet."""
    storages = tuple(Storage(n, 640) for n in "xyabc")
    values = (*(Value(s.name, k) for k, s in enumerate(storages)), Value("v", 0))
    ops = (
        Op("split", "t", (0,), (1, 5)),
        Op("a", "t", (5,), (2,)),
        Op("b", "t", (2,), (3,)),
        Op("c", "t", (3, 1), (4,)),
    )
    return Graph(ops, values, storages, (0,), (4,), "split")


def plan_of(graph: Graph, steps: tuple[Step, ...]) -> Plan:
    return Plan(graph.digest, steps, static=graph.static_bytes)


def faults(graph: Graph, steps: tuple[Step, ...]) -> set[str]:
    return {v.code for v in verify(graph, plan_of(graph, steps))} - {"peak-mismatch", "time-mismatch"}


@pytest.mark.parametrize("base", ["made", "the caller's"])
def test_a_reader_waits_for_the_op_that_makes_its_view(base: str) -> None:
    graph = viewed(base)
    assert VIEW in predecessors(graph)[READ]
    assert not is_legal(graph, (MAKE, READ, VIEW))


@pytest.mark.parametrize("base", ["made", "the caller's"])
def test_a_view_behind_its_reader_is_refused(base: str) -> None:
    graph = viewed(base)
    steps = baseline(graph, (MAKE, READ, VIEW))
    assert faults(graph, steps) == {"use-before-definition"}
    with pytest.raises(BadInput, match="read after the op it is a result of"):
        replay(graph, steps)


def test_a_view_on_another_stream_is_waited_for() -> None:
    graph = viewed()
    gather = "_c10d_functional.all_gather_into_tensor.default"  # nothing else may run there
    graph = graph.with_ops(
        tuple(replace(o, target=gather) if k == READ else o for k, o in enumerate(graph.ops))
    )
    steps = list(baseline(graph))
    at = next(i for i, s in enumerate(steps) if s.op == READ)
    steps[at] = replace(steps[at], stream=1, waits=(0,))  # what makes the storage, not the view
    steps[at + 1 :] = [replace(s, waits=(at,)) for s in steps[at + 1 :]]
    assert faults(graph, tuple(steps)) == {"lane"}
    steps[at] = replace(steps[at], waits=(1,))
    assert faults(graph, tuple(steps)) == set()


@given(graphs(30, view=0.4), st.data())
def test_every_reader_before_its_view_is_found(graph: Graph, data: st.DataObject) -> None:
    """Any op moved in front of one that makes a value it reads: refused by the order and by the verifier."""
    maker = graph.uses.maker
    pairs = sorted({(maker[v], k) for k, op in enumerate(graph.ops) for v in op.inputs if maker[v] >= 0})
    if not pairs:
        return
    early, late = data.draw(st.sampled_from(pairs))
    order = list(range(len(graph.ops)))
    order.insert(early, order.pop(late))
    assert not is_legal(graph, order)
    assert faults(graph, baseline(graph, order)) & {"use-before-definition", "hazard"}


@pytest.mark.parametrize("name", sorted(planners("order")))
@pytest.mark.parametrize("seed", range(6))
def test_planned_orders_keep_views_before_their_readers(name: str, seed: int) -> None:
    graph = random_graph(seed, 40, view=0.4)
    order = planner(name, "order").plan(graph)
    assert is_legal(graph, order)
    assert faults(graph, baseline(graph, order)) == set()


def test_an_op_that_makes_a_view_beside_its_results_is_not_put_off() -> None:
    """The engine runs an op late when nobody wants its storages yet; who reads its views it does not know."""
    graph = split()
    frame = EvictionProblem(graph, tuple(range(len(graph.ops))))
    steps = frame.steps(frame.wherever(DROP))
    assert faults(graph, steps) == set()


@given(graphs(30, view=0.3))
def test_decisions_keep_views_before_their_readers(graph: Graph) -> None:
    frame = EvictionProblem(graph, tuple(range(len(graph.ops))), in_place=False)
    decision = frame.cost(frame.wherever(DROP), 1 << 62)
    if decision.valid:
        assert faults(graph, frame.steps(decision.evict)) == set()
