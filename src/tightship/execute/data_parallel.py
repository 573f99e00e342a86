"""Data parallel training: each rank has a batch of its own, and all train one model.

Replicated, as DistributedDataParallel does it: each rank has all parameters, and gradients are averaged before the
update. Sharded, as SimpleFSDP does it: each rank has a part of each parameter, its gradient and its optimizer
state; a parameter is gathered where the model reads it, and its gradient is reduced and scattered. Both are ops of
the step, which a plan moves, frees and (gathers) repeats like any other.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.parts import Loop
from tightship.execute.parts_in_hand import PartOfGradient
from tightship.execute.ranks import Ranks
from tightship.execute.settings import Settings
from tightship.execute.shards import (
    Part,
    Placed,
    Shard,
    average_reads,
    read_once,
    say_parts,
    send_together,
    shard_model,
    shard_optimizer,
    shards_of,
    take_over,
    take_over_placed,
)
from tightship.frontends.torch import compat_ddp, compat_distributed, compat_fully_shard, compat_optimizers
from tightship.frontends.torch.capture.checks import check_model
from tightship.frontends.torch.collectives import (
    Division,
    average_now,
    broadcast,
    messages,
    no_split,
    no_stream,
    reduced,
    summed,
)
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.optimizer.kept import blank_state, is_blank
from tightship.frontends.torch.optimizer.probe_parts import why_whole
from tightship.frontends.torch.structure import LossFn
from tightship.process_local import NotCopied
from tightship.units import format_bytes

__all__ = ["DataParallel", "Replicas", "check_together", "imagined", "load", "saved"]

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
    ``bucket``: bytes that go as one message, of parameters or gradients that lie next to each other in the model. A
    message takes its bytes once more while it is sent, and its gradients wait for one another. None: an eighth of all
    parameters, at least the largest, at most 25 MiB; 0: each by itself, which takes least memory and longest.
    ``group``: the process group of the ranks that train together; None: all. Ranks of other groups train a model of
    the same shapes among themselves, and call each step at the same time. ``reduce_dtype``: the floating-point type
    that gradients are sent and averaged in, such as ``torch.float16``; None: their own.
    """

    shard: bool = False
    buffers: bool = True
    bucket: int | None = None
    group: Any = field(default=None, repr=False, compare=False)
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.bucket is not None and (isinstance(self.bucket, bool) or not isinstance(self.bucket, int)):
            raise BadInput("bucket= is a number of bytes, or None", self.bucket, "DataParallel")
        if self.bucket is not None and self.bucket < 0:
            raise BadInput("bucket= is 0 bytes or more", self.bucket, "DataParallel")
        if self.group is not None and not isinstance(self.group, torch.distributed.ProcessGroup):
            rule = "group= is a process group that this rank is in (torch.distributed.new_group), or None"
            raise BadInput(rule, type(self.group).__name__, "DataParallel")
        given = self.reduce_dtype
        if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
            rule = "reduce_dtype= is a floating-point type, such as torch.float16, or None"
            raise BadInput(rule, given, "DataParallel")

    @property
    def among(self) -> Division:
        """Among whom, and in which type, gradients are averaged."""
        return Division.of(self.group, self.reduce_dtype)


@dataclass(frozen=True)
class _TensorParallel(DataParallel):
    """All ranks compute one batch together, as torch's ``parallelize_module`` says: nothing is averaged, and each
    rank starts from what it has."""

    shard: bool = True
    buffers: bool = False


