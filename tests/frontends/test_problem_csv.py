"""Problems as CSV: what is read, what is written, and that no bad file is anything but ``BadInput``."""

import csv
import io
import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightship.errors import BadInput
from tightship.frontends import problem_csv
from tightship.frontends.problem_csv import MAX_LINE, check_pins, dumps, loads, read, table_of, write
from tightship.plan import Buffer, Gap, Pool, Problem

HEAD = "id,lower,upper,size\n"
MORE = "id,lower,upper,size,group,conflicts,pools,pool,heap\n"
FULL = "id,lower,upper,size,alignment,hint,gaps,offset\n"


def buffers(text: str) -> tuple[Buffer, ...]:
    return loads(text.encode()).problem.buffers


@st.composite
def anything(draw: st.DrawFn) -> Problem:
    """Problems with everything that a file can say."""
    names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), min_size=1, max_size=6)
    ids = draw(st.lists(names.filter(str.strip), unique=True, max_size=5))
    rows = []
    for name in ids:
        lower = draw(st.integers(0, 2**62))
        upper = lower + draw(st.integers(1, 50))
        size = draw(st.integers(1, 2**63 - 1))
        cuts = sorted(draw(st.sets(st.integers(lower, upper), max_size=4)))
        gaps = []
        for since, until in pairwise(cuts):
            low = draw(st.integers(0, size - 1))
            window = (low, draw(st.integers(low + 1, size))) if draw(st.booleans()) else None
            gaps.append(Gap(since, until, window))
        pinned, hint = (draw(st.none() | st.integers(0, 2**63 - 1)) for _ in range(2))
        alignment = draw(st.sampled_from((1, 1, 64, 2**40)))
        group = draw(st.sampled_from(("", "", "one", " two words")))
        pools = tuple(draw(st.lists(st.sampled_from(("sram", "dram")), unique=True, max_size=2)))
        rows.append(Buffer(name, lower, upper, size, alignment, pinned, tuple(gaps), hint, group, pools))
    pairs = [
        (i, j)
        for j in range(len(rows))
        for i in range(j)
        if draw(st.integers(0, 3)) == 0 and rows[j].id.split() == [rows[j].id]
    ]
    conflicts = [0] * len(rows)
    for i, j in pairs:
        conflicts[i] |= 1 << j
        conflicts[j] |= 1 << i
    return Problem(tuple(rows), conflicts=tuple(conflicts) if pairs else ())


# --- reading ---


def test_reads_what_minimalloc_writes() -> None:
    assert buffers(HEAD + "b1,0,3,4\nb2,3,9,4\n") == (Buffer("b1", 0, 3, 4), Buffer("b2", 3, 9, 4))


@pytest.mark.parametrize(
    "text",
    [
        "size,upper,lower,id\n4,3,0,b1\n",
        "buffer,begin,upper,size\nb1,0,3,4\n",
        "buffer_id,start,end,size\nb1,0,2,4\n",
        "note,id,lower,upper,size\n,b1,0,3,4\n",
        " ID , lower,Upper,size\r\nb1, 0 ,3,04\r\n",
        "\ufeffid,lower,upper,size\nb1,0,3,4",
        'id,lower,upper,size\n\n"b1",0,"3",4\n\n',
        "id,lower,upper,size,alignment,hint,gaps,offset\nb1,0,3,4,,,,\n",
    ],
)
def test_columns_go_by_their_names_in_any_order(text: str) -> None:
    assert buffers(text) == (Buffer("b1", 0, 3, 4),)


def test_end_is_the_last_time_alive_for_gaps_too() -> None:
    (b,) = buffers("id,start,end,size,gaps\nx,0,9,8,2-3 5-6@0:4\n")
    assert b == Buffer("x", 0, 10, 8, gaps=(Gap(2, 4), Gap(5, 7, (0, 4))))


def test_reads_all_that_is_optional() -> None:
    (b,) = buffers(FULL + "x,0,9,8,4,16,2-3 5-6@0:4,12\n")
    assert b == Buffer("x", 0, 9, 8, 4, 12, (Gap(2, 3), Gap(5, 6, (0, 4))), 16)


