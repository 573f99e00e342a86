"""By demand: every op right before the first that needs it, what takes most to make first, results in their order.

Problem: an order to recompute in, near the least memory. Measure: bytes that lie between what is made and its use.
Source: code for expressions (Sethi and Ullman 1970), as far as a graph is a tree. Guarantee: a legal order.
Complexity: n log n in ops, linear in edges, for each power of two of sizes. Known limits: looks at no peak: without
evictions there are mostly better orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightship.analysis.order import deepest_first, predecessors
from tightship.graph import Graph

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    before = _ranked(graph)
    results = np.array(sorted(graph.kept), dtype=np.int64)
    makers = graph.uses.facts.definer[results]
    wanted = sorted(set(makers[makers >= 0].tolist()))
    asked = [False] * len(before)
    order: list[int] = []
    for last in (*wanted, *range(len(before))):
        stack = [] if asked[last] else [(last, iter(before[last]))]
        asked[last] = True
        while stack:
            k, waits = stack[-1]
            other = next((b for b in waits if not asked[b]), -1)
            if other < 0:
                order.append(k)
                stack.pop()
            else:
                asked[other] = True
                stack.append((other, iter(before[other])))
    return tuple(order)


def _ranked(graph: Graph) -> list[list[int]]:
    """By op, what it waits for: what waits for no bytes first, then what makes its reads, the deepest first."""
    (starts, reads), _ = deepest_first(graph)
    writers, rows = graph.uses.writers, reads.tolist()
    found = []
    for k, before in enumerate(predecessors(graph)):
        nth: dict[int, int] = {}
        for j, s in enumerate(rows[starts[k] : starts[k + 1]]):
            for writer in writers[s]:
                nth.setdefault(writer, j)
        found.append(sorted(before, key=lambda b: (nth.get(b, -1), b)))
    return found
