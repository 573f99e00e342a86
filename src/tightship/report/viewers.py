"""A plan as files for the viewers people have: a Chrome trace for Perfetto, a memory snapshot for PyTorch's.

The trace has streams as tracks, memory as counters and residences as slices (Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). The snapshot has one segment for the
static set, one for the arena, one for what is placed outside it; its trace has each residence as an allocation and a
free, in the order of the steps. It is a pickle (protocol 4) of plain values.
"""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from tightship.files import to_json, write_file
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.report.numbers import BANDS, ResidenceRow, columns, label, moments, residence_rows
from tightship.simulate import replay

__all__ = ["events", "snapshot", "write_snapshot", "write_trace"]

_STREAMS, _MEMORY = 1, 2
_MICRO = 1e6


def events(graph: Graph, plan: Plan) -> list[dict[str, Any]]:
    """The trace's events; times in microseconds, bytes in bytes."""
    line = replay(graph, plan.steps)
    rows = list(_names(plan))
    for i, (step, (start, end)) in enumerate(zip(plan.steps, line.spans, strict=True)):
        if step.kind == "free":
            continue
        where = graph.place(step.op) if step.op >= 0 else ""
        when = {"ts": start * _MICRO, "dur": (end - start) * _MICRO}
        what = {"name": label(graph, plan.steps, i), "cat": step.kind, "args": {"step": i, "where": where}}
        rows.append({"ph": "X", "pid": _STREAMS, "tid": step.stream} | when | what)
    at = moments(line)
    for column, start in zip(columns(graph, plan.steps), at, strict=False):
        bytes_ = dict(zip(BANDS, column.bytes, strict=True))
        rows.append({"ph": "C", "pid": _MEMORY, "ts": start * _MICRO, "name": "memory", "args": bytes_})
    for k, row in enumerate(residence_rows(graph, plan)):
        common = {"pid": _MEMORY, "tid": 0, "id": k, "cat": row.pool, "name": row.name}
        args = {"bytes": row.size, "offset": row.offset, "form": row.form, "where": row.where}
        rows.append(common | {"ph": "b", "ts": at[row.start] * _MICRO, "args": args})
        rows.append(common | {"ph": "e", "ts": at[min(row.end, len(at) - 1)] * _MICRO})
    return rows


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
    data = to_json(rows)
    write_file(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


# --- PyTorch's memory snapshot ---

_BASE = 1 << 40
_GAP = 1 << 36


def snapshot(graph: Graph, plan: Plan) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot`` gives, of the moment after the last step."""
    residences = [s for s in residence_rows(graph, plan) if s.pool != "host"]
    pools = sorted({s.pool for s in residences})
    base = {pool: _BASE + (k + 1) * _GAP for k, pool in enumerate(pools)}
    static, at = [], _BASE
    for s in sorted(graph.static):
        name, size = graph.storages[s].name, graph.storages[s].size
        static.append(_block(at, size, _frame(name, graph.storages[s].kind)))
        at += size
    segments = [_segment(_BASE, static, at - _BASE)] if static else []
    for pool in pools:
        inside = [s for s in residences if s.pool == pool]
        size = max(s.offset + s.size for s in inside)
        last = sorted((s for s in inside if s.end >= len(plan.steps)), key=lambda s: s.offset)
        blocks = [_block(base[pool] + s.offset, s.size, _frame(s.name, s.where)) for s in last]
        segments.append(_segment(base[pool], blocks, size))
    trace = _trace(graph, plan, residences, base)
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _trace(
    graph: Graph, plan: Plan, residences: Sequence[ResidenceRow], base: dict[str, int]
) -> list[dict[str, Any]]:
    at_step = [int(1e6 * t) for t in moments(replay(graph, plan.steps))]
    rows: list[tuple[int, int, dict[str, Any]]] = []
    at = _BASE
    for s in sorted(graph.static):
        size = graph.storages[s].size
        rows.append((-1, 1, _entry("alloc", at, size, 0, _frame(graph.storages[s].name, "static"))))
        at += size
    for row in residences:
        addr, frames = base[row.pool] + row.offset, _frame(row.name, row.where)
        rows.append((row.start, 1, _entry("alloc", addr, row.size, at_step[row.start], frames)))
        if row.end < len(plan.steps):
            when = at_step[row.end]
            rows.append((row.end, -1, _entry("free_requested", addr, row.size, when, frames)))
            rows.append((row.end, 0, _entry("free_completed", addr, row.size, when, frames)))
    rows.sort(key=lambda row: row[:2])
    return [entry for _, _, entry in rows]


def _entry(action: str, addr: int, size: int, when: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": when, "frames": frames}


def _frame(name: str, where: str) -> list[dict[str, Any]]:
    """The line of the user's model, as the viewers show it: name of the storage, file, line."""
    source = where.rpartition(" · ")[2]
    file, _, line = source.rpartition(":")
    known = line.isdigit()
    return [{"name": name, "filename": file if known else where or "??", "line": int(line) if known else 0}]


def _block(addr: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": addr,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": frames,
    }


def _segment(addr: int, blocks: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """The blocks and, between them, what is free."""
    rows, at = [], addr
    for b in blocks:
        if b["address"] > at:
            rows.append(_block(at, b["address"] - at, []) | {"state": "inactive"})
        rows.append(b)
        at = b["address"] + b["size"]
    if at < addr + total:
        rows.append(_block(at, addr + total - at, []) | {"state": "inactive"})
    live = sum(b["size"] for b in blocks)
    return {
        "device": 0, "address": addr, "total_size": total, "allocated_size": live, "active_size": live,
        "requested_size": live, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": rows,
    }  # fmt: skip


def write_snapshot(graph: Graph, plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the snapshot; complete or not at all."""
    write_file(path, pickle.dumps(snapshot(graph, plan), protocol=4))
