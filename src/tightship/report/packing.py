"""A packing as a picture: time across, offsets up, one rectangle for each buffer, as SVG that needs nothing else.

The color of a buffer says how long it lives. What of it is not alive (its gaps) is drawn pale. Pointing at a
buffer shows its id, bytes and live range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tightship.plan import Buffer, Problem, Solution
from tightship.report.picture import short, ticks
from tightship.units import format_bytes, visible

__all__ = ["COLORS", "DARK", "MOST", "age", "packing_picture", "time_ticks"]

MOST = 20_000
"""Buffers that are drawn; of more, those with the largest area."""

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 920, 74, 116, 74, 74
ACROSS, UP = WIDTH - LEFT - RIGHT, 400
COLORS = ("#eab55e", "#e08a5b", "#c9647a", "#8f5fa8", "#4f6fc0", "#28809f")
DARK = ("#d9a34d", "#d67f52", "#c45d75", "#9467b5", "#5b7cd0", "#2f86ab")
_STYLE = """
text{{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;fill:#475569}}
.title{{font-size:17px;font-weight:600;fill:#0f172a}} .end{{text-anchor:end}} .mid{{text-anchor:middle}}
.paper{{fill:#ffffff}} .grid{{stroke:#e2e8f0}} .axis{{stroke:#94a3b8}} .edge{{stroke:#ffffff;stroke-width:.8}}
.pale{{opacity:.25}} .id{{font-size:11px;text-anchor:middle;pointer-events:none}}
.on0,.on1,.on2{{fill:#1e1206}} .on3,.on4,.on5{{fill:#ffffff}} .mark{{fill:#0f172a}}
.capacity{{stroke:#0f172a;stroke-width:1.4;stroke-dasharray:6 4}}
.bound{{stroke:#0f172a;stroke-width:1.2;stroke-dasharray:1.5 3}} .arena{{stroke:#0f172a;stroke-width:1}}
{light}
@media (prefers-color-scheme:dark){{
text{{fill:#a8b3c4}} .title,.mark{{fill:#f1f5f9}} .paper{{fill:#0f1620}} .grid{{stroke:#253041}}
.axis{{stroke:#52607a}} .edge{{stroke:#0f1620}} .capacity,.bound,.arena{{stroke:#f1f5f9}}
.on0,.on1,.on2{{fill:#1e1206}} .on3,.on4,.on5{{fill:#ffffff}}
{dark}
}}
"""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class _Scale:
    """Where times and offsets are in the picture."""

    since: int
    until: int
    top: int

    def x(self, time: int) -> float:
        return round(LEFT + ACROSS * ((time - self.since) / ((self.until - self.since) or 1)), 2)

    def y(self, offset: int) -> float:
        return round(TOP + UP - UP * (offset / (self.top or 1)), 2)

    def shade(self, b: Buffer) -> int:
        return age(b, self.until - self.since)


def packing_picture(problem: Problem, solution: Solution, *, title: str = "packing") -> str:
    """The packing as SVG text, with its arena, its lower bound and the problem's capacity."""
    rows = list(zip(problem.buffers, solution.offsets, strict=True))
    shown = rows
    if len(rows) > MOST:
        shown = sorted(rows, key=lambda row: -row[0].size * (row[0].upper - row[0].lower))[:MOST]
    marks = _marks(problem, solution)
    levels = ticks(max([solution.arena, *(nbytes for _, _, nbytes in marks)]))
    since = min((b.lower for b in problem.buffers), default=0)
    scale = _Scale(since, max((b.upper for b in problem.buffers), default=1), levels[-1])
    parts = [_head(title, problem, solution, len(shown)), _axes(scale, levels)]
    # Those with gaps first: what lies in a gap is drawn over it.
    parts += [_drawn(b, offset, scale) for b, offset in sorted(shown, key=lambda row: not row[0].gaps)]
    parts += [_lines(marks, scale), _legend()]
    light = " ".join(f".c{k}{{fill:{c}}}" for k, c in enumerate(COLORS))
    dark = " ".join(f".c{k}{{fill:{c}}}" for k, c in enumerate(DARK))
    height = TOP + UP + BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">\n<title>{_text(title)}: where every byte lies</title>\n'
        f"<style>{_STYLE.format(light=light, dark=dark)}</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def age(b: Buffer, span: int) -> int:
    """Which of ``COLORS``: 0 for those that live shortest, in steps of a factor of about two of ``span``."""
    share = (b.upper - b.lower) / (span or 1)
    return max(0, min(len(COLORS) - 1, len(COLORS) + math.floor(math.log2(share)))) if share > 0 else 0


def time_ticks(since: int, until: int) -> list[int]:
    """Round times within ``[since, until]``, three to nine of them where there are so many."""
    span = max(1, until - since)
    base = 10 ** (len(str(max(1, span // 5))) - 1)
    step = next(base * m for m in (1, 2, 5, 10, 20) if span // (base * m) <= 8)
    return list(range(-(-since // step) * step, until + 1, step))


# --- parts ---


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("�", visible(text)))


def _head(title: str, problem: Problem, solution: Solution, shown: int) -> str:
    count = len(problem.buffers)
    facts = [f"{count} buffers" if shown == count else f"the largest {shown} of {count} buffers"]
    facts.append(f"arena {format_bytes(solution.arena)}")
    if solution.lower_bound:
        above = 100 * (solution.arena / solution.lower_bound - 1)
        facts.append("least possible" if solution.optimal else f"{above:.1f} % above the lower bound")
    if problem.capacity is not None:
        met = "within" if solution.arena <= problem.capacity else "NOT within"
        facts.append(f"{met} the capacity of {format_bytes(problem.capacity)}")
    facts += [solution.planner] if solution.planner else []
    heading = f'<text class="title" x="{LEFT}" y="30">{_text(title)}</text>'
    return f'{heading}\n<text x="{LEFT}" y="50">{_text(" · ".join(facts))}</text>'


def _axes(scale: _Scale, levels: Sequence[int]) -> str:
    rows = []
    for level in levels:
        y = scale.y(level)
        rows.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + ACROSS}" y1="{y:g}" y2="{y:g}"/>')
        rows.append(f'<text class="end" x="{LEFT - 8}" y="{y + 4:g}">{short(level)}</text>')
    base = TOP + UP
    rows.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + ACROSS}" y1="{base}" y2="{base}"/>')
    for time in time_ticks(scale.since, scale.until):
        x = scale.x(time)
        rows.append(f'<line class="axis" x1="{x:g}" x2="{x:g}" y1="{base}" y2="{base + 4}"/>')
        rows.append(f'<text class="mid" x="{x:g}" y="{base + 17}">{time}</text>')
    rows.append(f'<text class="end" x="{LEFT + ACROSS}" y="{base + 34}">time</text>')
    rows.append(f'<text class="end" x="{LEFT - 8}" y="{TOP - 12}">offset</text>')
    return "\n".join(rows)


def _drawn(b: Buffer, offset: int, scale: _Scale) -> str:
    """A buffer: what of it is alive, its name if there is room, and all about it for those who point at it."""
    shade = scale.shade(b)
    boxes = [_box(scale, since, until, offset + low, offset + high) for since, until, low, high in b.parts()]
    shapes = [_rect(box) for box in boxes]
    if b.gaps:
        shapes.insert(0, _rect(_box(scale, b.lower, b.upper, offset, offset + b.size), "pale"))
    x, y, width, height = max(boxes, key=lambda box: box[2] * box[3], default=(0.0, 0.0, 0.0, 0.0))
    label = ""
    if width >= 6.4 * len(b.id) + 8 and height >= 13:
        at = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}"'
        label = f'<text class="id on{shade}" {at}>{_text(b.id)}</text>'
    return f'<g class="c{shade}"><title>{_text(_about(b, offset))}</title>{"".join(shapes)}</g>{label}'


def _about(b: Buffer, offset: int) -> str:
    gaps = "".join(
        f"\ngap [{g.lower}, {g.upper})"
        + (f", bytes [{g.window[0]}, {g.window[1]}) alive" if g.window else "")
        for g in b.gaps
    )
    size = f"{format_bytes(b.size)} ({b.size} B)" if b.size >= 1024 else f"{b.size} B"
    return f"{b.id}\n{size} at [{offset}, {offset + b.size})\nalive [{b.lower}, {b.upper}){gaps}"


def _box(scale: _Scale, since: int, until: int, start: int, end: int) -> tuple[float, float, float, float]:
    x, y = scale.x(since), scale.y(end)
    return x, y, max(0.3, scale.x(until) - x), max(0.3, scale.y(start) - y)


def _rect(box: tuple[float, float, float, float], kind: str = "") -> str:
    x, y, width, height = box
    kinds = [kind] if kind else []
    if width > 3 and height > 3:  # around smaller ones, edges would be all that is seen
        kinds.append("edge")
    named = f'class="{" ".join(kinds)}" ' if kinds else ""
    return f'<rect {named}x="{x:g}" y="{y:g}" width="{width:.2f}" height="{height:.2f}"/>'


def _marks(problem: Problem, solution: Solution) -> list[tuple[str, str, int]]:
    """(class, words, bytes) of the lines across; a capacity that would leave most of the picture empty is none."""
    marks = [("arena", "arena", solution.arena)] if solution.offsets else []
    if solution.lower_bound and not solution.optimal:
        marks.append(("bound", "lower bound", solution.lower_bound))
    elif marks and solution.optimal:
        marks = [("arena", "arena = bound", solution.arena)]
    if problem.capacity is not None and problem.capacity <= 1.5 * solution.arena:
        marks.append(("capacity", "capacity", problem.capacity))
    return sorted(marks, key=lambda mark: -mark[2])


def _lines(marks: Sequence[tuple[str, str, int]], scale: _Scale) -> str:
    rows = []
    for (kind, words, nbytes), at in zip(marks, _apart([scale.y(n) for *_, n in marks]), strict=True):
        y = scale.y(nbytes)
        rows.append(f'<line class="{kind}" x1="{LEFT}" x2="{LEFT + ACROSS}" y1="{y:g}" y2="{y:g}"/>')
        rows.append(f'<text class="mark" x="{LEFT + ACROSS + 8}" y="{at - 1:g}">{words}</text>')
        rows.append(f'<text x="{LEFT + ACROSS + 8}" y="{at + 12:g}">{format_bytes(nbytes)}</text>')
    return "\n".join(rows)


def _apart(heights: Sequence[float]) -> Iterator[float]:
    """Heights for labels of two lines, from above, that do not touch."""
    last = -math.inf
    for y in heights:
        last = max(y, last + 30)
        yield last


def _legend() -> str:
    y = TOP + UP + 56
    rows = [f'<text x="{LEFT}" y="{y}">lives short</text>']
    for k in range(len(COLORS)):
        rows.append(
            f'<rect class="c{k}" x="{LEFT + 66 + 16 * k}" y="{y - 10}" width="14" height="12" rx="2"/>'
        )
    rows.append(f'<text x="{LEFT + 70 + 16 * len(COLORS)}" y="{y}">long</text>')
    return "\n".join(rows)
