"""Run an op that frees memory as soon as it can: optimizer updates move to their gradients.

Problem: the graph's order runs all updates at the end, so that every gradient is alive at once. Measure: bytes
resident; an op moves up when, at the first moment all its predecessors have run, it makes fewer bytes than it
is the last reader of. Source: greedy list scheduling; eager training with the update in the backward hook.
Guarantee: a legal order (data, hazards, random chain, effects and control kept); the caller keeps it only if
the simulated peak is not higher. Complexity: linear in edges. Known limits: looks one op ahead, so a chain
whose first op costs memory does not move.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.analysis.order import dependents, predecessors
from tightship.graph import Graph

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    uses = graph.uses
    size = [s.size for s in graph.storages]
    before = predecessors(graph)
    after = dependents(graph)
    waiting = [len(b) for b in before]
    readers = [len(r) for r in uses.readers]
    stay = graph.static | graph.kept
    done = [False] * len(before)
    order: list[int] = []

    def frees(k: int) -> bool:
        freed = sum(size[s] for s in uses.reads[k] if s not in stay and readers[s] == 1)
        return 0 < freed >= sum(size[s] for s in uses.defines[k])

    def run(first: int) -> None:
        stack = [first]
        while stack:
            k = stack.pop()
            if done[k]:
                continue
            done[k] = True
            order.append(k)
            for s in uses.reads[k]:
                readers[s] -= 1
            ready = []
            for a in after[k]:
                waiting[a] -= 1
                if not waiting[a] and not done[a]:
                    ready.append(a)
            stack.extend(a for a in reversed(ready) if frees(a))

    for k in range(len(before)):
        if not done[k]:
            run(k)
    return tuple(order)
