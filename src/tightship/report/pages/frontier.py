"""A frontier as a page: time against memory beside other policies, and memory before and after of the plan chosen."""

from __future__ import annotations

from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.frontier import Frontier, budget_of, extra_flops
from tightship.report.frontier import done, frontier_rows
from tightship.report.numbers import BANDS, columns
from tightship.report.pages import Fact, Section, page_of
from tightship.report.pages.sections import folded, marks, panel, peak_table, table, without_empty
from tightship.report.picture import NAMES
from tightship.report.text import percent
from tightship.simulate import baseline, replay
from tightship.units import format_bytes, format_seconds

__all__ = ["frontier_page"]

_SLOTS = 12_000
"""Columns of memory in all: of many plans, each has fewer."""


def frontier_page(f: Frontier, *, title: str = "") -> str:
    """The page's text."""
    rows, once = frontier_rows(f), f.points[0].time_before or 1.0
    facts: list[Fact] = [
        ("least peak", rows["least_peak"], "bytes"),
        ("before", f.points[0].peak_before, "bytes"),
        ("lower bound", f.lower_bound, "bytes"),
        ("time before", f.points[0].time_before, "seconds"),
        ("plans", len(f.points), "count"),
        ("other policies", len(f.others), "count"),
    ]
    about = (
        f"{len(f.points)} plans for {f.graph.name} ({len(f.graph.ops)} ops), in {format_seconds(f.seconds)}"
    )
    tightest = f.points[0]
    at_peak = peak_table(f.graph, tightest.steps, replay(f.graph, tightest.steps))
    at_peak["heading"] = "The peak of the plan that needs least"
    sections = [_chart(f, once), _memory(f), _plans(f, once), *_others(f, once), at_peak]
    return page_of(title or f"Time against memory: {f.graph.name}", about, facts, sections, rows)


def _chart(f: Frontier, once: float) -> Section:
    points = [
        {"name": f"budget {format_bytes(budget_of(p))}", "peak": p.peak, "budget": budget_of(p)}
        | {
            "time": p.time,
            "extra": p.time / once - 1,
            "least": max(0.0, p.time_bound / once - 1),
            "said": done(p),
        }
        for p in f.points
    ]
    peers = [
        {
            "name": o.name,
            "peak": o.peak,
            "time": o.time,
            "extra": o.time / once - 1,
            "said": _against(o.ours, once),
        }
        for o in f.others
    ]
    heading = "Time against memory"
    return {"kind": "frontier", "heading": heading, "points": points, "peers": peers, "bound": f.lower_bound}


def _against(ours: Plan | None, once: float) -> str:
    return "" if ours is None else f"a plan for as much memory: {percent(ours.time, once)}"


def _memory(f: Frontier) -> Section:
    """Before, beside the plan that was chosen; the lines are those of the tightest budget."""
    slots = min(600, _SLOTS // len(f.points))
    panels = [_panel("before planning", f.graph, None, slots)]
    panels += [_panel(f"with the plan for {format_bytes(budget_of(p))}", f.graph, p, slots) for p in f.points]
    bands = without_empty([(b, NAMES[b]) for b in BANDS], panels)
    before, first, *_ = panels
    return {
        "kind": "memory", "heading": "Memory over the steps", "across": "step",
        "bands": bands,
        "panels": [before, first | {"choices": panels[1:]}], "lines": marks(None, f.lower_bound),
    }  # fmt: skip


def _panel(caption: str, graph: Graph, plan: Plan | None, slots: int) -> dict[str, Any]:
    steps = baseline(graph) if plan is None else plan.steps
    rows = [c.bytes for c in columns(graph, steps)]
    less = folded(rows, slots)
    times = [len(rows) * k // max(1, len(less)) for k in range(len(less))]
    made = panel(caption, less, "before" if plan is None else "plan")
    return made | {"times": times, "end": max(1, len(rows))}


def _plans(f: Frontier, once: float) -> Section:
    names = [("budget", "bytes"), ("peak", "bytes"), ("extra time", "percent"), ("at least", "percent")]
    names += [("extra FLOPs", "percent"), ("done", "text")]
    rows = [
        [
            budget_of(p),
            p.peak,
            p.time / once - 1,
            max(0.0, p.time_bound / once - 1),
            extra_flops(f.graph, p.steps),
            done(p),
        ]
        for p in f.points
    ]
    return table("Plans", names, rows)


def _others(f: Frontier, once: float) -> list[Section]:
    if not f.others:
        return []
    names = [
        ("policy, simulated", "text"),
        ("peak", "bytes"),
        ("extra time", "percent"),
        ("extra FLOPs", "percent"),
    ]
    names += [("ours within as much memory", "text")]

    def ours(p: Plan | None) -> str:
        return "none" if p is None else f"{percent(p.time, once)} at {format_bytes(p.peak)}"

    rows = [[o.name, o.peak, o.time / once - 1, o.extra_flops, ours(o.ours)] for o in f.others]
    return [table("Other policies", names, rows)]
