"""Checks that a step's own code makes of what it computes: planned, and made in each step, before any update."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional

import tightship
from support.harness import Loop, run
from tightship.errors import CheckFailed, Unplannable
from tightship.execute.fit import fit
from tightship.execute.interpreter import Fallback


@pytest.fixture(autouse=True)
def _arguments_are_checked(monkeypatch):
    """Dynamo switches it off for the whole process, when it first compiles anything."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


class Net(nn.Module):
    """A mean and a scale for each of four numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 8)

    def forward(self, x):
        return self.out(self.norm(x)).chunk(2, 1)


def batch(number):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


def normal(model, x):
    mean, scale = model(x)
    return -distributions.Normal(mean, scale.exp()).log_prob(x).mean()


def whole(model, x):
    mean, scale = model(x)
    covariance = torch.diag_embed(scale.exp())
    return -distributions.MultivariateNormal(mean, covariance).log_prob(x).mean()


def torchs_own(model, x):
    mean, scale = model(x)
    return functional.gaussian_nll_loss(mean, x, scale.exp())


def asserted(model, x):
    mean, scale = model(x)
    assert (scale.exp() > 0).all(), f"{scale}"
    return (mean * scale).square().mean()


def two_conditions(model, x):
    mean, scale = model(x)
    if (mean.abs() > 1e6).any() or not (scale < 1e6).all().item():
        message = "diverged"
        raise RuntimeError(message)
    return (mean * scale).square().mean()


def inside_of_a_block(model, x):
    mean, scale = model(x)
    with torch.no_grad():
        try:
            assert bool(torch.all(mean < 1e6))
        finally:
            mean = mean * 2
    return (mean * scale).square().mean()


def calls_at_the_end(model, x):
    mean, scale = model(x)
    ended = []
    for part in (mean, scale):
        try:
            with torch.enable_grad():
                assert torch.all(part < 1e6)
        finally:
            ended.append(len(ended))
            if len(ended) > 1:
                ended.clear()
    return (mean * scale).square().mean()


@pytest.mark.parametrize(
    "loss",
    [normal, whole, torchs_own, asserted, two_conditions, inside_of_a_block, calls_at_the_end],
    ids=lambda f: f.__name__,
)
def test_planned(loss, tmp_path):
    def build():
        model = Net()
        return Loop(model, loss, torch.optim.AdamW(model.parameters(), 0.01), batch)

    verdict = run(build, tmp_path)
    assert (verdict.kind, verdict.plans) == ("identical", 1), verdict


def raised_again(model, x):
    mean, scale = model(x)
    try:
        if not torch.all((mean + x.sum()).abs() < 1e6):
            raise ArithmeticError("too large")
    except ArithmeticError as error:
        model.failed = True
        raise RuntimeError(f"in the step: {error}") from error
    except (TypeError, KeyError):
        raise
    return (mean * scale).square().mean()


def test_errors_that_are_caught_to_be_raised_again_are_errors():
    model = Net()
    step = tightship.fit(
        model,
        raised_again,
        torch.optim.SGD(model.parameters(), 0.1),
        batch(0),
        "100%",
        cache=None,
        strict=True,
    )
    step(batch(0))
    with pytest.raises(tightship.CheckFailed, match="test_assertions"):
        step(batch(0) * 1e30)


def caught(model, x):
    mean, scale = model(x)
    try:
        assert (mean > 0).all()
    except AssertionError:
        mean = mean.clamp(min=0)
    return (mean * scale).square().mean()


def caught_whatever_it_is(model, x):
    mean, scale = model(x)
    try:
        assert (mean > 0).all()
    except:  # noqa: E722
        mean = mean.clamp(min=0)
    return (mean * scale).square().mean()


def number_or_none(model, x):
    mean, scale = model(x)
    try:
        factor = scale.sum().item()
    except Exception:  # what a step cannot answer is no error of eager's
        factor = 0.0
    return (mean * factor).square().mean()


def left_in_the_end(model, x):
    mean, scale = model(x)
    for factor in (1.0, 2.0):
        try:
            assert (mean > factor).all()
        finally:
            break  # noqa: B012
    return (mean * scale).square().mean()


def both_go_on(model, x):
    mean, scale = model(x)
    if (mean > 0).all():
        scale = scale * 2
    return (mean * scale).square().mean()


def keeps_what_it_saw(model, x):
    mean, scale = model(x)
    if (mean > 0).all():
        model.seen = True
        raise ValueError
    return (mean * scale).square().mean()


GOES_ON = [caught, caught_whatever_it_is, number_or_none, left_in_the_end, both_go_on, keeps_what_it_saw]


@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.Fallback")
@pytest.mark.parametrize("loss", GOES_ON, ids=lambda f: f.__name__)
def test_what_goes_on_is_no_check(loss):
    def trained(ours):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if ours:
            step = tightship.fit(model, loss, optimizer, batch(0), "100%", cache=None)
        for k in range(4):
            if ours:
                step(batch(k))
                continue
            optimizer.zero_grad()
            loss(model, batch(k)).backward()
            optimizer.step()
        return model

    expected, found = trained(False).state_dict(), trained(True).state_dict()
    assert [k for k in expected if not torch.equal(expected[k], found[k])] == []


@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.Fallback")
@pytest.mark.parametrize("loss", GOES_ON, ids=lambda f: f.__name__)
def test_what_goes_on_is_waited_for_where_nothing_may_be_guessed(loss):
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]
    step = tightship.fit(models[0], loss, optimizers[0], batch(0), "100%", cache=None, strict=True)

    def trained(k):
        try:
            loss(models[1], batch(k)).backward()
        except ValueError:
            return False
        optimizers[1].step()
        optimizers[1].zero_grad()
        return True

    for k in range(4):
        if trained(k):
            step(batch(k))
            # Where an assertion fails, pytest's own code asks for more, each time anew.
            assert step.measure()["planned_peak"] is not None or "assert" in inspect.getsource(loss)
        else:
            with pytest.raises(ValueError):
                step(batch(k))
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))


def given_scale(model, x):
    """The batch is the scale, which has to be above 0."""
    mean, scale = model(x)
    return -distributions.Normal(mean, scale * 0 + x[:, :1]).log_prob(x).mean()


def given_limit(model, x):
    mean, scale = model(x)
    assert (mean < x.abs().max() * 1e6).all()
    if (x[:, :1] <= 0).any():
        raise ValueError("at most 0")
    return (mean * scale).square().mean()


@pytest.mark.parametrize("budget", ["100%", "static+85%"])
@pytest.mark.parametrize("loss", [given_scale, given_limit], ids=lambda f: f.__name__)
def test_a_check_that_fails_changes_no_parameter(loss, budget):
    """Batch 2 breaks it, in eager, too; both go on with the next one."""
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in models]
    step = fit(models[1], loss, optimizers[1], batch(0).abs(), budget, cache=None)
    for number in range(5):
        x = batch(number) if number == 2 else batch(number).abs()
        if number == 2:
            for attempt in (lambda x: loss(models[0], x), step):
                with pytest.raises(ValueError) as raised:
                    attempt(x)
            assert isinstance(raised.value, CheckFailed) and "test_assertions.py" in raised.value.place
        else:
            theirs = loss(models[0], x)
            theirs.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            assert torch.equal(theirs, step(x))
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    used = step.measure()
    assert used["measured_peak"] == used["planned_peak"] and used["misses"] == 0


def test_no_update_runs_before_a_check():
    """Wherever a planner would like to have it."""
    model = Net()
    step = fit(
        model, given_limit, torch.optim.SGD(model.parameters(), 0.1), batch(0).abs(), "100%", cache=None
    )
    graph = step.graph
    checks = {k for k, op in enumerate(graph.ops) if op.target == "expect"}
    assert len(checks) == 2
    assert all(checks <= {*op.control} for op in graph.ops if op.phase == "update")


def test_gradients_of_earlier_parts_stay_where_a_check_fails():
    model = Net()
    step = fit(
        model,
        given_limit,
        torch.optim.SGD(model.parameters(), 0.1),
        batch(0).abs(),
        "100%",
        cache=None,
        split=True,
    )
    step.backward(batch(0).abs())
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    step.backward(batch(1).abs())
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert any(not torch.equal(before[n], g) for n, g in once.items())
    with pytest.raises(CheckFailed):
        step.backward(batch(2))
    assert all(torch.equal(p.grad, once[n]) for n, p in model.named_parameters())
    step.update()


def draws(model, x):
    try:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    except Exception:
        noise = torch.zeros_like(x)
    return model(x + noise).square().mean()


def seeds(model, x):
    try:
        torch.manual_seed(1)
    except Exception:
        x = x * 2
    return model(x).square().mean()


def converts(model, x):
    try:
        model.double()
    except Exception:
        x = x * 2
    model.float()
    return model(x).square().mean()


@pytest.mark.parametrize("loss", [draws, seeds, converts], ids=lambda f: f.__name__)
def test_a_refusal_that_the_code_catches_is_not_lost(loss):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    want = loss(copy.deepcopy(model), batch(0))
    with pytest.warns(Fallback, match="run in eager"):
        step = tightship.fit(
            model, loss, torch.optim.SGD(model.parameters(), 0.1), batch(0), "100%", cache=None
        )
    assert torch.equal(step(batch(0)), want)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return loss(self.inner, x)

    with pytest.raises(Unplannable):
        tightship.infer(Whole(), batch(0))
