"""One live line while something long runs: on a terminal only, on standard error, gone when it is over; and, of a
step that is prepared within a program of somebody else's, the log where there is no terminal."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, cast

from tightship.units import format_bytes, format_seconds, percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task
    from rich.table import Column
    from rich.text import Text

__all__ = ["Line", "Preparing", "incumbent"]

_EVERY = 0.1  # seconds between two texts, at least


class Line:
    """``with Line(console, "planning") as line``: ``line.say(...)``, or ``line.planning`` for a planner.

    A planner tells the incumbent: its peak, and the seconds that it adds to a step of ``step_time``. ``limit``, the
    seconds that the search may take, makes a bar. ``budget`` (bytes) and ``least`` (seconds that no plan can do
    without) may be said once they are known; 0: not known.
    """

    budget: int | None = None
    least = 0.0

    def __init__(
        self,
        console: Console | None,
        what: str,
        *,
        step_time: float = 0.0,
        limit: float = 0.0,
        guest: bool = False,
    ) -> None:
        """``console``: None where nobody watches; ``guest``: in a program of somebody else's, whose output is left
        alone."""
        self.what, self.step_time = what, step_time
        self.began = time.perf_counter()
        self._said = 0.0
        self._live: Progress | None = None
        if console is not None and console.is_terminal and not console.quiet:
            self._live = _progress(console, bar=limit > 0, guest=guest)
            self._task = self._live.add_task(what, total=limit or None, text="")

    def __enter__(self) -> Line:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def shown(self) -> bool:
        """Whether anybody sees it."""
        return self._live is not None

    def turn_to(self, what: str) -> None:
        """Something else is being done."""
        self._said = 0.0
        if self._live is not None:
            self._live.update(self._task, description=what, text="")

    def say(self, text: str, *, always: bool = False) -> None:
        """Replace the text after what is being done; texts that come too fast are left out."""
        now = time.perf_counter()
        if self._live is None or (not always and now - self._said < _EVERY):
            return
        self._said = now
        self._live.update(self._task, text=text, completed=now - self.began)

    def planning(self, peak: int, extra: float, met: bool) -> bool:
        """A planner's progress: never stops the search."""
        over = 0 if met or self.budget is None else peak - self.budget
        self.say(incumbent(peak, extra, met, self.step_time, self.least, over))
        return False

    def packing(self, arena: int, bound: int) -> None:
        """A placement's progress: the arena of the best packing, and how far above the bound it is."""
        self.say(f"arena {format_bytes(arena)}, gap {percent(arena, bound)}", always=True)


_LOG = logging.getLogger("tightship")


class Preparing:
    """Says which stage the preparation of a step is in, once it takes longer than ``after`` seconds: in a line on
    standard error where that is a terminal, otherwise in the log ``tightship`` (INFO), at each stage and after so
    many seconds again; nothing is written on standard output, and nothing at all where nobody looks.

    Stages follow one another or lie in one another; the outermost one is the preparation.
    """

    def __init__(self, after: float = 1.5, every: float = 10.0) -> None:
        self._after, self._every = after, every
        self._lock = threading.Lock()
        self._stages: list[tuple[str, float]] = []  # what is done, and the time of the step that is planned
        self._now = self._text = ""
        self._began = 0.0
        self._over = threading.Event()
        self._line: Line | None = None
        self._logs = False

    @contextlib.contextmanager
    def stage(self, what: str, step_time: float = 0.0) -> Iterator[None]:
        outermost = not self._stages
        self._stages.append((what, step_time))
        self._text, before, self._now = "", self._now, what
        if outermost:
            self._begin()
        elif what != before:
            self._turn()
        try:
            yield
        finally:
            self._stages.pop()
            if outermost:
                self._end()

    def measured(self, count: int, of: int) -> None:
        """Of ops."""
        self._say(f"{count} of {of} ops")

    def planning(self, peak: int, extra: float, met: bool) -> bool:
        """A planner's progress: never stops the search."""
        self._say(incumbent(peak, extra, met, self._stages[-1][1] if self._stages else 0.0))
        return False

    def _say(self, text: str) -> None:
        self._text = text
        if (line := self._line) is not None:
            line.say(text)

    def _begin(self) -> None:
        self._began, self._over = time.perf_counter(), threading.Event()
        on_terminal = _is_terminal()
        if on_terminal or _LOG.isEnabledFor(logging.INFO):
            threading.Thread(target=self._watch, args=(self._over, on_terminal), daemon=True).start()

    def _watch(self, over: threading.Event, on_terminal: bool) -> None:
        """Runs beside the preparation: most are over before there is anything to say."""
        if over.wait(self._after):
            return
        if on_terminal:
            with self._lock, contextlib.suppress(OSError, ValueError):
                if not over.is_set():
                    file = cast(IO[str], _Lenient(sys.stderr))
                    from rich.console import Console

                    console = Console(file=file, highlight=False, emoji=False, force_jupyter=False)
                    line = Line(console, self._now, guest=True)
                    self._line = line.__enter__()
                    self._line.say(self._text)
            return
        self._logs = True
        while not over.is_set():
            self._log()
            over.wait(self._every)

    def _turn(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.turn_to(self._now)
        if self._logs:
            self._log()

    def _log(self) -> None:
        beside = f", {self._text}" if self._text else ""
        seconds = format_seconds(time.perf_counter() - self._began)
        _LOG.info("preparing: %s%s (after %s)", self._now, beside, seconds)

    def _end(self) -> None:
        self._over.set()
        self._logs = False
        with self._lock:
            line, self._line = self._line, None
            if line is not None:
                with contextlib.suppress(OSError, ValueError):
                    line.__exit__()


class _Lenient:
    """A stream that may be closed while a line is on it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def _is_terminal() -> bool:
    """Whether a line can be written on standard error and taken away again."""
    stream = sys.stderr
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False  # closed, or somebody's own


def _progress(console: Console, *, bar: bool, guest: bool) -> Progress:
    """What is being done, perhaps a bar, seconds since the beginning, and a text."""
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Clock(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(format_seconds(task.elapsed or 0.0), style="dim")

        def get_table_column(self) -> Column:
            return Column(no_wrap=True)

    def column(ratio: int | None = None) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", ratio=ratio)

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=column()),
        *([BarColumn(bar_width=12 if console.width >= 80 else 8)] if bar else []),
        Clock(),
        TextColumn("{task.fields[text]}", table_column=column(ratio=1)),
        console=console,
        transient=True,
        expand=True,
        redirect_stdout=not guest,
        redirect_stderr=not guest,
        refresh_per_second=4 if guest else 10,
    )


def incumbent(
    peak: int, extra: float, met: bool, step_time: float = 0.0, least: float = 0.0, over: int = 0
) -> str:
    """The best plan so far, in words; what comes first is what a narrow terminal still shows. Its distance from the
    goal: bytes ``over`` the budget as long as it is not met, then from the least time that there can be."""
    if not met:
        beyond = f"{format_bytes(over)} over" if over else "not yet within"
        return f"{beyond} the budget · peak {format_bytes(peak)}"
    cost = percent(step_time + extra, step_time) if step_time else f"+{format_seconds(extra)}"
    known = 0 < least < math.inf
    gap = f", gap {100 * max(0.0, (step_time + extra) / least - 1):.1f} %" if known else ""
    return f"time {cost}{gap} · peak {format_bytes(peak)}, within the budget"
