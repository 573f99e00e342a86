"""fit(mode="compiled"): steps whose code looks at what they compute run op by op, within the same budget."""

import copy
import warnings

import pytest
import torch
from torch import nn

from support import runs
from tightship import errors, fit
from tightship.execute.compiled_step import WholePlan
from tightship.execute.interpreter import Fallback

pytestmark = pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch")

OPTIONS = {"mode": "compiled", "cache": None}


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(64, 16, generator=g), torch.randn(64, 4, generator=g)


def plain(model, b):
    return (model(b[0]) - b[1]).square().mean()


def logs(seen):
    def loss(model, b):
        out = plain(model, b)
        seen.append(out.item())
        return out

    return loss


def branches(seen):
    def loss(model, b):
        out = plain(model, b)
        seen.append(float(out) > 1.2)
        return out * 2 if seen[-1] else out

    return loss


def checks(seen):
    def loss(model, b):
        out = plain(model, b)
        seen.append(0.0 if torch.isfinite(out) else 1.0)
        return out

    return loss


def logs_now_and_then(seen):
    def loss(model, b):
        out = plain(model, b)
        seen.append(out.item() if len(seen) % 3 == 1 else 0.0)
        return out

    return loss


@pytest.mark.parametrize("kind", [logs, branches, checks])
def test_what_the_code_looks_at_is_there_and_the_step_is_within_the_budget(kind):
    model, seen, wanted = net(), [], []
    other, eager_loss = copy.deepcopy(model), kind(wanted)
    optimizer = torch.optim.AdamW(other.parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = fit(model, kind(seen), torch.optim.AdamW(model.parameters()), batch(), "80%", **OPTIONS)
        for k in range(4):
            torch.manual_seed(k)
            loss = step(batch(k))
            torch.manual_seed(k)
            assert torch.equal(loss, runs.eager(other, eager_loss, optimizer, batch(k)))
            used = step.measure()
            assert used["measured_peak"] <= used["planned_peak"] <= used["budget"]
            assert used["measured_peak"] == used["planned_peak"] or k == 0  # whose state is made in it
            assert step.metrics()["eager"] == 0
    assert seen == wanted
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    (text,) = [str(w.message) for w in said if issubclass(w.category, Fallback)]
    assert "test_compiled_looks.py" in text
    assert "op by op" in text
    assert text in step.notes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.Fallback")
def test_a_backward_pass_whose_code_looks_goes_before_a_compiled_update():
    model, seen, wanted = net(), [], []
    other, eager_loss = copy.deepcopy(model), logs(wanted)
    model[2].p = other[2].p = 0.0
    ours, optimizer = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    step = fit(model, logs(seen), ours, batch(), "100%", accumulate=2, **OPTIONS)
    for k in range(4):
        step(batch(k))
        eager_loss(other, batch(k)).backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
        used = step.measure()
        assert used["measured_peak"] == used["planned_peak"] <= used["budget"]
    assert seen == pytest.approx(wanted)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.Fallback")
def test_a_look_now_and_then_leaves_the_other_steps_compiled():
    model, seen, wanted = net(), [], []
    other, eager_loss = copy.deepcopy(model), logs_now_and_then(wanted)
    model[2].p = other[2].p = 0.0
    step = fit(
        model, logs_now_and_then(seen), torch.optim.SGD(model.parameters(), 0.1), batch(), "100%", **OPTIONS
    )
    optimizer, compiled = torch.optim.SGD(other.parameters(), 0.1), []
    for k in range(4):
        torch.testing.assert_close(step(batch(k)), runs.eager(other, eager_loss, optimizer, batch(k)))
        used = step.measure()
        assert used["measured_peak"] == used["planned_peak"] <= used["budget"]
        compiled.append(isinstance(step.plan, WholePlan))
    assert compiled == [True, False, True, True]
    assert seen == pytest.approx(wanted)


def test_a_look_is_refused_where_only_compiled_code_may_run():
    model = net()
    with pytest.raises(
        errors.Unsupported, match=r"looking at what a step computes at .*test_compiled_looks.py.*mode"
    ):
        fit(model, logs([]), torch.optim.SGD(model.parameters(), 0.1), batch(), "80%", strict=True, **OPTIONS)


@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.Fallback")
def test_steps_go_on_in_eager_where_what_can_be_planned_at_last_has_no_room():
    def freezes(model, b):
        model[0].bias.requires_grad_(False)  # cannot be planned but where it is so
        return plain(model, b)

    model = net()
    step = fit(model, freezes, torch.optim.SGD(model.parameters(), 0.1), batch(), "10KiB", **OPTIONS)
    for k in range(3):
        assert torch.isfinite(step(batch(k)))
        assert step.metrics()["eager"] == 1
    assert any("no plan" in note for note in step.notes)


def test_a_step_that_inductor_does_not_compile_runs_op_by_op_within_the_budget():
    """Rows in another order: PyTorch 2.13's Inductor fails at it. It used to be an error."""

    def shuffled(model, b):
        out = model(b[0])[torch.randperm(len(b[0]))]
        return (out - b[1]).square().mean()

    given = [batch(k) for k in range(3)]
    model, eager = net(), net()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, eager)]
    with pytest.warns(
        Fallback, match="is not compiled and runs op by op, as in exact mode, within the budget"
    ):
        step = fit(model, shuffled, optimizers[0], given[0], "95%", **OPTIONS)
    torch.manual_seed(5)
    losses = [step(b) for b in given]
    measured = step.measure()
    assert measured["measured_peak"] == measured["planned_peak"] <= measured["budget"]
    torch.manual_seed(5)
    for b, mine in zip(given, losses, strict=True):
        optimizers[1].zero_grad()
        loss = shuffled(eager, b)
        loss.backward()
        optimizers[1].step()
        assert torch.equal(loss, mine)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    with pytest.raises(errors.Unsupported, match="compiling the step in compiled mode"):
        fit(net(), shuffled, None, given[0], "95%", strict=True, **OPTIONS)
