"""What a graph keeps in memory, as a placement problem, for three kinds of order.

==========  ==============================================================================================
sequential  one op after the other, in the graph's order
wide        up to N ops at a time, in steps (``concurrency.waves``): alive from the first to the last step
any         whatever order the dependencies allow: alive in the graph's order, with conflicts for all others
==========  ==============================================================================================

The caller's storages lie elsewhere and are left out. What is kept for it is alive to the end. An op's workspace is
a buffer that only it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightship.analysis.concurrency import interference, members, touching, waves
from tightship.analysis.order import predecessors
from tightship.graph import Graph
from tightship.plan import Buffer, Problem
from tightship.simulate import extra_bytes

__all__ = ["Lifetimes", "in_any_order", "in_order", "in_steps"]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """A placement problem; ``storages`` and ``ops`` say what buffer k is: a storage, or (-1) an op's workspace."""

    problem: Problem
    storages: tuple[int, ...]
    ops: tuple[int, ...]


def in_order(graph: Graph, order: Sequence[int] | None = None, *, alignment: int | None = None) -> Lifetimes:
    """One op after the other; ``order`` is the graph's own unless another is given."""
    at = [0] * len(graph.ops)
    for position, k in enumerate(order if order is not None else range(len(graph.ops))):
        at[k] = position
    return _alive(graph, at, alignment)


def in_steps(graph: Graph, width: int, *, alignment: int | None = None) -> Lifetimes:
    """Up to ``width`` ops at a time."""
    return _alive(graph, waves(predecessors(graph), width), alignment)


def in_any_order(
    graph: Graph, waits: Sequence[Sequence[int]] | None = None, *, alignment: int | None = None
) -> Lifetimes:
    """Any order that ``waits`` allows (what each op waits for; none given: its dependencies)."""
    found = in_order(graph, alignment=alignment)
    scratch = [k for k, op in enumerate(graph.ops) if extra_bytes(op)]
    rows = interference(graph, predecessors(graph) if waits is None else waits, scratch)
    number = {k: len(graph.storages) + j for j, k in enumerate(scratch)}
    place = {
        s if s >= 0 else number[k]: j for j, (s, k) in enumerate(zip(found.storages, found.ops, strict=True))
    }
    conflicts = []
    for s, k in zip(found.storages, found.ops, strict=True):
        meets = (place.get(t) for t in members(rows[s if s >= 0 else number[k]]))
        conflicts.append(sum(1 << j for j in meets if j is not None))
    return replace(found, problem=replace(found.problem, conflicts=tuple(conflicts)))


def _alive(graph: Graph, at: Sequence[int], alignment: int | None) -> Lifetimes:
    """``at``: the time at which each op runs; ``alignment``: the graph's, unless another is given."""
    alignment = graph.alignment if alignment is None else alignment
    end = max(at, default=-1) + 1
    buffers, storages, ops = [], [], []
    for s, touched in enumerate(touching(graph)):
        size = graph.storages[s].size
        if s in graph.static or not size or not touched:
            continue
        times = [at[k] for k in members(touched)]
        until = end if s in graph.kept else max(times) + 1
        buffers.append(Buffer(graph.storages[s].name, min(times), until, size, alignment))
        storages.append(s)
        ops.append(graph.uses.definer[s])
    for k, op in enumerate(graph.ops):
        if size := extra_bytes(op):
            buffers.append(Buffer(f"{op.name}.workspace", at[k], at[k] + 1, size, alignment))
            storages.append(-1)
            ops.append(k)
    return Lifetimes(Problem(tuple(buffers)), tuple(storages), tuple(ops))
