"""When Python searches for garbage: not while many objects are made and kept (planning, capture), which it would go
through again and again, and not while a step's code is traced: finalizers of objects that others have let go of would
run in the middle of it, and be taken for a part of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["garbage_apart", "garbage_waits"]


_waiting = 0
_waits = threading.Lock()


@contextmanager
def garbage_waits() -> Iterator[None]:
    """No search for garbage of Python's own accord, on any thread, until the last of these is left."""
    global _waiting
    with _waits:
        held = _waiting > 0 or gc.isenabled()  # who has switched it off keeps it off
        if held:
            gc.disable()
        _waiting += held
    try:
        yield
    finally:
        with _waits:
            _waiting -= held
            if held and _waiting == 0:
                gc.enable()


@contextmanager
def garbage_apart(begins: Callable[[], Any], ends: Callable[[Any], Any]) -> Iterator[None]:
    """Around code of the caller's, which may look for garbage itself: ``ends`` gets what ``begins`` has returned."""
    mine, found = threading.get_ident(), []

    def collecting(phase: str, _: Any) -> None:
        if threading.get_ident() == mine:
            if phase == "start":
                found.append(begins())
            elif found:
                ends(found.pop())

    with garbage_waits():
        gc.callbacks.append(collecting)
        try:
            yield
        finally:
            gc.callbacks.remove(collecting)
