"""Lower bounds on the peak of any plan that recomputes and reorders: computed apart from every planner."""

from __future__ import annotations

from collections.abc import Sequence

from tightship.analysis.order import predecessors, successors
from tightship.graph import Graph
from tightship.simulate import extra_bytes

__all__ = ["Bound", "lower_bound", "replayable"]

_MARK_WORK = 20_000_000
"""Edges looked at, at most, while marking what must be in memory (largest storages first)."""


class Bound(int):
    """A number of bytes that also knows the op that forces it (``op``, -1: the static set alone)."""

    op: int = -1


def replayable(graph: Graph, storage: int) -> bool:
    """Whether a storage's contents can be made again: every op that writes it is pure, writes nothing else but
    what it defines or leaves alone on replay, and sees final contents only (or the caller's)."""
    uses = graph.uses
    if storage in graph.static:
        return False
    for w in uses.writers[storage]:
        op = graph.ops[w]
        if not op.pure or any(m != storage and m not in op.updates for m in uses.mutates[w]):
            return False
        for t, need in zip(uses.reads[w], uses.needs[w], strict=True):
            if t == storage or t in graph.static or t in op.updates:
                continue
            if need != len(uses.writers[t]):
                return False
    return bool(uses.writers[storage])


def _marks(start: Sequence[int], edges: Sequence[Sequence[int]]) -> tuple[set[int], int]:
    seen = set(start)
    stack = list(start)
    work = 0
    while stack:
        for b in edges[stack.pop()]:
            work += 1
            if b not in seen:
                seen.add(b)
                stack.append(b)
    return seen, work


def lower_bound(graph: Graph, *, recompute: bool = True) -> Bound:
    """Bytes no plan can stay under: for each op, what it reads, writes and needs while it runs, the static set,
    and what cannot be made again although it was made before the op in every order and is read after it in
    every order. Valid for any legal order. With ``recompute`` false everything counts as not makeable again.
    """
    uses = graph.uses
    size = [s.size for s in graph.storages]
    before = predecessors(graph)
    after = successors(before)
    load = []
    for k, op in enumerate(graph.ops):
        own = sum(size[s] for s in uses.reads[k] if s not in graph.static)
        load.append(graph.static_bytes + own + sum(size[s] for s in uses.defines[k]) + extra_bytes(op))
    stuck = [
        s
        for s in range(len(size))
        if s not in graph.static and size[s] and not (recompute and replayable(graph, s))
    ]
    work = 0
    for s in sorted(stuck, key=lambda s: -size[s]):
        if work > _MARK_WORK:
            break
        later, w1 = _marks(uses.writers[s][:1], after)
        if s in graph.kept:
            earlier: set[int] = later
            w2 = 0
        else:
            earlier, w2 = _marks(uses.readers[s], before)
        work += w1 + w2
        touching = {uses.definer[s], *uses.readers[s]}
        for k in later & earlier:
            if k not in touching:
                load[k] += size[s]
    best = max(range(len(load)), key=load.__getitem__, default=-1)
    bound = Bound(max(load[best], graph.static_bytes) if best >= 0 else graph.static_bytes)
    bound.op = best
    return bound
