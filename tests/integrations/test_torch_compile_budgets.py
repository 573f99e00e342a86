"""A percentage is, in the torch.compile backend, one number of bytes for all that comes after the first step."""

import contextlib

import pytest
import torch
from torch import nn

from support.compiled import batch, compiled, deep, equal, step
from tightship import errors
from tightship.integrations.torch_compile import compiled_plans

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def budgets(call):
    return [p.plan.budget for p in compiled_plans(call)]


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = deep(), deep()
        self.a[-1] = nn.Linear(16, 16)

    def forward(self, x):
        h = self.a(x)
        torch._dynamo.graph_break()
        return self.b(h)


@pytest.mark.parametrize("rows", [1, 31, 255])
@pytest.mark.parametrize("budget", ["70%", "static+75%"])
def test_the_last_smaller_batch_has_the_budget_of_the_first(rows, budget):
    model, other = deep(), deep()
    call = compiled(model, budget=budget)
    for n in (256, rows):
        assert equal(step(call, model, batch(n)), step(other, other, batch(n)))
    first, second = budgets(call)
    assert first == second


def test_a_larger_batch_gets_no_more():
    model = deep()
    call = compiled(model, budget="85%")
    step(call, model, batch(256))
    (limit,) = budgets(call)
    step(call, model, batch(280))
    assert budgets(call) == [limit, limit]
    with pytest.raises(errors.Infeasible, match="percentage of the first training step") as found:
        step(call, model, batch(4096))
    assert found.value.budget == limit
    step(call, model, batch(256))


def test_what_does_not_fit_the_first_time_does_not_fit_because_it_comes_again():
    model = deep()
    call = compiled(model, budget="20%")
    limits = []
    for n in (256, 4096):
        with pytest.raises(errors.Infeasible) as found:
            step(call, model, batch(n))
        limits.append(found.value.budget)
    assert limits[0] == limits[1]


def test_autocast_changes_no_budget():
    model = deep()
    call = compiled(model, budget="80%")
    step(call, model, batch(256))
    with torch.autocast("cpu", torch.bfloat16):
        step(call, model, batch(256))
    first, second = budgets(call)
    assert first == second


def test_unfreezing_changes_no_budget():
    model = deep()
    for p in model[:6].parameters():
        p.requires_grad_(False)
    call = compiled(model, budget="90%")
    step(call, model, batch(256))
    for p in model.parameters():
        p.requires_grad_(True)
    with contextlib.suppress(errors.Infeasible):
        step(call, model, batch(256))
    step(call, model, batch(64))
    assert len(budgets(call)) >= 2 and len(set(budgets(call))) == 1


def test_evaluation_after_training_is_held_to_the_same_bytes():
    model = deep()
    call = compiled(model, budget="70%")
    step(call, model, batch(256))
    model.eval()
    with torch.no_grad():
        call(batch(64))
        assert len(set(budgets(call))) == 1
        with pytest.raises(errors.Infeasible):
            call(batch(8192))


def test_evaluation_before_training_does_not_say_what_a_percentage_is_of():
    model = deep()
    call = compiled(model, budget="70%")
    model.eval()
    with torch.no_grad():
        call(batch(8))
    model.train()
    step(call, model, batch(256))
    plan = compiled_plans(call)[-1].plan
    assert plan.budget == plan.peak_before * 7 // 10


def test_a_percentage_of_several_graphs_is_of_all_of_them_and_stays():
    model = Broken()
    call = compiled(model, budget="80%")
    step(call, model, batch(256))
    assert len(budgets(call)) == 2
    total = _limit(call)
    for n in (255, 100, 3, 256, 1):
        step(call, model, batch(n))
        assert _limit(call) == total
    model.eval()
    with torch.no_grad():
        call(batch(16))
    assert _limit(call) == total


def _limit(call):
    from tightship.integrations.torch_compile import compiled_session

    return compiled_session(call).ledger._training.limit


def wide():
    """Gradients take as many bytes as what is saved for the backward pass."""
    torch.manual_seed(0)
    rows = [row for _ in range(6) for row in (nn.Linear(256, 256), nn.Tanh(), nn.LayerNorm(256))]
    return nn.Sequential(nn.Linear(16, 256), *rows, nn.Linear(256, 1))


