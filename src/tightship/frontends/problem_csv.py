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
group, colocation      (may be absent or empty) buffers of one group share an offset, as aliases do
conflicts              (may be absent or empty) ids, separated by spaces, of buffers that it shares no bytes with
                       although no time is theirs together; said of one of the two, it holds for both
traffic                (may be absent or empty) bytes of it read and written in all; else written once, read once
pools                  (may be absent or empty) names, separated by spaces, of the pools it may lie in, best first
pool                   (may be absent or empty) the pool it lies in: fixed in a problem, chosen in a packing
heap                   (may be absent or empty) the number of the heap of that pool; only in a packing
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
from tightship.files import open_regular, unreadable, write_file
from tightship.plan import Buffer, Gap, Pool, Problem, Solution
from tightship.units import MAX_BYTES
from tightship.verify.placement import check_solution

__all__ = [
    "MAX_LINE",
    "MAX_RELATED",
    "MAX_ROWS",
    "REQUIRED",
    "Row",
    "Table",
    "check_pins",
    "chosen_conflicts",
    "dumps",
    "lines_of",
    "loads",
    "meaning",
    "read",
    "table_of",
    "write",
]


MAX_LINE: Final = 1 << 20
MAX_ROWS: Final = 1 << 22
MAX_RELATED: Final = 1 << 15
"""Buffers of a problem with conflicts, at most: these are a bit for every pair."""

_COLUMNS: Final = {
    "id": "id", "buffer": "id", "buffer_id": "id", "lower": "lower", "begin": "lower", "start": "lower",
    "upper": "upper", "end": "upper", "size": "size", "alignment": "alignment", "hint": "hint", "gaps": "gaps",
    "offset": "offset", "group": "group", "colocation": "group", "conflicts": "conflicts", "pools": "pools",
    "pool": "pool", "heap": "heap", "traffic": "traffic",
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
            raise BadInput(f"line is too long: at most {MAX_LINE} bytes are read", place=place)
        if number > 2 * MAX_ROWS:
            raise BadInput(f"too many lines: at most {2 * MAX_ROWS} are read", place=place)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"not UTF-8 text: {error.reason}", place=place) from error
        yield text.removeprefix("\ufeff") if number == 1 else text


