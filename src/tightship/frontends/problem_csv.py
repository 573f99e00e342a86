"""Placement problems as files: MiniMalloc's CSV <-> Problem.

Columns go by their names, in any order; those not known are kept as they are.

=====================  ===================================================================================
id, buffer, buffer_id  the buffer's name, unlike all others
lower, begin, start    the time from which it is alive
upper                  the time from which it is no longer alive
end                    instead of ``upper``: the last time at which it is alive; gaps then end so, too
size                   bytes, at least 1
alignment              (may be absent or empty) its offset is a multiple of it
hint                   (may be absent or empty) an offset worth trying
gaps                   (may be absent or empty) separated by spaces: ``lo-hi``, not alive in [lo, hi), or
                       ``lo-hi@wlo:whi``, of its bytes only [wlo, whi) alive then
offset                 (may be absent or empty) where it lies: pinned in a problem, placed in a packing
=====================  ===================================================================================

Numbers are whole, from 0 to 2^63-1. Reading stops at the first line that breaks a rule and names it; no line
is read further than ``MAX_LINE`` bytes.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Final

from tightship.errors import BadInput
from tightship.plan import Buffer, Gap, Problem, Solution
from tightship.serde import write_file
from tightship.units import MAX_BYTES
from tightship.verify_placement import check_solution

__all__ = ["MAX_LINE", "MAX_ROWS", "Table", "check_pins", "dumps", "loads", "read", "table_of", "write"]

MAX_LINE: Final = 1 << 20
MAX_ROWS: Final = 1 << 22

_COLUMNS: Final = {
    "id": "id", "buffer": "id", "buffer_id": "id", "lower": "lower", "begin": "lower", "start": "lower",
    "upper": "upper", "end": "upper", "size": "size", "alignment": "alignment", "hint": "hint", "gaps": "gaps",
    "offset": "offset",
}  # fmt: skip
_REQUIRED: Final = ("id", "lower", "upper", "size")
_GAP: Final = re.compile(r"([0-9]+)-([0-9]+)(?:@([0-9]+):([0-9]+))?")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Table:
    """A file of a problem: the problem with what ``offset`` says as pins, and the rows as they stand.

    ``lines`` has the line on which each buffer's row ends, ``name`` is what messages call the file.
    """

    problem: Problem
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    name: str

    @property
    def unpinned(self) -> Problem:
        """The problem without what ``offset`` says."""
        return replace(self.problem, buffers=tuple(replace(b, pinned=None) for b in self.problem.buffers))

    @property
    def has_offsets(self) -> bool:
        """Whether there is a column ``offset``."""
        return any(_meaning(column) == "offset" for column in self.header)

    def place(self, buffer: int) -> str:
        return f"{self.name}:{self.lines[buffer]}"


def read(path: str | os.PathLike[str]) -> Table:
    """Read a file. Raises ``BadInput`` with the line for whatever is wrong with it."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            return _table(file, name)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise BadInput(f"the file can be read ({error})", place=name) from error


def loads(data: bytes, name: str = "problem") -> Table:
    return _table(io.BytesIO(data), name)


def check_pins(table: Table, capacity: int | None = None) -> None:
    """Raise ``BadInput``, with the line, for pinned buffers that lie beyond the capacity or on one another."""
    pinned = [(k, b, b.pinned) for k, b in enumerate(table.problem.buffers) if b.pinned is not None]
    for k, b, offset in pinned:
        if capacity is not None and offset + b.size > capacity:
            rule = f"a pinned buffer ends within the capacity of {capacity} bytes"
            raise BadInput(rule, offset + b.size, table.place(k))
    arena = max((offset + b.size for _, b, offset in pinned), default=0)
    alone = Problem(tuple(b for _, b, _ in pinned))
    for wrong in check_solution(alone, Solution(tuple(offset for _, _, offset in pinned), arena)):
        at = next(k for k, b, _ in pinned if b.id == wrong.subjects[0])
        raise BadInput(f"pinned buffers lie rightly ({wrong.message})", place=table.place(at))


def table_of(problem: Problem, name: str = "problem") -> Table:
    """The file of a problem that did not come from one; optional columns only where they say something."""
    buffers = problem.buffers
    fixed = {
        "id": [b.id for b in buffers],
        "lower": [str(b.lower) for b in buffers],
        "upper": [str(b.upper) for b in buffers],
        "size": [str(b.size) for b in buffers],
    }
    optional = {
        "alignment": [str(b.alignment) if b.alignment != 1 else "" for b in buffers],
        "hint": ["" if b.hint is None else str(b.hint) for b in buffers],
        "gaps": [" ".join(map(_gap_text, b.gaps)) for b in buffers],
        "offset": ["" if b.pinned is None else str(b.pinned) for b in buffers],
    }
    columns = fixed | {name: texts for name, texts in optional.items() if any(texts)}
    rows = tuple(zip(*columns.values(), strict=True))
    return Table(problem, tuple(columns), rows, tuple(range(2, len(rows) + 2)), name)


def dumps(table: Table, offsets: Sequence[int] | None = None) -> bytes:
    """The file of a table; with ``offsets``, that of its packing: the same rows, and where each lies."""
    header, rows = table.header, table.rows
    if offsets is not None:
        at = next((k for k, name in enumerate(header) if _meaning(name) == "offset"), len(header))
        header = (*header[:at], header[at] if at < len(header) else "offset", *header[at + 1 :])
        rows = tuple(
            (*row[:at], str(x), *row[at + 1 :]) for row, x in zip(rows, map(int, offsets), strict=True)
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    try:
        data = text.getvalue().encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"an id is Unicode text ({error})", place=table.name) from error
    loads(data, table.name)  # never write what cannot be read
    return data


