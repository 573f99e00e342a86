"""Grappler's scheduling rewrite (G6, G7): a sum of many values becomes an accumulator, so that each may go at once.

``AddN`` holds all its inputs until the last is made. The accumulator is allocated and set to zero when the first one
is there, each input is added to it in place as it comes, and the sum is read out and the accumulator destroyed under
the sum's own name, so that its readers stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tightship.frontends.tensorflow.nodes import Node, Web, name_of
from tightship.graph import Graph
from tightship.simulate import baseline, replay

__all__ = ["CROWDED", "SUMS", "Accumulator", "accumulator", "crowded_sums"]

SUMS = ("AddN", "AccumulateNV2")
CROWDED = 0.8
"""The part of a device's memory above which sums are rewritten."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """What takes the place of the sum ``name``: the nodes to add, and the sum's node as it is then."""

    name: str
    added: tuple[Node, ...]
    result: Node


def crowded_sums(graph: Graph, web: Web, memory: int) -> list[str]:
    """G6: sums of more than two values where the peak is above `CROWDED` of the memory and at least one of the values
    is alive then. Values of other devices do not count."""
    line = replay(graph, baseline(graph))
    if line.peak <= CROWDED * memory:
        return []
    alive = {s for s, size in line.at_peak if size}
    op_of = {op.name: op for op in graph.ops}
    at = {graph.values[v].name: graph.values[v].storage for op in graph.ops for v in op.outputs}
    found = []
    for n in web.order:
        node = web.nodes[n]
        if node.kind not in SUMS or n not in op_of:
            continue
        given = [i for i in node.inputs if not i.startswith("^")]
        here = [i for i in given if web.nodes[name_of(i)].device == node.device]
        known = all(graph.values[v].dtype for v in op_of[n].outputs)  # G7
        if len(given) > 2 and known and any(at.get(i.removesuffix(":0"), -1) in alive for i in here):
            found.append(n)
    return found


def accumulator(web: Web, name: str, place: dict[str, int]) -> Accumulator:
    """G6, G7: the nodes instead of a sum. What it waited for and can be there before the first value comes first, the
    rest is waited for at the end."""
    node = web.nodes[name]
    given = [i for i in node.inputs if not i.startswith("^")]
    waits = [i for i in node.inputs if i.startswith("^")]
    first = min(given, key=lambda i: place[name_of(i)])
    before = [i for i in waits if place[name_of(i)] < place[name_of(first)]]
    start = Node(
        f"{name}/tmp_var", "TemporaryVariable", (*_once([*before, f"^{name_of(first)}"]),), node.device
    )
    zeros = Node(f"{name}/tmp_var_zeros", "ZerosLike", (first,), node.device)
    set_ = Node(f"{name}/tmp_var_initializer", "Assign", (start.name, zeros.name), node.device)
    adds = [
        Node(f"{name}/tmp_var_accum_{k}", "AssignAdd", (set_.name, i), node.device)
        for k, i in enumerate(given)
    ]
    after = [f"^{a.name}" for a in adds] + [i for i in waits if i not in before]
    result = Node(name, "DestroyTemporaryVariable", (set_.name, *_once(after)), node.device)
    return Accumulator(name, (start, zeros, set_, *adds), result)


def _once(names: Collection[str]) -> list[str]:
    return list(dict.fromkeys(names))
