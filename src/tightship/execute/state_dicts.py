"""What is saved of a training step, and loaded: by the names of the plain model, parts as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.execute.shards import shards_of
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.optimizer.kept import blank_state, is_blank

__all__ = ["load", "saved"]

_MUCH = 1 << 26
"""Bytes of state that are loaded at a time, where they do not stay in memory."""


def saved(model: torch.nn.Module, optimizer: Any, *, full: bool) -> dict[str, Any]:
    """``{"model": …, "optimizer": …}`` by the model's names: as ``torch.distributed.checkpoint`` takes them. Shards
    are DTensors, or ``full`` tensors, which every rank then helps to put together. State that the first update would
    make is there as zeros, unless ``full``."""
    shards = shards_of(model)

    def given(p: Any, t: Any) -> Any:
        shard = shards.get(id(p))
        if shard is None or not shard.is_part(t):
            return t
        return shard.whole(t) if full else shard.distributed(t.detach())

    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = dict(model.state_dict())
    if full:
        values |= {n: given(p, p.detach()) for n, p in parameters.items() if id(p) in shards and n in values}
    if optimizer is None:
        return {"model": values}
    names = {id(p): n for n, p in model.named_parameters()}
    owned = dict(model.named_parameters())

    def state_of(one: Any) -> dict[str, dict[Any, Any]]:
        state = {names[id(p)]: x for p, x in one.state.items()}
        if not full:
            state |= {names[i]: x for i, x in blank_state(one).items()}
        return {n: {k: given(owned[n], t) for k, t in x.items()} for n, x in state.items()}

    rows = [
        {
            "state": state_of(one),
            "param_groups": [
                {k: [names[id(p)] for p in v] if k == "params" else v for k, v in group.items()}
                for group in one.param_groups
            ],
        }
        for one in each(optimizer)
    ]
    return {"model": values, "optimizer": rows[0] if len(rows) == 1 else rows}


def load(
    model: torch.nn.Module,
    optimizer: Any,
    state: Mapping[str, Any],
    loaded: Callable[[], None] = lambda: None,
) -> None:
    """Takes over what `saved` has given, in place, from whole tensors or DTensors. ``loaded`` is called
    whenever much of it is there."""
    shards = shards_of(model)
    known = model.state_dict().keys()
    if known != state["model"].keys():
        names = sorted(known ^ state["model"].keys())
        raise BadInput("the state is of a model with other names", names[:4], "load_state_dict")
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    owners = dict(model.named_parameters())
    rows = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]
    for one, row in zip(each(optimizer), rows, strict=True):
        one.state.clear()
        fresh = 0
        for n, x in row["state"].items():
            p = owners[n]
            shard = shards.get(id(p))
            mine = {k: t if shard is None else shard.loaded(t) for k, t in x.items()}
            if is_blank(one, mine):
                continue
            one.state[p] = {k: t.clone() if isinstance(t, torch.Tensor) else t for k, t in mine.items()}
            fresh += sum(t.nbytes for t in mine.values() if isinstance(t, torch.Tensor))
            if fresh >= _MUCH:
                loaded()
                fresh = 0
        for group, given in zip(one.param_groups, row["param_groups"], strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})
