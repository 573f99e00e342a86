"""Which ops must run before which: data, hazards on shared storages, the random chain, effects, control."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tightship.graph import Graph

__all__ = ["Mask", "is_legal", "predecessors", "reached", "successors"]

Mask = NDArray[np.bool_]


def predecessors(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each op the ops that must run earlier in every legal order (direct edges only).

    Per value: who reads it waits for the op it is a result of, also where that op only makes a view. Per storage: a
    reader waits for the last write before it (RAW), a writer for that write (WAW) and for the readers in between
    (WAR). Ops that draw random numbers keep their order, so do ops with effects.
    """
    uses = graph.uses
    n = len(graph.storages)
    last_write = [-1] * n
    readers: list[list[int]] = [[] for _ in range(n)]
    last_random = last_effect = -1
    out = []
    for k, op in enumerate(graph.ops):
        before = set(op.control)
        before.update(uses.maker[v] for v in op.inputs)
        before.update(last_write[s] for s in uses.reads[k])
        for s in uses.mutates[k]:
            before.update(readers[s])
        for s in (*uses.mutates[k], *uses.defines[k]):
            last_write[s] = k
            readers[s] = []
        for s in uses.reads[k]:
            if last_write[s] != k:
                readers[s].append(k)
        if op.random:
            before.add(last_random)
            last_random = k
        if op.effect:
            before.add(last_effect)
            last_effect = k
        before.discard(-1)
        out.append(tuple(sorted(before)))
    return tuple(out)


def successors(before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The same edges, seen from the other end."""
    out: list[list[int]] = [[] for _ in before]
    for k, row in enumerate(before):
        for b in row:
            out[b].append(k)
    return tuple(tuple(r) for r in out)


def reached(start: Iterable[int], edges: Sequence[Sequence[int]]) -> Mask:
    """Which ops are reached from ``start`` along edges; a start only if one leads to it."""
    seen = bytearray(len(edges))
    stack = list(start)
    while stack:
        for b in edges[stack.pop()]:
            if not seen[b]:
                seen[b] = 1
                stack.append(b)
    return np.frombuffer(seen, dtype=np.uint8).astype(np.bool_)


def is_legal(graph: Graph, order: Sequence[int]) -> bool:
    """Whether ``order`` has every op once and after all it must wait for."""
    at = {k: i for i, k in enumerate(order)}
    if len(at) != len(graph.ops) or len(order) != len(graph.ops):
        return False
    return all(at[b] < at[k] for k, row in enumerate(predecessors(graph)) for b in row)
