"""One rank: models of ``parallelize_module``, in ``fit`` and in eager."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch_worker import row, whole
from worker import WIDTH, adamw, caught, main, ops_recorded

import tightship

WORDS = 64


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> Any:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_columns(m: Any, mesh: Any = None, logits: Any = None) -> Any:
    """As a beginner does it: norms and words are plain parameters, the same on all ranks."""
    plan: dict[str, Any] = {"head": logits or ColwiseParallel(output_layouts=Replicate())}
    for k in range(len(m.blocks)):
        plan |= {f"blocks.{k}.up": ColwiseParallel(), f"blocks.{k}.down": RowwiseParallel()}
    return parallelize_module(m, mesh or init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def by_sequence(m: Any) -> Any:
    """As large models are trained: between layers each rank has a part of the sequence."""
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for k in range(len(m.blocks)):
        plan |= {
            f"blocks.{k}.norm": SequenceParallel(),
            f"blocks.{k}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"blocks.{k}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(m, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def batches(count: int = 3) -> list[torch.Tensor]:
    """The same on all ranks."""
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (8, 16), generator=g) for _ in range(count)]


def loss_of(m: Any, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m(words).flatten(0, 1), words.flatten())


def eager_step(m: Any, o: Any, words: torch.Tensor, loss: Any, clip: float | None = None) -> torch.Tensor:
    o.zero_grad()
    value: torch.Tensor = loss(m, words)
    value.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(m.parameters(), clip)
    o.step()
    return value.detach()


def both(wrap: Any, loss: Any = loss_of, budget: str = "static+40%", before: int = 0, **options: Any) -> Any:
    """Eager training and ``fit``'s of the same model; ``before`` as many eager steps."""
    rows = {}
    for planned in (False, True):
        m = wrap(Net())
        o = adamw(m)
        losses: list[Any] = []
        step: Any = None
        with ops_recorded() as recorded:
            for k, b in enumerate(batches(4)):
                if planned and k >= before:
                    o.zero_grad()
                    step = step or tightship.fit(m, loss, o, b, budget, **options)
                    before_it = len(recorded)
                    losses.append(step(b))
                    again = len(recorded) - before_it
                else:
                    losses.append(eager_step(m, o, b, loss, options.get("clip_norm")))
        rows["fit" if planned else "eager"] = row(losses, m, o)
        if planned:
            rows["fit"] |= {
                "measure": step.measure(),
                "recomputed": step.plan.count("recompute"),
                "collectives": sum("c10d" in op.target for op in step.graph.ops),
                "captured again": again,
                "full": whole(step.state_dict(full=True)["model"].values()),
            }
    return rows


# --- scenarios ---


def columns() -> Any:
    return both(by_columns, verify_every=2)


def sequence() -> Any:
    return both(by_sequence)


def clipped() -> Any:
    """Each rank has a summand of the gradients of norms until they are clipped."""
    return both(by_sequence, clip_norm=0.3)


def accumulated() -> Any:
    """Two batches for each update, clipped."""
    rows = {}
    for planned in (False, True):
        m = by_sequence(Net())
        o = adamw(m)
        how: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.3}
        step = tightship.fit(m, loss_of, o, batches()[0], "static+60%", **how) if planned else None
        losses, norms = [], []
        for k, b in enumerate(batches(4)):
            if step is not None:
                losses.append(step(b))
                norms += [step.grad_norm.item()] if k % 2 else []
                continue
            value = loss_of(m, b)
            value.backward()
            losses.append(value.detach())
            if k % 2:
                norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3).full_tensor().item())
                o.step()
                o.zero_grad()
        rows["fit" if planned else "eager"] = row(losses, m, o) | {"norms": norms}
        if step is not None:
            rows["backward"] = caught(lambda s=step: s.backward(batches()[0]))
    return rows


