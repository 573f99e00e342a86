"""The values that make up the peak of a JAX program's temporaries, as XLA places them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightship import hlo
from tightship.baselines import xla_assign
from tightship.errors import BadInput, Unsupported
from tightship.hlo.assign.allocate import Assignment
from tightship.hlo.dataflow import Buffer, Node

__all__ = ["largest_at_peak"]

_TOP = 8
"""Values that are named."""
_PARTS = 3
"""Parts of an operation's name, which has all loops and functions around it."""
_KINDS = {"copy": "a copy of XLA's own", "parameter": "what a loop or a branch is given"}
_SHAPE = re.compile(r"\{[^}]*\}")
_OURS = str(Path(__file__).resolve().parent.parent)

Row = tuple[str, int, str]


def largest_at_peak(module: str) -> tuple[str, list[Row]]:
    """What runs at the peak of the temporaries of a module with its schedule, and the largest values that are there
    then, each with its bytes and its place in the user's program; nothing of a module that is not read here."""
    try:
        made = xla_assign.plan(hlo.parse(module))
    except (BadInput, Unsupported):
        return "", []
    step, there = _peak(made)
    rows = [(_name(b.node, str(b.shape)), b.nbytes, _place(made, b.node)) for b in there]
    if more := rows[_TOP:]:
        rows[_TOP:] = [(f"{len(more)} more", sum(size for _, size, _ in more), "")]
    return (_name(made.live.schedule[step], ""), rows) if rows else ("", [])


def _peak(made: Assignment) -> tuple[int, list[Buffer]]:
    """The step at which most bytes of temporaries are taken, and what is in them, largest first."""
    ranges, found = made.live.ranges, list[_Held]()
    for k, a in enumerate(made.allocations):
        held = a.held.items() if a.temporary else ()
        found += [_Held(b, k, x, ranges[b].start, ranges[b].end) for b, x in held if b in ranges]
    found.sort(key=lambda h: (-h.buffer.nbytes, h.buffer.id))
    alive = {t: [h for h in found if h.start <= t <= h.end] for t in {h.start for h in found}}
    most, best, at = -1, list[_Held](), 0
    for t, rows in sorted(alive.items(), key=lambda row: -sum(h.buffer.nbytes for h in row[1])):
        if sum(h.buffer.nbytes for h in rows) <= most:
            break
        apart = _apart(rows)
        if (taken := sum(h.buffer.nbytes for h in apart)) > most:
            most, best, at = taken, apart, t
    return at, [h.buffer for h in best]


def _apart(rows: Sequence[_Held]) -> list[_Held]:
    """Those that lie beside one another: what takes the place of another one in that step, or is the same array, is
    not counted again."""
    kept = list[_Held]()
    for h in rows:
        if not any(h.meets(k) for k in kept):
            kept.append(h)
    return kept


@dataclass(frozen=True)
class _Held:
    buffer: Buffer
    allocation: int
    offset: int
    start: int
    end: int

    def meets(self, other: _Held) -> bool:
        if self.allocation != other.allocation:
            return False
        return (
            self.offset < other.offset + other.buffer.nbytes
            and other.offset < self.offset + self.buffer.nbytes
        )


def _name(node: Node, shape: str) -> str:
    """What a user knows an instruction by: its shape, and the operation of JAX that it comes from."""
    told = "/".join(node.op_name.split("/")[1:][-_PARTS:])
    kind = told or _KINDS.get(node.opcode, node.opcode)
    return " ".join(filter(None, (_SHAPE.sub("", shape), kind)))


def _place(made: Assignment, node: Node) -> str:
    place = made.live.points.module.place(node.instruction)
    return "" if place is None or str(place).startswith(_OURS) else str(place)
