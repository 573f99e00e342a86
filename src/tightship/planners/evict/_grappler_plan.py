"""From Grappler's rewrite of a TensorFlow graph's nodes to what runs when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from tightship.frontends.tensorflow.nodes import Node, from_rows, name_of
from tightship.graph import Graph
from tightship.planners.evict._events import Run
from tightship.planners.evict._frame import Frame
from tightship.planners.evict._grappler_nodes import TRIGGER, Rewrite, late_order, recomputed

__all__ = ["hinted", "node_runs", "rewritten"]


def hinted(graph: Graph, patterns: Sequence[str]) -> list[Node]:
    """The nodes that a graph was read from; those whose names match a pattern carry the hint."""
    nodes = from_rows(graph.meta["nodes"])
    return [replace(n, hinted=n.hinted or any(fnmatchcase(n.name, p) for p in patterns)) for n in nodes]


def rewritten(graph: Graph, level: str, scope: str, hints: Sequence[str] = ()) -> Rewrite:
    """The recompute rewrite of the nodes a graph was read from (``Graph.meta``); ``level`` manual: hints alone."""
    if level in ("none", "swap"):
        return Rewrite()
    fed = [*graph.meta.get("fed", ()), *(graph.values[v].name for v in graph.inputs)]
    return recomputed(hinted(graph, hints), scope, fed, heuristic=level != "manual")


def node_runs(frame: Frame, rewrite: Rewrite) -> list[Run]:
    """What runs when: ops in the frame's order, clones as late as their readers allow. Of clones those count that
    something in the graph reads, and that make bytes."""
    graph = frame.graph
    op_of = {op.name: k for k, op in enumerate(graph.ops)}
    at = {k: i for i, k in enumerate(frame.order)}
    nodes = from_rows(graph.meta["nodes"])
    there = {graph.values[v].name for v in graph.inputs} | op_of.keys()
    wanted = _wanted(rewrite, there)
    mine = [n for n in nodes if n.name in there]
    part = Rewrite(
        added=tuple(n for n in rewrite.added if n.name in wanted or n.name.startswith(TRIGGER)),
        inputs={n: row for n, row in rewrite.inputs.items() if n in there},
        origin={c: o for c, o in rewrite.origin.items() if c in wanted},
    )
    kept = there | {n.name for n in part.added}
    part = replace(part, added=tuple(_only(n, kept) for n in part.added))
    mine = [_only(n, kept) for n in mine]
    runs = []
    for name in late_order(mine, part, lambda n: at[op_of[n]] if n in op_of else -1):
        if name in op_of:
            runs.append(Run(op_of[name]))
        elif name in part.origin:
            op = op_of[part.origin[name]]
            stays = (s for s in graph.uses.defines[op] if s not in graph.kept and graph.storages[s].size)
            if back := tuple(stays):
                runs.append(Run(op, True, back))
    return runs


def _wanted(rewrite: Rewrite, there: set[str]) -> set[str]:
    """The clones of ops of the graph that its targets read, through other clones too."""
    inputs = {n.name: n.inputs for n in rewrite.added}
    stack = [name_of(i) for n, row in rewrite.inputs.items() if n in there for i in row]
    found: set[str] = set()
    while stack:
        n = stack.pop()
        if n in rewrite.origin and n not in found and rewrite.origin[n] in there:
            found.add(n)
            stack += map(name_of, inputs[n])
    return found


def _only(node: Node, kept: set[str]) -> Node:
    return replace(node, inputs=tuple(i for i in node.inputs if name_of(i) in kept))