def check_together(
    model: Any, ranks: Ranks | None, parallel: object, settings: Settings, loop: Loop, optimizer: Any
) -> tuple[torch.nn.Module, DataParallel | None]:  # fmt: skip
    """The model to train and how, which may follow from what torch has made of the model. Raises ``BadInput`` and
    ``Unsupported`` for what does not go together with other ranks, or without them."""

    def check() -> tuple[torch.nn.Module, DataParallel | None]:
        if parallel is not None and not isinstance(parallel, DataParallel):
            raise BadInput("parallel= is no tightship.DataParallel", type(parallel).__name__, "fit")
        module, how = (_as_torch_has_it if ranks is not None else _as_one_has_it)(model, parallel)
        check_model(module, hooks=True, shards=ranks is not None)
        _check(ranks, module, how, settings, optimizer)
        return module, how

    if ranks is None:
        return check()
    chosen = {"budget": str(settings.budget)} | {n: str(getattr(loop, n)) for n in _SAME}
    chosen["optimizer"] = _optimizers(optimizer)
    for one in fields(options) if is_dataclass(options := getattr(settings.planner, "options", None)) else ():
        chosen[one.name] = str(getattr(options, one.name))
    found, told = ranks.agreed("fit", check, lambda row: {"parallel": str(row[1]), **chosen})
    names = [n for n in told[0] if len({row.get(n) for row in told}) > 1]
    if found[1] is not None and names:
        texts = [", ".join(f"{n}={row.get(n)}" for n in names) for row in told]
        raise ranks.differ("fit with other options (give every rank the same)", texts)
    return found


def _optimizers(optimizer: Any) -> str:
    """What an optimizer does with its parameters, in words: other updates would make other models."""
    texts = []
    for one in each(optimizer) if optimizer is not None else ():
        for group in one.param_groups:
            rows = sorted((k, _number(x)) for k, x in group.items() if k not in ("params", "param_names"))
            options = ", ".join(f"{k}={x!r}" for k, x in rows)
            texts.append(f"{type(one).__name__}({len(group['params'])} parameters, {options})")
    return " and ".join(texts)


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x


_SAME = ("accumulate", "clip_norm", "clip_value", "skip_nonfinite")
"""Options of which no rank may have others."""


