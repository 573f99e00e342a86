"""What data parallel training does with a model, beside the planned step: in place of the other ranks for one that is
imagined, and with them.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.data_parallel import (
    DataParallel,
    HookedParallel,
    TensorParallel,
    as_torch_has_it,
    check_elementwise,
    check_no_hook,
    check_unhooked,
    need_whole,
    unsent_update,
)
from tightship.execute.eager import bit_identical
from tightship.execute.gathering import Part, Placed, Shard
from tightship.execute.hooked_buckets import HookedBuckets
from tightship.execute.part_in_hand import hold
from tightship.execute.part_of_gradient import PartOfGradient
from tightship.execute.ranks import Ranks
from tightship.execute.shards import (
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
from tightship.frontends.torch import compat_ddp, compat_distributed, compat_optimizers
from tightship.frontends.torch.capture.checks import check_model
from tightship.frontends.torch.capture.readings import looked_behind
from tightship.frontends.torch.collectives import average_now, broadcast, messages, reduced, summed
from tightship.frontends.torch.compat_ddp import NO_SYNC
from tightship.frontends.torch.fully_shard_methods import sends_nothing
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.structure import LossFn
from tightship.process_local import NotCopied
from tightship.units import format_bytes

__all__ = ["Replicas", "imagined"]


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
    module, how = as_torch_has_it(model, None)
    check_model(module, hooks=True, shards=True)
    check_no_hook(how, "of imagined ranks", "it would have to run, and nothing is run")
    if how is None or how.shard:
        check_unhooked(module)
    if how is not None and how.shard:
        check_elementwise(module, optimizer)
    done, among = shards_of(module), (how or DataParallel()).among
    if isinstance(how, TensorParallel):
        done = done or take_over_placed(module, optimizer)
        shard_optimizer(optimizer, done)
        return module, loss, ()
    notes: tuple[str, ...] = ()
    if compat_distributed.distributed_by(module) == "fully_shard":
        done = take_over(module, optimizer)
    elif how is None:
        whole = need_whole(optimizer)
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
        for n, p in parts.items():
            hold(p, self.shards[n])
        self._known = {n: weakref.ref(p) for n, p in model.named_parameters()}
        self.follows = True
        self.averaged = self._messages()
        self.hooked = self._hooked(ranks)
        self.late_averages = self.hooked is not None
        """Whether gradients are averaged behind the backward pass: ranks have run other layers, or a hook does it."""
        self._lying: dict[str, torch.Tensor] = {}
        self.lie_here()

    def _hooked(self, ranks: Ranks) -> HookedBuckets | None:
        """The buckets that a communication hook is called for."""
        if not isinstance(self.parallel, HookedParallel) or self.parallel.hook is None:
            return None
        with ranks.sending(writing=False):
            made = HookedBuckets(self.parallel.hook, {id(p): n for n, p in self.model.named_parameters()})
            ranks.same("buckets of DistributedDataParallel", lambda: f"{made.name}, {made.rows}")
        note = f"the communication hook {made.name} is called once all gradients are there, bucket by bucket"
        self.notes = (*self.notes, note)
        return made

    def _messages(self) -> tuple[tuple[str, ...], ...]:
        """Which gradients of whole parameters go together."""
        own = [] if isinstance(self.parallel, TensorParallel) else self.model.named_parameters()
        whole = [(n, p) for n, p in own if p.requires_grad and n not in self.shards]
        whole.reverse()  # gradients come in about this order
        rows = messages([((p.dtype, p.device), p.nbytes) for _, p in whole], self.parallel.bucket)
        return tuple(tuple(whole[k][0] for k in row) for row in rows)

    def follow(self, ranks: Ranks) -> None:
        """To be called when the model has other parts, or others are trained, until it ``follows``: what it raises,
        each step raises, since ranks would train models of their own."""
        self.follows = False
        there = dict(self.model.named_parameters())
        new = {n: p for n, p in there.items() if n not in self._known or self._known[n]() is not p}
        if new and self.shards:
            raise Unsupported(
                f"the parameter {next(iter(new))!r}, which has come to the model since fit,",
                "ranks have parts of the others, and nobody would average its gradient",
                "put it there before fit",
            )  # fmt: skip
        if new:
            ranks.same("parameters that have come to the model since fit", lambda: _digest(new))
        self._known = {n: weakref.ref(p) for n, p in there.items()}
        self.averaged, self.follows = self._messages(), True

    def _divided(self, optimizer: Any) -> dict[int, Part]:
        """What of the model is in parts, by the ids of these, from now on."""
        model, parallel = self.model, self.parallel
        shards, together = shards_of(model), isinstance(parallel, TensorParallel)
        if together:
            shards = shards or take_over_placed(model, optimizer)
        elif compat_distributed.distributed_by(model) == "fully_shard":
            shards = take_over(model, optimizer)
        elif not shards:
            for t in (*model.parameters(), *model.buffers()):
                broadcast(t.data, self.among)
            if parallel.shard:
                whole = need_whole(optimizer)
                shards = shard_model(model, self.among, whole)
                self.notes = _notes_on_whole(model, shards, whole, self.among.size)
        shard_optimizer(optimizer, shards)
        if not together:
            send_together(model, shards, parallel.bucket)
        if any(one.divided for one in shards.values()):
            say_parts(model)
        return shards

    def lie_here(self) -> None:
        """Parts of DTensors are where they belong."""
        there = dict(self.model.named_parameters())
        self._lying = {n: there[n].detach() for n, one in self.shards.items() if n in there and one.by_torch}

    def put_back(self) -> list[str]:
        """Parts to which code has given other data (``p.data = …``) lie where they lay, as eager's DTensors do, whose
        memory it does not change; returns their names. What has another form (``model.half()``) stays."""
        moved = []
        for n, own in self._lying.items():
            p = self._known[n]()
            same = p is not None and (p.dtype, p.device, p.shape) == (own.dtype, own.device, own.shape)
            if p is not None and same and p.data_ptr() != own.data_ptr():
                p.data = own
                moved.append(n)
        return moved

    @property
    def whole_in_eager(self) -> bool:
        """Whether ranks have parts of what a model like this one has whole in eager."""
        return any(isinstance(one, Shard) and not one.by_torch for one in self.shards.values())

    @property
    def may_differ(self) -> bool:
        """Whether ranks may run other layers in the same step."""
        return self.parallel.find_unused_parameters

    @property
    def apart(self) -> bool:
        """Whether the caller is in ``no_sync()`` of the model's DistributedDataParallel."""
        return self.ddp is not None and not self.ddp.require_backward_grad_sync

    def check_sent(self) -> None:
        """Raises ``Unsupported`` where the caller's loop sends no gradients and a step is about to update: in eager
        each rank would do that with its own, or with none."""
        modules = self.model.modules() if self.shards else ()
        told = next((words for m in modules if (words := sends_nothing(m))), "")
        if self.apart or told:
            raise unsent_update(told or NO_SYNC, "a step that updates")

    def synchronize(self, buffers: Mapping[str, torch.Tensor], *, looked: bool = False) -> None:
        """The model's ``buffers`` are those of rank 0. ``looked``: the code of the step has seen what was computed
        with this rank's. Raises ``Unsupported`` where these were others."""
        for n, b in buffers.items() if self.parallel.buffers else ():
            before = b.detach().clone() if looked else None
            broadcast(b.data, self.among)
            if before is not None and not bit_identical(before, b):
                raise Unsupported(
                    f"a buffer that this rank alone has changed ({n!r}), in a step whose code looks at what it makes",
                    "it is rank 0's before the step runs, and was not when the code looked",
                    "change it on all ranks, or on rank 0 alone and before the last step",
                )  # fmt: skip
        if self.ddp is not None:
            compat_ddp.buffers_change(self.ddp)

    def sends_behind(self, program: Program) -> bool:
        """Whether buffers that are sent are written only behind its last reading: ranks do not look together."""
        written = {s for op in program.graph.ops for s in op.mutates}
        homes = (program.graph.values[s.value].storage for s in program.slots if s.role == "buffer")
        before = any(written for _, written in looked_behind(program).values())
        return self.parallel.buffers and not before and not written.isdisjoint(homes)

    def fill_up(self, parameters: Iterable[tuple[str, torch.Tensor]], ranks: Ranks | None) -> None:
        """Zeros for gradients that others have, where ranks may run other layers. What none has stays so."""
        if not self.may_differ or ranks is None:
            return
        own = dict(parameters)
        _, told = ranks.agreed(
            "averaging", lambda: [n for n, p in own.items() if p.grad is not None], lambda row: row
        )
        for n in sorted({*chain(*told)}):
            if own[n].grad is None:
                own[n].grad = torch.zeros_like(own[n])

    def average(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gradients of whole parameters, between backward pass and update."""
        if self.hooked is not None:
            self.hooked.average(dict(parameters))
            return
        there = {n: p.grad for n, p in parameters if p.grad is not None}
        for names in self.averaged:
            average_now([there[n] for n in names if n in there], self.among)

    def hand_out(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gradients of what torch or this step has in parts, to the caller, until `take_back`: those that each rank
        has all of (of norms under sequence parallelism), too, since code asks of all of them together."""
        for n, p in parameters:
            shard = self.shards.get(n)
            if shard is None or p.grad is None:
                continue
            shard.lend(p)
            p.grad = PartOfGradient.of(p.grad, shard.division)

    def seen(self, name: str, parameter: torch.Tensor) -> Any:
        """A parameter, of which ranks may have parts, as all of them together have it."""
        return self.shards[name].seen(parameter) if name in self.shards else parameter

    def take_back(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for n, p in parameters:
            if isinstance(p.grad, PartOfGradient):
                p.grad = p.grad.as_subclass(torch.Tensor)
            if n in self.shards:
                self.shards[n].take_back(p)

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
        divided = {n: self.shards[n].divided for n in norms if n in self.shards}
        layouts = [self.shards[n].layout if n in self.shards else None for n in norms]
        for n, along in zip(list(norms), compat_distributed.stacked_along(layouts), strict=True):
            for group, size in along:  # eager has it as summands of equal size
                norms[n] = norms[n] / math.sqrt(size)
                divided[n] = (*divided[n], group)
        rows: dict[tuple[str, ...], list[str]] = {}
        for n, groups in divided.items():
            rows.setdefault(groups, []).append(n)
        for groups, parts in rows.items():
            for group in groups:
                squares = summed(torch.stack([norms[n] for n in parts]) ** 2.0, group)
                norms |= dict(zip(parts, (squares**0.5).unbind(), strict=True))
        return torch.linalg.vector_norm(torch.stack(list(norms.values())))

    def agree_finite(self, scaler: Any, optimizer: Any) -> None:
        """After ``scaler.unscale_``: a gradient that is not finite on one rank is so on all."""
        for found in compat_optimizers.found_infinite(scaler, optimizer) if self.shards else ():
            found.copy_(summed(found, self.among.group))


def _digest(parameters: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for n, p in parameters.items():
        digest.update(f"{n} {tuple(p.shape)} {p.dtype}".encode())
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"{', '.join(parameters)} ({digest.hexdigest()[:8]})"


def _described(model: torch.nn.Module) -> str:
    rows = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in model.named_parameters()]
    rows += [(n, tuple(t.shape), str(t.dtype), False) for n, t in model.named_buffers()]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
    return f"{len(rows)} parameters and buffers ({digest})"
