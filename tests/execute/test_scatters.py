"""Ops that copy a tensor and write another one into a part of it. Their kernels copy the whole storage that a tensor
lies in, and torch.compile makes them of what is written into slices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tightship.execute.fit import fit
from tightship.integrations.torch_compile import compiled_plans

VIEWS = {
    "whole": lambda x: x,
    "rows": lambda x: x[:12],
    "later rows": lambda x: x[4:],
    "columns": lambda x: x[:, 3:11],
    "turned": lambda x: x.t()[2:9],
    "every other": lambda x: x[:, ::2],
    "one row, again and again": lambda x: x[0].expand(9, 16),
}
SCATTERS = {
    "slice": lambda v: torch.slice_scatter(v, v[:2] * 2, 0, 2, 4),
    "select": lambda v: torch.select_scatter(v, v[:, 0] * 2, 1, 1),
    "diagonal": lambda v: torch.diagonal_scatter(v, v.diagonal() * 2),
}


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.part = part

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return self.part(y).pow(2).sum() + self.part(y * 3).sin().sum()


def windows(y):
    """The mask of attention in shifted windows: a number in each part of it."""
    mask, number = y.new_zeros(16, 16), 0
    for rows in ((0, -4), (-4, -2), (-2, None)):
        for columns in ((0, -4), (-4, -2), (-2, None)):
            mask[rows[0] : rows[1], columns[0] : columns[1]] = number
            number += 1
    mask.diagonal()[2:5] = 1
    mask[:, 4].fill_(2.0)
    own = y.clone()
    own[1:3, 2:9] = y[3:5, 1:8] * 2
    return own * (mask.unsqueeze(0) - mask.unsqueeze(1)).masked_fill(mask == 3, -1.0)


def trained(part, *, how):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Net(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(16, 16) for _ in range(3)]
    if how == "fit":
        step = fit(model, lambda model, x: model(x), optimizer, batches[0], cache=None)
        losses = [step(x) for x in batches]
        assert step.last.as_planned
    else:
        options = {"budget": "100%", "strict": True, "cache": None}
        run = torch.compile(model, backend="tightship", options=options) if how == "backend" else model
        losses = []
        for x in batches:
            losses.append(run(x))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert how == "eager" or [g.last.as_planned for g in compiled_plans(run)] == [True]
    return [*(x.detach() for x in losses), *model.parameters()]


@pytest.mark.parametrize("how", ["fit", "backend"])
@pytest.mark.parametrize("view", VIEWS)
def test_parts_written_into_copies_of_views_are_as_in_eager(view, how):
    def parts(y):
        return sum(scatter(VIEWS[view](y)).cos().sum(0, keepdim=True) for scatter in SCATTERS.values())

    assert all(map(torch.equal, trained(parts, how="eager"), trained(parts, how=how)))


def test_parts_by_strides_are_as_in_eager():
    def parts(y):
        v = y[:12]
        return torch.as_strided_scatter(v, y[0, :8] * 2, (8,), (2,), 5) + y.new_zeros(16, 16)[:12]

    assert all(map(torch.equal, trained(parts, how="eager"), trained(parts, how="fit")))


@pytest.mark.parametrize("how", ["fit", "backend"])
def test_masks_of_shifted_windows_are_as_in_eager(how):
    assert all(map(torch.equal, trained(windows, how="eager"), trained(windows, how=how)))
