"""What each position of each instruction's result points to: the buffers of one computation of HLO.

A buffer is defined by an instruction at a position of its result; tables of addresses of tuples are buffers too.
Instructions that only hand addresses on (tuple, get-tuple-element, bitcast, …) point to buffers of others. Source:
``TuplePointsToAnalysis`` of OpenXLA, which its rematerialisation counts bytes by. It is not the dataflow analysis of
the buffer assignment (`frontends.hlo.forward`): collectives and what runs asynchronously forward otherwise there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tightship.hlo.module import Computation, Instruction, Module, declared
from tightship.hlo.shape import Index

__all__ = ["PointsTo", "unread"]

Buffer = tuple[str, Index]
"""The instruction that defines it and the position of its result."""


@dataclass(frozen=True)
class PointsTo:
    """Buffers by instruction and position; positions that more than one buffer may stand at do not occur."""

    computation: Computation

    @cached_property
    def sets(self) -> Mapping[str, Mapping[Index, Buffer]]:
        found: dict[str, Mapping[Index, Buffer]] = {}
        for i in self.computation.instructions:
            given = _forwarded(i, found)
            found[i.name] = {x: given.get(x, (i.name, x)) for x in (x for x, _ in i.shape.positions)}
        return found

    @cached_property
    def places(self) -> Mapping[Buffer, tuple[Buffer, ...]]:
        """Every instruction and position at which a buffer is reached, in the order of the schedule."""
        found: dict[Buffer, list[Buffer]] = {}
        for name, rows in self.sets.items():
            for index, buffer in rows.items():
                found.setdefault(buffer, []).append((name, index))
        return {b: tuple(rows) for b, rows in found.items()}

    def defined(self, name: str) -> list[Index]:
        return [x for x, buffer in self.sets[name].items() if buffer == (name, x)]

    @cached_property
    def live_out(self) -> frozenset[Buffer]:
        return frozenset(self.sets[self.computation.root.name].values())


def _forwarded(i: Instruction, sets: Mapping[str, Mapping[Index, Buffer]]) -> dict[Index, Buffer]:
    """The positions of a result that an instruction does not make itself."""
    if not i.operands:
        return {}
    first = sets[i.operands[0]]
    if i.row.is_operand:
        return dict(first)
    match i.opcode:
        case "get-tuple-element":
            return _part(first, (i.tuple_index,))
        case "tuple":
            return {(k, *x): b for k, name in enumerate(i.operands) for x, b in sets[name].items()}
        case "copy":
            return {x: b for x, b in first.items() if x}
        case "copy-start":
            return {(1, *x): b for x, b in first.items()}
        case "copy-done":
            return _part(first, (0,))
        case "async-start":
            return {(0, k, *x): b for k, name in enumerate(i.operands) for x, b in sets[name].items()}
        case "async-done":
            return _part(first, (1,))
        case "send":
            return {(0, *x): b for x, b in first.items()}
        case "recv-done":
            return {(0, *x): b for x, b in _part(first, (0,)).items()}
        case "fusion" | "custom-call":
            return {out: sets[i.operands[k]][at] for k, at, out in declared(i) if k < len(i.operands)}
    return {}


def _part(rows: Mapping[Index, Buffer], at: Index) -> dict[Index, Buffer]:
    n = len(at)
    return {x[n:]: b for x, b in rows.items() if x[:n] == at}


def unread(module: Module, user: Instruction, operand: str, index: Index) -> bool:
    """Whether ``user`` has ``operand`` but cannot look at the buffer at this position of it."""
    if user.opcode == "get-tuple-element":
        return bool(index)
    if user.opcode == "fusion" and user.attribute("kind") == "kLoop" and not index:
        inner = module.by_name.get(user.attribute("calls").lstrip("%"))
        if inner is not None and inner.parameters:
            p = inner.parameters[user.operands.index(operand)]
            return not inner.users[p.name] and not p.root
    return False
