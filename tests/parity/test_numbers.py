"""Training loops whose Python numbers change from step to step: annealed weights, counters, schedules, draws."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from support.harness import Loop, adam, identical, mlp, namespace, sgd

cross_entropy = functional.cross_entropy


# --- a weight of the loss, and where it may stand -----------------------------------------------------------------


@identical()
def test_beta_is_a_global():
    code = namespace("""
beta = 0.1
def loss_fn(model, batch):
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + beta * out.pow(2).mean()
""")
    model = mlp()

    def before(k):
        code.beta = 0.1 * (k + 1)

    return Loop(model, code.loss_fn, sgd(model), before=before)


@identical()
def test_beta_is_in_a_dict():
    model, config = mlp(), {"beta": 0.0}

    def loss_fn(model, batch):
        out = model(batch[0])
        return cross_entropy(out, batch[1]) + config["beta"] * out.pow(2).mean()

    def after(k, out):
        config["beta"] += 0.05

    return Loop(model, loss_fn, adam(model), after=after, watched=lambda: config)


@identical()
def test_beta_is_in_a_dataclass():
    @dataclasses.dataclass
    class Config:
        beta: float = 1.0

    model, config = mlp(), Config()

    def loss_fn(model, batch):
        out = model(batch[0])
        return cross_entropy(out, batch[1]) * config.beta

    def after(k, out):
        config.beta *= 0.7

    return Loop(model, loss_fn, sgd(model), after=after, watched=lambda: config)


@identical()
def test_the_loss_is_a_bound_method_that_counts():
    class Trainer:
        beta, calls = 0.3, 0

        def loss(self, model, batch):
            self.calls += 1
            out = model(batch[0])
            return cross_entropy(out, batch[1]) + self.beta / (1 + self.calls) * out.abs().mean()

    model, trainer = mlp(), Trainer()
    return Loop(model, trainer.loss, sgd(model), watched=lambda: vars(trainer))


@identical()
def test_a_counter_in_a_closure():
    model, n = mlp(), 0

    def loss_fn(model, batch):
        nonlocal n
        n += 1
        return cross_entropy(model(batch[0]), batch[1]) / (1 + n)

    return Loop(model, loss_fn, sgd(model), watched=lambda: n)


@identical()
def test_a_counter_multiplies():
    model, n = mlp(), [0]

    def loss_fn(model, batch):
        n[0] += 1
        return cross_entropy(model(batch[0]), batch[1]) * n[0]

    return Loop(model, loss_fn, sgd(model), watched=lambda: n)


@identical(plans=2)
def test_a_counter_that_switches_a_branch():
    model, count = mlp(), SimpleNamespace(n=0)

    def loss_fn(model, batch):
        count.n += 1
        out = model(batch[0])
        loss = cross_entropy(out, batch[1])
        return loss + out.exp().mean() if count.n > 3 else loss

    return Loop(model, loss_fn, sgd(model), watched=lambda: vars(count))


# --- iterators ----------------------------------------------------------------------------------------------------


@identical()
def test_weights_from_itertools_cycle():
    model, weights = mlp(), itertools.cycle([1.0, 0.5, 0.25])

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1]) * next(weights)

    return Loop(model, loss_fn, sgd(model), watched=lambda: next(copy.deepcopy(weights)))


@identical(prepare=False)
def test_weights_from_a_generator():
    def decaying():
        weight = 1.0
        while True:
            yield weight
            weight *= 0.8

    model, weights = mlp(), decaying()

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1]) * next(weights)

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_weights_from_a_file():
    """A line for each step; fit has read none of them when it is back."""
    model, weights = mlp(), io.StringIO("1.0\n0.5\n0.25\n" * 4)

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1]) * float(weights.readline())

    return Loop(model, loss_fn, sgd(model))


class Log(io.TextIOWrapper):
    """As pytest, wandb and others put into the place of standard output: pickling would close what is below it."""


@identical()
def test_code_that_can_reach_a_log():
    model, log = mlp(), Log(io.BytesIO())

    def loss_fn(model, batch):
        log.write("a step\n")
        return cross_entropy(model(batch[0]), batch[1])

    return Loop(model, loss_fn, sgd(model), watched=lambda: log.closed)


# --- numbers drawn by Python and NumPy ----------------------------------------------------------------------------


@identical()
def test_mixup_with_a_number_from_numpy():
    model = mlp()

    def loss_fn(model, batch):
        x, y = batch
        lam = np.random.beta(0.4, 0.4)
        order = torch.randperm(len(x))
        out = model(lam * x + (1 - lam) * x[order])
        return lam * cross_entropy(out, y) + (1 - lam) * cross_entropy(out, y[order])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_noise_from_a_numpy_generator():
    model, rng = mlp(), np.random.default_rng(3)

    def loss_fn(model, batch):
        noise = torch.from_numpy(rng.normal(size=(6, 4)).astype(np.float32))
        return cross_entropy(model(batch[0] + 0.1 * noise), batch[1]) * float(rng.uniform(0.5, 1))

    return Loop(model, loss_fn, sgd(model), watched=lambda: rng.bit_generator.state)


@identical(plans=4)
def test_layers_dropped_by_python():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                if random.random() > 0.4:
                    x = x + block(x).relu()
            return self.last(x)

    model = Net()
    return Loop(model, lambda m, b: cross_entropy(m(b[0]), b[1]), sgd(model))
