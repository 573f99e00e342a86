"""Rows of a placement problem's file: what each column says. See problem_csv.py for the columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final

from tightship.errors import BadInput
from tightship.plan import Buffer, Gap
from tightship.units import MAX_BYTES

__all__ = ["MAX_LINE", "MAX_RELATED", "MAX_ROWS", "REQUIRED", "Row", "lines_of", "meaning"]

MAX_LINE: Final = 1 << 20
MAX_ROWS: Final = 1 << 22
MAX_RELATED: Final = 1 << 15
"""Buffers of a problem with conflicts, at most: these are a bit for every pair."""

_COLUMNS: Final = {
    "id": "id", "buffer": "id", "buffer_id": "id", "lower": "lower", "begin": "lower", "start": "lower",
    "upper": "upper", "end": "upper", "size": "size", "alignment": "alignment", "hint": "hint", "gaps": "gaps",
    "offset": "offset", "group": "group", "colocation": "group", "conflicts": "conflicts", "pools": "pools",
    "pool": "pool", "heap": "heap",
}  # fmt: skip
REQUIRED: Final = ("id", "lower", "upper", "size")
_GAP: Final = re.compile(r"([0-9]+)-([0-9]+)(?:@([0-9]+):([0-9]+))?")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def lines_of(file: BinaryIO, name: str) -> Iterator[str]:
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


class Row:
    """Reads rows under one header."""

    def __init__(self, header: Sequence[str], name: str) -> None:
        self.name, self.width = name, len(header)
        self.at: dict[str, int] = {}
        for k, column in enumerate(header):
            known = meaning(column)
            if known in self.at:
                rule = (
                    f"there is one column for {known!r}, not both {header[self.at[known]]!r} and {column!r}"
                )
                raise BadInput(rule, place=f"{name}:1")
            if known:
                self.at[known] = k
        if missing := [column for column in REQUIRED if column not in self.at]:
            rule = f"a problem has columns {', '.join(REQUIRED)}; there is none for {', '.join(missing)}"
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
            self._text(fields, "group", place),
            tuple(dict.fromkeys(self._text(fields, "pools", place).split())),
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

    def home(self, fields: Sequence[str], line: int) -> tuple[str, int]:
        """The pool ("" for none) and the heap that a row says."""
        place = f"{self.name}:{line}"
        pool = self._text(fields, "pool", place).strip()
        if pool.split() not in ([], [pool]):
            raise BadInput("a pool's name is without spaces", pool, place)
        heap = self._maybe(fields, "heap", place) or 0
        if heap > MAX_ROWS:
            raise BadInput(f"a heap's number is at most {MAX_ROWS}", heap, place)
        return pool, heap

    def conflicts(self, rows: Sequence[Sequence[str]], lines: Sequence[int]) -> tuple[int, ...]:
        """What the column ``conflicts`` says, as bit sets; nothing if it says nothing."""
        at = self.at.get("conflicts")
        if at is None or not any(row[at].strip() for row in rows):
            return ()
        if len(rows) > MAX_RELATED:
            raise BadInput(
                f"a problem with conflicts has at most {MAX_RELATED} buffers", len(rows), self.name
            )
        index = {row[self.at["id"]]: k for k, row in enumerate(rows)}
        found = [0] * len(rows)
        for k, row in enumerate(rows):
            for name in row[at].split():
                other = index.get(name)
                if other is None or other == k:
                    rule = "a conflict is with another buffer of the file, by its id"
                    raise BadInput(rule, name, f"{self.name}:{lines[k]}")
                found[k] |= 1 << other
                found[other] |= 1 << k
        return tuple(found)

    def _text(self, fields: Sequence[str], column: str, place: str) -> str:
        at = self.at.get(column)
        text = "" if at is None or not fields[at].strip() else fields[at]
        if _CONTROL.search(text):
            raise BadInput(f"column {column!r} has text without control characters", text, place)
        return text

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


def meaning(column: str) -> str:
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
