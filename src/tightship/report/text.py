"""Plans, peaks and frontiers as text for people: sentences, tables and a chart of characters, from 60 columns up."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tightship.analysis.structure import of_any_layer
from tightship.diagnose.changes import Change
from tightship.graph import Graph
from tightship.machine import LOSSY
from tightship.plan import Plan, Step
from tightship.planners.batch import BatchSize
from tightship.planners.frontier import Frontier
from tightship.report.numbers import (
    POLICY,
    Column,
    Number,
    Peak,
    Share,
    columns,
    comparable,
    makers,
    peak_of,
    point_numbers,
    shown,
    slots,
)  # fmt: skip
from tightship.report.tables import new_table
from tightship.simulate import Timeline, baseline, replay
from tightship.units import NARROW, format_bytes, format_seconds, percent

__all__ = [
    "Chart", "Fitting", "batch_table", "change_lines", "describe", "frontier_tables", "module_tables",
    "peak_lines", "peak_tables", "plan_chart", "remedy_table", "rendered", "share_table", "share_tables",
]  # fmt: skip


def rendered(items: Sequence[RenderableType], width: int = 100) -> str:
    """Rich renderables as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=max(width, NARROW), highlight=False)
    for item in items:
        console.print(item, markup=False) if isinstance(item, str) else console.print(item)
    return out.getvalue()


# --- modules ---


def module_tables(costs: Sequence[Any], top: int = 10) -> list[RenderableType]:
    """What modules cost, each with all that is inside it, the ``top`` with the largest share of the peak; the same
    module of different layers is one row. ``costs``: `ModuleCost` or `ModuleBytes`; nothing without any."""
    if not costs:
        return []
    names = [f.name for f in fields(costs[0]) if f.name not in ("module", "share")]
    sums: dict[str, dict[str, float]] = {}
    for c in costs:
        row = sums.setdefault(of_any_layer(c.module), dict.fromkeys((*names, "share"), 0))
        for name in row:
            row[name] += getattr(c, name)
    ranked = sorted(sums, key=lambda m: (-sums[m]["share"], -sum(sums[m].values())))
    kept = set(ranked[:top])
    used = [name for name in names if any(row[name] for row in sums.values())]
    tables = []
    for shown_names in (used[:k] for k in range(len(used), -1, -1)):
        table = new_table(("module, all inside", 16, None), *(_COSTS[n] for n in shown_names), "share")
        for module, row in sums.items():
            if module in kept:
                said = [_amount(n, row[n]) for n in shown_names]
                table.add_row(module or "(all)", *said, f"{100 * row['share']:.1f} %")
        tables.append(table)
    return [Fitting(tables), ""]


def _amount(name: str, amount: float) -> str:
    if not amount:
        return ""
    return format_seconds(amount) if name == "seconds" else format_bytes(int(amount))


_COSTS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer state",
    "activations": "made by it", "recomputed": "made again", "offloaded": "offloaded", "seconds": "time for both",
}  # fmt: skip


# --- an estimate ---


def share_tables(answer: Any, top: int) -> list[RenderableType]:
    """Who makes up an estimate's peak, by module and by line, the ``top`` largest each."""
    tables = module_tables(answer.modules, top)
    for heading, shares in (("largest in module", answer.by_module), ("line", answer.by_line)):
        table = new_table((heading, 17, None), ("what", 11, None), "bytes", "share")
        for s in shares[:top]:
            of_peak = f"{s.nbytes / max(answer.peak, 1):.0%}"
            table.add_row(s.place or "(none)", s.what.replace("_", " "), format_bytes(s.nbytes), of_peak)
        tables += [table, ""]
    return tables


def remedy_table(remedies: Sequence[Any]) -> RenderableType:
    """What would make it fit."""
    if not remedies:
        return "nothing that could be tried would make it fit"
    table = new_table(("what would help", 20, None), "peak", ("fits", 4, None), ("cost", 20, None))
    for r in remedies:
        table.add_row(r.name, format_bytes(r.peak), "yes" if r.fits else "no", r.cost)
    return table


# --- a plan ---


def batch_table(batches: Sequence[BatchSize]) -> RenderableType:
    """What a step needs at the sizes of the batch that were looked at; seconds of one of the batch are modeled."""
    table = new_table("batch", "as it is", "planned", "time for each", "with the plan")
    for b in batches:
        peak = format_bytes(b.peak) if b.peak is not None else "no plan" if b.met is False else ""
        time = "" if b.time is None else format_seconds(b.time / b.batch)
        before = format_seconds(b.time_before / b.batch)
        table.add_row(str(b.batch), format_bytes(b.unplanned_peak), peak, before, time)
    return table


