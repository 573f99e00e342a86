"""Tape: the ops of a program as they happen, each with its origin, every tensor named by storage and metadata.

Aliasing comes from storage identity alone, never from schemas: an op that mutates nothing and whose results lie in
storages that exist already is a view, and leaves no op behind. Two tensors with one storage and equal metadata are
one value. Tensors are taken down when they are used, so that later changes of their metadata do no harm.

Origins need nothing attached to the model: the module stack comes from hooks that PyTorch keeps for all modules, the
line from the Python stack. A backward op gets the place of the forward op whose gradient it computes.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import compat, compat_capture, compat_distributed, compat_ops
from tightship.frontends.torch.collectives import Collective, collective
from tightship.frontends.torch.program import Call, Ref, leaves_in, map_tree, refs_in
from tightship.graph import aligned, alignment_of

__all__ = ["CHECK", "Origin", "Record", "Tape", "TapeStorage", "TapeValue", "Tracker", "check_plain"]


_TIGHTSHIP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_COMMANDS = sysconfig.get_path("scripts")
"""Of installed packages, `tightship` and `torchrun` among them: not the user's lines."""
_LIBRARIES = tuple(
    p + os.sep for p in (os.path.dirname(os.path.abspath(str(torch.__file__))), _TIGHTSHIP, _COMMANDS)
)


CHECK = "expect"
"""Target of ops that only look at what others made, and raise."""


class Origin(NamedTuple):
    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return " · ".join(x for x in self if x)


@functools.cache
def _short(filename: str) -> str | None:
    """The file's name relative to where Python found it; None for PyTorch's and tightship's own files."""
    if filename.startswith("<"):
        return None
    path = os.path.abspath(filename)
    if path.startswith(_LIBRARIES):
        return None
    roots = [os.path.abspath(p) + os.sep for p in [*sys.path, os.getcwd()]]
    inside = [r for r in roots if path.startswith(r)]
    return path[len(max(inside, key=len)) :] if inside else os.path.basename(path)


@functools.cache
def _is_plumbing(filename: str) -> bool:
    return f"{os.sep}contextlib.py" in filename or f"{os.sep}functools.py" in filename


def source_line(frame: Any = None) -> str:
    """``file.py:line`` of the innermost frame from there (the caller) that is neither PyTorch's nor tightship's."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_plumbing(code.co_filename) and (name := _short(code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Tracker:
    """Origins of the ops of one capture; ``active`` while the model runs."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        self._names = names
        self._stack: list[str] = []
        self._by_sequence: dict[int, Origin] = {}
        self.place: Origin | None = None  # of ops that are run again, without the code that asked for them
        self._resumed = False

    @contextmanager
    def active(self) -> Iterator[None]:
        with compat_capture.module_hooks(self._enter, self._leave):
            yield

    def _enter(self, module: Any) -> None:
        inherited = self._stack[-1] if self._stack else ""
        self._stack.append(self._names.get(module, inherited))

    def _leave(self) -> None:
        if self._stack:
            self._stack.pop()

    def forward(self) -> Origin:
        """Origin of the op being dispatched in the forward pass; remembered for its backward ops. An op without a
        gradient finds the node of the one before it, which is not its own, or none (-1)."""
        origin = self.here()
        self._by_sequence.setdefault(compat.forward_sequence(), origin)
        return origin

    def here(self) -> Origin:
        """Where the running code is."""
        if self.place is not None:
            return self.place
        if self._resumed:
            known = [self._names[m] for m in compat_capture.running_modules() if m in self._names]
            return Origin(known[-1] if known else "", source_line())
        return Origin(self._stack[-1] if self._stack else "", source_line())

    def resume(self) -> None:
        """From now on, modules are looked for on the stack: they were called before anybody could be told."""
        self._resumed = True

    def backward(self) -> Origin:
        """Origin of the forward op whose backward is running; empty between autograd nodes."""
        number = compat.backward_sequence()
        return self._by_sequence.get(number, Origin()) if number >= 0 else Origin()


@dataclass(frozen=True, slots=True)
class TapeValue:
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class TapeStorage:
    """``role`` and ``key`` are a ``Slot``'s for storages of the caller, empty for those made by ops."""

    size: int
    nbytes: int
    device: str
    base: int
    role: str = ""
    key: Any = None
    name: str = ""


@dataclass(slots=True)
class Record:
    """One op. ``results`` as in ``Call``; ``reads`` are values, ``writes`` and ``updates`` storages.
    ``asked`` is the number of the torch function's call it belongs to, -1 where that is not known. ``samples`` are
    contents of arguments without which it cannot be measured, as `Program.samples` has them. ``stays``:
    even if nobody needs its results."""

    fn: Callable[..., Any]
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    random: bool = False
    effect: bool = False
    replay: Call | None = None
    flops: int = 0
    device: str = "cpu"
    phase: str = "forward"
    origin: Origin = field(default_factory=Origin)
    asked: int = -1
    samples: dict[int, torch.Tensor] = field(default_factory=dict)
    stays: bool = False

    @property
    def checks(self) -> bool:
        """Whether it may end the step: before any update."""
        return self.target == CHECK


