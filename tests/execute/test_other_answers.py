"""Questions of yes or no that only the step itself answers: the answer of the steps before is taken for granted,
checked in each step, and where it is another one, that step is eager's."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightship
from tightship.errors import Unsupported
from tightship.execute.interpreter import Fallback
from tightship.frontends.torch.capture import data_guards, expectations


class Net(nn.Module):
    """Counts, draws, keeps and writes statistics: what must not happen twice in a step that is run again."""

    def __init__(self):
        super().__init__()
        self.a, self.bn, self.drop, self.b = (
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.Dropout(0.2),
            nn.Linear(32, 8),
        )
        self.register_buffer("steps", torch.zeros(()))
        self.calls, self.kept = 0, []

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        h = self.drop(F.gelu(self.bn(self.a(x + random.random()))))
        self.kept.append(h.detach().mean())
        return self.b(h)


def batches(large=(), count=6):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(8, 8, generator=g) * (50 if k in large else 1) for k in range(count)]


def run(loss_fn, data, make, model=None):
    torch.manual_seed(0)
    random.seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = make(model, loss_fn, optimizer)
    losses = [step(x) for x in data]
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    state |= {f"kept.{k}": v for k, v in enumerate(getattr(model, "kept", []))}
    state |= {f"loss.{k}": v.detach() for k, v in enumerate(losses)}
    return step, state | {"drawn": torch.rand(2)}, (getattr(model, "calls", 0), random.random())


def eager(model, loss_fn, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def check(loss_fn, data, **options):
    """The step after ``data``, whose numbers are eager's, and whether each step ran in eager."""
    _, expected, counts = run(loss_fn, data, eager)
    ran = []

    def make(model, loss_fn, optimizer):
        step = tightship.fit(model, loss_fn, optimizer, data[0], "100%", cache=None, **options)

        def one(x):
            out = step(x)
            row = step.measure()
            ran.append(row["planned_peak"] is None)
            if ran.count(False) > 1:  # the first one makes the optimizer's state
                assert ran[-1] or row["planned_peak"] == row["measured_peak"]
            return out

        one.step = step
        return one

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Fallback)
        step, found, counted = run(loss_fn, data, make)
    assert counted == counts
    assert found.keys() == expected.keys()
    assert [k for k in expected if not torch.equal(expected[k], found[k])] == []
    return step.step, ran


@pytest.fixture
def guessing(monkeypatch):
    """Answers are what they mostly are, as where to compute them would take too long."""
    monkeypatch.setattr(data_guards, "_GUESS_WORK", 0)


def capped(model, x):
    loss = model(x).square().mean()
    if loss > 2.0:
        loss = loss.sqrt()
    return loss


def wide(model, x):
    return (
        model(x).square().mean() if bool((x.std() + 0 * model.b.bias.sum()) < 10) else model(x).abs().mean()
    )


def test_an_answer_that_is_mostly_the_same_is_planned_and_a_rare_other_one_runs_in_eager():
    _, ran = check(wide, batches(large=(3,), count=8))
    assert ran == [k == 3 for k in range(8)]


def test_a_guess_is_the_likely_answer_where_the_true_one_takes_too_long(guessing):
    _, ran = check(wide, batches(large=(3,), count=8))
    assert ran == [True, False, False, True, False, False, False, False]  # the first guess is wrong


def test_a_guess_that_holds_costs_nothing():
    step, ran = check(capped, batches())
    assert ran == [False] * 6
    assert step.notes == () or not any("another answer" in n for n in step.notes)


def unlikely(model, x):
    return model(x).square().mean() * (2 if (model.a.weight + x.sum() * 0 < 9).any() else 1)


@pytest.mark.parametrize("prepare", [True, False])
def test_a_first_answer_is_the_true_one(prepare):
    _, ran = check(unlikely, batches(), prepare=prepare)
    assert ran == [False] * 6


@pytest.mark.parametrize("prepare", [True, False])
def test_a_wrong_first_guess_is_learnt_in_one_step(prepare, guessing):
    _, ran = check(unlikely, batches(), prepare=prepare)
    assert ran == [True] + [False] * 5


def test_a_loop_that_an_answer_ends_is_captured_as_long_as_it_is():
    """Guessed, it would be unrolled until no more is guessed, each time through all ops before."""

    def loss_fn(model, x):
        y, t = model(x), torch.zeros(())
        while t < 1:
            t = t + (0.1 + 0 * y.sum())
            y = y * 0.9 if y.abs().max() > 1e-3 else y / 0.9
        return y.square().mean()

    step, ran = check(loss_fn, batches())
    assert ran == [False] * 6
    assert (
        sum(isinstance(c.fn, expectations.Expectation) for c in step._variants[0].program.calls) == 20
    )  # the first follows from numbers


@pytest.mark.parametrize("weighted", [False, True])
def test_counts_of_what_a_step_computes_are_as_many_as_are_asked_for(weighted):
    """``bincount`` has more only where a number is not below ``minlength``: such a step runs in eager."""

    def loss_fn(model, x):
        y = model(x)
        bins = (x + 0 * y.detach()).abs().flatten().to(torch.int64)
        counts = torch.bincount(bins, weights=y.detach().flatten() if weighted else None, minlength=6)
        return y.square().mean() + counts.to(y.dtype)[:3].sum() * y.mean() / counts.numel()

    _, ran = check(loss_fn, batches(large=(3,), count=6))
    assert ran == [k == 3 for k in range(6)]


