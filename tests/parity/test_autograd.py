"""Training loops that reach into autograd: hooks, functions of their own, penalties on gradients, checkpoints."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.harness import Loop, identical, mlp, namespace, refused, run, sgd

cross_entropy = functional.cross_entropy


def plain_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


# --- hooks --------------------------------------------------------------------------------------------------------


@identical()
def test_a_forward_hook_that_counts():
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    return Loop(model, plain_loss, sgd(model), watched=lambda: seen)


@identical(plans=2)
def test_a_forward_hook_after_fit():
    model, seen = mlp(), []

    def hook(module, args, out):
        seen.append(1)
        return out * 0.5

    def before(k):
        if k == 3:
            model[0].register_forward_hook(hook)

    return Loop(model, plain_loss, sgd(model), before=before, watched=lambda: seen)


@identical(plans=2)
def test_a_forward_pre_hook_that_is_removed():
    model = mlp()
    handle = model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))

    def before(k):
        if k == 4:
            handle.remove()

    return Loop(model, plain_loss, sgd(model), before=before)


@identical(plans=2)
def test_a_forward_method_that_is_set():
    model = mlp()

    def before(k):
        if k == 2:
            inner = model[0].forward
            model[0].forward = lambda x: inner(x).tanh()

    return Loop(model, plain_loss, sgd(model), before=before)


@refused("backward hook")
def test_a_full_backward_hook():
    model, norms = mlp(), []
    model[0].register_full_backward_hook(lambda m, gi, go: norms.append(1))
    return Loop(model, plain_loss, sgd(model), watched=lambda: norms)


@refused("backward hook", step=3)
def test_a_full_backward_hook_after_fit():
    model = mlp()

    def before(k):
        if k == 3:
            model[0].register_full_backward_hook(
                lambda m, gi, go: (gi[0] * 2,) if gi[0] is not None else None
            )

    return Loop(model, plain_loss, sgd(model), before=before)


@identical()
def test_a_hook_on_a_parameter():
    model = mlp()
    model[0].weight.register_hook(lambda g: g * 2)
    return Loop(model, plain_loss, sgd(model))


@identical(plans=2)
def test_a_hook_on_a_parameter_after_fit():
    model = mlp()

    def before(k):
        if k == 3:
            model[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))

    return Loop(model, plain_loss, sgd(model), before=before)


@refused("has a gradient", step=2)
def test_a_gradient_that_is_there():
    model = mlp()

    def before(k):
        if k == 2:
            model[0].weight.grad = torch.ones_like(model[0].weight)

    def loss_fn(model, batch):
        return plain_loss(model, batch)

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_a_hook_on_a_tensor_with_a_number():
    model, held = mlp(), SimpleNamespace(scale=1.0)

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        hidden.register_hook(lambda g: g * held.scale)
        return cross_entropy(model[1:](hidden), batch[1])

    def after(k, out):
        held.scale *= 0.5

    return Loop(model, loss_fn, sgd(model), after=after)


@identical()
def test_a_hook_on_a_tensor_with_a_number_of_the_loss():
    model, held = mlp(), SimpleNamespace(scale=1.0)

    def loss_fn(model, batch):
        held.scale *= 0.5
        scale = held.scale
        hidden = model[0](batch[0])
        hidden.register_hook(lambda g: g * scale)
        return cross_entropy(model[1:](hidden), batch[1])

    return Loop(model, loss_fn, sgd(model), watched=lambda: vars(held))


@identical()
def test_a_hook_on_a_tensor_with_tensors_of_the_step():
    model = mlp()

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        gate = torch.sigmoid(hidden).detach()
        hidden.register_hook(lambda g: g * gate + batch[0].mean())
        return cross_entropy(model[1:](hidden), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_backward_pass_that_reaches_a_tensor_of_the_step():
    model, held = mlp(), SimpleNamespace()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * held.scale

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        held.scale = hidden.detach().abs().mean()
        return cross_entropy(model[1:](Scaled.apply(hidden)), batch[1])

    return Loop(model, loss_fn, sgd(model))


@refused("", step=1)
def test_a_hook_on_a_tensor_that_hands_gradients_on():
    model, seen = mlp(), []

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        hidden.register_hook(lambda g: seen.append(g.detach().clone()))
        loss = cross_entropy(model[1:](hidden), batch[1])
        return loss + seen[-1].norm() * hidden.mean() if seen else loss

    return Loop(model, loss_fn, sgd(model))


@refused("", step=3)
def test_a_gradient_that_is_retained():
    model, held = mlp(), {}

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        hidden.retain_grad()
        held["hidden"] = hidden
        return cross_entropy(model[1:](hidden), batch[1])

    def before(k):
        if k == 3:
            float(held["hidden"].grad.norm())

    return Loop(model, loss_fn, sgd(model), before=before)


# --- functions of one's own ---------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class Named(torch.autograd.Function):
    """Its attributes are called as what nodes have of their own, as those of custom ops are."""

    @staticmethod
    def forward(ctx, x):
        ctx.name, ctx.op = "named", torch.sin
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


@identical()
def test_a_function_whose_context_has_a_name_of_its_own():
    model = mlp()
    return Loop(model, lambda m, b: cross_entropy(Named.apply(m(Named.apply(b[0]))), b[1]), sgd(model))


@identical()
def test_a_reversed_gradient_with_a_scheduled_argument():
    model, held = mlp(), SimpleNamespace(scale=0.0)

    def loss_fn(model, batch):
        hidden = Reverse.apply(model[0](batch[0]), held.scale)
        return cross_entropy(model[1:](hidden), batch[1])

    def after(k, out):
        held.scale += 0.1

    return Loop(model, loss_fn, sgd(model), after=after)


@identical()
def test_a_reversed_gradient_with_a_global():
    code = namespace("""