class Row:
    """Reads rows under one header."""

    def __init__(self, header: Sequence[str], name: str) -> None:
        self.name, self.width = name, len(header)
        self.at: dict[str, int] = {}
        for k, column in enumerate(header):
            known = meaning(column)
            if known in self.at:
                rule = f"columns {header[self.at[known]]!r} and {column!r} both stand for {known!r}"
                raise BadInput(rule, place=f"{name}:1")
            if known:
                self.at[known] = k
        if missing := [column for column in REQUIRED if column not in self.at]:
            rule = f"no column for {', '.join(missing)}; the first line names at least {', '.join(REQUIRED)}"
            raise BadInput(rule, ",".join(header), f"{name}:1")
        self.header = [column.strip() for column in header]
        self.last = int(self.header[self.at["upper"]].lower() == "end")
        self.seen: dict[str, int] = {}

    def buffer(self, fields: Sequence[str], line: int) -> Buffer:
        place = f"{self.name}:{line}"
        if len(fields) != self.width:
            raise BadInput(f"row of {len(fields)} fields; the first line has {self.width}", place=place)
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
            self._maybe(fields, "traffic", place),
        )
        if b.upper > MAX_BYTES:
            raise BadInput(f"number {b.upper} is too large: at most 2^63-1", place=place)
        if b.lower >= b.upper:
            rule = f"empty live range from {b.lower} to {b.upper - self.last}: it ends after it begins"
            raise BadInput(rule, place=place)
        if rule := b.gap_fault:
            raise BadInput(rule, place=place)
        return b

    def _id(self, fields: Sequence[str], line: int) -> str:
        name, place = fields[self.at["id"]], f"{self.name}:{line}"
        if not name.strip() or _CONTROL.search(name):
            rule = "empty id" if not name.strip() else "id with control characters"
            raise BadInput(rule, name, place)
        if (first := self.seen.setdefault(name, line)) != line:
            raise BadInput(f"duplicate id {_short(name)}, first on line {first}", place=place)
        return name

    def home(self, fields: Sequence[str], line: int) -> tuple[str, int]:
        """The pool ("" for none) and the heap that a row says."""
        place = f"{self.name}:{line}"
        pool = self._text(fields, "pool", place).strip()
        if pool.split() not in ([], [pool]):
            raise BadInput("pool name with spaces", pool, place)
        heap = self._maybe(fields, "heap", place) or 0
        if heap > MAX_ROWS:
            raise BadInput(f"heap number {heap} is too large: at most {MAX_ROWS}", place=place)
        return pool, heap

    def conflicts(self, rows: Sequence[Sequence[str]], lines: Sequence[int]) -> tuple[int, ...]:
        """What the column ``conflicts`` says, as bit sets; nothing if it says nothing."""
        at = self.at.get("conflicts")
        if at is None or not any(row[at].strip() for row in rows):
            return ()
        if len(rows) > MAX_RELATED:
            raise BadInput(
                f"{len(rows)} buffers are too many with conflicts: at most {MAX_RELATED}", place=self.name
            )
        index = {row[self.at["id"]]: k for k, row in enumerate(rows)}
        found = [0] * len(rows)
        for k, row in enumerate(rows):
            for name in row[at].split():
                other = index.get(name)
                if other is None or other == k:
                    rule = f"conflict with {_short(name)}, which is no other buffer of the file"
                    raise BadInput(rule, place=f"{self.name}:{lines[k]}")
                found[k] |= 1 << other
                found[other] |= 1 << k
        return tuple(found)

    def _text(self, fields: Sequence[str], column: str, place: str) -> str:
        at = self.at.get(column)
        text = "" if at is None or not fields[at].strip() else fields[at]
        if _CONTROL.search(text):
            raise BadInput(f"column {column!r}: control characters", text, place)
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
                raise BadInput("gap is not written lo-hi or lo-hi@wlo:whi, in whole numbers", text, place)
            lower, upper, *window = [_whole(n, "gap", place) for n in found.groups() if n is not None]
            gaps.append(Gap(lower, upper + self.last, (window[0], window[1]) if window else None))
        return tuple(gaps)


def meaning(column: str) -> str:
    return _COLUMNS.get(column.strip().lower(), "")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _whole(text: str, what: str, place: str, least: int = 0) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()):
        raise BadInput(f"{what}: {_short(text)} is no whole number of at least {least}", place=place)
    digits = digits.lstrip("0") or "0"
    if len(digits) > 19 or (value := int(digits)) > MAX_BYTES:
        raise BadInput(f"{what}: {_short(text)} is too large: at most 2^63-1", place=place)
    if value < least:
        raise BadInput(f"{what}: {value} is too small: at least {least}", place=place)
    return value


@dataclass(frozen=True)
class Table:
    """A file of a problem: the problem with what ``offset`` says as pins, and the rows as they stand.

    ``lines`` has the line on which each buffer's row ends, ``name`` is what messages call the file, ``homes`` the
    pool ("": none is said) and heap of each buffer. The problem has no pools; its buffers say which they may go to.
    """

    problem: Problem
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    name: str
    homes: tuple[tuple[str, int], ...] = ()

    @property
    def unpinned(self) -> Problem:
        """The problem without what ``offset`` says."""
        return replace(self.problem, buffers=tuple(replace(b, pinned=None) for b in self.problem.buffers))

    @property
    def has_offsets(self) -> bool:
        """Whether there is a column ``offset``."""
        return any(meaning(column) == "offset" for column in self.header)

    @property
    def fixed(self) -> Problem:
        """The problem with what ``pool`` says as the one pool that a buffer may go to."""
        rows = zip(self.problem.buffers, self.homes, strict=True)
        return replace(
            self.problem, buffers=tuple(replace(b, pools=(name,)) if name else b for b, (name, _) in rows)
        )

    @property
    def pool_names(self) -> tuple[str, ...]:
        """The pools that the file names, in their order."""
        rows = zip(self.problem.buffers, self.homes, strict=True)
        return tuple(dict.fromkeys(n for b, (name, _) in rows for n in (*b.pools, name) if n))

    def place(self, buffer: int) -> str:
        return f"{self.name}:{self.lines[buffer]}"


