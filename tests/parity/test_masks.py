"""Dropout masks: they are drawn again without the tensor that they are for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.harness import Loop, adam, identical
from tightship.planners.default import Options, plan
from tightship.simulate import baseline, replay
from tightship.sources import ModelStep


class Dropped(nn.Module):
    """Wide layers with something dropped after each; what is dropped may lie across memory."""

    def __init__(
        self, drop: nn.Module, *, across: bool = False, images: bool = False, dtype=torch.float32
    ) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.into, self.head, self.drop = nn.Linear(4, 32), nn.Linear(32, 3), drop
        self.across, self.images = across, images
        self.to(dtype)

    def forward(self, x):
        x = self.into(x.to(self.into.weight.dtype))
        for row in self.rows:
            now = torch.relu(row(x))
            if self.across:
                now = self.drop(now.unsqueeze(1).expand(-1, 3, -1).transpose(0, 2)).mean(1).t()
            elif self.images:
                now = self.drop(now.reshape(-1, 8, 2, 2)).flatten(1)
            else:
                now = self.drop(now)
            x = x + now
        return self.head(x).float()


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


KINDS = {
    "dropout": lambda: Dropped(nn.Dropout(0.3)),
    "of what lies across memory": lambda: Dropped(nn.Dropout(0.3), across=True),
    "of channels": lambda: Dropped(nn.Dropout2d(0.3), images=True),
    "alpha": lambda: Dropped(nn.AlphaDropout(0.3)),
    "in float64": lambda: Dropped(nn.Dropout(0.3), dtype=torch.float64),
    "in bfloat16": lambda: Dropped(nn.Dropout(0.3), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_dropout(kind: str, measurements) -> None:
    @identical(plans=1)
    def pattern():
        torch.manual_seed(0)
        model = KINDS[kind]()
        return Loop(model, cross_entropy, adam(model), steps=3)

    pattern(measurements)


@pytest.mark.parametrize("across", [False, True])
def test_memory_for_a_mask_is_made_of_no_tensor(across: bool) -> None:
    model = Dropped(nn.Dropout(0.3), across=across)
    graph = ModelStep(model, torch.randn(16, 4)).program().graph
    drawn = [k for k, op in enumerate(graph.ops) if op.target.startswith("aten.bernoulli_.")]
    assert len(drawn) == 4
    for k in drawn:
        [s] = graph.uses.mutates[k]
        assert not graph.uses.reads[graph.uses.definer[s]]


def test_a_mask_is_drawn_again_beside_the_sum_that_is_kept() -> None:
    """Of a residual stream only its sums stay: what a mask takes to be drawn again is no tensor of the branch, whose
    matrix product would be dear to repeat."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            for row in self.rows:
                x = torch.tanh(x + self.drop(row(x)))
            return x

    with torch.device("meta"):
        graph = ModelStep(Residual(), torch.randn(4096, 512)).program().graph
    before = replay(graph, baseline(graph))
    budget = graph.static_bytes + int(0.75 * (before.peak - graph.static_bytes))
    found = plan(graph, budget, Options(seconds=20.0))
    again = [graph.ops[s.op].target for s in found.steps if s.kind == "recompute"]
    assert "aten.bernoulli_.float" in again
    assert "aten.addmm.default" not in again