def test_a_header_alone_is_a_problem_of_nothing() -> None:
    assert buffers(HEAD) == ()


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", "", "empty file; the first line names the columns"),
        ("\n", ":1", "no column for id, lower, upper, size"),
        ("id,lower,upper\n", ":1", "no column for size"),
        ("a;b;c\n", ":1", "no column for id"),
        ("id,buffer,lower,upper,size\n", ":1", "columns 'id' and 'buffer' both stand for 'id'"),
        ("id,lower,upper,end,size\n", ":1", "columns 'upper' and 'end' both"),
        (HEAD + "a,0,1,4\nb,0,1\n", ":3", "row of 3 fields; the first line has 4"),
        (HEAD + "a,0,1,4,5\n", ":2", "row of 5 fields; the first line has 4"),
        (HEAD + "a,-1,1,4\n", ":2", "column 'lower': '-1' is no whole number of at least 0"),
        (HEAD + "a,0,x,4\n", ":2", "column 'upper': 'x' is no whole number"),
        (HEAD + "a,0,1,4.5\n", ":2", "column 'size': '4.5' is no whole number"),
        (HEAD + "a,0,1,1_000\n", ":2", "is no whole number"),
        (HEAD + "a,0,1,٣\n", ":2", "is no whole number"),
        (HEAD + "a,0,1,\n", ":2", "is no whole number"),
        (HEAD + "a,0,1,0\n", ":2", "column 'size': 0 is too small: at least 1"),
        (HEAD + f"a,0,1,{2**63}\n", ":2", "is too large: at most 2^63-1"),
        (HEAD + f"a,0,1,{'9' * 5000}\n", ":2", "is too large: at most 2^63-1"),
        (f"id,lower,end,size\na,0,{2**63 - 1},4\n", ":2", "at most 2^63-1"),
        (HEAD + "a,3,3,4\n", ":2", "empty live range from"),
        (HEAD + "a,4,3,4\n", ":2", "empty live range from"),
        (HEAD + "a,0,1,4\n\na,1,2,4\n", ":4", "duplicate id 'a', first on line 2"),
        (HEAD + " ,0,1,4\n", ":2", "empty id"),
        (HEAD + "a\x1b[31m,0,1,4\n", ":2", "id with control characters"),
        (HEAD + '"a\nb",0,1,4\n', ":3", "id with control characters"),
        (HEAD + '"a,0,1,4\n', ":", "CSV"),
        (HEAD + 'a,0,1,"4"5\n', ":2", "CSV"),
        (FULL + "a,0,1,4,0,,,\n", ":2", "column 'alignment': 0 is too small: at least 1"),
        (FULL + "a,0,1,4,,-1,,\n", ":2", "column 'hint'"),
        (FULL + "a,0,1,4,,,,-1\n", ":2", "column 'offset'"),
        (FULL + "a,0,9,4,,,3,\n", ":2", "gap is not written lo-hi"),
        (FULL + "a,0,9,4,,,3-4@,\n", ":2", "gap is not written lo-hi"),
        (FULL + "a,0,9,4,,,-3-4,\n", ":2", "gap is not written lo-hi"),
        (FULL + f"a,0,9,4,,,3-{10**30},\n", ":2", "is too large: at most 2^63-1"),
        (FULL + "a,1,9,4,,,0-3,\n", ":2", "gap [0, 3) is not within the live range [1, 9)"),
        (FULL + "a,1,9,4,,,3-3,\n", ":2", "is not within the live range"),
        (FULL + "a,1,9,4,,,8-10,\n", ":2", "is not within the live range"),
        (FULL + "a,1,9,4,,,5-8 3-6,\n", ":2", "gap [5, 8) overlaps another"),
        (
            FULL + "a,1,9,4,,,3-6@2:5,\n",
            ":2",
            "window [2, 5] of a gap is not within the buffer's bytes [0, 4)",
        ),
        (FULL + "a,1,9,4,,,3-6@2:2,\n", ":2", "window [2, 2] of a gap is not within the buffer's bytes"),
        ("id,lower,upper,size,group,colocation\n", ":1", "columns 'group' and 'colocation' both"),
        (MORE + "a,0,1,4,g\x07,,,,\n", ":2", "column 'group': control characters"),
        (MORE + "a,0,1,4,,b,,,\n", ":2", "conflict with 'b', which is no other buffer of the file"),
        (MORE + "a,0,1,4,,,,,\nb,0,1,4,,a b,,,\n", ":3", "conflict with"),
        (MORE + "a,0,1,4,,,,one two,\n", ":2", "pool name with spaces"),
        (MORE + "a,0,1,4,,,,p,-1\n", ":2", "column 'heap': '-1' is no whole number"),
        (MORE + "a,0,1,4,,,,p,99999999\n", ":2", "heap number 99999999 is too large"),
    ],
)
def test_a_bad_file_is_said_to_be_bad_with_its_line(text: str, line: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        loads(text.encode(), "p.csv")
    assert said in str(caught.value)
    assert caught.value.place.startswith(f"p.csv{line}")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (HEAD.encode("utf-16"), ":1"),
        (HEAD.encode() + b"a,0,1,4\n\xff,0,1,4\n", ":3"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), ":1"),
        (bytes(300), ":1"),
    ],
)
def test_what_is_no_text_is_said_to_be_none(data: bytes, line: str) -> None:
    with pytest.raises(BadInput) as caught:
        loads(data, "p.csv")
    assert caught.value.place == f"p.csv{line}"


