"""One rank: steps in the loops of trainers and launchers, in eager and with ``fit``."""

from __future__ import annotations

import os
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_worker import sharded, whole
from worker import WIDTH, adamw, batches, caught, digest, loss_of, main, model

import tightship
from tightship.integrations.callback import CompileCallback
from tightship.integrations.torch_compile import Fallback


def of_half(m: Any, batch: Any) -> torch.Tensor:
    """Of one of two batches whose gradients are added up."""
    return loss_of(m, batch) / 2


# --- steps that are made where a loop adds up gradients ---


def accumulated_by_accelerate() -> Any:
    """``fit`` with the first batch, inside of ``accumulate()``, in which the loop goes on as it was."""
    from accelerate import Accelerator

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    rows = {}
    for planned in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = model()
        m, o = accelerator.prepare(net, adamw(net))
        losses: list[Any] = []
        step: Any = None
        for b in batches(6):
            with accelerator.accumulate(m):
                if planned:
                    step = step or tightship.fit(m, of_half, o, b, "100%", split=True)
                    losses.append(step.backward(b).detach() * 2)
                else:
                    losses.append(loss_of(m, b))
                    accelerator.backward(losses[-1])
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(m.parameters(), 0.5))
                    step.update() if planned else o.step()
                o.zero_grad()
        rows["fit" if planned else "eager"] = [*map(float, losses), digest(net.state_dict().values())]
        if planned:
            rows["measure"] = step.measure()
    return rows


def averaged_now_and_then() -> Any:
    """accelerate's LocalSGD: each rank trains by itself, and parameters are averaged every other step."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    rows = {}
    for planned in (False, True):
        accelerator = Accelerator(cpu=True)
        net = model()
        m, o = accelerator.prepare(net, adamw(net))
        losses: list[Any] = []
        step: Any = None
        with LocalSGD(accelerator=accelerator, model=m, local_sgd_steps=2) as local:
            for b in batches(5):
                if planned:
                    step = step or tightship.fit(m.module, loss_of, o, b, "100%", independent=True)
                    losses.append(step(b))
                else:
                    losses.append(loss_of(m, b))
                    accelerator.backward(losses[-1])
                    o.step()
                    o.zero_grad()
                local.step()
        rows["fit" if planned else "eager"] = [*map(float, losses), digest(net.parameters())]
    return rows | {"measure": step.measure()}


def accumulated_in_shards() -> Any:
    """``fit`` while gradients are not to be sent, which scatters those of each batch all the same."""
    rows = {}
    for planned in (False, True):
        m = sharded(model())
        o, losses = adamw(m), []
        step: Any = None
        for k, b in enumerate(batches(6)):
            if planned:
                m.set_requires_gradient_sync(k % 2 == 1)
                step = step or tightship.fit(m, of_half, o, b, "100%", accumulate=2)
                losses.append(step(b).detach())
                continue
            losses.append(of_half(m, b))
            losses[-1].backward()
            if k % 2:
                o.step()
                o.zero_grad()
        rows["fit" if planned else "eager"] = [*map(float, losses), whole(m.state_dict().values())]
    return rows


def updates_unsent() -> Any:
    """Steps that would update where the loop has torch send no gradients."""
    given, rows = batches(3), {}
    m = DistributedDataParallel(model())
    o = adamw(m)
    with m.no_sync():
        rows["fit in no_sync"] = caught(lambda: tightship.fit(m, loss_of, o, given[0], "100%"))
    step = tightship.fit(m, loss_of, o, given[0], "100%")
    before = digest(m.parameters())
    with m.no_sync():
        rows["step in no_sync"] = caught(lambda: step(given[0]))
    with m.no_sync() if dist.get_rank() else nullcontext():
        rows["step of one in no_sync"] = caught(lambda: step(given[0]))
    rows["unchanged"] = before == digest(m.parameters())
    rows["later"] = caught(lambda: step(given[0]))
    m = sharded(model())
    o = adamw(m)
    m.set_requires_gradient_sync(False)
    rows["fit told"] = caught(lambda: tightship.fit(m, loss_of, o, given[0], "100%"))
    m.set_requires_gradient_sync(True)
    step = tightship.fit(m, of_half, o, given[0], "100%", accumulate=2)
    m.set_requires_gradient_sync(False)
    rows["first of two, told"] = caught(lambda: step(given[0]))
    rows["second of two, told"] = caught(lambda: step(given[1]))
    m.set_requires_gradient_sync(True)
    rows["second of two"] = caught(lambda: step(given[1]))
    return rows


# --- checkpoints of Fabric ---


class Stacked(torch.nn.Module):
    """Blocks of torch's own classes, which a container of torch's calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear, gelu = torch.nn.Linear, torch.nn.GELU
        blocks = [torch.nn.Sequential(linear(WIDTH, 64), gelu(), linear(64, WIDTH)) for _ in range(10)]
        self.net = torch.nn.Sequential(*blocks, linear(WIDTH, 7))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def blocks_of_torchs_own() -> Any:
    """In ``fully_shard``, one by one and together, while a trainer's callback has compiled the model."""
    rows: dict[str, Any] = {}
    for how in ("eager", "nested", "flat"):
        m, given = Stacked(), batches(3)
        for block in m.net if how != "flat" else ():
            fully_shard(block)
        o = adamw(fully_shard(m.net))  # type: ignore[arg-type]
        callback = CompileCallback("120%", say=None)
        if how != "eager":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Fallback)
                callback.attach(m, [o], accumulate=False)
        losses = []
        for b in given:
            o.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Fallback)
                loss = loss_of(m, b)
            loss.backward()
            o.step()
            losses.append(loss.item())
        callback.detach()
        rows[how] = {"losses": losses, "model": digest(t.full_tensor() for t in m.state_dict().values())}  # type: ignore[attr-defined]
        if how != "eager":
            left = [n for n, one in m.named_modules() if "forward" in vars(one)]
            rows[f"{how}, planned"] = len(callback.plans), callback.notes, left
    return rows