def clipped_by_torch() -> Any:
    """By the loop, of gradients of which ranks have parts (of products) and all (of norms)."""
    rows = {}
    for planned in (False, True):
        m = by_sequence(Net())
        o, b = adamw(m), batches()[0]
        if planned:
            tightship.fit(m, loss_of, o, b, "100%", split=True).backward(b)
        else:
            loss_of(m, b).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3, foreach=True)
        by_hand: Any = torch.stack([p.grad.norm() for p in m.parameters() if p.grad is not None]).norm()
        rows["fit" if planned else "eager"] = [norm.full_tensor().item(), by_hand.full_tensor().item()]
    return rows


def later() -> Any:
    """After eager steps, whose optimizer state is taken over."""
    return both(by_columns, before=2)


def logits_in_parts() -> Any:
    """No rank has all logits: the loss, too, is computed together."""

    def loss(m: Any, words: torch.Tensor) -> Any:
        value: Any = F.cross_entropy(m(words).flatten(0, 1), words.flatten())
        return value.full_tensor()

    def wrap(m: Any) -> Any:
        return by_columns(m, logits=ColwiseParallel(use_local_output=False))

    with loss_parallel():
        return both(wrap, loss)


def loss_in_parts() -> Any:
    """The loss is handed back as the DTensor that it is in eager; torch.compile's backend gets its gradient so."""

    def trained(how: str) -> list[Any]:
        m = by_columns(Net(), logits=ColwiseParallel(use_local_output=False))
        o = adamw(m)
        run = torch.compile(m, backend="tightship", options={"budget": "100%"}) if how == "compiled" else m
        step = tightship.fit(m, loss_of, o, batches(1)[0], "static+40%") if how == "fit" else None
        losses = []
        for b in batches():
            losses.append(step(b) if step else eager_step(run, o, b, loss_of))
        kinds = {type(loss).__name__ for loss in losses}
        return [[loss.full_tensor().item() for loss in losses], whole(m.state_dict().values()), sorted(kinds)]

    with loss_parallel():
        return {how: trained(how) for how in ("eager", "fit", "compiled")}


def checkpoints() -> Any:
    """What eager saves, ``fit`` loads and goes on with, and the other way round."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    given, rows = batches(4), {}
    for first, then in ((False, False), (False, True), (True, False)):
        losses: list[float] = []
        for k, planned in enumerate((first, then)):
            m = by_sequence(Net())
            o = adamw(m)
            step = tightship.fit(m, loss_of, o, given[0], "static+60%") if planned else None
            state = {"model": dcp.get_model_state_dict(m), "optimizer": dcp.get_optimizer_state_dict(m, o)}
            if k:
                checkpoint.load(state, checkpoint_id=folder[0])
                dcp.set_model_state_dict(m, state["model"])
                dcp.set_optimizer_state_dict(m, o, state["optimizer"])
            for b in given[2 * k : 2 * k + 2]:
                losses.append((step(b) if step is not None else eager_step(m, o, b, loss_of)).item())
            if not k:
                state = {
                    "model": dcp.get_model_state_dict(m),
                    "optimizer": dcp.get_optimizer_state_dict(m, o),
                }
                checkpoint.save(state, checkpoint_id=folder[0])
        rows[f"{first} {then}"] = [losses, row([], m, o)]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return rows


def refused() -> Any:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    m, data = by_columns(Net()), tightship.DataParallel()
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "tensor"))
    part = by_columns(Net(), alone["tensor"])
    taken = by_columns(Net(), mesh["tensor"])
    step = tightship.fit(taken, loss_of, adamw(taken), batches()[0], "100%")
    return {
        "parallel": caught(lambda: tightship.fit(m, loss_of, adamw(m), batches()[0], parallel=data)),
        "part": caught(lambda: tightship.fit(part, loss_of, adamw(part), batches()[0])),
        "taken": step(batches()[0]).item(),
        "twice": tightship.fit(taken, loss_of, step.optimizer, batches()[0], "100%")(batches()[1]).item(),
    }


if __name__ == "__main__":
    main(globals())
