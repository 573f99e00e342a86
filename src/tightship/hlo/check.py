"""What a module has to keep to beyond the grammar of its text, checked once after reading.

Names are defined once and before they are used, calls lead to computations of the module and never back to the
caller, and what instructions are given fits what they need and what they call takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from tightship.errors import BadInput
from tightship.hlo.module import Computation, Instruction, Module, declared, names_in
from tightship.hlo.shape import Index, Shape

__all__ = ["check_instructions", "check_module"]

_DEPTH = 100
"""Calls nested deeper are refused: nothing real is, and recursion has to end."""


def check_module(module: Module, file: str) -> None:
    """Raises ``BadInput`` with file and line for the first rule that is broken."""
    known: dict[str, Computation] = {}
    for c in module.computations:
        place = f"{file}:{c.line}"
        if c.name in known:
            raise BadInput(f"duplicate computation {c.name!r}", place=place)
        if c.entry and (first := next((k for k in known.values() if k.entry), None)):
            raise BadInput(f"second ENTRY computation {c.name!r} beside {first.name!r}", place=place)
        known[c.name] = c
        _check_computation(c, file)
    for i in module.instructions:
        for callee in i.called:
            if callee not in known:
                raise BadInput(
                    f"unknown computation {callee!r}, called by {i.name!r}", place=f"{file}:{i.line}"
                )
    _check_calls(module, file)


def _check_computation(c: Computation, file: str) -> None:
    seen: dict[str, Instruction] = {}
    root = ""
    for i in c.instructions:
        place = f"{file}:{i.line}"
        if i.name in seen:
            raise BadInput(f"duplicate instruction name {i.name!r} in computation {c.name!r}", place=place)
        for what, names in (("operand", i.operands), ("control predecessor", i.control_predecessors)):
            for name in names:
                if name not in seen:
                    fault = f"{what} {name!r} of {i.name!r} is not defined before it in {c.name!r}"
                    raise BadInput(fault, place=place)
        if i.opcode == "get-tuple-element":
            _check_part(i, seen, place)
        if i.root and root:
            fault = f"second ROOT {i.name!r} in computation {c.name!r}, beside {root!r}"
            raise BadInput(fault, place=place)
        root = i.name if i.root else root
        seen[i.name] = i
    numbers = [i.parameter_number for i in c.parameters]
    if numbers != list(range(len(numbers))):
        fault = f"parameters of computation {c.name!r} are numbered {numbers}, not from 0 without gaps"
        raise BadInput(fault, place=f"{file}:{c.line}")


def _check_part(i: Instruction, seen: dict[str, Instruction], place: str) -> None:
    text = i.attribute("index")
    if len(i.operands) != 1 or not text.isdigit():
        fault = f"get-tuple-element {i.name!r} has {len(i.operands)} operands and index {text!r}"
        raise BadInput(f"{fault}; it takes one operand and a number", place=place)
    parts = len(seen[i.operands[0]].shape.parts)
    if int(text) >= parts:
        fault = f"index {int(text)} of {i.name!r} is beyond the {parts} parts of its operand"
        raise BadInput(fault, place=place)


def _check_calls(module: Module, file: str) -> None:
    """No computation reaches itself through calls (depth first, without recursion of our own)."""
    depth: dict[str, int] = {}
    for first in module.computations:
        path: dict[str, Iterator[tuple[str, int]]] = {}
        if first.name not in depth:
            path[first.name] = _callees(first)
        while path:
            name = next(reversed(path))
            callee, line = next(path[name], ("", 0))
            if callee in path:
                circle = " → ".join([*list(path)[list(path).index(callee) :], callee])
                raise BadInput(f"computations call one another in a circle: {circle}", place=f"{file}:{line}")
            if callee and callee not in depth:
                path[callee] = _callees(module.by_name[callee])
            elif not callee:
                del path[name]
                c = module.by_name[name]
                depth[name] = 1 + max((depth[n] for n, _ in _callees(c)), default=0)
                if depth[name] > _DEPTH:
                    fault = f"computations call one another {depth[name]} deep, at most {_DEPTH} deep is read"
                    raise BadInput(fault, place=f"{file}:{c.line}")


def _callees(c: Computation) -> Iterator[tuple[str, int]]:
    return ((name, i.line) for i in c.instructions for name in i.called)


def check_instructions(module: Module, file: str) -> None:
    """What instructions need of their operands and of what they call. Raises ``BadInput`` with file and line."""
    _check_donation(module, f"{file}:1")
    for c in module.computations:
        for i in c.instructions:
            place, least = f"{file}:{i.line}", i.row.operands
            if len(i.operands) < least:
                fault = f"{i.opcode} {i.name!r} has {len(i.operands)} operands, needs at least {least}"
                raise BadInput(fault, place=place)
            given = [c.by_name[o].shape for o in i.operands]
            if i.row.same_parts:
                _same(i.shape, given[0], f"{i.opcode} {i.name!r} and its operand", place)
            elif i.opcode == "tuple":
                _same(
                    i.shape, Shape("tuple", parts=tuple(given)), f"tuple {i.name!r} and its operands", place
                )
            elif i.opcode == "get-tuple-element":
                part = given[0].parts[i.tuple_index]
                _same(i.shape, part, f"{i.name!r} and the part of its operand that it takes", place)
            for operand, inside, out in declared(i):
                if operand >= len(given) or not (_has(given[operand], inside) and _has(i.shape, out)):
                    text = i.attribute("output_to_operand_aliasing")
                    fault = (
                        f"output_to_operand_aliasing {text} of {i.name!r}: no such part of result or operand"
                    )
                    raise BadInput(fault, place=place)
            if i.row.callees:
                _check_call(module, i, given, place)


def _check_donation(module: Module, place: str) -> None:
    """Inputs and outputs that are bound to one another exist."""
    parameters = module.entry.parameters
    for out, (number, inside, _) in module.aliases.items():
        if not _has(module.entry.root.shape, out):
            raise BadInput(f"input_output_alias: the result has no part {out}", place=place)
        if number >= len(parameters) or not _has(parameters[number].shape, inside):
            raise BadInput(f"input_output_alias: no part {inside} of a parameter {number}", place=place)


def _has(shape: Shape, index: Index) -> bool:
    for k in index:
        if k >= len(shape.parts):
            return False
        shape = shape.parts[k]
    return True


def _check_call(module: Module, i: Instruction, given: list[Shape], place: str) -> None:
    """Each computation takes what it is given, and gives what is expected of it."""
    branches, body = i.opcode == "conditional", ""
    for key in i.row.callees if not branches else ():
        if len(names_in(i.attribute(key))) != 1:
            fault = f"{i.opcode} {i.name!r} names {i.attribute(key)!r} as its {key}, not one computation"
            raise BadInput(fault, place=place)
    callees = [module.by_name[n] for n in i.called]
    if branches and len(callees) != len(given) - 1:
        fault = f"conditional {i.name!r} has {len(callees)} branches and {len(given) - 1} operands for them"
        raise BadInput(fault, place=place)
    if i.opcode == "while":
        _same(i.shape, given[0], f"while {i.name!r} and its operand", place)
        body = names_in(i.attribute("body"))[0]
        callees.sort(key=lambda c: c.name != body)  # its fault first: the condition's is mostly the same
    elif i.opcode == "async-start" and len(i.shape.parts) < 2:
        raise BadInput(f"async-start {i.name!r} of shape {i.shape}, not of operands and results", place=place)
    for k, callee in enumerate(callees):
        _check_arguments(callee, [given[k + 1]] if branches else given, i, place)
        if i.opcode in ("call", "conditional") or (i.opcode == "while" and callee.name == body):
            _same(i.shape, callee.root.shape, f"{i.opcode} {i.name!r} and the root of {callee.name!r}", place)


def _check_arguments(callee: Computation, given: list[Shape], i: Instruction, place: str) -> None:
    if len(given) != len(callee.parameters):
        takes = f"{callee.name!r} takes {len(callee.parameters)}"
        fault = f"{i.opcode} {i.name!r} has {len(given)} operands, {takes}"
        raise BadInput(fault, place=place)
    for p, shape in zip(callee.parameters, given, strict=True):
        _same(p.shape, shape, f"parameter {p.name!r} of {callee.name!r} and what {i.name!r} gives it", place)


def _same(a: Shape, b: Shape, what: str, place: str) -> None:
    """As many parts, nested alike; layouts and element types may differ (bitcasts between them do)."""
    if a.is_tuple != b.is_tuple or len(a.parts) != len(b.parts):
        raise BadInput(f"{what} have shapes of different parts: {a} and {b}", place=place)
    for p, q in zip(a.parts, b.parts, strict=True):
        if p is not q:
            _same(p, q, what, place)
