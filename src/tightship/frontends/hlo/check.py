"""What a module has to keep to beyond the grammar of its text, checked once after reading.

Names are defined once and before they are used, calls lead to computations of the module and never back to
the caller, and the parts an instruction takes of a tuple exist.
"""

from __future__ import annotations

from collections.abc import Iterator

from tightship.errors import BadInput
from tightship.frontends.hlo.module import Computation, Instruction, Module

__all__ = ["check_module"]

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
