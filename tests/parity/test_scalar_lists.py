"""Tensors made of lists in which tensors are numbers: returns of an episode, weights of losses, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.harness import Loop, adam, identical, mlp, run, sgd

MADE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "of results": lambda y, _: torch.tensor([y[0, 0], y[0, 1], y[0, 2]]),
    "of a batch": lambda _, x: torch.as_tensor([v for v in x[0, :3]]),
    "with numbers": lambda y, x: torch.asarray((y[0, 0], 0.1, x[0, 0])),
    "nested": lambda y, x: torch.tensor([[y[0, 0], 1], [x[0, 0], 2.5], [True, 3]]).sum(1),
    "of one number each": lambda y, _: torch.tensor([y[:1, :1], y[1:2, 0], y[2, 1]]),
    "of integers": lambda y, _: torch.tensor([y.argmax(), 1, y.argmin()]).float(),
    "of integers and a float": lambda y, _: torch.tensor([y.argmax(), y[0, 0], 2]),
    "in half": lambda y, _: torch.tensor([y[0, 0], 0.1, 1], dtype=torch.float16).float(),
    "in double": lambda y, _: torch.tensor([y[0, 0], 0.1, y.argmax()], dtype=torch.float64).float(),
    "by a method": lambda y, _: y.new_tensor([y[0, 0], 0.1, y.argmax()]),
    "by an old method": lambda y, _: y.new([y[0, 0], 0.1, y.argmax()]),
    "by a class": lambda _, x: torch.FloatTensor([x[0, 0], 0.1, x[0, 1]]),
}


@pytest.mark.parametrize("how", MADE)
def test_a_tensor_made_of_a_list(how: str, measurements: Any):
    def build():
        model = mlp()

        def loss_fn(model, batch):
            y = model(batch[0])
            return F.cross_entropy(y * MADE[how](y.detach(), batch[0]), batch[1])

        return Loop(model, loss_fn, adam(model))

    verdict = run(build, measurements)
    assert verdict.kind == "identical", verdict
    assert verdict.plans == 1 or how == "by a class", verdict


@identical()
def test_an_episode_with_normalized_returns():
    """As in an actor that learns from one episode: each return is an element of a tensor, and becomes another."""
    model = mlp()

    def loss_fn(model, batch):
        returns = torch.tensor([float(k) for k in range(6)])
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        rows = zip(model(batch[0]), F.one_hot(batch[1], 3).float(), returns, strict=True)
        lost = [F.smooth_l1_loss(y[:1], torch.tensor([r])) - y.log_softmax(0) @ k * r for y, k, r in rows]
        return torch.stack(lost).sum()

    return Loop(model, loss_fn, sgd(model, lr=0.01))


@identical()
def test_numbers_and_tensors_beside_one_another_that_change():
    model = mlp()
    now = {"beta": 0.1, "weight": torch.tensor(1.0)}

    def before(k):
        now["beta"] = 0.1 * (k + 1)
        now["weight"] = torch.tensor(1.0 + k)

    def loss_fn(model, batch):
        y = model(batch[0])
        return F.cross_entropy(
            y, batch[1], weight=torch.tensor([now["weight"], now["beta"], y.detach()[0, 0].abs()])
        )

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_a_list_of_tensors_outside_of_the_step():
    model = mlp()
    weights = [torch.tensor(1.0 + k) for k in range(3)]

    def before(k):
        weights[k % 3] = torch.tensor(0.5 * (k + 1))
        weights[1].mul_(0.9)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor(weights))

    return Loop(model, loss_fn, sgd(model), before=before)


def test_a_list_of_what_is_no_number_is_eagers_error(measurements: Any):
    def build():
        model = mlp()
        return Loop(model, lambda m, b: (m(b[0]) * torch.tensor([b[0][0], b[0][1]])).sum(), sgd(model))

    with pytest.raises(ValueError, match="only one element tensors can be converted"):
        run(build, measurements)
