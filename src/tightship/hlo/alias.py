"""Buffers that must lie at one place: alias sets, XLA's ``HloBuffer``.

Loops join what enters, what comes back and what leaves; conditionals their branches' results; in-place operations
an operand and a result; donation an input and an output. Source: XLA, ``HloAliasAnalysis`` and ``AliasInfo``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tightship.errors import BadInput
from tightship.hlo.dataflow import Buffer, Node, PointsTo
from tightship.hlo.module import Instruction, Module, declared
from tightship.hlo.shape import Index

__all__ = ["AliasSet", "InPlace", "alias_sets", "in_place"]

InPlace = tuple[int, Index, Index]
"""(operand, position in it, position in the result) that share their bytes."""


@dataclass(frozen=True, eq=False)
class AliasSet:
    """``buffers`` that lie at one place, by id; ``size`` is the largest's."""

    id: int
    buffers: tuple[Buffer, ...]

    @cached_property
    def size(self) -> int:
        return max(b.nbytes for b in self.buffers)

    @property
    def name(self) -> str:
        return str(self.buffers[0])


def alias_sets(points: PointsTo) -> tuple[AliasSet, ...]:
    """All alias sets, in the order of their first buffers."""
    up: list[int] = list(range(len(points.buffers)))

    def find(k: int) -> int:
        while up[k] != k:
            up[k] = up[up[k]]
            k = up[k]
        return k

    for a, b in _must(points):
        x, y = find(a.id), find(b.id)
        if x != y:
            up[max(x, y)] = min(x, y)
    members: dict[int, list[Buffer]] = {}
    for buffer in points.buffers:
        members.setdefault(find(buffer.id), []).append(buffer)
    return tuple(AliasSet(k, tuple(found)) for k, found in enumerate(members.values()))


def _must(points: PointsTo) -> Iterator[tuple[Buffer, Buffer]]:
    """Pairs of buffers that lie at one place."""
    module = points.module
    entry = points.nodes[module.entry.name]
    parameters = {n.instruction.parameter_number: n for n in entry if n.opcode == "parameter"}
    root = points.root(module.entry)
    for out, (number, inside, _) in module.aliases.items():
        yield root.buffer(out), parameters[number].buffer(inside)
    for caller in dict.fromkeys(points.callers.values()):
        if caller.opcode == "while":
            yield from _while(points, caller)
        elif caller.opcode == "conditional":
            for name, by in points.callers.items():
                if by is caller:
                    yield from zip(caller.at, points.root(module.by_name[name]).at, strict=True)
    for nodes in (points.nodes[c.name] for c in (*points.sequential, *points.embedded)):
        for node in nodes:
            for operand, inside, out in in_place(module, node.instruction, len(node.operands)):
                try:
                    yield node.buffer(out), node.operands[operand].buffer(inside)
                except IndexError:
                    rule = f"{node.opcode} {node.name!r} gives the parts of its operands that it writes over"
                    place = f"{module.file}:{node.instruction.line}"
                    raise BadInput(rule, str(node.shape), place) from None


def _while(points: PointsTo, loop: Node) -> Iterator[tuple[Buffer, Buffer]]:
    module = points.module
    body = module.by_name[loop.instruction.attribute("body").lstrip("%")]
    condition = module.by_name[loop.instruction.attribute("condition").lstrip("%")]
    heads = [n for c in (body, condition) for n in points.nodes[c.name] if n.opcode == "parameter"]
    for other in (loop.operands[0], points.root(body), *heads):
        yield from zip(loop.at, other.at, strict=True)


def in_place(module: Module, i: Instruction, operands: int) -> Sequence[InPlace]:
    """What an instruction writes over an operand of it, whoever compiles it."""
    match i.row.writes_over:
        case "first":
            return ((0, (), ()),)
        case "second":
            return ((1, (), ()),)
        case "results" | "operands" as each:
            count = operands if each == "operands" else len(i.shape.parts) or 1
            if each == "operands" and "nvshmem" in i.attribute("backend_config").lower():
                return ()
            return ((0, (), ()),) if count == 1 else tuple((k, (), (k,)) for k in range(count))
        case "declared":
            return declared(i)
        case "fusion":
            return (*_fusion(module, i), *declared(i))
        case "permute" if operands == 4:
            return _permute(module, i)
    return ()


def _permute(module: Module, i: Instruction) -> tuple[InPlace, ...]:
    start = i.opcode.endswith("-start")
    shape = i.shape.parts[1] if start else i.shape
    base: Index = (1,) if start else ()
    return ((1, (), base), *((1, (k,), (*base, k)) for k in range(len(shape.parts))))


def _fusion(module: Module, i: Instruction) -> Iterator[InPlace]:
    """A fusion is in place where its output comes from an in-place operation on one of its parameters."""
    inside = module.by_name[i.called[0]]
    by_name = inside.by_name

    def follow(name: str, index: Index) -> tuple[str, Index]:
        at = by_name[name]
        while at.opcode == "tuple" and index:
            at, index = by_name[at.operands[index[0]]], index[1:]
        while at.opcode == "get-tuple-element":
            at, index = by_name[at.operands[0]], (at.tuple_index, *index)
        while not index and at.opcode == "bitcast":
            at = by_name[at.operands[0]]
        return at.name, index

    def written(name: str, index: Index) -> tuple[str, Index] | None:
        """The operand, followed back, that instruction ``name`` writes over at ``index``."""
        at = by_name[name]
        for operand, within, out in in_place(module, at, len(at.operands)):
            if out == index:
                return follow(at.operands[operand], within)
        return None

    for index, _ in i.shape.leaves:
        source = written(*follow(inside.root.name, index))
        if source is not None and by_name[source[0]].opcode == "fusion":
            source = written(*source) or source
        if source is not None and by_name[source[0]].opcode == "parameter":
            yield by_name[source[0]].parameter_number, source[1], index
