"""Buffer assignment of an HLO module as a page: bytes by kind over the schedule, every allocation, the peak."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import Any

from tightship.hlo.assign.allocate import Allocation, Assignment
from tightship.hlo.dataflow import Buffer
from tightship.hlo.peak import peak_of
from tightship.report.hlo import assignment_rows, kind_of, peak_rows
from tightship.report.pages import Fact, Section, cut, page_of, table
from tightship.units import format_bytes, format_seconds

__all__ = ["assignment_page"]

_KINDS = {
    "argument": ("weights", "arguments"),
    "output": ("batch", "outputs"),
    "temporary": ("activation", "temporaries"),
    "constant": ("state", "constants"),
    "thread-local": ("workspace", "thread-local"),
}
_NAMES = tuple(_KINDS)


def assignment_page(made: Assignment, *, title: str = "", rows: dict[str, Any] | None = None) -> str:
    """The page's text. ``rows``: the numbers that ``assign --json`` prints, where they are more."""
    s = rows or assignment_rows(made)
    keys = ("total", "temp", "arguments", "output", "alias", "constants", "heap_fragmentation")
    facts: list[Fact] = [(k.replace("_", " "), s[k], "bytes") for k in keys]
    facts.insert(1, ("lower bound", s["lower_bound"], "bytes"))
    about = f"{made.planner} for {made.target}, in {format_seconds(made.seconds)}; "
    about += f"{s['instructions']} instructions, {s['buffers']} buffers, {s['allocations']} allocations"
    sections = [_memory(made), _arena(made), _peak(made)]
    return page_of(title or f"Buffer assignment of {made.live.points.module.name}", about, facts, sections, s)


def _memory(made: Assignment) -> Section:
    """Bytes alive at each step of the schedule, by kind; what is never given back is there all the time."""
    live, end = made.live, max(1, made.live.end)
    change: dict[str, dict[int, int]] = {name: defaultdict(int) for name in _NAMES}
    kinds: dict[Buffer, str] = {}
    for a in made.allocations:
        stays = a.read_only or a.kind == "thread-local"
        change[kind_of(a)][0] += a.size if stays else 0
        kinds |= dict.fromkeys(a.held, "" if stays else kind_of(a))
    for group in live.sets:
        kind = kinds.get(group.buffers[0], "temporary")
        if not kind:
            continue
        for start, stop in live.between(group):
            change[kind][max(0, start)] += group.size
            change[kind][min(end, stop)] -= group.size
    rows = {k: list(accumulate(c[t] for t in range(end))) for k, c in change.items() if any(c.values())}
    peak = max(map(sum, zip(*rows.values(), strict=True)), default=0)
    panel = {
        "caption": "alive at each step of the schedule", "columns": list(rows.values()) or [[0]], "view": "steps",
        "start": 0, "end": end, "peak": peak, "labels": [n.name for n in live.schedule],
    }  # fmt: skip
    return {
        "kind": "memory", "heading": "Bytes alive", "across": "step",
        "bands": [_KINDS[k] for k in rows] or [("weights", "")],
        "panels": [panel], "lines": [("total", made.total, "budget"), ("lower bound", made.lower_bound, "bound")],
    }  # fmt: skip


def _arena(made: Assignment) -> Section:
    """Allocations on top of one another, what is temporary lowest; in each, its buffers while they are alive."""
    names: dict[str, int] = {}
    stays: list[list[int]] = []
    base = 0
    for a in sorted(made.allocations, key=lambda a: (not a.temporary, -a.size)):
        band = _NAMES.index(kind_of(a))
        stays += [_stay(made, a, b, base, band, names) for b in a.held if b in made.live.ranges]
        base += a.size
    return {
        "kind": "arena", "heading": "Where every buffer lies", "across": "step", "view": "steps", "start": 0,
        "end": max(1, made.live.end), "names": list(names), "bands": list(_KINDS.values()),
        "spaces": [{"name": "all allocations", "size": max(1, base), "stays": stays}],
    }  # fmt: skip


def _stay(
    made: Assignment, a: Allocation, b: Buffer, base: int, band: int, names: dict[str, int]
) -> list[int]:
    r, i = made.live.ranges[b], b.node.instruction
    place = made.live.points.module.place(i)
    where = " ".join(x for x in (i.op_name, f"({place})" if place else "", f"in {a.kind} of {a.size} B") if x)
    texts = [names.setdefault(text, len(names)) for text in (f"{b} {b.shape}", where)]
    return [r.start, max(r.start + 1, r.end), base + a.held[b], b.shape.nbytes, band, *texts]


def _peak(made: Assignment) -> Section:
    peak = peak_of(made.live.points.module)
    step, rows = peak_rows(made.live, peak)
    found = [[r.name, r.kind, r.shape, r.bytes, r.op_name, r.source] for r in rows]
    names = [("buffer", "text"), ("kind", "text"), ("shape", "text"), ("bytes", "bytes"), ("made by", "text")]
    table_ = table("The peak", [*names, ("made on line", "text")], cut(found, 3))
    said = f"{format_bytes(peak.nbytes)}, with results and without parameters, at step {step}"
    return table_ | {"said": f"{said}, while {peak.instruction} runs"}
