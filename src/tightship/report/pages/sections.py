"""Parts of pages about a graph and its steps: memory, evictions, streams, the arena, who makes up the peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.report.numbers import BANDS, at_peak, columns, label, residence_rows
from tightship.report.pages import Section
from tightship.report.picture import NAMES
from tightship.simulate import Timeline, baseline, replay
from tightship.units import format_bytes

__all__ = [
    "arcs",
    "arena",
    "folded",
    "marks",
    "memory",
    "panel",
    "peak_table",
    "steps_of",
    "streams",
    "table",
    "without_empty",
]

Band = tuple[str, str]
"""A colour of the page's style, and what it stands for."""

Line = tuple[str, int, str]
"""A line across a chart: its name, its bytes, a colour."""

_ROWS = 40
"""Rows of a table of storages; what is left out is summed up in one more."""


def memory(
    given: Graph, graph: Graph, plan: Plan, lines: Sequence[Line], beside: tuple[int, int] = (0, 0)
) -> Section:
    """Bytes while each step runs, before and with the plan. ``beside``: bytes, before and with it, that are there all
    the time and not in the graph (the results of a module and what XLA counts besides)."""
    panels = []
    for caption, view, g, steps, more in (
        ("before planning", "before", given, baseline(given), beside[0]),
        ("with the plan", "plan", graph, plan.steps, beside[1]),
    ):
        rows = [(more, *c.bytes) for c in columns(g, steps)] or [(more + g.static_bytes, *(0 for _ in BANDS))]
        panels.append(
            panel(caption, rows, view) | {"labels": [label(g, steps, i) for i in range(len(steps))]}
        )
    bands = [("batch", "results"), *((b, NAMES[b]) for b in BANDS)]
    return {
        "kind": "memory", "heading": "Memory over the steps", "across": "step", "lines": lines,
        "bands": without_empty(bands, panels), "panels": panels,
    }  # fmt: skip


def panel(caption: str, rows: Sequence[Sequence[int]], view: str) -> Section:
    """One chart of memory: for each band its bytes at every step."""
    columns_ = [list(band) for band in zip(*rows, strict=True)]
    end = max(1, len(rows))
    about = {"caption": caption, "columns": columns_, "view": view}
    return about | {"start": 0, "end": end, "peak": max(map(sum, rows))}


def without_empty(bands: Sequence[Band], panels: Sequence[Section]) -> list[Band]:
    """The bands that are somewhere in one of the panels; the others leave the panels."""
    used = [k for k in range(len(bands)) if any(any(p["columns"][k]) for p in panels)] or [0]
    for p in panels:
        p["columns"] = [p["columns"][k] for k in used]
    return [bands[k] for k in used]


