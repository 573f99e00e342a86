"""A Module as HLO text, the way XLA writes it: reading it again gives an equal module.

And HLO text to a Module: recursive descent over the text that XLA writes, and people write like it. What it does
not know it keeps as text; what it cannot read it refuses with line, column and what it expected there. Afterwards
it checks what every later step relies on: names are defined once and before they are used, computations do not call
one another in a circle, and what instructions are given fits what they need and what they call takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tightship.errors import BadInput
from tightship.files import read_bytes
from tightship.hlo.module import Computation, Instruction, Module, declared, names_in
from tightship.hlo.opcodes import OPCODES, opcode
from tightship.hlo.shape import BITS, Index, Shape

__all__ = ["SIZE_LIMIT", "Scan", "parse", "read", "to_text"]


_DEPTH = 64
"""Tuples nested deeper than this are refused: nothing real is, and recursion has to end."""

_RANK = 256
"""Dimensions an array has at most."""

_SHOWN = 24
_STRING = r'"(?:[^"\\]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|/\*.*?\*/|//[^\n]*", re.S)
_BLANK = re.compile(r"\s*")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]\n]*)\](\{[^{}\n]*\})?")
_NAME = re.compile(r"%?([\w.\-]+)")
_KEY = re.compile(r"\s*,\s*([\w.\-]+)\s*=\s*")
_PLAIN = re.compile(r'[^,\s{}()"\[\]]+')
_GROUP = re.compile(rf'\{{(?:[^{{}}()"\[\]]|{_STRING})*\}}')
_NESTED = re.compile(rf"[{{}}()\[\]]|{_STRING}")
_QUOTED = re.compile(_STRING)
_DIM = re.compile(r"\s*(<=)?(\d+|\?)\s*\Z")
_APART = re.compile(r"[ \t]+(?=\{)")
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def _spaces(match: re.Match[str]) -> str:
    text = match[0]
    return text if text[0] == '"' else re.sub(r"[^\n]", " ", text)


class Scan:
    """A position in a text. ``file`` is for messages. Comments read as blanks,
    but stay where text is kept as it is."""

    def __init__(self, text: str, file: str) -> None:
        self.given = text
        self.text = _COMMENT.sub(_spaces, text) if "/*" in text or "//" in text else text
        self.file = file
        self.at = 0
        self._shapes: dict[str, Shape] = {}

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        """Raise ``BadInput``: line, column, what was expected there and what stands there."""
        at = self.at if at is None else at
        found = self.text[at : at + _SHOWN].partition("\n")[0]
        if at >= len(self.text):
            found = "the end of the text"
        elif not found:
            found = "the end of the line"
        column = at - self.text.rfind("\n", 0, at)
        raise BadInput(f"expected {expected}", found, f"{self.file}:{self.line(at)}:{column}")

    def blank(self) -> None:
        """Skip blanks and line ends."""
        found = _BLANK.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def ahead(self, text: str) -> bool:
        self.blank()
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        """Whether ``text`` stands next, after blanks; goes past it if so."""
        found = self.ahead(text)
        self.at += len(text) if found else 0
        return found

    def expect(self, text: str, why: str = "") -> None:
        if not self.take(text):
            self.fail(f"{text!r}{' ' + why if why else ''}")

    def name(self, what: str) -> str:
        self.blank()
        found = self.match(_NAME)
        return found[1] if found else self.fail(what)

    def shape(self, depth: int = 0) -> Shape:
        """An array, a token or a tuple of shapes."""
        self.blank()
        found = self.match(_ARRAY)
        if found is not None:
            known = self._shapes.get(found[0])
            if known is None:
                known = self._shapes[found[0]] = self._array(found)
            return known
        start = self.at
        if not self.take("("):
            self.fail("a shape, like f32[2,3]{1,0} or (f32[], s32[2])")
        if depth == _DEPTH:
            self.fail(f"tuples nested at most {_DEPTH} deep", start)
        parts: list[Shape] = []
        while not self.take(")"):
            if parts:
                self.expect(",", "or ')' in a tuple shape")
            parts.append(self.shape(depth + 1))
        return Shape("tuple", parts=tuple(parts))

    def _array(self, found: re.Match[str]) -> Shape:
        dtype, inside, layout = found.groups()
        if dtype not in BITS and dtype not in ("token", "opaque"):
            self.fail("an element type, like f32", found.start())
        dims: list[int] = []
        dynamic: list[bool] = []
        for text in inside.split(",") if inside.strip() else ():
            dim = _DIM.match(text)
            if dim is None:
                self.fail("a dimension: a number, <=number or ?", found.start(2))
            dims.append(-1 if dim[2] == "?" else int(dim[2]))
            dynamic.append(bool(dim[1]) or dim[2] == "?")
        if len(dims) > _RANK:
            self.fail(f"at most {_RANK} dimensions", found.start(2))
        marks = tuple(dynamic) if any(dynamic) else ()
        return Shape(dtype, tuple(dims), layout[1:-1] if layout else None, dynamic=marks)

    def attributes(self) -> tuple[tuple[str, str], ...]:
        """``, key=value`` as often as it stands there; values as text."""
        found: list[tuple[str, str]] = []
        while (key := self.match(_KEY)) is not None:
            found.append((key[1], self.value()))
        return tuple(found)

    def value(self) -> str:
        """The text of a value: words, strings and anything in brackets, up to a comma or a blank; a brace after
        a blank belongs to it, as in the replica groups ``mesh['a'=2,'b'=4] {'a'}``."""
        start = self.at
        while self.at < len(self.text):
            if self.match(_PLAIN) or self.match(_GROUP) or self.match(_QUOTED):
                continue
            if self.at > start and self.match(_APART):
                continue
            if self.text[self.at] not in _CLOSING:
                break
            self.bracketed()
        if self.at == start:
            self.fail("the value of an attribute")
        return self.given[start : self.at]

    def bracketed(self) -> str:
        """The text between the bracket that stands here and the one that closes it; goes past both."""
        start = at = self.at
        waiting: list[str] = []
        while True:
            found = _NESTED.search(self.text, at)
            if found is None:
                self._unclosed(start, len(self.text))
            at, token = found.end(), found[0]
            if token in _CLOSING:
                waiting.append(_CLOSING[token])
            elif token[0] != '"':
                if token != waiting.pop():
                    self._unclosed(start, found.start())
                if not waiting:
                    self.at = at
                    return self.given[start + 1 : at - 1]

    def _unclosed(self, start: int, at: int) -> NoReturn:
        self.fail(f"a bracket that closes the {self.text[start]!r} of line {self.line(start)}", at)


SIZE_LIMIT = 1 << 30
"""The most bytes of text that are read."""

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_HEAD = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)(?=\()")
_OPERANDS = re.compile(r"\(\s*((?:%?[\w.\-]+\s*,\s*)*%?[\w.\-]+)?\s*\)")
_NAMES = re.compile(r"[\w.\-]+")
_WORD = re.compile(r"\s*(\w+)[ \t]*\n")
_ROW = re.compile(r"[ \t]*(\d+ [^\n]*?)[ \t\r]*(?:\n|\Z)")
_END = re.compile(r"\s*\Z")
_NUMBER = re.compile(r"\d{1,9}\Z")
_LONG = re.compile(r"\d{401}")


def read(path: str | Path) -> Module:
    """The module in a text file. Raises ``BadInput`` with file, line and column."""
    path = Path(path)
    data = read_bytes(path, SIZE_LIMIT, "an HLO module")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"byte {error.start} is not UTF-8: {BINARY}", place=str(path)) from None
    return parse(text, path.name)


BINARY = (
    "an HLO module is read as text, not as a protobuf message: of JAX jax.jit(step).lower(…).compile().as_text(), or "
    "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text'"
)
"""What to give in place of a module in binary."""
STABLE_HLO = (
    "MLIR, such as StableHLO, is not read, but XLA's HLO: of JAX jax.jit(step).lower(…).as_text('hlo'), or with "
    "XLA's schedule .compile().as_text()"
)
"""What to give in place of MLIR."""
_MLIR = re.compile(r"\s*(?:(?:#|//).*\n\s*)*(?:module|func\.func)\b")


def parse(text: str, file: str = "module") -> Module:
    """The module a text describes; ``file`` is what messages call it."""
    scan = Scan(text, file)
    if (number := _LONG.search(text)) is not None:
        scan.fail("a number of at most 400 digits", number.start())
    if _MLIR.match(text):
        raise BadInput(STABLE_HLO, place=file)
    scan.expect("HloModule", "at the start of a module")
    name = scan.name("the module's name")
    attributes = scan.attributes()
    tables = []
    while (title := scan.match(_WORD)) is not None:
        if title[1] not in _TABLES:
            scan.fail(f"a computation or one of {', '.join(_TABLES)}", title.start(1))
        rows = []
        while (row := scan.match(_ROW)) is not None:
            rows.append(row[1])
        tables.append((title[1], tuple(rows)))
    computations = []
    line = _Lines(scan.text)
    while scan.match(_END) is None:
        computations.append(_computation(scan, line))
    if not computations:
        scan.fail("a computation", len(scan.text))
    module = Module(name, tuple(computations), attributes, tuple(tables), file, _notes(computations))
    check_module(module, file)
    check_instructions(module, file)
    return module


def _notes(computations: list[Computation]) -> tuple[str, ...]:
    """What the text has that nothing is known of."""
    unknown: dict[str, list[Instruction]] = {}
    for c in computations:
        for i in c.instructions:
            if i.opcode not in OPCODES:
                unknown.setdefault(i.opcode, []).append(i)
    return tuple(
        f"opcode {opcode!r} is not known ({len(found)}, first {found[0].name!r} in line {found[0].line}):"
        " its results are taken to have bytes of their own"
        for opcode, found in unknown.items()
    )


class _Lines:
    """Line numbers of ascending positions, without counting from the start each time."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1

    def __call__(self, at: int) -> int:
        self.line += self.text.count("\n", self.at, at)
        self.at = at
        return self.line


