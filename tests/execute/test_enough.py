"""The budget that an ``Infeasible`` of `fit` names is enough: given back, the step is prepared and runs within it."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import tightship
from support.models import MODELS
from tightship.analysis.bounds import lower_bound
from tightship.errors import Enough, Infeasible
from tightship.execute import cache as caches
from tightship.planners import default

LOOPS = {
    "whole": {},
    "clipped": {"clip_norm": 1.0},
    "accumulated": {"accumulate": 2},
    "split": {"split": True},
    "scaled": {"scaler": True, "clip_norm": 1.0},
    "all": {"accumulate": 2, "scaler": True, "clip_norm": 1.0, "clip_value": 0.5, "skip_nonfinite": True},
}
SGD = {"all", "split"}
"""Loops that are run with an update that takes no memory of its own."""


def fitted(name, budget, loop="whole", **options):
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()[:3]
    more = dict(LOOPS[loop])
    if "scaler" in more:
        more["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1) if loop in SGD else torch.optim.AdamW(model.parameters())
    )
    options = {"work": 1_000_000, "seconds": 20.0, "strict": True} | more | options
    return tightship.fit(model, loss_fn, optimizer, batch(0), budget, **options), batch


def refused(name, budget, loop="whole", **options):
    with pytest.raises(Infeasible) as found:
        fitted(name, budget, loop, **options)
    return found.value


def given(text):
    """A call's arguments, pasted from the message."""
    return eval(f"dict({text})", {})


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "gpt2", "lstm"])
def test_the_budget_that_is_named_is_enough(name, loop, tmp_path):
    no = refused(name, 1000, loop, cache=tmp_path)
    lines = re.findall(r"^  (budget=.*?)  \(", str(no), re.M)
    assert lines == [str(e) for e in no.enough] and no.enough[0].options == ()
    for line in lines:
        arguments = given(line)
        step, batch = fitted(name, arguments.pop("budget"), loop, cache=tmp_path, **arguments)
        for n in range(4):
            if loop == "split":
                step.backward(batch(n))
                step.update()
                step.model.zero_grad()
            else:
                step(batch(n))
        found = step.measure()
        assert found["measured_peak"] <= no.enough[0].nbytes
        assert found["misses"] == 0


def test_others_are_named_where_they_need_less_and_are_enough_too(tmp_path):
    step, _ = fitted("gpt2", None, cache=tmp_path)
    graph = step.graph
    least = int(lower_bound(graph, least=dict.fromkeys(range(len(graph.storages)), 0)))
    no = refused("gpt2", least, cache=tmp_path)
    own, *others = no.enough
    assert others and all(e.nbytes < own.nbytes and e.options for e in others)
    for e in others:
        arguments = given(str(e))
        step, batch = fitted("gpt2", arguments.pop("budget"), cache=tmp_path, **arguments)
        for n in range(4):
            step(batch(n))
        assert step.measure()["measured_peak"] <= e.nbytes


def test_without_a_cache_the_process_remembers(monkeypatch):
    """A search that comes to nothing does not refuse what was named."""
    no = refused("gpt2", 1000, cache=None)
    plan = default.plan

    def hopeless(graph, budget=None, *args, **options):
        raise Infeasible(budget=int(budget), lower_bound=0, best_peak=1 << 40)

    monkeypatch.setattr(default, "plan", hopeless)
    step, batch = fitted("gpt2", no.enough[0].nbytes, cache=None)
    assert any("an earlier search" in n for n in step.notes)
    monkeypatch.setattr(default, "plan", plan)
    for n in range(3):
        step(batch(n))
    assert step.last.measured_peak == step.plan.peak <= no.enough[0].nbytes


def test_what_is_kept_is_not_kept_for_other_bytes_or_options(tmp_path):
    kept = caches.KeptLeast(tmp_path)
    step, _ = fitted("cnn", None)
    graph, o = step.graph, default.Options()
    made = default.plan(graph, "95%", o)
    assert kept.within(graph, o, 1 << 40) is None
    assert kept.offer(graph, o, made) == made.budget
    assert kept.within(graph, o, made.budget).steps == made.steps
    assert kept.within(graph, o, made.budget - 1) is None
    assert kept.within(graph, default.Options(seconds=1.0, work=1), made.budget) is not None
    assert kept.within(graph, default.Options(allow="recompute,offload"), made.budget) is None
    slower = graph.with_ops(tuple(replace(op, time=2 * op.time) for op in graph.ops))
    assert kept.within(slower, o, made.budget).time == pytest.approx(2 * made.time)
    larger = graph.with_ops(tuple(replace(op, workspace=op.workspace + 64) for op in graph.ops))
    assert kept.within(larger, o, made.budget) is None
    assert kept.offer(graph, o, default.plan(graph, "100%", o)) == made.budget


def test_a_percentage_is_answered_in_bytes():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    args = (model, lambda m, x: m(x).mean(), optimizer, torch.randn(4, 64))
    with pytest.raises(Infeasible, match=r"static\+60%") as found:
        tightship.fit(*args, "20%")
    enough = found.value.enough[0]
    assert tightship.fit(*args, enough.nbytes).plan.budget == enough.nbytes


def test_a_later_kind_of_batch_says_what_is_enough_for_it_and_the_loop_goes_on():
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def again(budget, rows):
        return tightship.fit(
            model, lambda m, x: m(x).pow(2).mean(), optimizer, torch.randn(rows, 32), budget, **more
        )

    for more in ({"work": 100_000}, {"work": 100_000, "accumulate": 2}):  # noqa: B007
        step = again("80%", 64)
        with pytest.raises(Infeasible) as found:
            step(torch.randn(512, 32))
        step(torch.randn(64, 32))
        step(torch.randn(64, 32))
        enough = again(found.value.enough[0].nbytes, 512)
        for rows in (512, 512, 64, 64):
            enough(torch.randn(rows, 32))
        assert enough.measure()["measured_peak"] <= found.value.enough[0].nbytes


def masked(model, batch):
    x, mask = batch
    return model(x)[mask].pow(2).mean()


@pytest.mark.parametrize("budget", [1000, "static+60%", "static+90%"])
def test_steps_whose_shapes_follow_from_data(budget):
    """Ops are measured on the data then, which is not kept; the part that does not fit may be any."""

    def prepared(budget):
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())])
        batch = torch.randn(4, 32), torch.tensor([True, False, True, True])
        optimizer = torch.optim.AdamW(model.parameters())
        return tightship.fit(
            model, masked, optimizer, batch, budget, accumulate=2, cache=None, work=100_000
        ), batch

    with pytest.raises(Infeasible) as found:
        prepared(budget)
    step, batch = prepared(found.value.enough[0].nbytes)
    for _ in range(4):
        step(batch)
    assert step.measure()["measured_peak"] <= found.value.enough[0].nbytes


def test_what_is_said_is_what_a_call_takes():
    e = Enough(1 << 20, (("allow", "recompute,offload"), ("lossy", True)))
    assert str(e) == 'budget=1048576, allow="recompute,offload", lossy=True'
    no = Infeasible(budget=100, lower_bound=10, best_peak=200, enough=[Enough(200), e]).beside(64)
    assert (no.budget, no.lower_bound, no.best_peak, no.placed) == (164, 74, 264, None)
    assert [x.nbytes for x in no.enough] == [264, (1 << 20) + 64]
    assert "\n  budget=264  (264 B)\n" in str(no)
