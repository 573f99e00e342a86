"""What PyTorch's partitioner saves, asked on captured steps."""

from __future__ import annotations

import pytest

from support.models import MODELS
from tightship.frontends.torch.capture.joint import saved_sets
from tightship.frontends.torch.capture.step import capture_loss
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
