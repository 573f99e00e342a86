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

import numpy as np

from tightship.analysis.order import edges
from tightship.graph import Graph

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    stays = np.zeros(len(graph.storages), dtype=np.uint8)
    stays[[*graph.static, *graph.kept]] = 1
    order = graph.uses.facts.sink(edges(graph, forward=False), stays)
    return tuple(order.tolist())