scale = 0.5
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return -scale * grad
def loss_fn(model, batch):
    return F.cross_entropy(model[1:](Reverse.apply(model[0](batch[0]))), batch[1])
""")
    model = mlp()

    def before(k):
        code.scale = 0.2 * k

    return Loop(model, code.loss_fn, sgd(model), before=before)


@identical()
def test_a_reversed_gradient_with_a_class_attribute():
    class Reverse(torch.autograd.Function):
        scale = 1.0

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -Reverse.scale * grad

    model = mlp()

    def before(k):
        Reverse.scale = 0.2 * k + 0.1

    def loss_fn(model, batch):
        return cross_entropy(model[1:](Reverse.apply(model[0](batch[0]))), batch[1])

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_a_function_that_saves_tensors():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    model = mlp()
    return Loop(model, lambda m, b: cross_entropy(Square.apply(m(b[0])), b[1]), sgd(model))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by=2.0):
        ctx.by = by
        x = x - x.amax(-1, keepdim=True)
        out = x.clamp(min=-1) * by
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * out * ctx.by, None


scaled = Scaled.apply  # bound before any step is captured, as PyTorch's documentation advises


@identical()
def test_a_function_by_a_name_bound_before():
    model = mlp()
    return Loop(model, lambda m, b: cross_entropy(m[1:](scaled(m[0](b[0]))), b[1]), sgd(model))


@identical()
def test_a_function_by_a_name_bound_before_inside_a_checkpoint():
    model = mlp()

    def loss_fn(model, batch):
        hidden = checkpoint(lambda x: scaled(model[0](x), 3.0), batch[0], use_reentrant=False)
        return cross_entropy(model[1:](hidden), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_straight_through():
    model = mlp()

    def loss_fn(model, batch):
        out = model(batch[0])
        hard = (out > 0).float()
        return cross_entropy(hard + out - out.detach(), batch[1])

    return Loop(model, loss_fn, sgd(model))


# --- gradients in the loss ----------------------------------------------------------------------------------------


@identical()
def test_a_penalty_on_gradients():
    model, held = mlp(), SimpleNamespace(weight=1.0)

    def loss_fn(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
        return cross_entropy(out, batch[1]) + held.weight * (grad.norm(dim=1) - 1).pow(2).mean()

    def after(k, out):
        held.weight *= 0.9

    return Loop(model, loss_fn, sgd(model), after=after)


@identical()
def test_a_penalty_on_gradients_of_the_batch_itself():
    model = mlp()

    def loss_fn(model, batch):
        x, y = batch
        x.requires_grad_(True)
        out = model(x)
        (grad,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
        return cross_entropy(out, y) + grad.pow(2).sum()

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_an_adversarial_example():
    model = mlp()

    def loss_fn(model, batch):
        x, y = batch
        shift = torch.zeros_like(x, requires_grad=True)
        (grad,) = torch.autograd.grad(cross_entropy(model(x + shift), y), shift)
        return cross_entropy(model(x + 0.1 * grad.sign()), y)

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_backward_pass_inside_the_loss():
    model = mlp()

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        loss.backward(retain_graph=True)
        return loss

    return Loop(model, loss_fn, sgd(model))


def halved():
    """Saves tensors for the backward pass in half the bytes, and with less precision."""
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float)


@identical(plans=2)
def test_hooks_on_saved_tensors_from_some_step():
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        with halved() if k[0] > 3 else contextlib.nullcontext():
            out = model(batch[0])
        return cross_entropy(out, batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=2)
def test_hooks_on_saved_tensors_around_some_steps():
    model = mlp()
    around = lambda k: enlarged() if k in (2, 3) else contextlib.nullcontext()  # noqa: E731
    loss_fn = lambda m, b: m(b[0]).pow(2).mean()  # noqa: E731
    return Loop(model, loss_fn, sgd(model), around=around)


def enlarged():
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.double() * 1.25, lambda x: x.float())


@identical()
def test_a_number_in_hooks_on_saved_tensors():
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        scale = 1 + 0.1 * k[0]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * scale, lambda x: x):
            return model(batch[0]).pow(2).mean()

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_checkpoints():
    model = mlp(dropout=0.3)

    def loss_fn(model, batch):
        return cross_entropy(checkpoint(model, batch[0], use_reentrant=False), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_checkpoints_that_are_reentrant():
    model = mlp(dropout=0.3)

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        return cross_entropy(checkpoint(model[1:], hidden, use_reentrant=True), batch[1])

    return Loop(model, loss_fn, sgd(model))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@identical()
def test_a_reentrant_checkpoint_of_inputs_without_a_gradient():
    """Eager leaves the layers in it without one, and only warns."""
    model = mlp(dropout=0.3)

    def loss_fn(model, batch):
        hidden = checkpoint(model[:2], batch[0], use_reentrant=True)
        return cross_entropy(model[2:](hidden), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_an_input_that_a_reentrant_checkpoint_and_its_surroundings_read_several_times():
    model = mlp()

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        out = checkpoint(lambda x: x * x.sigmoid() + x.tanh(), hidden, use_reentrant=True)
        return cross_entropy(model[1:](out + hidden * 0.3 + hidden.cos()), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_checkpoint_of_code_with_a_number():
    model, held = mlp(), SimpleNamespace(scale=1.0)

    def loss_fn(model, batch):
        out = checkpoint(lambda x: model(x) * held.scale, batch[0], use_reentrant=False)
        return cross_entropy(out, batch[1])

    def before(k):
        held.scale = 1.0 + k

    return Loop(model, loss_fn, sgd(model), before=before)


# --- functional transforms ----------------------------------------------------------------------------------------


@identical()
def test_vmap():
    model, held = mlp(), SimpleNamespace(scale=1.0)

    def loss_fn(model, batch):
        rows = torch.func.vmap(lambda row: (row * held.scale).sin().sum())(batch[0])
        return (cross_entropy(model(batch[0]), batch[1], reduction="none") * rows).mean()

    def before(k):
        held.scale = 1.0 + k

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_vmap_over_what_the_step_has_made():
    """The batch and what was computed of it, in a closure."""
    model = mlp()

    def loss_fn(model, batch):
        weights = model(batch[0]).mean(0)
        rows = torch.func.vmap(lambda row: (row[:2] * batch[0][0, :2]).sum() * weights.sum())(batch[0])
        return cross_entropy(model(batch[0]), batch[1]) + rows.mean()

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_gradient_by_a_transform_of_what_the_step_has_made():
    model = mlp()

    def loss_fn(model, batch):
        scale = model(batch[0]).mean()
        slope = torch.func.grad(lambda x: (model(x) * scale).sum())(batch[0])
        return cross_entropy(model(batch[0]), batch[1]) + slope.square().mean()

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_functional_call():
    model = mlp()

    def loss_fn(model, batch):
        noisy = {n: p + 0.01 * torch.randn_like(p) for n, p in model.named_parameters()}
        return cross_entropy(torch.func.functional_call(model, noisy, (batch[0],)), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_vmap_over_the_model():
    model = mlp()

    def loss_fn(model, batch):
        return cross_entropy(torch.func.vmap(model)(batch[0]), batch[1])

    return Loop(model, loss_fn, sgd(model))


TASKS = {
    "grad": lambda loss, now, x, y: torch.func.grad(loss)(now, x, y),
    "grad and value": lambda loss, now, x, y: torch.func.grad_and_value(loss)(now, x, y)[0],
    "of a gradient": lambda loss, now, x, y: torch.func.grad(
        lambda p: sum(g.pow(2).sum() for g in torch.func.grad(loss)(p, x, y).values())
    )(now),
    "vjp": lambda loss, now, x, y: torch.func.vjp(lambda p: loss(p, x, y), now)[1](torch.ones(()))[0],
    "jacrev": lambda loss, now, x, y: torch.func.jacrev(loss)(now, x, y),
}


@pytest.mark.parametrize("verify_every", [0, 1])
@pytest.mark.parametrize("how", TASKS)
def test_adapted_parameters_for_each_task(how: str, verify_every: int, measurements: Any):
    """MAML by functional transforms: code inside of one gives the model's parameters to another."""

    def build():
        model = mlp()

        def loss_of(now, x, y):
            return cross_entropy(torch.func.functional_call(model, now, (x,)), y)

        def loss_fn(model, batch):
            now = dict(model.named_parameters())

            def of_task(x, y):
                slope = TASKS[how](loss_of, now, x, y)
                return loss_of({n: p - 0.1 * slope[n] for n, p in now.items()}, x, y)

            return torch.func.vmap(of_task)(batch[0].view(2, 3, 4), batch[1].view(2, 3)).mean()

        return Loop(model, loss_fn, sgd(model), steps=4)

    verdict = run(build, measurements, verify_every=verify_every)
    assert verdict.kind == "identical" and verdict.plans == 1, verdict


