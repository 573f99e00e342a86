"""Where a command's words and files go: its answer to standard output, everything else to standard error.

With ``--json`` standard output is closed to all others while a command runs, down to the file descriptor:
what a user's own code prints goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tightship.cached import cached_property
from tightship.errors import BadInput, Infeasible, TightshipError, VerificationFailed
from tightship.files import unwritable
from tightship.units import NARROW, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["INTERRUPTED", "Output", "error_rows", "targets", "writable", "write_targets"]

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""


class Output:
    """``with Output(as_json=…) as out``: then ``out.answer(rows, text)`` once. ``quiet``: for people, errors alone.

    ``errors`` is what people read besides the answer. Text alone is written as it is; rich is imported for tables,
    and on terminals."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._stdout: TextIO = sys.stdout
        self._saved: int | None = None

    @cached_property
    def errors(self) -> Console:
        return _console(sys.stderr, quiet=self.quiet)

    @cached_property
    def live(self) -> Console | None:
        """Where a live line goes; none where nobody watches one."""
        return self.errors if not self.quiet and _styled(sys.stderr) else None

    @property
    def reads(self) -> bool:
        """Whether there is a person who reads the answer."""
        return not (self.as_json or self.quiet)

    def __enter__(self) -> Output:
        if self.as_json:
            self._stdout = sys.stdout
            self._stdout.flush()
            with contextlib.suppress(OSError, ValueError, AttributeError):
                number = self._stdout.fileno()
                self._saved = os.dup(number)
                os.dup2(sys.stderr.fileno(), number)
            sys.stdout = sys.stderr
        return self

    def __exit__(self, *_: object) -> None:
        if self.as_json:
            sys.stdout = self._stdout
            if self._saved is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._stdout.flush()  # what was printed behind our back goes where the descriptor points
                os.dup2(self._saved, self._stdout.fileno())
                os.close(self._saved)
                self._saved = None

    def answer(self, rows: Mapping[str, Any], text: RenderableType | Sequence[RenderableType]) -> None:
        """The command's answer: ``rows`` with ``--json``, else ``text``. Raises ``BadInput`` where standard output
        takes no more, as on a full disk."""
        try:
            self._answer(rows, text)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.closed()
            raise unwritable(error, "standard output") from error

    def _answer(self, rows: Mapping[str, Any], text: RenderableType | Sequence[RenderableType]) -> None:
        if self.as_json:
            self._write(json.dumps(rows, allow_nan=False) + "\n")
            return
        if self.quiet:
            return
        for item in [text] if isinstance(text, str) or not isinstance(text, Sequence) else text:
            if isinstance(item, str):
                self._stdout.write(visible(item) + "\n")
            else:
                _console(self._stdout).print(item)
        self._stdout.flush()

    def failed(self, error: TightshipError, *, debug: bool = False) -> None:
        """Say what went wrong; with ``debug`` also where."""
        if self.as_json:
            with contextlib.suppress(
                TightshipError
            ):  # what went wrong may be that nothing can be written there
                self.answer(error_rows(error), "")
        if debug:
            import traceback

            raised = error.__cause__ or error
            sys.stderr.write(visible("".join(traceback.format_exception(raised))))
        if _styled(sys.stderr):
            _console(sys.stderr).print("[bold red]tightship:[/] ", end="")
        else:
            sys.stderr.write("tightship: ")
        sys.stderr.write(visible(str(error)) + "\n")
        sys.stderr.flush()

    def interrupted(self, how: str) -> None:
        if self.as_json:
            self.answer({"error": {"type": "Interrupted", "message": how}}, "")
        if not self.quiet:
            sys.stderr.write(f"tightship: {how}\n")
            sys.stderr.flush()

    def closed(self) -> None:
        """Nobody reads any more: leave without the interpreter complaining at its end."""
        null = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, self._stdout.fileno())

    def _write(self, text: str) -> None:
        if self._saved is None:
            self._stdout.write(text)
            self._stdout.flush()
            return
        data = text.encode()
        while data:
            data = data[os.write(self._saved, data) :]


# --- files ---

_ARTIFACTS = {
    "output": ("save", "output", "written to"),
    "write": ("write", "written", "model written to"),
    "picture": ("picture", "picture", "drawn in"),
    "report": ("report", "report", "shown in"),
    "arena_header": ("arena_header", "arena_header", "C header in"),
    "trace": ("trace", "trace", "traced in"),
    "snapshot": ("snapshot", "snapshot", "memory snapshot in"),
}
"""By option: the answer's method that writes it, its key in JSON, and how it is announced."""


def writable(path: str | None, option: str) -> Path | None:
    """The path, if a file can be written there. Said before the work is done, not after it."""
    if path is None:
        return None
    target = Path(path)
    try:
        if target.is_dir():
            raise BadInput(f"{path!r} is a directory, not a file", place=option)
        if not target.parent.is_dir():
            raise BadInput(f"directory {str(target.parent)!r} does not exist", place=option)
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise BadInput(f"cannot write {path!r}: Permission denied", place=option)
    except OSError as error:
        raise unwritable(error, path) from error
    return target


def targets(chosen: argparse.Namespace) -> dict[str, Path]:
    """The files that a command was asked to write, by option."""
    asked = {
        name: writable(getattr(chosen, name, None), f"--{name.replace('_', '-')}") for name in _ARTIFACTS
    }
    return {name: path for name, path in asked.items() if path is not None}


def write_targets(
    answer: object, files: Mapping[str, Path], rows: MutableMapping[str, Any], text: list[Any]
) -> None:
    """Write an answer in every way that was asked for, and say so."""
    for name, target in files.items():
        method, key, said = _ARTIFACTS[name]
        getattr(answer, method)(target)
        rows[key] = str(target)
        text.append(f"{said} {target}")


# --- errors ---


def error_rows(error: TightshipError) -> dict[str, Any]:
    """An error as JSON: its type and message, and what it knows besides."""
    rows: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)}}
    if isinstance(error, Infeasible):
        names = ("budget", "lower_bound", "best_peak", "placed", "impossible", "at")
        rows |= {"met": False} | {name: getattr(error, name) for name in names}
        rows |= {"advice": list(error.advice)}
        rows["enough"] = [{"budget": e.nbytes, "options": dict(e.options)} for e in error.enough]
        rows["top"] = [{"name": n, "bytes": b, "place": p} for n, b, p in error.top]
    if isinstance(error, BadInput):
        rows["error"] |= {"rule": error.rule, "place": error.place}
    if isinstance(error, VerificationFailed):
        rows["violations"] = [str(v) for v in error.violations]
    return rows


def _styled(stream: TextIO) -> bool:
    """Whether rich would move and color on it: on a terminal, or where its variables may say so."""
    return stream.isatty() or not {"FORCE_COLOR", "TTY_COMPATIBLE"}.isdisjoint(os.environ)


def _console(stream: TextIO, *, quiet: bool = False) -> Console:
    """A console on which names from files are only shown, and order nothing."""
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Shown(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else Segment(visible(part.text), part.style)

    console = Shown(file=stream, highlight=False, emoji=False, quiet=quiet)
    console.width = max(console.width, NARROW)
    return console
