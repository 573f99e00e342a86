"""Training loops whose own code runs in the backward pass or inside of a call, with state that its source hides."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from support.harness import Loop, identical, mlp, sgd


class Scaling:
    factor = 1.0

    def scaled(self, gradient):
        return gradient * self.factor


@identical()
def test_a_hook_that_is_a_method_of_an_object_that_changes():
    model, scaling = mlp(), Scaling()

    def loss_fn(model, batch):
        out = model(batch[0])
        out.register_hook(scaling.scaled)
        return functional.cross_entropy(out, batch[1])

    def before(k):
        scaling.factor = 1.0 + 0.25 * k

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_a_hook_with_a_default_that_changes():
    model, scale = mlp(), [1.0]

    def loss_fn(model, batch):
        out = model(batch[0])
        out.register_hook(lambda gradient, factor=scale[0]: gradient * factor)
        return functional.cross_entropy(out, batch[1])

    def before(k):
        scale[0] = 1.0 + 0.25 * k

    return Loop(model, loss_fn, sgd(model), before=before)


WEIGHT = torch.ones(3)


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * WEIGHT


@identical()
def test_a_function_that_reads_a_global_tensor_that_is_replaced():
    model = mlp()

    def loss_fn(model, batch):
        return functional.cross_entropy(Weighted.apply(model(batch[0])), batch[1])

    def before(k):
        global WEIGHT
        WEIGHT = torch.full((3,), 1.0 + 0.25 * k)

    return Loop(model, loss_fn, sgd(model), before=before)


SLOPE = 1.0


def _sloped(x):
    return torch.sigmoid(SLOPE * x)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.slope = SLOPE
        return x * _sloped(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gate = _sloped(x)
        return gradient * (gate + ctx.slope * x * gate * (1 - gate))


@identical()
def test_a_function_whose_helper_reads_a_number_that_changes():
    model = mlp()

    def loss_fn(model, batch):
        return functional.cross_entropy(Swish.apply(model(batch[0])), batch[1])

    def before(k):
        global SLOPE
        SLOPE = 1.0 + 0.5 * (k // 2)

    return Loop(model, loss_fn, sgd(model), before=before)


@identical(plans=2)
def test_a_function_whose_helper_is_replaced():
    model, plain = mlp(), _sloped

    def loss_fn(model, batch):
        return functional.cross_entropy(Swish.apply(model(batch[0])), batch[1])

    def before(k):
        global _sloped
        _sloped = plain if k % 2 else torch.tanh

    return Loop(model, loss_fn, sgd(model), before=before)


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counting.calls += 1
        return x * Counting.calls

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Counting.calls


@identical()
def test_a_function_that_counts_its_calls():
    model = mlp()

    def loss_fn(model, batch):
        return functional.cross_entropy(Counting.apply(model(batch[0])), batch[1])

    def before(k):
        Counting.calls = k

    return Loop(model, loss_fn, sgd(model), before=before)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@identical()
def test_a_scripted_module_with_an_attribute_that_changes():
    model = nn.Sequential(mlp(), torch.jit.script(Scripted()))

    def loss_fn(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def before(k):
        model[1].factor = 1.0 + 0.25 * k

    def around(k):  # else it differentiates by other formulas after some steps
        return torch.jit.optimized_execution(False)

    return Loop(model, loss_fn, sgd(model), before=before, around=around)
