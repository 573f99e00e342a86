"""Capture a training step, or a model's forward and backward pass, as a Program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tightship.errors import BadInput, Unplannable, Unsupported
from tightship.frontends.torch import compat, compat_capture, compat_distributed
from tightship.frontends.torch.capture.lower import finish
from tightship.frontends.torch.capture.recorder import Recorder, is_strided, is_whole
from tightship.frontends.torch.capture.state_restore import Change, applied, untouched
from tightship.frontends.torch.capture.tape import Origin, Tape, TapeValue, Tracker
from tightship.frontends.torch.collectives import reduced, share
from tightship.frontends.torch.optimizer.copy import Rows
from tightship.frontends.torch.optimizer.updates import (
    Member,
    Several,
    SeveralUpdates,
    Updater,
    Updates,
    as_one,
    updaters,
)
from tightship.frontends.torch.program import Program, Ref
from tightship.frontends.torch.structure import (
    BatchSpec,
    Given,
    LossFn,
    Results,
    caches,
    called,
    checked_loss,
    flatten,
    loss_function,
    map_leaves,
    summed_output,
)

__all__ = [
    "DATA_PARALLEL",
    "Ending",
    "StepCapture",
    "capture_forward",
    "capture_loss",
    "capture_step",
    "capture_update",
    "check_changes",
    "check_hooks",
    "check_model",
    "check_replaced",
    "checked_leaf",
    "module_of",
]


DATA_PARALLEL = (
    'train DistributedDataParallel(torch.compile(model, backend="tightship", options={"budget": …})), with '
    "torch._dynamo.config.optimize_ddp = False"
)
"""What trains one model on several ranks."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


def capture_step(
    model: torch.nn.Module,
    loss_fn: LossFn | torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    batch: Any,
    *,
    name: str = "step",
) -> Program:
    """The program of one training step: forward, backward and, per parameter, the optimizer's update.

    ``loss_fn(model, batch)`` returns the loss, or (loss, anything else to hand back). A ``loss_fn`` that is a
    module is called as ``loss_fn(model(x), y)`` on batches ``(x, y)``; without one the batch is a mapping and
    the loss is ``model(**batch).loss``. The model, its gradients and all random states stay as they are.

    The program's results are the loss and what came with it; without an optimizer also the gradients, as
    (results, {parameter name: gradient}).

    Raises ``BadInput`` (no module, no scalar loss, nothing to train) and ``Unsupported`` (control flow on data,
    sparse gradients, an optimizer that couples parameters, hooks on parameters, a step that changes what the
    next one does other than through parameters and buffers, …).
    """
    check_model(model)
    loss = loss_function(loss_fn, batch)
    optimizer = as_one(optimizer) if optimizer is not None else None
    capture = Capture(model, batch, name)
    program = capture.step(loss, optimizer)
    check_changes(capture.changes, program)
    if any(c.is_plain for c in capture.changes):
        with applied(capture.changes):
            second = Capture(model, batch, name).step(loss, optimizer)
        _check_same(program, second, capture.changes)
    return program


def capture_update(
    model: torch.nn.Module,
    updates: Updates | SeveralUpdates,
    gradients: Mapping[str, torch.Tensor],
    *,
    name: str = "update",
) -> Program:
    """The program of the optimizer's updates of the parameters that have these ``gradients``, which are its inputs;
    parameters and buffers that it does not touch are inputs, too, as they stand beside it. Raises as
    ``capture_step``."""
    return Capture(model, (), name).update(updates, gradients)


def capture_loss(
    model: torch.nn.Module, sample: Any, *, train: bool = True, device: str | None = None, name: str = "loss"
) -> Program:
    """The program of the model's forward and backward pass on ``sample``, for deciding only.

    ``sample`` is a mapping of keyword arguments, a tuple of positional ones, or the one argument. The loss is
    the output's ``loss``, otherwise the sum of its ``logits`` or of its first floating-point tensor. The gradients
    are results: (loss, {parameter name: gradient}). Model and sample may be fake or on the meta device, in which
    case ``device`` says where they are to be thought of (default cpu).

    Raises as ``capture_step``.
    """
    check_model(model)
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.train(train)
        return Capture(model, sample, name, device).step(summed_output, None)
    finally:
        for m, was in modes:
            m.training = was


