"""How soon the search has its answer: the gap to the lower bound over the seconds of the processor.

    python benchmarks/anytime.py [--models gpt6,…] [--shares 60,40] [--write]

The models of budget.py, captured with modeled times, at shares of what a step needs beyond its static set. A row
says when the first plan within the budget was there, the gap to the bound after 0.1, 0.3 and 1 second, and when and
why the search ended. ``--write`` puts the table and the plot into docs/search.md. Seconds are those of one thread of
the processor from the call on: order and bounds count, capturing the model does not.
"""

from __future__ import annotations

import argparse
import datetime
import time
from dataclasses import dataclass, field
from html import escape
from math import log
from pathlib import Path

import pages
import transformers
from budget import FULL, captured

from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.planners import default
from tightship.simulate import baseline, replay

PAGE = Path(__file__).resolve().parent.parent / "docs" / "search.md"
PICTURE = PAGE.parent / "pictures" / "anytime.svg"
BEGIN, END = "<!-- begin: benchmarks/anytime.py -->", "<!-- end: benchmarks/anytime.py -->"
LOOKS = (0.1, 0.3, 1.0)
HUES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000", "#e08030")


@dataclass
class Trace:
    """What a search said of itself: (seconds of the processor, extra time as a share), each better than the last."""

    title: str
    share: int
    least: float = 0.0
    ended: str = "none found"
    seconds: float = 0.0
    points: list[tuple[float, float]] = field(default_factory=list)

    def gap(self, extra: float) -> float:
        """Points of the step's time above the bound."""
        return 100 * max(0.0, extra - self.least)

    def at(self, seconds: float) -> str:
        known = [extra for at, extra in self.points if at <= seconds]
        return f"{self.gap(known[-1]):.2f}" if known else ""


def traced(title: str, graph: Graph, share: int) -> Trace:
    before = replay(graph, baseline(graph))
    budget = graph.static_bytes + (before.peak - graph.static_bytes) * share // 100
    trace, began = Trace(title, share), time.process_time()

    def told(_peak: int, extra: float, met: bool) -> bool:
        part = extra / before.time
        if met and (not trace.points or part < trace.points[-1][1]):
            trace.points.append((time.process_time() - began, part))
        return False

    try:
        p = default.plan(graph, budget, default.Options(hand_out=False, seconds=600.0), told)
    except Infeasible:
        trace.seconds = time.process_time() - began
        return trace
    trace.seconds, trace.ended = time.process_time() - began, p.termination
    trace.least = p.time_bound / p.time_before - 1
    trace.points.append((trace.seconds, p.time / p.time_before - 1))
    return trace


def table(traces: list[Trace]) -> str:
    head = ["model", "share", "no plan below", "first plan after", *(f"gap after {s:g} s" for s in LOOKS)]
    rows = []
    for t in traces:
        known = [f"+{100 * t.least:.2f} %", f"{t.points[0][0]:.2f} s"] if t.points else ["", ""]
        last = [f"{t.gap(t.points[-1][1]):.2f}" if t.points else "", f"{t.seconds:.2f} s", t.ended]
        rows.append([t.title, f"{t.share} %", *known, *(t.at(s) for s in LOOKS), *last])
    head += ["at the end", "ended after", "by"]
    return pages.table(head, ["---", *["---:"] * (len(head) - 2), "---"], rows)


def picture(traces: list[Trace]) -> str:
    """Gap in points over seconds, both on scales of equal factors, as SVG that needs nothing else."""
    wide, high, left, top = 560.0, 260.0, 60.0, 40.0
    low, far, near, most = 0.05, 20.0, 0.01, 20.0

    def x(seconds: float) -> float:
        return left + wide * _level(seconds, low, far)

    def y(gap: float) -> float:
        return top + high * (1 - _level(gap, near, most))

    rows = [
        f'<text x="{left}" y="22" font-size="14">gap to the bound (points), by seconds of the processor</text>'
    ]
    for gap in (0.01, 0.1, 1, 10):
        rows.append(f'<path d="M{left} {y(gap):.1f}H{left + wide}" stroke="#8884"/>')
        rows.append(f'<text x="{left - 8}" y="{y(gap) + 4:.1f}" text-anchor="end">{gap:g}</text>')
    for seconds in (0.1, 0.3, 1, 3, 10):
        rows.append(
            f'<text x="{x(seconds):.1f}" y="{top + high + 18}" text-anchor="middle">{seconds:g} s</text>'
        )
    names = list(dict.fromkeys(t.title for t in traces))
    for t in traces:
        if not t.points:
            continue
        hue = HUES[names.index(t.title) % len(HUES)]
        path = f"M{x(t.points[0][0]):.1f} {y(t.gap(t.points[0][1])):.1f}"
        path += "".join(f"H{x(at):.1f}V{y(t.gap(extra)):.1f}" for at, extra in t.points[1:])
        dashed = ' stroke-dasharray="5 3"' if t.share != traces[0].share else ""
        rows.append(f'<path d="{path}" fill="none" stroke="{hue}" stroke-width="1.6"{dashed}/>')
    for k, name in enumerate(names):
        at = top + 14 * k
        rows.append(
            f'<rect x="{left + wide + 16}" y="{at - 9}" width="10" height="10" fill="{HUES[k % len(HUES)]}"/>'
        )
        rows.append(f'<text x="{left + wide + 32}" y="{at}">{escape(name)}</text>')
    body = "\n".join(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {top + high + 30:g}" font-family="sans-serif" '
        f'font-size="11" fill="#777">\n{body}\n</svg>\n'
    )


def _level(value: float, low: float, high: float) -> float:
    """Where a value stands between two others, by factors."""
    return log(min(high, max(low, value)) / low) / log(high / low)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="which, by name, with commas")
    parser.add_argument("--shares", default="60,40", help="per cent of the activations, with commas")
    parser.add_argument("--write", action="store_true", help="put table and plot into docs/search.md")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    traces = []
    for name in chosen.models.split(",") if chosen.models else FULL:
        title, make = FULL[name]
        graph = captured(make).graph
        traces += [traced(title, graph, int(share)) for share in chosen.shares.split(",")]
    print(table(traces))
    if chosen.write:
        PICTURE.write_text(picture(traces), encoding="utf-8")
        said = f"{datetime.date.today()}; gaps in points of the step's time; dashed: the second share."
        drawn = f"![gap to the bound over seconds](pictures/{PICTURE.name})"
        pages.put(PAGE, BEGIN, END, "\n\n".join([said, table(traces), drawn]))


if __name__ == "__main__":
    main()
