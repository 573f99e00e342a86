"""Compiled mode in loops as people write them: whole steps as one function, passes that compute nothing."""

import pytest
import torch
from torch import nn

from support.compiled import numbers
from tightship.integrations.torch_compile import compiled_plans

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"work": 1_000_000, "cache": None}


def as_planned(call):
    plans = compiled_plans(call)
    assert all(
        g.last.as_planned and g.last.measured_peak == g.last.planned_peak <= g.plan.peak for g in plans
    )
    assert all(g.plan.budget is None or g.plan.peak <= g.plan.budget for g in plans)
    return [g.kind for g in plans]


def net():
    torch.manual_seed(0)
    rows = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return nn.Sequential(*rows, nn.Linear(32, 4))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "compiled"])
@pytest.mark.filterwarnings("ignore:.*Unsupported Tensor.backward:tightship.execute.interpreter.Fallback")
@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_a_step_of_the_optimizer_that_is_compiled_has_what_the_backward_pass_gave_back(mode):
    def stepping(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def train(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return train

    model, other = net(), net()
    call = torch.compile(
        stepping(model), backend="tightship", options={**OPTIONS, "mode": mode, "budget": "85%"}
    )
    reference = stepping(other)
    for k in range(3):
        torch.testing.assert_close(call(numbers(256, 32, seed=k)), reference(numbers(256, 32, seed=k)))
        kinds = as_planned(call)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert kinds[0] == "training"
    assert "inference" in kinds


def plus(a, b):
    return a + b


def detached(a, b):
    return a.detach(), b


def viewed(a, b):
    return a.view(-1), 2 * b


@pytest.mark.parametrize("function", [plus, detached, viewed])
def test_passes_that_compute_nothing_take_nothing(function):
    """A sum hands its gradient on, and what is detached is what was given."""
    call = torch.compile(
        function, backend="tightship", options={**OPTIONS, "mode": "compiled", "strict": True}
    )
    for k in range(2):
        given = [numbers(8, 8, seed=k + j).requires_grad_() for j in (0, 9)]
        rows = []
        for run in (call, function):
            found = run(*given)
            found = found if isinstance(found, tuple) else (found,)
            rows.append([*found, *torch.autograd.grad(sum(t.sum() for t in found), given, allow_unused=True)])
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*rows, strict=True))
        as_planned(call)
