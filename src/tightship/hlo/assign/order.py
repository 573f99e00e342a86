"""Other legal schedules of a module, and the one whose buffers need the fewest bytes.

Problem: an order of each computation's instructions with a lower peak. Measure: bytes of buffers alive at once.
Source: the planners of orders, on a graph of each computation. Legal is what keeps operands, control predecessors,
the order of instructions with effects, and every reader of a buffer before the instruction that writes over it.
Guarantee: not worse than the order of the text. Complexity: that of the planners. Known limits: computations are
ordered one by one, callees first; fewer bytes alive may still be placed in more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tightship.graph import Graph, Op, Storage, Value
from tightship.hlo import Computation, Module, flattened
from tightship.hlo.assign.heap import most_alive
from tightship.hlo.dataflow import Buffer, Node
from tightship.hlo.liveness import LiveRanges, live_ranges
from tightship.planners.order import best, bfs, dfs, lpmf, sink

__all__ = ["reordered", "scheduled"]


_PLANNERS = (best, lpmf, bfs, dfs, sink)


def scheduled(module: Module) -> Module:
    """The module with the order of its text as its schedule."""
    if module.scheduled:
        return module
    kept = tuple((k, v) for k, v in module.attributes if k != "is_scheduled")
    return replace(module, attributes=(("is_scheduled", "true"), *kept))


def reordered(module: Module) -> tuple[Module, int]:
    """The module in the best order found, and how many instructions it moved."""
    chosen = module = scheduled(flattened(module))
    live = live_ranges(module)
    least = _peak(live)
    for c in live.points.sequential:
        graph = _graph(c, live)
        for order in dict.fromkeys(p.plan(graph) for p in _PLANNERS):
            body = replace(c, instructions=tuple(c.instructions[k] for k in order))
            computations = (body if x.name == c.name else x for x in chosen.computations)
            tried = replace(chosen, computations=tuple(computations))
            ranges = live_ranges(tried)
            if (peak := _peak(ranges)) < least:
                chosen, least, live = tried, peak, ranges
    return chosen, sum(len(_follows(c) - _follows(chosen.by_name[c.name])) for c in module.computations)


def _follows(c: Computation) -> set[tuple[str, str]]:
    return set(pairwise(i.name for i in c.instructions))


def _peak(live: LiveRanges) -> int:
    return most_alive((s, e, g.size) for g in live.sets for s, e in live.between(g))


def _graph(c: Computation, live: LiveRanges) -> Graph:
    """The instructions as ops that wait for one another (``Op.control``), each alias set that one of them makes as a
    storage: it stays if the caller reads it, else until all who touch it have run."""
    nodes = live.points.nodes[c.name]
    time = {n: k for k, n in enumerate(nodes)}
    number = {n.name: k for n, k in time.items()}
    before = [
        {*(time[o] for o in n.operands), *map(number.__getitem__, n.instruction.control_predecessors)}
        for n in nodes
    ]
    effects = [
        k
        for n, k in time.items()
        if n.row.effect not in ("", "copy") or n.instruction.has("custom_call_has_side_effect")
    ]
    for earlier, later in pairwise(effects):
        before[later].add(earlier)
    reads: list[list[int]] = [[] for _ in nodes]
    makes: list[list[int]] = [[] for _ in nodes]
    storages: list[Storage] = []
    kept: list[int] = []
    for group in live.sets:
        touched = sorted(_touched(group.buffers, time).items())
        for (a, readers), (b, _) in pairwise(touched):
            before[b].update(r for r in (a, *readers) if r < b)
        for first, users in _residences(touched):
            if nodes[first].row.makes == "given":
                continue
            if any(nodes[k].is_root for k in users):
                kept.append(len(storages))
            makes[first].append(len(storages))
            for k in users - {first}:
                reads[k].append(len(storages))
            storages.append(Storage(group.name, group.size, "activation"))
    ops = tuple(
        Op(n.name, n.opcode, tuple(reads[k]), tuple(makes[k]), control=tuple(sorted(before[k])))
        for k, n in enumerate(nodes)
    )
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    return Graph(ops, values, tuple(storages), (), tuple(kept), c.name)


def _touched(buffers: Sequence[Buffer], time: dict[Node, int]) -> dict[int, set[int]]:
    """For each of an alias set's buffers that is defined here: where, and who reads or hands it on here."""
    found: dict[int, set[int]] = {}
    for b in buffers:
        if b.node in time:
            users = (*(u.node for u in b.uses), *(n for n, _ in b.positions))
            found.setdefault(time[b.node], set()).update(time[n] for n in users if n in time)
    return found


def _residences(touched: Sequence[tuple[int, set[int]]]) -> list[tuple[int, set[int]]]:
    """Who makes a residence of an alias set, and who touches it: a result written over an operand goes on with it."""
    found: list[tuple[int, set[int]]] = []
    for maker, users in touched:
        if found and maker in found[-1][1]:
            found[-1][1].update(users)
        else:
            found.append((maker, users | {maker}))
    return found
