"""Capture a training step, or a model's forward and backward pass, as a Program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.frontends.torch import compat, compat_capture
from tightship.frontends.torch.capture.lower import finish
from tightship.frontends.torch.capture.recorder import Recorder
from tightship.frontends.torch.capture.state_restore import Change, applied, untouched
from tightship.frontends.torch.capture.tape import Origin, Tape, Tracker
from tightship.frontends.torch.optimizer.updates import Updater, Updates, updaters
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
    "StepCapture",
    "capture_forward",
    "capture_loss",
    "capture_step",
    "check_changes",
    "check_hooks",
    "check_model",
    "checked_leaf",
    "module_of",
    "replaced_buffer",
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
    optimizer: torch.optim.Optimizer | None,
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
    capture = _Capture(model, batch, name)
    program = capture.step(loss, optimizer)
    check_changes(capture.changes, program)
    if any(c.is_plain for c in capture.changes):
        with applied(capture.changes):
            second = _Capture(model, batch, name).step(loss, optimizer)
        _check_same(program, second, capture.changes)
    return program


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
        return _Capture(model, sample, name, device).step(summed_output, None)
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
        return _Capture(model, sample, name, device).forward()
    finally:
        for m, was in modes:
            m.training = was


# --- what is captured -----------------------------------------------------------------------------------------


def check_model(model: Any) -> None:
    compat.require_torch()
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"object of type {type(model).__name__}; give a torch.nn.Module", place="model")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise Unsupported(
            "a model in DistributedDataParallel", "its hooks run outside the step",
            f"{DATA_PARALLEL}; for a forward pass, give its .module",
        )  # fmt: skip
    check_hooks(model.named_parameters(), model.modules())


def check_hooks(parameters: Iterable[tuple[str, torch.Tensor]], modules: Iterable[torch.nn.Module]) -> None:
    """Raises ``Unsupported`` for hooks on parameters and for backward hooks of modules, which the captured backward
    pass would not run."""
    if compat.backward_hooks(modules):
        raise Unsupported(
            "a backward hook on a module", "the captured backward pass does not run hooks",
            "remove it, or hook the tensor in the step (tensor.register_hook)",
        )  # fmt: skip
    for n, p in parameters:
        if compat.gradient_hooks(p):
            raise Unsupported(
                f"a hook on the parameter {n!r}", "captured gradients do not run hooks", "remove it"
            )


# --- the capture ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fakes:
    """The fake stand-ins of what the caller owns, by qualified name; ``real`` of the same names."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    batch: Any


