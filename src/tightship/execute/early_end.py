"""A rank that ends before it comes to fit: those that wait there for it hear of it, and raise what it says.

Nothing of this process runs then but Python's own hooks at an error that nobody catches, and at exit. So they are set
where the package is imported, in a process that a launcher has started as one of several ranks; they do nothing where
it has joined no process group. Importing this module does not import torch.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from tightship.execute.last_words import tell_of_errors

if TYPE_CHECKING:
    from tightship.execute.first_failure import FirstFailure

__all__ = ["all_know", "note_of_ends", "waits", "watch"]

_EXIT = "has ended, and called fit less often than the others"


class _Process:
    """The process that watches its end, which those forked from it are not, and whether all others know of it."""

    watched, known = 0, False


_process = _Process()


def watch() -> None:
    """From now on the end of this process is noted."""
    if _process.watched != os.getpid():
        _process.watched = os.getpid()
        tell_of_errors(_at_error)
        atexit.register(_at_exit)


def note_of_ends(store: Any, rank: int, size: int) -> FirstFailure:
    """Which of the ranks that have ``store`` has ended, and why. torchrun starts ranks again with the same one."""
    from tightship.execute.first_failure import FirstFailure

    return FirstFailure(store, _key("ended"), rank, size)


def all_know() -> bool:
    """Whether all ranks waited in fit, and have heard that this one ends."""
    return _process.known


def waits(store: Any, more: int) -> int:
    """How many ranks wait in fit for others, after so many ``more`` do."""
    return int(store.add(_key("waiting"), more))


def _key(what: str) -> str:
    return f"tightship/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"


def _at_error(error: BaseException) -> None:
    from tightship.errors import PeerFailed

    if not isinstance(error, PeerFailed):  # which the others raise as well
        _say(error)


def _at_exit() -> None:
    with suppress(Exception):  # the store may be gone
        _say(None)


def _say(error: BaseException | None) -> None:
    """Stays, if others wait, until they know: this rank may have the store."""
    there: Any = sys.modules.get("torch.distributed")
    joined = there is not None and there.is_available() and there.is_initialized()
    if _process.watched != os.getpid() or not joined:
        return
    from tightship.errors import PeerFailed
    from tightship.execute.first_failure import HEARD, words_of
    from tightship.frontends.torch import compat_distributed

    store = compat_distributed.process_groups_store()
    if compat_distributed.imagined_ranks() or not compat_distributed.store_is_there(store):
        return
    rank, size = there.get_rank(), there.get_world_size()
    note = note_of_ends(store, rank, size)
    note.leaves(PeerFailed({rank: _EXIT if error is None else words_of(error)}, "fit"))
    end = monotonic() + HEARD
    while not (known := note.is_heard()) and waits(store, 0) and monotonic() < end:
        sleep(0.02)
    _process.known = known or note.is_heard()
