"""Higher-order ops (torch.cond, scan, map) in a step: run as eager runs them, and said."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan

import tightship
from tightship.errors import Unsupported
from tightship.execute.interpreter import Fallback


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.a, self.b = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if self.kind == "cond":
            return torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x).tanh(), (x,))
        if self.kind == "map":
            return mapped(lambda row: self.a(row).relu(), x)

        def turn(carry, row):
            carry = torch.tanh(self.a(carry) + self.b(row))
            return carry, carry.clone()

        return scan(turn, torch.zeros(8), x, dim=0)[1]


def loss_of(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("kind", ["cond", "map", "scan"])
def test_steps_with_higher_order_ops_run_in_eager(kind):
    """Their backward passes are of their own making: the branch that is not taken has gradients of zeros."""
    model, batches = Model(kind), [torch.randn(4, 8) + k % 2 * 3 - 1 for k in range(4)]
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), weight_decay=0.1) for m in (model, twin))
    with pytest.warns(Fallback, match="steps run in eager.*a higher-order op"):
        step = tightship.fit(model, loss_of, optimizer, batches[0], "90%", cache=None, seconds_per_op=0.0)
    for x in batches:
        expected = loss_of(twin, x)
        expected.backward()
        other.step()
        other.zero_grad()
        assert torch.equal(step(x), expected)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_they_are_refused_where_all_is_to_be_planned():
    model = Model("cond")
    with pytest.raises(Unsupported, match="write the loop or the branch in Python"):
        tightship.fit(
            model, loss_of, torch.optim.SGD(model.parameters()), torch.randn(4, 8), "90%", cache=None,
            seconds_per_op=0.0, strict=True,
        )  # fmt: skip