def _as_torch_has_it(
    model: Any, parallel: DataParallel | None
) -> tuple[torch.nn.Module, DataParallel | None]:
    """What DistributedDataParallel or ``fully_shard`` have been told holds for the step, which runs none of their
    hooks."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return _from_ddp(model, parallel)
    if not isinstance(model, torch.nn.Module):
        return model, parallel
    if inside := compat_ddp.ddps_of(model):
        return model, _from_ddp_inside(model, inside, parallel)
    if compat_distributed.distributed_by(model) == "fully_shard":
        return model, _from_fully_shard(model, parallel)
    if compat_distributed.distributed_by(model) == "DTensor":
        return model, _from_placed(model, parallel)
    if parallel is None and (done := shards_of(model)):
        placed = isinstance(next(iter(done.values())), Placed)
        return model, _TensorParallel() if placed else DataParallel(shard=True, buffers=False)
    return model, parallel


def _as_one_has_it(model: Any, parallel: DataParallel | None) -> tuple[Any, DataParallel | None]:
    """A program for several ranks that torchrun has started on one trains as on one."""
    if not compat_distributed.alone():
        return model, parallel
    in_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return _from_ddp(model, parallel)[0] if in_ddp else model, None


def _from_ddp(ddp: Any, parallel: DataParallel | None) -> tuple[torch.nn.Module, DataParallel]:
    if parallel is not None and parallel.shard:
        raise BadInput(
            "a model in DistributedDataParallel has all parameters on all ranks: give fit its .module, or "
            "leave parallel out", parallel, "fit(parallel=…)",
        )  # fmt: skip
    if compat_ddp.taken_apart(ddp):
        raise Unsupported(
            "a tensor parallel model in DistributedDataParallel",
            "it takes DTensors apart and puts them together around each forward pass",
            "call fully_shard over the mesh of the ranks with other batches, which fit takes over",
        )  # fmt: skip
    if options := compat_ddp.own_ddp_options(ddp):
        raise Unsupported(
            f"a model in DistributedDataParallel with {', '.join(options)}",
            "fit averages gradients itself",
            "leave that out (hooks that average in another type are taken over), or give fit its .module and "
            "parallel=tightship.DataParallel()",
        )  # fmt: skip
    hooks = compat_ddp.type_that_hook_sends(ddp)
    how = parallel or DataParallel(buffers=ddp.broadcast_buffers)
    how = replace(how, reduce_dtype=how.reduce_dtype or hooks)
    return ddp.module, replace(how, group=how.group or ddp.process_group)


def _from_ddp_inside(
    model: torch.nn.Module, inside: list[Any], parallel: DataParallel | None
) -> DataParallel:
    """Of a module around a DistributedDataParallel, which averages all that is trained, or the step would not."""
    own = {id(p) for p in inside[0].parameters()}
    beside = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in own]
    if len(inside) > 1 or beside:
        what = f"{len(inside)} of them" if len(inside) > 1 else f"the parameter {beside[0]!r} beside it"
        raise Unsupported(
            f"a model with a DistributedDataParallel inside, and {what},",
            "each averages its own parameters, and nobody those beside",
            "leave it out, and give fit the plain model and parallel=tightship.DataParallel()",
        )  # fmt: skip
    return _from_ddp(inside[0], parallel)[1]


def _from_fully_shard(model: torch.nn.Module, parallel: DataParallel | None) -> DataParallel:
    if parallel is not None and not parallel.shard:
        rule = "a model in fully_shard has its parameters in shards: leave parallel out, or fully_shard on one rank"
        raise BadInput(rule, parallel, "fit(parallel=…)")
    if parallel is not None and parallel.group is not None:
        raise BadInput(
            "the mesh of fully_shard says which ranks train together: leave group out", place="fit"
        )
    if parallel is not None and parallel.reduce_dtype is not None:
        rule = "the policy of fully_shard (MixedPrecisionPolicy) has a reduce_dtype of its own: leave it out here"
        raise BadInput(rule, parallel.reduce_dtype, "fit(parallel=…)")
    instead = "leave that out, or give fit the plain model and parallel=tightship.DataParallel(shard=True)"
    if trained := compat_fully_shard.left_out(model):
        raise Unsupported(
            f"the parameter {trained[0]!r}, which fully_shard has left out ({len(trained)} in all),",
            "its gradients would differ between ranks",
            "call fully_shard on the whole model last, or freeze it (requires_grad_(False))",
        )  # fmt: skip
    if options := compat_fully_shard.fully_shard_options(model):
        why = "fit divides the rows of parameters among ranks of a mesh of all, in their own type"
        raise Unsupported(f"a model in fully_shard with {', '.join(options)}", why, instead)
    recurrent = next((n for n, m in model.named_modules() if isinstance(m, torch.nn.RNNBase)), None)
    if recurrent is not None:
        raise Unsupported(
            f"the recurrent module {recurrent!r} in fully_shard",
            "it holds its parameters in a list beside its attributes",
            "give fit the plain model and parallel=tightship.DataParallel(shard=True), which keeps it whole",
        )  # fmt: skip
    return parallel or DataParallel(shard=True, buffers=False)


def _from_placed(model: torch.nn.Module, parallel: DataParallel | None) -> DataParallel:
    if parallel is not None:
        rule = "a model of parallelize_module says itself how ranks compute together: leave parallel out"
        raise BadInput(rule, parallel, "fit(parallel=…)")
    if options := compat_distributed.placed_options(model):
        raise Unsupported(
            f"a model of DTensors with {', '.join(options)}",
            "fit plans for tensor parallelism of all ranks on a mesh of one dimension",
            "parallelize it so, call fully_shard over the mesh's other dimension, or give fit the plain model and "
            "parallel=tightship.DataParallel(shard=True)",
        )  # fmt: skip
    return _TensorParallel()


def _check(
    ranks: Ranks | None,
    model: torch.nn.Module,
    parallel: DataParallel | None,
    settings: Settings,
    optimizer: Any,
) -> None:
    if parallel is not None and ranks is None:
        rule = "parallel= trains one model on several ranks, and there is one: call init_process_group under torchrun"
        raise BadInput(rule, place="fit")
    if ranks is not None and settings.split:
        raise no_split()
    if ranks is not None and settings.stream and (parallel is None or parallel.shard):
        raise no_stream()
    if parallel is not None and parallel.shard:
        _check_elementwise(model, optimizer)
        _check_unhooked(model)
        _check_readable(model)


def _check_readable(model: torch.nn.Module) -> None:
    """Raises ``Unsupported`` for code that reads parameters by itself, and would read parts."""
    for n, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters(recurse=False)):
            raise Unsupported(
                f"the TorchScript module {n!r} with sharded parameters",
                "its code reads them where no attribute is asked for",
                "leave out torch.jit.script, or give all ranks whole parameters: DataParallel(shard=False)",
            )


def _check_unhooked(model: torch.nn.Module) -> None:
    """Raises ``Unsupported`` for hooks on parameters of which ranks have parts. ``fully_shard`` itself calls none of
    those that are not late."""
    by_fully_shard = compat_distributed.distributed_by(model) == "fully_shard"
    for n, p in model.named_parameters():
        if any(late or not by_fully_shard for late, _ in compat_optimizers.gradient_hooks(p)):
            raise Unsupported(
                f"a hook on the parameter {n!r}, of which each rank has a part,",
                "it would be given this rank's part of the averaged gradient, and not what eager gives it",
                "leave it out (clip_norm= and clip_value= clip), change p.grad between step.backward and "
                "step.update (split=True), or give all ranks whole parameters: the plain model and "
                "DataParallel(shard=False)",
            )  # fmt: skip


def _need_whole(optimizer: Any) -> dict[int, tuple[str, str]]:
    """The parameters, by id, of which the optimizer has to have all, with its name and why: that does not treat each
    element as if it were alone. Those of torch are known, others are tried."""
    found: dict[int, tuple[str, str]] = {}
    for one in each(optimizer) if optimizer is not None else ():
        if type(one) in _ELEMENTWISE:
            continue
        known = type(one).__module__.startswith("torch.")
        why = "it computes with whole matrices" if known else why_whole(one)
        if why is not None:
            found |= {id(p): (type(one).__name__, why) for group in one.param_groups for p in group["params"]}
    return found


def _check_elementwise(model: torch.nn.Module, optimizer: Any) -> None:
    """Raises ``Unsupported`` where an optimizer would get parts of parameters of which it has to have all. Those of a
    plain model can stay whole, unless nothing else is there."""
    found = _need_whole(optimizer)
    if not found:
        return
    taken = bool(compat_distributed.distributed_by(model) or shards_of(model))
    if not taken and any(p.requires_grad and id(p) not in found for p in model.parameters()):
        return
    name, why = next(iter(found.values()))
    raise Unsupported(
        f"{name} with sharded parameters",
        f"what it does with a part of a parameter is not what it does with all of it: {why}",
        "use an optimizer that treats elements one by one (AdamW, SGD, Lion, …), or give all ranks whole "
        "parameters: the plain model and DataParallel(shard=False)",
    )  # fmt: skip


def _notes_on_whole(
    model: torch.nn.Module, done: dict[int, Part], whole: dict[int, tuple[str, str]], size: int
) -> tuple[str, ...]:
    """What is said of a plain model's parameters that each of so many ranks has all of."""
    notes = [
        f"parameters of {name} stay whole on each rank: {why}" for name, why in dict.fromkeys(whole.values())
    ]
    total = sum(p.nbytes * (size if id(p) in done else 1) for p in model.parameters())
    few = {
        n: p
        for n, p in model.named_parameters()
        if p.dim() and id(p) not in done and id(p) not in whole and p.shape[0] < size
    }
    nbytes = sum(p.nbytes for p in few.values())
    if nbytes > total * _WORTH_A_NOTE:
        names = ", ".join(
            [*[f"{n} ({few[n].shape[0]})" for n in [*few][:3]], *(["…"] if len(few) > 3 else [])]
        )
        notes.append(
            f"{format_bytes(nbytes)} of parameters stay whole on each rank, which have fewer rows than there are "
            f"ranks ({size}): {names}"
        )
    return tuple(notes)


