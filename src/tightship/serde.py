"""Plans and graphs as JSON files with a schema and a version.

A plan's file may carry the graph it was made for; it can then be verified, explained and run alone. Reading
executes nothing, and whatever is wrong with a file is a ``BadInput`` that names the file and the place in it.

Plans and graphs as documents and back: what a document holds is read off the dataclasses' fields and their types.

Ops, values and storages are objects, with fields at their default left out. Steps and residences, of which a plan has
many, are columns: one list per field, left out when every entry is the default. ``_BOUNDS`` has what a type does not
say of its numbers.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from tightship import machine
from tightship.errors import BadInput
from tightship.files import PathLike, from_json, read_bytes, to_json, write_file
from tightship.graph import DEEPEST, Graph, Op, Request, Storage, Value
from tightship.machine import MODELED, Machine
from tightship.plan import FORMS, KINDS, Inner, Plan, Residence, Step

__all__ = [
    "DEEPEST",
    "GRAPH_FORMAT",
    "LARGEST_FILE",
    "PLAN_FORMAT",
    "VERSION",
    "GraphDocument",
    "PlanDocument",
    "dumps_graph",
    "dumps_plan",
    "from_graph",
    "from_plan",
    "json_schema",
    "load_any",
    "load_graph",
    "load_plan",
    "loads_any",
    "loads_graph",
    "loads_plan",
    "save_graph",
    "save_plan",
    "to_graph",
    "to_plan",
]


PLAN_FORMAT: Final = "tightship-plan"
GRAPH_FORMAT: Final = "tightship-graph"
VERSION: Final = 1


# Types


class Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, frozen=True):
    """What a file holds: exactly the keys that there are."""


def _integer(least: int, description: str | None = None) -> Any:
    return Annotated[int, msgspec.Meta(ge=least, le=2**63 - 1, description=description)]


_INT, _INDEX, _OPTIONAL = _integer(-(2**63)), _integer(0), _integer(-1, "-1: none")
_BYTES = _integer(0, "bytes")
_SECONDS = Annotated[float, msgspec.Meta(ge=0, description="seconds")]
_RATE = Annotated[float, msgspec.Meta(gt=0, description="bytes per second")]
_choice: Any = Literal

_BOUNDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("Value.shape", "Value.stride", "Value.offset", "Residence.offset"), _INT),
    **dict.fromkeys(("Request.storage", "Request.end", "Step.op", "Residence.storage"), _OPTIONAL),
    **dict.fromkeys(("Residence.request", "Residence.first", "Residence.last"), _OPTIONAL),
    **dict.fromkeys(("Storage.size", "Request.size", "Residence.size", "Step.nbytes"), _BYTES),
    **dict.fromkeys(("Op.flops", "Op.workspace", "Op.state"), _BYTES),
    **dict.fromkeys(("Plan.budget", "Plan.peak", "Plan.peak_before", "Plan.static", "Plan.arena"), _BYTES),
    **dict.fromkeys(("Plan.handed", "Plan.lower_bound", "Plan.host", "Plan.host_budget"), _BYTES),
    **dict.fromkeys(("Machine.offload", "Machine.fetch", "Machine.pack", "Machine.unpack"), _RATE),
    "Step.kind": _choice[KINDS],
    "Step.form": _choice[FORMS],
    "Residence.form": _choice[FORMS],
}
"""Of numbers, where they are not an index or seconds, and of texts of which there are only some."""


def _many(kind: Any) -> Any:
    return tuple.__class_getitem__((kind, ...))


def _bounded(hint: Any, bound: Any) -> Any:
    """A field's type with bounds for its numbers."""
    if hint in (int, float, str):
        return bound or {int: _INDEX, float: _SECONDS, str: str}[hint]
    if get_origin(hint) is tuple:
        return tuple[tuple(x if x is ... else _bounded(x, bound) for x in get_args(hint))]  # type: ignore[misc]
    if get_origin(hint) is types.UnionType:
        return _bounded(get_args(hint)[0], bound) | None
    return hint


