"""Pictures, each one SVG file that needs nothing else: memory over a step before and after planning; a frontier.

Both panels of a plan have the same scale. A column of the picture shows the highest step that falls into it, so no
peak is lost by drawing. Colors follow the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.frontier import Frontier, budget_of
from tightship.report.numbers import BANDS, Column, columns, comparable, slots
from tightship.simulate import baseline
from tightship.units import format_bytes, format_seconds, percent, visible

__all__ = ["COLORS", "DARK", "NAMES", "frontier_picture", "picture", "short", "ticks"]

WIDTH, LEFT, RIGHT = 920, 74, 116
TOP, PANEL, BETWEEN, BOTTOM = 92, 190, 46, 58
FRONTIER = 420  # height
SLOTS = 730  # columns drawn, one for each unit of the plot's width
COLORS = dict(zip(BANDS, ("#94a3b8", "#b9a6cf", "#7fb3a6", "#3b82c4", "#e0912f", "#b5495b"), strict=True))
DARK = dict(zip(BANDS, ("#64748b", "#8472a3", "#4d8579", "#4f9bdc", "#e8a44d", "#d4677a"), strict=True))
NAMES = dict(
    zip(
        BANDS,
        ("parameters", "optimizer state", "inputs", "activations", "gradients", "workspace"),
        strict=True,
    )
)
_STYLE = """
text{{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;fill:#475569}}
.title{{font-size:17px;font-weight:600;fill:#0f172a}} .head{{font-size:13px;font-weight:600;fill:#0f172a}}
.end{{text-anchor:end}} .mid{{text-anchor:middle}} .paper{{fill:#ffffff}}
.grid{{stroke:#e2e8f0;stroke-width:1}} .axis{{stroke:#94a3b8;stroke-width:1}}
.budget{{stroke:#0f172a;stroke-width:1.4;stroke-dasharray:6 4}}
.bound{{stroke:#0f172a;stroke-width:1.2;stroke-dasharray:1.5 3;fill:none}}
.line{{stroke:#3b82c4;stroke-width:2;fill:none}}
.mark{{fill:#0f172a}} {light}
@media (prefers-color-scheme:dark){{
text{{fill:#a8b3c4}} .title,.head,.mark{{fill:#f1f5f9}} .paper{{fill:#0f1620}} .grid{{stroke:#253041}}
.axis{{stroke:#52607a}} .budget,.bound{{stroke:#f1f5f9}} .line{{stroke:#4f9bdc}} {dark}
}}
"""


@dataclass(frozen=True)
class _Panel:
    """One plot: its data, where its top is, and what one second (or step) and one byte are in pixels."""

    heading: str
    data: Sequence[Column]
    top: int
    across: float
    up: float

    def y(self, nbytes: float) -> float:
        return round(self.top + PANEL - nbytes * self.up, 1)


def picture(graph: Graph, plan: Plan, *, title: str = "") -> str:
    """Memory over one step as SVG text: the graph in its own order, and under the plan.

    Across is computing time where ops have times (recomputation shows as length), else the step's number.
    """
    charts = columns(graph, baseline(graph)), columns(graph, plan.steps)
    (before, after), longest, timed = comparable(*charts)
    levels = ticks(max([plan.budget or 0, *(c.total for c in before), *(c.total for c in after)]))
    across, up = SLOTS / longest, PANEL / (levels[-1] or 1)
    planned = f"planned: peak {format_bytes(plan.peak)} ({percent(plan.peak, plan.peak_before)})"
    panels = (
        _Panel(f"before: peak {format_bytes(plan.peak_before)}", before, TOP, across, up),
        _Panel(planned, after, TOP + PANEL + BETWEEN, across, up),
    )
    parts = [_head(title or graph.name, plan)]
    for panel in panels:
        parts += [_axes(panel, levels), _areas(panel), _phases(panel), _lines(panel, plan)]
    parts += [_across(panels[-1], longest if timed else 0.0), _legend([*before, *after])]
    height = TOP + 2 * PANEL + BETWEEN + BOTTOM
    return _svg(height, "\n".join(parts), f"Memory over one step: {title or graph.name}")


def ticks(most: int) -> list[int]:
    """Four to eight round levels of a scale in binary units, from 0 to at least ``most`` bytes."""
    unit = 1024 ** max(0, min(6, int(math.log(most, 1024)))) if most > 0 else 1
    rough = most / unit / 5
    base = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1
    step = next((base * m for m in (1, 2, 2.5, 5, 10) if base * m >= rough), base * 10)
    size = max(1, math.ceil(step * unit))
    return [size * k for k in range(math.ceil(most / size) + 1)] if most > 0 else [0, 1]


# --- parts ---


def _svg(height: int, body: str, title: str) -> str:
    light = " ".join(f".{b}{{fill:{c}}}" for b, c in COLORS.items())
    dark = " ".join(f".{b}{{fill:{c}}}" for b, c in DARK.items())
    style = _STYLE.format(light=light, dark=dark)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">\n<title>{escape(visible(title))}</title>\n<style>{style}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n{body}\n</svg>\n'
    )


def _line(name: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{name}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _text(x: float, y: float, text: str, name: str = "") -> str:
    style = f'class="{name}" ' if name else ""
    return f'<text {style}x="{x:g}" y="{y:g}">{escape(visible(text), quote=False)}</text>'


def _head(title: str, plan: Plan) -> str:
    budget = f"budget {format_bytes(plan.budget)} · " if plan.budget is not None else ""
    time = f"time {percent(plan.time, plan.time_before)} · " if plan.time_before else ""
    changes = f"{plan.count('recompute')} ops recomputed" + (
        f" · {plan.moved} reordered" if plan.moved else ""
    )
    return f"{_text(LEFT, 32, title, 'title')}\n{_text(LEFT, 52, f'{budget}{time}{changes}')}"


def _axes(panel: _Panel, levels: Sequence[int]) -> str:
    rows = [_text(LEFT, panel.top - 10, panel.heading, "head")]
    for level in levels:
        y = panel.y(level)
        rows.append(_line("grid", LEFT, y, LEFT + SLOTS, y))
        rows.append(_text(LEFT - 8, y + 4, short(level), "end"))
    base = panel.top + PANEL
    return "\n".join([*rows, _line("axis", LEFT, base, LEFT + SLOTS, base)])


def _areas(panel: _Panel) -> str:
    """The bands, drawn from the top one down, each to the ground: no gaps, whatever is rounded."""
    drawn = [c.bytes for c in slots(panel.data, SLOTS, SLOTS / panel.across)]
    paths = []
    for b in reversed(range(len(BANDS))):
        paths.append(f'<path class="{BANDS[b]}" d="{_outline(panel, [sum(s[: b + 1]) for s in drawn])}"/>')
    return "\n".join(paths)


def _outline(panel: _Panel, heights: Sequence[int]) -> str:
    base = panel.top + PANEL
    path = [f"M{LEFT} {base}"]
    y = None
    for k, nbytes in enumerate(heights):
        now = panel.y(nbytes)
        if now != y:
            path.append(f"H{LEFT + k}V{now:g}")
            y = now
    path.append(f"H{LEFT + len(heights)}V{base}Z")
    return "".join(path)


def _phases(panel: _Panel) -> str:
    """Where the backward pass begins."""
    begins = next((c.start for c in panel.data if c.phase == "backward"), None)
    if begins is None or not begins:
        return ""
    x = round(LEFT + begins * panel.across, 1)
    y = panel.top + 6
    mark = _line("axis", x, panel.top - 4, x, panel.top + PANEL)
    return mark + _text(x - 5, y, "forward", "end") + _text(x + 5, y, "backward")


def _lines(panel: _Panel, plan: Plan) -> str:
    rows = []
    marks = [("budget", plan.budget), ("bound", plan.lower_bound or None)]
    spots = {name: panel.y(nbytes) for name, nbytes in marks if nbytes is not None}
    labels = dict(spots)
    if len(spots) == 2 and labels["bound"] - labels["budget"] < 30:  # keep two labels of two lines apart
        middle = (labels["bound"] + labels["budget"]) / 2
        labels = {"budget": min(labels["budget"], middle - 15), "bound": max(labels["bound"], middle + 15)}
    for name, nbytes in marks:
        if nbytes is None:
            continue
        y, at = spots[name], labels[name]
        text = "budget" if name == "budget" else "lower bound"
        rows.append(_line(name, LEFT, y, LEFT + SLOTS, y))
        rows.append(_text(LEFT + SLOTS + 8, at - 1, text, "mark"))
        rows.append(_text(LEFT + SLOTS + 8, at + 12, format_bytes(nbytes)))
    return "\n".join(rows)


def _across(panel: _Panel, longest: float) -> str:
    y = panel.top + PANEL + 17
    end = format_seconds(longest) if longest else f"{len(panel.data)} steps"
    unit = "computing time" if longest else "step"
    return _text(LEFT, y, "0") + _text(LEFT + SLOTS, y, end, "end") + _text(LEFT + SLOTS / 2, y, unit, "mid")


def _legend(data: Sequence[Column]) -> str:
    """The bands that there are."""
    y = TOP + 2 * PANEL + BETWEEN + 42
    rows, x = [], float(LEFT)
    for k, band in enumerate(BANDS):
        if not any(c.bytes[k] for c in data):
            continue
        rows.append(f'<rect class="{band}" x="{x:g}" y="{y - 10}" width="12" height="12" rx="2"/>')
        rows.append(_text(x + 18, y, NAMES[band]))
        x += 48 + 6.6 * len(NAMES[band])
    return "\n".join(rows)


# --- a frontier ---


def frontier_picture(f: Frontier) -> str:
    """Extra time (share of a step) against peak, as SVG that needs nothing else."""
    once = f.before[1] or 1.0
    ours = [(p.peak, 100 * (p.time / once - 1)) for p in f.points]
    bound = [(budget_of(p), 100 * (p.time_bound / once - 1)) for p in f.points]
    shown = [o for o in f.others if o.peak <= 2 * max(p.peak for p in f.points)]
    theirs = [(o.peak, 100 * (o.time / once - 1)) for o in shown]
    across = ticks(max(x for x, _ in (*ours, *theirs)))
    up = _percents(max(1.0, *(y for _, y in (*ours, *theirs))))
    wide, high = SLOTS, FRONTIER - TOP - BOTTOM

    def x(nbytes: float) -> float:
        return round(LEFT + wide * nbytes / (across[-1] or 1), 1)

    def y(share: float) -> float:
        return round(TOP + high * (1 - share / up[-1]), 1)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(a)},{y(max(0.0, b))}" for a, b in points)

    base, end = FRONTIER - BOTTOM, LEFT + wide
    title = f"{f.graph.name}: time against memory"
    parts = [_text(LEFT, 30, title, "title")]
    ringed = "; ringed: ops in slices, or a static set that streams" if f.changed else ""
    parts.append(_text(LEFT, 50, f"extra time of one step, by peak; dashed: no plan is below{ringed}"))
    for v in up:
        parts += [_line("grid", LEFT, y(v), end, y(v)), _text(LEFT - 8, y(v) + 4, f"+{v:g} %", "end")]
    parts += [_text(x(v), base + 18, format_bytes(v), "mid") for v in across]
    low = x(f.lower_bound)
    parts += [_line("axis", LEFT, base, end, base), _line("bound", low, TOP, low, base)]
    parts.append(f'<polyline class="bound" points="{path(bound)}"/>')
    parts.append(f'<polyline class="line" points="{path(ours)}"/>')
    for p, (a, b) in zip(f.points, ours, strict=True):
        ring = "" if f.change_of(p) is None else ' stroke="currentColor" stroke-width="2"'
        parts.append(f'<circle class="activation" cx="{x(a)}" cy="{y(max(0.0, b))}" r="3.5"{ring}/>')
    for o, (a, b) in zip(shown, theirs, strict=True):
        parts.append(f'<circle class="gradient" cx="{x(a)}" cy="{y(b)}" r="4"/>')
        parts.append(_text(x(a) + 7, y(b) + 4, o.name))
    return _svg(FRONTIER, "\n".join(parts), title)


def _percents(most: float) -> list[float]:
    """Round levels from 0 to at least ``most``, four to ten of them."""
    step = 1.0
    while most / step > 8:
        step *= 2.5 if f"{step:g}"[0] == "2" else 2
    return [step * j for j in range(int(-(-most // step)) + 1)]


# --- numbers ---


def short(nbytes: int) -> str:
    """A level of a scale: ``1.5 MiB``, ``0``."""
    text = format_bytes(nbytes)
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}" if nbytes else "0"