_WORTH_A_NOTE: Final = 0.01
"""Of all bytes of parameters: what stays whole because of its few rows."""


def imagined(
    model: Any, optimizer: Any, loss: LossFn | None
) -> tuple[torch.nn.Module, LossFn | None, tuple[str, ...]]:
    """A model, and its loss, as one of imagined ranks trains it, for planning alone: in shards, or as torch has made
    it parallel already; and notes on that. Raises as `check_together`."""
    module, how = _as_torch_has_it(model, None)
    check_model(module, hooks=True, shards=True)
    if how is None or how.shard:
        _check_unhooked(module)
    if how is not None and how.shard:
        _check_elementwise(module, optimizer)
    done, among = shards_of(module), (how or DataParallel()).among
    if isinstance(how, _TensorParallel):
        done = done or take_over_placed(module, optimizer)
        shard_optimizer(optimizer, done)
        return module, loss, ()
    notes: tuple[str, ...] = ()
    if compat_distributed.distributed_by(module) == "fully_shard":
        done = take_over(module, optimizer)
    elif how is None:
        whole = _need_whole(optimizer)
        done = shard_model(module, among, whole)
        notes = _notes_on_whole(module, done, whole, among.size)
    shard_optimizer(optimizer, done)
    ways = average_reads(module, done, among)
    send_together(module, ways, None if how is None else how.bucket)
    if loss is None:
        return module, None, notes

    def reading(given: torch.nn.Module, batch: Any) -> Any:
        with read_once(ways.values()):
            return loss(given, batch)

    return module, reading, notes