def module_of(model: Any) -> Any:
    """The module to capture: the model, or what is inside of what ``torch.export.export`` made of one."""
    return model.module() if isinstance(model, torch.export.ExportedProgram) else model


def capture_forward(
    model: torch.nn.Module, sample: Any, *, device: str | None = None, name: str = "forward"
) -> Program:
    """The program of the model's forward pass on ``sample`` in evaluation mode, without gradients; its results are
    the model's. ``sample`` and ``device`` as for ``capture_loss``. Raises as ``capture_step``.
    """
    check_model(model)
    modes = [(m, m.training) for m in model.modules()]
    try:
        for m in model.modules():
            m.training = False  # not model.eval(): what torch.export made refuses that
        return Capture(model, sample, name, device).forward()
    finally:
        for m, was in modes:
            m.training = was


# --- what is captured -----------------------------------------------------------------------------------------


def check_model(model: Any, *, hooks: bool = False, shards: bool = False) -> None:
    """``hooks``, and what ``fully_shard`` has made (``shards``): they are taken care of."""
    compat.require_torch()
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"object of type {type(model).__name__}; give a torch.nn.Module", place="model")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise Unsupported(
            "a model in DistributedDataParallel", "its hooks run outside the step",
            "give its .module (tightship.fit on several ranks takes the model as it is, or its .module and "
            f"parallel=tightship.DataParallel()); or {DATA_PARALLEL}",
        )  # fmt: skip
    by = compat_distributed.distributed_by(model)
    if by and not (shards and by in ("fully_shard", "DTensor")):
        raise Unsupported(
            f"a model whose parameters are distributed by {by}",
            "its parts are gathered outside of what a plan sees",
            "give fit the plain model and parallel=tightship.DataParallel(shard=True)",
        )
    if not hooks:
        check_hooks(model.named_parameters(), model.modules())


def check_hooks(parameters: Iterable[tuple[str, torch.Tensor]], modules: Iterable[torch.nn.Module]) -> None:
    """Raises ``Unsupported`` for hooks on parameters and for backward hooks of modules, which the captured backward
    pass would not run."""
    if compat.backward_hooks(modules):
        raise Unplannable(
            "a backward hook on a module", "the captured backward pass does not run hooks",
            "remove it, or hook the tensor in the forward pass (tensor.register_hook)",
        )  # fmt: skip
    for n, p in parameters:
        if compat.gradient_hooks(p):
            raise Unsupported(
                f"a hook on the parameter {n!r}",
                "this capture runs none",
                "remove it; tightship.fit takes it along",
            )


# --- the capture ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """What follows a step's forward pass: a backward pass for the gradients of ``wanted`` parameters, and the
    optimizer's ``updates`` with them.

    Where the step ends with the backward pass, ``leaves`` is true: gradients are added to those of ``held``, in
    place, and the others are the program's last results; the optimizer's state stands beside them. Otherwise ``clip``
    changes gradients before the updates, in place, and may return a tensor, which is the program's last result.
    ``averaged`` are the parameters whose gradients are averaged over all ranks before that, by message. ``add_up``
    adds up over all ranks, in place, those of which each rank still has a summand behind the clipping.
    ``repeats``: whether collectives that change nothing may run again.
    """

    wanted: tuple[str, ...]
    updates: Updates | SeveralUpdates | None
    clip: Callable[[Mapping[str, torch.Tensor]], torch.Tensor | None] | None = None
    leaves: bool = False
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)
    averaged: tuple[tuple[str, ...], ...] = ()
    add_up: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    repeats: bool = False

    @property
    def part(self) -> str:
        """Which part of a step ends so; empty for all of it."""
        return "" if not self.leaves else "adding" if self.held else "backward"


@dataclass(frozen=True)
class _Fakes:
    """The fake stand-ins of what the caller owns, by qualified name; ``real`` of the same names."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    batch: Any


