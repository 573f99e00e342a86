"""HLO text to a Module: recursive descent over the text XLA writes, and people write like it.

What it knows nothing of, it keeps as text; what it cannot read, it refuses with line, column and what it
expected there. Afterwards it checks what every later step relies on: operands and called computations exist,
operands stand before their users, computations do not call one another in a circle.
"""

from __future__ import annotations

import re
from pathlib import Path

from tightship.errors import BadInput
from tightship.frontends.hlo.check import check_module
from tightship.frontends.hlo.check_calls import check_instructions
from tightship.frontends.hlo.module import Computation, Instruction, Module
from tightship.frontends.hlo.opcodes import KNOWN
from tightship.frontends.hlo.scan import Scan
from tightship.serde import read_bytes

__all__ = ["SIZE_LIMIT", "parse", "read"]

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
_LITERAL = frozenset({"constant", "parameter"})


def read(path: str | Path) -> Module:
    """The module in a text file. Raises ``BadInput`` with file, line and column."""
    path = Path(path)
    data = read_bytes(path, SIZE_LIMIT, "an HLO module")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"an HLO module is UTF-8 text (byte {error.start} is not)", place=str(path)) from None
    return parse(text, path.name)


def parse(text: str, file: str = "module") -> Module:
    """The module a text describes; ``file`` is what messages call it."""
    scan = Scan(text, file)
    if (number := _LONG.search(text)) is not None:
        scan.fail("a number of at most 400 digits", number.start())
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
            if i.opcode not in KNOWN:
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
    opcode = scan.match(_OPCODE)
    if opcode is None:
        scan.blank()
        scan.fail("an opcode and '('")
    payload = ""
    operands: tuple[str, ...] = ()
    if opcode[1] in _LITERAL:
        start = scan.at
        payload = scan.bracketed()
        if opcode[1] == "parameter" and not _NUMBER.match(payload.strip()):
            scan.fail("the number of a parameter", start + 1)
    else:
        operands = _operands(scan)
    return Instruction(
        head[2], opcode[1], shape, operands, payload.strip(), scan.attributes(), head[1] is not None, at
    )


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
