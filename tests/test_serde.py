"""Plans and graphs as JSON: what is written comes back, and whatever is wrong is refused by file and place."""

from __future__ import annotations

import io
import json
import math
import os
import stat
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import graphs, plans, random_graph, random_plan, random_steps
from tightship import machine
from tightship import serde as docs
from tightship.errors import BadInput
from tightship.files import begins_with, read_most
from tightship.frontends import problem_csv
from tightship.graph import Graph, Op, Request, Storage, Value
from tightship.machine import CODECS, Machine
from tightship.plan import Inner, Plan, Residence, Step
from tightship.serde import (
    dumps_graph,
    dumps_plan,
    json_schema,
    load_any,
    load_graph,
    load_plan,
    loads_any,
    loads_graph,
    loads_plan,
    save_graph,
    save_plan,
)
from tightship.verify import verify

GRAPH = random_graph(5, 30)
PLAN = random_plan(GRAPH, 5)


def edited(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(data)
    edit(document)
    return json.dumps(document).encode()


# Round trips


@given(plans())
def test_plans_come_back(pair: tuple[Graph, Plan]) -> None:
    graph, plan = pair
    assert loads_plan(dumps_plan(plan)) == (plan, None)
    assert loads_plan(dumps_plan(plan, graph)) == (plan, graph)
    back, own = loads_plan(dumps_plan(plan, graph))
    assert own is not None and verify(own, back) == []


@given(graphs())
def test_graphs_come_back_with_their_digest(graph: Graph) -> None:
    back = loads_graph(dumps_graph(graph))
    assert back == graph and back.digest == graph.digest


def test_plans_with_nothing_and_with_everything_come_back() -> None:
    least = Plan("", ())
    assert loads_plan(dumps_plan(least)) == (least, None)
    most = Plan(
        "d", (Step("compress", -1, (0, 1), "full", 64, 1, ()), Step("free", form="packed", waits=(0,))),
        (Residence(-1, 0, 1, 64, -64, "sram", "packed", 3, 1, 2),), 2**63 - 1, 1, 2, 3, 4, 5, 6, 0.1, 1e300, 0.05,
        "p", 7.0, 8, "src", "cmd", ("é", "\n"), {"a": [1, None, {"b": 1.5}], "": True},
        9, 10, True, (Inner(0, GRAPH, PLAN), Inner(2, GRAPH, PLAN)), "gap",
    )  # fmt: skip
    assert loads_plan(dumps_plan(most)) == (most, None)
    assert {f.name for f in fields(Plan)} - {"steps", "residences"} <= set(json.loads(dumps_plan(most)))


@pytest.mark.parametrize(
    ("row", "document"),
    [(Op, docs.OpRow), (Value, docs.ValueRow), (Storage, docs.StorageRow), (Step, docs.StepColumns),
     (Residence, docs.ResidenceColumns), (Graph, docs.GraphDocument), (Plan, docs.PlanDocument),
     (Machine, docs.MachineRow), (Request, docs.RequestRow)],
)  # fmt: skip
def test_no_field_is_forgotten(row: Any, document: Any) -> None:
    assert {f.name for f in fields(row)} <= set(document.__struct_fields__)


def test_bounds_are_of_fields_that_there_are() -> None:
    rows = (Op, Value, Storage, Step, Residence, Graph, Plan, Machine, Request)
    assert set(docs._BOUNDS) <= {f"{row.__name__}.{f.name}" for row in rows for f in fields(row)}


RATES = tuple(1e9 * (k + 2) for k in range(len(CODECS)))
MEASURED = replace(random_graph(3, 5), machine=Machine(2e9, 3e9, 1e-5, RATES, RATES[::-1], measured=True))


def by_position(document: dict[str, Any]) -> None:
    """As files had it before rates had names."""
    named = document["machine"]
    named |= {name: [named[name][codec] for codec in docs.POSITIONS] for name in ("pack", "unpack")}


@pytest.mark.parametrize("codecs", [(*CODECS, "fp8"), ("fp8", *CODECS), CODECS[::-1]])
@pytest.mark.parametrize("edit", [lambda document: None, by_position], ids=["by name", "by position"])
def test_another_codec_leaves_older_files_readable(
    codecs: tuple[str, ...], edit: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = edited(dumps_graph(MEASURED), edit)
    monkeypatch.setattr(machine, "CODECS", codecs)
    found, known = loads_graph(older).machine, json.loads(older)["machine"]["pack"]
    if edit is by_position:
        known = dict(zip(docs.POSITIONS, known, strict=True))
    for codec in codecs:  # the slowest, for what the file does not know
        rate = known.get(codec, min(known.values()))
        assert found.seconds("compress", 10**9, codec) == 1e9 / rate
    assert loads_graph(dumps_graph(replace(MEASURED, machine=found))).machine == found


def test_a_file_with_a_codec_that_there_is_no_more_is_read() -> None:
    def edit(document: dict[str, Any]) -> None:
        document["machine"]["pack"]["fp4"] = 1.0

    assert loads_graph(edited(dumps_graph(MEASURED), edit)) == MEASURED


def test_rates_have_names_in_the_file_and_one_for_each_codec() -> None:
    assert json.loads(dumps_graph(MEASURED))["machine"]["pack"] == dict(zip(CODECS, RATES, strict=True))
    with pytest.raises(BadInput, match=r"g.json: \$.machine.pack: 2 rates without names"):
        loads_graph(edited(dumps_graph(MEASURED), put("machine", "pack", value=[1.0, 2.0])), "g.json")
    with pytest.raises(BadInput, match=f"2 rates for {len(CODECS)} codecs"):
        Machine(pack=(1.0, 2.0))


def test_machines_of_earlier_files_lose_nothing_to_copies() -> None:
    graph = replace(
        random_graph(3, 5), machine=Machine(2e9, 3e9, 1e-5, measured=True, begin=1e-6, beside=1e-11)
    )
    written = json.loads(dumps_graph(graph))
    assert loads_graph(json.dumps(written)).machine == graph.machine
    for name in ("begin", "beside"):
        del written["machine"][name]
    assert loads_graph(json.dumps(written)).machine == replace(graph.machine, begin=0.0, beside=0.0)


def test_tuples_in_meta_come_back_as_lists() -> None:
    back, _ = loads_plan(dumps_plan(replace(PLAN, meta={"shape": (1, 2)})))
    assert back.meta == {"shape": [1, 2]}


def test_a_plan_inside_another_has_its_graph() -> None:
    row = json.loads(dumps_plan(Plan("d", (), inner=(Inner(0, GRAPH, PLAN),))))
    del row["inner"][0]["plan"]["graph"]
    with pytest.raises(BadInput, match="missing `graph`"):
        loads_plan(json.dumps(row).encode())


def test_files_come_back(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "a.json")
    save_plan(PLAN, str(tmp_path / "b.json"), GRAPH)
    save_graph(GRAPH, tmp_path / "g.json")
    assert load_plan(tmp_path / "a.json") == (PLAN, None) == load_any(tmp_path / "a.json")
    assert load_plan(tmp_path / "b.json") == (PLAN, GRAPH) == load_any(tmp_path / "b.json")
    assert load_graph(tmp_path / "g.json") == GRAPH == load_any(tmp_path / "g.json")[1]


def test_the_schema_names_what_the_documents_hold() -> None:
    schema = json_schema()
    assert set(schema) == {"tightship-plan", "tightship-graph"}
    text = json.dumps(schema)
    assert "recompute" in text and '"residences"' in text and "2020-12" in text


# Writing


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    save_plan(PLAN, target)
    before = target.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(BadInput, match="no space left"):
        save_plan(replace(PLAN, planner="other"), target)
    assert target.read_bytes() == before and os.listdir(tmp_path) == ["plan.json"]


def test_a_written_file_follows_the_umask_and_links(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    old = os.umask(0o027)
    try:
        save_plan(PLAN, tmp_path / "link.json")
    finally:
        os.umask(old)
    assert (tmp_path / "link.json").is_symlink()
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o640


@pytest.mark.parametrize("where", ["missing/plan.json", ".", "plan.json/x", "nul\0.json"])
def test_places_that_cannot_be_written_are_refused(tmp_path: Path, where: str) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    with pytest.raises(BadInput):
        save_plan(PLAN, tmp_path / where)


UNWRITABLE: dict[str, dict[str, Any]] = {
    "beyond 64 bits": {"peak": 2**63},
    "negative": {"arena": -1},
    "not finite": {"time": math.nan},
    "infinite": {"seconds": math.inf},
    "meta of a class": {"meta": {"a": object()}},
    "meta of a set": {"meta": {"a": {1}}},
    "meta with a number as key": {"meta": {1: 2}},
    "meta with nan": {"meta": {"a": [math.nan]}},
    "meta with a large number": {"meta": {"a": 2**63}},
    "meta in itself": {"meta": {"a": (deep := [])}},
    "half a character": {"planner": "\ud800"},
    "an unknown kind": {"steps": (Step("jump"),)},
    "an unknown form": {"steps": (Step("free", form="gas"),)},
    "an index below -1": {"steps": (Step("compute", op=-2),)},
    "text for a number": {"peak": "1"},
}
deep.append(deep)


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_could_not_be_read_back_is_not_written(what: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        save_plan(replace(PLAN, **UNWRITABLE[what]), tmp_path / "plan.json")
    assert not os.listdir(tmp_path)


def test_a_plan_is_not_saved_with_another_graph() -> None:
    with pytest.raises(BadInput, match="made for"):
        dumps_plan(PLAN, random_graph(6, 3))


# Reading what is wrong


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.json", "No such file"), (tmp_path, "not a regular file")):
        with pytest.raises(BadInput, match=message) as caught:
            load_plan(path)
        assert str(path) in str(caught.value)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    for read in (load_plan, problem_csv.read):
        with pytest.raises(BadInput, match="regular file"):
            read(tmp_path / "pipe")
    assert begins_with(tmp_path / "pipe", 1) == b""


def test_reading_asks_for_no_more_memory_than_a_file_has(tmp_path: Path) -> None:
    """Where address space is limited, what a large limit allows is not there."""
    (tmp_path / "small").write_bytes(b"12345")
    asked = []

    class File(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(size)

    assert read_most(File(b"12345"), 1 << 31, 5) == b"12345"
    assert read_most(File(b"12345"), 1 << 31, 2) == b"12345"  # it has grown
    assert len(read_most(File(b"12345"), 3, 5)) == 4
    assert max(asked) <= 1 << 20


def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate((1 << 30) + 1)  # a hole: takes no space
    with pytest.raises(BadInput, match="at most 1073741824 are read"):
        load_plan(tmp_path / "huge.json")
    save_plan(PLAN, tmp_path / "plan.json")
    with pytest.raises(BadInput, match="at most 10 are read"):
        load_any(tmp_path / "plan.json", limit=10)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = dumps_plan(random_plan(random_graph(0, 3), 0))
    for n in range(len(data)):
        with pytest.raises(BadInput, match="JSON"):
            loads_plan(data[:n], "cut.json")
    (tmp_path / "cut.json").write_bytes(data[:100])
    with pytest.raises(BadInput, match=r"cut\.json: invalid JSON"):
        load_plan(tmp_path / "cut.json")


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return edit


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def edit(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return edit


WRONG_PLANS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another format": (
        put("format", value="tightship-graph"), r"\$\.format: format is 'tightship-graph', not 'tightship-plan'"
    ),
    "no format": (without("format"), r"\$\.format"),
    "a later version": (
        put("version", value=2), r"\$\.version: version 2 of tightship-plan cannot be read: .* version 1;"
    ),
    "a version in text": (put("version", value="1"), r"\$\.version"),
    "no digest": (without("digest"), r"\$: .*`digest`"),
    "no steps": (without("steps"), r"\$: .*`steps`"),
    "an unknown key": (put("peek", value=1), r"\$: .*`peek`"),
    "text for bytes": (put("peak", value="1"), r"\$\.peak: expected `int`"),
    "half a byte": (put("peak", value=1.5), r"\$\.peak: expected `int`"),
    "fewer than no bytes": (put("peak", value=-1), r"\$\.peak: .*>= 0"),
    "too many bytes": (put("budget", value=2**63), r"\$\.budget: .*9223372036854775807"),
    "far too many bytes": (put("peak", value=10**400), r"\$\.peak"),
    "no time": (put("time", value=None), r"\$\.time"),
    "negative time": (put("time", value=-1.0), r"\$\.time"),
    "an unknown kind": (put("steps", "kind", 2, value="jump"), r"\$\.steps\.kind\[\.*\d*\.*\]: .*jump"),
    "an unknown form": (put("steps", "form", 1, value=0), r"\$\.steps\.form"),
    "an op below -1": (put("steps", "op", 0, value=-2), r"\$\.steps\.op"),
    "an op beyond the last": (put("steps", "op", 0, value=10**6), r"\$\.steps\.op\[0\]: .*1000000"),
    "a storage beyond": (put("steps", "storages", 3, value=[10**6]), r"\$\.steps\.storages\[3\]"),
    "a storage below": (put("steps", "storages", 3, value=[-1]), r"\$\.steps\.storages"),
    "a wait beyond": (put("steps", "waits", value=[[10**6]] * len(PLAN.steps)), r"\$\.steps\.waits\[0\]"),
    "a short column": (put("steps", "op", value=[1]), r"\$\.steps\.op: .*columns are as long as 'kind'"),
    "a long column": (put("residences", "size", value=[1] * 10**5), r"\$\.residences\.size: .*as long"),
    "rows for columns": (put("steps", value=[{"kind": "free"}]), r"\$\.steps: expected `object`"),
    "a residence beyond": (put("residences", "storage", 0, value=10**6), r"\$\.residences\.storage\[0\]"),
    "meta that is no object": (put("meta", value=[1]), r"\$\.meta"),
    "meta beyond 64 bits": (put("meta", value={"a": [2**63]}), r"\$\.meta\.a\[0\]: integer beyond 64 bits"),
    "meta too deep": (put("meta", value=json.loads("[" * 40 + "]" * 40)), r"\$\.meta"),
    "an op's input beyond": (put("graph", "ops", 0, "inputs", value=[999]), r"\$\.graph: op 'op0'"),
    "a value of no storage": (put("graph", "values", 0, "storage", value=999), r"\$\.graph: value"),
    "a negative size": (put("graph", "storages", 0, "size", value=-64), r"\$\.graph\.storages"),
    "a request for nothing": (
        put("graph", "ops", 0, "requests", value=[{"size": 64, "storage": 9, "start": 0, "end": 1}]),
        r"\$\.graph\.ops\[0\]\.requests",
    ),
    "an unknown key of an op": (put("graph", "ops", 0, "__class__", value="x"), r"\$\.graph\.ops"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_PLANS)
def test_wrong_plans_are_refused_by_file_and_place(what: str) -> None:
    edit, message = WRONG_PLANS[what]
    data = edited(dumps_plan(PLAN, GRAPH), edit)
    with pytest.raises(BadInput, match=rf"(?s)^bad\.json: {message}") as caught:
        loads_plan(data, "bad.json")
    assert caught.value.place.startswith("bad.json: $")


@pytest.mark.parametrize(
    "data", [b"", b" ", b"null", b"[]", b"1", b'"x"', b"{}", b"\xff\xfe", b"{'a': 1}", b"\x80\x04K\x01."]
)
def test_other_documents_are_refused(data: bytes) -> None:
    for loads in (loads_plan, loads_graph, loads_any):
        with pytest.raises(BadInput, match=r"bad\.json"):
            loads(data, "bad.json")


def test_a_graph_is_no_plan_and_a_plan_no_graph() -> None:
    with pytest.raises(BadInput, match="format is 'tightship-graph', not 'tightship-plan'"):
        loads_plan(dumps_graph(GRAPH))
    with pytest.raises(BadInput, match="format is 'tightship-plan', not 'tightship-graph'"):
        loads_graph(dumps_plan(PLAN))


@pytest.mark.parametrize("open_, close", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_nesting_is_refused(open_: bytes, close: bytes, depth: int) -> None:
    nested = open_ * depth + b"1" + close * depth
    for data in (nested, dumps_plan(PLAN)[:-1] + b',"meta":{"x":' + nested + b"}}"):
        with pytest.raises(BadInput):
            loads_plan(data)


def nested_calls(depth: int) -> bytes:
    outer = '"storages": [], "values": [], "ops": [{"name": "o", "target": "t", "calls": [{'
    inner = outer * depth + '"storages": [], "values": [], "ops": []' + "}]}]" * depth
    return f'{{"format": "tightship-graph", "version": 1, {inner}}}'.encode()


def test_calls_have_a_depth_bound() -> None:
    assert loads_graph(nested_calls(32)).ops
    with pytest.raises(BadInput, match="more than 32 deep"):
        loads_graph(nested_calls(33), "g.json")
    for depth in (300, 100_000):
        with pytest.raises(BadInput):
            loads_graph(nested_calls(depth))
    graph = loads_graph(nested_calls(32))
    with pytest.raises(BadInput, match="at most 32 deep"):
        dumps_graph(Graph((Op("o", "t", calls=(graph,)),), (), ()))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_nothing_else_is_raised(data: bytes) -> None:
    with pytest.raises(BadInput):
        loads_any(data)


@given(st.integers(0, 10**9), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_never_a_crash(position: int, byte: int) -> None:
    data = bytearray(SMALL)
    data[position % len(data)] = byte
    try:
        plan, graph = loads_plan(bytes(data))
    except BadInput:
        return
    assert graph is not None
    verify(graph, plan)


_small_graph = random_graph(1, 6)
SMALL = dumps_plan(random_plan(_small_graph, 1, rate=0.5), _small_graph)


@pytest.mark.parametrize("column", ["storage", "start", "end", "size"])
def test_a_column_without_a_default_is_as_long_as_the_others(column: str) -> None:
    graph = random_graph(1, 6)
    doc = json.loads(dumps_plan(random_plan(graph, 1)))
    doc["residences"][column] = []
    with pytest.raises(BadInput, match=f"columns are as long as|{column}"):
        loads_plan(json.dumps(doc).encode())


@pytest.mark.slow
def test_a_hundred_thousand_steps_take_seconds(tmp_path: Path) -> None:
    graph = random_graph(1, 60_000, calls=0.0)
    plan = Plan(graph.digest, random_steps(graph, 1, rate=0.0))
    began = time.perf_counter()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == (plan, None)
    assert time.perf_counter() - began < 10
    assert (tmp_path / "plan.json").stat().st_size < 100 * len(plan.steps)
