"""One rank: models that torch itself has made parallel, in ``fit`` and in eager."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from worker import WIDTH, adamw, batches, caught, digest, loss_of, main, model

import tightship


class Tied(torch.nn.Module):
    """Words in and out by one matrix, in a number that two ranks do not divide; a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(51, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.extra = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.head = torch.nn.Linear(WIDTH, 51, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> Any:
        x = self.words(words)
        for layer in (*self.layers, self.layers[0]):
            x = F.gelu(layer(x)) + self.extra[0] * self.extra[1]
        return self.head(x)


def words(count: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randint(0, 51, (64, 8), generator=g) for _ in range(count)]


def word_loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m(batch).flatten(0, 1), batch.flatten())


def sharded(m: Any, **options: Any) -> Any:
    """Each layer by itself, then the whole."""
    layers = m.layers if isinstance(m, Tied) else m
    for layer in layers:
        if next(layer.parameters(recurse=False), None) is not None:
            fully_shard(layer, **options)
    return fully_shard(m, **options)


def whole(tensors: Any) -> str:
    return digest(t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors)


def row(losses: list[Any], m: Any, o: Any) -> dict[str, Any]:
    """What a training left behind, of which state dicts say all."""
    states = o.state_dict()["state"]
    return {
        "losses": [loss.item() for loss in losses],
        "model": whole(m.state_dict().values()),
        "optimizer": whole(t for k in sorted(states) for t in states[k].values()),
        "names": sorted(m.state_dict()),
        "kinds": {n: type(t).__name__ for n, t in m.state_dict().items()},
    }


def both(
    make: Callable[[], Any], loss: Any, given: list[Any], clip: float | None = None, budget: str = "static+50%",
    wrap: Callable[[Any], Any] = sharded, before: int = 0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Eager training and ``fit``'s of the same model; ``before`` as many eager steps."""
    rows = {}
    for planned in (False, True):
        m = wrap(make())
        o = adamw(m)
        losses: list[Any] = []
        step: Any = None
        for k, b in enumerate(given):
            if planned and k >= before:
                o.zero_grad()
                step = step or tightship.fit(m, loss, o, b, budget, clip_norm=clip, **options)
                losses.append(step(b))
                continue
            o.zero_grad()
            value = loss(m, b)
            value.backward()
            if clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(m.parameters(), clip)
            o.step()
            losses.append(value.detach())
        mine = row(losses, m, o)
        if planned:
            mine |= {"measure": step.measure(), "recomputed": step.plan.count("recompute")}
        if clip is not None:
            norm = step.grad_norm if planned else norm
            mine["norm"] = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        rows["fit" if planned else "eager"] = mine
    return rows


# --- scenarios ---


def fully_sharded() -> Any:
    return both(model, loss_of, batches(4), verify_every=2)


def fully_sharded_tied() -> Any:
    return both(Tied, word_loss, words(4))


def fully_sharded_later() -> Any:
    """After eager steps, whose optimizer state is taken over."""
    return both(model, loss_of, batches(4), before=2)


def fully_sharded_clipped() -> Any:
    return both(model, loss_of, batches(4), clip=0.05, verify_every=2)


def in_ddp() -> Any:
    return both(model, loss_of, batches(4), wrap=DistributedDataParallel)


if __name__ == "__main__":
    main(globals())
