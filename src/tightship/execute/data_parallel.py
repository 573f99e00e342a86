"""Data parallel training: each rank has a batch of its own, and all train one model.

Replicated, as DistributedDataParallel does it: each rank has all parameters, and gradients are averaged before the
update. Sharded, as SimpleFSDP does it: each rank has a part of each parameter, its gradient and its optimizer
state; a parameter is gathered where the model reads it, and its gradient is reduced and scattered. Both are ops of
the step, which a plan moves, frees and (gathers) repeats like any other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize

from tightship.errors import BadInput, Unsupported
from tightship.execute.parts import Loop
from tightship.execute.prepared import Settings
from tightship.execute.ranks import Ranks
from tightship.frontends.torch.capture.step import check_model
from tightship.frontends.torch.collectives import average_now, broadcast, gathered, scattered_mean
from tightship.frontends.torch.optimizer.updates import each
from tightship.process_local import NotCopied

__all__ = ["DataParallel", "Replicas", "check_together", "load", "saved"]

_INSIDE = (torch.nn.RNNBase, torch.nn.ParameterList, torch.nn.ParameterDict)
"""Modules whose parameters are read otherwise than as attributes: they stay whole."""

_ELEMENTWISE = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers that do with an element what they would do without the others."""


@dataclass(frozen=True)
class DataParallel:
    """All ranks train one model, each on batches of its own, as ``fit(…, parallel=DataParallel())``.

    ``shard``: each rank keeps one part of each parameter of one dimension or more, along the first, and of what the
    optimizer holds for it; otherwise each has all. ``buffers``: before each step, buffers are set to those of rank 0.
    """

    shard: bool = False
    buffers: bool = True


def check_together(
    model: torch.nn.Module, ranks: Ranks | None, parallel: object, settings: Settings, loop: Loop, optimizer: Any
) -> None:  # fmt: skip
    """Raises ``BadInput`` and ``Unsupported`` for what does not go together with other ranks, or without them."""

    def check() -> None:
        check_model(model, hooks=True)
        _check(ranks, parallel, settings, loop, optimizer)

    if ranks is None:
        check()
    else:
        ranks.agreed("fit", check, lambda none: none)


def _check(ranks: Ranks | None, parallel: object, settings: Settings, loop: Loop, optimizer: Any) -> None:
    if parallel is not None and not isinstance(parallel, DataParallel):
        raise BadInput("parallel= is no tightship.DataParallel", type(parallel).__name__, "fit")
    if parallel is not None and ranks is None:
        rule = "parallel= trains one model on several ranks, and there is one: call init_process_group under torchrun"
        raise BadInput(rule, place="fit")
    if ranks is not None and settings.split:
        raise Unsupported(
            "splitting ops on several ranks", "one rank plans for all, and what was split is not told",
            "leave split out of allow",
        )  # fmt: skip
    if ranks is not None and settings.stream:
        raise Unsupported(
            "streaming on several ranks", "one rank plans for all, and what streams is not told",
            "leave stream out of allow; parallel=DataParallel(shard=True) divides what is static among ranks",
        )  # fmt: skip
    if (
        parallel is not None
        and parallel.shard
        and (loop.clip_norm is not None or loop.skip_nonfinite or loop.scaler)
    ):
        raise Unsupported(
            "clip_norm, skip_nonfinite or a scaler with sharded parameters", "a rank has the norm of its parts alone",
            "train with DataParallel(shard=False), or clip by value",
        )  # fmt: skip
    if isinstance(parallel, DataParallel) and parallel.shard:
        _check_elementwise(optimizer)


def _check_elementwise(optimizer: Any) -> None:
    for one in each(optimizer) if optimizer is not None else ():
        if type(one) not in _ELEMENTWISE:
            raise Unsupported(
                f"a {type(one).__name__} with sharded parameters",
                "what it does with a part of a parameter may differ from what it does with all of it",
                "use one of torch that treats elements one by one (AdamW, SGD, …), or DataParallel(shard=False)",
            )  # fmt: skip


class Replicas(NotCopied):
    """What data parallel training does with a model, beside the planned step. At first, all ranks get the parameters
    and buffers of rank 0."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, parallel: DataParallel, ranks: Ranks) -> None:
        self.model, self.parallel = model, parallel
        ranks.same("models (give every rank the same)", lambda: f"a model of {_described(model)}, {parallel}")
        for t in (*model.parameters(), *model.buffers()):
            broadcast(t.data)
        self.shards: dict[str, Shard] = {}
        if parallel.shard:
            self._shard(optimizer, ranks)
        names = {n for n, p in model.named_parameters() if p.requires_grad}
        self.averaged = frozenset(names - set(self.shards))

    def synchronize(self) -> None:
        """Buffers are those of rank 0."""
        for b in self.model.buffers() if self.parallel.buffers else ():
            broadcast(b.data)

    def average(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gradients of whole parameters, between backward pass and update."""
        for n, p in parameters:
            if n in self.averaged and p.grad is not None:
                average_now(p.grad)

    # --- shards ---

    def _shard(self, optimizer: Any, ranks: Ranks) -> None:
        done: dict[int, Shard] = {}
        for module in list(self.model.modules()):
            if isinstance(module, _INSIDE):
                continue
            for name, p in list(module._parameters.items()):
                if p is None or not p.dim() or p.shape[0] < ranks.size:
                    continue
                if id(p) not in done:
                    done[id(p)] = Shard(p, ranks)
                parametrize.register_parametrization(module, name, _Gather(done[id(p)]), unsafe=True)
        for one in each(optimizer) if optimizer is not None else ():
            for p, state in one.state.items():
                shard = done.get(id(p))
                if shard is None:
                    continue
                for k, t in state.items():
                    if isinstance(t, torch.Tensor) and t.shape == shard.shape:
                        state[k] = shard.part(t)
        names = {id(p): n for n, p in self.model.named_parameters()}
        self.shards = {names[i]: shard for i, shard in done.items()}