@pytest.mark.parametrize("arena", [True, False])
def test_where_an_arena_costs_recomputation_the_heap_is_taken(arena):
    """An arena keeps what it spans while the gradients lie beside it; on the heap what is saved makes room."""
    model, other = wide(), wide()
    call = compiled(model, budget="85%", arena=arena)
    for k in range(3):
        assert equal(step(call, model, batch(400, k)), step(other, other, batch(400, k)))
    (planned,) = compiled_plans(call)
    plan = planned.plan
    assert plan.count("recompute") <= 4 and plan.arena == 0 and plan.peak <= plan.budget
    assert planned.last.measured_peak == plan.peak and planned.last.misses == 0
    assert any("with an arena it would take" in n for n in planned.notes) == arena


def with_state(model):
    """An optimizer whose state takes as much again as the parameters, twice."""
    return torch.optim.AdamW(model.parameters())


def trained_within(model, budget, mode, rows=256, **options):
    optimizer = with_state(model)
    call = compiled(model, budget=budget, optimizer=optimizer, mode=mode, **options)
    step(call, model, batch(rows))
    optimizer.step()
    return call


@pytest.mark.parametrize("make", [deep, Broken])
@pytest.mark.parametrize("mode", ["exact", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_an_error_says_would_do_does_although_others_share_the_budget(make, mode):
    """The optimizer's state takes a part: numbers of the part that a graph has are none to ask with."""
    with pytest.raises(errors.Infeasible) as found:
        trained_within(make(), "20%", mode)
    no = found.value
    for _ in range(3):  # behind the first graph, the next one may need more, or the optimizer
        torch._dynamo.reset()
        assert sum(size for _, size, _ in no.top) <= no.best_peak
        try:
            call = trained_within(make(), no.best_peak, mode)
            break
        except errors.Infeasible as again:
            assert again.budget == no.best_peak < again.best_peak
            no = again
    assert compiled_plans(call)
    if make is deep:
        assert no is found.value


@pytest.mark.parametrize("make", [deep, Broken])
@pytest.mark.parametrize("mode", ["exact", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", [0, 64, 4096, 30_000])
def test_bytes_that_others_alone_take_are_refused_with_what_would_do(make, mode, budget):
    with pytest.raises(errors.Infeasible) as found:
        trained_within(make(), budget, mode)
    assert found.value.budget == budget < found.value.best_peak
    assert found.value.lower_bound <= found.value.best_peak
    if found.value.at != "optimizer.step()":
        assert any("state of AdamW" in name for name, _, _ in found.value.top)


class Stages(nn.Module):
    """Graphs that are unlike each other, with breaks between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())))
            for depth, width in ((3, 32), (4, 64), (5, 48), (2, 96))
        )
        self.between = nn.ModuleList(nn.Linear(a, b) for a, b in ((32, 64), (64, 48), (48, 96), (96, 16)))

    def stage(self, k, x):
        return self.between[k](self.parts[k](x))

    def forward(self, x):
        x = self.stage(0, x)
        torch._dynamo.graph_break()
        x = self.stage(1, x)
        torch._dynamo.graph_break()
        x = self.stage(2, x)
        torch._dynamo.graph_break()
        return self.stage(3, x)


@pytest.mark.parametrize("given", [1_000, 200_000, 400_000])
def test_bytes_that_unlike_graphs_do_not_meet_are_refused_once_with_what_all_need(given):
    def train(budget):
        model, other = Stages(), Stages()
        call = compiled(model, budget=budget)
        for k in range(3):
            x = torch.randn(256, 32, generator=torch.Generator().manual_seed(k))
            assert equal(step(call, model, x), step(other, other, x))
        for p in compiled_plans(call):
            assert p.last.measured_peak == p.last.planned_peak <= p.plan.budget
        return call

    with pytest.raises(errors.Infeasible) as refused:
        train(given)
    torch._dynamo.reset()
    assert len(compiled_plans(train(refused.value.best_peak))) == 4
