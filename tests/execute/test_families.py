"""Every model of the zoo, trained eagerly and within a budget: the same bits, the planned peak."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from support.models import MODELS  # noqa: E402
from tightship.errors import Infeasible  # noqa: E402
from tightship.execute import allocator  # noqa: E402
from tightship.execute.fit import fit  # noqa: E402
from tightship.execute.interpreter import PeakMismatch  # noqa: E402
from tightship.execute.train_step import TrainStep  # noqa: E402

STEPS = 5


def eager_step(model, loss_fn, optimizer, batch):
    optimizer.zero_grad()
    if isinstance(loss_fn, torch.nn.Module):
        loss = loss_fn(model(batch[0]), batch[1])
    else:
        loss = model(**batch).loss if loss_fn is None else loss_fn(model, batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss[0] if isinstance(loss, tuple) else loss


def tightest(model, loss_fn, optimizer, batch) -> TrainStep:
    """Half of what the step needs beyond its static set, or the next tenth of it that can be met."""
    free = fit(model, loss_fn, optimizer, batch)
    dynamic = free.plan.peak_before - free.plan.static
    for part in range(5, 11):
        try:
            budget = free.plan.static + dynamic * part // 10
            return fit(model, loss_fn, optimizer, batch, budget, work=2_000_000, seconds=60.0)
        except Infeasible:
            continue
    raise AssertionError("the unplanned peak itself is a budget that can be met")


def state(model, optimizer):
    rows = dict(model.state_dict())
    for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        for key, value in optimizer.state[p].items():
            rows[f"{i}.{key}"] = torch.as_tensor(value)
    return rows


@pytest.mark.parametrize("name", sorted(MODELS))
def test_same_bits_within_half_of_the_memory(name: str) -> None:
    model, loss_fn, batch_fn = MODELS[name]()
    ours = copy.deepcopy(model)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    step = tightest(ours, loss_fn, optimizer, batch_fn(0))
    for n in range(STEPS):
        torch.manual_seed(n)
        expected = eager_step(model, loss_fn, theirs, batch_fn(n))
        torch.manual_seed(n)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PeakMismatch)
            got = step(batch_fn(n))
        assert torch.equal(got[0] if isinstance(got, tuple) else got, expected)
        if n and allocator.available():
            assert step.last.measured_peak == step.plan.peak <= step.plan.budget
            assert step.last.misses == 0
    left, right = state(model, theirs), state(ours, optimizer)
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key
