"""Dropout, upsampling and autocast are eager's bit by bit, and what cannot be is said."""

import copy
import warnings

import pytest
import torch
from torch import nn

from support.compiled import QUICK, batch, compiled, deep, equal, step
from tightship.integrations.torch_compile import Fallback

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Turned(nn.Module):
    """Dropout on a tensor whose memory is in another order than its elements."""

    def __init__(self, *, inplace=False):
        super().__init__()
        self.inplace, self.linear = inplace, nn.Linear(16, 16)

    def forward(self, x):
        h = self.linear(x).view(-1, 4, 4).transpose(1, 2)
        return nn.functional.dropout(h * 2, 0.2, inplace=self.inplace).transpose(1, 2)


class Enlarged(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(1, 4, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x):
        return self.up(self.conv(x.view(-1, 1, 4, 4)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: deep(2, dropout=0.45),
        lambda: deep(2, dropout=1.0),
        Turned,
        lambda: Turned(inplace=True),
        Enlarged,
    ],
    ids=["a scale that rounds", "all dropped", "permuted", "in place", "bilinear"],
)
def test_ops_that_aot_autograd_decomposes_are_eager_s(make):
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    call = compiled(model)
    assert equal(step(call, model, batch()), step(other, other, batch()))
    assert torch.equal(torch.get_rng_state(), (step(other, other, batch()), torch.get_rng_state())[1])


def trained(call, model, dtype, steps=3):
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    rows = []
    for seed in range(steps):
        torch.manual_seed(seed)
        with torch.autocast("cpu", dtype):
            loss = call(batch(seed=seed)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        rows += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [t.detach().nan_to_num() for t in (*rows, *model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler_and_clipping_is_eager_s(dtype):
    model, other = deep(2, dropout=0.3), deep(2, dropout=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fallback)
        assert equal(trained(compiled(model), model, dtype), trained(other, other, dtype))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(self.linear(x))


def test_a_weight_used_twice_in_a_graph_under_autocast_is_said():
    model = Shared()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(Fallback, match=r"linear\.\w+ is used more than once"),
    ):
        compiled(model)(batch()).sum().backward()


def test_two_calls_under_one_autocast_context_are_said_and_two_contexts_are_eager_s():
    def two_calls(call, model, together):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            first = call(batch()).sum()
            second = call(batch(seed=1)).sum() if together else None
        if not together:
            with torch.autocast("cpu", torch.bfloat16):
                second = call(batch(seed=1)).sum()
        (first + second).backward()
        return [first.detach(), second.detach(), *(p.grad for p in model.parameters())]

    model, other = deep(2), deep(2)
    call = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fallback)
        assert equal(two_calls(call, model, False), two_calls(other, other, False))
    with pytest.warns(Fallback, match="more than once under one autocast context"):
        two_calls(call, model, True)


def test_sizes_are_never_symbols_by_themselves():
    """Symbols would need the decompositions: the second size would have other bits than the first."""
    model = deep(1, dropout=0.45)
    other = copy.deepcopy(model)
    call = torch.compile(model, backend="tightship", options={**QUICK})
    for rows in (8, 6, 5):
        assert equal(step(call, model, batch(rows)), step(other, other, batch(rows)))
