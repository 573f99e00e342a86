"""Whole buffers shared by name: a dead storage's buffer becomes that of a new one.

Problem: which storages share a buffer, without offsets. Minimised: the sum of the buffers. Source: Caffe2's
memonger (behaviours M1 to M9). Guarantee: along the graph's order, no two that are alive together share; with
``any_order``, in no order that the dependencies allow, which is what parallel executors need. Complexity: linear
in the graph, times the free buffers looked at. Known limits: one buffer per name, so a small storage may hold a large
buffer; ``lifetimes.in_any_order`` gives the same safety to the placement planners, in a smaller arena (M10).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import accumulate

from tightship.analysis.bounds import lower_bound
from tightship.errors import BadInput
from tightship.graph import Graph, aligned
from tightship.plan import Plan
from tightship.planners.layout import stays
from tightship.planners.scratch import pack_scratch
from tightship.planners.share._recycling import Buffers, in_any_order, in_list_order
from tightship.simulate import baseline, replay
from tightship.verify import check

__all__ = ["Options", "mapping", "plan", "recycled", "renamed"]

PREFIX, SUFFIX = "__m", "_shared"
"""Of the names of shared buffers, with a number between; a graph that has them was recycled before."""


@dataclass(frozen=True, slots=True)
class Options:
    """``any_order``: safe for every order that the dependencies allow, not for the graph's alone. ``sizes``: fit by
    size, not by how often a buffer is shared (with ``any_order``). ``heads``: names from which ops are searched (none
    given: all that the caller owns). ``ops``: names of ops whose results may take buffers. ``share``: names that may
    be shared. ``never``: names that are never recycled. ``scope``: only names that begin so. Names go by commas;
    none given: all."""

    any_order: bool = False
    sizes: bool = True
    heads: str = ""
    ops: str = ""
    share: str = ""
    never: str = ""
    scope: str = ""


def plan(graph: Graph, options: Options | None = None) -> Plan:
    """A verified plan of the graph's order in which each storage lies in its buffer, buffers side by side, and what
    ops need while they run beyond them all. ``meta["memonger"]`` has the mapping of names."""
    o = options or Options()
    began = time.perf_counter()
    found, note = recycled(graph, o)
    made = _placed(graph, found, o.any_order)
    shared = _names(graph, found)
    alone = sum(graph.storages[s].size for s in found.of)
    facts = {
        "mapping": shared,
        "order": "any" if o.any_order else "linear",
        "buffers": len(found.sizes),
        "saved": alone - sum(found.sizes),
    }
    made = replace(
        made,
        planner="memonger",
        seconds=time.perf_counter() - began,
        meta={"memonger": facts},
        notes=(note,) if note else (f"{facts['saved']} bytes saved by sharing buffers",),
    )
    check(graph, made)
    return made


def recycled(graph: Graph, options: Options | None = None) -> tuple[Buffers, str]:
    """The buffer of every storage outside the static set, and why nothing is shared, where that is so."""
    o = options or Options()
    if any(s.name.startswith(PREFIX) and s.name.endswith(SUFFIX) for s in graph.storages):
        return _alone(graph), "the graph was recycled before: its names are shared ones; it is left as it is"
    inner = [op.name for op in graph.ops if op.calls]
    if inner and not o.any_order:
        why = f"op {inner[0]!r} runs graphs of its own, which do not run in list order: the graph is left as it is"
        return _alone(graph), why
    shareable = _shareable(graph, o)
    if not o.any_order:
        return in_list_order(graph, shareable), ""
    chosen = _named(o.ops, [op.name for op in graph.ops], "op")
    ops = frozenset(k for k, op in enumerate(graph.ops) if not o.ops or op.name in chosen)
    names = _named(o.heads, [s.name for s in graph.storages], "storage")
    heads = frozenset(s for s in range(len(graph.storages)) if graph.storages[s].name in names)
    return in_any_order(graph, shareable, ops, heads, o.sizes), ""


def mapping(graph: Graph, options: Options | None = None) -> dict[str, str]:
    """The shared name of every name that shares its buffer with another."""
    return _names(graph, recycled(graph, options)[0])


def renamed(graph: Graph, names: dict[str, str]) -> Graph:
    """The graph with shared names, also in graphs that its ops run, where a name of the outer graph is meant.

    ``meta["memonger"]`` of every such graph has the mapping that holds in it, so that references still resolve."""

    def rename(g: Graph, names: dict[str, str]) -> Graph:
        mine = {s.name: names[s.name] for s in g.storages if s.name in names}
        storages = tuple(replace(s, name=mine.get(s.name, s.name)) for s in g.storages)
        ops = []
        for op in g.ops:
            inner = []
            for called in op.calls:
                local = {called.storages[called.values[v].storage].name for v in called.inputs}
                inner.append(rename(called, {old: new for old, new in names.items() if old in local}))
            ops.append(replace(op, calls=tuple(inner)) if op.calls else op)
        return replace(g, storages=storages, ops=tuple(ops), meta=g.meta | {"memonger": mine})

    return rename(graph, names)


def _shareable(graph: Graph, o: Options) -> frozenset[int]:
    every = [s.name for s in graph.storages]
    share, never = _named(o.share, every, "storage"), _named(o.never, every, "storage")
    return frozenset(
        s
        for s, storage in enumerate(graph.storages)
        if storage.size
        and s not in graph.static | graph.kept
        and (not share or storage.name in share)
        and storage.name not in never
        and storage.name.startswith(o.scope)
    )


def _named(text: str, known: list[str], what: str) -> frozenset[str]:
    names = frozenset(name for name in (n.strip() for n in text.split(",")) if name)
    if unknown := sorted(names - set(known)):
        raise BadInput(f"a name is that of one of the graph's {what}s", unknown[0], "memonger")
    return names


def _alone(graph: Graph) -> Buffers:
    found = Buffers()
    for s, d in enumerate(graph.uses.definer):
        if d >= 0:
            found.new(s, graph.storages[s].size, graph.ops[d].device)
    return found


def _names(graph: Graph, found: Buffers) -> dict[str, str]:
    number: dict[int, int] = {}
    names = {}
    for s, buffer in sorted(found.of.items()):
        if found.shares[buffer] > 1:
            shared = number.setdefault(buffer, len(number))
            names[graph.storages[s].name] = f"{PREFIX}{shared}{SUFFIX}"
    return names


def _placed(graph: Graph, found: Buffers, any_order: bool) -> Plan:
    """Buffers one after the other; what ops need while they run above, side by side where they may run together."""
    steps = baseline(graph)
    line = replay(graph, steps)
    starts = [0, *accumulate(aligned(size, graph.alignment) for size in found.sizes)]
    top = starts[-1]
    rows = list(stays(graph, steps))
    scratch, base = pack_scratch(rows, graph.alignment), starts[-1]
    above: dict[int, int] = {}  # where the scratch of a step begins
    for step, needed in scratch.items():
        above[step] = base
        top = max(top, base + needed.size)
        base += needed.size if any_order else 0
    residences = [
        replace(r, offset=starts[found.of[r.storage]])
        if r.storage >= 0
        else replace(r, offset=above[r.start] + scratch[r.start].offsets[r])
        for r in rows
    ]
    return Plan(
        digest=graph.digest,
        steps=steps,
        residences=tuple(residences),
        peak=line.peak,
        peak_before=line.peak,
        static=graph.static_bytes,
        arena=top,
        lower_bound=int(lower_bound(graph)),
        time=line.time,
        time_before=line.time,
    )
