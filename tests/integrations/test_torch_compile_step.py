"""A budget of the whole step: the optimizer's state and step, gradients that stay, and what is measured of them."""

import pytest
import torch
from torch import nn

from support.compiled import compiled, deep
from tightship import errors
from tightship.execute import allocator
from tightship.integrations.optimizer_memory import measure_optimizers
from tightship.integrations.torch_compile import Fallback, compiled_session, measured_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

needs_allocator = pytest.mark.skipif(not allocator.available(), reason="no C++ compiler")


class Net(nn.Module):
    """Its loss is part of its graph: nothing is made between the passes."""

    def __init__(self, layers=4, width=32):
        super().__init__()
        self.body = deep(layers, width)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.body(x), y)


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=1e-3, **options)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batches(rows, count, seed):
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 32, generator=draw), torch.randint(0, 4, (rows,), generator=draw))
        for _ in range(count)
    ]


def run_step(call, model, optimizer, rows, seed, micro=1):
    torch.manual_seed(seed)
    for x, y in batches(rows, micro, seed):
        call(x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def trained(make, *, rows=256, micro=1, steps=3, **options):
    """A model trained under the backend, its session, and what the last step was measured at; it equals eager's."""
    model, other = Net(), Net()
    optimizer, plain = make(model.parameters()), make(other.parameters())
    call = compiled(model, optimizer=optimizer, **options)
    for seed in range(steps):
        data = batches(rows, micro, seed)
        torch.manual_seed(seed)
        with measured_step(call) as step:
            for x, y in data:
                call(x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        del x, y, data
        run_step(other, other, plain, rows, seed, micro)
        assert (step.planned is None) == (seed == 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return compiled_session(call), step


# --- what is planned is what is measured ---


@needs_allocator
@pytest.mark.parametrize(
    ("options", "micro"),
    [({}, 1), ({"budget": "85%"}, 1), ({"budget": "90%", "accumulate": True}, 3)],
    ids=["no budget", "budget", "accumulating"],
)
def test_the_whole_step_takes_what_was_planned(options, micro):
    session, step = trained(adamw, micro=micro, **options)
    assert step.measured == step.planned
    limit = session.ledger.limit
    assert limit is None or step.planned <= limit


@needs_allocator
@pytest.mark.parametrize("foreach", [False, True])
def test_where_the_optimizer_s_step_is_the_peak_it_is_planned_for(foreach):
    session, step = trained(lambda params: adamw(params, foreach=foreach), rows=4)
    assert step.planned == session.ledger.step_peak(current=True)
    assert 0.9 * step.planned < step.measured <= step.planned


@needs_allocator
def test_gradients_that_nobody_announced_are_part_of_the_measured_plan():
    _, step = trained(sgd, micro=2)
    assert step.measured == step.planned


@needs_allocator
@pytest.mark.parametrize("given", [False, True], ids=["graphs alone", "whole step"])
@pytest.mark.parametrize("mode", ["exact", "compiled"])
def test_a_step_that_is_compiled_whole_counts_gradients_and_state_once(mode, given):
    """A function with the backward pass and the optimizer's step in it: Dynamo makes a graph of the latter, too,
    which is given gradients, and has parameters and state as attributes."""
    model, other = Net().eval(), Net().eval()  # without dropout, for which Inductor draws other numbers
    optimizer, plain = adamw(model.parameters()), adamw(other.parameters())

    def train(x, y):
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    more = {"optimizer": optimizer} if given else {}
    call = compiled(train, budget="75%", mode=mode, eager_fallback=True, **more)
    with pytest.warns(Fallback, match="Dynamo breaks the graph there"):
        call(*batches(256, 1, 0)[0])
    run_step(other, other, plain, 256, 0)
    for seed in (1, 2):
        x, y = batches(256, 1, seed)[0]
        with measured_step(call) as step:
            call(x, y)
        run_step(other, other, plain, 256, seed)
    assert step.measured == step.planned <= compiled_session(call).ledger.limit
    assert all(
        torch.allclose(a, b, atol=1e-3) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


class Weighted(Net):
    """Looks at the gradient that its last layer has from the step before."""

    def forward(self, x, y):
        gradient = self.body[-1].weight.grad
        return super().forward(x, y) * (1.0 if gradient is None else 1 + gradient.norm())


def test_a_forward_pass_that_reads_gradients_is_planned():
    """It is no optimizer's step, which runs as in eager."""
    model, other = Weighted().eval(), Weighted().eval()
    call = compiled(model, budget="90%")
    for seed in range(3):
        ((x, y),) = batches(256, 1, seed)
        call(x, y).backward()
        other(x, y).backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert [p.kind for p in compiled_session(call).graphs] == ["training"] * 2


# --- what the optimizer takes ---


def test_a_step_on_copies_is_that_of_eager():
    """Optimizers ask whether they are compiled, and step otherwise then."""
    asked = []

    class Asking(torch.optim.SGD):
        def step(self, closure=None):
            asked.append(torch.compiler.is_compiling())
            return super().step(closure)

    trained(lambda params: Asking(params, lr=0.1), steps=2)
    assert len(asked) > 2 and not any(asked)


def test_state_is_counted_before_it_exists_and_not_again_afterwards():
    model = Net()
    optimizer = adamw(model.parameters())
    before = measure_optimizers(optimizer)
    assert optimizer.state == {} and before.existing_state() == 0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = measure_optimizers([optimizer])
    assert before.state == after.state == after.existing_state() > 2 * sum(before.parameters.values())
    assert before.gradients == after.existing_gradients() == sum(before.parameters.values())


@needs_allocator
def test_lists_of_all_parameters_are_told_from_a_loop_over_them():
    model = Net(layers=8)
    single, lists = (measure_optimizers(adamw(model.parameters(), foreach=f)) for f in (False, True))
    assert single.workspace == single.one_by_one
    assert lists.workspace > lists.one_by_one and lists.workspace > single.workspace
    assert lists.workspace >= sum(lists.parameters.values())


def test_several_optimizers_step_one_after_the_other():
    model = Net()
    one, two = adamw(model.body[0].parameters()), sgd(model.body[3].parameters())
    both = measure_optimizers([one, two])
    alone = [measure_optimizers(o) for o in (one, two)]
    assert both.state == sum(m.state for m in alone) and both.name == "AdamW and SGD"
    assert both.workspace == max(m.workspace for m in alone)


@pytest.mark.parametrize("given", [3, [torch.nn.Linear(1, 1)], "adam"])
def test_what_is_no_optimizer_is_refused(given):
    call = compiled(deep(1), optimizer=given)
    with pytest.raises(errors.BadInput, match=r"torch\.optim\.Optimizer"):
        call(torch.randn(2, 16))


def test_an_optimizer_whose_step_cannot_be_tried_is_left_out_and_said():
    model = deep(1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(errors.Unsupported, match="LBFGS"):
        compiled(model, optimizer=optimizer)(torch.randn(2, 16))
    torch._dynamo.reset()
    call = compiled(model, optimizer=optimizer, strict=False, eager_fallback=True)
    with pytest.warns(Fallback, match="outside the budget.*LBFGS"):
        call(torch.randn(2, 16))


# --- budgets that do not fit ---


def infeasible(optimizer_of, *, rows, budget, micro=1, **options):
    model = Net()
    optimizer = optimizer_of(model.parameters())
    call = compiled(model, optimizer=optimizer, budget=budget, **options)
    with pytest.raises(errors.Infeasible) as found:
        for seed in range(2):
            run_step(call, model, optimizer, rows, seed, micro)
    return found.value


def test_a_step_of_the_optimizer_that_cannot_fit_is_said_with_its_bytes():
    error = infeasible(lambda params: adamw(params, foreach=True), rows=4, budget="90%")
    assert error.at == "optimizer.step()" and error.best_peak > error.budget
    assert sum(size for _, size, _ in error.top) == error.best_peak
    assert {name for name, _, _ in error.top} >= {"state of AdamW", "gradients", "parameters"}
    assert any("foreach=False" in text for text in error.advice)
    assert any("tightship.fit" in text for text in error.advice)


def test_the_step_of_the_optimizer_fits_a_hundred_percent():
    model = Net()
    optimizer = adamw(model.parameters())
    call = compiled(model, optimizer=optimizer, budget="100%")
    run_step(call, model, optimizer, 4, 0)
    ledger = compiled_session(call).ledger
    assert ledger.limit == ledger.step_peak()


def test_gradients_without_room_are_refused_before_anything_is_computed():
    error = infeasible(adamw, rows=256, budget="60%", micro=2)
    assert any("accumulate=True" in text for text in error.advice)
    assert error.top[0][0] == "gradients that are there already"


def test_a_graph_that_does_not_fit_says_what_the_optimizer_takes():
    error = infeasible(adamw, rows=256, budget="30%")
    assert any("state of AdamW" in text for text in error.advice) or error.at == "optimizer.step()"
