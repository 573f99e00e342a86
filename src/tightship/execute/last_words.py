"""An error that nobody catches ends this process: those who have others to tell of it do so first."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["tell_of_errors"]

Tell = Callable[[BaseException], None]


class _Process:
    """Of this process: who is told, what says errors here, and which process of multiprocessing tells of its own."""

    tellers: tuple[Tell, ...] = ()
    says: Any = None
    child = 0


_process = _Process()


def tell_of_errors(tell: Tell) -> None:
    """From now on ``tell`` is called with the error of the caller's own that ends this process, before it does."""
    if tell not in _process.tellers:
        _process.tellers += (tell,)
    if _process.says is None:
        _process.says, sys.excepthook = sys.excepthook, _say_and_tell
    if multiprocessing.parent_process() is not None and _process.child != os.getpid():
        _process.child = os.getpid()
        multiprocessing.util.Finalize(None, _tell_as_child, exitpriority=100)


def _say_and_tell(kind: Any, error: Any, traceback: Any) -> None:
    """First it is said here, whatever becomes of that. An interactive process goes on."""
    try:
        _process.says(kind, error, traceback)
    finally:
        if not hasattr(sys, "ps1"):
            _tell(error)


def _tell_as_child() -> None:
    """Processes of multiprocessing catch the error that ends them, and clean up meanwhile."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch.multiprocessing's exit behind an error
        error = error.__context__
    if error is not None:
        _tell(error)


def _tell(error: BaseException) -> None:
    for tell in _process.tellers:
        with suppress(Exception):  # the rank that has the store may be gone
            tell(error)
