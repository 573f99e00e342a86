"""Ops that do not run on every content, which are measured on some that they accept, and TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.harness import Loop, adam, identical, mlp, refused, run, sgd

Batch = tuple[torch.Tensor, torch.Tensor]


def reward(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    chosen = torch.distributions.Categorical(logits=out)
    action = chosen.sample()
    return -(chosen.log_prob(action) * (action == batch[1]).float()).mean() - 0.01 * chosen.entropy().mean()


def counts(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    rate = F.softplus(out)
    return F.poisson_nll_loss(rate, torch.poisson(rate.detach()), log_input=False)


def coins(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    thrown = torch.distributions.Bernoulli(logits=out)
    return -thrown.log_prob(thrown.sample()).mean()


def shares(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.distributions.Dirichlet(F.softplus(out) + 0.5).rsample().pow(2).mean()


def gamma(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.distributions.Gamma(F.softplus(out) + 0.5, 1.0).rsample().mean()


def probabilities(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy(out.sigmoid(), F.one_hot(batch[1], out.shape[1]).to(out.dtype))


def binomial(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (torch.binomial(torch.full_like(out, 3.0), out.detach().sigmoid()) * out).mean()


def matrix(out: torch.Tensor) -> torch.Tensor:
    return out.T @ out + torch.eye(out.shape[1])


def solved(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.linalg.solve(matrix(out), out.T).pow(2).mean()


def inverted(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.linalg.inv(matrix(out)).diagonal().sum() + torch.linalg.slogdet(matrix(out))[1]


def factored(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    factor = torch.linalg.cholesky(matrix(out))
    return torch.cholesky_solve(out.T, factor).pow(2).mean() + factor.diagonal().log().sum()


def half_life(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (torch.acos(out.tanh()) + torch.atanh(out.tanh()) + torch.special.ndtri(out.sigmoid())).mean()


LOSSES = (
    reward, counts, coins, shares, gamma, probabilities, binomial, solved, inverted, factored, half_life,
)  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_of_ops_that_refuse_some_contents(
    loss: Callable[[torch.Tensor, Batch], torch.Tensor], measurements: Any
):
    def build():
        model = mlp()
        return Loop(model, lambda m, batch: loss(m(batch[0]), batch), adam(model))

    verdict = run(build, measurements)
    assert verdict.kind == "identical", verdict.sentence


class Skipgram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 4)
        self.project = nn.Linear(4, 4)
        self.register_buffer("often", torch.rand(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        others = torch.multinomial(self.often, x.shape[0] * 2, replacement=True).view(-1, 2)
        near = (self.project(x) * self.words(y)).sum(1)
        far = (self.words(others) @ self.project(x)[:, :, None]).squeeze(2)
        return -F.logsigmoid(near).mean() - F.logsigmoid(-far).mean()


@identical(plans=1)
def test_negatives_are_drawn_by_their_frequency():
    model = Skipgram()
    return Loop(model, lambda m, batch: m(*batch), sgd(model))


# --- TorchScript optimizes itself after some steps, and differentiates by other formulas then ---


@torch.jit.script
def swish(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * x + torch.tanh(x)


@refused("TorchScript (swish) that gradients go through")
def test_a_scripted_activation():
    model = mlp()
    return Loop(model, lambda m, batch: F.cross_entropy(swish(m(batch[0])), batch[1]), sgd(model))


@refused("TorchScript (forward) that gradients go through")
def test_a_scripted_layer():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 3))
    return Loop(model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), sgd(model))


@identical(plans=1)
def test_a_script_that_no_gradients_go_through():
    model = mlp()

    def loss_fn(model, batch):
        with torch.no_grad():
            target = swish(model(batch[0])).softmax(1)
        return -(model(swish(batch[0])).log_softmax(1) * target).mean()

    return Loop(model, loss_fn, sgd(model))


@identical(plans=1)
def test_a_script_that_is_not_optimized():
    model = mlp()

    def loss_fn(model, batch):
        with torch.jit.optimized_execution(False):
            return F.cross_entropy(swish(model(batch[0])), batch[1])

    return Loop(model, loss_fn, sgd(model))


class Silent(tuple):
    """A tuple that does not tell how many it has, nor which, as e3nn's irreps."""

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


@identical()
def test_a_tuple_that_cannot_be_iterated():
    model = mlp()
    model.kind = Silent((1, 2))
    return Loop(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), sgd(model))


# --- questions about what a step writes to ---


@identical(plans=2)
def test_a_question_about_a_batch_that_is_written_to():
    """Labels are masked in place first, and whether anything is masked is asked then."""
    model = mlp()

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        x, labels = batch
        labels.masked_fill_(labels == -100, 0)
        weight = None if not labels.eq(0).any() else torch.tensor([0.5, 1.0, 1.0])
        return F.cross_entropy(model(x), labels, weight=weight)

    def batch(k: int) -> Batch:
        g = torch.Generator().manual_seed(k)
        x, labels = torch.randn(6, 4, generator=g), torch.randint(1, 3, (6,), generator=g)
        labels[0] = -100 if k % 3 == 1 else 1
        return x, labels

    return Loop(model, loss, sgd(model), batch=batch)


class Warming(nn.Module):
    """Counts its batches in a buffer, and does something else at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x if self.seen > 3 else x.clamp(-1, 1))


@identical(plans=2)
def test_a_question_about_a_buffer_that_every_step_writes_to():
    model = Warming()
    return Loop(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), adam(model))
