"""Buffers that must, and buffers that may, lie at one place.

*Must*: alias sets, XLA's ``HloBuffer``. Loops join what enters, what comes back and what leaves; conditionals their
branches' results; in-place operations an operand and a result; donation an input and an output.
*May*: an instruction may write a result over an operand that it is the last to use where each element of the result
needs only the same element of the operand, or where it is known to work in place. On GPUs a fusion may where
everything between the operand and that output keeps the order of elements. Source: XLA, ``HloAliasAnalysis``,
``AliasInfo``, ``HloDataflowAnalysis::CanShareOperandBufferWithUser``, ``GpuAliasInfo``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tightship.cached import cached_property
from tightship.errors import BadInput
from tightship.hlo.dataflow import Buffer, Node, PointsTo
from tightship.hlo.module import Computation, Instruction, Module, declared
from tightship.hlo.shape import Index, Shape

__all__ = ["TARGETS", "AliasSet", "InPlace", "Sharing", "alias_sets", "elementwise", "in_place", "target_of"]

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
                    fault = f"{node.opcode} {node.name!r} of shape {node.shape} lacks the parts that it writes over"
                    place = f"{module.file}:{node.instruction.line}"
                    raise BadInput(fault, place=place) from None


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


TARGETS = {"cpu": 64, "gpu": 256}
"""What XLA aligns allocations to, by the machine a module is compiled for."""

_GPU_MARKS = ('"operation_queue_id"', '"fusion_backend_config"', '"gemm_backend_config"', '{"sizes"')
_BETA = re.compile(r'"beta":\s*(-?[\d.eE+]+)')


def target_of(module: Module) -> str:
    """The machine a module was compiled for, by what only its compiler writes; ``cpu`` where nothing tells."""
    if "fingerprint_before_lhs" in module.attribute("frontend_attributes"):
        return "gpu"
    for i in module.instructions:
        text = i.attribute("backend_config")
        if any(mark in text for mark in _GPU_MARKS) or i.custom_call_target.startswith(("__cu", "__triton")):
            return "gpu"
        if i.opcode == "fusion" and i.attribute("kind") == "kInput":
            return "gpu"
    return "cpu"


def elementwise(module: Module, i: Instruction, operand: int) -> bool:
    """Whether each element of the result depends on the same element of that operand alone."""
    if i.opcode == "fusion":
        return _all_elementwise(module, module.by_name[i.called[0]], operand)
    return (i.opcode == "dynamic-update-slice" and operand == 0) or i.row.elementwise


def _all_elementwise(module: Module, inside: Computation, parameter: int) -> bool:
    """Whether all between a parameter and the root of a fusion is element by element."""
    work = [inside.parameters[parameter].name]
    seen = set(work)
    while work:
        name = work.pop()
        for user in inside.users[name]:
            if user in seen:
                continue
            at = inside.by_name[user]
            if not _each(module, at, name):
                return False
            seen.add(user)
            work.append(user)
    return True


def _each(module: Module, user: Instruction, name: str) -> bool:
    return all(elementwise(module, user, k) for k, o in enumerate(user.operands) if o == name)


class Sharing:
    """Answers about one module, on one target; the same question is answered once."""

    def __init__(self, points: PointsTo, target: str) -> None:
        self.module = points.module
        self.gpu = target == "gpu"
        self._known: dict[tuple[int, Index, int, Index], bool] = {}

    def allowed(self, operand: Node, index: Index, user: Node, out: Index) -> bool:
        """Whether ``user`` may write position ``out`` of its result over position ``index`` of ``operand``."""
        key = (operand.number, index, user.number, out)
        if key not in self._known:
            self._known[key] = self._answer(operand, index, user, out)
        return self._known[key]

    def _answer(self, operand: Node, index: Index, user: Node, out: Index) -> bool:
        i = user.instruction
        if i.custom_call_target.startswith("__cublas$lt$matmul") and out == (1,):
            return False
        if operand.opcode == "constant":
            return False
        equal = operand.shape.part(index) == user.shape.part(out)
        if equal and self._must(operand, index, user, out):
            return True
        if self.gpu and (hint := self._gpu(operand, index, user, out)) is not None:
            return hint
        if not equal:
            return False
        if i.opcode == "fusion" and (answer := self._fusion(operand, user)) is not None:
            return answer
        if i.opcode in ("while", "conditional"):
            return True
        return self._plain(operand, user, out)

    def _must(self, operand: Node, index: Index, user: Node, out: Index) -> bool:
        buffer = operand.buffer(index)
        for number, within, result in in_place(self.module, user.instruction, len(user.operands)):
            if result == out and user.operands[number].buffer(within) is buffer:
                return True
        return False

    def _fusion(self, operand: Node, user: Node) -> bool | None:
        i = user.instruction
        inside = self.module.by_name[i.called[0]]
        parameter = inside.parameters[user.operands.index(operand)].name
        kind = i.attribute("kind")
        if kind in ("kLoop", "kInput"):
            return _elementwise_or_tuple(self.module, inside, parameter)
        if kind == "kOutput" and inside.root.opcode == "add":
            heavy = [inside.by_name[o].opcode in ("dot", "convolution") for o in inside.root.operands]
            if not any(heavy):
                return False
            other = 1 - heavy.index(True)
            uses = [
                (u, k)
                for u in inside.users[parameter]
                for k in _operand_numbers(inside.by_name[u], parameter)
            ]
            return uses == [(inside.root.name, other)]
        return None

    def _plain(self, operand: Node, user: Node, out: Index) -> bool:
        numbers = [k for k, o in enumerate(user.operands) if o is operand]
        if user.row.writes_over in ("first", "results"):
            return numbers == [0]
        if user.opcode == "triangular-solve":
            return numbers == [1]
        if user.opcode == "sort":
            if len(operand.users) != 1:
                return False
            return len(user.operands) == 1 or (len(numbers) == 1 and out[:1] == (numbers[0],))
        if user.opcode == "call":
            return self._call(operand, user)
        return elementwise(self.module, user.instruction, numbers[0])

    def _call(self, operand: Node, user: Node) -> bool:
        uses = operand.buffer().uses
        root = self.module.by_name[user.instruction.called[0]].root
        caller = any(u.node is user for u in uses)
        inner = any(u.node.instruction is root and elementwise(self.module, root, u.operand) for u in uses)
        return len(uses) == 2 and caller and inner

    def _gpu(self, operand: Node, index: Index, user: Node, out: Index) -> bool | None:
        i = user.instruction
        if i.opcode in ("all-reduce", "collective-broadcast"):
            return len(user.operands) == 1 or (len(out) == 1 and user.operands[out[0]] is operand)
        if i.opcode == "custom-call":
            if i.custom_call_target == "__cublas$lt$matmul":
                beta = _BETA.search(i.attribute("backend_config"))
                used = len(user.operands) > 2 and user.operands[2] is operand
                return bool(beta and float(beta[1])) and used and user.operands.count(operand) == 1
            return False
        if i.opcode == "fusion":
            return _Fused(self.module, i, operand, user).shares(out)
        return None


def _operand_numbers(i: Instruction, name: str) -> list[int]:
    return [k for k, o in enumerate(i.operands) if o == name]


def _elementwise_or_tuple(module: Module, inside: Computation, parameter: str) -> bool:
    work = [parameter]
    seen = set(work)
    while work:
        name = work.pop()
        for user in inside.users[name]:
            at = inside.by_name[user]
            if at.opcode != "tuple" and not _each(module, at, name):
                return False
            if user not in seen:
                seen.add(user)
                work.append(user)
    return True


class _Fused:
    """A GPU fusion: whether one output may be written over one operand."""

    def __init__(self, module: Module, i: Instruction, operand: Node, user: Node) -> None:
        self.module = module
        self.inside = module.by_name[i.called[0]]
        self.given, self.made = operand.shape, i.shape
        self.parameter = self.inside.parameters[user.operands.index(operand)].name
        self.hero = self._hero() if i.attribute("kind") == "kInput" else ""

    def _hero(self) -> str:
        """The reduction that decides how a fusion with reductions is computed."""
        roots = self.inside.root.operands if self.inside.root.opcode == "tuple" else (self.inside.root.name,)
        for name in roots:
            at = self.inside.by_name[name]
            while at.opcode in ("bitcast", "negate", "convert") and at.operands:
                at = self.inside.by_name[at.operands[0]]
            if at.opcode == "reduce":
                return at.name
        return ""

    def shares(self, out: Index) -> bool:
        part = self.made.part(out)
        if self.given != part and not _same_bytes(self.given, part):
            return False
        by_name, root = self.inside.by_name, self.inside.root
        if root.opcode == "sort":
            return self._sorts(root, out)
        several = root.opcode == "tuple"
        output = by_name[root.operands[out[0]]] if several and out else root
        real = by_name[output.operands[0]] if output.opcode == "bitcast" else output
        work, found = [self.parameter], False
        seen = set(work)
        while work:
            name = work.pop(0)
            found |= name == output.name
            if name == self.hero:
                continue
            for user in self.inside.users[name]:
                if user not in seen:
                    seen.add(user)
                    work.append(user)
                if not self._passes(name, by_name[user], real):
                    return False
        if several and not real.row.elementwise and any(o in seen for o in root.operands if o != output.name):
            return False
        return found

    def _sorts(self, sort: Instruction, out: Index) -> bool:
        """A sort puts in order where each of its operands lies, when nothing else reads that one."""
        number = out[0] if out else 0
        alone = self.inside.users[self.parameter] == (sort.name,) and sort.operands.count(self.parameter) == 1
        return alone and sort.operands[number] == self.parameter

    def _passes(self, name: str, user: Instruction, real: Instruction) -> bool:
        number = user.operands.index(name)
        if user is real and user.opcode == "scatter":
            count = len(user.shape.parts) or 1
            if number < count and user.operands.count(name) == 1:
                return True
        if (
            real.opcode == "dynamic-update-slice"
            and user.opcode == "dynamic-slice"
            and real.operands[0] == user.operands[0]
            and user.shape == self.inside.by_name[real.operands[1]].shape
        ):
            return user.shape.elements == 1 or user.operands[1:] == real.operands[2:]
        if user.opcode in ("bitcast", "tuple") or user.name == self.hero:
            return True
        if user.opcode != "copy" and elementwise(self.module, user, number):
            return True
        return user is real and user.opcode == "dynamic-update-slice" and number == 1


def _same_bytes(a: Shape, b: Shape) -> bool:
    """Arrays of as many elements of as many bits, a truth value being one bit: XLA's fusions of GPUs do not write
    bytes over truth values, nor truth values over bytes."""
    if a.is_tuple or b.is_tuple or "token" in (a.dtype, b.dtype):
        return False
    return a.elements == b.elements and a.nbytes == b.nbytes and (a.dtype == "pred") == (b.dtype == "pred")