class Tape:
    """``grad``: whether eager runs the ops with gradients enabled, which some kernels look at. ``repeats``: whether
    collectives that change nothing may run again, as all ranks will run one plan. ``sends``: whether what is
    taken down is a collective that the code of the step calls."""

    def __init__(self, *, grad: bool = True) -> None:
        self.grad, self.repeats, self.sends = grad, False, False
        self.values: list[TapeValue] = []
        self.storages: list[TapeStorage] = []
        self.on_cuda = False  # whether any of them is
        self.records: list[Record] = []
        self.slots: list[tuple[int, str, Any]] = []
        self.constants: list[torch.Tensor] = []
        self.graphs: set[Any] = set()  # that have made them; what the step writes to them adds no other
        self.real: dict[int, torch.Tensor] = {}
        self._value_of: dict[TapeValue, int] = {}
        self._storage_of: dict[int, int] = {}
        self._references: list[Any] = []
        self._given_values: set[int] = set()
        self._slots_of: dict[int, list[int]] = {}

    # --- tensors ---

    def sent(self, fn: Any) -> Collective | None:
        """What runs in the place of a collective; None of another op. Raises ``Unsupported`` for one that is not
        known."""
        return collective(fn) if compat_distributed.is_collective(fn) else None

    def knows(self, tensor: torch.Tensor) -> bool:
        return compat.storage_key(tensor) in self._storage_of

    def know(self, tensor: torch.Tensor, storage: int) -> None:
        """From now on, tensors in the storage of this one lie in a storage of the tape that is there already."""
        self._storage_of[compat.storage_key(tensor)] = storage
        self._references.append(compat.storage_reference(tensor))

    def value(self, tensor: torch.Tensor, place: str = "") -> int:
        """The value a tensor is now; its storage becomes known.

        Raises ``Unsupported`` for tensors that are not plain strided bytes, and for a storage that has grown.
        """
        check_plain(tensor, place)
        key = compat.storage_key(tensor)
        nbytes = int(tensor.untyped_storage().nbytes())
        s = self._storage_of.get(key)
        if s is None:
            s = self._storage_of[key] = len(self.storages)
            self._references.append(compat.storage_reference(tensor))
            device = str(tensor.device)
            size = aligned(nbytes, alignment_of(device))
            self.storages.append(TapeStorage(size, nbytes, device, -1))
            self.on_cuda = self.on_cuda or device.startswith("cuda")
        elif nbytes != self.storages[s].nbytes:
            raise Unsupported(
                f"resizing a tensor{' at ' + place if place else ''}",
                "a storage has one size from its definition to its end",
                "make a new tensor of the other size",
            )
        v = self.intern(_info(tensor, s))
        if self.storages[s].base < 0:
            self.storages[s].base = v
        return v

    def described(self, tensor: torch.Tensor) -> TapeValue | None:
        """The value a tensor is now, not yet taken down; None for one that is not plain bytes of a known storage."""
        s = self._storage_of.get(compat.storage_key(tensor)) if _why_not_plain(tensor) is None else None
        return None if s is None else _info(tensor, s)

    def intern(self, info: TapeValue) -> int:
        """The number of a value that may be new."""
        v = self._value_of.get(info)
        if v is None:
            v = self._value_of[info] = len(self.values)
            self.values.append(info)
        return v

    def refs(self, tree: Any, place: str = "") -> Any:
        """An argument tree with each tensor replaced by its ``Ref``."""
        return map_tree(lambda x: Ref(self.value(x, place)) if isinstance(x, torch.Tensor) else x, tree)

    def storage(self, value: int) -> int:
        return self.values[value].storage

    # --- what the caller owns ---

    def input(
        self, tensor: torch.Tensor, role: str, key: Any, name: str, real: torch.Tensor | None = None
    ) -> int:
        """A tensor of the caller. A second one in a known storage is a value of its own."""
        v = self.value(tensor, name)
        if v not in self._given_values:
            self._given_values.add(v)
            self._slots_of.setdefault(self.storage(v), []).append(len(self.slots))
            self.slots.append((v, role, key))
        s = self.storages[self.storage(v)]
        if not s.role:
            s.role, s.key, s.name = role, key, name
        if real is not None:
            self.real[v] = real
        return v

    def constant(self, tensor: torch.Tensor, real: torch.Tensor) -> int:
        """A real tensor that is neither parameter, buffer nor part of the batch."""
        if self.knows(tensor):
            return self.value(tensor)
        k = len(self.constants)
        self.constants.append(real)
        if real.grad_fn is not None:
            self.graphs.add(real.grad_fn)
        return self.input(tensor, "constant", k, f"constant_{k}", real)

    def slots_of(self, storages: Collection[int]) -> list[tuple[int, str, Any]]:
        """The caller's tensors in these storages, in order."""
        return [self.slots[k] for k in sorted(k for s in storages for k in self._slots_of.get(s, ()))]

    # --- ops ---

    def record(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        *,
        phase: str,
        origin: Origin,
        flops: int = 0,
    ) -> Record | None:
        """Take down an ATen call whose ``args`` hold ``Ref``s and whose result is ``out``; None for a view."""
        if self.grad and compat_ops.asks_by_data(fn):
            raise Unplannable(f"{fn} at {origin}", *compat_ops.ASKED_BY_DATA)
        known = len(self.storages)
        place = f"{fn} · {origin}"
        outs = list(leaves_in(out))
        tensors = [o for o in outs if isinstance(o, torch.Tensor)]
        values = [self.value(o, place) if isinstance(o, torch.Tensor) else -1 for o in outs]
        if compat_ops.is_inplace_view(fn) or compat_distributed.is_wait(fn):
            return None
        writes = [v for k, n in compat_ops.written_arguments(fn) for v in self._given(args, kwargs, k, n)]
        names = compat_ops.undeclared_writes(fn, args, kwargs)
        writes += [
            v for n in names for v in self._given(args, kwargs, compat_ops.argument_positions(fn)[n], n)
        ]
        made: list[int] = []
        results: list[int] = []
        for v in values:
            new = v >= 0 and self.storage(v) >= known and self.storage(v) not in made
            results.append(v if new else -1)
            if new:
                made.append(self.storage(v))
        random = compat_ops.is_random(fn, args, kwargs)
        sent = self.sent(fn)
        effect = sent is not None and not (self.repeats and sent.repeatable)
        effect = effect or not (tensors or writes or fn._schema.returns)
        if not (made or writes or random or effect):
            return None
        device = str(tensors[0].device) if tensors else "cpu"
        r = Record(fn, str(fn), args, kwargs, tuple(results), tuple(dict.fromkeys(refs_in((args, kwargs)))))
        r.writes = tuple(dict.fromkeys(self.storage(v) for v in writes))
        r.random, r.effect, r.device, r.phase, r.origin = random, effect, device, phase, origin
        r.flops = flops or sum(t.numel() for t in tensors)
        r.stays = sent is not None and self.sends
        self._statistics(r)
        r.fn = sent or (compat_ops.runnable(fn) if self.grad else fn)
        self.records.append(r)
        return r

    def call(
        self, fn: Callable[..., Any], target: str, values: tuple[int, ...], writes: tuple[int, ...]
    ) -> Record:
        """Take down an opaque call ``fn(*tensors of values)`` that writes the storages of ``writes``."""
        r = Record(fn, target, tuple(Ref(v) for v in values), {}, (-1,), tuple(dict.fromkeys(values)))
        r.writes = tuple(dict.fromkeys(self.storage(v) for v in writes))
        self.records.append(r)
        return r

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any], k: int, name: str) -> list[int]:
        return list(refs_in(kwargs[name] if name in kwargs else args[k] if k < len(args) else None))

    def _statistics(self, r: Record) -> None:
        names = compat_ops.statistics_of(r.fn, r.args, r.kwargs)
        if not names:
            return
        positions = compat_ops.argument_positions(r.fn)
        values = [v for n in names for v in self._given(r.args, r.kwargs, positions[n], n)]
        other = compat_ops.without_statistics(r.fn, r.args, r.kwargs)
        if values and other is not None:
            r.updates = tuple(dict.fromkeys(self.storage(v) for v in values))
            r.replay = Call(*other, r.results)


