"""Data that a step's code puts in the place of a parameter's (``p.data = …``)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.harness import Loop, adam, identical, mlp, pairs, refused, sgd


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class MoCo(nn.Module):
    """As facebookresearch/moco has it: a key encoder that follows the query encoder, and a queue of keys."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum, self.rows = momentum, 12
        self.encoder_q, self.encoder_k = mlp(), mlp()
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(3, self.rows), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.momentum + q.data * (1.0 - self.momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.encoder_q(x), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.encoder_k(x + 0.1), dim=1)
        near = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        far = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        at = int(self.at)
        self.queue[:, at : at + len(x)] = k.T
        self.at[0] = (at + len(x)) % self.rows
        return torch.cat([near, far], dim=1) / 0.07


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@identical(plans=2, verify_every=2)
def test_a_key_encoder_that_follows_the_query_encoder():
    model = MoCo()
    return Loop(model, contrast, sgd(model))


def test_all_of_it_is_planned() -> None:
    import tightship

    model = MoCo()
    step = tightship.fit(
        model, contrast, sgd(model), pairs(0), "100%", strict=True, seconds=1.0, progress=False
    )
    for k in range(3):
        step(pairs(k))
    measured = step.measure()
    assert measured["planned_peak"] == measured["measured_peak"]
    assert measured["misses"] == 0


@identical(plans=1, verify_every=2)
def test_a_target_network_outside_of_the_model():
    model = mlp()
    target = copy.deepcopy(model)

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for t, s in zip(target.parameters(), net.parameters(), strict=True):
                t.data = 0.9 * t.data + 0.1 * s.data
            wanted = target(batch[0])
        return F.mse_loss(net(batch[0]), wanted.detach() + 1.0)

    return Loop(model, loss, adam(model), watched=lambda: [*target.parameters()])


@identical(plans=1)
def test_a_target_network_that_follows_after_it_was_read():
    model = mlp()
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        value = F.mse_loss(net(batch[0]), target(batch[0]) + 1.0)
        for t, s in zip(target.parameters(), net.parameters(), strict=True):
            t.data = t.data.lerp(s.data, 0.1)
        return value

    return Loop(model, loss, adam(model), watched=lambda: [*target.parameters()])


def set_before(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


def set_weights(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = 0.5 * p.data


def exchange(model: nn.Module) -> None:
    first, second = model[3].bias, model[4].bias
    first.data, second.data = second.data, first.data


def put_back(model: nn.Module) -> None:
    held = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 2.0
    model.doubled = F.relu(model[0].weight).sum().detach()
    for p, was in zip(model.parameters(), held, strict=True):
        p.data = was


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("change", [set_before, set_weights, exchange, put_back])
def test_trained_parameters(change: Callable[[nn.Module], None], after: bool, measurements: Any) -> None:
    """Gradients are those of what autograd has saved, which may be the parameter itself; the optimizer steps what the
    code has put there."""

    @identical(plans=1)
    def pattern() -> Loop:
        model = nn.Sequential(*mlp(), nn.Linear(3, 3), nn.LayerNorm(3))

        def loss(net: nn.Module, batch: Any) -> torch.Tensor:
            if not after:
                change(net)
            value = cross_entropy(net, batch)
            if after:
                change(net)
            return value

        return Loop(model, loss, adam(model))

    pattern(measurements)


# --- parameters that a step freezes for a while -------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer with an adapter, which a context leaves out and freezes, as peft's ``disable_adapter`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(4, 3),
            nn.Linear(4, 2, bias=False),
            nn.Linear(2, 3, bias=False),
        )
        self.base.requires_grad_(False)
        self.enabled = True

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        self.enabled = False
        for p in (self.down.weight, self.up.weight):
            p.requires_grad = False
        yield
        self.enabled = True
        self.down.requires_grad_(True)
        self.up.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.up(self.down(x)) if self.enabled else out


@pytest.mark.parametrize("first", [False, True])
def test_an_adapter_that_is_frozen_for_the_reference_of_a_preference(first: bool, measurements: Any) -> None:
    @identical(plans=1, verify_every=2)
    def pattern() -> Loop:
        model = Adapted()

        def logs(x: torch.Tensor) -> torch.Tensor:
            return model(x).log_softmax(-1)

        def loss(net: Adapted, batch: Any) -> torch.Tensor:
            own = logs(batch[0]) if first else None
            with torch.no_grad(), net.disabled():
                reference = logs(batch[0])
            own = logs(batch[0]) if own is None else own
            ratio = (own - reference).gather(1, batch[1][:, None])
            return -F.logsigmoid(0.1 * (ratio[:3] - ratio[3:])).mean()

        return Loop(model, loss, torch.optim.AdamW([model.down.weight, model.up.weight], 0.05))

    pattern(measurements)


@pytest.mark.parametrize("planned", [True, False])
def test_a_frozen_critic_in_a_generators_loss(planned: bool, measurements: Any) -> None:
    """As in many GANs: gradients go through the critic, not to it; and where it is not thawed again."""

    def pattern() -> Loop:
        model, critic = mlp(), nn.Linear(3, 1)

        def loss(net: nn.Module, batch: Any) -> torch.Tensor:
            critic.requires_grad_(False)
            value = -critic(net(batch[0])).mean()
            if planned:
                critic.requires_grad_(True)
            return value

        return Loop(model, loss, adam(model), watched=lambda: [p.requires_grad for p in critic.parameters()])

    (identical(plans=1) if planned else refused("and left so"))(pattern)(measurements)
