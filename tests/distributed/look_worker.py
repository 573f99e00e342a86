"""One rank: steps under DistributedDataParallel whose code looks at what they compute, in eager and with ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from worker import WIDTH, batches, caught, digest, main

import tightship

Loss = Callable[[Any, Any, list[Any]], torch.Tensor]


class Net(torch.nn.Module):
    """``scale`` is a buffer that rank 0 sends before each step, and that no step writes; a ``norm`` writes others.
    With a ``log``, its code looks at what it computes before that."""

    def __init__(self, norm: bool = False, log: list[Any] | None = None) -> None:
        super().__init__()
        self.log = log
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, 7)
        self.norm = torch.nn.BatchNorm1d(2 * WIDTH) if norm else torch.nn.Identity()
        self.drop = torch.nn.Dropout(0.2)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.log is not None:
            self.log.append(h.mean().item())
        return self.b(self.drop(F.gelu(self.norm(h))) * self.scale)


def logged(m: Any, b: Any, log: list[Any]) -> torch.Tensor:
    out = m(b[0])
    loss = F.mse_loss(out, b[1])
    log += [loss.item(), f"{loss:.4f}", out.argmax(1).tolist(), float(out.detach().norm())]
    return loss


def branched(m: Any, b: Any, log: list[Any]) -> torch.Tensor:
    """Ranks take their paths by themselves."""
    out = m(b[0])
    loss = F.mse_loss(out, b[1])
    log.append(loss.item())
    if log[-1] > 1.05:
        loss = loss + 0.1 * out.abs().mean()
        log.append("above")
    return loss


def weighed(m: Any, b: Any, log: list[Any]) -> torch.Tensor:
    out = m(b[0])
    loss = F.mse_loss(out, b[1])
    log.append(loss.item() / (1 + out.abs().mean().item()))
    return loss + log[-1] * out.abs().mean()


def answered(m: Any, b: Any, log: list[Any]) -> torch.Tensor:
    out = m(b[0])
    if out.mean() > out.median():
        log.append("above")
    return F.mse_loss(out, b[1])


def reduced(m: Any, b: Any, log: list[Any]) -> torch.Tensor:
    """What all ranks have computed goes into a log, and into the loss."""
    count = (b[1] > 0).sum()
    dist.all_reduce(count)
    loss = F.mse_loss(m(b[0]), b[1]) * (2 * b[1].numel() / count.item())
    total = loss.detach().clone()
    dist.all_reduce(total)
    log.append(total.item())
    return loss


def alternating(m: Any, b: Any, log: list[Any]) -> torch.Tensor:
    """Each rank takes a path by what it has computed alone, and looks once more behind it."""
    loss = branched(m, b, log)
    log.append(loss.item())
    return loss


def _replicated(net: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(net)


def _sharded(net: Net) -> torch.nn.Module:
    fully_shard([net.a])
    return fully_shard(net)


def _trained(
    loss: Loss,
    planned: bool,
    wrap: Callable[[Any], Any] = _replicated,
    norm: bool = False,
    early: bool = False,
) -> dict[str, Any]:
    log = list[Any]()
    m, given = wrap(Net(norm, log if early else None)), batches(6)
    o = torch.optim.AdamW(m.parameters(), 1e-2)

    def loss_fn(model: Any, b: Any) -> torch.Tensor:
        return loss(model, b, log)

    step: Any = tightship.fit(m, loss_fn, o, given[0], "150%") if planned else None
    torch.manual_seed(dist.get_rank())
    losses, peaks = [], []
    for b in given:
        if planned:
            losses.append(step(b).item())
            peaks.append([step.measure()[f"{what}_peak"] for what in ("planned", "measured")])
            continue
        losses.append(loss_fn(m, b))
        losses[-1].backward()
        o.step()
        o.zero_grad()
    state = step.state_dict(full=True)["model"] if planned else getattr(m, "module", m).state_dict()
    found = {
        "losses": [float(x) for x in losses],
        "log": log,
        "model": digest(t.full_tensor() if isinstance(t, DTensor) else t for t in state.values()),
    }
    return {"row": found | {"drawn": torch.rand(2).tolist()}, "peaks": peaks}


def looks() -> Any:
    ways = {"logged": logged, "branched": branched, "weighed": weighed, "answered": answered}
    return {how: [_trained(loss, planned) for planned in (False, True)] for how, loss in ways.items()}


def together() -> Any:
    """What other ranks take part in before it can be looked at."""
    ways: dict[str, Any] = {
        "reduced": (reduced,),
        "statistics": (alternating, _replicated, True),
        "before statistics": (logged, _replicated, True, True),
        "parts": (logged, _sharded, True),
        "parts, alternating": (alternating, _sharded),
    }
    return {
        how: [_trained(loss, planned, *rest) for planned in (False, True)]
        for how, (loss, *rest) in ways.items()
    }


def one_looks() -> Any:
    """At what the others take part in."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        made = F.mse_loss(m(b[0]), b[1])
        if dist.get_rank() == 0:
            made.item()
        return made

    m, b = _sharded(Net()), batches(1)[0]
    o = torch.optim.SGD(m.parameters(), 0.1)
    return caught(lambda: tightship.fit(m, loss, o, b, "150%"))


def fails() -> Any:
    """Rank 1's code raises once it has looked."""
    m, b = DistributedDataParallel(Net()), batches(1)[0]
    log: list[Any] = []

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        loss = logged(model, batch, log)
        if len(log) > 4 and dist.get_rank():
            raise ArithmeticError("seen enough")
        return loss

    step = tightship.fit(m, loss_fn, torch.optim.SGD(m.parameters(), 0.1), b, "150%")
    step(b)
    before = digest(m.module.state_dict().values())
    return caught(lambda: step(b)) | {"same": digest(m.module.state_dict().values()) == before}


def changed() -> Any:
    """A buffer that rank 0 sends is another on rank 1, which its code has seen by then."""
    m, b = DistributedDataParallel(Net()), batches(1)[0]
    o = torch.optim.SGD(m.parameters(), 0.1)
    step = tightship.fit(m, lambda model, batch: logged(model, batch, []), o, b, "150%")
    step(b)
    if dist.get_rank():
        m.module.scale.fill_(2.0)
    return caught(lambda: step(b))


if __name__ == "__main__":
    main({"looks": looks, "together": together, "one_looks": one_looks, "fails": fails, "changed": changed})