def describe(plan: Plan, graph: Graph | None = None) -> str:
    """What a plan does and what it costs, one fact a line."""
    peak, before = format_bytes(plan.peak), format_bytes(plan.peak_before)
    verdict = "within" if plan.met else "NOT within"
    budget = "no budget" if plan.budget is None else f"{verdict} the budget of {format_bytes(plan.budget)}"
    rows = [
        ("peak", f"{peak}, {budget}"),
        ("before", f"{before} unplanned ({percent(plan.peak, plan.peak_before)} with the plan)"),
        ("static", f"{format_bytes(plan.static)} of the peak"),
    ]
    if plan.residences:
        handed = f", and {format_bytes(plan.handed)} of results outside it" if plan.handed else ""
        rows.append(("arena", format_bytes(plan.arena) + handed))
    if plan.lower_bound:
        bound = f"{format_bytes(plan.lower_bound)}; the peak is {100 * plan.gap:.1f} % above it"
        rows.append(("lower bound", bound))
    unplanned = f"{format_seconds(plan.time_before)} unplanned ({percent(plan.time, plan.time_before)})"
    rows.append(("time", f"{format_seconds(plan.time)}, {unplanned}"))
    if plan.time_bound and plan.budget is not None:
        least = f"{format_seconds(plan.time_bound)}; the time is {100 * plan.time_gap:.1f} % above it"
        rows.append(("time bound", least))
    rows.append(("changes", _changes(plan)))
    if plan.planner:
        ended = f"; ended by {plan.termination}" if plan.termination else ""
        rows.append(("planner", f"{plan.planner}, in {format_seconds(plan.seconds)}{ended}"))
    rows += [("note", note) for note in plan.notes]
    title = f"plan for {graph.name} ({len(graph.ops)} ops)" if graph is not None else "plan"
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _changes(plan: Plan) -> str:
    counts = [
        (plan.count("recompute"), "ops recomputed"),
        (plan.count("offload"), f"offloaded ({format_bytes(plan.host)} outside)"),
        (plan.count("compress"), f"compressed ({_codecs(plan)})"),
        (sum(s.saves for s in plan.steps), "random states saved"),
        (plan.moved, "reordered"),
        (sum(len(s.reuses) for s in plan.steps), "in place of inputs"),
    ]
    return (
        ", ".join(f"{n} {word}" for n, word in counts if n) or "none: everything is kept, in the given order"
    )


def _codecs(plan: Plan) -> str:
    count = Counter(s.codec for s in plan.steps if s.kind == "compress")
    return ", ".join(f"{n} {c}{', lossy' if c in LOSSY else ''}" for c, n in sorted(count.items()))


# --- the peak ---


def peak_lines(graph: Graph, steps: Sequence[Step], top: int = 5) -> list[str]:
    """The peak in sentences, one a line: which values make it up, and which line of the model made them."""
    line = replay(graph, steps)
    groups = makers(graph, steps, line)
    op = steps[line.peak_step].op if line.peak_step >= 0 else -1
    when = f"while {graph.ops[op].name} runs" if op >= 0 else "before the first step"
    where = f" ({graph.ops[op].source})" if op >= 0 and graph.ops[op].source else ""
    lines = [f"The peak of {format_bytes(line.peak)} is reached {when}{where}. It is made up of:"]
    for m in groups[:top]:
        name = m.what if m.count == 1 else f"{m.count} × {m.what}"
        source = f", made on {m.source}" if m.source else ""
        lines.append(f"  {format_bytes(m.bytes)} ({100 * m.bytes / line.peak:.0f} %): {name}{source}")
    if rest := groups[top:]:
        nbytes, count = sum(m.bytes for m in rest), sum(m.count for m in rest)
        lines.append(f"  {format_bytes(nbytes)} ({100 * nbytes / line.peak:.0f} %): {count} others")
    return lines


def change_lines(changes: Sequence[Change], before: Timeline) -> list[str]:
    """Changes that would lower the peak and what they come to, one a line."""
    if not changes:
        return ["No single change that was tried lowers the peak by 1 % of what is beyond the static set."]

    def cost(extra: float) -> str:
        return f"{percent(before.time + extra, before.time)} time"

    lines = ["The cheapest changes, each simulated on top of those before it:"]
    for c in changes:
        what = (
            f"order: {c.what} ({c.count} ops moved)"
            if c.way == "order"
            else f"{c.way} of {c.count} × {c.what}"
        )
        where = f", made on {c.source}" if c.source else ""
        lines.append(f"  {what}{where}: −{format_bytes(c.saves)}, {cost(c.extra)}")
    last = changes[-1]
    total = f"  together: {format_bytes(before.peak)} to {format_bytes(last.peak)}"
    return [*lines, f"{total}, {cost(last.time - before.time)}"]


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
        tables += ["", _largest("largest", peak, top)]
    return tables