def _document(
    name: str, cls: type, others: Mapping[str, Any], *, columns: bool = False, doc: str = ""
) -> Any:
    """The document of a dataclass. ``others``: types, or pairs of type and default, that it cannot say itself;
    ``columns``: every field is a list, with an entry for each of many."""
    hints, rows = get_type_hints(cls), []
    for f in fields(cls):
        kind, default = _bounded(hints[f.name], _BOUNDS.get(f"{cls.__name__}.{f.name}")), f.default
        if f.default_factory is not MISSING:
            default = msgspec.field(default_factory=f.default_factory)
        if columns:
            kind, default = _many(kind), () if default is not MISSING else default
        if f.name not in others:
            rows.append((f.name, kind) if default is MISSING else (f.name, kind, default))
    rows += [(key, *kind) if isinstance(kind, tuple) else (key, kind) for key, kind in others.items()]
    namespace = {"__doc__": doc or None}
    return msgspec.defstruct(
        name, rows, bases=(Document,), kw_only=True, namespace=namespace, module=__name__
    )


def _header(name: str) -> dict[str, Any]:
    return {"format": _choice[name], "version": _choice[VERSION]}


_rates = tuple[_RATE, ...] | dict[str, _RATE]
StorageRow = _document("StorageRow", Storage, {})
ValueRow = _document("ValueRow", Value, {})
RequestRow = _document("RequestRow", Request, {})
OpRow = _document("OpRow", Op, {"requests": (_many(RequestRow), ()), "calls": ("tuple[Body, ...]", ())})
MachineRow = _document(
    "MachineRow", Machine, {"pack": (_rates, MODELED.pack), "unpack": (_rates, MODELED.unpack)}
)
_rows_of_graphs = {
    "storages": _many(StorageRow),
    "values": _many(ValueRow),
    "ops": _many(OpRow),
    "machine": (MachineRow, MachineRow()),
}
Body = _document("Body", Graph, _rows_of_graphs)
GraphDocument = _document(
    "GraphDocument",
    Graph,
    _header(GRAPH_FORMAT) | _rows_of_graphs,
    doc="A graph: ops in a legal order over values over storages.",
)
StepColumns = _document("StepColumns", Step, {}, columns=True)
ResidenceColumns = _document("ResidenceColumns", Residence, {}, columns=True)
InnerRow = msgspec.defstruct(
    "InnerRow", [("op", _INDEX), ("plan", "PlanDocument")], bases=(Document,), kw_only=True, module=__name__
)
PlanDocument = _document(
    "PlanDocument",
    Plan,
    _header(PLAN_FORMAT)
    | {
        "inner": (_many(InnerRow), ()),
        "steps": StepColumns,
        "residences": (ResidenceColumns | None, None),
        "graph": (GraphDocument | None, None),
    },
    doc="A plan: steps and residences as columns, what it costs, and perhaps the graph it was made for.",
)


def _same(cls: Any, value: Any, **others: Any) -> Any:
    """A document of a dataclass's value, or the other way round: the fields are the same but for ``others``."""
    names = getattr(cls, "__struct_fields__", None) or [f.name for f in fields(cls)]
    return cls(**{name: getattr(value, name) for name in names if name not in others}, **others)


# Plans


def _check_depth(what: str, depth: int, place: str) -> None:
    if depth > DEEPEST:
        raise BadInput(f"{what} nested more than {DEEPEST} deep", place=place)


def from_plan(plan: Plan, graph: Graph | None, depth: int = 0) -> Any:
    _check_depth("plans", depth, "$.inner")
    _check_meta(plan.meta, "$.meta")
    inner = (InnerRow(op=row.op, plan=from_plan(row.plan, row.graph, depth + 1)) for row in plan.inner)
    return _same(
        PlanDocument,
        plan,
        format=PLAN_FORMAT,
        version=VERSION,
        steps=_columns(plan.steps, Step, StepColumns),
        residences=_columns(plan.residences, Residence, ResidenceColumns) if plan.residences else None,
        inner=tuple(inner),
        graph=from_graph(graph) if graph is not None else None,
    )


