"""Breadth first: the op whose predecessors ran earliest goes next, so that what was made first is used first.

Problem: an order with a low peak. Measure: none; live ranges are kept short by age. Source: PyTorch's Inductor
(`torch._inductor.memory`); on a graph it chooses the order that Inductor does, ties included. Guarantee: a legal
order. Complexity: n log n in ops, linear in edges. Known limits: knows nothing of sizes; the caller keeps the order
only if its peak is lower.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tightship.analysis.order import Tables, tables
from tightship.graph import Graph

__all__ = ["Options", "plan", "schedule"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    return schedule(tables(graph))


def schedule(t: Tables) -> tuple[int, ...]:
    """The order, of tables that are there already."""
    waiting = [len(b) for b in t.before]
    heap: list[tuple[tuple[int, ...], int]] = [((), k) for k, count in enumerate(waiting) if not count]
    at = [0] * len(waiting)
    order: list[int] = []
    while heap:
        k = heapq.heappop(heap)[1]
        at[k] = len(order)
        order.append(k)
        for a in t.after[k]:
            waiting[a] -= 1
            if not waiting[a]:
                heapq.heappush(heap, (tuple(sorted(at[b] for b in t.before[a])), a))
    return tuple(order)
