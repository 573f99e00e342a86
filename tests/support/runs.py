"""One training step in eager, and what it leaves behind, for comparison to the bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch

from support.models import MODELS
from tightship.execute import allocator
from tightship.frontends.torch import compat
from tightship.frontends.torch.structure import tensor_leaves
from tightship.graph import aligned

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
}


class Dropped(torch.nn.Module):
    """Dropout whose masks are larger than the random state; the result is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.nn.functional.dropout(torch.relu(layer(x)), 0.3)
        return x.square().mean()


def eager(model: Any, loss_fn: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    if loss_fn is None:
        loss = model(**batch).loss
    elif isinstance(loss_fn, torch.nn.Module):
        loss = loss_fn(model(batch[0]), batch[1])
    else:
        loss = loss_fn(model, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def loss_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


class Pair:
    """The same model twice, one for eager and one to be fitted, each with its optimizer."""

    def __init__(self, name: str = "mlp", optimizer: str = "adamw") -> None:
        self.model, self.loss_fn, self.batch = MODELS[name]()
        self.twin = copy.deepcopy(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.twin_optimizer = OPTIMIZERS[optimizer](self.twin.parameters())

    def compare(self, step: Any, number: int, batch: Any = None) -> None:
        """One step of each from the same random state, and everything compared."""
        batch = self.batch(number) if batch is None else batch
        torch.manual_seed(number)
        expected = eager(self.twin, self.loss_fn, self.twin_optimizer, batch)
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        loss = loss_of(step(batch))
        assert torch.equal(loss, expected)
        assert torch.equal(torch.get_rng_state(), drawn)
        self.same()

    def same(self) -> None:
        pairs = zip(self.model.state_dict().items(), self.twin.state_dict().items(), strict=True)
        for (name, mine), (_, other) in pairs:
            assert torch.equal(mine, other), name
        for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            mine, other = self.optimizer.state.get(p, {}), self.twin_optimizer.state.get(q, {})
            assert list(mine) == list(other)
            for key in mine:
                assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(other[key])), key
            assert p.grad is None


@contextlib.contextmanager
def beyond(size: int) -> Iterator[None]:
    """No file can be written beyond its first ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Failing:
    """A pool of which the copy of that number fails."""

    def __init__(self, pool, which, at, counter):
        self.pool, self.which, self.at, self.counter = pool, which, at, counter

    def __getattr__(self, name):
        if name != self.which:
            return getattr(self.pool, name)
        self.counter[0] += 1
        if self.counter[0] == self.at:
            raise OSError(28 if name == "write" else 5, "failed on purpose")
        return getattr(self.pool, name)


def measured(
    model: torch.nn.Module, batch: Any, loop: Callable[[Any, Any, Any], Any], optimizer: Any = None
) -> int:
    """The most bytes of two steps of a loop in eager, by the allocator, with what there is before."""
    states = [t for o in [optimizer] if o for s in o.state.values() for t in tensor_leaves(s)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = (*model.parameters(), *model.buffers(), *tensor_leaves(batch), *states, *gradients)
    homes = {compat.storage_key(t): t for t in tensors}
    static = sum(aligned(t.untyped_storage().nbytes()) for t in homes.values())
    held = None
    del states, gradients, tensors, homes  # they end when the loop lets go of them
    gc.collect()  # what others have left would lower the level when it ends
    with allocator.Meter() as meter:
        for _ in range(2):
            held = loop(model, batch, optimizer)
    del held
    return static + meter.peak
