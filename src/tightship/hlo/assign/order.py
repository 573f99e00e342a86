"""Other legal schedules of a module, and the one whose buffers need the fewest bytes.

Problem: an order of each computation's instructions with a lower peak. Measure: bytes of buffers alive at once.
Source: greedy list scheduling and depth-first order, heaviest operand first, as in XLA's memory scheduler. Legal is
what keeps operands, control predecessors, the order of instructions with effects, and every reader of a buffer before
the instruction that writes over it. Guarantee: not worse than the order of the text. Complexity: near-linear for
each order tried. Known limits: computations are ordered one by one, callees first; no search.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tightship.hlo import Computation, Module, flattened
from tightship.hlo.assign.heap import most_alive
from tightship.hlo.dataflow import Buffer, Node
from tightship.hlo.liveness import LiveRanges, live_ranges

__all__ = ["reordered", "scheduled"]


def scheduled(module: Module) -> Module:
    """The module with the order of its text as its schedule."""
    if module.scheduled:
        return module
    kept = tuple((k, v) for k, v in module.attributes if k != "is_scheduled")
    return replace(module, attributes=(("is_scheduled", "true"), *kept))


def reordered(module: Module) -> tuple[Module, int]:
    """The module in the best order found, and how many instructions it moved."""
    best = module = scheduled(flattened(module))
    live = live_ranges(best)
    least = _peak(live)
    for c in live.points.sequential:
        current = best.by_name[c.name]
        frame = _Frame.of(current, live)
        for order in (_listed, _depth_first):
            made = order(frame)
            if made == [i.name for i in current.instructions]:
                continue
            body = replace(current, instructions=tuple(current.by_name[n] for n in made))
            tried = replace(
                best, computations=tuple(body if x.name == c.name else x for x in best.computations)
            )
            ranges = live_ranges(tried)
            if (peak := _peak(ranges)) < least:
                best, least, live = tried, peak, ranges
    return best, sum(len(_follows(c) - _follows(best.by_name[c.name])) for c in module.computations)


def _follows(c: Computation) -> set[tuple[str, str]]:
    return set(pairwise(i.name for i in c.instructions))


def _peak(live: LiveRanges) -> int:
    return most_alive((s, e, g.size) for g in live.sets for s, e in live.between(g))


@dataclass(frozen=True)
class _Frame:
    """One computation: who waits for whom, what each instruction takes and, once all its users ran, gives back."""

    names: tuple[str, ...]
    before: Mapping[str, frozenset[str]]
    operands: Mapping[str, tuple[str, ...]]
    takes: Mapping[str, int]
    uses: Mapping[str, tuple[int, ...]]
    sizes: Sequence[int]
    users: Sequence[int]

    @classmethod
    def of(cls, c: Computation, live: LiveRanges) -> _Frame:
        nodes = live.points.nodes[c.name]
        mine = set(nodes)
        before = {n.name: {*(o.name for o in n.operands), *n.instruction.control_predecessors} for n in nodes}
        effects = [
            n.name
            for n in nodes
            if n.row.effect not in ("", "copy") or n.instruction.has("custom_call_has_side_effect")
        ]
        for earlier, later in pairwise(effects):
            before[later].add(earlier)
        time = {n: k for k, n in enumerate(nodes)}
        takes = dict.fromkeys(before, 0)
        uses: dict[str, list[int]] = {n: [] for n in before}
        sizes: list[int] = []
        users: list[int] = []
        for group in live.sets:
            touched = _touched(group.buffers, mine)
            for (a, readers), (b, _) in pairwise(sorted(touched.items(), key=lambda t: time[t[0]])):
                for reader in (a, *readers):
                    if reader is not b and time[reader] < time[b]:
                        before[b.name].add(reader.name)
            if not touched:
                continue
            first = min(touched, key=time.__getitem__)
            if first.row.makes != "given":
                takes[first.name] += group.size
            everyone = {n for found in touched.values() for n in found} | set(touched)
            out = any(n.is_root for n in everyone)
            if not out and first.row.makes != "given":
                for node in everyone:
                    uses[node.name].append(len(sizes))
                sizes.append(group.size)
                users.append(len(everyone))
        return cls(
            tuple(n.name for n in nodes),
            {k: frozenset(v) for k, v in before.items()},
            {n.name: tuple(o.name for o in n.operands) for n in nodes},
            takes,
            {k: tuple(v) for k, v in uses.items()},
            sizes,
            users,
        )


def _touched(buffers: Sequence[Buffer], mine: set[Node]) -> dict[Node, set[Node]]:
    """For each of an alias set's buffers that is defined here: where, and who reads or hands it on here."""
    found: dict[Node, set[Node]] = {}
    for b in buffers:
        node = b.node
        if node in mine:
            readers = found.setdefault(node, set())
            readers.update(u.node for u in b.uses if u.node in mine)
            readers.update(n for n, _ in b.positions if n in mine)
    return found


def _listed(f: _Frame) -> list[str]:
    """Of what may run, that which gives back most, or takes least."""
    waits = {n: len(b) for n, b in f.before.items()}
    after: dict[str, list[str]] = {n: [] for n in f.names}
    for n, b in f.before.items():
        for p in b:
            after[p].append(n)
    left = list(f.users)
    rank = {n: k for k, n in enumerate(f.names)}

    def worth(name: str) -> int:
        return f.takes[name] - sum(f.sizes[b] for b in f.uses[name] if left[b] == 1)

    ready = [(worth(n), rank[n], n) for n in f.names if not waits[n]]
    heapq.heapify(ready)
    made: list[str] = []
    while ready:
        said, _, name = heapq.heappop(ready)
        now = worth(name)
        if now < said:  # it gives back more than when it was put in
            heapq.heappush(ready, (now, rank[name], name))
            continue
        made.append(name)
        for used in f.uses[name]:
            left[used] -= 1
        for n in after[name]:
            waits[n] -= 1
            if not waits[n]:
                heapq.heappush(ready, (worth(n), rank[n], n))
    return made


def _depth_first(f: _Frame) -> list[str]:
    """Operands right before who needs them, those that take most first; where that is not legal, the text's order."""
    done: dict[str, None] = {}
    weight: dict[str, int] = {}
    for n in f.names:
        weight[n] = f.takes[n] + max((weight[o] for o in f.operands[n]), default=0)
    for last in reversed(f.names):
        stack = [(last, False)]
        while stack:
            name, ready = stack.pop()
            if name in done:
                continue
            if ready:
                done[name] = None
                continue
            stack.append((name, True))
            waiting = sorted((p for p in f.before[name] if p not in done), key=lambda p: weight[p])
            stack += [(p, False) for p in waiting]
    return list(done)
