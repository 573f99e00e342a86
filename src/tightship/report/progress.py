"""One live line while something long runs: on a terminal only, on standard error, gone when it is over."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from tightship.report.numbers import percent
from tightship.units import format_bytes, format_seconds

__all__ = ["Line", "incumbent"]

_EVERY = 0.1  # seconds between two texts, at least


class Line:
    """``with Line(console, "planning") as line``: ``line.say(...)``, or ``line.planning`` for a planner.

    A planner tells the incumbent: its peak, and the seconds that it adds to a step of ``step_time``. ``limit``, the
    seconds that the search may take, makes a bar. ``budget`` (bytes) and ``least`` (seconds that no plan can do
    without) may be said once they are known; 0: not known.
    """

    budget: int | None = None
    least = 0.0

    def __init__(self, console: Console, what: str, *, step_time: float = 0.0, limit: float = 0.0) -> None:
        self.console, self.what, self.step_time = console, what, step_time
        self.began = time.perf_counter()
        self._said = 0.0
        self._live: Progress | None = None
        if console.is_terminal and not console.quiet:
            bar = [BarColumn(bar_width=12 if console.width >= 80 else 8)] if limit else []
            text = TextColumn("{task.fields[text]}", table_column=_column(ratio=1))
            what_column = TextColumn("{task.description}", markup=False, table_column=_column())
            self._live = Progress(
                SpinnerColumn(),
                what_column,
                *bar,
                _Clock(),
                text,
                console=console,
                transient=True,
                expand=True,
            )
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


class _Clock(ProgressColumn):
    """Seconds since the beginning."""

    def render(self, task: Task) -> Text:
        return Text(format_seconds(task.elapsed or 0.0), style="dim")

    def get_table_column(self) -> Column:
        return Column(no_wrap=True)


def _column(ratio: int | None = None) -> Column:
    return Column(no_wrap=True, overflow="ellipsis", ratio=ratio)


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
