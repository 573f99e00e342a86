"""The torch functions that a step's Python code calls: what was asked, of which tensors, and what was answered.

A trace is what a step's Python code looks like from torch's side. Running that code again with the same answers costs
microseconds a call and computes nothing, and whatever it does otherwise (another function, number, tensor, order)
shows as a call that differs. Tensors are compared by their number in the trace: inputs first, then constants and
results in the order in which they appear.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from tightship.cached import cached_property
from tightship.errors import Unplannable
from tightship.frontends.torch import compat, compat_calls, compat_capture
from tightship.frontends.torch.capture.tape import Origin
from tightship.frontends.torch.program import tensors_in
from tightship.process_local import NotCopied

__all__ = [
    "Capturing",
    "Execution",
    "ExecutionState",
    "Form",
    "FunctionCall",
    "FunctionTrace",
    "Inner",
    "add_hook",
    "form",
    "map_tensors",
    "name_of",
    "nowhere",
    "plainly_same",
    "same_plain",
    "unknown",
    "write_back",
]


# --- argument trees -------------------------------------------------------------------------------------------


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``fn`` applied to its tensors; the same object where ``fn`` changes none."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        new = [map_tensors(fn, x) for x in tree]
        if all(map(is_, new, tree)):
            return tree
        named = isinstance(tree, tuple) and hasattr(tree, "_fields")
        return type(tree)._make(new) if named else type(tree)(new)  # type: ignore[union-attr]
    if isinstance(tree, dict):
        new_items = {k: map_tensors(fn, x) for k, x in tree.items()}
        return tree if all(new_items[k] is tree[k] for k in tree) else new_items
    if isinstance(tree, slice):
        bounds = tree.start, tree.stop, tree.step
        parts = [map_tensors(fn, x) for x in bounds]
        return tree if all(map(is_, parts, bounds)) else slice(*parts)
    return tree


def own_containers(tree: Any) -> Any:
    """``tree`` in lists, dicts and arrays of its own, which the caller's code cannot change."""
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        new = [own_containers(x) for x in tree]
        if isinstance(tree, tuple) and all(map(is_, new, tree)):
            return tree
        named = hasattr(tree, "_fields")
        return type(tree)._make(new) if named else type(tree)(new)  # type: ignore[union-attr]
    if isinstance(tree, dict):
        return type(tree)((k, own_containers(x)) for k, x in tree.items())
    return tree.copy() if type(tree).__module__ == "numpy" and hasattr(tree, "copy") else tree


Form = tuple[Any, ...]


def form(tensor: torch.Tensor) -> Form:
    """What a program depends on beside a constant's contents: another tensor of the same form can stand for it."""
    nbytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else -1
    strides = (tuple(tensor.stride()), tensor.storage_offset()) if nbytes >= 0 else ()
    flags = tensor.requires_grad, tensor.grad_fn is not None, tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tuple(tensor.shape), strides, nbytes, str(tensor.device), flags


# --- calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExecutionState:
    """What a call depends on beside its arguments: gradient and inference mode, autocast's type by device, and
    whether hooks of the caller's take what is saved for the backward pass."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    saves: bool = False

    @staticmethod
    def now() -> ExecutionState:
        autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
        if compat.any_autocast():
            cache = torch.is_autocast_cache_enabled()
            kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
            autocast = tuple((k, torch.get_autocast_dtype(k), cache) for k in kinds)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return ExecutionState(*modes, autocast, compat_capture.saving_hooks())

    def is_now(self) -> bool:
        """Whether ``now()`` is the same, but for ``saves``; asked at each call of a step."""
        if (
            torch.is_grad_enabled() is not self.grad
            or torch.is_inference_mode_enabled() is not self.inference
        ):
            return False
        if not compat.any_autocast():
            return not self.autocast
        at, cache = 0, torch.is_autocast_cache_enabled()
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                if self.autocast[at : at + 1] != ((kind, torch.get_autocast_dtype(kind), cache),):
                    return False
                at += 1
        return at == len(self.autocast)


@dataclass(slots=True)
class FunctionCall:
    """One call as the Python code made it. ``kind``: ``op`` has the recorded ``answer``; ``data`` makes a tensor of
    Python's data and is run in every step, ``now`` reads such a tensor or sets a mode, and is run, too; ``last`` is
    `write_back`, which has its turn behind the backward pass, and ``hook`` is `add_hook`, which has it there.

    ``bound``: an argument is a constant, of which each step may bring another. ``first`` is the number of the first
    tensor that it made; ``guards`` are what its answer says of data. ``repeats``: Python code of the caller's runs
    inside it or in its backward pass, which only running it again can tell to be the same.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: Any
    kind: str
    state: ExecutionState
    origin: Any
    first: int
    bound: bool = False
    repeats: bool = False
    guards: tuple[Any, ...] = ()

    @property
    def reads_number(self) -> bool:
        """Whether the answer is one number that data say, nothing else: another one is as good."""
        return type(self.answer) in (int, float) and len(self.guards) == 1 and not self.guards[0].requests


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_FREEZING = ("requires_grad_", "requires_grad.__set__")


