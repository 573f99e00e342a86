"""A plan as one HTML page: no network, nothing beside it; the page itself draws what its data says."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any

import msgspec

from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.report.numbers import BANDS, columns, summary
from tightship.report.stays import label, stays_of
from tightship.simulate import Timeline, baseline, replay

__all__ = ["page", "page_data"]

_PEAK_ROWS = 40


def page(graph: Graph, plan: Plan, *, title: str = "") -> str:
    """The page's text. Its numbers are those of ``page_data``, which stands in it as JSON."""
    shown = title or f"Plan for {graph.name}"
    text = files("tightship.report").joinpath("page.html").read_text(encoding="utf-8")
    data = msgspec.json.encode(page_data(graph, plan, shown)).decode()
    # Nothing of a model's names can end the script element.
    return text.replace("__TITLE__", html.escape(shown)).replace("__DATA__", data.replace("</", "<\\/"))


def page_data(graph: Graph, plan: Plan, title: str) -> dict[str, Any]:
    """Everything the page shows. Stays are [start, end, offset, size, kind, name, where]: the last two are indices
    of ``names``; streams are [begin, end, stream, kind, step] in seconds; memory is bytes by band and step."""
    line = replay(graph, plan.steps)
    names: dict[str, int] = {}
    stays = [
        [s.start, s.end, s.offset, s.size, BANDS.index(s.kind)]
        + [names.setdefault(text, len(names)) for text in (s.name, s.where)]
        for s in stays_of(graph, plan)
        if s.pool == "device"
    ]
    streams = [
        [*span, step.stream, step.kind, i]
        for i, (step, span) in enumerate(zip(plan.steps, line.spans, strict=True))
        if step.kind != "free"
    ]
    return {
        "title": title,
        "summary": summary(plan, graph),
        "labels": [label(graph, plan, i) for i in range(len(plan.steps))],
        "before": [c.bytes for c in columns(graph, baseline(graph))],
        "after": [c.bytes for c in columns(graph, plan.steps)],
        "streams": streams,
        "stays": stays,
        "names": list(names),
        "arcs": _arcs(graph, plan),
        "peak": {
            "step": line.peak_step,
            "label": label(graph, plan, line.peak_step) if line.peak_step >= 0 else "the static set",
            "rows": _makers(graph, plan, line)[:_PEAK_ROWS],
        },
    }


def _makers(graph: Graph, plan: Plan, line: Timeline) -> list[list[str | int]]:
    """What makes up the peak, the static set as one row, largest first: name, kind, bytes, where it was made."""
    rows: list[list[str | int]] = []
    static = 0
    for s, nbytes in line.at_peak:
        if s in graph.static:
            static += nbytes
        elif s < 0:
            op = plan.steps[line.peak_step].op
            where = graph.place(op) if op >= 0 else ""
            rows.append([f"while {label(graph, plan, line.peak_step)} runs", "workspace", nbytes, where])
        else:
            storage = graph.storages[s]
            rows.append([storage.name, storage.kind, nbytes, graph.place(graph.uses.definer[s])])
    rows.append([f"static set ({len(graph.static)} storages)", "static", static, ""])
    return sorted((r for r in rows if r[2]), key=lambda r: -int(r[2]))


_AGAIN = {"recompute": "recompute", "fetch": "offload", "decompress": "compress"}


def _arcs(graph: Graph, plan: Plan) -> list[dict[str, Any]]:
    """Each eviction: from the step that freed the full form to the one that made it again."""
    left: dict[int, int] = {}
    found = []
    for i, step in enumerate(plan.steps):
        if step.kind == "free" and step.form == "full":
            left.update(dict.fromkeys(step.storages, i))
        elif step.kind in _AGAIN:
            share = _seconds(graph, step) / max(1, len(step.storages))
            found += [
                {"kind": _AGAIN[step.kind], "from": left.get(s, i), "to": i, "name": graph.storages[s].name}
                | {"bytes": graph.storages[s].size, "cost": share}
                for s in step.storages
            ]
    return found


def _seconds(graph: Graph, step: Step) -> float:
    if step.op >= 0:
        return graph.ops[step.op].time
    return sum(graph.machine.seconds(step.kind, graph.storages[s].size, step.codec) for s in step.storages)
