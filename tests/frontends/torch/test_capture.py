"""Captured steps against eager: losses, parameters, buffers and optimizer state, to the bit."""

import copy
import os
import sysconfig
from typing import Any

import pytest
import torch

from support.models import MODELS
from support.naive import Naive
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.capture.tape import source_line
from tightship.frontends.torch.structure import flatten

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.01),
}


def eager_loss(model, loss_fn, batch):
    if loss_fn is None:
        return model(**batch).loss
    if isinstance(loss_fn, torch.nn.Module):
        return loss_fn(model(batch[0]), batch[1])
    return loss_fn(model, batch)


def tensors_of(model, optimizer):
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    names = {id(p): n for n, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        named |= {f"{names[id(p)]}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return named


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def compare(name, optimizer, steps=3):
    model, loss_fn, batches = (MODELS[name] if isinstance(name, str) else name)()
    other = copy.deepcopy(model)
    opt, other_opt = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](other.parameters())
    before = {k: v.clone() for k, v in tensors_of(other, other_opt).items()}
    rng = torch.get_rng_state()
    program = capture_step(other, loss_fn, other_opt, batches(0))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(same(v, before[k]) for k, v in tensors_of(other, other_opt).items())
    assert all(p.grad is None and type(p) is torch.nn.Parameter for p in other.parameters())
    run = Naive(program, other, other_opt)
    for step in range(steps):
        torch.manual_seed(step)
        opt.zero_grad()
        out = eager_loss(model, loss_fn, batches(step))
        (out[0] if isinstance(out, tuple) else out).backward()
        opt.step()
        state = torch.get_rng_state()
        torch.manual_seed(step)
        got = run(batches(step))
        assert torch.equal(state, torch.get_rng_state()), "random state"
        for a, b in zip(flatten(out), flatten(got), strict=True):
            assert same(a, b) if isinstance(a, torch.Tensor) else a == b, f"step {step}: result {a} {b}"
        left, right = tensors_of(model, opt), tensors_of(other, other_opt)
        assert left.keys() == right.keys()
        wrong = [k for k in left if not same(left[k], right[k])]
        assert not wrong, f"step {step}: {wrong[:5]}"
    return program


@pytest.mark.parametrize("name", list(MODELS))
def test_bit_identical(name):
    compare(name, "adamw")


@pytest.mark.parametrize("optimizer", ["fused", "sgd"])
@pytest.mark.parametrize("name", ["gpt2", "cnn", "tied", "resnet"])
def test_optimizers(name, optimizer):
    compare(name, optimizer)


def test_a_command_of_an_installed_package_is_no_line_of_the_users() -> None:
    """An op of a library's module, run by ``tightship`` or ``torchrun``, has the user's line or none."""
    path = os.path.join(sysconfig.get_path("scripts"), "torchrun")
    inside: dict[str, Any] = {}
    exec(compile("def run(f):\n    return f()\n", path, "exec"), inside)
    assert os.path.basename(__file__) + ":" in inside["run"](source_line)


RESHAPES = {
    "view": lambda x: x.transpose(1, 2).view(2, 1, 7, 7),
    "reshape": lambda x: x.transpose(1, 2).reshape(2, 1, 7, 7),
    "flatten": lambda x: x.unsqueeze(2).transpose(1, 3).flatten(2, 3).unsqueeze(1),
    "unflatten": lambda x: x.transpose(1, 2).unflatten(2, (7, 7)),
    "view of a part": lambda x: x[:, 1:].transpose(1, 2).view(2, 1, 8, 6),
}


@pytest.mark.parametrize("reshape", RESHAPES.values(), ids=RESHAPES)
def test_dimensions_of_size_one_have_the_strides_of_eager(reshape):
    """Convolutions go by them: whether their input is channels-last."""
    model, seen = torch.nn.Linear(1, 1), []

    def loss(model, batch):
        out = reshape(model(batch))
        seen.append(out)
        return (out * out).sum()

    captured = capture_step(model, loss, None, torch.randn(2, 49, 1))
    loss(model, torch.randn(2, 49, 1))
    strides = {(tuple(v.shape), tuple(v.stride)) for v in captured.graph.values}
    assert (tuple(seen[-1].shape), seen[-1].stride()) in strides
