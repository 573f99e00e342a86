"""Data parallel training, as ``fit`` is asked for it: each rank has a batch of its own, and all train one model.

Replicated, as DistributedDataParallel does it: each rank has all parameters, and gradients are averaged before the
update. Sharded, as SimpleFSDP does it: each rank has a part of each parameter, its gradient and its optimizer
state; a parameter is gathered where the model reads it, and its gradient is reduced and scattered. Both are ops of
the step, which a plan moves, frees and (gathers) repeats like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.gathering import Placed
from tightship.execute.parts import Loop
from tightship.execute.ranks import Ranks
from tightship.execute.settings import Settings
from tightship.execute.shards import shards_of
from tightship.frontends.torch import compat_ddp, compat_distributed, compat_fully_shard, compat_optimizers
from tightship.frontends.torch.capture.checks import check_model
from tightship.frontends.torch.collectives import Division, no_split, no_stream
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.optimizer.probe_parts import why_whole

__all__ = [
    "DataParallel", "HookedParallel", "TensorParallel", "as_torch_has_it", "check_elementwise", "check_no_hook",
    "check_options", "check_together", "check_unhooked", "digest_of_options", "is_in_parts",
    "need_whole", "unsent_update",
]  # fmt: skip

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
    that gradients are sent and averaged in, such as ``torch.float16``; None: their own. ``find_unused_parameters``,
    as DistributedDataParallel has it: ranks may run other layers in the same step (each draws those that it leaves
    out), and one without a gradient adds zeros to those of the others. Not where ranks have parts.
    """

    shard: bool = False
    buffers: bool = True
    bucket: int | None = None
    group: Any = field(default=None, repr=False, compare=False)
    reduce_dtype: torch.dtype | None = None
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        if self.bucket is not None and (isinstance(self.bucket, bool) or not isinstance(self.bucket, int)):
            raise BadInput("bucket= is a number of bytes, or None", self.bucket, "DataParallel")
        if self.bucket is not None and self.bucket < 0:
            raise BadInput("bucket= is 0 bytes or more", self.bucket, "DataParallel")
        if self.group is not None and not isinstance(self.group, torch.distributed.ProcessGroup):
            rule = "group= is a process group that this rank is in (torch.distributed.new_group), or None"
            raise BadInput(rule, type(self.group).__name__, "DataParallel")
        if self.shard and self.find_unused_parameters:
            rule = (
                "find_unused_parameters=True with shard=True: ranks gather parts in one order; leave one out"
            )
            raise BadInput(rule, place="DataParallel")
        given = self.reduce_dtype
        if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
            rule = "reduce_dtype= is a floating-point type, such as torch.float16, or None"
            raise BadInput(rule, given, "DataParallel")

    @property
    def among(self) -> Division:
        """Among whom, and in which type, gradients are averaged."""
        return Division.of(self.group, self.reduce_dtype)


@dataclass(frozen=True)
class TensorParallel(DataParallel):
    """All ranks compute one batch together, as torch's ``parallelize_module`` says: nothing is averaged, and each
    rank starts from what it has."""

    shard: bool = True
    buffers: bool = False


@dataclass(frozen=True)
class HookedParallel(DataParallel):
    """As a DistributedDataParallel whose communication hook does something else than average."""

    hook: compat_ddp.HookOfDdp | None = field(default=None, repr=False, compare=False)


def check_together(
    model: Any, ranks: Ranks | None, parallel: object, settings: Settings, loop: Loop, optimizer: Any,
    *, split: bool = False,
) -> tuple[torch.nn.Module, DataParallel | None]:  # fmt: skip
    """The model to train and how, which may follow from what torch has made of the model. ``split``: updates are the
    caller's to ask for. Raises ``BadInput`` and ``Unsupported`` for what does not go together with other ranks, or
    without them."""

    def check() -> tuple[torch.nn.Module, DataParallel | None]:
        if parallel is not None and not isinstance(parallel, DataParallel):
            raise BadInput("parallel= is no tightship.DataParallel", type(parallel).__name__, "fit")
        module, how = (as_torch_has_it if ranks is not None else _as_one_has_it)(model, parallel)
        if ranks is not None and not split and loop.accumulate == 1:
            _check_sends(model)
        check_model(module, hooks=True, shards=ranks is not None)
        _check(ranks, module, how, settings, optimizer)
        return module, how

    if ranks is None:
        return check()
    chosen = {"budget": str(settings.budget)} | {n: str(getattr(loop, n)) for n in _SAME}
    chosen |= options_of(optimizer)
    for one in fields(options) if is_dataclass(options := getattr(settings.planner, "options", None)) else ():
        chosen[one.name] = str(getattr(options, one.name))
    found, told = ranks.agreed("fit", check, lambda row: {"parallel": str(row[1]), **chosen})
    if found[1] is not None and any(texts := _different(told)):
        raise ranks.differ("fit with other options (give every rank the same)", texts)
    return found


