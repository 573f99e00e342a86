"""Tags on joint graphs that are exported: whatever partitioner of PyTorch's follows them, gradients are eager's."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd, partitioners
from torch.nn import functional as F

import tightship

PARTITIONERS = (partitioners.default_partition, partitioners.min_cut_rematerialization_partition)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2)
        return x.square().mean()


class Convolutions(nn.Module):
    """Running statistics are written while the forward pass runs, which the backward pass must not read."""

    def __init__(self):
        super().__init__()
        layers = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(3)]
        self.layers = nn.Sequential(*[m for row in layers for m in row])

    def forward(self, x):
        return self.layers(x).square().mean()


class Words(nn.Module):
    """Words in and out by one matrix; attention, once with dropout."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words)
        for k, layer in enumerate(self.layers):
            q, key, v = (t.view(-1, 8, 2, 8).transpose(1, 2) for t in layer(self.norm(x)).chunk(3, -1))
            out = F.scaled_dot_product_attention(q, key, v, dropout_p=0.1 * (k == 1), is_causal=True)
            x = x + out.transpose(1, 2).reshape(-1, 8, 16)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


@pytest.mark.parametrize("partition", PARTITIONERS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("budget", ["100%", "static+75%"])
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Residual, lambda: torch.randn(512, 16)),
        (Convolutions, lambda: torch.randn(4, 4, 16, 16)),
        (Words, lambda: torch.randint(0, 20, (16, 8))),
    ],
    ids=["residual", "convolutions", "words"],
)
def test_gradients_after_tags_are_eagers(kind, given, budget, partition):
    torch.manual_seed(0)
    model, x = kind(), given()
    eager = copy.deepcopy(model)
    with contextlib.ExitStack() as stack:
        exported = aot_autograd.aot_export_joint_with_descriptors(stack, model, (x,))
        plan = tightship.tag(exported.graph_module, budget)
        call = aot_autograd.aot_compile_joint_with_descriptors(exported, partition_fn=partition)
    assert bool(plan.count("recompute")) is (budget != "100%")
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    losses = []
    for run in (lambda: call(*[t for row in named for _, t in row], x), lambda: eager(x)):
        torch.manual_seed(1)
        losses.append(run())
        losses[-1].backward()
    assert torch.equal(*losses)
    for own, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(own.grad, theirs.grad)
    for own, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(own, theirs)
