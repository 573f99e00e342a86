"""fit(mode="compiled"): ops whose sizes follow from data, of the sizes that a step was captured with; spectra."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tightship import fit

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.filterwarnings(
        "ignore:Torchinductor does not support code generation for complex:UserWarning"
    ),
    pytest.mark.slow,
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def data(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(32 * 8, dtype=torch.bool)
    mask[torch.randperm(32 * 8, generator=g)[:77]] = True
    return torch.randn(32, 16, generator=g), torch.randn(32, 8, generator=g), mask.view(32, 8)


def by_mask(out, y, mask):
    return (out - y)[mask].square().mean()


def into_mask(out, y, mask):
    made = torch.zeros_like(out)
    made[mask] = out[mask] * 2
    return F.mse_loss(made, y)


def masked_select(out, y, mask):
    return F.mse_loss(out.masked_select(mask), y.masked_select(mask))


def nonzero(out, y, mask):
    rows, columns = mask.nonzero().unbind(1)
    return (out - y)[rows, columns].square().mean()


def by_rows_and_mask(out, y, mask):
    rows = mask[0]
    return (out - y)[:, rows[:8]].square().mean() + (out - y)[2, mask[2]].square().sum()


def repeated(out, y, mask):
    times = torch.tensor([1, 2, 0, 3], device=y.device).repeat(8)
    return F.mse_loss(out.repeat_interleave(times, 0), y.repeat_interleave(times, 0))


def grouped(out, y, mask):
    kinds, place = torch.unique(torch.arange(32) % 7, return_inverse=True)
    return torch.zeros(len(kinds), 8).index_add(0, place, out - y).square().mean()


def ctc(out, y, mask):
    rows = out.view(8, 4, 8).log_softmax(-1)
    letters = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 1]])
    return F.ctc_loss(rows, letters, torch.tensor([8, 7, 8, 6]), torch.tensor([2, 1, 2, 1]))


def spectra(out, y, mask):
    weights = torch.view_as_complex(torch.linspace(-1, 1, 6).view(3, 2))
    found = torch.fft.rfft(out)
    kept = torch.zeros_like(found)
    kept[:, :3] = found[:, :3] * weights  # a copy into a part of complex numbers
    return (found.abs() - torch.fft.rfft(y).abs()).square().mean() + torch.fft.irfft(kept).square().mean()


LOSSES = [spectra, by_mask, into_mask, masked_select, nonzero, by_rows_and_mask, repeated, grouped, ctc]


@pytest.mark.parametrize("call", LOSSES, ids=lambda call: call.__name__)
def test_sizes_that_follow_from_data_are_those_that_were_captured(call):
    def loss(model, batch):
        return call(model(batch[0]), *batch[1:])

    model, other = net(), net()
    same = data(0)[2]  # each other count is a kind of its own
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    step = fit(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data(0),
        mode="compiled",
        strict=True,
        cache=None,
    )
    for k in range(3):
        batch = (*data(k)[:2], data(k)[2] if call is not by_rows_and_mask else same)
        optimizer.zero_grad()
        expected = loss(other, batch)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), expected.detach())
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        used = step.measure()
        assert used["measured_peak"] == used["planned_peak"] and not used["misses"]


@pytest.mark.parametrize("call", [by_mask, into_mask], ids=lambda call: call.__name__)
def test_another_count_is_another_kind_with_a_plan_of_its_own(call):
    def loss(model, batch):
        return call(model(batch[0]), *batch[1:])

    model, other = net(), net()
    step = fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), data(0), mode="compiled", cache=None)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    x, y, mask = data(1)
    for batch in ((x, y, mask), (x, y, ~mask)):
        optimizer.zero_grad()
        loss(other, batch).backward()
        optimizer.step()
        step(batch)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        assert step.last.measured_peak == step.last.planned_peak and not step.last.misses


def test_what_was_captured_is_known_when_another_number_compiles_the_step_again():
    weight = [1.0]

    def loss(model, batch):
        return by_mask(model(batch[0]), *batch[1:]) * weight[0]

    model, other = net(), net()
    step = fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), data(0), mode="compiled", cache=None)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for k in range(2):
        weight[0] = 1 / (k + 1)
        optimizer.zero_grad()
        loss(other, data(k)).backward()
        optimizer.step()
        step(data(k))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        assert step.last.measured_peak == step.last.planned_peak and not step.last.misses