class _Capture:
    def __init__(self, model: torch.nn.Module, batch: Any, name: str, device: str | None = None) -> None:
        self.model, self.batch, self.name = model, batch, name
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        tensors = [*self.parameters.values(), *self.buffers.values(), *_tensors(batch)]
        self.has_data = not any(compat.is_fake(t) or t.is_meta for t in tensors)
        self.mode = compat.fake_mode_of(tensors) or compat.fake_mode()
        self.device = compat.thinkable(device or "cpu")
        self.tape = Tape()
        self.tracker = Tracker({m: n for n, m in model.named_modules()})
        self.recorder = Recorder(self.tape, self.mode, self.tracker)
        self.changes: list[Change] = []

    def step(self, loss_fn: LossFn, optimizer: torch.optim.Optimizer | None) -> Program:
        updates, wanted = self._wanted(optimizer)
        quiet = compat_capture.quiet_capture(has_data=self.has_data)
        with untouched(self.model, self.changes), quiet, torch.enable_grad():
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

    def _wanted(self, optimizer: torch.optim.Optimizer | None) -> tuple[Updates | None, list[str]]:
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
        self, updates: Updates | None, fakes: _Fakes, gradients: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """Takes down the optimizer's step; returns what a user should know of it."""
        if updates is None:
            return ()
        for updater in updates.ops(gradients):
            self._update(updater, fakes.parameters, gradients)
        return updates.notes

    def forward(self) -> Program:
        self.tape.grad = False
        quiet = compat_capture.quiet_capture(has_data=self.has_data)
        with untouched(self.model, self.changes), quiet, torch.no_grad():
            fakes = self._fakes()
            with self.mode, self.recorder, self.tracker.active(), self._swapped(fakes):
                out = called(self.model, fakes.batch)
                self._rebound(fakes)
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
            with self.tracker.active(), self._swapped(fakes):
                out = loss_fn(self.model, fakes.batch)
                self._rebound(fakes)
            loss = checked_loss(out)
            results = self._results(out)
            return results, self._gradients(loss, wanted, leaves)

    def _gradients(
        self, loss: torch.Tensor, wanted: Sequence[str], leaves: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        with self.recorder.in_phase("backward"):
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

    def _name_gradient(self, name: str, grad: torch.Tensor) -> None:
        s = self.tape.storages[self.tape.storage(self.tape.value(grad, f"the gradient of {name}"))]
        if not s.role and not s.name:
            s.name = f"{name}.grad"

    # --- what the caller owns ---

    def _fakes(self) -> _Fakes:
        """Fakes of parameters, buffers and batch, each an input of the tape. Equal objects give one fake."""
        made: dict[int, torch.Tensor] = {}
        own = {id(t): t for t in (*self.parameters.values(), *self.buffers.values())}
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
            k = next(position)
            if not isinstance(x, torch.Tensor):
                return x
            # One fake per leaf, even if two are the same tensor: in the next batch they may not be.
            fake = self._blank(x).requires_grad_(x.requires_grad)
            self.tape.input(fake, "input", k, f"batch.{k}", x if self.has_data else None)
            return fake

        return _Fakes(parameters, buffers, map_leaves(leaf, self.batch))

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        if compat.is_fake(real):
            fake = real.detach()
        elif real.is_meta:
            fake = self._blank(real)
        else:
            whole = is_whole(real) and compat.storage_key(real) not in self._shared
            fake = self._blank(real) if whole else self.mode.from_tensor(real.detach())
        if isinstance(real, torch.nn.Parameter):
            fake = compat.as_parameter(fake, real.requires_grad)
        return fake

    def _blank(self, real: torch.Tensor) -> torch.Tensor:
        device = torch.device(self.device) if real.is_meta else real.device
        return compat.blank_like(self.mode, tuple(real.shape), real.stride(), 0, real.dtype, device)

    @contextmanager
    def _swapped(self, fakes: _Fakes) -> Iterator[None]:
        with compat_capture.reparametrized(self.model, {**fakes.parameters, **fakes.buffers}):
            yield

    def _rebound(self, fakes: _Fakes) -> None:
        """A buffer that was replaced by a new tensor is written back, which is what the next step would read."""
        for n, b in self.model.named_buffers():
            fake = fakes.buffers.get(n)
            if fake is None or b is fake:
                continue
            if (b.shape, b.dtype, b.device) != (fake.shape, fake.dtype, fake.device):
                raise replaced_buffer(n)
            with torch.no_grad():
                fake.copy_(b)

    # --- updates ---

    def _update(
        self, updater: Updater, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> None:
        read: list[int] = []
        written: list[int] = []
        for m in updater.members:
            state = [self._blank(t) for t in m.state_like]
            values = [
                self.tape.input(t, "state", (m.name, k), f"{m.name}.{k}")
                for k, t in zip(m.state_keys, state, strict=True)
            ]
            p, g = self.tape.value(parameters[m.name]), self.tape.value(gradients[m.name])
            read += [p, g, *values]
            written += [p, *([g] if updater.writes_gradients else ()), *values]
        target = f"optimizer.{type(updater.optimizer).__name__}"
        r = self.tape.call(updater, target, tuple(read), tuple(written))
        params = [parameters[m.name] for m in updater.members]
        r.phase, r.device, r.flops = "update", str(params[0].device), sum(p.numel() for p in params)
        if len(params) == 1:
            r.origin = Origin(updater.name.rpartition(".")[0], "")


class StepCapture(_Capture):
    """Captures a step whose calls come one by one, as `Execution` makes them: ``program`` when all are made."""

    def __init__(self, model: torch.nn.Module, batch: Any, name: str) -> None:
        super().__init__(model, batch, name)
        self._given = self._fakes()

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
        with self.mode, self.recorder:
            yield

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

    def resume(self) -> None:
        self.tracker.resume()

    def random_calls(self) -> set[int]:
        """The numbers of the calls that draw random numbers."""
        return {r.asked for r in self.tape.records if r.random}

    def program(
        self, loss: torch.Tensor, results: Sequence[torch.Tensor], spec: Results,
        updates: Updates, notes: Sequence[str],
    ) -> Program:  # fmt: skip
        """The program of the calls made and of the backward pass and update that follow them."""
        wanted = updates.names if self._trained() else ()
        leaves = [self._given.parameters[n] for n in wanted]
        self.asking(-1)
        with torch.enable_grad(), self.executing():
            values = [self.tape.value(t) for t in (*results, loss)]
            gradients = self._gradients(loss, wanted, leaves)
        notes = [*notes, *self._updated(updates, self._given, gradients)]
        return finish(
            self.tape, values[:-1], result_spec=spec, name=self.name, guards=self.recorder.guards,
            batch=BatchSpec.of(self.batch), notes=notes, losses=values[-1:], sums=True,
        )  # fmt: skip


def replaced_buffer(name: str) -> Unsupported:
    """The error for a buffer in whose place a step puts something that cannot be written back into it."""
    return Unsupported(
        f"the buffer {name!r}",
        "the step replaces it by a tensor of another size or type",
        "write into it with copy_(), or run the model once before capturing it",
    )


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


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is all of its storage, so that its shape and strides say everything."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.storage_offset():
        return False
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    extent = last + 1 if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() == extent * tensor.itemsize


def shared_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages in which several of the tensors lie."""
    count = Counter(
        compat.storage_key(t) for t in tensors if t.layout is torch.strided and not compat.is_fake(t)
    )
    return {s for s, n in count.items() if n > 1}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in flatten(tree) if isinstance(t, torch.Tensor)]
