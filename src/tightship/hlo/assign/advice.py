"""What would make a module need less memory, each measured by doing it.

Another placement, another order, donating arguments whose place an output could take; and, as an upper bound, what
temporaries that lie idle at the peak would give if they were made again, offloaded or compressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tightship.baselines import xla_assign
from tightship.hlo import Index, Module
from tightship.hlo.assign.allocate import Assignment
from tightship.hlo.assign.heap import most_alive
from tightship.hlo.assign.order import reordered
from tightship.hlo.dataflow import Node

__all__ = ["Advice", "advice"]

_LARGE = 30_000
"""Instructions beyond which other orders are not tried."""


@dataclass(frozen=True)
class Advice:
    """``saves`` bytes of the total by ``kind``: place, order, donate or idle; ``text`` says it to people."""

    kind: str
    saves: int
    text: str


def advice(made: Assignment, ours: Assignment, step: int) -> list[Advice]:
    """What helps, most first; ``step`` is that of the peak."""
    module = made.live.points.module
    found = [
        Advice("place", made.total - ours.total, "by placing the same buffers better (tightship assign)"),
        _idle(made),
    ]
    if len(made.live.schedule) <= _LARGE:
        other, moved = reordered(module)
        total = xla_assign.plan(other, xla_assign.Options(made.target)).total if moved else made.total
        text = f"by another order: {moved} instructions moved (tightship assign --order)"
        found.append(Advice("order", made.total - total, text))
    found += [*_donate(made, module), *_loops(made, step)]
    return sorted((a for a in found if a.saves > 0), key=lambda a: -a.saves)


def _donate(made: Assignment, module: Module) -> list[Advice]:
    """Arguments of the shape of an output that has none yet, given to it (``donate_argnums``)."""
    root = module.entry.root.shape
    taken = {number for number, index, _ in module.aliases.values() if not index}
    free: dict[Any, list[int]] = {}
    for p in module.entry.parameters:
        if p.parameter_number not in taken and not p.shape.is_tuple:
            free.setdefault((p.shape.dtype, p.shape.dims), []).append(p.parameter_number)
    pairs: list[tuple[Index, int]] = []
    for index, shape in root.leaves:
        candidates = free.get((shape.dtype, shape.dims))
        if index not in module.aliases and candidates:
            pairs.append((index, candidates.pop(0)))
    saved = sum(root.part(index).nbytes for index, _ in pairs)
    if not pairs:
        return []
    numbers = ", ".join(str(n) for _, n in pairs[:8]) + (", …" if len(pairs) > 8 else "")
    text = (
        f"at most, by donating {len(pairs)} arguments to outputs of their shape (donate_argnums): {numbers}"
    )
    return [Advice("donate", saved, text)]


def _loops(made: Assignment, step: int) -> list[Advice]:
    """Arrays that a loop stacks up, one slice for each time around, to be used by a later loop: what
    ``jax.checkpoint`` around the body of a ``lax.scan`` makes again instead."""
    live = made.live
    entry = frozenset(live.points.nodes[live.points.module.entry.name])
    found: dict[Node, int] = {}
    for g in live.sets:
        if not any(start <= step < end for start, end in live.between(g)):
            continue
        for b in g.buffers:
            trips = b.node.instruction.trips
            carried = b.node.opcode == "while" and trips > 1 and b.shape.dims[:1] == (trips,)
            argument = any(x.node in entry and x.node.opcode == "parameter" for x in g.buffers)
            if carried and not argument and live.ranges[b].end > live.ranges[b].start:
                found[b.node] = found.get(b.node, 0) + g.size
                break
    advices = []
    for node, stacked in found.items():
        place = live.points.module.place(node.instruction)
        where = f" ({place})" if place else ""
        text = f"at most, by making again what loop {node.name}{where} stacks up (jax.checkpoint of its body)"
        advices.append(Advice("loop", stacked, text))
    return advices


def _idle(made: Assignment) -> Advice:
    """Temporaries alive at the peak that neither the instruction there nor those next to it touch."""
    live = made.live
    temporary = {b for a in made.allocations if a.temporary for b in a.held}
    groups = [g for g in live.sets if g.buffers[0] in temporary]
    lives = [(s, e, g.size) for g in groups for s, e in live.between(g)]
    most = most_alive(lives)
    without = []
    for g in groups:
        touched = sorted(
            {live.time[n] for b in g.buffers for n in (b.node, *(u.node for u in b.uses)) if n in live.time}
        )
        without += [(t, t + 1, g.size) for t in touched]
    least = most_alive(without)
    text = "at most, by making temporaries again where they are used, or offloading them meanwhile (tightship plan)"
    return Advice("idle", most - least, text)
