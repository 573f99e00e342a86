"""Changes that lower a peak: what is said of each is what its steps come to."""

import pytest
from hypothesis import given, settings

from support.chains import chain
from support.strategies import graphs, plans
from tightship.diagnose.changes import changes
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Plan
from tightship.report.numbers import makers
from tightship.simulate import baseline, replay


def blocks(n: int, wide: int, narrow: int) -> Graph:
    """A chain of blocks, each of a wide value that is dear to make, another cheaply made of it, and a narrow one."""
    storages, values, ops = [Storage("x", narrow, "input")], [Value("x", 0)], []

    def op(name: str, inputs: tuple[int, ...], size: int, time: float, phase: str) -> int:
        storages.append(Storage(name, size, "gradient" if phase == "backward" else "activation"))
        values.append(Value(name, len(storages) - 1))
        module, _, target = name.partition(":")
        made = (len(values) - 1,)
        ops.append(Op(name, target, inputs, made, time=time, phase=phase, module=module, source="net.py:7"))
        return made[0]

    wides, last = [], 0
    for k in range(n):
        up = op(f"blocks.{k}:up", (last,), wide, 1.0, "forward")
        act = op(f"blocks.{k}:act", (up,), wide, 0.01, "forward")
        last = op(f"blocks.{k}:down", (act,), narrow, 1.0, "forward")
        wides.append((up, act))
    for k in reversed(range(n)):
        last = op(f"blocks.{k}:grad", (last, *wides[k]), narrow, 2.0, "backward")
    return Graph(tuple(ops), tuple(values), tuple(storages), (0,), (last,))


def test_what_is_cheap_to_make_comes_first() -> None:
    graph = blocks(6, 1 << 20, 1 << 10)
    first, *_ = changes(graph, means=("recompute",))
    assert (first.way, first.what, first.source) == ("recompute", "blocks.*:act", "net.py:7")
    assert first.count in (5, 6)
    assert first.extra == pytest.approx(0.01 * first.count)
    assert first.peak == replay(graph, baseline(graph)).peak - first.saves
    assert first.saves >= 4 << 20


def test_each_change_is_on_top_of_those_before_it() -> None:
    graph = blocks(8, 1 << 20, 1 << 18)
    found = changes(graph, most=3)
    line = replay(graph, baseline(graph))
    peak, time = line.peak, line.time
    for c in found:
        assert c.saves > 0
        assert (c.peak, c.time) == (peak - c.saves, pytest.approx(time + c.extra))
        peak, time = c.peak, c.time
    assert len(found) >= 2


def test_a_forward_pass_is_not_told_to_copy_out() -> None:
    graph = chain(6)
    forward = Graph(graph.ops[:6], graph.values[:7], graph.storages[:7], (0,), (6,))
    assert all(c.way in ("order", "recompute") for c in changes(forward))


def test_where_nothing_helps_nothing_is_said() -> None:
    values, storages = (Value("x", 0), Value("y", 1)), (Storage("x", 64, "input"), Storage("y", 64))
    assert changes(Graph((Op("f", "f", (0,), (1,), time=1.0),), values, storages, (0,), (1,))) == ()
    assert changes(Graph((), values[:1], storages[:1], (0,))) == ()


def test_an_order_that_needs_less_comes_first() -> None:
    """Of a step whose updates all stand at the end."""
    n, size = 6, 1 << 16
    storages = [Storage("x", 64, "input"), *(Storage(f"w{k}", size, "parameter") for k in range(n))]
    values = [Value(s.name, k) for k, s in enumerate(storages)]
    ops, grads, last = [], [], 0
    for k in range(n):
        for name, wide in (("grad", size), ("back", 64)):
            storages.append(Storage(f"{name}{k}", wide, "gradient"))
            values.append(Value(f"{name}{k}", len(storages) - 1))
        made = (len(values) - 2, len(values) - 1)
        grads.append(made[0])
        ops.append(Op(f"back{k}", "back", (last, k + 1), made, phase="backward", time=1.0))
        last = made[1]
    for k, g in enumerate(grads):
        ops.append(Op(f"update{k}", "adam", (k + 1, g), (), (k + 1,), phase="update", time=0.1))
    first, *_ = changes(Graph(tuple(ops), tuple(values), tuple(storages), tuple(range(n + 1)), ()))
    assert first.way == "order"
    assert first.extra == pytest.approx(0, abs=1e-9)
    assert first.saves >= (n - 2) * size


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_of_any_graph_each_change_lowers_the_peak_by_what_it_says(graph: Graph) -> None:
    line = replay(graph, baseline(graph))
    peak, time = line.peak, line.time
    for c in changes(graph, means=("recompute", "compress", "offload")):
        assert c.saves == peak - c.peak > 0
        assert c.extra == pytest.approx(c.time - time)
        peak, time = c.peak, c.time
    assert peak >= graph.static_bytes


@settings(max_examples=30, deadline=None)
@given(plans())
def test_what_makes_up_any_plan_s_peak_adds_up_to_it(both: tuple[Graph, Plan]) -> None:
    graph, plan = both
    line = replay(graph, plan.steps)
    assert sum(m.bytes for m in makers(graph, plan.steps, line)) == line.peak