def to_plan(doc: Any, place: str = "$", depth: int = 0) -> tuple[Plan, Graph | None]:
    _check_depth("plans", depth, place)
    _check_meta(doc.meta, f"{place}.meta")
    graph = to_graph(doc.graph, f"{place}.graph") if doc.graph is not None else None
    steps = _rows(doc.steps, Step, f"{place}.steps")
    residences = _rows(doc.residences, Residence, f"{place}.residences") if doc.residences is not None else ()
    inner = tuple(_inner(row, f"{place}.inner[{i}]", depth) for i, row in enumerate(doc.inner))
    plan: Plan = _same(Plan, doc, steps=steps, residences=residences, inner=inner)
    if graph is not None:
        _check_indices(plan, graph, place)
    return plan, graph


def _inner(row: Any, place: str, depth: int) -> Inner:
    plan, graph = to_plan(row.plan, f"{place}.plan", depth + 1)
    if graph is None:
        raise BadInput("missing `graph`: a plan inside another has its graph with it", place=f"{place}.plan")
    return Inner(row.op, graph, plan)


def _columns(rows: Sequence[Any], cls: type, document: Any) -> Any:
    """Fields of ``rows`` by name; those that all have their default are left out."""
    out = {}
    for f in fields(cls):
        column = tuple(map(attrgetter(f.name), rows))
        if f.default is MISSING or any(x != f.default for x in column):
            out[f.name] = column
    return document(**out)


def _rows(doc: Any, cls: type, place: str) -> tuple[Any, ...]:
    first, *_ = names = [f.name for f in fields(cls)]
    count, columns = len(getattr(doc, first)), []
    for f in fields(cls):
        column = getattr(doc, f.name)
        if not column and f.default is not MISSING:  # left out; any other column is as long as the first
            column = (f.default,) * count
        if len(column) != count:
            rule = f"column of {len(column)} entries; columns are as long as {names[0]!r}, {count}"
            raise BadInput(rule, place=f"{place}.{f.name}")
        columns.append(column)
    return tuple(cls(*row) for row in zip(*columns, strict=True))


def _check_indices(plan: Plan, graph: Graph, place: str) -> None:
    """Indices of the plan exist in the graph that comes with it."""
    ops, storages, steps = len(graph.ops), len(graph.storages), len(plan.steps)
    columns: tuple[tuple[str, Iterable[Iterable[int]], int, str], ...] = (
        ("steps.op", ((s.op,) for s in plan.steps), ops, "the graph has {} ops"),
        ("steps.storages", (s.storages for s in plan.steps), storages, "the graph has {} storages"),
        ("steps.reuses", (chain(*s.reuses) for s in plan.steps), storages, "the graph has {} storages"),
        ("steps.waits", (s.waits for s in plan.steps), steps, "the plan has {} steps"),
        (
            "residences.storage",
            ((r.storage,) for r in plan.residences),
            storages,
            "the graph has {} storages",
        ),
    )
    for name, rows, count, known in columns:
        for i, row in enumerate(rows):
            if (worst := max(row, default=-1)) >= count:
                rule = f"index {worst} is out of range: {known.format(count)}"
                raise BadInput(rule, place=f"{place}.{name}[{i}]")


# Graphs


def from_graph(graph: Graph) -> Any:
    return _body(GraphDocument, graph, "$", 0, format=GRAPH_FORMAT, version=VERSION)


def _body(document: Any, graph: Graph, place: str, depth: int, **header: Any) -> Any:
    _check_depth("graphs", depth, place)
    _check_meta(graph.meta, f"{place}.meta")
    ops = []
    for k, op in enumerate(graph.ops):
        requests = tuple(_same(RequestRow, r) for r in op.requests)
        calls = tuple(_body(Body, g, f"{place}.ops[{k}].calls", depth + 1) for g in op.calls)
        ops.append(_same(OpRow, op, requests=requests, calls=calls))
    return _same(
        document,
        graph,
        storages=tuple(_same(StorageRow, s) for s in graph.storages),
        values=tuple(_same(ValueRow, v) for v in graph.values),
        ops=tuple(ops),
        machine=_from_machine(graph.machine),
        **header,
    )


