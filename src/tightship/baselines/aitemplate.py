"""AITemplate's static memory planning: greedy by size with views, constants, workspaces, and ops in parallel.

Problem: one arena for a graph whose ops run in steps of at most ``streams`` ops at a time. Minimized: bytes of the
arena; nothing is evicted and no op is moved but into its step. Source: AITemplate's ``memory_planning`` and
multi-stream passes (behaviors A1 to A9). Guarantee: values of ops that may run at the same time share no bytes.
Complexity: that of the placement. Known limits: greedy placement may be far from the lower bound, which is
reported; ``place`` takes any other placement planner (A10).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightship.analysis.concurrency import waves
from tightship.analysis.order import predecessors
from tightship.errors import BadInput
from tightship.graph import Graph, aligned
from tightship.options import option
from tightship.plan import Plan, Problem
from tightship.planners.layout import in_steps, pack_workspaces, residences, unevicted_plan
from tightship.planners.packing import Search, pack
from tightship.simulate import baseline

__all__ = ["Options", "Record", "check_records", "plan", "records"]

PLANNER = "aitemplate"
"""Its group and its name on the command line."""


@dataclass(frozen=True, slots=True)
class Options:
    """What AITemplate lets its user choose."""

    streams: int = option(1, "ops that may run at the same time")
    place: str = option("greedy-by-size", "placement algorithm by name (naive reuses nothing)")
    unique: str = option("", "names of ops, by commas, whose workspace is theirs alone")
    alignment: int = option(
        64, "bytes that sizes and offsets are multiples of, beside what the device asks for"
    )


@dataclass(frozen=True, slots=True)
class Record:
    """When a storage, with all views of it, is used: from step ``first`` to step ``last``, both included."""

    name: str
    storage: int
    size: int
    first: int
    last: int
    views: tuple[str, ...]


def plan(graph: Graph, options: Options | None = None) -> Plan:
    """A verified plan: values from offset 0 on, then scratch that ops have for themselves, then scratch that all
    share. ``meta["aitemplate"]`` has the sizes of these regions and the offsets of constants and scratch."""
    o = options or Options()
    o = replace(o, alignment=math.lcm(o.alignment, graph.alignment))
    began = time.perf_counter()
    step = waves(predecessors(graph), o.streams)
    found = records(graph, o)
    check_records(found, max(step, default=-1) + 1)
    life = in_steps(graph, o.streams, alignment=o.alignment)
    problem = Problem(tuple(b for b, s in zip(life.problem.buffers, life.storages, strict=True) if s >= 0))
    packed = pack(problem, o.place, Search())
    offsets = dict(zip((r.storage for r in found), packed.offsets, strict=True))
    order = sorted(range(len(step)), key=lambda k: (step[k], k))
    steps = baseline(graph, order)
    rows = list(residences(graph, steps))
    packings = pack_workspaces(rows, o.alignment)
    scratch = {steps[i].op: needed.size for i, needed in packings.items()}
    unique, shared, lanes = _workspaces(graph, scratch, step, o)
    values = aligned(packed.arena, o.alignment)
    own = {k: values + at for k, at in unique.items()} | {
        k: values + sum(scratch[u] for u in unique) + at for k, at in lanes.items()
    }
    placed = tuple(
        replace(r, offset=offsets[r.storage])
        if r.storage >= 0
        else replace(r, offset=own[steps[r.start].op] + packings[r.start].offsets[r])
        for r in rows
    )
    constants = _constants(graph, o.alignment)
    facts = {
        "streams": o.streams,
        "steps": max(step, default=-1) + 1,
        "values": packed.arena,
        "values_bound": packed.lower_bound,
        "naive": sum(aligned(r.size, o.alignment) for r in found),
        "unique_workspace": sum(scratch[k] for k in unique),
        "shared_workspace": shared,
        "constants": sum(aligned(s.size, o.alignment) for s in graph.storages if s.name in constants),
        "constant_offsets": constants,
        "unique_offsets": {graph.ops[k].name: own[k] for k in unique},
    }
    return unevicted_plan(graph, steps, placed, "aitemplate", began=began, facts=facts, note=_note(facts))


def records(graph: Graph, options: Options | None = None) -> tuple[Record, ...]:
    """One record for each storage that is planned: not the caller's, and not empty."""
    o = options or Options()
    life = in_steps(graph, o.streams, alignment=o.alignment)
    views: dict[int, list[str]] = {}
    for v in graph.values:
        views.setdefault(v.storage, []).append(v.name)
    return tuple(
        Record(b.id, s, aligned(b.size, o.alignment), b.lower, b.upper - 1, tuple(views.get(s, ())))
        for b, s in zip(life.problem.buffers, life.storages, strict=True)
        if s >= 0
    )


def check_records(found: Sequence[Record], steps: int) -> None:
    """Raise ``BadInput`` unless there is one record for each storage, of one size, within the steps."""
    seen: set[int] = set()
    for r in found:
        if r.storage in seen:
            raise BadInput(
                f"duplicate record {r.name!r}: there is one for each storage", place="usage records"
            )
        seen.add(r.storage)
        if not 0 <= r.first <= r.last < steps:
            rule = f"steps {r.first} to {r.last} are not within the {steps} steps"
            raise BadInput(rule, place=f"record {r.name!r}")
        if r.size <= 0:
            raise BadInput(f"size {r.size}: a record has at least 1 byte", place=f"record {r.name!r}")


def _workspaces(
    graph: Graph, scratch: dict[int, int], step: Sequence[int], o: Options
) -> tuple[dict[int, int], int, dict[int, int]]:
    """Offsets of unique scratch in its region; the size of the shared region and offsets in it. Ops of one step run
    at the same time, so that they lie side by side in what is shared otherwise."""
    names = {name.strip() for name in o.unique.split(",") if name.strip()}
    if unknown := sorted(names - {op.name for op in graph.ops}):
        raise BadInput(f"unknown op {unknown[0]!r}", place="option unique")
    unique: dict[int, int] = {}
    lanes: dict[int, int] = {}
    at, used = 0, dict[int, int]()
    for k, nbytes in sorted(scratch.items()):
        if graph.ops[k].name in names:
            unique[k] = at
            at += nbytes
        else:
            lanes[k] = used.get(step[k], 0)
            used[step[k]] = lanes[k] + nbytes
    return unique, max(used.values(), default=0), lanes


def _constants(graph: Graph, alignment: int) -> dict[str, int]:
    """Offsets of constants in a region of their own."""
    offsets, at = {}, 0
    for s in sorted(graph.static):
        if graph.storages[s].kind == "constant":
            offsets[graph.storages[s].name] = at
            at += aligned(graph.storages[s].size, alignment)
    return offsets


def _note(facts: dict[str, Any]) -> str:
    return (
        f"values {facts['values']} bytes ({facts['naive']} without reuse), constants {facts['constants']}, workspace "
        f"{facts['unique_workspace']} unique and {facts['shared_workspace']} shared, {facts['steps']} steps"
    )
