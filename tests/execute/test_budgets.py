"""A percentage is resolved once, to bytes, from the first kind of batch, and holds for every later one."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import tightship
from tightship import errors
from tightship.execute.heap import faster_on_heap
from tightship.execute.infer import infer
from tightship.planners import default


def net(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(32, 32), nn.Tanh())])


def loss_fn(model, x):
    return model(x).pow(2).mean()


def fitted(budget="60%", model=None, rows=256, **more):
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tightship.fit(model, loss_fn, optimizer, torch.randn(rows, 32), budget, work=1_000_000, **more)


@pytest.mark.parametrize("rows", [1, 3, 100, 255])
@pytest.mark.parametrize("budget", ["60%", "static+50%"])
def test_the_last_smaller_batch_of_an_epoch_has_the_budget_of_the_first(rows, budget):
    step = fitted(budget)
    limit = step.plan.budget
    step(torch.randn(256, 32))
    step(torch.randn(rows, 32))
    assert step.plan.budget == limit and step.last.measured_peak <= limit


def test_a_batch_that_is_smaller_by_so_much_that_a_share_of_it_would_be_infeasible():
    tight = fitted("55%", rows=2048)
    with pytest.raises(errors.Infeasible):
        fitted("55%", rows=1)
    tight(torch.randn(1, 32))
    assert not tight.plan.count("recompute")


def test_a_larger_batch_gets_no_more():
    step = fitted("80%")
    limit = step.plan.budget
    step(torch.randn(300, 32))
    assert step.plan.budget == limit >= step.last.measured_peak


def test_a_batch_too_large_for_what_was_resolved_is_infeasible_and_says_whose_share_it_is():
    step = fitted("60%")
    limit = step.plan.budget
    with pytest.raises(
        errors.Infeasible, match=r"(?s)60% of the unplanned peak of the first kind of batch"
    ) as found:
        step(torch.randn(5000, 32))
    assert found.value.budget == limit
    step(torch.randn(256, 32))
    assert step.plan.budget == limit


def test_autocast_changes_no_budget():
    step = fitted("80%")
    limit = step.plan.budget
    with torch.autocast("cpu", torch.bfloat16):
        step(torch.randn(256, 32))
    assert step.plan.budget == limit >= step.last.measured_peak


def test_unfreezing_changes_no_budget():
    model = net()
    for p in model[:6].parameters():
        p.requires_grad_(False)
    step = fitted("80%", model)
    limit = step.plan.budget
    step(torch.randn(256, 32))
    for p in model.parameters():
        p.requires_grad_(True)
    with contextlib.suppress(errors.Infeasible):
        step(torch.randn(256, 32))
    step(torch.randn(32, 32))
    assert step.plan.budget == limit >= step.last.measured_peak
    assert any("captured again" in n for n in step.notes)


def test_an_inference_s_percentage_is_the_largest_batch_s():
    run = infer(net(), torch.randn(256, 32), "100%", dynamic=True, work=1_000_000)
    limit = run.plan.budget
    run(torch.randn(8, 32))
    assert run.plan.budget == limit


def test_what_fits_unplanned_is_never_refused():
    """Here by a planner that finds places for nothing."""

    def planner(graph, budget):
        raise errors.Infeasible(budget=budget, lower_bound=0, best_peak=budget, placed=budget + 1)

    model, other = net(), net()
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    x = torch.randn(64, 32)
    step = tightship.fit(model, loss_fn, optimizer, x, "100%", planner=planner)
    loss_fn(other, x).backward()
    reference.step()
    step(x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert step.last.measured_peak <= step.plan.budget == step.plan.peak_before
    assert any("ordinary heap" in n for n in step.notes)


def test_a_plan_with_an_arena_stays_where_none_is_found_on_the_heap():
    step = fitted("60%", cache=None)
    slow = replace(step.plan, time_before=step.plan.time / 2, time_bound=step.plan.time / 2)
    asked = []

    def on_heap():
        asked.append(1)
        raise errors.Infeasible(budget=slow.budget, lower_bound=0, best_peak=slow.budget + 1)

    assert faster_on_heap(step.graph, slow.handed, slow, on_heap) is slow
    assert asked == [1]


def test_a_share_beyond_the_static_set():
    step = fitted("static+50%")
    plan = step.plan
    assert plan.budget == plan.static + (plan.peak_before - plan.static) // 2
    again = default.plan(step.graph, "static+50%", default.Options(work=1_000_000))
    assert again.budget == plan.budget >= again.peak