def to_graph(doc: Any, place: str = "$", depth: int = 0) -> Graph:
    _check_depth("graphs", depth, place)
    _check_meta(doc.meta, f"{place}.meta")
    ops = []
    for k, row in enumerate(doc.ops):
        requests = tuple(_same(Request, r) for r in row.requests)
        calls = tuple(to_graph(g, f"{place}.ops[{k}].calls[{j}]", depth + 1) for j, g in enumerate(row.calls))
        ops.append(_same(Op, row, requests=requests, calls=calls))
    try:
        graph: Graph = _same(
            Graph,
            doc,
            storages=tuple(_same(Storage, s) for s in doc.storages),
            values=tuple(_same(Value, v) for v in doc.values),
            ops=tuple(ops),
            machine=_to_machine(doc.machine, f"{place}.machine"),
        )
        defines = graph.uses.defines
    except BadInput as error:
        if error.place.startswith(place):
            raise
        raise BadInput(error.rule, error.value, f"{place}: {error.place}") from error
    for k, op in enumerate(ops):
        for r in op.requests:
            if r.storage >= len(defines[k]):
                rule = f"index {r.storage} is out of range: the op defines {len(defines[k])} storages"
                raise BadInput(rule, place=f"{place}.ops[{k}].requests")
    return graph


# Machines


POSITIONS: Final = ("bits", "mask", "uint8", "int8", "uint16", "int16", "uint32", "int32", "bf16")
"""The codecs whose rates earlier files list by position. Never changed: today's files have the names."""


def _from_machine(known: Machine) -> Any:
    rows = {}
    for name in ("pack", "unpack"):
        rates = getattr(known, name)
        modeled = rates == getattr(MODELED, name)
        rows[name] = rates if modeled else dict(zip(machine.CODECS, rates, strict=True))
    return _same(MachineRow, known, **rows)


def _to_machine(row: Any, place: str) -> Machine:
    rates = {name: _in_order(getattr(row, name), f"{place}.{name}") for name in ("pack", "unpack")}
    known: Machine = _same(Machine, row, **rates)
    return known


def _in_order(rates: Any, place: str) -> tuple[float, ...]:
    """The rate of every codec there is: of one that the file does not know, the slowest that it does know."""
    if rates is MODELED.pack or rates is MODELED.unpack:
        return tuple(rates)
    if not isinstance(rates, dict):
        if len(rates) != len(POSITIONS):
            rule = f"{len(rates)} rates without names; there are {len(POSITIONS)} codecs: give them by name"
            raise BadInput(rule, place=place)
        rates = dict(zip(POSITIONS, rates, strict=True))
    slowest = min(rates.values(), default=min(MODELED.pack))
    return tuple(rates.get(codec, slowest) for codec in machine.CODECS)


# Meta


