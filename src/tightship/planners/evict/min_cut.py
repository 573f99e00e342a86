"""Save the least bytes from which the backward can be recomputed; evict the rest.

Problem: the saved set between forward and backward of fewest bytes. Measure: bytes saved at the boundary, not the
peak. Source: the minimum cut of PyTorch's ``min_cut_rematerialization_partition`` (Horace He), here over storages
and without its bans, which are heuristics for fusing compilers. Guarantee: the minimum cut, by Dinic's algorithm.
Complexity: small in practice. Known limits: blind to time and to where the recomputation lands, so its peak may
lie above keeping everything; a seed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tightship.analysis.bounds import replayable
from tightship.graph import Graph
from tightship.planners.evict._frame import Decision, Frame

__all__ = ["Options", "plan", "saved_set"]


@dataclass(frozen=True, slots=True)
class Options:
    """``ops``: larger graphs are left alone (the cut is computed in Python)."""

    ops: int = 20_000


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """Evict, across the forward's end, every storage that is not in the minimum cut."""
    o = options or Options()
    bits = frame.nothing()
    graph = frame.graph
    phases = [graph.ops[k].phase for k in frame.order]
    if "backward" not in phases or len(graph.ops) > o.ops:
        return frame.cost(bits, limit)
    boundary = phases.index("backward")
    saved = saved_set(graph, boundary, frame.order)
    for g, (s, start, end) in enumerate(frame.gaps.tolist()):
        bits[g] = start < boundary <= end and s not in saved
    return frame.cost(bits, limit)


def saved_set(graph: Graph, boundary: int, order: tuple[int, ...]) -> frozenset[int]:
    """Storages of the forward to keep so that everything the backward reads can be made from them."""
    uses = graph.uses
    forward = [s for k in order[:boundary] for s in uses.defines[k]]
    inside = set(forward)
    needed = {s for k in order[boundary:] for s in uses.reads[k] if s in inside}
    source, sink, n = 0, 1, len(forward)
    enter = {s: 2 + i for i, s in enumerate(forward)}
    leave = {s: 2 + n + i for i, s in enumerate(forward)}
    net = _Network(2 + 2 * n)
    endless = 1 << 62
    for s in forward:
        net.edge(enter[s], leave[s], graph.storages[s].size)
        if not replayable(graph, s):
            net.edge(source, enter[s], endless)
        if s in needed:
            net.edge(leave[s], sink, endless)
        for w in uses.writers[s]:
            reads = [t for t in uses.reads[w] if t in inside and t != s]
            for t in reads:
                net.edge(leave[t], enter[s], endless)
    # What nothing of the forward feeds is free to recompute from the caller's storages: no edge from the source.
    for s in forward:
        if all(t not in inside for w in uses.writers[s] for t in uses.reads[w]) and replayable(graph, s):
            net.edge(source, enter[s], graph.storages[s].size)
    near = net.cut(source, sink)
    return frozenset(s for s in forward if enter[s] in near and leave[s] not in near)


class _Network:
    """Dinic's maximum flow (1970) with unbounded integers: bytes overflow the 32 bits of ready-made ones."""

    def __init__(self, nodes: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(nodes)]
        self.to: list[int] = []
        self.room: list[int] = []

    def edge(self, a: int, b: int, capacity: int) -> None:
        self.out[a].append(len(self.to))
        self.to.append(b)
        self.room.append(capacity)
        self.out[b].append(len(self.to))
        self.to.append(a)
        self.room.append(0)

    def levels(self, source: int) -> list[int]:
        level = [-1] * len(self.out)
        level[source] = 0
        queue = deque([source])
        while queue:
            a = queue.popleft()
            for e in self.out[a]:
                if self.room[e] > 0 and level[self.to[e]] < 0:
                    level[self.to[e]] = level[a] + 1
                    queue.append(self.to[e])
        return level

    def push(self, source: int, sink: int, level: list[int]) -> None:
        """A blocking flow, with an explicit stack."""
        at = [0] * len(self.out)
        path: list[int] = []
        a = source
        while True:
            if a == sink:
                flow = min(self.room[e] for e in path)
                for e in path:
                    self.room[e] -= flow
                    self.room[e ^ 1] += flow
                path, a = [], source
                continue
            while at[a] < len(self.out[a]):
                e = self.out[a][at[a]]
                if self.room[e] > 0 and level[self.to[e]] == level[a] + 1:
                    break
                at[a] += 1
            if at[a] < len(self.out[a]):
                path.append(self.out[a][at[a]])
                a = self.to[path[-1]]
            elif path:
                e = path.pop()
                a = self.to[e ^ 1]
                at[a] += 1
            else:
                return

    def cut(self, source: int, sink: int) -> set[int]:
        """Nodes on the source's side of a minimum cut."""
        while (level := self.levels(source))[sink] >= 0:
            self.push(source, sink, level)
        return {a for a, x in enumerate(level) if x >= 0}
