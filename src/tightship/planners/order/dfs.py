"""Depth first: the ops that touch fewest bytes are asked for first, each right after what it waits for.

Problem: an order with a low peak. Measure: bytes that an op makes and reads. Source: PyTorch's Inductor
(`torch._inductor.memory`); on a graph it chooses the order that Inductor does, ties included. Guarantee: a legal
order. Complexity: n log n in ops, linear in edges. Known limits: an op that ends a branch late keeps the branch
waiting; the caller keeps the order only if its peak is lower.
"""

from __future__ import annotations

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
    touched = [
        (made + sum(t.size[s] for s in r), k)
        for k, (made, r) in enumerate(zip(t.makes, t.reads, strict=True))
    ]
    done = [False] * len(touched)
    order: list[int] = []
    stack: list[tuple[int, bool]] = [(k, False) for _, k in sorted(touched, reverse=True)]
    while stack:
        k, waited = stack.pop()
        if done[k]:
            continue
        if waited:
            done[k] = True
            order.append(k)
            continue
        stack.append((k, True))
        stack.extend(
            (b, False) for _, b in sorted((touched[b] for b in t.before[k]), reverse=True) if not done[b]
        )
    return tuple(order)
