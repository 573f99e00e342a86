"""A pass is captured again when a Python attribute of the model changes, and only then."""

import types

import pytest
import torch
from torch import nn

from tightship.execute.infer import infer


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale, self.steps = 2.0, [1.0, 2.0]
        self.config = types.SimpleNamespace(shift=0.5)

    def forward(self, x):
        return self.inner(x) * self.scale * self.steps[1] + self.config.shift


def _scale(model):
    model.scale = 3.0


def _element(model):
    model.steps[1] = 5.0


def _configuration(model):
    model.config.shift = 1.5


def _configuration_replaced(model):
    model.config = types.SimpleNamespace(shift=2.5)


def _hook(model):
    model.inner.register_forward_hook(lambda m, args, out: out + 1)


def _forward(model):
    model.inner.forward = lambda x: -x


def _new(model):
    model.inner.weight_scale = 1.0  # read by nobody, which only the code knows


@pytest.fixture
def running():
    torch.manual_seed(0)
    model = Scaled()
    return model, infer(model, torch.randn(3, 4), cache=None, seconds_per_op=0.0, seconds=0.1)


@pytest.mark.parametrize(
    "change", [_scale, _element, _configuration, _configuration_replaced, _hook, _forward, _new]
)
def test_a_change_is_seen(running, change):
    model, run = running
    x = torch.randn(3, 4)
    assert torch.equal(run(x), model(x))
    change(model)
    assert torch.equal(run(x), model(x))
    assert any("captured again" in note for note in run.notes)
    assert torch.equal(run(x), model(x))


def test_modes_and_equal_values_are_no_change(running):
    model, run = running
    x = torch.randn(3, 4)
    model.train()
    model.scale = float("2.0")
    assert torch.equal(run(x), model(x))
    model.eval()
    assert torch.equal(run(x), model(x))
    assert not any("captured again" in note for note in run.notes)
