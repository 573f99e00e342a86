"""A plan, and a frontier, as a page: memory before and after, evictions, the arena, streams, the peak's makers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.frontier import Frontier, budget_of
from tightship.report.numbers import BANDS, NUMBERS, POINT, POLICY, columns, frontier_rows, percent, summary
from tightship.report.pages import Fact, Section, page_of
from tightship.report.pages.sections import folded, marks, panel, peak_table, steps_of, table, without_empty
from tightship.report.picture import NAMES
from tightship.simulate import baseline, replay
from tightship.units import format_bytes, format_seconds

__all__ = ["frontier_page", "plan_page"]

_SLOTS = 12_000
"""Columns of memory in all: of many plans, each has fewer."""


def plan_page(
    graph: Graph,
    plan: Plan,
    *,
    title: str = "",
    rows: Mapping[str, Any] | None = None,
    before: Graph | None = None,
) -> str:
    """The page's text. ``rows``: the plan's numbers where they are not those of ``summary``: of a module, whose peak
    counts bytes that its graph does not have. ``before``: what there was, where planning changed what ops call."""
    s = dict(summary(plan, graph) if rows is None else rows)
    facts: list[Fact] = [(n.heading, s[n.key], n.unit) for n in NUMBERS if n.heading and n.key in s]
    about = f"{s['planner']}, planned in {format_seconds(s['seconds'])}; {len(plan.steps)} steps"
    about += "" if s["met"] else "; the budget is NOT met"
    before = before or graph
    unplanned = replay(before, baseline(before)).peak
    beside = (s["peak_before"] - unplanned, s["peak_after"] - plan.peak)
    sections = steps_of(before, graph, plan, marks(s["budget"], s["lower_bound"]), beside)
    return page_of(title or f"Plan for {graph.name}", about, facts, sections, s)


# --- a frontier ---


def frontier_page(f: Frontier, *, title: str = "") -> str:
    """The page's text: the trade-off beside other policies, and memory before and after of the plan chosen."""
    rows = frontier_rows(f)
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
    tables = [
        table(
            heading,
            [(n.heading, n.unit) for n in numbers],
            [[n.of(f, row) for n in numbers] for row in rows_],
        )
        for heading, numbers, rows_ in (("Plans", POINT, f.points), ("Other policies", POLICY, f.others))
        if rows_
    ]
    sections = [_chart(f), _memory(f), *tables, at_peak]
    return page_of(title or f"Time against memory: {f.graph.name}", about, facts, sections, rows)


def _chart(f: Frontier) -> Section:
    once = f.points[0].time_before or 1.0
    values = [{n.key: n.of(f, p) for n in POINT} | {"time": p.time} for p in f.points]
    points = [v | {"name": f"budget {format_bytes(v['budget'])}", "said": v["changes"]} for v in values]
    peers = [
        {"name": o.name, "peak": o.peak, "time": o.time, "extra": o.time / once - 1}
        | {"said": "" if o.ours is None else f"a plan for as much memory: {percent(o.ours.time, once)}"}
        for o in f.others
    ]
    heading = "Time against memory"
    return {"kind": "frontier", "heading": heading, "points": points, "peers": peers, "bound": f.lower_bound}


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
