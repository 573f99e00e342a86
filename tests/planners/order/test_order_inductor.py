"""Orders against those of PyTorch's Inductor, made by its own functions on the same dependencies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

pytest.importorskip("torch", reason="Inductor's functions are PyTorch's")
inductor = pytest.importorskip(
    "inductor", reason="this PyTorch has no torch._inductor.memory as it was in 2.13"
)

from support.strategies import graphs  # noqa: E402
from support.zoo import captured  # noqa: E402
from tightship.analysis.order import is_legal  # noqa: E402
from tightship.planners import planners  # noqa: E402
from tightship.planners.order import best  # noqa: E402
from tightship.simulate import baseline, replay  # noqa: E402

ALL = planners("order")


def compared(graph):
    scheduled = inductor.scheduled(graph)
    ours = best.solve(graph)
    for method in inductor.METHODS:
        order = scheduled.order(method)
        assert is_legal(graph, order)
        peak = replay(graph, baseline(graph, order)).peak
        assert scheduled.peak(order) == peak - graph.static_bytes  # it counts what the simulator counts
        assert ALL[method].plan(graph) == order  # ours of the same name is theirs, ties included
        assert ours.peak <= peak


@settings(max_examples=60)
@given(graphs(max_ops=40))
def test_inductors_orders_are_ours_of_the_same_names_and_never_better_than_the_best(graph):
    compared(graph)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt2", "bert"])
def test_on_training_steps_of_models(name):
    compared(captured(name))