def read(path: str | os.PathLike[str]) -> Table:
    """Read a file. Raises ``BadInput`` with the line for whatever is wrong with it."""
    name = os.fspath(path)
    try:
        with open_regular(path) as file:
            return _table(file, name)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise unreadable(error, name) from error


def loads(data: bytes, name: str = "problem") -> Table:
    return _table(io.BytesIO(data), name)


def check_pins(table: Table, capacity: int | None = None, pools: Sequence[Pool] = ()) -> None:
    """Raise ``BadInput``, with the line, for pinned buffers that lie beyond the capacity or on one another, and for
    members of a group that cannot share an offset."""
    _check_groups(table.fixed.buffers, table.lines, table.name)
    limits = {pool.name: min(filter(None, (pool.capacity, pool.heap)), default=None) for pool in pools}
    every = tuple(limits)
    pinned = []
    for k, b in enumerate(table.fixed.buffers):
        if b.pinned is None:
            continue
        name = (b.pools or every)[0] if pools else ""
        limit = limits.get(name, capacity)
        if limit is not None and b.pinned + b.size > limit:
            where = f" of pool {name!r}" if name else ""
            rule = f"pinned buffer ends at {b.pinned + b.size}, beyond the capacity{where} of {limit} bytes"
            raise BadInput(rule, place=table.place(k))
        pinned.append((k, replace(b, pools=()), b.pinned, (name, 0)))
    arena = max((offset + b.size for _, b, offset, _ in pinned), default=0)
    rows = chosen_conflicts(table.problem.conflicts, [k for k, *_ in pinned])
    alone = Problem(tuple(b for _, b, _, _ in pinned), None, rows, tuple(Pool(name) for name in every))
    there = Solution(
        tuple(offset for _, _, offset, _ in pinned),
        arena * max(1, len(pools)),
        homes=tuple(home for *_, home in pinned),
    )
    for wrong in check_solution(alone, there):
        at = next(k for k, b, *_ in pinned if b.id == wrong.subjects[0])
        raise BadInput(f"wrong offset: {wrong.message}", place=table.place(at))


def chosen_conflicts(conflicts: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """The conflicts of some buffers among themselves."""
    if not conflicts:
        return ()
    return tuple(sum((conflicts[k] >> j & 1) << at for at, j in enumerate(chosen)) for k in chosen)


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
        "group": [b.group for b in buffers],
        "conflicts": [_words(names, name) for names in _conflict_names(problem)],
        "pools": [_words(b.pools, name) for b in buffers],
        "traffic": ["" if b.traffic is None else str(b.traffic) for b in buffers],
        "offset": ["" if b.pinned is None else str(b.pinned) for b in buffers],
    }
    columns = fixed | {name: texts for name, texts in optional.items() if any(texts)}
    rows = tuple(zip(*columns.values(), strict=True))
    nowhere = (("", 0),) * len(rows)
    return Table(problem, tuple(columns), rows, tuple(range(2, len(rows) + 2)), name, nowhere)


def dumps(table: Table, offsets: Sequence[int] | None = None, homes: Sequence[tuple[str, int]] = ()) -> bytes:
    """The file of a table; with ``offsets``, and ``homes`` where there are pools, that of its packing: the same rows,
    and where each lies."""
    header, rows = table.header, table.rows
    if offsets is not None:
        header, rows = _filled(header, rows, "offset", [str(int(x)) for x in offsets])
    if any(pool for pool, _ in homes):
        header, rows = _filled(header, rows, "pool", [pool for pool, _ in homes])
    if any(heap for _, heap in homes) or (homes and any(meaning(c) == "heap" for c in header)):
        header, rows = _filled(header, rows, "heap", [str(heap) for _, heap in homes])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    try:
        data = text.getvalue().encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"cannot write an id: {error}", place=table.name) from error
    loads(data, table.name)  # never write what cannot be read
    return data


