"""What the tests of the torch.compile backend share: training loops, every number compared to the bit."""

import torch
from torch import nn

from support.models import MODELS

QUICK = {"seconds": 30.0, "work": 1_000_000, "strict": True, "eager_fallback": False}
"""Options: a short search, bounded by work so that it ends alike everywhere, and no tolerance."""


def compiled(target, **options):
    return torch.compile(target, backend="tightship", options={**QUICK, **options})


def deep(layers=4, width=16, dropout=0.1):
    """An MLP with dropout; the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))]
        return nn.Sequential(*rows, nn.Linear(width, 4))


def pair(**options):
    """A compiled model, the model in it, and the same model for eager."""
    model = deep()
    return compiled(model, **options), model, deep()


def batch(n=32, seed=0):
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def concatenated(*trees):
    first = trees[0]
    if isinstance(first, dict):
        return {k: concatenated(*(t[k] for t in trees)) for k in first}
    if isinstance(first, tuple):
        return tuple(concatenated(*parts) for parts in zip(*trees, strict=True))
    return torch.cat(trees)


def zoo(name, times=8):
    """A model of the zoo with batches ``times`` as large, so that activations outweigh parameters."""
    model, loss_fn, batches = MODELS[name]()
    return model, loss_fn, lambda step: concatenated(*(batches(step * times + k) for k in range(times)))


def loss_of(call, loss_fn, batch):
    if loss_fn is None:
        return call(**batch).loss
    out = loss_fn(call(batch[0]), batch[1]) if isinstance(loss_fn, nn.Module) else loss_fn(call, batch)
    return out[0] if isinstance(out, tuple) else out


def train(call, model, loss_fn, batches, steps=5):
    """Per step: loss, gradients, buffers and random state, by name. Parameters follow their gradients."""
    rows = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        loss = loss_of(call, loss_fn, batches(step))
        loss.backward()
        row = {"loss": loss.detach().clone(), "random state": torch.get_rng_state()}
        row |= {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        row |= {n: b.clone() for n, b in model.named_buffers()}
        rows.append(row)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.01 * p.grad)
    return rows


def differences(left, right):
    """(step, name) of everything that is not equal to the bit."""
    found = []
    for step, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.keys() == b.keys()
        found += [(step, k) for k in a if not torch.equal(a[k].nan_to_num(), b[k].nan_to_num())]
    return found


def step(call, model, x, seed=1):
    """One step on the sum of the output; loss and gradients."""
    torch.manual_seed(seed)
    loss = call(x).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