@identical()
def test_a_function_that_reaches_a_parameter():
    model = mlp()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * model[3].bias.detach().sum()

        @staticmethod
        def backward(ctx, grad):
            return grad * model[3].bias.detach().sum()

    def loss_fn(model, batch):
        return cross_entropy(model[1:](Scaled.apply(model[0](batch[0]))), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_gradient_by_function():
    model, held = mlp(), SimpleNamespace(scale=1.0)

    def loss_fn(model, batch):
        slope = torch.func.grad(lambda x: (model(x).tanh() * held.scale).sum())(batch[0])
        return plain_loss(model, batch) + slope.pow(2).mean()

    def before(k):
        held.scale = 1.0 + k

    return Loop(model, loss_fn, sgd(model), before=before)


# --- compiled and scripted parts ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@identical()
def test_a_compiled_part():
    model = mlp()
    model[3] = torch.compile(model[3], backend="eager")
    return Loop(model, plain_loss, sgd(model))


@refused("TorchScript")
def test_a_scripted_part():
    model = nn.Sequential(nn.Linear(4, 8), torch.jit.script(nn.Sequential(nn.ReLU(), nn.Linear(8, 3))))
    return Loop(model, plain_loss, sgd(model))


@refused("TorchScript")
def test_a_scripted_function_with_a_number():
    """What torch makes of scripted code changes with the first runs."""

    @torch.jit.script
    def scaled(x: torch.Tensor, s: float) -> torch.Tensor:
        return (x * s).tanh() if s > 0.5 else x

    model, held = mlp(), SimpleNamespace(scale=1.0)

    def before(k):
        held.scale = 1.0 + 0.5 * k

    return Loop(
        model, lambda m, b: cross_entropy(scaled(m(b[0]), held.scale), b[1]), sgd(model), before=before
    )


@refused("TorchScript")
def test_a_scripted_function_that_branches():
    @torch.jit.script
    def scaled(x: torch.Tensor, s: float) -> torch.Tensor:
        if s > 2.0:
            return (x * s).tanh()
        return x * s

    model, held = mlp(), SimpleNamespace(scale=1.0)

    def before(k):
        held.scale = 1.0 + 0.5 * k

    return Loop(
        model, lambda m, b: cross_entropy(scaled(m(b[0]), held.scale), b[1]), sgd(model), before=before
    )


# --- parametrizations ---------------------------------------------------------------------------------------------


@identical(plans=None)
def test_spectral_norm():
    model = mlp()
    nn.utils.spectral_norm(model[0])
    return Loop(model, plain_loss, sgd(model))


@identical(plans=None)
def test_spectral_norm_as_a_parametrization():
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    return Loop(model, plain_loss, sgd(model))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm:FutureWarning")
@identical()
def test_weight_norm():
    model = mlp()
    nn.utils.weight_norm(model[0])
    return Loop(model, plain_loss, sgd(model))


@identical()
def test_weight_norm_as_a_parametrization():
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    return Loop(model, plain_loss, sgd(model))


@identical(plans=2)
def test_weight_norm_that_is_removed():
    model = mlp()
    teacher = copy.deepcopy(model)
    nn.utils.parametrizations.weight_norm(teacher[0])

    def before(k):
        if k == 3:
            nn.utils.parametrize.remove_parametrizations(teacher[0], "weight")

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), teacher(batch[0]).detach().softmax(-1))

    return Loop(model, loss_fn, sgd(model), before=before)
