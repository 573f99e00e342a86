"""A frontier to look at: as numbers, as tables, and as a picture of time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from tightship.plan import Plan
from tightship.planners.frontier import Frontier, Other, budget_of, extra_flops
from tightship.report.numbers import summary
from tightship.report.picture import ticks
from tightship.report.terminal import Fitting
from tightship.report.text import percent
from tightship.units import format_bytes, format_seconds

__all__ = ["done", "frontier_picture", "frontier_rows", "frontier_tables"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 920, 420, 74, 40, 76, 64
_STYLE = """
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px;fill:#475569}
.title{font-size:17px;font-weight:600;fill:#0f172a} .end{text-anchor:end} .mid{text-anchor:middle}
.paper{fill:#ffffff} .grid{stroke:#e2e8f0} .axis{stroke:#94a3b8} .line{stroke:#3b82c4;stroke-width:2;fill:none}
.dot{fill:#3b82c4} .bound{stroke:#94a3b8;stroke-width:1.4;stroke-dasharray:4 3;fill:none} .other{fill:#e0912f}
@media (prefers-color-scheme:dark){
text{fill:#a8b3c4} .title{fill:#f1f5f9} .paper{fill:#0f1620} .grid{stroke:#253041} .axis{stroke:#52607a}
.line{stroke:#4f9bdc} .dot{fill:#4f9bdc} .other{fill:#e8a44d}
}
"""


def frontier_rows(f: Frontier) -> dict[str, Any]:
    """A frontier as the keys that other programs read: ``points``, each as a plan's, and ``peers``."""
    return {
        "graph": f.graph.name,
        "ops": len(f.graph.ops),
        "lower_bound": f.lower_bound,
        "least_peak": min(p.peak for p in f.points),
        "seconds": f.seconds,
        "interrupted": f.interrupted,
        "notes": list(f.notes),
        "points": [
            summary(p, f.graph) | {"extra_flops": extra_flops(f.graph, p.steps)} for p in f.points
        ],
        "peers": [
            {"name": o.name, "peak_after": o.peak, "time_after": o.time, "extra_flops": o.extra_flops,
             "ours": None if o.ours is None else summary(o.ours, f.graph)}
            for o in f.others
        ],
    }  # fmt: skip


def frontier_tables(f: Frontier) -> list[RenderableType]:
    """The plans, from the least memory up; then each of the others beside the plan for as much memory."""
    once = f.points[0].time_before
    head = f"{f.graph.name} ({len(f.graph.ops)} ops), one step {format_seconds(once)}; "
    rows = [
        {
            "budget": format_bytes(budget_of(p)),
            "peak": format_bytes(p.peak),
            "extra time": percent(p.time, once),
            "at least": percent(p.time_bound, once),
            "extra FLOPs": f"{100 * extra_flops(f.graph, p.steps):+.1f} %",
            "done": done(p),
        }
        for p in f.points
    ]
    table = Fitting([_table(rows), _table(rows, "budget", "extra FLOPs")])
    found: list[RenderableType] = [f"{head}no plan needs less than {format_bytes(f.lower_bound)}", "", table]
    if f.others:
        beside = [_beside(o, once) for o in f.others]
        found += ["", Fitting([_table(beside), _table(beside, "extra FLOPs")])]
    ended = "; interrupted: not all that were asked for" if f.interrupted else ""
    found += ["", *f.notes] if f.notes else []
    return [*found, "", f"{len(f.points)} plans in {format_seconds(f.seconds)}{ended}"]


def done(plan: Plan) -> str:
    """What a plan does, in a few words."""
    kinds = {"recompute": "recomputed", "offload": "offloaded", "compress": "compressed"}
    counts = [f"{n} {word}" for kind, word in kinds.items() if (n := plan.count(kind))]
    return ", ".join(counts) or "nothing"


def _beside(o: Other, once: float) -> dict[str, str]:
    best = o.ours
    return {
        "others": o.name,
        "peak": format_bytes(o.peak),
        "extra time": percent(o.time, once),
        "extra FLOPs": f"{100 * o.extra_flops:+.1f} %",
        "ours within it": "none"
        if best is None
        else f"{percent(best.time, once)} at {format_bytes(best.peak)}",
    }


def _table(rows: Sequence[dict[str, str]], *without: str) -> Table:
    """Rows by column; ``without``: columns that a narrow terminal has no room for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in rows[0]:
        if name not in without:
            table.add_column(name, justify="left" if name == "others" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(text for name, text in row.items() if name not in without))
    return table


# --- the picture ---


def frontier_picture(f: Frontier) -> str:
    """Extra time (share of a step) against peak, as SVG that needs nothing else."""
    once = f.points[0].time_before or 1.0
    ours = [(p.peak, 100 * (p.time / once - 1)) for p in f.points]
    bound = [(budget_of(p), 100 * (p.time_bound / once - 1)) for p in f.points]
    shown = [o for o in f.others if o.peak <= 2 * max(p.peak for p in f.points)]
    theirs = [(o.peak, 100 * (o.time / once - 1)) for o in shown]
    across = ticks(max(x for x, _ in (*ours, *theirs)))
    up = _percents(max(1.0, *(y for _, y in (*ours, *theirs))))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(nbytes: float) -> float:
        return round(LEFT + wide * nbytes / (across[-1] or 1), 1)

    def y(share: float) -> float:
        return round(TOP + high * (1 - share / up[-1]), 1)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(a)},{y(max(0.0, b))}" for a, b in points)

    base = HEIGHT - BOTTOM
    parts = [f'<text class="title" x="{LEFT}" y="30">{escape(f.graph.name)}: time against memory</text>']
    parts.append(f'<text x="{LEFT}" y="50">extra time of one step, by peak; dashed: no plan is below</text>')
    for v in up:
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y(v)}" x2="{WIDTH - RIGHT}" y2="{y(v)}"/>')
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{y(v) + 4}">+{v:g} %</text>')
    for v in across:
        parts.append(f'<text class="mid" x="{x(v)}" y="{base + 18}">{format_bytes(v)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>')
    low = x(f.lower_bound)
    parts.append(f'<line class="bound" x1="{low}" y1="{TOP}" x2="{low}" y2="{base}"/>')
    parts.append(f'<polyline class="bound" points="{path(bound)}"/>')
    parts.append(f'<polyline class="line" points="{path(ours)}"/>')
    parts += [f'<circle class="dot" cx="{x(a)}" cy="{y(max(0.0, b))}" r="3.5"/>' for a, b in ours]
    for o, (a, b) in zip(shown, theirs, strict=True):
        parts.append(f'<circle class="other" cx="{x(a)}" cy="{y(b)}" r="4"/>')
        parts.append(f'<text x="{x(a) + 7}" y="{y(b) + 4}">{escape(o.name)}</text>')
    body = "\n".join(parts)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{escape(f.graph.name)}: time against memory">'
    )
    return (
        f'{head}\n<style>{_STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n{body}\n</svg>\n'
    )


def _percents(most: float) -> list[float]:
    """Round levels from 0 to at least ``most``, four to ten of them."""
    step = 1.0
    while most / step > 8:
        step *= 2.5 if f"{step:g}"[0] == "2" else 2
    return [step * j for j in range(int(-(-most // step)) + 1)]