class Replicas(NotCopied):
    """What data parallel training does with a model, beside the planned step. At first, all ranks get the parameters
    and buffers of rank 0, but for what is in shards already."""

    ddp: Any = None
    """The DistributedDataParallel that the model was given in, which evaluates."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, parallel: DataParallel, ranks: Ranks) -> None:
        self.model, self.parallel, self.among = model, parallel, parallel.among
        self.notes: tuple[str, ...] = ()
        ranks.same("models (give every rank the same)", lambda: f"a model of {_described(model)}, {parallel}")
        with ranks.sending(writing=True):
            shards = self._divided(optimizer)
            ranks.same("what ranks have of a model", lambda: f"{len(shards)} parameters in parts")
        names = {id(p): n for n, p in model.named_parameters()}
        self.shards = {names[i]: shard for i, shard in shards.items()}
        parts = {n: p for n, p in model.named_parameters() if n in self.shards and self.shards[n].divided}
        self._parts = {id(p): (n, weakref.ref(p)) for n, p in parts.items()}
        own = [] if isinstance(parallel, _TensorParallel) else model.named_parameters()
        whole = [(n, p) for n, p in own if p.requires_grad and n not in self.shards]
        whole.reverse()  # gradients come in about this order
        rows = messages([((p.dtype, p.device), p.nbytes) for _, p in whole], parallel.bucket)
        self.averaged = tuple(tuple(whole[k][0] for k in row) for row in rows)

    def _divided(self, optimizer: Any) -> dict[int, Part]:
        """What of the model is in parts, by the ids of these, from now on."""
        model, parallel = self.model, self.parallel
        shards, together = shards_of(model), isinstance(parallel, _TensorParallel)
        if together:
            shards = shards or take_over_placed(model, optimizer)
        elif compat_distributed.distributed_by(model) == "fully_shard":
            shards = take_over(model, optimizer)
        elif not shards:
            for t in (*model.parameters(), *model.buffers()):
                broadcast(t.data, self.among)
            if parallel.shard:
                whole = _need_whole(optimizer)
                shards = shard_model(model, self.among, whole)
                self.notes = _notes_on_whole(model, shards, whole, self.among.size)
        shard_optimizer(optimizer, shards)
        if not together:
            send_together(model, shards, parallel.bucket)
        if any(one.divided for one in shards.values()):
            say_parts(model)
        return shards

    @property
    def whole_in_eager(self) -> bool:
        """Whether ranks have parts of what a model like this one has whole in eager."""
        return any(isinstance(one, Shard) and not one.by_torch for one in self.shards.values())

    @property
    def apart(self) -> bool:
        """Whether the caller is in ``no_sync()`` of the model's DistributedDataParallel."""
        return self.ddp is not None and not self.ddp.require_backward_grad_sync

    def synchronize(self) -> None:
        """Buffers are those of rank 0."""
        for b in self.model.buffers() if self.parallel.buffers else ():
            broadcast(b.data, self.among)
        if self.ddp is not None:
            compat_ddp.buffers_change(self.ddp)

    def average(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gradients of whole parameters, between backward pass and update."""
        there = {n: p.grad for n, p in parameters if p.grad is not None}
        for names in self.averaged:
            average_now([there[n] for n in names if n in there], self.among)

    def hand_out(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gradients of parts, to the caller, until `take_back`."""
        for n, p in parameters:
            if n in self.shards and self.shards[n].divided and p.grad is not None:
                p.grad = p.grad.as_subclass(PartOfGradient)

    def seen(self, name: str, parameter: torch.Tensor) -> Any:
        """A parameter, of which ranks may have parts, as all of them together have it."""
        return self.shards[name].seen(parameter) if name in self.shards else parameter

    def take_back(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, p in parameters:
            if isinstance(p.grad, PartOfGradient):
                p.grad = p.grad.as_subclass(torch.Tensor)

    def read_once(self) -> AbstractContextManager[None]:
        """Inside, each parameter is gathered once, however often the code reads it."""
        return read_once(self.shards.values(), self._parts)

    def late(self, late: bool) -> None:
        """Whether gradients of which each rank has a summand are added up behind clipping and accumulation, as
        eager's DTensors do it."""
        for one in self.shards.values():
            if isinstance(one, Placed):
                one.late = late

    def check_parts(self) -> None:
        """Raises ``BadInput`` where a backward pass by itself would leave summands in the caller's hands."""
        if any(isinstance(one, Placed) and one.late for one in self.shards.values()):
            rule = (
                "gradients are added up over ranks behind clipping: give fit split=True to call step.backward"
            )
            raise BadInput(rule, place="step.backward")

    def _summands(self, gradients: Mapping[str, torch.Tensor]) -> list[str]:
        rows = ((n, self.shards.get(n)) for n in gradients)
        return [n for n, one in rows if isinstance(one, Placed) and one.late and one.summand]

    def add_up(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """In place and by one message, where each rank has a summand."""
        names = self._summands(gradients)
        with torch.no_grad():
            for n, total in zip(names, reduced([gradients[n] for n in names]) if names else (), strict=True):
                if total is not gradients[n]:
                    gradients[n].copy_(total)

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients, as ``get_total_norm`` of torch has it for DTensors: that of each over all
        ranks, then that of these. What fills parts up counts as the zeros that it is."""
        gradients = dict(gradients)
        if late := self._summands(gradients):
            gradients |= zip(late, reduced([gradients[n].clone() for n in late]), strict=True)
        norms = dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True))
        rows: dict[tuple[str, ...], list[str]] = {}
        for n in norms:
            if n in self.shards:
                rows.setdefault(self.shards[n].divided, []).append(n)
        for groups, parts in rows.items():
            for group in groups:
                squares = summed(torch.stack([norms[n] for n in parts]) ** 2.0, group)
                norms |= dict(zip(parts, (squares**0.5).unbind(), strict=True))
        return torch.linalg.vector_norm(torch.stack(list(norms.values())))

    def agree_finite(self, scaler: Any, optimizer: Any) -> None:
        """After ``scaler.unscale_``: a gradient that is not finite on one rank is so on all."""
        for found in compat_optimizers.found_infinite(scaler, optimizer) if self.shards else ():
            found.copy_(summed(found, self.among.group))


def _described(model: torch.nn.Module) -> str:
    rows = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in model.named_parameters()]
    rows += [(n, tuple(t.shape), str(t.dtype), False) for n, t in model.named_buffers()]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
    return f"{len(rows)} parameters and buffers ({digest})"


# --- what is saved ---

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
