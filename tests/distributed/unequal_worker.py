"""One rank: ranks that do not do the same, in layers, batches, options and what code writes between steps."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_worker import both, row, sharded
from worker import WIDTH, batches, caught, loss_of, main, model

import tightship


class Tasks(torch.nn.Module):
    """Each batch has one of three heads, ``never`` is called by none, and blocks are left out as the rank draws."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.heads = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 7) for _ in range(3)])
        self.never, self.called = torch.nn.Linear(3, 3), 0

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        x = self.norm(self.body(x)).relu()
        for block in self.blocks:
            self.called += 1
            x = x if random.random() < 0.5 else x + block(x)
        return self.heads[k](x)


def of_tasks(count: int = 5) -> list[Any]:
    return [(*b, (2 * k + dist.get_rank()) % 3) for k, b in enumerate(batches(count))]


def task_loss(m: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(m(batch[0], batch[2]), batch[1])


def other_layers() -> Any:
    """``alike``: the first batch has the same layers on all ranks, so that only a later step finds others."""
    ways: dict[str, dict[str, Any]] = {
        "whole": {},
        "alike": {},
        "accumulated": {"accumulate": 2},
        "split": {"split": True},
    }
    return {
        how: {planned: _tasks(how, options, planned == "fit") for planned in ("eager", "fit")}
        for how, options in ways.items()
    }


def _tasks(how: str, options: dict[str, Any], planned: bool) -> dict[str, Any]:
    random.seed(dist.get_rank() if how != "alike" else 0)
    m, given = DistributedDataParallel(Tasks(), find_unused_parameters=True), of_tasks()
    if how == "alike":
        given[0] = (*given[0][:2], 0)
        random.seed(0)
    o = torch.optim.AdamW(m.parameters(), 1e-2)
    step: Any = tightship.fit(m, task_loss, o, given[0], "150%", **options) if planned else None
    losses = []
    for k, b in enumerate(given):
        if planned and how == "split":
            losses.append(step.backward(b))
            step.update()
            o.zero_grad()
        elif planned:
            losses.append(step(b))
        else:
            with m.no_sync() if how == "accumulated" and k % 2 == 0 else torch.enable_grad():
                losses.append(task_loss(m, b))
                losses[-1].backward()
            if how != "accumulated" or k % 2:
                o.step()
                o.zero_grad()
        if how == "alike" and k == 0:
            random.seed(dist.get_rank())
    found = row(losses, m.module, o) | {"called": m.module.called, "drawn": random.random()}
    found["stepped"] = sorted(n for n, p in m.module.named_parameters() if p in o.state)
    return found | ({"measure": step.measure(), "notes": step.notes} if planned else {})


def other_rates() -> Any:
    """One rank alone lowers its rate: before a step, before an update, and before one of several batches."""
    ways: dict[str, dict[str, Any]] = {
        "step": {}, "update": {"split": True}, "accumulated": {"accumulate": 2}, "sharded": {},
        "compiled": {"mode": "compiled"}, "two": {},
    }  # fmt: skip
    return {how: _rates(how, options) for how, options in ways.items()}


def _rates(how: str, options: dict[str, Any]) -> dict[str, Any]:
    m: Any = sharded(model()) if how == "sharded" else DistributedDataParallel(model())
    rate = torch.tensor(0.1) if how == "step" else 0.1
    o: Any = torch.optim.SGD(m.parameters(), rate, momentum=0.9)
    if how == "two":
        first, *rest = m.parameters()
        o, second = torch.optim.SGD([first], rate), torch.optim.SGD(rest, rate)
    b = batches(1)[0]
    step = tightship.fit(m, loss_of, [o, second] if how == "two" else o, b, "150%", **options)

    def train() -> None:
        if how == "update":
            step.backward(b)
            step.update()
            o.zero_grad()
        else:
            for _ in range(options.get("accumulate", 1)):
                step(b)

    train()
    if dist.get_rank():
        o.param_groups[0]["lr"] = 0.01
    refused = caught(train)
    o.param_groups[0]["lr"] = rate
    for p in m.parameters():
        p.grad = None
    return {"refused": refused, "afterwards": "" if how == "accumulated" else caught(train)["text"]}


def data_set() -> Any:
    """Between steps code gives parameters other data, which eager's DTensors do not notice."""
    return {planned: _data_set(planned == "fit") for planned in ("eager", "fit")}


def _data_set(planned: bool) -> dict[str, Any]:
    m, given = sharded(model()), batches(4)
    o = torch.optim.AdamW(m.parameters(), 1e-2)
    step: Any = tightship.fit(m, loss_of, o, given[0], "100%") if planned else None
    losses, places = [], list[str]()
    for k, b in enumerate(given):
        if k == 2:
            with torch.no_grad():
                for p in m.parameters():
                    p.data = p.data * 0.5
        if planned:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                losses.append(step(b))
            places += [Path(w.filename).name for w in said if "changes nothing" in str(w.message)]
            continue
        o.zero_grad()
        losses.append(loss_of(m, b))
        losses[-1].backward()
        o.step()
    found = row(losses, m, o)
    return found | ({"measure": step.measure(), "notes": step.notes, "places": places} if planned else {})


def other_rows() -> Any:
    """Within a tight budget one rank's batches are short, one row, or empty."""
    g = torch.Generator().manual_seed(dist.get_rank())
    given = [torch.randn(64, WIDTH, generator=g) for _ in range(5)]
    if dist.get_rank():
        given[2:] = [given[2][:0], given[3][:1], given[4][:0]]
    return {
        wrap.__name__: both(_layers, _squares, given, wrap=wrap, budget="static+50%")
        for wrap in (sharded, DistributedDataParallel)
    }


def _layers() -> torch.nn.Module:
    torch.manual_seed(0)
    rows = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(3)]
    return torch.nn.Sequential(*[m for row in rows for m in row])


def _squares(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m(x).pow(2).sum()


if __name__ == "__main__":
    main(globals())