def add_hook(parameter: torch.Tensor, hook: Any) -> None:
    """Asks that ``hook`` (a ``live_step.GradientHook``) be called in the backward pass when ``parameter`` gets its
    gradient."""


def write_back(buffer: torch.Tensor, now: torch.Tensor) -> None:
    """Asks that ``buffer`` hold what is in ``now``, which the step has put in its place, when gradients are there:
    these are made of what it held before."""


def nowhere(key: int) -> int | None:
    """Of no tensor the number is known by its id."""
    return None


@dataclass
class FunctionTrace(NotCopied):
    """``tensors`` are those that the code gets to see, by number: the caller's own parameters, buffers and
    constants, stand-ins without data for everything else. The first ``inputs`` are parameters, buffers and, from
    ``leaves`` on, the batch's. ``constants`` gives the form of each constant; for those in ``rigid``, which share
    bytes, no other can stand. ``results`` are the numbers of what the code handed back; ``end_guards`` are what its
    backward pass says of data. ``attributes`` and ``caches`` are where it left stand-ins behind. ``batch`` has a
    ``structure.TensorLeaf`` for each tensor of the batch, ``kept`` are the numbers of what its code keeps for later,
    which the program hands back behind the results, ``superseded`` says that another trace of the same calls
    hands back more, ``program`` what was captured, ``renumbering`` (a
    ``numbers.Renumbering``) tells how its numbers follow. ``references`` counts who holds the tensors between runs,
    None before the first run is over. ``elsewhere`` gives the number of a tensor of an earlier trace,
    by id, which the code has been shown in this run.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    calls: list[FunctionCall] = field(default_factory=list)
    constants: dict[int, Form] = field(default_factory=dict)
    rigid: set[int] = field(default_factory=set)
    results: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    superseded: bool = False
    inputs: int = 0
    leaves: int = 0
    attributes: tuple[tuple[torch.nn.Module, str], ...] = ()
    caches: tuple[Any, ...] = ()
    end_guards: tuple[Any, ...] = ()
    batch: tuple[Any, ...] = ()
    program: Any = None
    renumbering: Any = None
    references: list[int] | None = None
    elsewhere: Callable[[int], int | None] = nowhere

    @property
    def repeats(self) -> bool:
        return any(c.repeats for c in self.calls)

    @cached_property
    def places(self) -> dict[int, list[int]]:
        """The calls that each tensor occurs in, when all are made."""
        found: dict[int, list[int]] = {}
        for k, call in enumerate(self.calls):
            for n in {self.index[id(t)] for t in tensors_in((call.args, call.kwargs, call.answer))}:
                found.setdefault(n, []).append(k)
        return found

    @cached_property
    def asked_leaves(self) -> frozenset[int]:
        """The batch's tensors, counted from 0, of which something was asked or which were handed back: all where the
        caller's code runs inside of a call, as that may ask without being seen."""
        hidden = any(c.repeats or isinstance(c.func, compat_calls.Special) for c in self.calls)
        seen = range(self.inputs) if hidden else {*self.places, *self.results}
        return frozenset(n - self.leaves for n in range(self.leaves, self.inputs) if n in seen)

    def takes(self, batch: Sequence[Any]) -> bool:
        """Whether the step's code, on a batch of such tensors, can ask for what it has asked for here. Whatever else
        is in the batch shows when it is used, and so does a tensor that was not."""
        return (
            not self.superseded
            and len(batch) == len(self.batch)
            and all(
                a == b or n not in self.asked_leaves
                for n, (a, b) in enumerate(zip(batch, self.batch, strict=True))
            )
        )

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that may be new."""
        n = self.index.setdefault(id(tensor), len(self.tensors))
        if n == len(self.tensors):
            self.tensors.append(tensor)
        return n

    def take(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` is in the place of ``old``, a tensor of the caller's, from now on."""
        n = self.index.get(id(old))
        if n is None:
            return
        places = self.places.get(n, ())
        del self.index[id(old)]
        self.tensors[n], self.index[id(new)] = new, n
        for call in (self.calls[k] for k in places):
            call.args, call.kwargs, call.answer = map_tensors(
                lambda t: new if t is old else t, (call.args, call.kwargs, call.answer)
            )

    def common(self, other: FunctionTrace) -> int:
        """How many of the first calls are the same in both, whatever the numbers among their arguments."""
        for k, (a, b) in enumerate(zip(self.calls, other.calls, strict=False)):
            if a.func != b.func or a.kind != b.kind or a.first != b.first or a.state != b.state:
                return k
            here = Arguments(self.index.get)
            there = other.index.get
            if not here.alike((a.args, a.kwargs), (b.args, b.kwargs), there) or here.structural(a.func):
                return k
            if [self.index[id(t)] for t in tensors_in(a.answer)] != [
                there(id(t)) for t in tensors_in(b.answer)
            ] or not (same_plain(a.answer, b.answer) or (a.reads_number and b.reads_number)):
                return k
        return min(len(self.calls), len(other.calls))


