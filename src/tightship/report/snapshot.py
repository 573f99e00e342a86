"""A plan as a memory snapshot of PyTorch, for its viewers.

One segment for the static set, one for the arena, one for what is placed outside it; the device's trace has each
stay as an allocation and a free, in the order of the steps. The file is a pickle (protocol 4) of plain values.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.report.residences import Stay, moments, stays_of
from tightship.serde import write_file
from tightship.simulate import replay

__all__ = ["snapshot", "write_snapshot"]

_BASE = 1 << 40
_GAP = 1 << 36


def snapshot(graph: Graph, plan: Plan) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot`` gives, of the moment after the last step."""
    stays = [s for s in stays_of(graph, plan) if s.pool != "host"]
    pools = sorted({s.pool for s in stays})
    base = {pool: _BASE + (k + 1) * _GAP for k, pool in enumerate(pools)}
    static, at = [], _BASE
    for s in sorted(graph.static):
        name, size = graph.storages[s].name, graph.storages[s].size
        static.append(_block(at, size, _frame(name, graph.storages[s].kind)))
        at += size
    segments = [_segment(_BASE, static, at - _BASE)] if static else []
    for pool in pools:
        inside = [s for s in stays if s.pool == pool]
        size = max(s.offset + s.size for s in inside)
        last = sorted((s for s in inside if s.end >= len(plan.steps)), key=lambda s: s.offset)
        blocks = [_block(base[pool] + s.offset, s.size, _frame(s.name, s.where)) for s in last]
        segments.append(_segment(base[pool], blocks, size))
    trace = _trace(graph, plan, stays, base)
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _trace(graph: Graph, plan: Plan, stays: list[Stay], base: dict[str, int]) -> list[dict[str, Any]]:
    at_step = [int(1e6 * t) for t in moments(replay(graph, plan.steps))]
    rows: list[tuple[int, int, dict[str, Any]]] = []
    at = _BASE
    for s in sorted(graph.static):
        size = graph.storages[s].size
        rows.append((-1, 1, _entry("alloc", at, size, 0, _frame(graph.storages[s].name, "static"))))
        at += size
    for stay in stays:
        addr, frames = base[stay.pool] + stay.offset, _frame(stay.name, stay.where)
        rows.append((stay.start, 1, _entry("alloc", addr, stay.size, at_step[stay.start], frames)))
        if stay.end < len(plan.steps):
            when = at_step[stay.end]
            rows.append((stay.end, -1, _entry("free_requested", addr, stay.size, when, frames)))
            rows.append((stay.end, 0, _entry("free_completed", addr, stay.size, when, frames)))
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
