"""Where an op comes from: the module that was running and the line that asked for it.

Nothing is attached to the model: the module stack comes from hooks that PyTorch keeps for all modules, the line
from the Python stack. A backward op gets the place of the forward op whose gradient it computes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tightship.frontends.torch import compat, compat_capture

__all__ = ["Origin", "Tracker"]

_TIGHTSHIP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = (os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep, _TIGHTSHIP + os.sep)


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


def source_line() -> str:
    """``file.py:line`` of the innermost frame that is neither PyTorch's nor tightship's."""
    frame = sys._getframe(1)
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
        """Origin of the op being dispatched in the forward pass; remembered for its backward ops."""
        origin = self.here()
        self._by_sequence[compat.forward_sequence()] = origin
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
        return self._by_sequence.get(compat.backward_sequence(), Origin())
