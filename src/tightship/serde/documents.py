"""Plans and graphs to documents (`rows`) and back, with what the rows cannot say checked; knows nothing of files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, Final

import msgspec

from tightship.errors import BadInput
from tightship.graph import Graph, Op, Request, Storage, Value
from tightship.machine import CODECS, Machine
from tightship.plan import Inner, Plan, Residence, Step
from tightship.serde.rows import (
    Body,
    GraphDocument,
    InnerRow,
    MachineRow,
    OpRow,
    PlanDocument,
    RequestRow,
    ResidenceColumns,
    StepColumns,
    StorageRow,
    ValueRow,
)

__all__ = [
    "DEEPEST",
    "GRAPH_FORMAT",
    "PLAN_FORMAT",
    "VERSION",
    "GraphDocument",
    "PlanDocument",
    "from_graph",
    "from_plan",
    "to_graph",
    "to_plan",
]

PLAN_FORMAT: Final = "tightship-plan"
GRAPH_FORMAT: Final = "tightship-graph"
VERSION: Final = 1

DEEPEST = 32
"""Graphs called inside one another, and lists and objects inside one another in ``meta``, at most."""


def _names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


_STEP, _RESIDENCE, _PLAN, _MACHINE = _names(Step), _names(Residence), _names(Plan), _names(Machine)
_ROWS = ("steps", "residences", "inner")
_storage: Callable[[Any], tuple[Any, ...]] = attrgetter(*_names(Storage))
_value: Callable[[Any], tuple[Any, ...]] = attrgetter(*_names(Value))
_request: Callable[[Any], tuple[Any, ...]] = attrgetter(*_names(Request))
_machine: Callable[[Any], tuple[Any, ...]] = attrgetter(*_names(Machine))


# Plans


def from_plan(plan: Plan, graph: Graph | None, depth: int = 0) -> PlanDocument:
    if depth > DEEPEST:
        raise BadInput(f"plans lie at most {DEEPEST} deep in one another", place="$.inner")
    plain = {name: getattr(plan, name) for name in _PLAN if name not in _ROWS}
    _plain(plan.meta, "$.meta")
    return PlanDocument(
        format=PLAN_FORMAT,
        version=VERSION,
        steps=StepColumns(**_columns(plan.steps, _STEP, StepColumns)),
        residences=ResidenceColumns(**_columns(plan.residences, _RESIDENCE, ResidenceColumns))
        if plan.residences
        else None,
        inner=tuple(InnerRow(row.op, from_plan(row.plan, row.graph, depth + 1)) for row in plan.inner),
        graph=from_graph(graph) if graph is not None else None,
        **plain,
    )


def to_plan(doc: PlanDocument, place: str = "$", depth: int = 0) -> tuple[Plan, Graph | None]:
    if depth > DEEPEST:
        raise BadInput(f"plans lie at most {DEEPEST} deep in one another", place=place)
    plain = {name: getattr(doc, name) for name in _PLAN if name not in _ROWS}
    _plain(doc.meta, f"{place}.meta")
    graph = to_graph(doc.graph, f"{place}.graph") if doc.graph is not None else None
    steps = tuple(Step(*row) for row in _rows(doc.steps, _STEP, Step, f"{place}.steps"))
    residences: tuple[Residence, ...] = ()
    if doc.residences is not None:
        rows = _rows(doc.residences, _RESIDENCE, Residence, f"{place}.residences")
        residences = tuple(Residence(*row) for row in rows)
    inner = tuple(_inner(row, f"{place}.inner[{i}]", depth) for i, row in enumerate(doc.inner))
    plan = Plan(steps=steps, residences=residences, inner=inner, **plain)
    if graph is not None:
        _within(plan, graph, place)
    return plan, graph


def _inner(row: InnerRow, place: str, depth: int) -> Inner:
    plan, graph = to_plan(row.plan, f"{place}.plan", depth + 1)
    if graph is None:
        raise BadInput("a plan inside another has its graph with it", place=f"{place}.plan")
    return Inner(row.op, graph, plan)


def _columns(rows: Sequence[Any], names: Sequence[str], document: type) -> dict[str, Any]:
    """Fields of ``rows`` by name; those that all have the document's default are left out."""
    always = {f.name for f in msgspec.structs.fields(document) if f.required}
    out: dict[str, Any] = {}
    defaults = _defaults(type(rows[0])) if rows else {}
    for name in names:
        column = tuple(map(attrgetter(name), rows))
        if name in always or any(x != defaults[name] for x in column):
            out[name] = column
    return out


def _defaults(cls: type) -> dict[str, Any]:
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}


def _rows(doc: Any, names: Sequence[str], cls: type, place: str) -> Any:
    count, defaults = len(getattr(doc, names[0])), _defaults(cls)
    columns = []
    for name in names:
        column = getattr(doc, name)
        if not column and name in defaults:  # left out; a column without a default is as long as the others
            column = (defaults[name],) * count
        if len(column) != count:
            raise BadInput(f"columns are as long as {names[0]!r}, {count}", len(column), f"{place}.{name}")
        columns.append(column)
    return zip(*columns, strict=True)


