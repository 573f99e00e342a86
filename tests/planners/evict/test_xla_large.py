"""XLA's greedy rematerialization on many ops, and what others are told of its decisions."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chains import chain
from support.strategies import graphs
from tightship.baselines import xla
from tightship.baselines.xla_tracker import Item
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import baseline, replay

U = 64


def frame(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def fan(n: int) -> Graph:
    """A chain forward and back with a skip every 10 ops and, every 1,000 ops, one that a thousand others read."""
    storages, values, ops = [Storage("x", U, "input")], [Value("x", 0)], []

    def op(ins: list[int], size: int, seconds: float) -> int:
        storages.append(Storage(f"s{len(ops)}", size))
        values.append(Value(f"s{len(ops)}", len(storages) - 1))
        ops.append(Op(f"op{len(ops)}", "t", tuple(dict.fromkeys(ins)), (len(values) - 1,), time=seconds))
        return len(values) - 1

    forward = [0]
    for i in range(n // 2):
        ins = [forward[-1]]
        if i % 10 == 0 and i >= 10:
            ins.append(forward[i - 9])
        if i >= 1000:
            ins.append(forward[i - i % 1000])
        forward.append(op(ins, U * (1 + i % 3), 1.0 + i % 2))
    grad = forward[-1]
    for i in reversed(range(n // 2)):
        grad = op([forward[i + 1], grad, forward[i]], U, 2.0)
    return Graph(tuple(ops), tuple(values), tuple(storages), (0,), (grad,))


@pytest.mark.parametrize("part", [0.6, 0.3])
def test_R17_work_grows_with_the_ops_and_not_with_their_square(part: float) -> None:  # noqa: N802
    work = []
    for n in (2_000, 4_000, 8_000):
        g = fan(n)
        found = xla.plan(frame(g), int(part * replay(g, baseline(g)).peak))
        assert found.met
        work.append(found.work)
    assert work[2] < 2.4 * work[1] < 2.4 * 2.4 * work[0]


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.6, 0.3])
def test_R17_a_hundred_thousand_ops(part: float) -> None:  # noqa: N802
    g = fan(100_000)
    base = replay(g, baseline(g))
    f = frame(g)
    start = time.process_time()
    found = xla.plan(f, int(part * base.peak))
    print(f"{time.process_time() - start:.1f} s, {found.runs} runs, {found.work} candidates")
    assert found.met and found.peak <= part * base.peak
    assert 0 < found.runs < 50_000 and found.work < 400_000
    assert found.extra < 0.3 * base.time


@settings(max_examples=40)
@given(graphs(40), st.floats(0.3, 0.9))
def test_bits_are_gaps_of_what_clones_restore(g: Graph, part: float) -> None:
    f = frame(g)
    limit = g.static_bytes + int(part * (replay(g, baseline(g)).peak - g.static_bytes))
    walk = xla.Walk(g, f.order, limit, xla.Options())
    walk.run()
    again = {b.storage for i in walk.tracker.usage if isinstance(i, Item) and i.clone for b in i.made}
    found = xla.plan(f, limit)
    assert {int(f.gaps[i][0]) for i in found.evict.nonzero()[0]} <= again


def test_bits_carry_the_decision_over_to_other_planners() -> None:
    g = chain(60)
    limit = replay(g, baseline(g)).peak // 2
    found = xla.plan(frame(g), limit // U * U)
    cost = frame(g).cost(found.evict, limit)
    assert found.met and cost.met and cost.extra == found.extra


def test_progress_is_told_and_may_stop_the_walk() -> None:
    g, told = fan(4_000), []

    def progress(bytes_: int, extra: float, met: bool) -> bool:
        told.append((bytes_, extra, met))
        return True

    found = xla.plan(frame(g), replay(g, baseline(g)).peak // 3, progress=progress)
    assert len(told) == 1 and not found.met and found.peak <= replay(g, baseline(g)).peak


def test_a_graph_without_ops() -> None:
    g = Graph((), (Value("x", 0),), (Storage("x", U),), (0,), (0,))
    for policy in ("ours", "xla"):
        found = xla.plan(frame(g), 0, xla.Options(policy))
        assert (found.steps, found.peak, found.met) == ((), U, False)
