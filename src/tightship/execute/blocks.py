"""The blocks of a model, and what PyTorch's own ways of saving memory do with each: checkpoints, ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed_in_backward

from tightship.errors import BadInput
from tightship.frontends.torch import compat_distributed
from tightship.frontends.torch.optimizer.given import each

__all__ = ["blocks", "checkpointed", "fully_sharded"]


@contextmanager
def checkpointed(model: torch.nn.Module) -> Iterator[None]:
    """Each block of the model is checkpointed. Blocks are the members of the outermost lists of modules of one class.
    Raises ``BadInput`` where there are none."""
    found = blocks(model)
    if not found:
        raise BadInput("no blocks to checkpoint: no list of modules of one class", place="checkpoint")
    before = [(m, vars(m).get("forward")) for m in found]
    try:
        for m in found:
            m.forward = partial(recomputed_in_backward, m.forward, use_reentrant=False)
        yield
    finally:
        for m, was in before:
            if was is None:
                del m.forward
            else:
                m.forward = was


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the outermost lists of modules of one class, with parameters."""
    found: list[torch.nn.Module] = []

    def look(module: torch.nn.Module) -> None:
        members = list(module.children())
        alike = len(members) > 1 and len({type(m) for m in members}) == 1
        if alike and isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and _is_block(members[0]):
            found.extend(members)
            return
        for child in members:
            look(child)

    look(model)
    return found


def fully_sharded(model: torch.nn.Module, optimizer: Any) -> None:
    """Has ``fully_shard`` divide each block of a model, and then the rest, among the ranks there are, as its tutorial
    does; the optimizer steps the parts. What torch has made parallel already stays as it is."""
    if isinstance(model, DistributedDataParallel) or compat_distributed.distributed_by(model):
        return
    from torch.distributed.fsdp import fully_shard

    before = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    now = dict(model.named_parameters(remove_duplicate=False))
    parts = {before[n]: p for n, p in now.items() if n in before}
    for one in each(optimizer) if optimizer is not None else ():
        for group in one.param_groups:
            group["params"] = [parts.get(id(p), p) for p in group["params"]]


def _is_block(module: torch.nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