def saved_by_fabric() -> Any:
    """In parts and whole; each is loaded by the other kind of loop, which goes on."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    rank = str(dist.get_rank())
    os.environ.update(LOCAL_RANK=rank, GROUP_RANK="0", LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    rows: dict[str, Any] = {}
    folder = [tempfile.mkdtemp() if rank == "0" else None]
    dist.broadcast_object_list(folder)
    for whole_ in (False, True):
        made: dict[bool, tuple[Any, ...]] = {}
        for planned in (False, True):
            fabric = Fabric(
                accelerator="cpu",
                devices=2,
                strategy=ModelParallelStrategy(
                    lambda m, mesh: fully_shard(m, mesh=mesh["data_parallel"]),
                    data_parallel_size=2,
                    tensor_parallel_size=1,
                    save_distributed_checkpoint=not whole_,
                ),
            )
            fabric.launch()
            m = fabric.setup_module(model())
            o = fabric.setup_optimizers(torch.optim.AdamW(m.parameters(), 1e-2))
            step = tightship.fit(m, loss_of, o, batches()[0], "100%") if planned else None
            made[planned] = fabric, m, o, step
            trained = [_trained(b, m, o, step) for b in batches(2)]
            path = f"{folder[0]}/{whole_} {planned}"
            fabric.save(path, {"model": m, "optimizer": o, "count": 2})
            rows[f"{whole_} {planned}"] = [trained, whole(m.state_dict().values())]
        for planned, (fabric, m, o, step) in made.items():
            state = {"model": m, "optimizer": o, "count": 0}
            fabric.load(f"{folder[0]}/{whole_} {not planned}", state)
            after = [_trained(b, m, o, step) for b in batches(4)[2:]]
            rows[f"{whole_} {planned}"] += [state["count"], after, whole(m.state_dict().values())]
    return rows


def _trained(b: Any, m: Any, o: Any, step: Any) -> float:
    if step is not None:
        return float(step(b))
    loss = loss_of(m, b)
    loss.backward()
    o.step()
    o.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main(globals())
