"""A training loop run as it is, on tensors without data: which storages live when, as in eager.

The loop's own Python code, autograd and the optimizer run on fake tensors below a dispatch mode. A storage lives from
the op that makes it until nobody holds it any more, which a weak reference to it tells at once: Python's variables,
autograd's saved tensors, checkpoints and caches of autocast hold on to it for as long as they do in eager.

What differs under a dispatch mode is put right: autograd adds gradients in place where it alone holds the sum so far,
and does so out of place as soon as a mode looks on.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import (
    compat,
    compat_capture,
    compat_ddp,
    compat_distributed,
    compat_fully_shard,
    compat_inductor,
    compat_optimizers,
    compat_packed,
)
from tightship.frontends.torch.capture.life_tape import Kind, LifeTape
from tightship.frontends.torch.capture.looks import is_strided
from tightship.frontends.torch.capture.recorder import Recorder
from tightship.frontends.torch.capture.sparse import LoopSparse, parts_of
from tightship.frontends.torch.capture.state_restore import untouched
from tightship.frontends.torch.capture.step import Capture
from tightship.frontends.torch.capture.tape import Origin, check_plain, is_plain, source_line
from tightship.frontends.torch.optimizer.copy import random_untouched
from tightship.frontends.torch.optimizer.given import each, twin_of
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.structure import tensor_leaves

__all__ = ["EagerLoop", "Loop"]

_ITEM = torch.ops.aten._local_scalar_dense.default
_LIFT = torch.ops.aten.lift_fresh.default

_ATEN = torch.ops.aten
_SAVES_NUMBERS = (
    _ATEN.mul.Tensor, _ATEN.mul_.Tensor, _ATEN.div.Tensor, _ATEN.div_.Tensor, _ATEN.div.Tensor_mode,
    _ATEN.div_.Tensor_mode,
)  # fmt: skip
"""Ops that keep the tensor that a number of Python's becomes for their backward pass."""
_LIGHT = 1 << 24
"""Bytes up to which ops of a model without data are run on zeros to see what their results look like."""

Loop = Callable[[Any, Any, Any], Any]
"""One step of a loop: of the model, the batch and the optimizer (None without one). What it returns lives until the
next step has returned."""