def test_answers_that_change_all_the_time_are_waited_for():
    def loss_fn(model, x):
        loss = model(x).square().mean()
        return loss.sqrt() if loss * x.mean() > 0 else loss

    data = [x + (-1) ** k for k, x in enumerate(batches(count=16))]
    step, ran = check(loss_fn, data)
    assert ran[-3:] == [False] * 3
    assert any("the step runs in eager" in n for n in step.notes)


@pytest.mark.parametrize("loop", ["all", "any"])
def test_a_loop_that_an_answer_ends_is_not_unrolled_for_ever(loop, monkeypatch):
    monkeypatch.setattr(expectations, "AGAIN", 8)

    def loss_fn(model, x):
        y = model(x)
        while not (y.abs() < 0.2).all() if loop == "all" else (y.abs() >= 0.2).any():
            y = y / 2
        return y.square().mean()

    check(loss_fn, batches())


def test_the_equality_of_what_is_made_alike_is_guessed():
    def loss_fn(model, x):
        scale = model.b.bias.exp().sum()
        a, b = x / scale, x / scale
        return model(a).square().mean() if torch.equal(a, b) else model(b).abs().mean()

    _, ran = check(loss_fn, batches())
    assert ran == [False] * 6


@pytest.mark.parametrize(
    "near",
    [
        lambda y, w: torch.allclose(y.mean(0), w, atol=5.0),
        lambda y, w: y.mean(0).allclose(w),
        lambda y, w: torch.is_nonzero((y.mean(0) - w).abs().amax() < 5),
        lambda y, w: torch.isclose(y.mean(0), w, rtol=9.0).any().item(),
    ],
    ids=["allclose", "method", "is_nonzero", "isclose"],
)
def test_questions_about_two_tensors_are_planned(near):
    def loss_fn(model, x):
        y = model(x)
        return y.square().mean() if near(y, model.b.weight.mean(1)) else y.abs().mean()

    _, ran = check(loss_fn, batches())
    assert ran == [False] * 6


@pytest.mark.parametrize("where", ["batch", "made", "constant"])
def test_numbers_that_are_not_finite_take_eagers_path(where):
    mask = torch.zeros(8, 8)
    mask[:, 4:] = float("-inf")

    def loss_fn(model, x):
        y = model(x.nan_to_num(0.0))
        if where != "batch":
            y = y + (mask if where == "constant" else x.isnan() * -torch.inf).nan_to_num(
                0.0, neginf=-torch.inf
            )
        if torch.isinf(y).any() or not torch.isfinite(x).all():
            y = y.masked_fill(y.isinf(), -9.0)
        return y.square().mean()

    data = batches()
    data[3][0, 0] = torch.nan
    _, ran = check(loss_fn, data)
    assert ran == [k == {"batch": -1, "made": 3, "constant": 0}[where] for k in range(6)]


def test_parts_of_a_step_with_another_answer():
    data, found = batches(large=(2, 3), count=8), []
    for ours in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Fallback)
            if ours:
                step = tightship.fit(model, wide, optimizer, data[0], "100%", cache=None, split=True)
            for k, x in enumerate(data):
                if ours:
                    step.backward(x)
                else:
                    wide(model, x).backward()
                if k % 2:
                    if ours:
                        step.update()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
        found.append(copy.deepcopy(model.state_dict()))
        found[-1]["drawn"] = torch.rand(2)
        assert model.calls == 8
    assert [k for k in found[0] if not torch.equal(found[0][k], found[1][k])] == []


def test_a_strict_step_guesses_nothing_and_waits_for_the_answers():
    _, ran = check(capped, batches(large=(1, 4)), strict=True)
    assert ran == [False] * 6


def test_a_question_that_comes_late_and_is_guessed_wrong_updates_nothing(guessing):
    model, data = Net(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, x):
        loss = model(x).square().mean()
        return loss / 2 if model.calls == 2 and loss >= 0 else loss

    step = tightship.fit(model, loss_fn, optimizer, data[0], "100%", cache=None)
    step(data[0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Unsupported, match="another answer than False"):
        step(data[1])
    assert [k for k, v in before.items() if not torch.equal(v, model.state_dict()[k])] == []
    step(data[2])
    assert step.measure()["planned_peak"] == step.measure()["measured_peak"]


def test_code_that_cannot_be_put_back_ends_with_the_error(guessing):
    scales = (1.0 + k for k in range(9))
    model, data = Net(), batches()

    def loss_fn(model, x):
        loss = model(x).square().mean() * next(scales)
        return loss / 2 if loss >= 0 else loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tightship.fit(model, loss_fn, optimizer, data[0], "100%", cache=None, prepare=False)
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(Unsupported, match="another answer than False"):
        step(data[0])
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    step(data[1])
    assert step.measure()["planned_peak"] is not None


def test_each_fallback_is_said(guessing):
    model, data = Net(), batches(large=(1,))
    step = tightship.fit(
        model, wide, torch.optim.SGD(model.parameters(), lr=0.1), data[0], "100%", cache=None
    )
    with pytest.warns(Fallback, match=r"budget is not kept: another answer than \w+ .*test_other_answers"):
        step(data[0])
    assert any("another answer" in n for n in step.notes)
    assert step.metrics()["eager"] == 1
