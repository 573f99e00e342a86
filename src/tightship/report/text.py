"""Plans and peaks as text for people. Tables fit 60 columns; nothing is coloured that is not a terminal's."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.machine import LOSSY
from tightship.plan import Plan
from tightship.report.numbers import Peak, Share
from tightship.units import format_bytes, format_seconds

__all__ = ["describe", "infeasible_rows", "peak_tables", "percent", "rendered", "share_table"]

NARROW = 60
"""Columns that are enough for every table here."""


def percent(part: float, whole: float) -> str:
    """A change from ``whole`` to ``part``: ``-38.2 %``, ``+0.4 %``."""
    if not whole:
        return "±0 %"
    change = 100 * (part / whole - 1)
    return "±0 %" if abs(change) < 0.05 else f"{change:+.1f} %"


def describe(plan: Plan, graph: Graph | None = None) -> str:
    """What a plan does and what it costs, one fact a line."""
    static = f"{format_bytes(plan.static)} of the peak"
    rows = [("peak", _peak(plan)), ("before", _before(plan)), ("static", static)]
    if plan.residences:
        handed = f", and {format_bytes(plan.handed)} of results outside it" if plan.handed else ""
        rows.append(("arena", format_bytes(plan.arena) + handed))
    if plan.lower_bound:
        bound = f"{format_bytes(plan.lower_bound)}; the peak is {100 * plan.gap:.1f} % above it"
        rows.append(("lower bound", bound))
    rows.append(("time", _time(plan)))
    if plan.time_bound and plan.budget is not None:
        least = f"{format_seconds(plan.time_bound)}; the time is {100 * plan.time_gap:.1f} % above it"
        rows.append(("time bound", least))
    rows.append(("done", _done(plan, graph)))
    if plan.planner:
        rows.append(("planner", f"{plan.planner}, in {format_seconds(plan.seconds)}"))
    rows += [("note", note) for note in plan.notes]
    title = f"plan for {graph.name} ({len(graph.ops)} ops)" if graph is not None else "plan"
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _peak(plan: Plan) -> str:
    text = format_bytes(plan.peak)
    if plan.budget is None:
        return f"{text}, no budget"
    verdict = "within" if plan.met else "NOT within"
    return f"{text}, {verdict} the budget of {format_bytes(plan.budget)}"


def _before(plan: Plan) -> str:
    change = percent(plan.peak, plan.peak_before)
    return f"{format_bytes(plan.peak_before)} unplanned ({change} with the plan)"


def _time(plan: Plan) -> str:
    before = format_seconds(plan.time_before)
    return f"{format_seconds(plan.time)}, {before} unplanned ({percent(plan.time, plan.time_before)})"


def _done(plan: Plan, graph: Graph | None) -> str:
    counts = [
        (plan.count("recompute"), "recomputed"),
        (plan.count("offload"), f"offloaded ({format_bytes(plan.host)} outside)"),
        (plan.count("compress"), f"compressed ({_codecs(plan)})"),
        (sum(s.saves for s in plan.steps), "drawn again from saved random states"),
        (plan.moved, "moved"),
        (sum(len(s.reuses) for s in plan.steps), "in place of inputs"),
    ]
    done = [f"{n} {word}" for n, word in counts if n]
    return ", ".join(done) if done else "nothing: everything is kept, in the given order"


def _codecs(plan: Plan) -> str:
    count = Counter(s.codec for s in plan.steps if s.kind == "compress")
    return ", ".join(
        f"{n} {codec}{', lossy' if codec in LOSSY else ''}" for codec, n in sorted(count.items())
    )


# --- the peak ---


def peak_tables(peak: Peak, *, title: str, top: int = 10) -> list[RenderableType]:
    """Who makes up a peak: by kind, by module, by source line, and the largest one by one."""
    where = f"at step {peak.step}, while {peak.op} runs" if peak.op else "before the first step"
    dynamic = sum(b for _, b, _ in peak.by_storage)
    tables: list[RenderableType] = [
        f"{title}: {format_bytes(peak.bytes)} {where}",
        "",
        share_table("kind", peak.by_kind, peak.bytes, top=len(peak.by_kind)),
    ]
    if peak.by_storage:
        heading = f"Outside the static set: {format_bytes(dynamic)}"
        tables += ["", heading, "", share_table("made in module", peak.by_module, dynamic, top=top)]
        tables += ["", share_table("made on line", peak.by_source, dynamic, top=top)]
        tables += ["", _largest(peak.by_storage[:top])]
    return tables


def share_table(heading: str, shares: Sequence[Share], whole: int, *, top: int) -> Table:
    """Shares of ``whole`` bytes, the largest ``top`` of them and what the rest comes to."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    table.add_column(heading, overflow="fold", min_width=18, max_width=64)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("storages", justify="right", no_wrap=True)
    for s in shares[:top]:
        table.add_row(s.name, format_bytes(s.bytes), _share(s.bytes, whole), str(s.count))
    rest = shares[top:]
    if rest:
        size = sum(s.bytes for s in rest)
        count = str(sum(s.count for s in rest))
        table.add_row(f"({len(rest)} more)", format_bytes(size), _share(size, whole), count, style="dim")
    return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _largest(rows: Sequence[tuple[str, int, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    table.add_column("largest", overflow="fold", min_width=14, max_width=40)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("made on line", overflow="fold", min_width=18)
    for name, size, place in rows:
        table.add_row(name, format_bytes(size), place)
    return table


def infeasible_rows(error: Infeasible) -> dict[str, object]:
    """An ``Infeasible`` as the keys that other programs read."""
    return {
        "met": False,
        "budget": error.budget,
        "lower_bound": error.lower_bound,
        "best_peak": error.best_peak,
        "placed": error.placed,
        "impossible": error.impossible,
        "at": error.at,
        "advice": list(error.advice),
        "top": [{"name": n, "bytes": b, "place": p} for n, b, p in error.top],
    }


def rendered(items: Sequence[RenderableType], width: int = 100) -> str:
    """Rich renderables as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=max(width, NARROW), highlight=False)
    for item in items:
        console.print(item, markup=False) if isinstance(item, str) else console.print(item)
    return out.getvalue()
