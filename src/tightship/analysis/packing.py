"""Which storages can be packed without loss, by which codec and to how many bytes: from the graph alone.

Booleans take a bit each; a dropout mask, drawn as zeros and ones and scaled since, takes a bit each and the
number; integers take the narrowest type that holds the range their producer or their use as an index gives them.
What is packed is the contents after the last write. Codecs check what they pack, so that a range that does not
hold is an error and never other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tightship.graph import Graph, Op, Value, aligned
from tightship.machine import INTEGERS

__all__ = ["Packing", "packings"]

_ITEM = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
_ITEM |= {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_PLANE = {"max_pool2d_with_indices": 2, "adaptive_max_pool2d": 2, "max_pool3d_with_indices": 3}
"""Ops whose indices count within the last so many dimensions of their input."""
_ALONG = ("sort", "topk", "max", "min", "median", "mode", "kthvalue", "argsort")
"""Ops whose indices count along one dimension of their input."""


@dataclass(frozen=True, slots=True)
class Packing:
    """``codec`` (one of ``machine.CODECS``) and the bytes of the packed form, as the allocator counts them."""

    codec: str
    nbytes: int


@dataclass
class _Table:
    """What is known of each storage: its values' dtype (one, or nothing), and elements they reach over."""

    dtype: list[str]
    extent: list[int]

    @classmethod
    def of(cls, graph: Graph) -> _Table:
        table = cls([""] * len(graph.storages), [0] * len(graph.storages))
        mixed = set()
        for v in graph.values:
            s = v.storage
            if table.dtype[s] not in ("", v.dtype):
                mixed.add(s)
            table.dtype[s] = v.dtype
            table.extent[s] = max(table.extent[s], _reach(v))
        for s in mixed:
            table.dtype[s] = ""
        return table


def _reach(v: Value) -> int:
    if 0 in v.shape:
        return 0
    if not v.stride:  # not known of files: side by side
        return v.offset + prod(v.shape)
    if len(v.shape) != len(v.stride):
        return 0
    return v.offset + 1 + sum((n - 1) * step for n, step in zip(v.shape, v.stride, strict=True))


def packings(graph: Graph, *, lossy: bool = False) -> dict[int, Packing]:
    """The packing of every storage that the caller does not own and that a codec makes smaller. With ``lossy``,
    single precision that no lossless codec takes is rounded to bfloat16. On CUDA there is no ``mask``."""
    table = _Table.of(graph)
    below = _below(graph, table)
    masks = _masks(graph, table) if not any(o.device.startswith("cuda") for o in graph.ops) else set()
    found = {}
    for s, storage in enumerate(graph.storages):
        codec, raw = _codec(table, s, below.get(s), s in masks, lossy)
        nbytes = aligned(raw, graph.alignment)
        if s not in graph.static and codec and 0 < nbytes < storage.size:
            found[s] = Packing(codec, nbytes)
    return found


def _codec(table: _Table, s: int, below: int | None, mask: bool, lossy: bool) -> tuple[str, int]:
    dtype, n = table.dtype[s], table.extent[s]
    if dtype == "bool":
        return "bits", -(-n // 8)
    if mask:
        return "mask", -(-n // 8) + _ITEM[dtype]
    if below is not None and dtype.startswith("int"):
        for codec, (bits, _, most) in INTEGERS.items():
            if below <= most + 1 and bits < 8 * _ITEM[dtype]:
                return codec, -(-n * bits // 8)
    return ("bf16", 2 * n) if lossy and dtype == "float32" else ("", 0)


def _name(op: Op) -> str:
    return op.target.split(".")[1] if op.target.startswith("aten.") else ""


# Ranges of integers


def _below(graph: Graph, table: _Table) -> dict[int, int]:
    """A number that all of a storage's integers, none negative, are below."""
    uses = graph.uses
    found = _by_use(graph, table)
    for k, op in enumerate(graph.ops):
        for s in uses.defines[k]:
            top = _made(graph, op, found) if len(uses.writers[s]) == 1 and op.inputs else None
            if top is not None:
                found[s] = min(top, found.get(s, top))
    return found


def _by_use(graph: Graph, table: _Table) -> dict[int, int]:
    """What is used as an index, all of it, lies within what it indexes: else the step would have failed."""
    uses = graph.uses
    found: dict[int, int] = {}
    for op in graph.ops:
        if _name(op) not in ("embedding", "gather", "index_select") or len(op.inputs) != 2:
            continue
        source, index = (graph.values[v] for v in op.inputs)
        if not source.shape:
            continue
        s = index.storage
        once = len(uses.writers[s]) <= (s not in graph.static)
        if once and s != source.storage and prod(index.shape) == table.extent[s]:
            top = source.shape[0] if _name(op) == "embedding" else max(source.shape, default=1)
            found[s] = min(top, found.get(s, top))
    return found


def _made(graph: Graph, op: Op, known: dict[int, int]) -> int | None:
    first = graph.values[op.inputs[0]]
    name = _name(op)
    if name in _PLANE:
        return prod(first.shape[-_PLANE[name] :])
    if name in ("argmax", "argmin"):
        return prod(first.shape)
    if name in _ALONG:
        return max(first.shape, default=1)
    if name in ("clone", "_to_copy"):
        return known.get(first.storage)
    return None


# Dropout masks


def _masks(graph: Graph, table: _Table) -> set[int]:
    """Storages that hold zeros and one other number when all their writes are done."""
    uses = graph.uses
    two: dict[int, bool] = {}
    for k, op in enumerate(graph.ops):
        for s in (*uses.defines[k], *uses.mutates[k]):
            two[s] = _two(graph, table, op, s, two)
    return {s for s, yes in two.items() if yes and "float" in table.dtype[s]}


def _two(graph: Graph, table: _Table, op: Op, s: int, two: dict[int, bool]) -> bool:
    """Whether a storage holds zeros and one other number after ``op`` has written it."""
    if not op.inputs:
        return False
    first, name = graph.values[op.inputs[0]], op.target.removeprefix("aten.")
    whole = first.storage == s and prod(first.shape) == table.extent[s]
    if name.startswith("bernoulli."):
        return True
    if name.startswith("bernoulli_."):
        return whole
    if name in ("div_.Scalar", "mul_.Scalar"):
        return whole and two.get(s, False)
    if name in ("div.Scalar", "mul.Scalar"):
        source = first.storage
        final = graph.uses.writers[source][-1:] < (graph.uses.definer[s],)
        return two.get(source, False) and final
    return False
