"""Functions that choose among kernels by more than shapes: a plan has those that eager runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tightship
from support.harness import Loop, adam, identical


def _like(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Product(nn.Module):
    """``(8, 5, 33) @ (1, 33, 7)``, with gradients of one of them, both or none."""

    def __init__(self, how: Any, first: bool, second: bool) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Parameter(torch.ones(7))
        self.a = nn.Parameter(_like((8, 5, 33), 1), requires_grad=first)
        self.b = nn.Parameter(_like((1, 33, 7), 2), requires_grad=second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.how(self.a * x[0], self.b) * self.gate).square().mean()


WAYS = {
    "operator": lambda a, b: a @ b,
    "function": torch.matmul,
    "method": lambda a, b: a.matmul(b),
    "reflected": lambda a, b: b.__rmatmul__(a),
    "turned": lambda a, b: (b.mT @ a.mT).mT,
}


def batch(k: int) -> tuple[torch.Tensor, ...]:
    return (_like((8, 5, 33), k + 9),)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grads", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_products(way, grads, measurements):
    @identical(plans=1)
    def pattern():
        model = Product(WAYS[way], *grads)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Loop(model, lambda m, b: m(b[0][None]), torch.optim.Adam(trained, 0.01), batch=batch, steps=3)

    pattern(measurements)


@identical(plans=1)
def test_a_product_under_autocast():
    model = Product(WAYS["operator"], True, False)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(b[0][None]).float()

    return Loop(model, loss, adam(model), batch=batch, steps=3)


@pytest.mark.parametrize("way", WAYS)
def test_products_of_forward_passes(way, measurements):
    model = Product(WAYS[way], True, False).eval()
    run = tightship.infer(model, batch(0)[0][None], cache=measurements)
    with torch.no_grad():
        for k in range(3):
            x = batch(k)[0][None]
            assert torch.equal(model(x), run(x))
    assert not {"matmul", "__matmul__"} & vars(torch.Tensor).keys()  # as torch has them again