def same_plain(a: Any, b: Any) -> bool:
    """Whether two answers are alike where they are no tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same_plain, a, b))
    if isinstance(a, (int, float, bool, str)):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return True


def name_of(func: Any) -> str:
    """The function's bare name, also of getters and setters."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in ("__get__", "__set__", "__delete__") and owner is not None:
        return f"{getattr(owner, '__name__', '')}.{name}"
    return str(name)


# --- comparing ------------------------------------------------------------------------------------------------

_SHAPED_BY_NUMBERS = {
    "arange", "range", "interpolate", "upsample", "upsample_nearest", "upsample_bilinear", "fractional_max_pool2d",
    "fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices",
}  # fmt: skip
_ARITHMETIC = {
    "add", "add_", "__add__", "__iadd__", "__radd__", "sub", "sub_", "__sub__", "__isub__", "__rsub__", "rsub",
    "mul", "mul_", "__mul__", "__imul__", "__rmul__", "div", "div_", "__div__", "__truediv__", "__rtruediv__",
    "__rdiv__", "true_divide", "multiply", "divide", "subtract", "pow", "pow_", "__pow__", "__rpow__",
    "clamp", "clamp_", "clamp_min", "clamp_max", "clip", "masked_fill", "masked_fill_", "fill_", "full_like",
    "lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "leaky_relu", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip


def plainly_same(
    args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[Any, ...], known_kwargs: dict[str, Any]
) -> bool:
    """Whether arguments are the same objects or equal whole numbers, names and shapes; most are, and this is quick.
    Where it is False, ``Arguments`` tells."""
    if len(args) != len(known) or len(kwargs) != len(known_kwargs):
        return False
    for a, b in zip(args, known, strict=True):
        if a is not b and not _plainly_equal(a, b):
            return False
    for k, a in kwargs.items():
        b = known_kwargs.get(k, _NOTHING)
        if a is not b and not _plainly_equal(a, b):
            return False
    return True


_NOTHING = object()


def _plainly_equal(a: Any, b: Any) -> bool:
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is int or kind is str:
        return bool(a == b)
    if kind is tuple or kind is list or kind is torch.Size:
        return len(a) == len(b) and all(
            x is y or (type(x) is int and type(y) is int and x == y) for x, y in zip(a, b, strict=True)
        )
    return False


class Arguments:
    """Compares arguments of a call with those of a recorded one. ``number`` gives the number of a tensor of the
    former, or None; after ``alike`` was true, ``differs`` says whether numbers are other ones."""

    __slots__ = ("differs", "integers", "number")

    def __init__(self, number: Callable[[int], int | None]) -> None:
        self.number = number
        self.differs = False
        self.integers = False

    def structural(self, func: Any) -> bool:
        """Whether a number that differs may change the shape of the answer."""
        if not self.differs:
            return False
        name = name_of(func)
        if self.integers:
            return name not in _ARITHMETIC
        if isinstance(func, compat_calls.Special):  # what it makes of another number is found out
            return not func.keys or None in func.keys
        module = str(getattr(func, "__module__", None) or "torch")
        return name in _SHAPED_BY_NUMBERS or not (module.startswith("torch") or _is_method(func))

    def alike(self, now: Any, known: Any, number_of_known: Callable[[int], int | None]) -> bool:
        if isinstance(known, torch.Tensor) or isinstance(now, torch.Tensor):
            if not (isinstance(known, torch.Tensor) and isinstance(now, torch.Tensor)):
                return False
            n = self.number(id(now))
            return n is not None and n == number_of_known(id(known))
        if now is known:
            return True
        kind = type(now)
        if kind is not type(known):
            return False
        if kind is float or kind is int or kind is complex:
            return self._numbers(now, known)
        if kind is bool or kind is str or now is None:
            return bool(now == known)
        if issubclass(kind, (list, tuple)):
            return len(now) == len(known) and all(
                self.alike(a, b, number_of_known) for a, b in zip(now, known, strict=True)
            )
        if issubclass(kind, dict):
            return list(now) == list(known) and all(
                self.alike(a, known[k], number_of_known) for k, a in now.items()
            )
        if kind is slice:
            return self.alike(
                (now.start, now.stop, now.step), (known.start, known.stop, known.step), number_of_known
            )
        return self._others(now, known)

    def _numbers(self, now: Any, known: Any) -> bool:
        same = now == known or (now != now and known != known)
        if same and not (now == 0 and math.copysign(1, now.real) != math.copysign(1, known.real)):
            return True
        self.differs = True
        self.integers = self.integers or type(now) is int
        return True

    def _others(self, now: Any, known: Any) -> bool:
        if _is_numpy_number(now):
            return self._numbers(now.item(), known.item())
        if hasattr(now, "dtype") and hasattr(now, "tobytes"):
            return bool(
                now.dtype == known.dtype and now.shape == known.shape and now.tobytes() == known.tobytes()
            )
        if isinstance(now, types.FunctionType):
            return now.__code__ is known.__code__  # a call with functions among its arguments repeats
        if isinstance(now, types.MethodType):
            return now.__func__ is known.__func__ and now.__self__ is known.__self__
        try:
            return bool(now == known)
        except Exception:  # an object of somebody else's that cannot say
            return False


def _is_method(func: Any) -> bool:
    return isinstance(func, _METHODS)


_METHODS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
)  # fmt: skip