def write(path: str | os.PathLike[str], table: Table, offsets: Sequence[int] | None = None) -> None:
    """The file appears complete or not at all."""
    write_file(path, dumps(table, offsets))


# --- reading ---


def _table(file: BinaryIO, name: str) -> Table:
    reader = csv.reader(_lines(file, name), strict=True)
    buffers: list[Buffer] = []
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    try:
        header = next(reader, None)
        if header is None:
            raise BadInput(
                f"a problem begins with a line of column names: {', '.join(_REQUIRED)}", place=name
            )
        parse = _Row(header, name)
        for fields in reader:
            if not fields:
                continue
            if len(rows) == MAX_ROWS:
                raise BadInput(f"a problem has at most {MAX_ROWS} buffers", place=f"{name}:{reader.line_num}")
            buffers.append(parse.buffer(fields, reader.line_num))
            rows.append(tuple(fields))
            lines.append(reader.line_num)
    except csv.Error as error:
        raise BadInput(f"a problem's file is CSV ({error})", place=f"{name}:{reader.line_num}") from error
    return Table(Problem(tuple(buffers)), tuple(header), tuple(rows), tuple(lines), name)


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    number = 0
    while raw := file.readline(MAX_LINE + 1):
        number += 1
        place = f"{name}:{number}"
        if len(raw) > MAX_LINE:
            raise BadInput(f"a line has at most {MAX_LINE} bytes", place=place)
        if number > 2 * MAX_ROWS:
            raise BadInput(f"a problem's file has at most {2 * MAX_ROWS} lines", place=place)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"a problem's file is UTF-8 text ({error.reason})", place=place) from error
        yield text.removeprefix("\ufeff") if number == 1 else text


class _Row:
    """Reads rows under one header."""

    def __init__(self, header: Sequence[str], name: str) -> None:
        self.name, self.width = name, len(header)
        self.at: dict[str, int] = {}
        for k, column in enumerate(header):
            known = _meaning(column)
            if known in self.at:
                rule = (
                    f"there is one column for {known!r}, not both {header[self.at[known]]!r} and {column!r}"
                )
                raise BadInput(rule, place=f"{name}:1")
            if known:
                self.at[known] = k
        if missing := [column for column in _REQUIRED if column not in self.at]:
            rule = f"a problem has columns {', '.join(_REQUIRED)}; there is none for {', '.join(missing)}"
            raise BadInput(rule, ",".join(header), f"{name}:1")
        self.header = [column.strip() for column in header]
        self.last = int(self.header[self.at["upper"]].lower() == "end")
        self.seen: dict[str, int] = {}

    def buffer(self, fields: Sequence[str], line: int) -> Buffer:
        place = f"{self.name}:{line}"
        if len(fields) != self.width:
            raise BadInput(f"a row has {self.width} fields, as the first line has", len(fields), place)
        b = Buffer(
            self._id(fields, line),
            self._number(fields, "lower", place),
            self._number(fields, "upper", place) + self.last,
            self._number(fields, "size", place, least=1),
            self._maybe(fields, "alignment", place, least=1) or 1,
            self._maybe(fields, "offset", place),
            self._gaps(fields, place),
            self._maybe(fields, "hint", place),
        )
        if b.upper > MAX_BYTES:
            raise BadInput("a number is at most 2^63-1", b.upper, place)
        if b.lower >= b.upper:
            rule = "a live range is not empty: it ends after it begins"
            raise BadInput(rule, (b.lower, b.upper - self.last), place)
        if rule := b.gap_fault:
            raise BadInput(rule, fields[self.at["gaps"]], place)
        return b

    def _id(self, fields: Sequence[str], line: int) -> str:
        name, place = fields[self.at["id"]], f"{self.name}:{line}"
        if not name.strip() or _CONTROL.search(name):
            raise BadInput("an id is text without control characters, and not empty", name, place)
        if (first := self.seen.setdefault(name, line)) != line:
            raise BadInput(f"an id stands for one buffer; this one is on line {first} already", name, place)
        return name

    def _number(self, fields: Sequence[str], column: str, place: str, least: int = 0) -> int:
        at = self.at[column]
        return _whole(fields[at], f"column {self.header[at]!r}", place, least)

    def _maybe(self, fields: Sequence[str], column: str, place: str, least: int = 0) -> int | None:
        at = self.at.get(column)
        return None if at is None or not fields[at].strip() else self._number(fields, column, place, least)

    def _gaps(self, fields: Sequence[str], place: str) -> tuple[Gap, ...]:
        at = self.at.get("gaps")
        gaps = []
        for text in fields[at].split() if at is not None else ():
            found = _GAP.fullmatch(text)
            if found is None:
                raise BadInput("a gap is written lo-hi or lo-hi@wlo:whi, in whole numbers", text, place)
            lower, upper, *window = [_whole(n, "a gap", place) for n in found.groups() if n is not None]
            gaps.append(Gap(lower, upper + self.last, (window[0], window[1]) if window else None))
        return tuple(gaps)


def _meaning(column: str) -> str:
    return _COLUMNS.get(column.strip().lower(), "")


def _whole(text: str, what: str, place: str, least: int = 0) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()):
        raise BadInput(f"{what} has whole numbers, at least {least}", text, place)
    digits = digits.lstrip("0") or "0"
    if len(digits) > 19 or (value := int(digits)) > MAX_BYTES:
        raise BadInput(f"{what} has numbers up to 2^63-1", text, place)
    if value < least:
        raise BadInput(f"{what} has whole numbers, at least {least}", text, place)
    return value


def _gap_text(gap: Gap) -> str:
    window = f"@{gap.window[0]}:{gap.window[1]}" if gap.window else ""
    return f"{gap.lower}-{gap.upper}{window}"
