"""Capture a training step, or a model's forward and backward pass, as a Program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.frontends.torch import (
    compat,
    compat_capture,
    compat_distributed,
    compat_optimizers,
    compat_packed,
)
from tightship.frontends.torch.capture.checks import (
    check_changes,
    check_model,
    check_replaced,
    check_same,
    checked_leaf,
    shared_buffer,
    shared_storages,
)
from tightship.frontends.torch.capture.looks import is_strided, is_whole
from tightship.frontends.torch.capture.lower import finish
from tightship.frontends.torch.capture.recorder import Recorder
from tightship.frontends.torch.capture.replaced_data import ReplacedData
from tightship.frontends.torch.capture.state_restore import Change, applied, untouched
from tightship.frontends.torch.capture.tape import Origin, Tape, Tracker, check_plain, is_plain
from tightship.frontends.torch.optimizer.copy import Rows
from tightship.frontends.torch.optimizer.given import Several, as_one
from tightship.frontends.torch.optimizer.updates import Member, SeveralUpdates, Updater, Updates, updaters
from tightship.frontends.torch.program import Program, Ref
from tightship.frontends.torch.python_state import python_state_kept
from tightship.frontends.torch.refusals import heeded
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
    "Capture",
    "capture_forward",
    "capture_loss",
    "capture_step",
    "capture_update",
    "module_of",
    "tensors_of",
]


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
        check_same(program, second, capture.changes)
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


# --- the capture ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fakes:
    """The fake stand-ins of what the caller owns, by qualified name; ``real`` of the same names."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    batch: Any


class Capture:
    own_classes = False
    """Whether tensors of the batch are taken for plain ones whatever their class makes of ops."""

    def __init__(self, model: torch.nn.Module, batch: Any, name: str, device: str | None = None) -> None:
        self.model, self.batch, self.name = model, batch, name
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        tensors = [*self.parameters.values(), *self.buffers.values(), *tensors_of(batch)]
        self.has_data = not any(compat.is_fake(t) or t.is_meta for t in tensors)
        self.mode = compat.fake_mode_of(tensors) or compat.fake_mode()
        self.device = compat.thinkable(device or "cpu")
        self.tape = Tape()
        self.tape.repeats = compat_distributed.imagined_ranks()  # all of which would run the same plan
        self.tracker = Tracker({m: n for n, m in model.named_modules()})
        self.recorder = Recorder(self.tape, self.mode, self.tracker)
        self.readers = compat_packed.DataReaders(self.recorder.contents)
        self.changes: list[Change] = []
        self.ordered = False  # whether to note when gradients are there
        self.ready: list[str] = []
        self._state_values: dict[Any, int] = {}
        self._differentiable: dict[torch.Tensor, torch.Tensor] = {}  # tensors of the batch, by stand-in
        self.inside: Callable[[], AbstractContextManager[Any]] = (
            nullcontext  # around code of the backward pass
        )

    def step(self, loss_fn: LossFn, optimizer: torch.optim.Optimizer | Several | None) -> Program:
        updates, wanted = self._wanted(optimizer)
        quiet = compat_capture.quiet_capture(has_data=self.has_data)
        outside = compat_distributed.captured_alike()
        kept = python_state_kept(self.batch)
        with untouched(self.model, self.changes), kept, quiet, outside, torch.enable_grad():
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
        with untouched(self.model, self.changes), python_state_kept(self.batch), quiet, torch.no_grad():
            fakes = self._fakes()
            with self.mode, self.recorder, self.readers.active(), self.tracker.active(), self._swapped(fakes):
                with heeded():
                    out = called(self.model, fakes.batch)
                replaced = ReplacedData(self.tape, self.mode)
                self._write_back(replaced.taken(self._replaced(fakes)), fakes)
        given = caches(fakes.batch)
        spec, values = Results.of_refs(self._results(out, given), [self._results(c) for c in given])
        if not values:
            raise BadInput(f"no tensor in the output of type {type(out).__name__}", place="model")
        extra = replaced.extra()
        handed_back = [*values, *extra]
        program = finish(
            self.tape, handed_back, result_spec=spec, name=self.name, guards=self.recorder.guards,
            batch=BatchSpec.of(self.batch), losses=values,
        )  # fmt: skip
        return replace(program, apart=replaced.apart(handed_back, program.slots), extra=len(extra))

    def _run(self, loss_fn: LossFn, fakes: _Fakes, wanted: list[str]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Forward and backward on the fakes: what the loss function returned (as ``Ref``s), and the gradients."""
        leaves = [fakes.parameters[n] for n in wanted]
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            stack.enter_context(self.recorder)
            stack.enter_context(self.readers.active())
            with self.tracker.active(), self._swapped(fakes):
                with heeded():
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
        ordered = dict(zip(wanted, leaves, strict=True)) if self.ordered else {}
        with (
            self.recorder.in_phase("backward"),
            compat_capture.inside_backward(self.inside),
            compat_optimizers.ready_order(ordered) as self.ready,
        ):
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
        self._shared = shared_storages(map(compat_distributed.own_part, own.values()))

        def fake_of(real: torch.Tensor, role: str, key: Any, name: str) -> torch.Tensor:
            if id(real) not in made:
                own = not self.own_classes and compat.has_own_functions(type(real))
                if own or real.layout is not torch.strided:
                    check_plain(real, f"{role} {name}")
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
            if not is_plain(x, own_class=self.own_classes):  # refused where it is read
                return x
            # One fake per leaf, even if two are the same tensor: in the next batch they may not be.
            fake = self._of_batch(x).requires_grad_(x.requires_grad)
            self.tape.input(fake, "input", k, f"batch.{k}", x if self.has_data else None)
            if x.requires_grad:
                self._differentiable[fake] = x
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


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among its leaves."""
    return [t for t in flatten(tree) if isinstance(t, torch.Tensor)]
