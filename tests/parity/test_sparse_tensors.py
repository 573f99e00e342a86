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
PLACES = "batch", "closure", "buffer", "attribute", "unread batch", "parameter"


def graph(layout: str) -> torch.Tensor:
    links = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) * torch.eye(6).roll(1, 0)
    return LAYOUTS[layout](links + torch.eye(6))


def loop(layout: str, place: str) -> Loop:
    model, links = mlp(), graph(layout)
    if place == "buffer":
        model.register_buffer("links", links)
    if place in ("attribute", "parameter"):
        model.links = nn.Parameter(links) if place == "parameter" else links
    source: dict[str, Callable[[nn.Module, Any], torch.Tensor]] = {
        "batch": lambda m, b: b[2],
        "closure": lambda m, b: links,
        "buffer": lambda m, b: m.links,
        "attribute": lambda m, b: m.links,
        "parameter": lambda m, b: m.links,
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
@pytest.mark.parametrize(
    ("layout", "place"),
    [
        (n, p) for n in LAYOUTS for p in PLACES if (n, p) != ("csc", "parameter")
    ],  # of which torch has no gradient
)
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


class Twice(torch.Tensor):
    """Makes something else of an op than torch does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is nn.functional.linear else out


class Named(torch.Tensor):
    names_of_rows = ("a", "b")


OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other results": lambda x: x.as_subclass(Twice),
    "by its class": lambda x: x.as_subclass(Named),
    "attributes": lambda x: x.as_subclass(Named),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
}


def loop_of_class(kind: str, plain: bool) -> Loop:
    """``plain``: the first batches are tensors of torch's own class, so that only later ones are of another."""
    model = mlp()

    def loss_fn(model, batch):
        if kind == "masked" and not plain:
            batch = batch.to_tensor(0.0)
        out = model(batch)
        by_class = kind == "by its class" and isinstance(batch, Named)
        return out.square().mean() * (len(getattr(batch, "names_of_rows", ())) + 1 + by_class)

    def batch(k):
        x = pairs(k)[0]
        return x if plain and k < 2 else OWN[kind](x)

    return Loop(model, loss_fn, sgd(model), batch=batch)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("kind", OWN)
def test_tensors_of_classes_of_their_own(kind: str, measurements: Any):
    with pytest.warns(Fallback, match=r"a tensor of the class (Twice|Named|MaskedTensor) at "):
        verdict = run(lambda: loop_of_class(kind, False), measurements, strict=False)
    assert verdict.kind == "identical" and not verdict.plans, verdict
    loop = loop_of_class("other results" if kind == "attributes" else kind, False)
    assert tightship.estimate(loop.model, loop.batch(0), loop.optimizer, loop.loss_fn).peak > 0


@pytest.mark.parametrize("kind", ["other results", "by its class"])
def test_tensors_of_another_class_than_those_before(kind: str):
    loop = loop_of_class(kind, plain=True)
    step = tightship.fit(loop.model, loop.loss_fn, loop.optimizer, loop.batch(0), "100%", cache=None)
    step(loop.batch(1))
    before = [p.clone() for p in loop.model.parameters()]
    with pytest.raises(Unplannable, match=r"a tensor of the class (Twice|Named) at .*instead, use"):
        step(loop.batch(2))
    assert all(map(torch.equal, before, loop.model.parameters()))


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another class": lambda x: x.as_subclass(Named),
    "its constructor": lambda x: Named(x),
    "and back": lambda x: x.as_subclass(Named).sin().as_subclass(torch.Tensor),
    "the plain class": lambda x: x.as_subclass(torch.Tensor),
    "the plain class of a view": lambda x: x.t().as_subclass(torch.Tensor),
    "the plain class of another": lambda x: x.as_subclass(type(x.detach())).sin(),
}


@pytest.mark.parametrize("kind", MADE)
def test_tensors_made_another_class_in_a_step(kind: str, measurements: Any):
    """They end in eager, of which it is said why, or are views, where the class is torch's own."""
    plain = kind.startswith("the plain class")

    def loop() -> Loop:
        model = mlp()
        return Loop(
            model, lambda m, b: MADE[kind](m(b)).square().mean(), sgd(model), batch=lambda k: pairs(k)[0]
        )

    fault = r"a tensor of the class Named made in a step is not|code of the step that raises RuntimeError on"
    with nullcontext() if plain else pytest.warns(Fallback, match=fault):
        verdict = run(loop, measurements, strict=False)
    assert verdict.kind == "identical" and bool(verdict.plans) == plain, verdict


class Scaled(nn.Parameter):
    """Makes something else of a function than torch does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out * 2 if func is nn.functional.linear else out


class Tagged(nn.Parameter):
    tag = "its class alone"


def of_model(kind: str) -> nn.Module:
    model = mlp()
    if kind == "buffer":
        model.register_buffer("shift", torch.ones(3).as_subclass(Twice))
        model.register_forward_hook(lambda m, given, out: nn.functional.linear(out, torch.eye(3), m.shift))
    else:
        model[0].weight = {"parameter": Scaled, "tagged": Tagged}[kind](model[0].weight.detach())
    return model


@pytest.mark.parametrize("kind", ["parameter", "buffer", "tagged"])
def test_parameters_and_buffers_of_classes_of_their_own(kind: str, measurements: Any):
    def loop():
        model = of_model(kind)
        return Loop(model, lambda m, b: cross_entropy(m(b[0]), b[1]), sgd(model))

    plans = kind == "tagged"
    with nullcontext() if plans else pytest.warns(Fallback, match=rf"of the class (Scaled|Twice) at {kind}"):
        verdict = run(loop, measurements, strict=False)
    assert verdict.kind == "identical" and verdict.plans == plans, verdict
    if not plans:
        with pytest.raises(Unplannable, match=r"of the class (Scaled|Twice)"):
            tightship.infer(of_model(kind), pairs(0)[0], "100%", cache=None)
