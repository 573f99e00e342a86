"""The calls of a trace made on fake tensors, which writes their ops down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from tightship.errors import Unplannable
from tightship.frontends.torch import compat, compat_calls, compat_capture
from tightship.frontends.torch.capture.tape import Origin
from tightship.frontends.torch.rerun.arguments import map_tensors, name_of
from tightship.frontends.torch.rerun.function_trace import FunctionTrace, form, unknown

__all__ = [
    "Capturing",
    "Execution",
    "Inner",
]


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


_FREEZING = ("requires_grad_", "requires_grad.__set__")


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
    def looking(self, told: Sequence[Sequence[torch.Tensor]]) -> AbstractContextManager[None]: ...
    def contents(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def adds_to(self, parameter: torch.Tensor | None = None) -> bool: ...
    def resume(self) -> None: ...


class Execution:
    """Makes the calls of a trace on the fake tensors of ``capture``. ``fakes`` holds, by number, what to give to
    torch for each tensor of the trace."""

    def __init__(self, capture: Capturing, trace: FunctionTrace) -> None:
        self.capture, self.trace = capture, trace
        self.fakes: list[torch.Tensor] = []
        fakes = self.fakes
        self._number: dict[int, int] = {}
        self._frozen: dict[int, Origin] = {}  # what the caller owns that was frozen, or no longer, and where
        capture.inside = lambda: Inner(trace, fakes)  # without `self`: a cycle would hold all stand-ins
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
        n = self.trace.index.get(id(tensor))
        if n is None:
            known = form(tensor)  # first: what is refused gets no number
            n = self.trace.add(tensor)
            self.trace.constants[n] = known
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

    def contents(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """What is in a tensor of the trace, for code that looks at it by ``func``."""
        n = self.trace.index.get(id(tensor))
        if n is None and (compat.is_fake(tensor) or compat.is_functorch(tensor)):
            raise unknown(f"given to {name_of(func)}")
        self.capture.asking(len(self.trace.calls))
        return self.capture.contents(self.fakes[self.constant(tensor) if n is None else n])

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