def _check_meta(value: Any, place: str, depth: int = 0) -> None:
    """``meta`` is what JSON can say and no more: anything else would come back as something else."""
    _check_depth("lists and objects", depth, place)
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise BadInput("key is not a string", key, place)
            _check_meta(inner, f"{place}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_meta(inner, f"{place}[{i}]", depth + 1)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise BadInput("integer beyond 64 bits", value, place)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput("number is not finite", value, place)
    elif not (value is None or isinstance(value, str)):
        raise BadInput(
            f"cannot write a {type(value).__name__}: meta holds only what JSON can say", place=place
        )


LARGEST_FILE = 1 << 30
"""Bytes a file may have to be read."""

_T = TypeVar("_T")


def dumps_plan(plan: Plan, graph: Graph | None = None) -> bytes:
    """JSON of a plan, with its graph if given. Raises ``BadInput`` for what could not be read back."""
    if graph is not None and graph.digest != plan.digest:
        raise BadInput(f"cannot save graph {graph.name!r} with a plan made for another", place="graph")
    return _encode(from_plan(plan, graph), PlanDocument, "plan")


def dumps_graph(graph: Graph) -> bytes:
    return _encode(from_graph(graph), GraphDocument, "graph")


def loads_plan(data: bytes, place: str = "plan") -> tuple[Plan, Graph | None]:
    """The plan and, if the document has it, its graph; ``place`` is what messages call the document."""
    return _read(data, PlanDocument, PLAN_FORMAT, place, to_plan)


def loads_graph(data: bytes, place: str = "graph") -> Graph:
    return _read(data, GraphDocument, GRAPH_FORMAT, place, to_graph)


def loads_any(data: bytes, place: str = "document") -> tuple[Plan | None, Graph | None]:
    """Either kind of document: a plan with or without a graph, or a graph alone."""
    if _decode(data, _Header, "", place).format == GRAPH_FORMAT:
        return None, loads_graph(data, place)
    return loads_plan(data, place)


def save_plan(plan: Plan, path: PathLike, graph: Graph | None = None) -> None:
    write_file(path, dumps_plan(plan, graph))


def save_graph(graph: Graph, path: PathLike) -> None:
    write_file(path, dumps_graph(graph))


def load_plan(path: PathLike, limit: int = LARGEST_FILE) -> tuple[Plan, Graph | None]:
    """Read a plan's file of at most ``limit`` bytes."""
    return loads_plan(read_bytes(path, limit), os.fspath(path))


def load_graph(path: PathLike, limit: int = LARGEST_FILE) -> Graph:
    return loads_graph(read_bytes(path, limit), os.fspath(path))


def load_any(path: PathLike, limit: int = LARGEST_FILE) -> tuple[Plan | None, Graph | None]:
    return loads_any(read_bytes(path, limit), os.fspath(path))


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of both documents, by format name."""
    return {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(cls)}
        for name, cls in ((PLAN_FORMAT, PlanDocument), (GRAPH_FORMAT, GraphDocument))
    }


# Documents


class _Header(msgspec.Struct):
    format: str = ""
    version: int = 0


def _encode(doc: Any, cls: Any, place: str) -> bytes:
    try:
        data = to_json(doc)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"cannot be written as JSON: {error}", place=place) from error
    _decode(data, cls, "", place)  # never write what cannot be read: an index of 2**63, a time of nan
    return data


def _decode(data: bytes, cls: Any, format_: str, place: str) -> Any:
    try:
        return from_json(data, cls)
    except RecursionError as error:
        raise BadInput("lists or objects nested too deep", place=place) from error
    except msgspec.ValidationError as error:
        if format_:
            _check_header(_decode(data, _Header, "", place), format_, place)
        raise _located(error, place) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"invalid JSON: {error}", place=place) from error


def _check_header(header: _Header, format_: str, place: str) -> None:
    if header.format != format_:
        raise BadInput(f"format is {header.format!r}, not {format_!r}", place=f"{place}: $.format")
    if header.version != VERSION:
        rule = (
            f"version {header.version} of {format_} cannot be read: this tightship reads version {VERSION}; "
        )
        rule += "write the file again with this version, or read it with the one that wrote it"
        raise BadInput(rule, place=f"{place}: $.version")


def _located(error: msgspec.ValidationError, place: str) -> BadInput:
    """msgspec ends its messages with the path in the document."""
    rule, at, path = str(error).rpartition(" - at `")
    rule, path = (rule, path.rstrip("`")) if at else (path, "$")
    return BadInput(rule[:1].lower() + rule[1:], place=f"{place}: {path}")


def _read(data: bytes, cls: Any, format_: str, place: str, build: Callable[[Any], _T]) -> _T:
    doc = _decode(data, cls, format_, place)
    try:
        return build(doc)
    except BadInput as error:
        raise BadInput(error.rule, error.value, f"{place}: {error.place}") from error