def _check_sends(model: Any) -> None:
    """Raises ``Unsupported`` inside of what has torch send no gradients for a while: each step would update."""
    for one in compat_ddp.ddps_of(model) if isinstance(model, torch.nn.Module) else ():
        if compat_ddp.sends_no_gradients(one):
            raise unsent_update(compat_ddp.NO_SYNC, "fit")
    if isinstance(model, torch.nn.Module) and compat_fully_shard.sends_no_gradients(model):
        raise unsent_update(compat_fully_shard.NO_SYNC, "fit")


def unsent_update(told: str, what: str) -> Unsupported:
    """What is said of ``fit``, or of a step, where the loop has just ``told`` torch to send no gradients."""
    by_ddp = told == compat_ddp.NO_SYNC
    instead = (
        "call it outside (accelerate's accumulate() and Fabric's no_backward_sync say it, too), or give fit "
        "accumulate=k, or split=True, to call step.backward for each batch and step.update where the loop updates"
    )
    alone = (
        "; where each rank trains by itself until parameters are averaged (local SGD), give fit the model inside "
        "(.module) and independent=True"
    )
    return Unsupported(
        f"{what} {'inside of' if by_ddp else 'after'} {told}, which adds up gradients over batches,",
        "each step updates with gradients that are averaged over all ranks", instead + alone * by_ddp,
    )  # fmt: skip


def options_of(optimizer: Any) -> dict[str, str]:
    """What an optimizer does with its parameters: other updates would make other models. Only numbers, as other
    things may say who a rank is; those on a device are not waited for."""
    found = {}
    optimizers = each(optimizer) if optimizer is not None else ()
    for k, one in enumerate(optimizers):
        name = type(one).__name__ + (f" {k}" if len(optimizers) > 1 else "")
        for number, group in enumerate(one.param_groups):
            of = f"of {name}" + (f"'s group {number}" if len(one.param_groups) > 1 else "")
            found[f"parameters {of}"] = str(len(group["params"]))
            rows = {n: _number(x) for n, x in group.items() if n not in ("params", "param_names")}
            found |= {f"{n} {of}": repr(x) for n, x in rows.items() if x is not ...}
    return found


def _number(x: Any) -> Any:
    """A number, or several, as an option is; an ellipsis for anything else."""
    if isinstance(x, torch.Tensor):
        return x.item() if x.numel() == 1 and x.device.type == "cpu" else ...
    if isinstance(x, (tuple, list)):
        found = [_number(y) for y in x]
        return ... if any(y is ... for y in found) else tuple(found)
    return x if x is None or isinstance(x, (bool, int, float, complex)) else ...


def check_options(ranks: Ranks, told: Sequence[str], optimizer: Any) -> None:
    """Raises ``PeerFailed`` where ranks, which have ``told`` a digest of what their optimizers are set to, would
    update in other ways: a rate that one of them alone has changed makes a model of its own."""
    if len({*told}) == 1:
        return
    _, rows = ranks.agreed(
        "comparing options of the optimizer", lambda: options_of(optimizer), lambda row: row
    )
    rule = (
        "optimizers that are set to other numbers (if a schedule follows from what each rank sees by itself, decide "
        "on one rank and send it to all)"
    )
    raise ranks.differ(rule, _different(rows))


