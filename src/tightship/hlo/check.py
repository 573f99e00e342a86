"""What a module has to keep to beyond the grammar of its text, checked once after reading.

Names are defined once and before they are used, calls lead to computations of the module and never back to
the caller, and the parts an instruction takes of a tuple exist.

What instructions need of their operands and of the computations they call, checked once after reading.
"""

from __future__ import annotations

from collections.abc import Iterator

from tightship.errors import BadInput
from tightship.hlo.module import Computation, Instruction, Module, declared, names_in
from tightship.hlo.shape import Index, Shape

__all__ = ["check_instructions", "check_module"]


def check_instructions(module: Module, file: str) -> None:
    """Raises ``BadInput`` with file and line."""
    _check_donation(module, file)
    for c in module.computations:
        for i in c.instructions:
            place = f"{file}:{i.line}"
            least = i.row.operands
            if len(i.operands) < least:
                rule = f"{i.opcode} {i.name!r} has at least {least} operand{'s' if least > 1 else ''}"
                raise BadInput(rule, len(i.operands), place)
            if i.row.same_parts:
                _same(
                    i.shape, c.by_name[i.operands[0]].shape, f"what {i.name!r} gives and its operand", place
                )
            if i.opcode == "tuple":
                _same(i.shape, _tuple(c, i), f"tuple {i.name!r} and its operands", place)
            if i.opcode == "get-tuple-element":
                part = c.by_name[i.operands[0]].shape.parts[i.tuple_index]
                _same(i.shape, part, f"what {i.name!r} gives and that part of its operand", place)
            if i.has("output_to_operand_aliasing"):
                _check_declared(c, i, place)
            _check_call(module, c, i, place)


def _check_donation(module: Module, file: str) -> None:
    """Inputs and outputs that are bound to one another exist, and are as large."""
    parameters = module.entry.parameters
    for out, (number, inside, _) in module.aliases.items():
        place = f"{file}:1"
        if not _has(module.entry.root.shape, out):
            raise BadInput("input_output_alias names a part of the result", out, place)
        if number >= len(parameters) or not _has(parameters[number].shape, inside):
            raise BadInput("input_output_alias names a part of a parameter", (number, inside), place)


def _has(shape: Shape, index: Index) -> bool:
    for k in index:
        if k >= len(shape.parts):
            return False
        shape = shape.parts[k]
    return True


def _check_declared(c: Computation, i: Instruction, place: str) -> None:
    """What an instruction says of writing over its operands is about parts that there are."""
    for operand, inside, out in declared(i):
        there = operand < len(i.operands) and _has(c.by_name[i.operands[operand]].shape, inside)
        if not there or not _has(i.shape, out):
            raise BadInput(
                f"output_to_operand_aliasing of {i.name!r} names parts of its result and operands",
                i.attribute("output_to_operand_aliasing"),
                place,
            )


def _check_call(module: Module, c: Computation, i: Instruction, place: str) -> None:
    for key in i.row.callees:
        if i.opcode != "conditional" and len(names_in(i.attribute(key))) != 1:
            raise BadInput(
                f"{i.opcode} {i.name!r} names one computation as its {key}", i.attribute(key), place
            )
    given = [c.by_name[o].shape for o in i.operands]
    if i.opcode in ("call", "fusion", "async-start"):
        callee = module.by_name[i.called[0]]
        _arguments(callee, given, i, place)
        if i.opcode == "call":
            _same(i.shape, callee.root.shape, f"what {i.name!r} gives and the root of {callee.name!r}", place)
        elif i.opcode == "async-start" and len(i.shape.parts) < 2:
            raise BadInput(f"async-start {i.name!r} gives operands and results", str(i.shape), place)
    elif i.opcode == "while":
        body = module.by_name[names_in(i.attribute("body"))[0]]
        for callee in (body, module.by_name[names_in(i.attribute("condition"))[0]]):
            _arguments(callee, given, i, place)
        _same(i.shape, given[0], f"what loop {i.name!r} gives and takes", place)
        _same(i.shape, body.root.shape, f"what loop {i.name!r} gives and the root of {body.name!r}", place)
    elif i.opcode == "conditional":
        callees = [module.by_name[n] for n in i.called]
        if len(callees) != len(given) - 1:
            raise BadInput(f"conditional {i.name!r} has an operand for each branch", len(given) - 1, place)
        for callee, shape in zip(callees, given[1:], strict=True):
            _arguments(callee, [shape], i, place)
            _same(i.shape, callee.root.shape, f"what {i.name!r} gives and the root of {callee.name!r}", place)


def _arguments(callee: Computation, given: list[Shape], i: Instruction, place: str) -> None:
    if len(given) != len(callee.parameters):
        rule = f"{i.opcode} {i.name!r} gives {callee.name!r} its {len(callee.parameters)} parameters"
        raise BadInput(rule, len(given), place)
    for p, shape in zip(callee.parameters, given, strict=True):
        _same(p.shape, shape, f"parameter {p.name!r} and what {i.name!r} gives it", place)


