"""Calls of torch's functions on fake tensors, as they are asked for, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from tightship.errors import Unsupported
from tightship.frontends.torch import compat, compat_capture
from tightship.frontends.torch.function_trace import FunctionTrace, form, map_tensors, name_of
from tightship.frontends.torch.origin import Origin

__all__ = ["Capturing", "Execution", "Inner", "unknown"]


class Capturing(Protocol):
    """What runs calls on fake tensors and writes the ops down: `step.StepCapture`."""

    recorder: Any

    @property
    def stand_ins(self) -> Any: ...
    @property
    def guards(self) -> list[Any]: ...
    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]: ...
    def executing(self) -> AbstractContextManager[None]: ...
    def swapped(self) -> AbstractContextManager[None]: ...
    def origin(self) -> Origin: ...
    def place(self, origin: Origin | None) -> None: ...
    def asking(self, number: int) -> None: ...
    def resume(self) -> None: ...


class Execution:
    """Makes the calls of a trace on the fake tensors of ``capture``. ``fakes`` holds, by number, what to give to
    torch for each tensor of the trace."""

    def __init__(self, capture: Capturing, trace: FunctionTrace) -> None:
        self.capture, self.trace = capture, trace
        self.fakes: list[torch.Tensor] = []
        self._number: dict[int, int] = {}
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
        try:
            with self.capture.executing(), self._inner(func):
                out = func(*map_tensors(fake_of, tuple(args)), **map_tensors(fake_of, dict(kwargs)))
        except RuntimeError as error:
            if self.capture.recorder.refusal is not None:
                raise self.capture.recorder.refusal from error
            raise
        return map_tensors(self._seen, out)

    @contextmanager
    def _inner(self, func: Any) -> Iterator[None]:
        """Inside of calls that code runs in: what it reaches by itself are the fake tensors, too."""
        if not isinstance(func, compat_capture.Special):
            yield
            return
        with self.capture.swapped() if func.is_scripted else nullcontext(), Inner(self.trace, self.fakes):
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
    """Takes tensors of a trace, which code inside of a call reaches by itself, for ``others``, by number."""

    def __init__(self, trace: FunctionTrace, others: Any) -> None:
        super().__init__()
        self._index, self._others = trace.index, others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def other(t: torch.Tensor) -> torch.Tensor:
            n = self._index.get(id(t))
            return t if n is None else self._others[n]

        return func(*map_tensors(other, tuple(args)), **map_tensors(other, dict(kwargs or {})))


def unknown(where: str) -> Unsupported:
    """The error for a tensor that no call is known to have made."""
    return Unsupported(
        f"a tensor {where} whose origin is not known",
        "an earlier step has made it, or code that calls no function of torch",
        "keep what steps hand on in buffers, or hand it back as a result and into the next batch",
    )