class Shard:
    """Which part of a parameter this rank keeps: as `torch.chunk` cuts the first dimension, filled up with zeros to
    the size of the largest part, so that all ranks run the same ops. The parameter keeps its identity."""

    def __init__(self, parameter: torch.nn.Parameter, ranks: Ranks) -> None:
        self.shape, self.rank, self.size = parameter.shape, ranks.rank, ranks.size
        self.stride = parameter.stride()
        self.rows = -(-self.shape[0] // self.size)
        with torch.no_grad():
            parameter.data = self.part(parameter.data)

    @property
    def own(self) -> int:
        """Rows of this rank's part that are the parameter's."""
        return max(0, min(self.rows, self.shape[0] - self.rank * self.rows))

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor like the parameter, in memory of its own."""
        made = whole.new_zeros((self.rows, *self.shape[1:]))
        start = self.rank * self.rows
        made[: self.own].copy_(whole[start : start + self.own])
        return made

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """All parts, which every rank gives."""
        return gathered(part.detach())[: self.shape[0]]

    def distributed(self, part: torch.Tensor) -> Any:
        """The part, without what fills it up, as torch's own sharded tensor."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh(part.device.type, (self.size,))
        own = part.detach()[: self.own]
        return DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self.stride
        )


class _Gather(torch.nn.Module):
    """A parameter, from the parts of all ranks, and its gradient to the part of this one."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.rows = shard.shape[0]

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = _Gathered.apply(part, self.rows)  # type: ignore[no-untyped-call]
        return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.filled = part.shape[0]
        whole = gathered(part)
        return whole if rows == whole.shape[0] else whole[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scattered_mean(gradient, ctx.filled), None


def _described(model: torch.nn.Module) -> str:
    rows = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in model.named_parameters()]
    rows += [(n, tuple(t.shape), str(t.dtype), False) for n, t in model.named_buffers()]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
    return f"{len(rows)} parameters and buffers ({digest})"


# --- what is saved ---

_MUCH = 1 << 26
"""Bytes of state that are loaded at a time, where they do not stay in memory."""

_PART = re.compile(r"parametrizations\.(\w+)\.original$")


def saved(model: torch.nn.Module, optimizer: Any, replicas: Replicas | None, *, full: bool) -> dict[str, Any]:
    """``{"model": …, "optimizer": …}`` by the model's names without its shards: as ``torch.distributed.checkpoint``
    takes them. Shards are DTensors, or ``full`` tensors, which every rank then helps to put together."""
    shards = _shards_by_id(model, replicas)

    def given(p: Any, t: Any) -> Any:
        shard = shards.get(id(p))
        if shard is None or not isinstance(t, torch.Tensor) or t.shape != (shard.rows, *shard.shape[1:]):
            return t
        return shard.whole(t) if full else shard.distributed(t)

    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {_PART.sub(r"\1", n): given(parameters.get(n), t) for n, t in model.state_dict().items()}
    if optimizer is None:
        return {"model": values}
    names = {id(p): _PART.sub(r"\1", n) for n, p in model.named_parameters()}
    rows = [
        {
            "state": {names[id(p)]: {k: given(p, t) for k, t in x.items()} for p, x in one.state.items()},
            "param_groups": [
                {k: [names[id(p)] for p in v] if k == "params" else v for k, v in group.items()}
                for group in one.param_groups
            ],
        }
        for one in each(optimizer)
    ]
    return {"model": values, "optimizer": rows[0] if len(rows) == 1 else rows}


def load(
    model: torch.nn.Module, optimizer: Any, replicas: Replicas | None, state: Mapping[str, Any],
    loaded: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Takes over what `saved` has given, in place, from whole tensors or DTensors. ``loaded`` is called
    whenever much of it is there."""
    shards = _shards_by_id(model, replicas)

    def mine(p: Any, t: Any) -> Any:
        shard = shards.get(id(p))
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        return (
            shard.part(t)
            if shard is not None and isinstance(t, torch.Tensor) and t.shape == shard.shape
            else t
        )

    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {_PART.sub(r"\1", n): n for n in model.state_dict()}
    if known.keys() != state["model"].keys():
        names = sorted(known.keys() ^ state["model"].keys())
        raise BadInput("the state is of a model with other names", names[:4], "load_state_dict")
    model.load_state_dict({n: mine(parameters.get(n), state["model"][m]) for m, n in known.items()})
    if optimizer is None:
        return
    owners = {_PART.sub(r"\1", n): p for n, p in model.named_parameters()}
    rows = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]
    for one, row in zip(each(optimizer), rows, strict=True):
        one.state.clear()
        fresh = 0
        for n, x in row["state"].items():
            p = owners[n]
            copied = {k: mine(p, t) for k, t in x.items()}
            one.state[p] = {k: t.clone() if isinstance(t, torch.Tensor) else t for k, t in copied.items()}
            fresh += sum(t.nbytes for t in copied.values() if isinstance(t, torch.Tensor))
            if fresh >= _MUCH:
                loaded()
                fresh = 0
        for group, given in zip(one.param_groups, row["param_groups"], strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})


def _shards_by_id(model: torch.nn.Module, replicas: Replicas | None) -> dict[int, Shard]:
    if replicas is None:
        return {}
    return {id(p): replicas.shards[n] for n, p in model.named_parameters() if n in replicas.shards}
