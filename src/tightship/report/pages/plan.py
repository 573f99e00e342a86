"""A plan as a page: memory before and after, evictions, streams, the arena, and who makes up the peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.report.numbers import summary
from tightship.report.pages import Fact, page_of
from tightship.report.pages.sections import marks, steps_of
from tightship.simulate import baseline, replay
from tightship.units import format_seconds

__all__ = ["plan_page"]


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
    done = [
        (name, s[name], "count") for name in ("recomputed", "offloaded", "compressed", "moved") if name in s
    ]
    facts: list[Fact] = [
        ("peak", s["peak_after"], "bytes"),
        ("before", s["peak_before"], "bytes"),
        ("budget", s["budget"], "bytes"),
        ("lower bound", s["lower_bound"], "bytes"),
        ("static", s["static"], "bytes"),
        ("arena", s["arena"], "bytes"),
        ("time", s["time_after"], "seconds"),
        ("time before", s["time_before"], "seconds"),
        *done,
    ]
    about = f"{s['planner']}, planned in {format_seconds(s['seconds'])}; {len(plan.steps)} steps"
    about += "" if s["met"] else "; the budget is NOT met"
    before = before or graph
    unplanned = replay(before, baseline(before)).peak
    beside = (s["peak_before"] - unplanned, s["peak_after"] - plan.peak)
    sections = steps_of(before, graph, plan, marks(s["budget"], s["lower_bound"]), beside)
    return page_of(title or f"Plan for {graph.name}", about, facts, sections, s)