def share_table(heading: str, shares: Sequence[Share], whole: int, *, top: int) -> Table:
    """Shares of ``whole`` bytes, the largest ``top`` of them and what the rest comes to."""
    table = new_table((heading, 18, 64), "bytes", "share", "storages")
    rest = shares[top:]
    more = Share(f"({len(rest)} more)", sum(s.bytes for s in rest), sum(s.count for s in rest))
    for s in [*shares[:top], *([more] if rest else [])]:
        share = f"{100 * s.bytes / whole:.1f} %" if whole else ""
        table.add_row(s.name, format_bytes(s.bytes), share, str(s.count), style="dim" if s is more else None)
    return table


def _largest(heading: str, peak: Peak, top: int) -> Table:
    table = new_table((heading, 14, 40), "bytes", ("made on line", 14, None))
    for name, nbytes, place in peak.by_storage[:top]:
        table.add_row(name, format_bytes(nbytes), place)
    if rest := peak.by_storage[top:]:
        table.add_row(f"({len(rest)} more)", format_bytes(sum(b for _, b, _ in rest)), "", style="dim")
    return table


# --- a frontier ---


def frontier_tables(f: Frontier) -> list[RenderableType]:
    """The plans, from the least memory up; then each of the others beside the plan for as much memory."""
    head = f"{f.graph.name} ({len(f.graph.ops)} ops), one step {format_seconds(f.before[1])}; "
    of = " of those that are tried" if f.changed else ""
    items: list[RenderableType] = [f"{head}no plan{of} needs less than {format_bytes(f.lower_bound)}"]
    for numbers, rows in ((point_numbers(f), f.points), (POLICY, f.others)):
        if rows:
            items += ["", Fitting([_number_table(f, rows, numbers, wide) for wide in (True, False)])]
    ended = "; interrupted: not all that were asked for" if f.interrupted else ""
    items += ["", *f.notes] if f.notes else []
    return [*items, "", f"{len(f.points)} plans in {format_seconds(f.seconds)}{ended}"]


def _number_table(f: Frontier, rows: Sequence[Any], numbers: Sequence[Number], wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    chosen = [n for n in numbers if wide or not n.wide]
    for n in chosen:
        table.add_column(n.heading, justify="left" if n.key == "name" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(shown(n, n.of(f, row)) for n in chosen))
    return table


@dataclass(frozen=True)
class Fitting:
    """The first of several tables that fits the width; the last one where none does."""

    tables: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=1000)
        fits = (t for t in self.tables if console.measure(t, options=wide).maximum <= options.max_width)
        yield next(fits, self.tables[-1])


# --- a chart of characters ---

ROWS = 8
WIDEST = 110
LABEL = 10
EIGHTHS = " ▁▂▃▄▅▆▇█"
STYLES = {"plan": "blue", "before": "bright_black", "budget": "bold yellow", "bound": "green"}


def plan_chart(graph: Graph, plan: Plan, *, top: int = 5) -> list[RenderableType]:
    """Memory over the step as a chart, and who makes up the peak that is left."""
    chart = Chart(columns(graph, baseline(graph)), columns(graph, plan.steps), plan.budget, plan.lower_bound)
    peak = peak_of(graph, plan.steps)
    if not peak.by_storage:
        return ["", chart, ""]
    at = f"while {peak.op} runs" if peak.op else "before the first step"
    where = f"peak at step {peak.step} of {len(plan.steps)}, {at}"
    return ["", chart, "", where, "", _largest("largest at the peak", peak, top)]


@dataclass(frozen=True)
class Chart:
    """Memory over one step: the plan as an area, the unplanned step as dots, budget and lower bound as lines.

    Across is computing time where ops have times, else steps; a column shows the most that falls into it. ``names``:
    what area, dots and the lower line are called; ``end``: what stands at the right end.
    """

    before: Sequence[Column]
    after: Sequence[Column]
    budget: int | None = None
    bound: int = 0
    names: tuple[str, str, str] = ("planned", "before", "lower bound")
    end: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST) - LABEL - 3
        charts, longest, timed = comparable(self.before, self.after)
        drawn = ([c.total for c in slots(data, width, longest)] for data in charts)
        before, after = ([*heights, *[0] * (width - len(heights))] for heights in drawn)
        top = max([self.budget or 0, *before, *after, 1])
        yield from self._rows(before, after, top)
        end = self.end or (format_seconds(longest) if timed else f"{int(longest)} steps")
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
        area, dots, bound = self.names
        parts = [("█", area, "plan"), ("·", dots, "before")]
        parts += [("─", "budget", "budget")] * (self.budget is not None)
        parts += [("┄", bound, "bound")] * bool(self.bound)
        text = Text(" " * (LABEL + 2))
        for sign, name, style in parts:
            text.append(sign, STYLES[style]).append(f" {name}   ")
        text.rstrip()
        return text
