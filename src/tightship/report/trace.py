"""A plan as a Chrome trace, for Perfetto: streams as tracks, memory as counters, stays as slices.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.report.numbers import BANDS, columns
from tightship.report.residences import label, moments, stays_of
from tightship.serde import write_file
from tightship.simulate import replay

__all__ = ["events", "write_trace"]

_STREAMS, _MEMORY = 1, 2
_MICRO = 1e6


def events(graph: Graph, plan: Plan) -> list[dict[str, Any]]:
    """The trace's events; times in microseconds, bytes in bytes."""
    line = replay(graph, plan.steps)
    found = list(_names(plan))
    for i, (step, (start, end)) in enumerate(zip(plan.steps, line.spans, strict=True)):
        if step.kind == "free":
            continue
        where = graph.place(step.op) if step.op >= 0 else ""
        found.append(
            {
                "ph": "X",
                "pid": _STREAMS,
                "tid": step.stream,
                "ts": start * _MICRO,
                "dur": (end - start) * _MICRO,
            }
            | {"name": label(graph, plan.steps, i), "cat": step.kind, "args": {"step": i, "where": where}}
        )
    at = moments(line)
    for column, start in zip(columns(graph, plan.steps), at, strict=False):
        bytes_ = dict(zip(BANDS, column.bytes, strict=True))
        found.append({"ph": "C", "pid": _MEMORY, "ts": start * _MICRO, "name": "memory", "args": bytes_})
    for k, stay in enumerate(stays_of(graph, plan)):
        common = {"pid": _MEMORY, "tid": 0, "id": k, "cat": stay.pool, "name": stay.name}
        args = {"bytes": stay.size, "offset": stay.offset, "form": stay.form, "where": stay.where}
        found.append(common | {"ph": "b", "ts": at[stay.start] * _MICRO, "args": args})
        found.append(common | {"ph": "e", "ts": at[min(stay.end, len(at) - 1)] * _MICRO})
    return found


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    for pid, name in ((_STREAMS, "streams"), (_MEMORY, "memory")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for stream in sorted({s.stream for s in plan.steps}):
        name = "compute" if stream == 0 else f"copy {stream}"
        yield {"ph": "M", "pid": _STREAMS, "tid": stream, "name": "thread_name", "args": {"name": name}}


def write_trace(graph: Graph, plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON, compressed where the path ends in ``.gz``; complete or not at all."""
    other = {"planner": plan.planner, "peak": plan.peak, "budget": plan.budget}
    rows = {"traceEvents": events(graph, plan), "displayTimeUnit": "ms", "otherData": other}
    data = msgspec.json.encode(rows)
    write_file(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)