def _is_numpy_number(x: Any) -> bool:
    """Whether this is a scalar of NumPy's that is a number, and no array."""
    kind = getattr(getattr(x, "dtype", None), "kind", None)
    return type(x).__module__ == "numpy" and kind in ("f", "i", "u", "c") and not hasattr(x, "__setitem__")


class Capturing(Protocol):
    """What runs calls on fake tensors and writes the ops down: `incremental.StepCapture`."""

    recorder: Any
    inside: Any

    @property
    def stand_ins(self) -> Any: ...
    @property
    def guards(self) -> list[Any]: ...
    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]: ...
    def executing(self) -> AbstractContextManager[None]: ...
    def instead(self, func: Any) -> Any: ...
    def swapped(self) -> AbstractContextManager[None]: ...
    def origin(self) -> Origin: ...
    def place(self, origin: Origin | None) -> None: ...
    def asking(self, number: int) -> None: ...
    def write_back(self, buffer: torch.Tensor, now: torch.Tensor) -> None: ...
    def owned(self, constant: torch.Tensor) -> torch.Tensor: ...
    def set_data(self, own: torch.Tensor, data: torch.Tensor) -> None: ...
    def resume(self) -> None: ...


class Execution:
    """Makes the calls of a trace on the fake tensors of ``capture``. ``fakes`` holds, by number, what to give to
    torch for each tensor of the trace."""

    def __init__(self, capture: Capturing, trace: FunctionTrace) -> None:
        self.capture, self.trace = capture, trace
        self.fakes: list[torch.Tensor] = []
        self._number: dict[int, int] = {}
        self._frozen: dict[int, Origin] = {}  # what the caller owns that was frozen, or no longer, and where
        capture.inside = lambda: Inner(self.trace, self.fakes)
        for seen, fake in capture.inputs():
            if not trace.leaves and compat.is_fake(seen) and seen is fake:
                trace.leaves = len(trace.tensors)
            n = trace.add(seen)
            if n == len(self.fakes):
                self._add(fake)
        trace.inputs = len(trace.tensors)
        trace.leaves = trace.leaves or trace.inputs

    def _add(self, fake: torch.Tensor) -> None:
        self._number.setdefault(id(fake), len(self.fakes))
        self.fakes.append(fake)

    def constant(self, tensor: torch.Tensor) -> int:
        """Number of a real tensor that is neither parameter, buffer nor part of the batch."""
        n = self.trace.add(tensor)
        if n == len(self.fakes):
            self.trace.constants[n] = form(tensor)
            self._add(tensor)
        return n

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The answer with the tensors that the Python code is to see in it."""

        def fake_of(t: torch.Tensor) -> torch.Tensor:
            n = self.trace.index.get(id(t))
            if n is not None:
                return self.fakes[n]
            if compat.is_fake(t) or compat.is_functorch(t):
                raise unknown(f"given to {name_of(func)}")
            return self.fakes[self.constant(t)]

        self.capture.asking(len(self.trace.calls))
        if func == _SET_DATA and self._is_owned(args[0]):
            self.capture.set_data(fake_of(args[0]), fake_of(args[1]))
            return None
        if name_of(func) in _FREEZING and self._is_owned(args[0]):
            self._frozen.setdefault(self.trace.index[id(args[0])], self.capture.origin())
        try:
            with self.capture.executing(), self._inner(func), compat_capture.modes_asked():
                made = self.capture.instead(func)
                out = made(*map_tensors(fake_of, tuple(args)), **map_tensors(fake_of, dict(kwargs)))
        except RuntimeError as error:
            if self.capture.recorder.refusal is not None:
                raise self.capture.recorder.refusal from error
            if compat_capture.has_missed_data(error):
                raise Unplannable(
                    f"{name_of(func)} of a tensor in a step at {self.capture.origin()}",
                    "it reads contents that are there only when the step has run",
                    "hand the tensor back as a result and look at it there",
                ) from error
            raise
        return map_tensors(self._seen, out)

    def _is_owned(self, tensor: torch.Tensor) -> bool:
        """Whether the caller has a tensor: a parameter, a buffer or a constant, for which a fake tensor stands from
        here on, so that it can lie elsewhere."""
        if compat.is_fake(tensor) or compat.is_functorch(tensor):
            return False
        n = self.trace.index.get(id(tensor))
        n = self.constant(tensor) if n is None else n
        if not compat.is_fake(self.fakes[n]):
            self.fakes[n] = self.capture.owned(self.fakes[n])
            self._number.setdefault(id(self.fakes[n]), n)
        return True

    def check_frozen(self) -> None:
        """To be called when the code has run. Raises ``Unplannable`` where other tensors require a gradient than
        before: a step trains what it was made for."""
        for n, origin in self._frozen.items():
            if self.fakes[n].requires_grad is not self.trace.tensors[n].requires_grad:
                raise Unplannable(
                    f"requires_grad of a parameter, buffer or constant set in a step at {origin}, and left so,",
                    "the step trains what requires a gradient when it begins", "set it before the step",
                )  # fmt: skip

    def add_hook(self, parameter: torch.Tensor, hook: Any) -> None:
        hook.register(self.fakes[self.trace.index[id(parameter)]], self.trace, self.fakes)

    def write_back(self, buffer: torch.Tensor, now: torch.Tensor) -> None:
        fakes = [self.fakes[n] for n in map(self.trace.index.get, map(id, (buffer, now))) if n is not None]
        if len(fakes) < 2:
            raise unknown("put in the place of a buffer")
        self.capture.write_back(*fakes)

    @contextmanager
    def _inner(self, func: Any) -> Iterator[None]:
        """Inside of calls that code runs in: what it reaches by itself are the fake tensors, too."""
        if func is torch.autograd.grad:
            with compat_capture.inside_backward(lambda: Inner(self.trace, self.fakes)):
                yield
            return
        if not isinstance(func, compat_calls.Special):
            yield
            return
        inner = Inner(self.trace, self.fakes)
        with self.capture.swapped() if func.is_scripted else nullcontext(), inner.with_transforms():
            yield

    def _seen(self, out: torch.Tensor) -> torch.Tensor:
        n = self._number.get(id(out))
        if n is not None:
            return self.trace.tensors[n]
        n = self.trace.add(out)
        if n == len(self.fakes):
            self._add(out)
        return out


class Inner(TorchFunctionMode):
    """Takes tensors of a trace, which code inside of a call or a backward pass reaches by itself, for ``others``, by
    number."""

    def __init__(self, trace: FunctionTrace, others: Any) -> None:
        super().__init__()
        self._trace, self._others = trace, others

    @contextmanager
    def with_transforms(self) -> Iterator[None]:
        """Active for functional transforms inside of the call, too, which function modes do not see."""
        with compat_calls.calls_seen(self._call, within=True), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        def other(t: torch.Tensor) -> torch.Tensor:
            n = self._trace.index.get(id(t))
            n = self._trace.elsewhere(id(t)) if n is None else n
            return t if n is None else self._others[n]

        return func(*map_tensors(other, tuple(args)), **map_tensors(other, dict(kwargs)))


def unknown(where: str) -> Unplannable:
    """The error for a tensor that no call is known to have made."""
    return Unplannable(
        f"a tensor {where} whose origin is not known",
        "an earlier step has made it, or code that calls no function of torch",
        "keep what steps hand on in buffers, or hand it back as a result and into the next batch",
    )