def folded(rows: Sequence[Sequence[int]], slots: int) -> list[Sequence[int]]:
    """At most ``slots`` rows, each the highest of those that it stands for."""
    n = len(rows)
    if n <= slots:
        return list(rows)
    cuts = [n * k // slots for k in range(slots + 1)]
    return [max(rows[a:b], key=sum) for a, b in pairwise(cuts)]


def marks(budget: int | None, bound: int) -> list[Line]:
    """The lines across."""
    lines = [("budget", budget, "budget")] if budget is not None else []
    return lines + ([("lower bound", bound, "bound")] if bound else [])


_AGAIN = {"recompute": "recompute", "fetch": "offload", "decompress": "compress"}


def arcs(graph: Graph, plan: Plan, line: Timeline) -> list[dict[str, Any]]:
    """Each eviction: from the step that freed the full form to the one that made it again, and the seconds that this
    took (of several at once, each an equal part)."""
    left: dict[int, int] = {}
    found = []
    for i, (step, (start, end)) in enumerate(zip(plan.steps, line.spans, strict=True)):
        if step.kind == "free" and step.form == "full":
            left.update(dict.fromkeys(step.storages, i))
        left.update((s, i) for s, _ in step.reuses)
        if step.kind in _AGAIN:
            share = (end - start) / max(1, len(step.storages))
            found += [
                {"kind": _AGAIN[step.kind], "from": left.get(s, i), "to": i, "name": graph.storages[s].name}
                | {"bytes": graph.storages[s].size, "cost": share}
                for s in step.storages
            ]
    return found


def evictions(graph: Graph, plan: Plan, line: Timeline) -> list[Section]:
    """The arcs, and the largest of them as a table; nothing where everything is kept."""
    found = arcs(graph, plan, line)
    if not found:
        return []
    drawn = {"kind": "arcs", "heading": "What left and came back", "arcs": found, "view": "plan"}
    largest = sorted(found, key=lambda a: (-a["bytes"], a["from"]))
    rows = [[a["name"], a["kind"], a["bytes"], a["cost"], a["from"], a["to"]] for a in largest[:_ROWS]]
    many = f"all {len(found)}" if len(rows) == len(found) else f"the largest {len(rows)} of {len(found)}"
    names = [("storage", "text"), ("how", "text"), ("bytes", "bytes"), ("cost", "seconds")]
    names += [("leaves at step", "count"), ("is back at step", "count")]
    listed = table("Evictions, largest first", names, rows, fold=f"as a table: {many}")
    return [drawn | {"steps": len(plan.steps)}, listed]


def streams(graph: Graph, plan: Plan, line: Timeline) -> Section:
    """What runs when: [begin, end, stream, kind, step], seconds."""
    slices = [
        [*span, step.stream, step.kind, i]
        for i, (step, span) in enumerate(zip(plan.steps, line.spans, strict=True))
        if step.kind != "free"
    ]
    tracks = [(t, "compute" if t == 0 else f"copy {t}") for t in sorted({s.stream for s in plan.steps} | {0})]
    labels = ["" if s.kind == "free" else label(graph, plan.steps, i) for i, s in enumerate(plan.steps)]
    return {"kind": "streams", "heading": "Streams", "slices": slices, "tracks": tracks, "labels": labels}


def arena(graph: Graph, plan: Plan) -> list[Section]:
    """Where every byte lies: residences ("stays") are [start, end, offset, size, band, name, where], the last two as
    indices of ``names``. Nothing for a plan without places."""
    names: dict[str, int] = {}
    spaces: dict[str, list[list[int]]] = {}
    for r in residence_rows(graph, plan):
        texts = [names.setdefault(text, len(names)) for text in (r.name, r.where)]
        spaces.setdefault(r.pool, []).append([r.start, r.end, r.offset, r.size, BANDS.index(r.kind), *texts])
    if not spaces:
        return []
    called = {"device": "the arena", "out": "results, outside it", "host": "copied out"}
    return [{
        "kind": "arena", "heading": "The arena", "across": "step", "view": "plan", "start": 0, "end": len(plan.steps),
        "names": list(names), "bands": [(b, NAMES[b]) for b in BANDS],
        "spaces": [
            {"name": called.get(pool, pool), "size": max(r[2] + r[3] for r in rows), "stays": rows}
            for pool, rows in sorted(spaces.items(), key=lambda item: item[0] != "device")
        ],
    }]  # fmt: skip


def peak_table(graph: Graph, steps: Sequence[Step], line: Timeline, beside: int = 0) -> Section:
    """Who makes up the peak, largest first: tensor, kind, shape, bytes, module, line; the static set as one row."""
    shapes: dict[int, str] = {}
    for v in graph.values:
        shape = f"{v.dtype.removeprefix('torch.')}[{','.join(map(str, v.shape))}]" if v.shape else v.dtype
        shapes.setdefault(v.storage, shape)
    residents = at_peak(graph, steps, line)
    static = sum(r.bytes for r in residents if r.storage in graph.static)
    rows: list[list[Any]] = [
        [r.name, r.kind, shapes.get(r.storage, ""), r.bytes, r.module, r.source]
        for r in residents
        if r.storage not in graph.static
    ]
    rows.append([f"static set ({len(graph.static)} storages)", "static", "", static, "", ""])
    rows.append(["results", "output", "", beside, "", ""])
    rows = sorted((r for r in rows if r[3]), key=lambda r: -r[3])
    running = label(graph, steps, line.peak_step) if line.peak_step >= 0 else "the static set"
    names = [("tensor", "text"), ("kind", "text"), ("shape", "shape"), ("bytes", "bytes"), ("module", "text")]
    made = table("The peak", [*names, ("made on line", "text")], cut(rows, 3))
    return made | {"said": f"{format_bytes(line.peak + beside)} at step {line.peak_step}: {running}"}


def cut(rows: list[list[Any]], at: int) -> list[list[Any]]:
    """The first rows, and what the others come to in column ``at``."""
    rest = rows[_ROWS:]
    if not rest:
        return rows
    last: list[Any] = [None] * len(rows[0])
    last[0], last[at] = f"({len(rest)} more)", sum(r[at] for r in rest)
    return [*rows[:_ROWS], [v if v is not None else "" for v in last]]


def table(
    heading: str, columns: Iterable[tuple[str, str]], rows: Sequence[Sequence[Any]], *, fold: str = ""
) -> Section:
    """A table; columns are (name, how values are said); with ``fold`` it opens on request, under that text."""
    return {"kind": "table", "heading": heading, "columns": list(columns), "rows": rows, "folded": fold}


def steps_of(
    given: Graph, graph: Graph, plan: Plan, lines: Sequence[Line], beside: tuple[int, int] = (0, 0)
) -> list[Section]:
    """All of a plan, in the order in which it is looked at."""
    line = replay(graph, plan.steps)
    return [
        memory(given, graph, plan, lines, beside),
        *evictions(graph, plan, line),
        *arena(graph, plan),
        peak_table(graph, plan.steps, line, beside[1]),
        streams(graph, plan, line),
    ]