def _computation(scan: Scan, line: _Lines) -> Computation:
    scan.blank()
    at = line(scan.at)
    name = scan.name("a computation: ENTRY or its name")
    entry = name == "ENTRY" and not scan.ahead("{") and not scan.ahead("(")
    if entry:
        name = scan.name("the entry computation's name")
    signature = scan.take("(")
    if signature:
        while not scan.take(")"):
            scan.name("a parameter's name or ')'")
            scan.expect(":", "between a parameter's name and its shape")
            scan.shape()
            scan.take(",")
        scan.expect("->", "and the shape of the result")
        scan.shape()
    scan.expect("{", f"that begins computation {name!r}")
    instructions: list[Instruction] = []
    while not scan.take("}"):
        if scan.at >= len(scan.text):
            scan.fail(f"'}}' that ends computation {name!r}, or an instruction")
        instructions.append(_instruction(scan, line))
    if not instructions:
        scan.fail(f"an instruction in computation {name!r}", scan.at - 1)
    return Computation(name, tuple(instructions), entry, signature, scan.attributes(), at)


def _instruction(scan: Scan, line: _Lines) -> Instruction:
    head = scan.match(_HEAD)
    if head is None:
        scan.fail("an instruction: name = shape opcode(operands)")
    at = line(head.start(2))
    shape = scan.shape()
    found = scan.match(_OPCODE)
    if found is None:
        scan.blank()
        scan.fail("an opcode and '('")
    name, payload = found[1], ""
    operands: tuple[str, ...] = ()
    if opcode(name).makes == "given":
        start = scan.at
        payload = scan.bracketed().strip()
        if name == "parameter" and not _NUMBER.match(payload):
            scan.fail("the number of a parameter", start + 1)
    else:
        operands = _operands(scan)
    return Instruction(head[2], name, shape, operands, payload, scan.attributes(), head[1] is not None, at)