class Endless(io.RawIOBase):
    """As much of one pattern as is asked for, counted."""

    def __init__(self, start: bytes, pattern: bytes) -> None:
        self.start, self.pattern, self.given = start, pattern, 0

    def readline(self, size: int = -1) -> bytes:
        if self.start:
            line, self.start = self.start, b""
            return line
        assert 0 <= size <= MAX_LINE + 1
        line = self.pattern if self.pattern.endswith(b"\n") else self.pattern * size
        self.given += len(line)
        return line


@pytest.mark.parametrize("start", [b"", HEAD.encode()])
@pytest.mark.parametrize("pattern", [b"x", b"\x00", b'"', b'"x\n', b"x,y,z,w\n", b"a,0,1,4\n"])
def test_garbage_without_end_is_not_read_to_its_end(start: bytes, pattern: bytes) -> None:
    endless = Endless(start, pattern)
    with pytest.raises(BadInput):
        problem_csv._table(endless, "p.csv")
    assert endless.given <= 2 * MAX_LINE


def test_a_problem_has_so_many_rows_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_csv, "MAX_ROWS", 2)
    assert len(buffers(HEAD + "a,0,1,4\nb,0,1,4\n")) == 2
    with pytest.raises(BadInput, match="too many buffers: at most 2"):
        buffers(HEAD + "a,0,1,4\nb,0,1,4\nc,0,1,4\n")


@given(
    st.binary(max_size=200)
    | st.text(alphabet='id,lowerupsz0123456789-@: "\n\r', max_size=200).map(str.encode)
)
@settings(max_examples=300)
def test_no_bytes_at_all_are_anything_but_a_problem_or_bad_input(data: bytes) -> None:
    for start in (b"", HEAD.encode(), FULL.encode()):
        try:
            loads(start + data)
        except BadInput as error:
            assert error.place


