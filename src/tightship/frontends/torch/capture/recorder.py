"""Recorder: takes down the ATen ops of a program that runs on fake tensors, below autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import compat, compat_capture, compat_distributed, compat_ops
from tightship.frontends.torch.capture.data_guards import Guard, Questions
from tightship.frontends.torch.capture.forms import made_of
from tightship.frontends.torch.capture.looks import Prober, is_laid_out, is_strided, is_whole
from tightship.frontends.torch.capture.random_state import drawn
from tightship.frontends.torch.capture.sent_in_place import functional
from tightship.frontends.torch.capture.slices import READS_DATA
from tightship.frontends.torch.capture.sparse import SparseGradients
from tightship.frontends.torch.capture.tape import Origin, Record, Tape, Tracker, check_plain, is_plain
from tightship.frontends.torch.program import map_tree, tensors_in
from tightship.frontends.torch.refusals import told

__all__ = ["Recorder"]

_CONTENTS = torch.ops.aten._local_scalar_dense.default
_ALLCLOSE = torch.ops.aten.allclose.default
_BINCOUNT = torch.ops.aten.bincount.default
_DEVICE = torch.ops.prim.device.default
_EMPTY_LIKE, _EMPTY_PERMUTED = torch.ops.aten.empty_like.default, torch.ops.aten.empty_permuted.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


class Recorder(compat.TorchDispatchMode):
    """Dispatch mode that fills ``tape``; enter it above a fake mode.

    Raises ``Unsupported``, with op, module and source line, where the program depends on data it does not have.
    """

    splits = True
    """Whether gradients that kernels of their own compute are ops of their own."""
    functional = True
    """Whether collectives that write to what they are given become those that return what they make."""

    def __init__(self, tape: Tape, fake: Any, tracker: Tracker) -> None:
        super().__init__()
        self.tape = tape
        self.phase = "forward"
        self.questions = Questions(tape)
        self._fake = fake
        self.prober = Prober(fake)
        self.sparse = SparseGradients(self)
        self._tracker = tracker
        self.asked = -1  # the number of the torch function's call being made
        self._asked_by_sequence: dict[int, int] = {}
        self.refusal: Unsupported | None = None  # the last one, which TorchScript makes an error of its own
        # Who owns bytes that belong to the model, found when first needed.
        self._owners: dict[int, tuple[str, Any]] | None = None
        # The fake mode knows a real tensor again only while its fake is there.
        self._constants: list[torch.Tensor] = []
        self._storages: dict[int, torch.Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a step is captured; to say so at every op takes time

    @property
    def guards(self) -> list[Guard]:
        """What must be true of the data for the recorded ops to be the right ones."""
        return self.questions.guards

    @contextmanager
    def in_phase(self, phase: str) -> Any:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(compat_distributed.is_distributed(kind) for kind in types):
            return NotImplemented  # the ops that it makes of this one, on each rank's own part, come here
        if any(compat.is_own_class(kind) for kind in types):
            self._check_plain((args, kwargs))
        if fn is _DEVICE and compat.is_fake(args[0]):  # autograd asks this several times an op
            return compat.device_of_fake(args[0])
        if self.functional and (out := self._sent(fn, args)) is not NotImplemented:
            return out
        kwargs = kwargs or {}
        if fn.namespace in ("prim", "profiler") or not hasattr(fn, "_schema"):
            return fn(*args, **kwargs)
        if fn._schema.name == "aten::lift_fresh" and not compat.is_fake(args[0]):
            out = fn(*args)
            self.tape.constant(out, args[0])
            return out
        if fn in compat_ops.LAZY_BITS:
            with self:  # the bits are not part of the bytes; do now what they put off
                return compat_ops.LAZY_BITS[fn](*args)
        if fn is _ALLCLOSE:
            with self, torch._C.DisableTorchFunction():
                close = torch.ops.aten.all.default(torch.ops.aten.isclose.default(*args, **kwargs))
                return torch.ops.aten._local_scalar_dense.default(close)
        if fn in compat_ops.SCATTERS:
            with self, torch._C.DisableTorchFunction():
                return compat_ops.scattered(fn, *args, **kwargs)
        if (mask := compat_ops.filled_by_mask(fn, args, kwargs)) is not None:
            with self:
                own = args[0] if fn._schema.is_mutable else torch.ops.aten.clone.default(args[0])
                return torch.ops.aten.masked_fill_.Tensor(own, mask, torch.ops.aten.view.default(args[2], []))
        if compat_ops.is_composite(fn, _device(args)):
            return self._decomposed(fn, args, kwargs)
        if self.phase == "backward" and (out := self.sparse.instead(fn, args, kwargs)) is not NotImplemented:
            return out
        if fn is _CONVOLUTION_BACKWARD and self.splits and all(args[-1][:2]):
            return self._one_gradient_each(args)
        if compat_ops.resizes_nothing(fn, args):
            return args[0]
        if fn is _EMPTY_LIKE and (out := self._of_form(args, kwargs)) is not None:
            return out
        with torch._C.DisableTorchFunction():  # what is asked of tensors here is no code of the step's
            return self._recorded(fn, args, kwargs)

    def _one_gradient_each(self, args: Any) -> Any:
        """A convolution's gradient that goes on, and by an op of its own that of its weights: PyTorch computes them
        by two kernels one after the other, so that the numbers are the same, and each can run when there is room."""
        *rest, (_, weights, bias) = args
        with self:
            onward, _, _ = _CONVOLUTION_BACKWARD(*rest, [True, False, False])
            return (onward, *_CONVOLUTION_BACKWARD(*rest, [False, weights, bias])[1:])

    def _sent(self, fn: Any, args: Any) -> Any:
        """What a collective in place returns; ``NotImplemented`` for other ops."""
        if fn.namespace != "c10d":
            return NotImplemented
        before, self.tape.sends = self.tape.sends, True
        try:
            with self:
                return functional(fn, args)
        finally:
            self.tape.sends = before

    def _of_form(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Memory of the form that a tensor has, by an op that doesn't read the tensor: its bytes need not be there
        for a dropout mask to be drawn again. None where no such op makes these strides."""
        if not is_laid_out(args[0]) or kwargs.get("layout") not in (None, torch.strided):
            return None
        with compat.without_modes(), self._fake:
            form = _EMPTY_LIKE(self._faked(args[0]), *args[1:], **kwargs)
        order = sorted(range(form.dim()), key=lambda d: -form.stride(d))
        if form.stride() != _strides(form.shape, order):
            return None
        more = {"dtype": form.dtype, "device": form.device, "pin_memory": kwargs.get("pin_memory")}
        with self:
            return _EMPTY_PERMUTED(form.size(), order, **more)

    def _recorded(self, fn: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        origin = self._tracker.forward() if self.phase == "forward" else self._tracker.backward()
        asked = self._asked()
        args, kwargs = map_tree(self._faked, args), map_tree(self._faked, kwargs)
        taken, taken_kw = self.tape.refs(args, str(origin)), self.tape.refs(kwargs, str(origin))
        if fn._schema.name in READS_DATA:
            try:
                return self.questions.value(fn, taken, origin, self.phase)
            except Unsupported as no:
                told(no)
                raise
        if kwargs.get("generator") is not None:
            raise told(Unplannable(
                f"{fn} at {origin} with a generator", "the step draws from torch's own random state alone",
                "leave generator out",
            ))  # fmt: skip
        if compat_ops.grows_statistics(fn, args):
            raise told(Unplannable(
                f"{fn} at {origin} on statistics without a size", "it gives them one in its first run",
                "run the model once on a batch before fit (in training mode), then steps are planned",
            ))  # fmt: skip
        if compat_capture.draws_anew() and compat_ops.is_random(fn, args, kwargs):
            raise told(Unplannable(
                f"{fn} at {origin} in a checkpoint with preserve_rng_state=False",
                "eager draws other numbers when it recomputes", "leave preserve_rng_state=False out",
            ))  # fmt: skip
        try:
            out = self._run(fn, args, kwargs, origin)
        except compat.DATA_ERRORS:
            try:
                out = made_of(self.questions.shapes(fn, taken, taken_kw, origin))
            except Unplannable:
                out = self._counts(fn, args, kwargs)
                if out is None:
                    raise
        flops = compat_ops.flops_of(fn, args, kwargs, out)
        samples = self.questions.samples(fn, taken, taken_kw, origin)
        record = self.tape.record(fn, taken, taken_kw, out, phase=self.phase, origin=origin, flops=flops)
        if record is not None:
            record.asked = asked
            record.samples = samples
            if record.random:
                drawn()
        if record is not None and self.phase == "backward" and not origin.module:
            record.origin = self._inherited(record)
        return out

    def _counts(self, fn: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``bincount`` makes with a ``minlength`` that, to be asked, all numbers are below; None otherwise."""
        least = compat_ops.argument(fn, args, kwargs, "minlength") if fn is _BINCOUNT else 0
        if not least:
            return None
        with self:
            below = torch.ops.aten.all.default(torch.ops.aten.lt.Scalar(args[0], least))
            if not torch.ops.aten._local_scalar_dense.default(below):
                return None
        weights = compat_ops.argument(fn, args, kwargs, "weights")
        kinds = {None: torch.int64, torch.float32: torch.float32}
        dtype = kinds.get(None if weights is None else weights.dtype, torch.float64)
        with compat.without_modes(), self._fake:
            return torch.empty(least, dtype=dtype, device=args[0].device)

    def contents(self, tensor: torch.Tensor, fn: Any) -> torch.Tensor:
        """The data of a tensor on which the ops to come depend, read for ``fn`` and guarded."""
        origin = self._tracker.here()
        return self.questions.contents(self.tape.value(self.fake_of(tensor)), fn, origin)

    def looked_at(self, tensor: torch.Tensor) -> torch.Tensor:
        """The data of a tensor that the step's code looks at."""
        value = self.tape.value(self.fake_of(tensor))
        graph = compat.graph_shown(tensor)
        return self.questions.looked_at(value, _CONTENTS, self._tracker.here(), graph)

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor that may be a constant of the program."""
        with compat.without_modes():
            fake: torch.Tensor = self._faked(tensor)
        return fake

    def _asked(self) -> int:
        """The function's call that this op, or the op whose gradient it computes, belongs to."""
        if self.phase == "backward":
            number = compat.backward_sequence()
            return self._asked_by_sequence.get(number, -1) if number >= 0 else -1
        # An op without a gradient finds the node of the one before it, which is not its own.
        self._asked_by_sequence.setdefault(compat.forward_sequence(), self.asked)
        return self.asked

    def _run(self, fn: Any, args: Any, kwargs: Any, origin: Origin) -> Any:
        if compat_distributed.is_wait(fn):  # in a step, collectives are complete when they return
            return args[0]
        try:
            return self.prober.results(fn, args, kwargs)
        except compat.DATA_ERRORS:
            raise
        except (RuntimeError, NotImplementedError) as e:
            # Some formulas refuse what the kernel takes, and some ops have none.
            out = self.prober.made_up(fn, args, kwargs)
            if out is None:
                e.add_note(f"while capturing {fn} at {origin}")
                raise
            return out

    def _decomposed(self, fn: Any, args: Any, kwargs: Any) -> Any:
        # Composite ops arrive here only where autograd is switched off altogether (inference mode), and of nested
        # tensors.
        self._check_plain((args, kwargs))
        with self:
            return compat_ops.decompose(fn, args, kwargs)

    def _check_plain(self, given: Any) -> None:
        for x in tensors_in(given):
            check_plain(x, str(self._tracker.here()))

    def _faked(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or compat.is_fake(x):
            return x
        if not is_plain(x):
            check_plain(x, str(self._tracker.here()))
        self._check_foreign(x)
        part = not x.requires_grad and is_strided(x) and not is_whole(x)
        fake = self.in_storage(x) if part else self._fake.from_tensor(x)
        self._constants.append(fake)
        self.tape.constant(fake, x)
        return fake

    def in_storage(self, real: torch.Tensor) -> torch.Tensor:
        """A fake of a real tensor in a storage of the size of the real one: the same for all that lie in it."""
        key = compat.storage_key(real)
        if key not in self._storages:
            nbytes = real.untyped_storage().nbytes()
            self._storages[key] = compat.blank_like(self._fake, (nbytes,), (1,), 0, torch.uint8, real.device)
        return compat.blank_like(
            self._fake, tuple(real.shape), real.stride(), int(real.storage_offset()), real.dtype, real.device,
            self._storages[key],
        )  # fmt: skip

    def _check_foreign(self, tensor: torch.Tensor) -> None:
        """Raises ``Unsupported`` for a constant in bytes of a parameter or buffer: it has a stand-in, through which
        alone gradients and changes are seen."""
        if self._owners is None:
            tape = self.tape
            roles = {v: (role, key) for v, role, key in tape.slots if role in ("parameter", "buffer")}
            self._owners = {compat.storage_key(t): roles[v] for v, t in tape.real.items() if v in roles}
        owner = self._owners.get(compat.storage_key(tensor))
        if owner is not None:
            where = self._tracker.here()
            self.refusal = Unsupported(
                f"reading the {owner[0]} {owner[1]!r} at {where} by another tensor, or from scripted code",
                "its gradient and its updates would not be seen",
                "use the model's own tensor (with .detach() where no gradient is wanted), and plain Python",
            )
            raise self.refusal

    def _inherited(self, record: Record) -> Origin:
        """Between autograd nodes (sums of gradients): the place of what is summed."""
        made = {s for v in record.reads for s in (self.tape.storage(v),)}
        for r in reversed(self.tape.records[-64:]):
            if r is not record and any(v >= 0 and self.tape.storage(v) in made for v in r.results):
                return r.origin
        return Origin()


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of dimensions that lie in memory in ``order``, the last one together."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


def _device(args: Any) -> str:
    first = next(tensors_in(args), None)
    return "" if first is None else str(first.device.type)
