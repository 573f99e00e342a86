"""Code of a step that changes the batch it is given: what it has changed is the caller's own, as in eager, and no
rehearsal is seen there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tightship


class Graph:
    """As torch_geometric's ``Data``: no container that `fit` knows."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.log = x, y, {"loss": None}


class Slotted:
    __slots__ = ("seen", "x", "y")

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.seen = x, y, 0


def popped(model: Any, batch: Any) -> Any:
    y = batch.pop("y")
    return (model(batch["x"]) - y).square().mean()


def replaced(model: Any, batch: Any) -> Any:
    batch.x = model(batch.x)
    batch.log["loss"] = loss = (batch.x - batch.y).square().mean()
    return loss


def counted(model: Any, batch: Any) -> Any:
    batch.x, batch.seen = model(batch.x), batch.seen + 1
    return (batch.x - batch.y).square().mean() * batch.seen


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "a dict": (lambda x, y: {"x": x, "y": y}, popped),
    "an object": (Graph, replaced),
    "an object in a tuple": (lambda x, y: (Graph(x, y), 1), lambda model, batch: replaced(model, batch[0])),
    "a namespace": (lambda x, y: SimpleNamespace(x=x, y=y, log={}), replaced),
    "slots": (Slotted, counted),
}


def batches(make: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(1)
    return [make(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_leaves_the_batch_as_it_was(kind: str, accumulate: int) -> None:
    make, loss_fn = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    twin = copy.deepcopy(model)
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    given, eager = batches(make), batches(make)
    step = tightship.fit(model, loss_fn, mine, given[0], "100%", accumulate=accumulate, cache=None)
    for k, (a, b) in enumerate(zip(given, eager, strict=True)):
        loss = loss_fn(twin, b)
        loss.backward()
        assert torch.equal(step(a), loss.detach())
        if (k + 1) % accumulate == 0:
            other.step()
            other.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    for a, b in zip(given, eager, strict=True):
        for x, y in ((a, b), *(zip(a, b, strict=True) if isinstance(a, tuple) else ())):
            if hasattr(x, "x"):
                assert torch.equal(x.x, y.x)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"steps": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_gives_each_step_the_batch_as_it_was(kind: str, options: dict[str, Any]) -> None:
    make, loss_fn = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    batch = batches(make)[0]
    before = copy.deepcopy(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert tightship.estimate(model, batch, optimizer, loss_fn, **options).peak > 0
    assert (loss_fn(model, batch) - loss_fn(model, before)).item() == 0.0


class Forward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: Any) -> Any:
        batch.x = self.layer(batch.x)
        return batch.x


def test_a_forward_pass_that_is_captured_leaves_no_stand_ins() -> None:
    model = Forward().eval()
    first, second = batches(Graph)[:2]
    wanted = [model.layer(b.x).detach() for b in (first, second)]
    tightship.plan(model, first)
    run = tightship.infer(model, first, "100%")
    assert all(torch.equal(run(b), w) for b, w in zip((first, second), wanted, strict=True))
    assert type(first.x) is type(second.x) is torch.Tensor and first.x.sum().isfinite()