def _info(tensor: torch.Tensor, storage: int) -> TapeValue:
    return TapeValue(
        storage, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    )


def is_plain(tensor: torch.Tensor, *, own_class: bool = False) -> bool:
    """Whether a tensor of the batch, or a constant, can be read by planned ops; with ``own_class`` whatever its class
    makes of functions."""
    kind = type(tensor)
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return dense and (not compat.is_own_class(kind) or (own_class and not compat.has_own_ops(kind)))


def check_plain(tensor: torch.Tensor, place: str) -> None:
    """Raises ``Unplannable`` for a tensor that is not plain strided bytes."""
    why = _why_not_plain(tensor)
    if why is not None:
        what, *rest = why
        raise Unplannable(f"{what}{' at ' + place if place else ''}", *rest)


def _why_not_plain(tensor: torch.Tensor) -> tuple[str, ...] | None:
    """What a tensor is that is not plain strided bytes, why that cannot be planned, and perhaps what to do."""
    if compat.is_own_class(type(tensor)) and not tensor.is_nested:
        what = f"a tensor of the class {type(tensor).__name__}"
        return what, "its class may do something else", "use x.as_subclass(torch.Tensor)"
    if tensor.is_nested:
        return compat.NESTED
    if tensor.layout is not torch.strided:
        rule, instead = (
            "its bytes are more than one strided storage",
            "to_dense(), sparse=False in an embedding",
        )
        return (
            f"a {tensor.layout} tensor",
            rule,
            f"use dense tensors ({instead}), or sums over edges (index_add)",
        )
    if tensor.is_quantized:
        return "a quantized tensor", "its metadata is more than shape and stride", "call dequantize() before"
    if tensor._is_zerotensor():
        return "a tensor of zeros without bytes", "autograd makes them where a tangent is zero"
    if tensor.is_neg() or tensor.is_conj():
        rule = "the bit is not part of its bytes"
        return "a lazily conjugated or negated tensor", rule, "call resolve_conj() or resolve_neg()"
    return None
