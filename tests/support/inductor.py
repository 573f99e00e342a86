"""The orders that PyTorch's Inductor would choose from (`torch._inductor.memory`), on a graph of ours.

The functions are theirs. What they read of a scheduler's nodes and buffers is made here from the graph: one buffer
for each storage an op defines, one for what it needs while it runs (nobody reads it), and one without bytes that
hands every dependency on (data, hazards, random chain, effects, control), so that their orders are legal ones.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch._inductor import memory

from tightship.analysis.order import predecessors, successors
from tightship.graph import Graph
from tightship.simulate import extra_bytes

__all__ = ["METHODS", "Scheduled", "scheduled"]

METHODS = ("lpmf", "bfs", "dfs")


@dataclass(eq=False)
class _Buffer:
    name: str
    mpi_buffer: Any

    def get_name(self) -> str:
        return self.name


@dataclass(eq=False)
class _Node:
    name: str
    buffers: list[_Buffer]
    unmet_dependencies: list[Any] = field(default_factory=list)
    mpi_node: Any = None

    def get_name(self) -> str:
        return self.name

    def get_outputs(self) -> list[_Buffer]:
        return self.buffers

    def get_buffer_names(self) -> list[str]:
        return [b.name for b in self.buffers]


@dataclass
class Scheduled:
    """A graph as Inductor's functions take it: ``nodes`` in the graph's order, and what goes with them."""

    nodes: list[_Node]
    buffers: dict[str, _Buffer]
    outputs: Any

    def order(self, method: str) -> tuple[int, ...]:
        """The order of ops that one of ``METHODS`` chooses."""
        sort = getattr(memory, f"topological_sort_{method}")
        deep = sys.getrecursionlimit()
        sys.setrecursionlimit(max(deep, 10 * len(self.nodes) + 1000))  # dfs calls itself along a chain
        try:
            made = sort(self.nodes, {}, self.buffers, self.outputs) if method == "lpmf" else sort(self.nodes)
        finally:
            sys.setrecursionlimit(deep)
        return tuple(int(node.name[2:]) for node in made)

    def peak(self, order: tuple[int, ...]) -> int:
        """What Inductor estimates for an order: bytes beyond the static set."""
        nodes = [self.nodes[k] for k in order]
        return int(memory.estimate_peak_memory(nodes, {}, self.outputs)[0])


def scheduled(graph: Graph) -> Scheduled:
    """The graph's ops and storages as nodes and buffers of a scheduler."""
    uses, after = graph.uses, successors(predecessors(graph))
    nodes = [_Node(f"op{k}", []) for k in range(len(graph.ops))]
    buffers: dict[str, _Buffer] = {}

    def buffer(at: int, name: str, size: int, readers: Any, ordered: Any) -> None:
        info = memory.MemoryPlanningInfoForBuffer(
            size_alloc=size,
            size_free=size,
            succ_nodes=memory.OrderedSet(nodes[r] for r in readers),
            succ_nodes_for_ordering=memory.OrderedSet(nodes[r] for r in ordered),
        )
        buffers[name] = made = _Buffer(name, info)
        nodes[at].buffers.append(made)
        for r in ordered:
            nodes[r].unmet_dependencies.append(SimpleNamespace(name=name))

    for k, op in enumerate(graph.ops):
        for s in uses.defines[k]:
            buffer(k, f"buf{s}", graph.storages[s].size, uses.readers[s], uses.readers[s])
        if extra := extra_bytes(op):
            buffer(k, f"scratch{k}", extra, (), ())
        buffer(k, f"after{k}", 0, (), after[k])
    outputs = memory.OrderedSet(f"buf{s}" for s in sorted(graph.kept - graph.static))
    memory.assign_memory_planning_info_for_scheduler_nodes(
        nodes, {node.name: node for node in nodes}, buffers, {}
    )
    return Scheduled(nodes, buffers, outputs)
