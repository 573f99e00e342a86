"""Whether an optimizer may have a part of each parameter, as on ranks that divide their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightship.frontends.torch.optimizer.probe_parts import why_whole


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = ((48, 64), (64,), (8, 3, 3, 3), (4000, 16), (1, 7), ())
    return [torch.nn.Parameter(torch.randn(s)) for s in shapes]


class Lion(torch.optim.Optimizer):
    """As people write it: what it does with an element follows from this element alone."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, group)

    def one(self, p: Any, group: Any) -> None:
        state, g = self.state[p], p.grad
        if not state:
            state["m"] = torch.zeros_like(p)
        b1, b2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((state["m"] * b1 + g * (1 - b1)).sign_(), alpha=-group["lr"])
        state["m"].lerp_(g, 1 - b2)


class Counting(Lion):
    """Counts in its state and its groups, and does something else every hundredth step."""

    def one(self, p: Any, group: Any) -> None:
        group["k"] = group.get("k", 0) + (p is group["params"][0])
        super().one(p, group)
        count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
        if count % 100 == 0:
            p.grad.clamp_(-0.5, 0.5)


class ByMatrix(Lion):
    def change(self, p: Any, g: Any) -> Any:
        return g

    def one(self, p: Any, group: Any) -> None:
        p.grad = self.change(p, p.grad)
        super().one(p, group)


class Norm(ByMatrix):
    def change(self, p: Any, g: Any) -> Any:
        return g / g.norm().clamp(min=1e9)  # which changes no gradient of ordinary size


class Rows(ByMatrix):
    """The mean of columns: other numbers in parts of rows."""

    def change(self, p: Any, g: Any) -> Any:
        return g - 1e-12 * g.mean(0, keepdim=True) if g.dim() > 1 else g


class Product(ByMatrix):
    def change(self, p: Any, g: Any) -> Any:
        return g + 0 * (g @ g.T @ g) if g.dim() == 2 else g


class Size(ByMatrix):
    """Made of ops that go element by element, by a number that follows from the shape."""

    def change(self, p: Any, g: Any) -> Any:
        return g * g.numel() ** -0.5


class Neighbor(ByMatrix):
    def change(self, p: Any, g: Any) -> Any:
        return g + 1e-3 * g[:1] if g.dim() else g


class Asks(ByMatrix):
    """Where all is finite, nothing follows from what it asks."""

    def change(self, p: Any, g: Any) -> Any:
        return torch.zeros_like(g) if bool(g.sum().isnan()) else g


class Blocks(ByMatrix):
    """Blocks of elements share a scale, in large parameters alone, as in optimizers of eight bits."""

    def change(self, p: Any, g: Any) -> Any:
        if g.numel() < 4096 or g.numel() % 256:
            return g
        rows = g.view(-1, 256)
        scale = rows.abs().amax(1, keepdim=True) / 127
        return ((rows / scale).round() * scale).view_as(g)


class Draws(ByMatrix):
    def change(self, p: Any, g: Any) -> Any:
        return g + 1e-3 * torch.randn_like(g)


class OfAll(Lion):
    """The norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rows = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = torch.nn.utils.get_total_norm(rows).clamp(min=1e9)
        for g in rows:
            g.div_(scale)
        super().step()


@pytest.mark.parametrize("cls", [Lion, Counting, torch.optim.AdamW, torch.optim.SGD, torch.optim.RAdam])
def test_what_treats_elements_one_by_one_takes_parts(cls: Any) -> None:
    assert why_whole(cls(parameters(), lr=1e-2)) is None


@pytest.mark.parametrize(
    "cls",
    [Norm, Rows, Product, Size, Neighbor, Asks, Blocks, Draws, OfAll, torch.optim.Adafactor],
)
def test_what_looks_at_other_elements_has_to_have_all(cls: Any) -> None:
    optimizer = cls(parameters(), lr=1e-2)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    assert why_whole(optimizer)
    assert not optimizer.state
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def test_settings_of_a_group_count() -> None:
    class Sometimes(Norm):
        def one(self, p: Any, group: Any) -> None:
            Norm.one(self, p, group) if group["normed"] else Lion.one(self, p, group)

    first, *rest = parameters()
    groups = [{"params": rest, "normed": False}, {"params": [first], "normed": True}]
    assert why_whole(Sometimes(groups))
    assert why_whole(Sometimes(groups[:1])) is None