class _LifeRecorder(Recorder):
    """A recorder of loops: what the code finds outside of model and batch was there before and stays, each storage
    once; but memory of others (an array of NumPy's) lives from its first use until nobody has a tensor on it."""

    splits = False  # eager holds what both gradients read and make together
    functional = False
    tape: LifeTape
    sparse: LoopSparse

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._borrowed: dict[int, Any] = {}
        self.sparse = LoopSparse(self, self._fake, self.contents)

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn is _LIFT and not compat.is_fake(args[0]):
            out = fn(*args)
            self.tape.lifted(out, args[0])
            return out
        if self.phase == "backward":
            self.tape.node_runs(compat.backward_sequence())
        if self.sparse.concerns(fn, args, kwargs):
            return self._on_sparse(fn, args, kwargs or {})
        saves = fn in _SAVES_NUMBERS and torch.is_grad_enabled() and _requires_grad(args[0])
        saves = saves and not isinstance(args[1], torch.Tensor)
        node = compat.forward_sequence() if saves else -1
        try:
            out = super().__torch_dispatch__(fn, types, args, kwargs)
        except Unplannable:
            if fn is not _ITEM or not args[0].is_floating_point():
                raise
            self.tape.unread.append(self._tracker.here())
            return 1.0  # a number for a log, or for arithmetic: no bytes follow from it but by a comparison
        if saves:
            self.tape.number_saved(node)
        return out

    def _on_sparse(self, fn: Any, args: Any, kwargs: Any) -> Any:
        found = self.sparse.asks(fn, args, kwargs)
        if found is not NotImplemented:
            return found
        call, made, returned = self.sparse.run(fn, args, kwargs)
        self.tape.emulated(call, str(fn), lambda: made, phase=self.phase, origin=self._tracker.here())
        return returned()

    def _faked(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or compat.is_fake(x):
            return x
        if x.layout in (torch.strided, torch._mkldnn) and not is_plain(x, own_class=True):
            check_plain(x, str(self._tracker.here()))
        self._check_foreign(x)
        if x.requires_grad or not is_strided(x):
            fake = self._fake.from_tensor(x)
            self._constants.append(fake)
            self.tape.given(fake, x)
            return fake
        fake, key = self.in_storage(x), compat.storage_key(x)
        if compat.is_borrowed(x) and x.nbytes <= _LIGHT:
            self.tape.lifted(fake, x)
            if key not in self._borrowed:
                self._borrowed[key] = weakref.ref(x.untyped_storage(), partial(self._given_back, key))
        else:
            self.tape.given(fake, x)
        return fake

    def _given_back(self, key: int, _: object) -> None:
        """Memory of others has nobody left who reads it as a tensor."""
        del self._borrowed[key]
        del self._storages[key]

    def loop_over(self) -> None:
        """The loop has returned for the last time: what of others' memory is still there was there before."""
        for key in self._borrowed:
            self.tape.was_there(self._storages[key])


class _CompiledRecorder(_LifeRecorder):
    """A recorder of loops in which something is compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compilers do their work below it, unseen."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(fn, types, args, kwargs)


@contextmanager
def _without_numpy() -> Iterator[None]:
    """Code that hands contents to NumPy (a matcher of objects, say) decides by what only a real step has."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "numpy()" not in str(error):
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        where = source_line(frame)
        raise Unsupported(
            f"a tensor of the loop given to NumPy{f' at {where}' if where else ''}",
            "its contents are there only when the loop really runs",
            "estimate the model without that part, or measure a real step",
        ) from error


def _requires_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


class EagerLoop(Capture):
    """``run`` runs a loop on stand-ins of model, batch and optimizer; ``tape`` then has its ops, ``tape.events`` when
    they ran and which storages lived when, and ``tape.lives`` what is known of each of these.

    ``device`` is where tensors on the meta device are to be thought of; ``with_data``: there are none of these.
    ``compiled``: the loop has something that ``torch.compile`` makes.
    Model, gradients, optimizer and random states stay as they are.
    """

    own_classes = True
    tape: LifeTape
    recorder: _LifeRecorder

    def __init__(
        self, model: torch.nn.Module, batch: Any, device: str | None = None, *, compiled: bool = False
    ) -> None:
        super().__init__(model, batch, "loop", device)
        self.tape = LifeTape()
        recorder = _CompiledRecorder if compiled else _LifeRecorder
        self.recorder = recorder(self.tape, self.mode, self.tracker)
        self.readers = compat_packed.DataReaders(self.recorder.contents)
        self.with_data = self.has_data
        self._homes: dict[int, str] = {}
        self._given_batch = self._shared_in(batch)
        if not self.has_data:
            self.recorder.prober.limit = _LIGHT
        self.has_data = (
            True  # what has some may be asked for it, and transformers' code runs as on tensors with data
        )

    def _shared_in(self, batch: Any) -> dict[int, int]:
        """How many of a batch's bytes lie in each storage where several of its tensors lie, up to all of them."""
        found: dict[int, list[torch.Tensor]] = {}
        for t in tensors_in(tensor_leaves(batch)):
            if not (compat.is_fake(t) or t.is_meta) and is_strided(t):
                found.setdefault(compat.storage_key(t), []).append(t)
        return {s: sum(t.nbytes for t in some) for s, some in found.items() if len(some) > 1}

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        part = compat_distributed.own_part(real)
        if part is real:
            return super()._fake(real)
        fake = compat_distributed.with_own_part(real, super()._fake(part))
        return compat.as_parameter(fake, real.requires_grad) if isinstance(real, torch.nn.Parameter) else fake

    def _of_batch(self, real: torch.Tensor) -> torch.Tensor:
        """Tensors of one storage share their bytes here, too, where these are not mostly those of others."""
        key = None if real.is_meta or compat.is_fake(real) else compat.storage_key(real)
        read = self._given_batch.get(key, 0) if key is not None else 0
        return (
            self.recorder.in_storage(real) if real.untyped_storage().nbytes() <= read else self._blank(real)
        )

    def run(
        self, loop: Loop, optimizer: Any, steps: int, *, foreach: bool = False, backend: Any = None
    ) -> None:
        """Runs ``steps`` steps of ``loop``. ``foreach``: the optimizer's default, as on a GPU; ``backend``: what
        compiles the model (``torch.compile``), if anything does."""
        grown = compat_capture.GrownCaches()
        with ExitStack() as stack:
            enter = stack.enter_context
            stack.callback(grown.empty)
            stack.callback(self.tape.forget)
            enter(random_untouched())
            enter(untouched(self.model, self.changes, frozen=False))
            watch = enter(ExitStack())
            watch.enter_context(self._watching())
            enter(compat_capture.quiet_engine())
            self.tape.there = "batch"
            fakes = self._fakes()
            self.tape.there = ""
            for s, slot in enumerate(self.tape.storages):
                self.tape.lives[s].role = slot.role
            self._give_gradients(fakes.parameters)
            self._homes = {id(p): n.rpartition(".")[0] for n, p in fakes.parameters.items()}
            twin = self._twin(optimizer, fakes.parameters)
            for one in each(twin) if foreach and twin is not None else ():
                _as_on_gpu(one)
            enter(self.mode)
            enter(self.recorder)
            enter(self._swapped(fakes))
            self.tape.there = "parameter"
            enter(compat_fully_shard.sharding_stand_ins(self.model))
            self.tape.there = ""
            if compat_distributed.distributed_by(self.model):
                enter(compat_distributed.captured_alike())
            enter(compat_capture.resizes_seen(self.tape.resized))
            enter(compat_ddp.sending_nothing(self.model))
            if backend is not None:
                enter(self._compiled(backend, watch))
            enter(self._stepping(twin))
            enter(compat_capture.inside_backward(self._in_backward, self.tape.node_ran))
            enter(_without_numpy())
            result = None
            for k in range(steps):
                self.tape.events.append((Kind.STEP, k))
                result = loop(self.model, fakes.batch, twin)
                self.tape.step_over()
                self._gradients_of(fakes.parameters)
                self._states_of(twin)
            self.recorder.loop_over()
            self.tape.forget()
            del result, twin

    def add_buckets(self, buckets: compat_ddp.Buckets) -> None:
        """What DistributedDataParallel sends gradients in is there all along, and holds these if they are views."""
        origin = Origin("", "buckets of DistributedDataParallel")
        for nbytes in buckets.sizes:
            self.tape.reserved(nbytes, next((s.device for s in self.tape.storages), "cpu"), origin)
        if buckets.views:
            for storage, life in zip(self.tape.storages, self.tape.lives, strict=True):
                if life.role == "gradient":
                    storage.nbytes = 0

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """What of PyTorch is different while the loop's own Python code runs."""
        with (
            compat_capture.python_for_stand_ins(has_data=True, checkpoints=True),
            compat_capture.random_states_seen(self.tape.value),
            compat_capture.recomputations_seen(self.tape.recompute_begins, self.tape.recompute_ends),
            self.readers.active(),
            self.tracker.active(),
        ):
            yield

    @contextmanager
    def _compiled(self, backend: Any, watch: ExitStack) -> Iterator[None]:
        """Calls of the model are calls of what ``backend`` makes of it; nothing of PyTorch is different meanwhile."""
        graphs: list[Any] = []

        def compiling(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return backend(graph, inputs)

        with compat_inductor.compiled_calls(self.model, compiling) as call:

            def unwatched(*args: Any, **kwargs: Any) -> Any:
                watch.close()
                try:
                    return call(*args, **kwargs)
                finally:
                    watch.enter_context(self._watching())
                    if graphs:  # Dynamo holds what the code has made until its own cycles are collected
                        graphs.clear()
                        gc.collect()

            self.model._compiled_call_impl = unwatched  # type: ignore[assignment]
            yield

    def _give_gradients(self, parameters: dict[str, torch.Tensor]) -> None:
        """The stand-ins of parameters that have gradients get some, which nobody else holds."""
        held = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        self.tape.there = "gradient"
        for n, g in self._held(held).items():
            parameters[n].grad = g
        self.tape.there = ""

    # --- the optimizer ---

    def _twin(self, optimizer: Any, parameters: dict[str, torch.Tensor]) -> Any:
        """The optimizer on stand-ins, with stand-ins for the state that it has."""
        if optimizer is None:
            return None
        others = {id(p): parameters[n] for n, p in self.parameters.items()}
        foreign = [
            p for o in each(optimizer) for g in o.param_groups for p in g["params"] if id(p) not in others
        ]
        if foreign:
            shape = tuple(foreign[0].shape)
            raise Unsupported(
                f"an optimizer with a parameter of shape {shape} that is not the model's",
                "its gradient does not come from this model", "make the optimizer of model.parameters()",
            )  # fmt: skip
        twin = twin_of(optimizer, others)
        self.tape.there = "state"
        for one in each(twin):
            for p, state in one.state.items():
                one.state[p] = (
                    {k: self._state_like(x) for k, x in state.items()} if isinstance(state, dict) else state
                )
        self.tape.there = ""
        return twin

    def _state_like(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        fake = self._blank(x) if compat_distributed.own_part(x) is x else self._fake(x)
        if x.numel() > 1 or x.is_meta or compat.is_fake(x):
            self.tape.value(fake)
        else:  # a counter, whose number decides what a step does
            self.tape.lifted(fake, x)
        return fake

    @contextmanager
    def _stepping(self, twin: Any) -> Iterator[None]:
        """Ops of the optimizer's step are known as such."""
        with ExitStack() as stack:
            for one in each(twin) if twin is not None else ():
                before = one.step

                def step(*args: Any, _step: Any = before, **kwargs: Any) -> Any:
                    with self.recorder.in_phase("update"), self._here():
                        return _step(*args, **kwargs)

                stack.enter_context(compat_optimizers.step_called(one, step))
            yield

    @contextmanager
    def _here(self) -> Iterator[None]:
        before, self.tracker.place = self.tracker.place, Origin("optimizer", "")
        try:
            yield
        finally:
            self.tracker.place = before

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        with self.recorder.in_phase("backward"):
            yield
        self._gradients_of(dict(self.model.named_parameters()))

    # --- what storages are ---

    def _gradients_of(self, parameters: dict[str, torch.Tensor]) -> None:
        for n, p in parameters.items():
            for t in () if p.grad is None else parts_of(p.grad):
                life = self.tape.lives[self.tape.storage(self.tape.value(t))]
                if not life.role or life.role == "gradient":
                    life.role, life.origin = "gradient", Origin(n.rpartition(".")[0], "")

    def _states_of(self, twin: Any) -> None:
        for one in each(twin) if twin is not None else ():
            for p, state in one.state.items():
                held = tensors_in(list(state.values()) if isinstance(state, dict) else [])
                for t in (part for whole in held for part in parts_of(whole)):
                    if self.tape.knows(t):
                        life = self.tape.lives[self.tape.storage(self.tape.value(t))]
                        life.role = life.role or "state"
                        life.origin = Origin(self._homes.get(id(p), ""), "")


def _as_on_gpu(optimizer: Any) -> None:
    """torch's optimizers step all parameters together on a GPU where nobody says otherwise."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not (group.get("fused") or group.get("differentiable")):
            group["foreach"] = True
