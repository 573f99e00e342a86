"""fit(mode="compiled"): numbers that change from step to step, as inputs of what was compiled."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from support import runs
from tightship import fit
from tightship.execute import compiled_code
from tightship.execute.prepared import Thrashing

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.slow,
]

OPTIONS = {"mode": "compiled", "strict": True, "cache": None}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(32, 16, generator=g), torch.randn(32, 4, generator=g)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def eager(model, optimizer, call=loss):
    return partial(runs.eager, model, call, optimizer)


def assert_close(a, b):
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y)


def as_planned(step):
    used = step.measure()
    return used["measured_peak"] == used["planned_peak"] and not used["misses"]


@pytest.fixture
def compilations(monkeypatch):
    """How many times something was compiled."""
    made, run = [], compiled_code.Compilation.run
    monkeypatch.setattr(compiled_code.Compilation, "run", lambda self: (made.append(self), run(self))[1])
    return made


def test_a_number_that_changes_is_an_input_from_then_on(compilations):
    model, other = net(), net()
    weight = [1.0]

    def weighted(m, batch):
        return loss(m, batch) * weight[0] + m[0].weight.square().sum() ** weight[0]

    step, reference = fit(model, weighted, sgd(model), data(), **OPTIONS), eager(other, sgd(other), weighted)
    for k in range(5):
        weight[0] = 0.8**k
        torch.testing.assert_close(step(data(seed=k)), reference(data(seed=k)))
        assert_close(model, other)
        assert as_planned(step)
    assert len(compilations) == 2
    assert any("is an input of the compiled step from now on" in note for note in step.notes)


def test_a_number_that_the_data_say_is_an_input_from_the_beginning(compilations):
    model, other = net(), net()

    def masked(m, batch):
        kept = batch[1] > 0
        return ((m(batch[0]) - batch[1]) * kept).square().sum() / kept.sum().item()

    step, reference = fit(model, masked, sgd(model), data(), **OPTIONS), eager(other, sgd(other), masked)
    for k in range(4):
        torch.testing.assert_close(step(data(seed=k)), reference(data(seed=k)))
        assert_close(model, other)
        assert as_planned(step)
    assert len(compilations) == 1


def test_statistics_that_move_by_the_number_of_batches_are_those_of_eager(compilations):
    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))

    model, other = normed(), normed()
    step, reference = fit(model, loss, sgd(model), data(), **OPTIONS), eager(other, sgd(other))
    for k in range(4):
        torch.testing.assert_close(step(data(seed=k)), reference(data(seed=k)))
        for a, b in zip(model.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(a, b)
    assert len(compilations) <= 2


def test_a_number_without_room_for_another_input_is_compiled_again_and_said(compilations):
    budget, planned, weight, caught = "100%", None, [1.0], []
    while not caught:  # down to a peak that no plan with the number as an input meets
        budget = budget if planned is None else planned if planned < budget else planned - 64
        weight[0], model = 1.0, net()
        step = fit(model, lambda m, b: loss(m, b) * weight[0], sgd(model), data(), budget, **OPTIONS)
        budget, planned, weight[0] = step.measure()["budget"], step.measure()["planned_peak"], 0.25
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Thrashing)
            step(data())
        assert as_planned(step)
        assert step.measure()["measured_peak"] <= step.measure()["budget"]
    assert "compiled again: another number" in str(caught[0].message)


def test_a_number_that_code_cannot_take_compiles_again_and_says_so():
    model, other = net(), net()
    slope = [0.1]

    def sloped(m, batch):
        return nn.functional.leaky_relu(m(batch[0]) - batch[1], slope[0]).square().mean()

    step, reference = fit(model, sloped, sgd(model), data(), **OPTIONS), eager(other, sgd(other), sloped)
    step(data())
    reference(data())
    slope[0] = 0.25
    with pytest.warns(Thrashing, match="compiled again: another number"):
        step(data())
    reference(data())
    assert_close(model, other)
    assert any("compiled again" in note for note in step.notes)