def _tuple(c: Computation, i: Instruction) -> Shape:
    return Shape("tuple", parts=tuple(c.by_name[o].shape for o in i.operands))


def _same(a: Shape, b: Shape, what: str, place: str) -> None:
    """As many parts, nested alike; layouts and element types may differ (bitcasts between them do)."""
    if a.is_tuple != b.is_tuple or len(a.parts) != len(b.parts):
        raise BadInput(f"{what} have shapes of the same parts", f"{a} and {b}", place)
    for p, q in zip(a.parts, b.parts, strict=True):
        if p is not q:
            _same(p, q, what, place)


_DEPTH = 100
"""Calls nested deeper are refused: nothing real is, and recursion has to end."""


def check_module(module: Module, file: str) -> None:
    """Raises ``BadInput`` with file and line for the first rule that is broken."""
    known: dict[str, Computation] = {}
    entries = [c for c in module.computations if c.entry]
    for c in module.computations:
        if c.name in known:
            raise BadInput("a computation is defined once", c.name, f"{file}:{c.line}")
        known[c.name] = c
        _check_computation(c, file)
    if len(entries) > 1:
        raise BadInput("a module has one ENTRY computation", entries[1].name, f"{file}:{entries[1].line}")
    for c in module.computations:
        for i in c.instructions:
            for callee in i.called:
                if callee not in known:
                    raise BadInput("a called computation is in the module", callee, f"{file}:{i.line}")
    _check_calls(module, file)


def _check_computation(c: Computation, file: str) -> None:
    seen: dict[str, Instruction] = {}
    for i in c.instructions:
        place = f"{file}:{i.line}"
        if i.name in seen:
            raise BadInput(f"an instruction of computation {c.name!r} is defined once", i.name, place)
        for operand in i.operands:
            if operand not in seen:
                raise BadInput(f"an operand of {i.name!r} is defined before it in {c.name!r}", operand, place)
        for before in i.control_predecessors:
            if before not in seen:
                rule = f"a control predecessor of {i.name!r} is defined before it in {c.name!r}"
                raise BadInput(rule, before, place)
        if i.opcode == "get-tuple-element":
            _check_part(i, seen, place)
        seen[i.name] = i
    roots = [i for i in c.instructions if i.root]
    if len(roots) > 1:
        raise BadInput(f"computation {c.name!r} has one ROOT", roots[1].name, f"{file}:{roots[1].line}")
    numbers = [i.parameter_number for i in c.parameters]
    if numbers != list(range(len(numbers))):
        rule = f"the parameters of computation {c.name!r} are numbered from 0 without gaps"
        raise BadInput(rule, numbers, f"{file}:{c.line}")


def _check_part(i: Instruction, seen: dict[str, Instruction], place: str) -> None:
    text = i.attribute("index")
    if len(i.operands) != 1 or not text.isdigit():
        raise BadInput("get-tuple-element has one operand and an index", i.name, place)
    shape = seen[i.operands[0]].shape
    if int(text) >= len(shape.parts):
        rule = f"the index of {i.name!r} is below the {len(shape.parts)} parts of its operand"
        raise BadInput(rule, int(text), place)


def _check_calls(module: Module, file: str) -> None:
    """No computation reaches itself through calls (depth first, without recursion of our own)."""
    done: set[str] = set()
    depth: dict[str, int] = {}
    for first in module.computations:
        if first.name in done:
            continue
        path: dict[str, None] = {first.name: None}
        nothing: Iterator[tuple[str, int]] = iter(())
        stack = [(first, iter(first.instructions), nothing)]
        while stack:
            c, rest, callees = stack[-1]
            callee = next(callees, None)
            if callee is None:
                i = next((i for i in rest if i.called), None)
                if i is None:
                    stack.pop()
                    path.pop(c.name)
                    done.add(c.name)
                    depth[c.name] = 1 + max((depth[n] for i in c.instructions for n in i.called), default=0)
                    if depth[c.name] > _DEPTH:
                        rule = f"computations call one another at most {_DEPTH} deep"
                        raise BadInput(rule, depth[c.name], f"{file}:{c.line}")
                else:
                    stack[-1] = (c, rest, iter([(name, i.line) for name in i.called]))
                continue
            name, line = callee
            if name in path:
                circle = [*list(path)[list(path).index(name) :], name]
                rule = f"computations do not call one another in a circle ({' → '.join(circle)})"
                raise BadInput(rule, place=f"{file}:{line}")
            if name not in done:
                path[name] = None
                called = module.by_name[name]
                stack.append((called, iter(called.instructions), nothing))
