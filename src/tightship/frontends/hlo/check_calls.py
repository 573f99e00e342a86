"""What instructions need of their operands and of the computations they call, checked once after reading."""

from __future__ import annotations

from tightship.errors import BadInput
from tightship.frontends.hlo.module import Computation, Instruction, Module, declared, names_in
from tightship.frontends.hlo.shape import Index, Shape

__all__ = ["check_instructions"]

_AT_LEAST = {
    "copy": 1, "bitcast": 1, "domain": 1, "opt-barrier": 1, "add-dependency": 1, "all-reduce-done": 1,
    "copy-start": 1, "copy-done": 1, "send": 1, "recv-done": 1, "all-gather-start": 1, "all-gather-done": 1,
    "collective-permute-start": 1, "collective-permute-done": 1, "async-update": 1, "async-done": 1, "while": 1,
    "dynamic-update-slice": 2, "scatter": 3, "set-dimension-size": 2, "sort": 1, "triangular-solve": 2,
    "dot": 2, "convolution": 2, "select": 3, "ragged-all-to-all": 2, "conditional": 2, "all-reduce-start": 1,
}  # fmt: skip
_CALLEES = {
    "while": ("condition", "body"),
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
}
_SAME = frozenset({"copy", "domain", "opt-barrier", "add-dependency"})


def check_instructions(module: Module, file: str) -> None:
    """Raises ``BadInput`` with file and line."""
    _check_donation(module, file)
    for c in module.computations:
        for i in c.instructions:
            place = f"{file}:{i.line}"
            least = _AT_LEAST.get(i.opcode, 0)
            if len(i.operands) < least:
                rule = f"{i.opcode} {i.name!r} has at least {least} operand{'s' if least > 1 else ''}"
                raise BadInput(rule, len(i.operands), place)
            if i.opcode in _SAME:
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
    for key in _CALLEES.get(i.opcode, ()):
        if len(names_in(i.attribute(key))) != 1:
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
