"""Sparse tensors that a step is given, such as the matrix of a graph: steps that read one run in eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tightship
from support.harness import Loop, mlp, pairs, run, sgd
from tightship.errors import Unplannable
from tightship.execute.interpreter import Fallback

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}
PLACES = "batch", "closure", "buffer", "attribute", "unread batch"


def graph(layout: str) -> torch.Tensor:
    links = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) * torch.eye(6).roll(1, 0)
    return LAYOUTS[layout](links + torch.eye(6))


def loop(layout: str, place: str) -> Loop:
    model, links = mlp(), graph(layout)
    if place == "buffer":
        model.register_buffer("links", links)
    if place == "attribute":
        model.links = links
    source: dict[str, Callable[[nn.Module, Any], torch.Tensor]] = {
        "batch": lambda m, b: b[2],
        "closure": lambda m, b: links,
        "buffer": lambda m, b: m.links,
        "attribute": lambda m, b: m.links,
    }

    def loss_fn(model, batch):
        out = model[0](batch[0])
        if place in source:
            out = torch.sparse.mm(source[place](model, batch), out)
        return cross_entropy(model[1:](out), batch[1])

    def batch(k):
        return (*pairs(k), graph(layout)) if "batch" in place else pairs(k)

    return Loop(model, loss_fn, sgd(model), batch=batch)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_of_a_graph(layout: str, place: str, measurements: Any):
    planned = place == "unread batch"
    with nullcontext() if planned else pytest.warns(Fallback, match=f"a torch.sparse_{layout} tensor at "):
        verdict = run(lambda: loop(layout, place), measurements, strict=False)
    assert verdict.kind == "identical" and verdict.plans == planned, verdict


NESTED = {
    "jagged": lambda x: torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged),
    "strided": lambda x: torch.nested.nested_tensor([x[:3], x[3:]]),
    "made in the step": lambda x: x,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


def of_parts(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "made in the step":
        x = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, len(x)]))
    return x.dequantize() if kind == "quantized" else x


def loop_of_parts(kind: str) -> Loop:
    model = mlp()

    def loss_fn(model, batch):
        out = model[0](of_parts(kind, batch))
        out = out if kind == "quantized" else out.to_padded_tensor(0.0)
        return model[1:](out).square().mean()

    return Loop(model, loss_fn, sgd(model), batch=lambda k: NESTED[kind](pairs(k)[0]))


@pytest.mark.filterwarnings("ignore:(The PyTorch API of nested|torch.quantize_per):UserWarning")
@pytest.mark.parametrize("kind", NESTED)
def test_nested_and_quantized_tensors(kind: str, measurements: Any):
    with pytest.warns(Fallback, match=r"a (nested|quantized) tensor at .*test_sparse_tensors\.py:\d+ is not"):
        verdict = run(lambda: loop_of_parts(kind), measurements, strict=False)
    assert verdict.kind == "identical" and not verdict.plans, verdict
    loop = loop_of_parts(kind)
    with pytest.raises(Unplannable, match=r"a (nested|quantized) tensor at .* instead,"):
        tightship.estimate(loop.model, loop.batch(0), loop.optimizer, loop.loss_fn)
