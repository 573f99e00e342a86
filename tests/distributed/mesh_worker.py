"""One of four ranks: models on meshes of two dimensions, in ``fit`` and in eager."""

from __future__ import annotations

from typing import Any

import torch
from tensor_worker import WORDS, Net, loss_of
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch_worker import Tied, both, checkpoints, row, word_loss
from torch_worker import words as words_in_and_out
from worker import adamw, caught, main, model
from worker import batches as rows_of_numbers
from worker import loss_of as error_of

import tightship


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def hybrid(m: Any) -> Any:
    """HSDP: two replicas, each in two parts."""
    given = mesh("replicate", "shard")
    for layer in m.layers if isinstance(m, Tied) else m:
        if next(layer.parameters(recurse=False), None) is not None:
            fully_shard(layer, mesh=given)
    return fully_shard(m, mesh=given)


def in_two_ways(m: Any, *, sequence: bool = False) -> Any:
    """Tensor parallelism among two ranks, and parts of what these have among two."""
    given = mesh("data", "tensor")
    head = ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate())
    plan: dict[str, Any] = {"head": head}
    if sequence:
        plan["words"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"] = SequenceParallel()
    for k in range(len(m.blocks)):
        if sequence:
            plan[f"blocks.{k}.norm"] = SequenceParallel()
        plan[f"blocks.{k}.up"] = ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate())
        plan[f"blocks.{k}.down"] = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    parallelize_module(m, given["tensor"], plan)
    for block in m.blocks:
        fully_shard(block, mesh=given["data"])
    return fully_shard(m, mesh=given["data"])


def words(count: int = 4) -> list[torch.Tensor]:
    """The same on ranks that compute together."""
    g = torch.Generator().manual_seed(1 + dist.get_rank() // 2)
    return [torch.randint(0, WORDS, (8, 16), generator=g) for _ in range(count)]


# --- scenarios ---


def replicas_of_shards() -> Any:
    return both(model, error_of, rows_of_numbers(4), wrap=hybrid, verify_every=2)


def replicas_of_shards_clipped() -> Any:
    return both(model, error_of, rows_of_numbers(4), clip=0.05, wrap=hybrid, before=2)


def tensors_and_shards() -> Any:
    return both(Net, loss_of, words(), wrap=in_two_ways, verify_every=2)


def tensors_and_shards_clipped() -> Any:
    return both(Net, loss_of, words(12), clip=0.3, wrap=lambda m: in_two_ways(m, sequence=True), before=2)


def uneven_and_tied() -> Any:
    """Rows that parts do not divide, and a matrix that is read twice."""
    return both(Tied, word_loss, words_in_and_out(3), wrap=hybrid)


def hybrid_checkpoints() -> Any:
    return checkpoints(wrap=hybrid, given=rows_of_numbers(4), loss_of=error_of)


def tensor_checkpoints() -> Any:
    return checkpoints(Net, in_two_ways, words(), loss_of)


def in_groups() -> Any:
    """Two ranks and two train among themselves, whole parameters or parts."""
    half = dist.new_subgroups(2)[0]
    how = {"wrap": lambda m: DistributedDataParallel(m, process_group=half), "verify_every": 2}
    rows = both(model, error_of, rows_of_numbers(4), **how)
    m = model()
    o, given = adamw(m), rows_of_numbers(4)
    parallel = tightship.DataParallel(shard=True, group=half)
    step = tightship.fit(m, error_of, o, given[0], "static+50%", parallel=parallel)
    losses = [step(b) for b in given]
    made = row(losses, m, o)
    return rows | {"parts": {n: made[n] for n in ("losses", "model")}, "bytes": step.measure()}


def refused() -> Any:
    """Parameters in parts of which ``fully_shard`` knows nothing."""
    partly = parallelize_module(Net(), mesh("data", "tensor")["tensor"], {"head": ColwiseParallel()})
    for block in partly.blocks:
        fully_shard(block, mesh=mesh("data", "tensor")["data"])
    apart = parallelize_module(Net(), mesh("data", "tensor")["tensor"], {"head": ColwiseParallel()})
    meshes = mesh("data", "tensor")
    inside = parallelize_module(Net(), meshes["tensor"], {"head": ColwiseParallel()})
    ddp = DistributedDataParallel(inside, device_mesh=meshes["data"])
    return {
        "ddp": caught(lambda: tightship.fit(ddp, loss_of, adamw(ddp), words()[0])),
        "partly": caught(lambda: tightship.fit(partly, loss_of, adamw(partly), words()[0])),
        "apart": caught(lambda: tightship.fit(apart, loss_of, adamw(apart), words()[0])),
    }


if __name__ == "__main__":
    main(globals())
