"""Orders beyond the total one: who comes before whom in every execution, and which bytes may meet.

An order is given by the ops that each op directly waits for (indices into the graph's order, all smaller): by
dependencies alone (``order.predecessors``: any order that is legal), by streams (``in_streams``), by one
sequence (``in_sequence``). Sets of ops and of storages are bit sets. Facts only: nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tightship.analysis.order import predecessors
from tightship.errors import BadInput
from tightship.graph import Graph

__all__ = [
    "ancestors",
    "in_sequence",
    "in_streams",
    "interference",
    "members",
    "precede",
    "reusing",
    "touching",
    "waves",
]

Waits = Sequence[Sequence[int]]


def members(bits: int) -> Iterator[int]:
    """The indices of a bit set, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def in_sequence(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """One op after the other, in the graph's order."""
    return tuple(() if k == 0 else (k - 1,) for k in range(len(graph.ops)))


def in_streams(graph: Graph, stream: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Dependencies, and the graph's order within each stream; ``stream[k]`` is that of op k."""
    if len(stream) != len(graph.ops):
        raise BadInput(
            f"{len(stream)} streams for {len(graph.ops)} ops; every op has a stream",
            place=f"graph {graph.name!r}",
        )
    last: dict[int, int] = {}
    out = []
    for k, before in enumerate(predecessors(graph)):
        same = last.get(stream[k])
        out.append(tuple(sorted({*before, *(() if same is None else (same,))})))
        last[stream[k]] = k
    return tuple(out)


def ancestors(waits: Waits) -> tuple[int, ...]:
    """For every op the bit set of those that have ended before it begins, in every execution."""
    found: list[int] = []
    for row in waits:
        bits = 0
        for b in row:
            bits |= found[b] | 1 << b
        found.append(bits)
    return tuple(found)


def precede(ops: int, op: int, before: Sequence[int]) -> bool:
    """Whether all of a set of ops come before ``op`` in every execution; ``before`` is of `ancestors`."""
    return ops & ~before[op] == 0


def touching(graph: Graph) -> tuple[int, ...]:
    """For every storage the bit set of ops that define, read or write it."""
    uses = graph.uses  # a definer is among the writers
    return tuple(
        sum(1 << k for k in {*readers, *writers})
        for readers, writers in zip(uses.readers, uses.writers, strict=True)
    )


def interference(graph: Graph, waits: Waits, scratch: Sequence[int] = ()) -> tuple[int, ...]:
    """For every storage the bit set of storages whose bytes it may not share, because in some execution both are
    alive: unless all that touches the one comes before the op that defines the other, in every execution.

    The caller's storages, and what is kept for it, are alive from their definition on to the end. ``scratch`` are
    ops that need bytes while they run: they are numbered after the storages. Symmetric.
    """
    touched = [*touching(graph), *(1 << k for k in scratch)]
    definer = [*graph.uses.definer, *scratch]
    stay = graph.static | graph.kept
    defined_by: dict[int, int] = {}  # op -> bit set of what it defines
    for s, d in enumerate(definer):
        defined_by[d] = defined_by.get(d, 0) | 1 << s
    after = _descendants(waits)
    everything = (1 << len(definer)) - 1
    later = []  # what is defined only when s is dead
    for s, ops in enumerate(touched):
        common = 0 if s in stay or not ops else -1
        for k in members(ops):
            common &= after[k]
        dead = 0
        for d in members(common):
            dead |= defined_by.get(d, 0)
        later.append(dead)
    rows = [everything & ~dead & ~(1 << s) for s, dead in enumerate(later)]
    for s, dead in enumerate(later):
        for t in members(dead):
            rows[t] &= ~(1 << s)
    return tuple(rows)


def reusing(graph: Graph) -> Graph:
    """The graph in which a result lies where an input lies that its op may overwrite and that, in every execution,
    nothing else needs any more: orders of its ops are orders of the graph's, with the bytes that they then take.
    The graph itself where there is no such result."""
    if not any(op.overwrites for op in graph.ops):
        return graph
    before, touched = ancestors(predecessors(graph)), touching(graph)
    fixed = graph.static | graph.kept
    place = list(range(len(graph.storages)))
    ops = []
    for k, op in enumerate(graph.ops):
        taken: set[int] = set()
        for a, b in op.overwrites:
            if (
                a in fixed
                or b in graph.kept
                or place[b] != b
                or a in taken
                or not precede(touched[a] & ~(1 << k), k, before)
            ):
                continue
            place[b] = place[a]
            taken.add(a)
        written = dict.fromkeys([*(place[s] for s in op.mutates), *(place[a] for a in taken)])
        updates = tuple(place[s] for s in op.updates)
        ops.append(replace(op, mutates=tuple(written), updates=updates, overwrites=()))
    values = tuple(replace(v, storage=place[v.storage]) for v in graph.values)
    return replace(graph, ops=tuple(ops), values=values)


def waves(waits: Waits, width: int) -> tuple[int, ...]:
    """The step of every op when up to ``width`` ops that do not wait for each other run at the same time: as early
    as those it waits for allow, first come (in the graph's order) first served."""
    if width < 1:
        raise BadInput(f"{width} is too few: at least one op runs at a time", place="width")
    full: list[int] = []  # ops in each step
    step: list[int] = []
    first = 0  # all steps before are full
    for row in waits:
        at = max(first, max((step[b] + 1 for b in row), default=0))
        while at < len(full) and full[at] == width:
            at += 1
        full.extend([0] * (at + 1 - len(full)))
        full[at] += 1
        step.append(at)
        while first < len(full) and full[first] == width:
            first += 1
    return tuple(step)


def _descendants(waits: Waits) -> list[int]:
    after = [0] * len(waits)
    for k in range(len(waits) - 1, -1, -1):
        bits = after[k] | 1 << k
        for b in waits[k]:
            after[b] |= bits
    return after
