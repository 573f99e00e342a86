"""Buffers in whose place a step puts other tensors: gradients follow from what they held."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightship
from support.harness import Loop, adam, identical, pairs, refused
from support.models import Stateful
from tightship.execute.interpreter import Fallback


class Replacing(nn.Module):
    """``replace(module, scaled)`` is called with two buffers ``a`` and ``b`` in place."""

    def __init__(self, replace) -> None:
        super().__init__()
        self.layer, self.head, self.replace = nn.Linear(4, 3), nn.Linear(3, 3), replace
        self.register_buffer("a", torch.rand(3, 3))
        self.register_buffer("b", torch.rand(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) @ self.a + 2 * self.layer(x) @ self.b
        self.replace(self, out)
        return self.head(out)


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(model: nn.Module, **options) -> Loop:
    return Loop(model, cross_entropy, adam(model), steps=4, **options)


@identical(plans=1)
def test_a_recurrent_state():
    return trained(Stateful())


@identical(plans=1, verify_every=2)
def test_a_recurrent_state_verified():
    return trained(Stateful())


@identical(plans=1, verify_every=2)
def test_buffers_that_change_places():
    def swap(net, _out):
        net.a, net.b = net.b, net.a

    return trained(Replacing(swap))


@identical(plans=1)
def test_a_buffer_replaced_by_a_view_of_itself():
    def turn(net, out):
        net.a = net.a.view(3, 3)
        net.b = 0.9 * net.b + 0.1 * out.detach().mean()

    return trained(Replacing(turn))


@identical(plans=1)
def test_a_buffer_replaced_by_one_that_is_replaced_too():
    def shift(net, out):
        net.a, net.b = out.detach()[:3], net.a

    return trained(Replacing(shift))


@refused("strides (1, 3) instead of (3, 1)")
def test_a_buffer_that_is_transposed():
    def turn(net, _out):
        net.a = net.a.t()

    return trained(Replacing(turn))


@refused("share bytes with 'b'")
def test_a_buffer_that_becomes_another():
    def same(net, _out):
        net.a = net.b

    return trained(Replacing(same))


@refused("share bytes with 'head.weight'")
def test_a_buffer_that_becomes_a_parameter():
    def same(net, _out):
        net.a = net.head.weight.detach()

    return trained(Replacing(same))


@identical(plans=1)
def test_a_buffer_that_is_handed_back_and_replaced():
    model = Stateful()

    def loss(net, batch):
        before = net.h
        return nn.functional.cross_entropy(net(batch[0]), batch[1]), before

    return Loop(model, loss, adam(model))


@refused("one tensor in the place of several buffers")
def test_two_buffers_that_become_one():
    def same(net, out):
        net.a = net.b = out.detach()[:3] * 1.0

    return trained(Replacing(same))


# --- buffers that the first step makes, or makes larger -----------------------------------------------------------


class Registering(nn.Module):
    """Keeps what it makes of the sizes of its first batch, or of its numbers, as a buffer."""

    def __init__(self, *, known: bool, of_numbers: bool, persistent: bool = True) -> None:
        super().__init__()
        self.layer, self.of_numbers, self.persistent = nn.Linear(4, 3), of_numbers, persistent
        if known:
            self.register_buffer("bias", None, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "bias", None) is None:
            bias = x.mean(0)[:3] if self.of_numbers else torch.arange(3.0) / 10
            self.register_buffer("bias", bias, persistent=self.persistent)
        return self.layer(x) + self.bias


@identical(plans=2)
def test_a_buffer_that_the_first_step_sets():
    return trained(Registering(known=True, of_numbers=False))


@identical(plans=2)
def test_a_buffer_that_the_first_step_registers():
    return trained(Registering(known=False, of_numbers=False, persistent=False))


@identical(plans=2)
def test_a_buffer_that_the_first_step_makes_of_its_batch():
    return trained(Registering(known=False, of_numbers=True))


class Spiking(nn.Module):
    """A membrane that is empty before the first batch, and has the size of the batch from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("membrane", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = self.layer(x)
        if self.membrane.shape != current.shape:
            self.membrane = torch.zeros_like(current)
        self.membrane = self.membrane.detach() * 0.9 + current
        return self.head(self.membrane)


@identical(plans=2)
def test_a_buffer_that_grows():
    return trained(Spiking())


@identical(plans=None)
def test_a_buffer_of_another_size_for_each_batch():
    sizes = [6, 4, 4, 5]

    def batch(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = pairs(k)
        return x[: sizes[k]], y[: sizes[k]]

    return trained(Spiking(), batch=batch)


class Moving(nn.Module):
    """Moves its parameter in each step to where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.data = self.scale.data.to(x.device, x.dtype)
        return self.layer(x) * self.scale


@identical(plans=1)
def test_a_parameter_that_is_moved_to_where_it_is():
    return trained(Moving())


class Switching(nn.Module):
    """Its first batch decides of what it is made, as BigBird's attention of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.decided = nn.Linear(4, 8), nn.Linear(8, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.decided:
            self.layer, self.decided = nn.Sequential(self.layer, nn.Tanh()), True
        return self.head(self.layer(x))


def test_modules_that_the_first_step_replaces():
    """That step is eager's, and what comes after it is planned."""

    def run(step_of):
        torch.manual_seed(0)
        model = Switching()
        optimizer = adam(model)
        step = step_of(model, optimizer)
        return [step(pairs(k)).detach() for k in range(4)], model, step

    def eager(model, optimizer):
        def step(batch):
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            return loss

        return step

    def planned(model, optimizer):
        with pytest.warns(Fallback, match="replaces modules"):
            return tightship.fit(model, cross_entropy, optimizer, pairs(0), cache=None, seconds_per_op=0.0)

    (expected, one, _), (found, other, step) = run(eager), run(planned)
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    assert step.plan.steps and step.last is not None and step.last.as_planned
