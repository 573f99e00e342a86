"""What PyTorch's partitioner saves, asked on captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.models import MODELS
from tightship.frontends.torch.capture.joint import saved_sets
from tightship.frontends.torch.capture.step import capture_loss, capture_step
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.frontier import with_saved


@pytest.mark.parametrize("name", ["gpt2", "cnn", "mlp", "vit", "bert", "t5"])
def test_a_smaller_budget_saves_no_more(name: str) -> None:
    model, _, batch = MODELS[name]()
    sample = batch(0)
    program = capture_loss(model, sample[0] if isinstance(sample, tuple) else sample)
    graph = program.graph
    sets = saved_sets(program, (1.0, 0.5, 0.0))
    bytes_of = [sum(graph.storages[s].size for s in saved - graph.static) for saved in sets.values()]
    assert list(sets) == [1.0, 0.5, 0.0] and bytes_of == sorted(bytes_of, reverse=True)
    assert bytes_of[0] > 0 == bytes_of[-1]  # of nothing but inputs everything is made again
    forward = {s for k, op in enumerate(graph.ops) if op.phase == "forward" for s in graph.uses.defines[k]}
    assert all(saved <= forward | graph.static for saved in sets.values())
    frame = EvictionProblem(graph, tuple(range(len(graph.ops))))
    assert with_saved(frame, sets[1.0]).runs < with_saved(frame, sets[0.0]).runs


def recurrent() -> tuple[torch.nn.Module, Any]:
    return torch.nn.LSTM(8, 8), lambda model, x: model(x)[0].square().mean()


def raising() -> tuple[torch.nn.Module, Any]:
    def loss(model: Any, x: Any) -> torch.Tensor:
        out: torch.Tensor = model(x).square().mean()
        if not torch.isfinite(out):
            raise ValueError("a loss that is not finite")
        return out

    return torch.nn.Linear(8, 8), loss


@pytest.mark.parametrize("make", [recurrent, raising])
def test_ops_that_something_else_runs_in_the_place_of_are_asked_of_as_what_they_are(make: Any) -> None:
    """oneDNN's recurrent layer, which runs with grad mode, and a question about data; collectives are asked of with
    other ranks."""
    model, loss = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = capture_step(model, loss, optimizer, torch.randn(4, 2, 8))
    assert any(not hasattr(call.fn, "__name__") for call in program.calls)
    sets = saved_sets(program, (1.0, 0.0))
    assert sets[0.0] <= sets[1.0] | program.graph.static
