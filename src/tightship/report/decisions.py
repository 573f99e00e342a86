"""Why a plan decides as it does, and how two plans differ: in text, as JSON's keys, and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from rich.console import RenderableType

from tightship.diagnose.decisions import Alternative, Difference, Differences, Why
from tightship.plan import Plan
from tightship.report.numbers import NUMBERS, shown, summary
from tightship.report.pages import Fact, cut, page_of, table
from tightship.report.tables import new_table
from tightship.units import format_bytes, format_seconds

__all__ = ["difference_page", "difference_rows", "difference_tables", "why_tables"]

_DONE = {
    "keep": "kept", "recompute": "recomputed", "offload": "offloaded", "compress": "compressed",
    "stream": "streamed", "split": "in slices", "whole": "in one piece",
}  # fmt: skip
_INEXACT = "counted from what the plan's decisions give, which is not quite what its planner made of them"


def why_tables(w: Why) -> list[RenderableType]:
    """What is done with the tensor, and what each alternative comes to."""
    source = f", made in {w.source}" if w.source else ""
    limit = f" within {format_bytes(w.budget)}" if w.budget is not None else ""
    items: list[RenderableType] = [
        f"{w.name} ({w.kind}, {format_bytes(w.bytes)}) is {_DONE[w.way]}{limit}{source}",
        "",
    ]
    wide = max((len(a.way) for a in w.alternatives), default=0)
    items += ["\n".join(f"  {a.way:<{wide}}  {_outcome(a)}" for a in w.alternatives)]
    if w.place:
        items += ["", "\n".join(w.place)]
    return items if w.exact else [*items, "", f"note: {_INEXACT}"]


def _outcome(a: Alternative) -> str:
    if a.verdict in ("chosen", "not possible"):
        return f"{a.verdict}: {a.reason}"
    cost = f"peak {_change(a.more)}" + (f", time {_seconds(a.extra)}" if a.time else "")
    return (
        f"{a.verdict} {a.reason}: {cost}"
        if a.verdict == "over the budget"
        else f"{a.verdict}, {cost}: {a.reason}"
    )


def _change(nbytes: int) -> str:
    return "±0" if not nbytes else f"{'+' if nbytes > 0 else '−'}{format_bytes(abs(nbytes))}"


def _seconds(seconds: float) -> str:
    return "±0" if not seconds else f"{'+' if seconds > 0 else '−'}{format_seconds(abs(seconds))}"


# --- two plans ---


def difference_rows(one: Plan, two: Plan, d: Differences) -> dict[str, Any]:
    """The keys that other programs read."""
    rows = asdict(d) | {"one": summary(one), "two": summary(two)}
    rows["differences"] = rows.pop("rows")
    for key in ("only_one", "only_two"):
        rows[key] = [{"name": name, "bytes": nbytes} for name, nbytes in getattr(d, key)]
    return rows


def difference_tables(one: Plan, two: Plan, d: Differences, top: int = 10) -> list[RenderableType]:
    """The numbers of both, then each difference, then what only one of them has."""
    numbers = new_table(("", 10, None), "first", "second")
    for heading, a, b in _numbers(one, two):
        numbers.add_row(heading, a, b)
    items: list[RenderableType] = [_head(d), "", numbers]
    if d.rows:
        table_ = new_table(("tensors", 12, None), "bytes", ("first → second", 10, None), "peak", "time")
        for row in d.rows[:top]:
            table_.add_row(
                _what(row), format_bytes(row.bytes), f"{_DONE[row.one]} → {_DONE[row.two]}", *_cost(row)
            )
        if len(d.rows) > top:
            table_.add_row(f"({len(d.rows) - top} more)", "", "", "", "", style="dim")
        items += [
            "",
            "What the second does differently; its cost if the first did it, too, alone:",
            "",
            table_,
        ]
    notes = list(_notes(one, two, d, top))
    return [*items, "", "\n".join(notes)] if notes else items


def _head(d: Differences) -> str:
    if not d.same:
        return f"plans of different graphs: {d.matched:,} tensors are matched by name"
    if not d.rows and not d.moved:
        return "plans of one graph, which decide the same"
    return "plans of one graph"


def _numbers(one: Plan, two: Plan) -> Iterator[tuple[str, str, str]]:
    for number in NUMBERS:
        if number.heading:
            a, b = number.of(one), number.of(two)
            if number.rare and not (a or b):
                continue
            first, second = ("none" if x is None else shown(number, x) for x in (a, b))
            yield number.heading, first, second


def _what(row: Difference) -> str:
    return row.what if row.count == 1 else f"{row.count} × {row.what}"


def _cost(row: Difference) -> tuple[str, str]:
    return (_change(row.more), _seconds(row.extra)) if row.possible else ("not alone", "")


def _notes(one: Plan, two: Plan, d: Differences, top: int) -> Iterator[str]:
    if d.machines:
        yield f"another machine in the second: {d.machines}"
    for which, plan in (("first", one), ("second", two)):
        yield from (f"{which}: {note}" for note in plan.notes)
    if d.moved:
        yield f"{d.moved:,} ops follow another op in the second"
    for which, rows in (("first", d.only_one), ("second", d.only_two)):
        if rows:
            names = ", ".join(f"{name} ({format_bytes(n)})" for name, n in rows[:top])
            more = f" and {len(rows) - top} more" if len(rows) > top else ""
            yield f"only in the {which}: {names}{more}"
    if d.left:
        yield f"{d.left} differences of fewer bytes were not simulated"
    if not d.exact:
        yield f"note: {_INEXACT}"


def difference_page(one: Plan, two: Plan, d: Differences, *, title: str = "") -> str:
    """The page's text: the numbers of both side by side, and each difference."""
    facts: list[Fact] = []
    for name, plan in (("first", one), ("second", two)):
        facts += [(f"peak, {name}", plan.peak, "bytes"), (f"time, {name}", plan.time, "seconds")]
    heads = [("tensors", "text"), ("bytes", "bytes"), ("first", "text"), ("second", "text")]
    rows: list[list[Any]] = [[_what(r), r.bytes, _DONE[r.one], _DONE[r.two], *_cost(r)] for r in d.rows]
    sections = [
        table("Both plans", [("", "text"), ("first", "text"), ("second", "text")], list(_numbers(one, two))),
        table("What the second does differently", [*heads, ("peak", "text"), ("time", "text")], cut(rows, 1)),
    ]
    listed = replace(d, only_one=(), only_two=())  # in tables of their own
    if notes := [[note] for note in _notes(one, two, listed, 10)]:
        sections.append(table("Notes", [("note", "text")], notes))
    for which, only in (("first", d.only_one), ("second", d.only_two)):
        if only:
            cells = cut([list(row) for row in only], 1)
            sections.append(table(f"Only in the {which}", [("tensor", "text"), ("bytes", "bytes")], cells))
    return page_of(title or "Two plans", _head(d), facts, sections, difference_rows(one, two, d))
