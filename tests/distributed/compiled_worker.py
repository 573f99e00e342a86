"""One rank: steps of several ranks that Inductor compiles, with collectives in their graphs."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from worker import adamw, caught, digest, main

import tightship
from tightship.integrations.torch_compile import Fallback, compiled_notes, compiled_plans

WIDTH = 24


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(3):
        layers += [torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers)


def batches(*rows: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(10 + dist.get_rank())
    return [torch.randn(n, WIDTH, generator=g) for n in rows]


def loss_of(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(m(x), x)


GIVEN = (256, 256, 256)


def eager() -> list[float]:
    m = DistributedDataParallel(net())
    o, losses = adamw(m), []
    for b in batches(*GIVEN):
        o.zero_grad()
        loss = loss_of(m, b)
        loss.backward()
        o.step()
        losses.append(loss.item())
    return losses


def trained(how: str, budget: str, **options: Any) -> dict[str, Any]:
    m = net()
    wrapped: Any = (
        DistributedDataParallel(m) if how == "ddp" else fully_shard(m) if how == "fully_shard" else m
    )
    given = (
        {}
        if wrapped is not m or how == "fully_shard"
        else {"parallel": tightship.DataParallel(how == "shard")}
    )
    o, rows = adamw(wrapped), batches(*options.pop("rows", GIVEN))
    step = tightship.fit(wrapped, loss_of, o, rows[0], budget, mode="compiled", **given, **options)
    losses = [step(b).item() for b in rows]
    return {
        "losses": losses,
        "digest": digest(step.state_dict(full=True)["model"].values()),
        "measure": step.measure(),
        "recomputed": step.plan.recomputed,
        "notes": step.notes,
    }


def ways() -> Any:
    return {"eager": eager()} | {
        f"{how} {budget}": trained(how, budget)
        for how, budget in (("ddp", "100%"), ("shard", "static+60%"), ("fully_shard", "100%"))
    }


def in_parts() -> Any:
    """Two batches for each update, whose gradients are averaged between compiled passes."""
    rows = {}
    for mode in ("exact", "compiled"):
        m = net()
        options: dict[str, Any] = {"accumulate": 2, "parallel": tightship.DataParallel(), "mode": mode}
        step = tightship.fit(m, loss_of, adamw(m), batches(64)[0], "100%", **options)
        rows[mode] = [step(b).item() for b in batches(64, 64, 64, 64)]
    return rows | {"digest": digest(m.parameters())}


def other_rows() -> Any:
    """The last batch of rank 1 is shorter; gathers of the others run again within their budget."""
    rows = 256, 256, 32 if dist.get_rank() else 256
    return {
        how: trained(how, budget, rows=rows) for how, budget in (("ddp", "150%"), ("shard", "static+60%"))
    }


def infeasible() -> Any:
    m = DistributedDataParallel(net())
    return caught(lambda: tightship.fit(m, loss_of, adamw(m), batches(256)[0], "100KiB", mode="compiled"))


def not_compiled() -> Any:
    """Rows in another order, which Inductor fails at, on both ranks or one; a shorter batch on rank 1 or 0; and steps
    that it compiles."""

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m(x)
        return F.mse_loss(y[torch.randperm(len(x))] if len(x) != 64 else y, x)

    given = batches(256, 256, 128 if dist.get_rank() else 256, 64, 256 if dist.get_rank() else 64, 64)
    rows: dict[str, Any] = {}
    for how in ("eager", "ddp", "shard"):
        m: Any = DistributedDataParallel(net()) if how != "shard" else net()
        o, losses = adamw(m), []
        options: dict[str, Any] = {"parallel": tightship.DataParallel(shard=True)} if how == "shard" else {}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step: Any = None
            if how != "eager":
                step = tightship.fit(m, loss, o, given[0], "static+90%", mode="compiled", **options)
            for k, b in enumerate(given):
                torch.manual_seed(k)
                if step is None:
                    o.zero_grad()
                    value = loss(m, b)
                    value.backward()
                    o.step()
                else:
                    value = step(b)
                losses.append(value.item())
        said = [str(w.message) for w in told if issubclass(w.category, Fallback)]
        rows[how] = {"losses": losses, "said": said, "measure": step and step.measure()}
    m = DistributedDataParallel(net())
    rows["strict"] = caught(
        lambda: tightship.fit(m, loss, adamw(m), given[0], "100%", mode="compiled", strict=True)
    )
    dist.barrier()  # whoever is told last is told by a process that is still there
    return rows


def failing_kernel() -> Any:
    """An index that only rank 1's batch has too large, between collectives of compiled code."""
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Embedding(16, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    words = torch.arange(16)
    step = tightship.fit(
        m, lambda m, x: m(x).pow(2).mean(), adamw(m), words, "100%", mode="compiled",
        parallel=tightship.DataParallel(shard=True, bucket=0),
    )  # fmt: skip
    first = step(words).item()
    words = words + 1 if dist.get_rank() else words
    return {"first": first, "error": caught(lambda: step(words))}


def hand_made() -> Any:
    """A collective of the loss's own, where ranks agree on what they compile, and where they do not."""

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m(x)
        return functional.all_reduce(y.detach(), "sum", dist.group.WORLD).mean() * y.mean() + y.pow(2).mean()

    rows: dict[str, Any] = {}
    for independent in (False, True):
        torch.manual_seed(0)
        m = torch.nn.Linear(WIDTH, WIDTH)
        rows["eager"] = loss(m, batches(8)[0]).item()
        options: dict[str, Any] = {"mode": "compiled", "independent": independent}
        key = "alone" if independent else "loss"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows[str(independent)] = caught(
                lambda m=m, options=options, key=key: rows.update(
                    {
                        key: tightship.fit(m, loss, adamw(m), batches(8)[0], "100%", **options)(
                            batches(8)[0]
                        ).item()
                    }
                )
            )
        rows["said"] = [str(w.message) for w in told if issubclass(w.category, Fallback)]
    return rows


def other_first_rows() -> Any:
    """A percentage would be of another step on each rank."""
    m = DistributedDataParallel(net())
    rows = batches(32 if dist.get_rank() else 64)
    return caught(lambda: tightship.fit(m, loss_of, adamw(m), rows[0], "100%", mode="compiled"))


def by_the_backend() -> Any:
    """Tensor parallelism through torch.compile: rank 1 has another budget, so that ranks choose different partitions;
    then rank 0 finds what it compiled in its cache, and rank 1 compiles anew."""
    mesh = init_device_mesh("cpu", (2,))
    given = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))

    def trained(**compiled: Any) -> dict[str, Any]:
        torch._dynamo.reset()
        m = net()
        halves = {f"{3 * k}": ColwiseParallel() for k in range(3)}
        parallelize_module(m, mesh, halves | {f"{3 * k + 2}": RowwiseParallel() for k in range(3)})
        call, o, losses = torch.compile(m, dynamic=False, **compiled), adamw(m), []
        for _ in range(3):
            o.zero_grad()
            loss = loss_of(call, given)
            loss.backward()
            o.step()
            losses.append(loss.item())
        row = {"losses": losses, "digest": digest(p.full_tensor() for p in m.parameters())}
        if compiled["backend"] != "tightship":
            return row
        (graph,) = compiled_plans(call)
        plan, last = graph.plan, graph.last
        assert last is not None
        return row | {
            "bytes": (last.measured_peak, plan.peak, plan.budget), "misses": last.misses,
            "recomputed": plan.recomputed, "notes": compiled_notes(call),
        }  # fmt: skip

    def planned(folder: str) -> dict[str, Any]:
        budget = "static+65%" if dist.get_rank() else "static+80%"
        options = {"budget": budget, "mode": "compiled", "cache": folder}
        return trained(backend="tightship", options=options)

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as other:
        return {
            "inductor": trained(backend="inductor"),
            "cold": planned(first),
            "warm here, cold there": planned(other if dist.get_rank() else first),
        }


if __name__ == "__main__":
    main(globals())