class Capture:
    def __init__(self, model: torch.nn.Module, batch: Any, name: str, device: str | None = None) -> None:
        self.model, self.batch, self.name = model, batch, name
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        tensors = [*self.parameters.values(), *self.buffers.values(), *_tensors(batch)]
        self.has_data = not any(compat.is_fake(t) or t.is_meta for t in tensors)
        self.mode = compat.fake_mode_of(tensors) or compat.fake_mode()
        self.device = compat.thinkable(device or "cpu")
        self.tape = Tape()
        self.tape.repeats = compat_distributed.imagined_ranks()  # all of which would run the same plan
        self.tracker = Tracker({m: n for n, m in model.named_modules()})
        self.recorder = Recorder(self.tape, self.mode, self.tracker)
        self.readers = compat_capture.DataReaders(self.recorder.contents)
        self.changes: list[Change] = []
        self._state_values: dict[Any, int] = {}
        self.inside: Callable[[], AbstractContextManager[Any]] = (
            nullcontext  # around code of the backward pass
        )

    def step(self, loss_fn: LossFn, optimizer: torch.optim.Optimizer | Several | None) -> Program:
        updates, wanted = self._wanted(optimizer)
        quiet = compat_capture.quiet_capture(has_data=self.has_data)
        outside = compat_distributed.shapes_asked_outside()
        with untouched(self.model, self.changes), quiet, outside, torch.enable_grad():
            fakes = self._fakes()
            results, gradients = self._run(loss_fn, fakes, wanted)
        handed_back = results if optimizer is not None else (results, self.tape.refs(gradients))
        spec, values = Results.of_refs(handed_back)
        notes = [f"{c} is set by each step in eager, not by the program" for c in self.changes]
        notes += self._updated(updates, fakes, gradients)
        return finish(
            self.tape, values, result_spec=spec, name=self.name, guards=self.recorder.guards,
            batch=BatchSpec.of(self.batch), notes=notes, losses=values[:1], sums=True,
        )  # fmt: skip

    def _wanted(
        self, optimizer: torch.optim.Optimizer | Several | None
    ) -> tuple[Updates | SeveralUpdates | None, list[str]]:
        """How the optimizer steps, and the parameters whose gradients are wanted."""
        by_name = self._trained()
        if optimizer is None:
            return None, by_name
        updates = updaters(optimizer, self.parameters)
        return updates, list(updates.names)

    def _trained(self) -> list[str]:
        """The parameters that require a gradient; raises where a step cannot train them on this batch."""
        by_name = [n for n, p in self.parameters.items() if p.requires_grad]
        if not by_name:
            raise BadInput("no parameter requires a gradient", place="model")
        if caches(self.batch):
            raise Unsupported(
                "a cache of keys and values in a training batch", "what a step writes into it would be lost",
                "leave it out, or train with use_cache=False",
            )  # fmt: skip
        return by_name

    def _updated(
        self, updates: Updates | SeveralUpdates | None, fakes: _Fakes, gradients: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """Takes down the optimizer's step; returns what a user should know of it."""
        if updates is None:
            return ()
        for updater in updates.ops(gradients, self._rows(gradients)):
            self._update(updater, fakes.parameters, gradients)
        return updates.notes

    def update(self, updates: Updates | SeveralUpdates, gradients: Mapping[str, torch.Tensor]) -> Program:
        fakes = self._fakes(gradients.values())
        given = self._held(gradients)
        notes = self._updated(updates, fakes, given)
        return finish(self.tape, [], result_spec=Results(()), name=self.name, notes=notes)

    def _clipped(
        self,
        clip: Callable[[Mapping[str, torch.Tensor]], torch.Tensor | None],
        parameters: Mapping[str, torch.Tensor],
    ) -> torch.Tensor | None:
        with torch.no_grad(), self.mode, self.recorder, self.recorder.in_phase("update"):
            return clip(parameters) if parameters else None

    def _held(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The fakes of gradients that are there before the program runs, each an input of the tape."""

        def fake(name: str, g: torch.Tensor) -> torch.Tensor:
            if not g.is_meta:
                return self._fake(g)
            device = self.parameters[name].device
            return compat.blank_like(self.mode, tuple(g.shape), g.stride(), 0, g.dtype, device)

        made = {n: fake(n, g) for n, g in gradients.items()}
        for n, g in made.items():
            self.tape.input(g, "gradient", n, f"{n}.grad")
        return made

    def _state(self, updates: Updates | SeveralUpdates, gradients: Mapping[str, torch.Tensor]) -> None:
        """Takes down the state that the optimizer has, or will have, for parameters with ``gradients``."""
        for g in gradients.values():
            self.tape.value(g)  # refuses what is sparse
        for updater in updates.ops(gradients):
            for m in updater.members:
                self._states(updater, m)
            self._held_by(updater)

    def _states(self, updater: Updater, member: Member) -> list[int]:
        """The optimizer's state for a parameter, each tensor an input of the tape."""
        name, mark = member.name, (updater.number,) if updater.number else ()
        rows = zip(member.state_keys, member.state_like, strict=True)
        return [self._kept_by(t, (name, k, *mark), f"{name}.{k}{''.join(map(str, mark))}") for k, t in rows]

    def _kept_by(self, like: torch.Tensor, key: Any, name: str) -> int:
        """A tensor of an optimizer's, once: hooks may step a parameter before the step does."""
        if key not in self._state_values:
            self._state_values[key] = self.tape.input(self._blank(like), "state", key, name)
        return self._state_values[key]

    def _held_by(self, updater: Updater) -> list[int]:
        """What the optimizer keeps beside that."""
        rows = updater.held.items()
        return [self._kept_by(t, ("", path, updater.number), f"optimizer{path}") for path, t in rows]

    def forward(self) -> Program:
        self.tape.grad = False
        quiet = compat_capture.quiet_capture(has_data=self.has_data)
        with untouched(self.model, self.changes), quiet, torch.no_grad():
            fakes = self._fakes()
            with self.mode, self.recorder, self.readers.active(), self.tracker.active(), self._swapped(fakes):
                out = called(self.model, fakes.batch)
                self._write_back(self._replaced(fakes), fakes)
        given = caches(fakes.batch)
        spec, values = Results.of_refs(self._results(out, given), [self._results(c) for c in given])
        if not values:
            raise BadInput(f"no tensor in the output of type {type(out).__name__}", place="model")
        return finish(
            self.tape, values, result_spec=spec, name=self.name, guards=self.recorder.guards,
            batch=BatchSpec.of(self.batch), losses=values,
        )  # fmt: skip

    def _run(self, loss_fn: LossFn, fakes: _Fakes, wanted: list[str]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Forward and backward on the fakes: what the loss function returned (as ``Ref``s), and the gradients."""
        leaves = [fakes.parameters[n] for n in wanted]
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            stack.enter_context(self.recorder)
            stack.enter_context(self.readers.active())
            with self.tracker.active(), self._swapped(fakes):
                out = loss_fn(self.model, fakes.batch)
                replaced = self._replaced(fakes)
            loss = checked_loss(out)
            results = self._results(out)
            gradients = self._gradients(loss, wanted, leaves)
            self._write_back(replaced, fakes)
            return results, gradients

    def _gradients(
        self, loss: torch.Tensor, wanted: Sequence[str], leaves: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        with self.recorder.in_phase("backward"), compat_capture.inside_backward(self.inside):
            torch.autograd.backward(loss, inputs=leaves)
        gradients = {}
        for n, leaf in zip(wanted, leaves, strict=True):
            if leaf.grad is not None:
                gradients[n] = leaf.grad
                self._name_gradient(n, leaf.grad)
        return gradients

    def _results(self, out: Any, given: Sequence[Any] = ()) -> Any:
        """``out`` with ``Ref``s for its tensors, and `Given` for caches that the model was ``given``."""

        def leaf(x: Any) -> Any:
            if any(x is c for c in given):
                return Given(next(k for k, c in enumerate(given) if c is x))
            return Ref(self.tape.value(x)) if isinstance(x, torch.Tensor) else checked_leaf(x)

        return map_leaves(leaf, out, lambda x: any(x is c for c in given))

    def _rows(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, tuple[Rows, ...]]:
        """Those of the terms of the sparse ones."""
        terms = {n: self.recorder.sparse.terms(g) for n, g in gradients.items()}
        return {
            n: tuple(Rows(t.rows.shape[1], t.padding) for t in found) for n, found in terms.items() if found
        }

    def _name_gradient(self, name: str, grad: torch.Tensor) -> None:
        terms = self.recorder.sparse.terms(grad)
        grad = terms[0].values if terms else grad
        s = self.tape.storages[self.tape.storage(self.tape.value(grad, f"the gradient of {name}"))]
        if not s.role and not s.name:
            s.name = f"{name}.grad"

    # --- what the caller owns ---

    def _fakes(self, gradients: Iterable[torch.Tensor] = ()) -> _Fakes:
        """Fakes of parameters, buffers and batch, each an input of the tape. Equal objects give one fake.
        ``gradients`` are there, too, and may lie in one storage."""
        made: dict[int, torch.Tensor] = {}
        own = {id(t): t for t in (*self.parameters.values(), *self.buffers.values(), *gradients)}
        self._shared = shared_storages(own.values())

        def fake_of(real: torch.Tensor, role: str, key: Any, name: str) -> torch.Tensor:
            if id(real) not in made:
                made[id(real)] = self._fake(real)
                self.tape.input(made[id(real)], role, key, name, real if self.has_data else None)
            return made[id(real)]

        parameters = {n: fake_of(p, "parameter", n, n) for n, p in self.parameters.items()}
        buffers = {n: fake_of(b, "buffer", n, n) for n, b in self.buffers.items()}
        position = iter(range(1 << 30))

        def leaf(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            k = next(position)
            # One fake per leaf, even if two are the same tensor: in the next batch they may not be.
            fake = self._of_batch(x).requires_grad_(x.requires_grad)
            self.tape.input(fake, "input", k, f"batch.{k}", x if self.has_data else None)
            return fake

        return _Fakes(parameters, buffers, map_leaves(leaf, self.batch))

    def _of_batch(self, real: torch.Tensor) -> torch.Tensor:
        return self._blank(real)

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        if compat.is_fake(real):
            fake = real.detach()
        elif real.is_meta:
            fake = self._blank(real)
        else:
            fake = self._of_storage(real)
        if isinstance(real, torch.nn.Parameter):
            fake = compat.as_parameter(fake, real.requires_grad)
        return fake

    def _of_storage(self, real: torch.Tensor) -> torch.Tensor:
        if is_whole(real) and compat.storage_key(real) not in self._shared:
            return self._blank(real)
        return self.recorder.in_storage(real) if is_strided(real) else self.mode.from_tensor(real.detach())

    def _blank(self, real: torch.Tensor) -> torch.Tensor:
        device = torch.device(self.device) if real.is_meta else real.device
        return compat.blank_like(self.mode, tuple(real.shape), real.stride(), 0, real.dtype, device)

    @contextmanager
    def _swapped(self, fakes: _Fakes) -> Iterator[None]:
        with compat_capture.reparametrized(self.model, {**fakes.parameters, **fakes.buffers}):
            yield

    def _replaced(self, fakes: _Fakes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Buffers that the code has replaced by new tensors, and these."""
        found = []
        for n, b in self.model.named_buffers():
            fake = fakes.buffers.get(n)
            if fake is None or b is fake:
                continue
            check_replaced(n, fake, b)
            found.append((fake, b))
        return found

    def _write_back(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]], fakes: _Fakes) -> None:
        """Takes down that replaced buffers get what the next step would read there. The gradients, which may be made
        of what they held before, are there by then, and all is read before anything is written."""
        written = {compat.storage_key(buffer) for buffer, _ in replaced}
        owned = {compat.storage_key(t): n for n, t in (*fakes.parameters.items(), *fakes.buffers.items())}
        with torch.no_grad(), self.recorder.in_phase("update"):
            fresh = []
            for _, now in replaced:
                key = compat.storage_key(now)
                if key in owned and key not in written:
                    raise shared_buffer(owned[key])
                fresh.append(now.clone() if key in written else now)
            for (buffer, _), now in zip(replaced, fresh, strict=True):
                buffer.copy_(now)

    # --- updates ---

    def _update(
        self, updater: Updater, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> None:
        read: list[int] = []
        written: list[int] = []
        sparse: list[int] = []
        for m in updater.members:
            values, gradient = self._states(updater, m), gradients[m.name]
            if terms := self.recorder.sparse.terms(gradient):
                gradient = terms[0].values
                parts = [t for term in terms for t in (term.values, term.rows)]
                sparse += map(self.tape.value, parts[1:])
            p, g = self.tape.value(parameters[m.name]), self.tape.value(gradient)
            read += [p, g, *values]
            written += [p, *([g] if updater.writes_gradients else ()), *values]
        held = self._held_by(updater)
        read += held
        written += held
        target = f"optimizer.{type(updater.optimizer).__name__}"
        r = self.tape.call(updater, target, (*read, *sparse), tuple(written))
        params = [parameters[m.name] for m in updater.members]
        r.phase, r.device, r.flops = "update", str(params[0].device), sum(p.numel() for p in params)
        r.random = updater.draws  # random ops keep their order
        if len(params) == 1:
            r.origin = Origin(updater.name.rpartition(".")[0], "")


class StepCapture(Capture):
    """Captures a step whose calls come one by one, as `Execution` makes them: ``program`` when all are made."""

    def __init__(self, model: torch.nn.Module, batch: Any, name: str, ending: Ending) -> None:
        super().__init__(model, batch, name)
        self.ending, self.tape.repeats = ending, ending.repeats
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._given = self._fakes(ending.held.values())

    @property
    def stand_ins(self) -> Any:
        """The batch on fake tensors."""
        return self._given.batch

    @property
    def guards(self) -> list[Any]:
        return self.recorder.guards

    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the code sees of parameters, buffers and the batch, and the fake tensor of each."""
        own = [(p, self._given.parameters[n]) for n, p in self.parameters.items()]
        own += [(b, self._given.buffers[n]) for n, b in self.buffers.items()]
        return own + [(t, t) for t in _tensors(self._given.batch)]

    @contextmanager
    def executing(self) -> Iterator[None]:
        with compat_distributed.shapes_asked_outside(), self.mode, self.recorder:
            yield

    def instead(self, func: Any) -> Any:
        """What is called in the place of a function that reads data by itself."""
        return self.readers.instead(func)

    def swapped(self) -> AbstractContextManager[None]:
        """The model on fake tensors."""
        return self._swapped(self._given)

    def origin(self) -> Origin:
        return self.tracker.here()

    def place(self, origin: Origin | None) -> None:
        """Where calls come from that are made again; None: where the running code is."""
        self.tracker.place = origin

    def asking(self, number: int) -> None:
        """The ops to come belong to the torch function's call of that number."""
        self.recorder.asked = number

    def write_back(self, buffer: torch.Tensor, now: torch.Tensor) -> None:
        """To be taken down behind the backward pass."""
        self._late.append((buffer, now))

    def resume(self) -> None:
        self.tracker.resume()

    def random_calls(self) -> set[int]:
        """The numbers of the calls that draw random numbers."""
        return {r.asked for r in self.tape.records if r.random}

    def described(self, tensor: torch.Tensor) -> TapeValue | None:
        """What `ended` takes for a tensor of the step, if it is one whose bytes a program can hand back."""
        return self.tape.described(tensor)

    def ended(
        self, loss: torch.Tensor, results: Sequence[torch.Tensor], spec: Results, notes: Sequence[str]
    ) -> Callable[[Sequence[TapeValue]], Program]:
        """Takes down what follows the calls made; returns what makes the program, with further results behind
        those that the step hands back. It holds no tensor that the code has seen."""
        ending = self.ending
        wanted = ending.wanted if self._trained() else ()
        leaves = [self._given.parameters[n] for n in wanted]
        held = self._held(ending.held)
        for n, g in held.items():
            self._given.parameters[n].grad = g
        self.asking(-1)
        if any(c.grad_fn is not None for c in self.tape.constants) and compat.runs_into_the_past(loss):
            raise Unsupported(
                "a backward pass through a tensor that an earlier step has made",
                "that step's backward pass has freed its graph, in eager, too",
                "keep a tensor without a graph (detach())",
            )  # fmt: skip
        with torch.enable_grad(), self.executing():
            values = [self.tape.value(compat_distributed.own_part(t)) for t in (*results, loss)]
            with self._stepping_in_hooks():
                gradients = self._gradients(loss, wanted, leaves)
            self._write_back(self._late, self._given)
        made: list[str] = []
        norm: torch.Tensor | None = None
        _check_held(held, gradients)
        if ending.leaves:
            made = [n for n in gradients if n not in held]
            if ending.updates is not None:
                self._state(ending.updates, gradients)
        else:
            gradients = self._averaged(gradients)
            if ending.clip is not None:
                found = {n: p for n, p in self._given.parameters.items() if n in gradients}
                norm = self._clipped(ending.clip, found)  # in the model's order, in which norms add up
            if ending.add_up is not None:
                with torch.no_grad(), self.executing(), self.recorder.in_phase("update"):
                    ending.add_up(gradients)
            notes = [*notes, *self._updated(ending.updates, self._given, gradients)]
        last = [gradients[n] for n in made] if norm is None else [norm]
        tape, guards, name, ends = self.tape, self.recorder.guards, self.name, [*map(self.tape.value, last)]
        batch = BatchSpec.of(self.batch)

        def program(kept: Sequence[TapeValue]) -> Program:
            handed_back = [*values[:-1], *map(tape.intern, kept), *ends]
            captured = finish(
                tape, handed_back, result_spec=spec, name=name, guards=guards, batch=batch, notes=notes,
                losses=values[-1:], sums=True, whole_batch=False,
            )  # fmt: skip
            return replace(captured, gradients=tuple(made))

        return program

    def _averaged(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Averages gradients over all ranks in place, as soon as nothing else needs those of one message."""
        records, tape = self.tape.records, self.tape
        buckets = [[n for n in names if n in gradients] for names in self.ending.averaged]
        homes = {n: tape.storage(tape.value(gradients[n])) for names in buckets for n in names}
        last: dict[int, int] = {}
        for k, r in enumerate(records):
            used = {tape.storage(v) for v in (*r.reads, *(v for v in r.results if v >= 0))}
            last |= dict.fromkeys((*used, *r.writes), k)
        behind: dict[int, list[Any]] = {}

        def recorded(at: int, known: int) -> None:
            behind.setdefault(at, []).extend(records[known:])
            del records[known:]

        with torch.no_grad(), self.executing(), self.recorder.in_phase("backward"):
            for names in filter(None, buckets):
                owned, parts = [], []
                for n in names:
                    owned.append(
                        list(homes.values()).count(homes[n]) == 1 and not tape.storages[homes[n]].role
                    )
                    known = len(records)
                    parts.append(share(gradients[n], own=owned[-1]))
                    recorded(last.get(homes[n], -1), known)
                known = len(records)
                means = reduced(parts)
                recorded(max(last.get(homes[n], -1) for n in names), known)
                for n, own, mean in zip(names, owned, means, strict=True):
                    if not own:
                        gradients[n] = self._given.parameters[n].grad = mean
                        self._name_gradient(n, mean)
        records[:] = [
            *behind.get(-1, ()),
            *(x for k, r in enumerate(records) for x in (r, *behind.get(k, ()))),
        ]
        return gradients

    @contextmanager
    def _stepping_in_hooks(self) -> Iterator[None]:
        """Where hooks on parameters step the step's optimizers, their updates are taken down there."""
        updates = self.ending.updates

        def stepped(part: int) -> None:
            assert updates is not None
            given = self._given.parameters
            with compat.without_modes(), torch._C.DisableTorchFunction():
                gradients = {n: g for n in updates.parts[part].names if (g := given[n].grad) is not None}
                for updater in updates.ops_of(part, gradients, self._rows(gradients)):
                    self._update(updater, given, gradients)

        def refuse(optimizer: Any) -> None:
            raise Unsupported(
                f"a hook on a parameter that steps a {type(optimizer).__name__}", "fit does not know that optimizer",
                "give fit all of them, as a list; or leave hooks out: a planned step updates each parameter "
                "as soon as its gradient is there",
            )  # fmt: skip

        with ExitStack() as stack:
            for k, part in enumerate(updates.parts if updates is not None else ()):
                stack.enter_context(compat.step_replaced(part.optimizer, partial(stepped, k)))
            stack.enter_context(compat.steps_seen(refuse))
            yield


def _check_held(held: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
    """Raises ``Unsupported`` where a hook has put something else in the place of a gradient that was added to."""
    for n, g in held.items():
        now = gradients.get(n)
        if now is None or compat.storage_key(now) != compat.storage_key(g):
            raise Unsupported(
                f"a hook on {n!r} that replaces or clears a gradient which earlier batches have added to",
                "a planned step adds to it where it lies", "change it in place (grad.mul_(…)), or clear it first",
            )  # fmt: skip


def shared_buffer(name: str) -> Unsupported:
    """The error for a buffer in whose place a step puts the bytes of a parameter, or of another buffer."""
    return Unsupported(
        f"a buffer that a step makes share bytes with {name!r}",
        "in eager it would follow every change of that",
        "put a copy there (clone())",
    )


def check_replaced(name: str, buffer: torch.Tensor, now: torch.Tensor | None) -> None:
    """Raises ``Unsupported`` for a buffer in whose place a step puts something that cannot be written back into it:
    later steps would find it otherwise than in eager."""
    if now is None or (now.shape, now.dtype, now.device) != (buffer.shape, buffer.dtype, buffer.device):
        what = "a tensor of another size or type"
    elif _strides(now) != _strides(buffer):
        what = f"a tensor with strides {tuple(now.stride())} instead of {tuple(buffer.stride())}"
    else:
        return
    raise Unsupported(
        f"the buffer {name!r}", f"the step replaces it by {what}",
        "write into it with copy_(), or run the model once before capturing it",
    )  # fmt: skip


def _strides(tensor: torch.Tensor) -> list[int]:
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def checked_leaf(x: Any) -> Any:
    """What may be handed back beside tensors; raises ``Unsupported`` for anything else."""
    if isinstance(x, _PLAIN):
        return x
    raise Unsupported(
        f"a {type(x).__name__} among the results of a step",
        "tensors inside it cannot be found",
        "return its tensors in lists, tuples, dicts or dataclasses",
    )


# --- steps that change what the next one does -----------------------------------------------------------------


def check_changes(changes: Sequence[Change], program: Program) -> None:
    """A tensor that the step reads and replaces would be read as it is now for ever."""
    for c in changes:
        if isinstance(c.old, torch.Tensor) and any(c.old is t for t in program.constants):
            raise Unsupported(
                f"the tensor {c}", "the step reads it and puts another in its place",
                "make it a buffer (register_buffer)",
            )  # fmt: skip


def _check_same(first: Program, second: Program, changes: Sequence[Change]) -> None:
    """What the model counts and keeps in plain attributes must make no difference to the next step's ops."""
    alike = (
        first.graph.digest == second.graph.digest
        and all(
            repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))
            for a, b in zip(first.calls, second.calls, strict=True)
        )
        and len(first.constants) == len(second.constants)
        and all(a is b or torch.equal(a, b) for a, b in zip(first.constants, second.constants, strict=True))
    )
    if not alike:
        names = ", ".join(str(c) for c in changes if c.is_plain)
        raise Unsupported(
            f"a step that changes {names}", "the next step would run other ops or with other numbers",
            "keep it in a buffer and compute with tensors, or run the model once before capturing it",
        )  # fmt: skip


def shared_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages in which several of the tensors lie."""
    count = Counter(
        compat.storage_key(t) for t in tensors if t.layout is torch.strided and not compat.is_fake(t)
    )
    return {s for s, n in count.items() if n > 1}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in flatten(tree) if isinstance(t, torch.Tensor)]