@pytest.mark.parametrize("name", ["missing.csv", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_said_to_be_one(
    name: str, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"cannot read"):
        read(name)


def test_reads_groups_conflicts_and_pools() -> None:
    table = loads((MORE + "a,0,1,4,g,,sram dram,sram,1\nb,2,3,4,g,c,,,\nc,4,5,4,,,,,\n").encode())
    a, b, c = table.problem.buffers
    assert (a.group, a.pools, b.group, c.group, c.pools) == ("g", ("sram", "dram"), "g", "", ())
    assert table.problem.conflicts == (0, 0b100, 0b010)
    assert table.homes == (("sram", 1), ("", 0), ("", 0))
    assert table.pool_names == ("sram", "dram")
    assert [b.pools for b in table.fixed.buffers] == [("sram",), (), ()]


# --- pins ---


@pytest.mark.parametrize(
    ("rows", "capacity", "line", "said"),
    [
        ("a,0,9,8,,,,8\n", 15, ":2", "pinned buffer ends at 16, beyond the capacity of 15 bytes"),
        ("a,0,9,8,,,,0\nb,1,2,4,,,,\nc,5,6,8,,,,4\n", None, ":4", "share bytes [4, 8) during [5, 6)"),
        ("a,0,9,8,4,,,6\n", None, ":2", "does not start at a multiple of 4"),
    ],
)
def test_pins_that_cannot_be_are_said_with_their_line(
    rows: str, capacity: int | None, line: str, said: str
) -> None:
    with pytest.raises(BadInput) as caught:
        check_pins(loads((FULL + rows).encode(), "p.csv"), capacity)
    assert said in caught.value.rule and caught.value.place == f"p.csv{line}"


@pytest.mark.parametrize(
    ("rows", "line", "said"),
    [
        ("a,0,4,8,,0,g,\nb,6,9,8,,4,g,\n", ":3", "of group 'g', which shares an offset"),
        ("a,0,4,8,,4,g,\nb,6,9,8,8,,g,\n", ":3", "offset 4 is no multiple of 8"),
        ("a,0,4,8,,,g,p\nb,6,9,8,,,g,q\n", ":3", "no pool in common in group 'g': q; 'a' has p"),
    ],
)
def test_members_that_cannot_share_an_offset_are_said_with_their_line(
    rows: str, line: str, said: str
) -> None:
    with pytest.raises(BadInput) as caught:
        check_pins(loads(("id,lower,upper,size,alignment,offset,group,pools\n" + rows).encode(), "p.csv"))
    assert said in caught.value.rule and caught.value.place == f"p.csv{line}"


def test_pins_are_of_their_pools() -> None:
    table = loads(b"id,lower,upper,size,offset,pools\na,0,4,8,0,p\nb,0,4,8,0,q\n", "p.csv")
    check_pins(table, None, (Pool("p", 8), Pool("q")))
    with pytest.raises(
        BadInput, match=r"p\.csv:3: pinned buffer ends at \d+, beyond the capacity of pool 'q' of 4"
    ):
        check_pins(table, None, (Pool("p", 8), Pool("q", 4)))


def test_pins_may_lie_in_gaps_and_at_the_top() -> None:
    check_pins(loads((FULL + "a,0,9,8,,,2-4@0:4,0\nb,2,4,4,,,,4\n").encode()), 8)


# --- writing ---


@given(anything())
def test_a_problem_is_read_back_as_it_was_written(problem: Problem) -> None:
    table = table_of(problem)
    again = loads(dumps(table))
    assert again.problem == problem
    assert (again.header, again.rows) == (table.header, table.rows)


@given(anything(), st.data())
def test_a_packing_keeps_ids_order_and_rows(problem: Problem, data: st.DataObject) -> None:
    offsets = [data.draw(st.integers(0, 2**62)) for _ in problem.buffers]
    table = table_of(problem)
    packed = loads(dumps(table, offsets))
    assert [b.pinned for b in packed.problem.buffers] == offsets
    assert packed.unpinned.buffers == table.unpinned.buffers


def test_unknown_columns_and_the_way_things_are_written_are_kept() -> None:
    text = 'note,size,buffer,begin,end\n"x, ""y""",08,b1,0,2\n,4,b2,1,1\n'
    rows = list(csv.reader(io.StringIO(dumps(loads(text.encode()), [0, 8]).decode())))
    assert rows == [
        ["note", "size", "buffer", "begin", "end", "offset"],
        ['x, "y"', "08", "b1", "0", "2", "0"],
        ["", "4", "b2", "1", "1", "8"],
    ]


def test_an_offset_column_is_filled_where_it_stands() -> None:
    text = "offset,id,lower,upper,size\n16,a,0,1,4\n,b,0,1,4\n"
    assert (
        dumps(loads(text.encode()), [16, 0]).decode() == "offset,id,lower,upper,size\n16,a,0,1,4\n0,b,0,1,4\n"
    )


@pytest.mark.parametrize(
    "buffer", [Buffer("a", -1, 1, 4), Buffer("a", 0, 1, 0), Buffer("", 0, 1, 4), Buffer("\ud800", 0, 1, 4)]
)
def test_nothing_is_written_that_could_not_be_read(buffer: Buffer, tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "p.csv")
    with pytest.raises(BadInput):
        write(path, table_of(Problem((buffer,))))
    assert os.listdir(tmp_path) == []


def test_writing_is_all_or_nothing(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.path.join(tmp_path, "p.csv")
    table = loads((HEAD + "a,0,1,4\n").encode())
    write(path, table)
    assert read(path).problem == table.problem
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(BadInput, match="disk full"):
        write(path, table, [0])
    assert os.listdir(tmp_path) == ["p.csv"]
    assert not read(path).has_offsets
