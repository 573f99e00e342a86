"""A call in a process of its own, for libraries that can end the process that they run in.

The function is named by its module, its arguments and its result are pickled, and what it raises is raised here.
What the library writes to the terminal is dropped: it says in an exception what matters. The process ends with the
one that called it, however that ends (`_ends_with_caller`), and its temporary files lie in the folder of the call.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from tightship.errors import TightshipError
from tightship.files import scratch_folder

__all__ = ["Crashed", "TooLong", "own_process"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
LONGEST = 600
"""Seconds that a call may take: a damaged file may have a loop without an end."""
_CODE: Final = "import sys; from tightship.integrations.own_process import _answer; _answer(sys.argv[1])"


class Crashed(Exception):
    """The process ended without an answer; the text says how, such as ``SIGSEGV``."""


class TooLong(Crashed):
    """The process was ended as it had no answer after `LONGEST` seconds."""


def own_process(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """``function(*args, **kwargs)``, a function of a module, in a process of its own. Raises ``Crashed``
    (``TooLong`` after `LONGEST` seconds), the ``TightshipError`` that it raises, and ``RuntimeError`` for any other
    error of its own."""
    with scratch_folder() as folder:
        call = (function.__module__, function.__name__, args, kwargs)
        (folder / "call").write_bytes(pickle.dumps(call))
        # -P: a file of the current folder must not stand for a library
        command = [sys.executable, "-P", "-c", _CODE, str(folder)]
        try:
            with _open_while_we_live() as pipe:
                ended = subprocess.run(
                    command, stdin=pipe, capture_output=True, check=False, timeout=LONGEST
                ).returncode
        except subprocess.TimeoutExpired:
            raise TooLong(f"no answer in {LONGEST} s") from None
        path = folder / "answer"
        if not path.exists():
            raise Crashed(_name(ended))
        raised, answer = pickle.loads(path.read_bytes())  # what this package's own process has written
    if raised:
        raise answer
    return answer  # type: ignore[no-any-return]


@contextmanager
def _open_while_we_live() -> Iterator[int]:
    """A pipe that nobody writes to: whoever reads it waits until the context, or this process, has ended."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def _name(status: int) -> str:
    """Of the signal that ended a process, or its exit status."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"


def _answer(folder: str) -> None:
    """In the process: does the call, and writes what came of it."""
    tempfile.tempdir = folder  # gone with it, also where this process is killed
    threading.Thread(target=_ends_with_caller, args=(folder,), daemon=True).start()
    module, name, args, kwargs = pickle.loads((Path(folder) / "call").read_bytes())
    answer: tuple[bool, Any]
    try:
        answer = False, getattr(importlib.import_module(module), name)(*args, **kwargs)
    except TightshipError as error:
        answer = True, error
    except Exception as error:  # of a class that may not be there where it is read
        unforeseen = RuntimeError(f"{type(error).__name__}: {error}")
        unforeseen.add_note(traceback.format_exc())
        answer = True, unforeseen
    part = Path(folder) / "part"
    part.write_bytes(pickle.dumps(answer))
    part.rename(Path(folder) / "answer")


def _ends_with_caller(folder: str) -> None:
    """Waits until the process that called has ended, killed perhaps, and ends this one, which nobody would."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
