"""A step updates all of its parameters or none: a signal that comes in between is heard when the step is over.

The updates of a planned step are spread over its backward pass, each at its gradient. Ctrl-C among them would leave a
model of which some parameters are a step ahead of the others, which code that saves a checkpoint then would keep.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from tightship.errors import PeerFailed

__all__ = ["Updating"]

_NAMES: Final = (
    "SIGINT",
    "SIGTERM",
    "SIGHUP",
    "SIGQUIT",
    "SIGALRM",
    "SIGUSR1",
    "SIGUSR2",
    "SIGXCPU",
    "SIGBREAK",
)
_HELD: Final = tuple(signal.Signals[n] for n in _NAMES if n in signal.Signals.__members__)
"""Signals whose handlers raise, as a rule, or save a checkpoint: Ctrl-C, limits of time, and how clusters tell of an
end that is near. Those that the system handles are never held."""


class Updating:
    """Of one call of a step: from `begin` on signals are held, until `whole` ends. A second one of a kind is heard at
    once."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []
        self._half = ""  # what an error says by then

    def begin(self, *, perhaps: bool = False) -> None:
        """To be called before the first update, or, as ``perhaps`` says, before what leads to it as well. Only the
        main thread hears of signals."""
        if not self._handlers and threading.current_thread() is threading.main_thread():
            for number in _HELD:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        self._half = _PERHAPS if perhaps else _NOTE

    def complete(self) -> None:
        """To be called after the last update."""
        self._half = ""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hands on what came meanwhile. An error among the updates says so."""
        try:
            yield
        except BaseException as error:
            if self._half and not isinstance(error, PeerFailed):  # which says so itself
                error.add_note(self._half)
            raise
        finally:
            self._let_go()
            self._hand_on()

    def _hold(self, number: int, frame: Any) -> None:
        if number in self._came:
            self._came.remove(number)
            signal.signal(number, self._handlers[number])
            self._handlers[number](number, frame)
            return
        self._came.append(number)
        with suppress(OSError, ValueError, AttributeError):  # no standard error, or a closed one
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SAID)

    def _hand_on(self) -> None:
        """All of them, also where a handler raises."""
        if self._came:
            number = self._came.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:
                self._hand_on()

    def _let_go(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:
                signal.signal(number, handler)


_SAID: Final = (
    b"\ntightship: this step is finished first, or some parameters alone were updated (again: at once)\n"
)
_NOTE: Final = (
    "some parameters of the model were updated and others not, as the step had begun to update them: go on from a "
    "checkpoint"
)
_PERHAPS: Final = (
    "a compiled step updates as it goes: where the error is of its forward pass (a target that is no class), "
    "parameters and optimizer state are as they were; otherwise some may be updated: go on from a checkpoint"
)