def _filled(
    header: tuple[str, ...], rows: tuple[tuple[str, ...], ...], column: str, texts: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Header and rows with what a column says, in its place or as the last."""
    at = next((k for k, name in enumerate(header) if meaning(name) == column), len(header))
    header = (*header[:at], header[at] if at < len(header) else column, *header[at + 1 :])
    return header, tuple((*row[:at], x, *row[at + 1 :]) for row, x in zip(rows, texts, strict=True))


def _conflict_names(problem: Problem) -> Iterator[list[str]]:
    """Of each buffer those in conflict with it that stand further down."""
    for k in range(len(problem.buffers)):
        row = (problem.conflicts[k] if problem.conflicts else 0) >> (k + 1)
        names = []
        while row:
            low = row & -row
            names.append(problem.buffers[k + low.bit_length()].id)
            row ^= low
        yield names


def _words(names: Sequence[str], place: str) -> str:
    for name in names:
        if name.split() != [name]:
            raise BadInput("name with spaces in a list of names", name, place)
    return " ".join(names)


def write(
    path: str | os.PathLike[str],
    table: Table,
    offsets: Sequence[int] | None = None,
    homes: Sequence[tuple[str, int]] = (),
) -> None:
    """The file appears complete or not at all."""
    write_file(path, dumps(table, offsets, homes))


# --- reading ---


def _table(file: BinaryIO, name: str) -> Table:
    reader = csv.reader(lines_of(file, name), strict=True)
    buffers: list[Buffer] = []
    homes: list[tuple[str, int]] = []
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    try:
        header = next(reader, None)
        if header is None:
            raise BadInput(
                f"empty file; the first line names the columns, at least {', '.join(REQUIRED)}", place=name
            )
        parse = Row(header, name)
        for fields in reader:
            if not fields:
                continue
            if len(rows) == MAX_ROWS:
                raise BadInput(f"too many buffers: at most {MAX_ROWS}", place=f"{name}:{reader.line_num}")
            buffers.append(parse.buffer(fields, reader.line_num))
            homes.append(parse.home(fields, reader.line_num))
            rows.append(tuple(fields))
            lines.append(reader.line_num)
    except csv.Error as error:
        raise BadInput(f"invalid CSV: {error}", place=f"{name}:{reader.line_num}") from error
    conflicts = parse.conflicts(rows, lines)
    return Table(
        Problem(tuple(buffers), None, conflicts), tuple(header), tuple(rows), tuple(lines), name, tuple(homes)
    )


def _check_groups(buffers: Sequence[Buffer], lines: Sequence[int], name: str) -> None:
    """That members of a group can share an offset."""
    first: dict[str, int] = {}
    for k, b in enumerate(buffers):
        if not b.group:
            continue
        if any(gap.window for gap in b.gaps):
            raise BadInput(f"member {b.id!r} of a group has a gap with a window", place=f"{name}:{lines[k]}")
        other = buffers[first.setdefault(b.group, k)]
        if b.pools and other.pools and not set(b.pools) & set(other.pools):
            pools = f"{' '.join(b.pools)}; {other.id!r} has {' '.join(other.pools)}"
            raise BadInput(f"no pool in common in group {b.group!r}: {pools}", place=f"{name}:{lines[k]}")
        for one, two in ((b, other), (other, b)):
            if one.pinned is not None and one.pinned % two.alignment:
                rule = f"offset {one.pinned} is no multiple of {two.alignment}, as all of group {b.group!r} ask for"
                raise BadInput(rule, place=f"{name}:{lines[k]}")


def _gap_text(gap: Gap) -> str:
    window = f"@{gap.window[0]}:{gap.window[1]}" if gap.window else ""
    return f"{gap.lower}-{gap.upper}{window}"