def _within(plan: Plan, graph: Graph, place: str) -> None:
    """Indices of the plan exist in the graph that comes with it."""
    ops, storages = len(graph.ops), len(graph.storages)
    for i, step in enumerate(plan.steps):
        if step.op >= ops:
            raise BadInput(f"an op is an index of the graph's {ops} ops", step.op, f"{place}.steps.op[{i}]")
        for s in step.storages:
            if s >= storages:
                rule = f"a storage is an index of the graph's {storages} storages"
                raise BadInput(rule, s, f"{place}.steps.storages[{i}]")
        for pair in step.reuses:
            if max(pair) >= storages:
                rule = f"a storage is an index of the graph's {storages} storages"
                raise BadInput(rule, pair, f"{place}.steps.reuses[{i}]")
        for w in step.waits:
            if w >= len(plan.steps):
                rule = f"a wait is an index of the plan's {len(plan.steps)} steps"
                raise BadInput(rule, w, f"{place}.steps.waits[{i}]")
    for i, r in enumerate(plan.residences):
        if r.storage >= storages:
            rule = f"a storage is an index of the graph's {storages} storages"
            raise BadInput(rule, r.storage, f"{place}.residences.storage[{i}]")


# Graphs


def from_graph(graph: Graph) -> GraphDocument:
    return GraphDocument(format=GRAPH_FORMAT, version=VERSION, **_body(graph, "$", 0))


def _body(graph: Graph, place: str, depth: int) -> dict[str, Any]:
    if depth > DEEPEST:
        raise BadInput(f"graphs call one another at most {DEEPEST} deep", place=place)
    _plain(graph.meta, f"{place}.meta")
    ops = []
    for k, op in enumerate(graph.ops):
        plain = {name: getattr(op, name) for name in _PLAIN_OP}
        requests = tuple(
            RequestRow(**dict(zip(_names(Request), _request(r), strict=True))) for r in op.requests
        )
        calls = tuple(Body(**_body(g, f"{place}.ops[{k}].calls", depth + 1)) for g in op.calls)
        ops.append(OpRow(requests=requests, calls=calls, **plain))
    return {
        "name": graph.name,
        "storages": tuple(
            StorageRow(name=s.name, size=s.size, kind=s.kind, pool=s.pool) for s in graph.storages
        ),
        "values": tuple(
            ValueRow(
                name=v.name, storage=v.storage, dtype=v.dtype, shape=v.shape, stride=v.stride, offset=v.offset
            )
            for v in graph.values
        ),
        "ops": tuple(ops),
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "meta": graph.meta,
        "machine": MachineRow(**dict(zip(_MACHINE, _machine(graph.machine), strict=True))),
    }


_PLAIN_OP = tuple(name for name in _names(Op) if name not in ("requests", "calls"))


def to_graph(doc: Body, place: str = "$", depth: int = 0) -> Graph:
    if depth > DEEPEST:
        raise BadInput(f"graphs call one another at most {DEEPEST} deep", place=place)
    _plain(doc.meta, f"{place}.meta")
    ops = []
    for k, row in enumerate(doc.ops):
        requests = tuple(Request(*_request(r)) for r in row.requests)
        calls = tuple(to_graph(g, f"{place}.ops[{k}].calls[{j}]", depth + 1) for j, g in enumerate(row.calls))
        ops.append(Op(requests=requests, calls=calls, **{name: getattr(row, name) for name in _PLAIN_OP}))
    try:
        graph = Graph(
            tuple(ops),
            tuple(Value(*_value(v)) for v in doc.values),
            tuple(Storage(*_storage(s)) for s in doc.storages),
            doc.inputs,
            doc.outputs,
            doc.name,
            doc.meta,
            _machine_of(doc.machine, f"{place}.machine"),
        )
        made = graph.uses.defines
    except BadInput as error:
        raise BadInput(error.rule, error.value, f"{place}: {error.place}") from error
    for k, op in enumerate(ops):
        for r in op.requests:
            if r.storage >= len(made[k]):
                rule = f"a request becomes -1 or an index of the {len(made[k])} storages its op defines"
                raise BadInput(rule, r.storage, f"{place}.ops[{k}].requests")
    return graph


def _machine_of(row: MachineRow, place: str) -> Machine:
    if not len(row.pack) == len(row.unpack) == len(CODECS):
        raise BadInput(f"a machine has a rate for each of {len(CODECS)} codecs", len(row.pack), place)
    return Machine(*_machine(row))


# Meta


def _plain(value: Any, place: str, depth: int = 0) -> None:
    """``meta`` is what JSON can say and no more: anything else would come back as something else."""
    if depth > DEEPEST:
        raise BadInput(f"lists and objects lie at most {DEEPEST} deep", place=place)
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise BadInput("keys are strings", key, place)
            _plain(inner, f"{place}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _plain(inner, f"{place}[{i}]", depth + 1)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise BadInput("a number is within 64 bits", value, place)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput("a number is finite", value, place)
    elif not (value is None or isinstance(value, str)):
        raise BadInput("meta holds only what JSON can say", type(value).__name__, place)
