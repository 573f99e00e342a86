"""Memory over a step as a chart of characters, and the peak as a table: from 60 columns up, in colour or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.report.numbers import Column, columns, peak_of
from tightship.simulate import baseline
from tightship.units import format_bytes, format_seconds

__all__ = ["Chart", "Fitting", "looks"]

ROWS = 8
WIDEST = 110
LABEL = 10
EIGHTHS = " ▁▂▃▄▅▆▇█"
STYLES = {"plan": "blue", "before": "bright_black", "budget": "bold yellow", "bound": "green"}


@dataclass(frozen=True)
class Chart:
    """Memory over one step: the plan as an area, the unplanned step as dots, budget and lower bound as lines.

    Across is computing time where ops have times, else steps; a column shows the most that falls into it.
    """

    before: Sequence[Column]
    after: Sequence[Column]
    budget: int | None = None
    bound: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST) - LABEL - 3
        timed = all(_span(data) > 0 for data in (self.before, self.after))
        spans = [_span(data) if timed else float(len(data)) for data in (self.before, self.after)]
        longest = max(*spans, 1e-12)
        before, after = (_heights(data, width, longest, timed) for data in (self.before, self.after))
        top = max([self.budget or 0, *before, *after, 1])
        yield from self._rows(before, after, top)
        end = format_seconds(longest) if timed else f"{int(longest)} steps"
        yield Text(f"{'0':>{LABEL}} └{'─' * width}")
        yield Text(f"{'':{LABEL}}  0{end:>{width - 1}}", style=STYLES["before"])
        yield self._legend()

    def _rows(self, before: Sequence[int], after: Sequence[int], top: int) -> Iterator[Text]:
        def row_of(nbytes: int) -> int:
            return min(ROWS - 1, nbytes * ROWS // top)

        marks = {"bound": self.bound or None, "budget": self.budget}
        lines = {row_of(n): name for name, n in marks.items() if n is not None}
        labels = {ROWS - 1: top} | {row_of(n): n for n in marks.values() if n is not None}
        for row in reversed(range(ROWS)):
            label = format_bytes(labels[row]) if row in labels else ""
            text = Text(f"{label:>{LABEL}} {'┤' if label else '│'}")
            for was, now in zip(before, after, strict=True):
                eighth = max(0, min(8, round((now * ROWS / top - row) * 8)))
                if eighth:
                    text.append(EIGHTHS[eighth], STYLES["plan"])
                elif was and row_of(was - 1) == row:
                    text.append("·", STYLES["before"])
                elif row in lines:
                    text.append("─" if lines[row] == "budget" else "┄", STYLES[lines[row]])
                else:
                    text.append(" ")
            yield text

    def _legend(self) -> Text:
        parts = [("█", "planned", "plan"), ("·", "before", "before")]
        parts += [("─", "budget", "budget")] * (self.budget is not None)
        parts += [("┄", "lower bound", "bound")] * bool(self.bound)
        text = Text(" " * (LABEL + 2))
        for sign, name, style in parts:
            text.append(sign, STYLES[style]).append(f" {name}   ")
        text.rstrip()
        return text


@dataclass(frozen=True)
class Fitting:
    """The first of several tables that fits the width; the last one where none does."""

    tables: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=1000)
        fits = (t for t in self.tables if console.measure(t, options=wide).maximum <= options.max_width)
        yield next(fits, self.tables[-1])


def looks(graph: Graph, plan: Plan, *, top: int = 5) -> list[RenderableType]:
    """A plan to look at: the chart, and who makes up the peak that is left."""
    chart = Chart(columns(graph, baseline(graph)), columns(graph, plan.steps), plan.budget, plan.lower_bound)
    return ["", chart, "", *_peak(graph, plan, top)]


def _peak(graph: Graph, plan: Plan, top: int) -> list[RenderableType]:
    peak = peak_of(graph, plan.steps)
    if not peak.by_storage:
        return []
    at = f"while {peak.op} runs" if peak.op else "before the first step"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    table.add_column("largest at the peak", overflow="fold", min_width=18, max_width=48)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("made on line", overflow="fold", min_width=14)
    for name, nbytes, place in peak.by_storage[:top]:
        table.add_row(name, format_bytes(nbytes), place)
    rest = peak.by_storage[top:]
    if rest:
        table.add_row(f"({len(rest)} more)", format_bytes(sum(b for _, b, _ in rest)), "", style="dim")
    return [f"peak at step {peak.step} of {len(plan.steps)}, {at}", "", table]


def _span(data: Sequence[Column]) -> float:
    return data[-1].start + data[-1].seconds if data else 0.0


def _heights(data: Sequence[Column], width: int, longest: float, timed: bool) -> list[int]:
    """The most bytes in each of ``width`` stretches of ``longest`` seconds (or steps); 0 after the end."""
    found = [0] * width
    for k, c in enumerate(data):
        start, end = (c.start, c.start + c.seconds) if timed else (float(k), k + 1.0)
        first = min(width - 1, int(start / longest * width))
        last = min(width - 1, int(end / longest * width - 1e-9))
        for slot in range(first, max(first, last) + 1):
            found[slot] = max(found[slot], c.total)
    return found
