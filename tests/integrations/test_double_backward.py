"""Two backward passes and gradients of gradients: bit-identical in fit; in the torch.compile backend within the
budget, or refused before anything is computed."""

import pytest
import torch
from torch import nn

import tightship
from support.compiled import QUICK, compiled, equal
from tightship import errors
from tightship.integrations.torch_compile import compiled_notes, compiled_plans

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(16, 16), nn.Tanh())], nn.Linear(16, 1))


def penalty(model, x):
    """As WGAN-GP has it."""
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (grad.norm(2, dim=1) - 1).pow(2).mean()


def of_parameters(model, x):
    loss = model(x).pow(2).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(g.pow(2).sum() for g in grads)


def adversarial(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return model(x + 0.1 * grad.sign()).pow(2).mean() + out.mean()


@pytest.mark.parametrize("loss_fn", [penalty, of_parameters, adversarial])
@pytest.mark.parametrize("budget", [None, "85%"])
def test_fit_differentiates_gradients(loss_fn, budget):
    model, other = net(), net()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    xs = [torch.randn(64, 16) for _ in range(3)]
    train = tightship.fit(model, loss_fn, ours, xs[0], budget, strict=True, work=1_000_000)
    for x in xs:
        loss = loss_fn(other, x)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert torch.equal(train(x), loss)
    assert equal(list(model.parameters()), list(other.parameters()))


@pytest.mark.parametrize("budget", [None, "85%", "200%"])
@pytest.mark.parametrize("loss_fn", [penalty, of_parameters])
def test_the_backend_refuses_a_backward_pass_that_is_to_be_differentiated(budget, loss_fn):
    model = net()
    call = compiled(model, budget=budget)
    if loss_fn is of_parameters:
        call.parameters = model.parameters
    for _ in range(2):
        with pytest.raises(errors.Unsupported, match="create_graph=True in graph 0/0"):
            loss_fn(call, torch.randn(256, 16))
    assert all(p.grad is None for p in model.parameters())


def twice(call, model, x):
    model.zero_grad()
    loss = call(x).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_retained_graph_without_room_for_it_is_refused_before_anything_is_computed():
    model, other, x = net(), net(), torch.randn(256, 16)
    call = compiled(model, budget="85%")
    for _ in range(2):
        with pytest.raises(errors.Unsupported, match="retain_graph=True in graph 0/0 within a budget"):
            twice(call, model, x)
        assert all(p.grad is None for p in model.parameters())
    call(x).sum().backward()
    other(x).sum().backward()
    assert equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


@pytest.mark.parametrize("budget", [None, "200%"])
def test_a_retained_graph_with_room_is_right(budget):
    model, other, x = net(), net(), torch.randn(256, 16)
    call = compiled(model, budget=budget)
    for _ in range(3):
        assert equal(twice(call, model, x), twice(other, other, x))
    assert any("retain_graph" in n for n in compiled_notes(call))


def test_a_compiled_function_that_differentiates_is_right_or_refused():
    model, other, x = net(), net(), torch.randn(32, 16)
    call = torch.compile(lambda x: penalty(model, x), backend="tightship", options={**QUICK})
    try:
        call(x).backward()
    except errors.Unsupported:
        assert all(p.grad is None for p in model.parameters())
        return
    penalty(other, x).backward()
    assert compiled_plans(call)
    assert equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
