"""One live line while something long runs: on a terminal only, on standard error, gone when it is over."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console

from tightship.report.text import percent
from tightship.units import format_bytes, format_seconds

__all__ = ["Line"]

_EVERY = 0.1  # seconds between two texts, at least


class Line:
    """``with Line(console, "planning") as line``: ``line.say(...)``, or ``line.planning`` for a planner.

    A planner tells the incumbent: its peak, and the seconds that it adds to a step of ``step_time``.
    """

    def __init__(self, console: Console, what: str, *, step_time: float = 0.0) -> None:
        self.console, self.what, self.step_time = console, what, step_time
        self.began = time.perf_counter()
        self._said = 0.0
        self._status = console.status(what, spinner="dots") if console.is_terminal else None

    def __enter__(self) -> Line:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str, *, always: bool = False) -> None:
        """Replace the text after what is being done; texts that come too fast are left out."""
        now = time.perf_counter()
        if self._status is None or (not always and now - self._said < _EVERY):
            return
        self._said = now
        self._status.update(f"{self.what} · {format_seconds(now - self.began)} · {text}")

    def planning(self, peak: int, extra: float, met: bool) -> bool:
        """A planner's progress: never stops the search."""
        self.say(incumbent(peak, extra, met, self.step_time))
        return False


def incumbent(peak: int, extra: float, met: bool, step_time: float = 0.0) -> str:
    """The best plan so far, in words."""
    cost = percent(step_time + extra, step_time) if step_time else f"+{format_seconds(extra)}"
    verdict = "within the budget" if met else "not yet within the budget"
    return f"peak {format_bytes(peak)}, {verdict} · time {cost}"