def _operands(scan: Scan) -> tuple[str, ...]:
    plain = scan.match(_OPERANDS)
    if plain is not None:
        return tuple(_NAMES.findall(plain[1])) if plain[1] else ()
    scan.expect("(")
    found: list[str] = []
    while not scan.take(")"):
        if found:
            scan.expect(",", "or ')' after an operand")
        word = scan.ahead("%") or scan.ahead("(")
        if not word or scan.ahead("("):
            start = scan.at
            try:
                scan.shape()
            except BadInput:
                scan.at = start
        found.append(scan.name("an operand's name"))
    return tuple(found)


def to_text(module: Module) -> str:
    """The text of a module, computations and instructions in the module's order."""
    header = f"HloModule {module.name}{_attributes(module.attributes)}"
    tables = ["\n".join([title, *rows]) + "\n" for title, rows in module.tables]
    head = "\n".join([header, "", *tables]) + ("\n" if tables else "")
    return "\n".join([head, *("\n".join(_computation_lines(c)) for c in module.computations)])


def _attributes(attributes: tuple[tuple[str, str], ...]) -> str:
    return "".join(f", {key}={text}" for key, text in attributes)


def _computation_lines(c: Computation) -> Iterator[str]:
    signature = ""
    if c.signature:
        parameters = ", ".join(f"{p.name}: {_bare(p.shape)}" for p in c.parameters)
        signature = f" ({parameters}) -> {_bare(c.root.shape)}"
    yield f"{'ENTRY ' if c.entry else ''}%{c.name}{signature} {{"
    for i in c.instructions:
        yield f"  {instruction_text(i)}"
    yield f"}}{_attributes(c.attributes)}"
    yield ""


def instruction_text(i: Instruction) -> str:
    """One instruction, without indentation."""
    inside = i.payload or _operand_list(i.operands)
    root = "ROOT " if i.root else ""
    return f"{root}%{i.name} = {i.shape} {i.opcode}({inside}){_attributes(i.attributes)}"


def _operand_list(names: tuple[str, ...]) -> str:
    return ", ".join(f"/*index={k}*/%{n}" if k and k % 5 == 0 else f"%{n}" for k, n in enumerate(names))


def _bare(shape: Shape) -> Shape:
    """The shape without layouts, as signatures show it."""
    if shape.is_tuple:
        return replace(shape, parts=tuple(_bare(p) for p in shape.parts))
    return replace(shape, layout=None)


_CALL_DEPTH = 100
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
                if depth[name] > _CALL_DEPTH:
                    fault = f"computations call one another {depth[name]} deep, at most {_CALL_DEPTH} deep is read"
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
