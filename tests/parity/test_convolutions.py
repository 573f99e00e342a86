"""Convolutions: the gradient that goes on, and that of the weights by an op of its own, are eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.harness import Loop, adam, identical
from tightship.planners.default import Options, plan
from tightship.simulate import baseline, replay
from tightship.sources import ModelStep

CHANNELS_LAST = torch.channels_last


class Convolved(nn.Module):
    """Three of a kind; the batch is turned into images first."""

    def __init__(self, kind, size: int, *, dtype=torch.float32, layout=None, **options) -> None:
        super().__init__()
        rows = [kind(8, 8, 3, padding=1, **options) for _ in range(3)]
        self.rows, self.head = nn.ModuleList(rows), nn.Linear(8, 3)
        self.shape, self.dtype, self.layout = (6, 8, *([4] * size)), dtype, layout
        self.into = nn.Linear(4, 8 * 4**size)
        self.to(dtype)
        if layout is not None:
            self.to(memory_format=layout)

    def forward(self, x):
        x = self.into(x.to(self.dtype)).reshape(self.shape)
        if self.layout is not None:
            x = x.contiguous(memory_format=self.layout)
        for row in self.rows:
            x = torch.relu(row(x)) + x
        return self.head(x.flatten(2).mean(2)).float()


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


KINDS = {
    "1d": lambda: Convolved(nn.Conv1d, 1),
    "2d": lambda: Convolved(nn.Conv2d, 2),
    "2d without bias": lambda: Convolved(nn.Conv2d, 2, bias=False),
    "2d by channels": lambda: Convolved(nn.Conv2d, 2, groups=8),
    "2d in groups": lambda: Convolved(nn.Conv2d, 2, groups=2),
    "2d in channels-last": lambda: Convolved(nn.Conv2d, 2, layout=CHANNELS_LAST),
    "2d in float64": lambda: Convolved(nn.Conv2d, 2, dtype=torch.float64),
    "2d in bfloat16": lambda: Convolved(nn.Conv2d, 2, dtype=torch.bfloat16),
    "3d": lambda: Convolved(nn.Conv3d, 3),
    "1d transposed": lambda: Convolved(nn.ConvTranspose1d, 1),
    "2d transposed": lambda: Convolved(nn.ConvTranspose2d, 2),
    "2d transposed in groups": lambda: Convolved(nn.ConvTranspose2d, 2, groups=2),
    "3d transposed": lambda: Convolved(nn.ConvTranspose3d, 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_convolution(kind: str, measurements) -> None:
    @identical(plans=1)
    def pattern():
        torch.manual_seed(0)
        model = KINDS[kind]()
        return Loop(model, cross_entropy, adam(model), steps=3)

    pattern(measurements)


def targets(graph) -> list[int]:
    return [k for k, op in enumerate(graph.ops) if op.target == "aten.convolution_backward.default"]


def test_each_gradient_is_an_op_and_eager_needs_what_it_did() -> None:
    """The order as it is keeps what eager keeps: both gradients, and what they read, at once."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)
    )
    graph = ModelStep(model, torch.randn(2, 3, 12, 12)).program().graph
    kinds = [
        sorted(graph.storages[s].name.endswith(".grad") for s in graph.uses.defines[k])
        for k in targets(graph)
    ]
    assert kinds == [[False], [True, True], [False], [True, True], [True, True]]
    onward, weights, *_ = targets(graph)
    read = set(graph.uses.reads[onward]) | set(graph.uses.reads[weights])
    made = {*graph.uses.defines[onward], *graph.uses.defines[weights]}
    line = replay(graph, baseline(graph))
    at = next(i for i, step in enumerate(line.steps) if step.op == weights)
    together = sum(graph.storages[s].size for s in (read | made) - graph.static)
    assert line.levels[at] - graph.static_bytes >= together


def test_a_gradient_of_weights_waits_for_room() -> None:
    """The last convolution has most of the weights: their gradient is made when the activations of the first are
    gone, from the little that it reads, so that nothing is recomputed."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Conv2d(8, 16, 1), nn.Tanh(),
        nn.Conv2d(16, 4096, 1),
    )  # fmt: skip
    graph = ModelStep(model, torch.randn(4, 3, 64, 64)).program().graph
    before = replay(graph, baseline(graph))
    limit, waits = before.peak - 200_000, False
    while (
        not waits
    ):  # processors have kernels that ask for other scratch memory: from where on it has to wait
        made = plan(graph, limit, Options(work=1_000_000, hand_out=False))
        assert made.met and made.time == before.time
        order = [step.op for step in made.steps if step.kind == "compute"]
        waits = order.index(targets(graph)[1]) > order.index(targets(graph)[2])
        limit = made.peak - 1