def _different(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Of each rank's options, those that are not the same everywhere."""
    names = [n for n in dict.fromkeys(chain(*rows)) if len({row.get(n) for row in rows}) > 1]
    return [", ".join(f"{n}: {row.get(n)}" for n in names) for row in rows]


def digest_of_options(optimizer: Any) -> str:
    return hashlib.sha256(repr(sorted(options_of(optimizer).items())).encode()).hexdigest()[:16]


_SAME = ("accumulate", "clip_norm", "clip_value", "skip_nonfinite")
"""Options of which no rank may have others."""


def is_in_parts(model: Any) -> bool:
    """Whether torch has divided the parameters of a model, which `as_torch_has_it` takes over, or had."""
    if not isinstance(model, torch.nn.Module):
        return False
    return compat_distributed.distributed_by(model) in ("fully_shard", "DTensor") or bool(shards_of(model))


def as_torch_has_it(model: Any, parallel: DataParallel | None) -> tuple[torch.nn.Module, DataParallel | None]:
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
        return model, TensorParallel() if placed else DataParallel(shard=True, buffers=False)
    return model, parallel


def _as_one_has_it(model: Any, parallel: DataParallel | None) -> tuple[Any, DataParallel | None]:
    """A program for several ranks that torchrun has started on one trains as on one."""
    if not compat_distributed.alone():
        return model, parallel
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model, None
    module, how = _from_ddp(model, parallel)
    check_no_hook(how, "on one rank", "its gradients are handed over as they are")
    return module, None


def check_no_hook(how: DataParallel | None, where: str, why: str) -> None:
    """Raises ``Unsupported`` for a communication hook that has to be called, where nobody would."""
    if isinstance(how, HookedParallel) and how.hook is not None:
        raise Unsupported(
            f"the communication hook {how.hook.name} {where}", why,
            "leave the hook out, or train on two ranks or more",
        )  # fmt: skip


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
    compat_ddp.check_no_join(ddp)
    if options := compat_ddp.own_ddp_options(ddp):
        raise Unsupported(
            f"a model in DistributedDataParallel with {', '.join(options)}",
            "fit averages gradients itself",
            "leave that out, or give fit its .module and parallel=tightship.DataParallel()",
        )  # fmt: skip
    hooks = compat_ddp.type_that_hook_sends(ddp)
    how = parallel or DataParallel(buffers=ddp.broadcast_buffers)
    unused = how.find_unused_parameters or bool(ddp.find_unused_parameters)
    how = replace(how, reduce_dtype=how.reduce_dtype or hooks, find_unused_parameters=unused)
    how = replace(how, group=how.group or ddp.process_group)
    if (hook := compat_ddp.hook_to_call(ddp)) is not None:
        if how.reduce_dtype is not None or how.group is not ddp.process_group:
            rule = f"the communication hook {hook.name} says how and to whom gradients are sent: leave parallel out"
            raise BadInput(rule, place="fit(parallel=…)")
        how = HookedParallel(**{f.name: getattr(how, f.name) for f in fields(how)}, hook=hook)
    return ddp.module, how


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
        if compat_fully_shard.REPLICAS in options:
            why = "that is replicate(), whose gradients a planned step would not average"
            instead = (
                "give fit the plain model in DistributedDataParallel, or parallel=tightship.DataParallel()"
            )
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
    return TensorParallel()


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
        check_elementwise(model, optimizer)
        check_unhooked(model)
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


def check_unhooked(model: torch.nn.Module) -> None:
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


def need_whole(optimizer: Any) -> dict[int, tuple[str, str]]:
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


def check_elementwise(model: torch.nn.Module, optimizer: Any) -> None:
    """Raises ``Unsupported`` where an optimizer would get parts of parameters of which it has to have all. Those of a
    plain model can stay whole, unless nothing else is there."""
    found = need_whole(optimizer)
    if not found:
        return
    by_torch = bool(compat_distributed.distributed_by(model))
    taken = by_torch or bool(shards_of(model))
    if not taken and any(p.requires_grad and id(p) not in found for p in model.parameters()):
        return
    name, why = next(iter(found.values()))
    instead = (
        "use an optimizer that treats elements one by one (AdamW, SGD, Lion, …), or give all ranks whole "
        "parameters: the plain model and DataParallel(shard=False)"
    )
    by_itself = (
        "make it of the model's DTensors before fit, leave fit's optimizer out (None), and step it after "
        "step.backward(batch), as eager does; or "
    )
    raise Unsupported(
        f"{name} with sharded parameters",
        f"what it does with a part of a parameter is not what it does with all of it: {why}",
        by_itself * by_torch + instead,
    )
