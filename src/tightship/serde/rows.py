"""What graphs and plans look like as JSON: the rows and columns of their documents, with the bounds of every number.

Ops, values and storages are objects, with fields at their default left out. Steps and residences, of which a
plan has many, are columns: one list per field, left out when every entry is the default.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from tightship.machine import MODELLED

__all__ = [
    "Body",
    "Document",
    "GraphDocument",
    "InnerRow",
    "MachineRow",
    "OpRow",
    "PlanDocument",
    "RequestRow",
    "ResidenceColumns",
    "StepColumns",
    "StorageRow",
    "ValueRow",
]

_LARGEST: Final = 2**63 - 1

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=_LARGEST)]
Index = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
OptionalIndex = Annotated[int, msgspec.Meta(ge=-1, le=_LARGEST, description="-1: none")]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST, description="bytes")]
Seconds = Annotated[float, msgspec.Meta(ge=0, description="seconds")]
Rate = Annotated[float, msgspec.Meta(gt=0, description="bytes per second")]
Kind = Literal["compute", "recompute", "offload", "fetch", "compress", "decompress", "free"]
Form = Literal["full", "packed", "host", "state"]


class Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    pass


class StorageRow(Document):
    name: str
    size: Bytes
    kind: str = "activation"
    pool: str = "device"


class ValueRow(Document):
    name: str
    storage: Index
    dtype: str = ""
    shape: tuple[Int, ...] = ()
    stride: tuple[Int, ...] = ()
    offset: Int = 0


class RequestRow(Document):
    size: Bytes
    storage: OptionalIndex
    start: Index
    end: OptionalIndex


class OpRow(Document):
    name: str
    target: str
    inputs: tuple[Index, ...] = ()
    outputs: tuple[Index, ...] = ()
    mutates: tuple[Index, ...] = ()
    updates: tuple[Index, ...] = ()
    random: bool = False
    effect: bool = False
    control: tuple[Index, ...] = ()
    time: Seconds = 0.0
    flops: Bytes = 0
    workspace: Bytes = 0
    requests: tuple[RequestRow, ...] = ()
    phase: str = "forward"
    device: str = "cpu"
    module: str = ""
    source: str = ""
    calls: tuple[Body, ...] = ()
    state: Bytes = 0
    overwrites: tuple[tuple[Index, Index], ...] = ()


class MachineRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    offload: Rate = MODELLED.offload
    fetch: Rate = MODELLED.fetch
    latency: Seconds = MODELLED.latency
    pack: tuple[Rate, ...] = MODELLED.pack
    unpack: tuple[Rate, ...] = MODELLED.unpack
    state: Seconds = MODELLED.state
    measured: bool = False
    begin: Seconds = 0.0
    beside: Seconds = 0.0


class Body(Document, kw_only=True):
    name: str = "graph"
    storages: tuple[StorageRow, ...]
    values: tuple[ValueRow, ...]
    ops: tuple[OpRow, ...]
    inputs: tuple[Index, ...] = ()
    outputs: tuple[Index, ...] = ()
    meta: dict[str, Any] = {}
    machine: MachineRow = MachineRow()


class GraphDocument(Body, kw_only=True):
    """A graph: ops in a legal order over values over storages."""

    format: Literal["tightship-graph"]
    version: Literal[1]


class StepColumns(Document):
    kind: tuple[Kind, ...]
    op: tuple[OptionalIndex, ...] = ()
    storages: tuple[tuple[Index, ...], ...] = ()
    form: tuple[Form, ...] = ()
    nbytes: tuple[Bytes, ...] = ()
    stream: tuple[Index, ...] = ()
    waits: tuple[tuple[Index, ...], ...] = ()
    codec: tuple[str, ...] = ()
    saves: tuple[bool, ...] = ()
    reuses: tuple[tuple[tuple[Index, Index], ...], ...] = ()


class ResidenceColumns(Document):
    storage: tuple[OptionalIndex, ...]
    start: tuple[Index, ...]
    end: tuple[Index, ...]
    size: tuple[Bytes, ...]
    offset: tuple[Int, ...] = ()
    pool: tuple[str, ...] = ()
    form: tuple[Form, ...] = ()
    request: tuple[OptionalIndex, ...] = ()
    first: tuple[OptionalIndex, ...] = ()
    last: tuple[OptionalIndex, ...] = ()


class InnerRow(Document):
    op: Index
    plan: PlanDocument


class PlanDocument(Document, kw_only=True):
    """A plan: steps and residences as columns, what it costs, and perhaps the graph it was made for."""

    format: Literal["tightship-plan"]
    version: Literal[1]
    digest: str
    budget: Bytes | None = None
    peak: Bytes = 0
    peak_before: Bytes = 0
    static: Bytes = 0
    arena: Bytes = 0
    handed: Bytes = 0
    lower_bound: Bytes = 0
    time: Seconds = 0.0
    time_before: Seconds = 0.0
    time_bound: Seconds = 0.0
    planner: str = ""
    seconds: Seconds = 0.0
    moved: Index = 0
    source: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()
    meta: dict[str, Any] = {}
    host: Bytes = 0
    host_budget: Bytes | None = None
    lossy: bool = False
    inner: tuple[InnerRow, ...] = ()
    steps: StepColumns
    residences: ResidenceColumns | None = None
    graph: GraphDocument | None = None
