"""TensorFlow Lite (LiteRT) models as files -> a Graph: read by a reader of our own, never executed.

A file is a FlatBuffer. Every offset is checked before it is followed, and what is read of all tables together is
bounded, since many of them may point to the same bytes. A tensor's size is that of its ``shape`` in the file, which
is what an interpreter allocates unless its inputs are resized. Constants, inputs and variables belong to the caller.
``RESHAPE`` and its like hand on their input's bytes, as LiteRT's arena planner has it; every other result has bytes
of its own. What a kernel asks for as scratch is not in a file, and not counted. ``IF``, ``WHILE`` and
StableHLO's composites call subgraphs. Text lies outside of an interpreter's arena, and counts as no bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tightship.errors import BadInput
from tightship.files import read_bytes
from tightship.frontends.builder import GraphBuilder, bounded
from tightship.graph import Graph, Op
from tightship.machine import modeled_time

__all__ = ["Model", "Operator", "Program", "Subgraph", "Table", "Tensor", "lower", "read"]

LARGEST_FILE: Final = 2**31 - 1
"""Bytes of a file, which a FlatBuffer cannot exceed."""
MOST_READ: Final = 1 << 24
"""Tables and numbers that are read of a file in all."""
LONGEST_NAME: Final = 1 << 16
DEEPEST: Final = 32
_NAMED: Final = 4
"""Inputs that a note names."""

# --- FlatBuffers ---


class Reader:
    """The bytes of a FlatBuffer, and how much may still be read of them."""

    def __init__(self, data: bytes, place: str) -> None:
        self.data, self.place, self.left = data, place, MOST_READ

    def number(self, form: str, at: int) -> int:
        size = struct.calcsize(form)
        if not 0 <= at <= len(self.data) - size:
            raise BadInput(
                f"not a TensorFlow Lite model: offset {at} lies outside of its bytes", place=self.place
            )
        return int(struct.unpack_from(form, self.data, at)[0])

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise BadInput(f"more than {MOST_READ} tables and numbers", place=self.place)

    def table(self, at: int) -> Table:
        """The table that the offset at ``at`` leads to."""
        return Table.at(self, at + self.number("<I", at))


@dataclass(frozen=True, slots=True)
class Table:
    """A table at byte ``start``; fields are found by ``fields`` bytes of numbers at ``directory``."""

    reader: Reader
    start: int
    directory: int
    fields: int

    @classmethod
    def at(cls, reader: Reader, start: int) -> Table:
        reader.spend(1)
        directory = start - reader.number("<i", start)
        return cls(reader, start, directory, reader.number("<H", directory))

    def field(self, k: int) -> int:
        """Where field ``k`` lies; 0: it is left out."""
        if 4 + 2 * k + 2 > self.fields:
            return 0
        offset = self.reader.number("<H", self.directory + 4 + 2 * k)
        return self.start + offset if offset else 0

    def number(self, k: int, form: str, default: int = 0) -> int:
        at = self.field(k)
        return self.reader.number(form, at) if at else default

    def vector(self, k: int, width: int) -> tuple[int, int]:
        """Where the elements of a vector of ``width`` bytes each begin, and how many there are."""
        at = self.field(k)
        if not at:
            return 0, 0
        at += self.reader.number("<I", at)
        count = self.reader.number("<I", at)
        if at + 4 + count * width > len(self.reader.data):
            fault = f"not a TensorFlow Lite model: {count} elements at byte {at} end outside of it"
            raise BadInput(fault, place=self.reader.place)
        return at + 4, count

    def numbers(self, k: int) -> tuple[int, ...]:
        at, count = self.vector(k, 4)
        self.reader.spend(count)
        return struct.unpack_from(f"<{count}i", self.reader.data, at)

    def tables(self, k: int) -> list[Table]:
        at, count = self.vector(k, 4)
        self.reader.spend(count)
        return [self.reader.table(at + 4 * i) for i in range(count)]

    def table(self, k: int) -> Table | None:
        at = self.field(k)
        return self.reader.table(at) if at else None

    def text(self, k: int) -> str:
        at, count = self.vector(k, 1)
        count = min(count, LONGEST_NAME)
        self.reader.spend(count // 16)
        return self.reader.data[at : at + count].decode("utf-8", errors="replace")


# --- a model ---


@dataclass(frozen=True, slots=True)
class Tensor:
    """``nbytes`` by shape and type, none for text; ``constant``: the bytes that the file holds; ``signature``: the
    shape with -1 for what may be resized, if the file says so."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int | None
    constant: int
    variable: bool
    signature: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """``kind`` as the schema calls it (a custom op: its own name); ``calls``: indices of subgraphs."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    calls: tuple[int, ...]
    intermediates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subgraph:
    """``listed``: at which byte of the file the vector of its operators begins."""

    name: str
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[Operator, ...]
    listed: int


@dataclass(frozen=True)
class Model:
    path: Path
    data: bytes = field(repr=False)
    subgraphs: tuple[Subgraph, ...] = ()


_TYPES: Final = {
    0: ("float32", 32), 1: ("float16", 16), 2: ("int32", 32), 3: ("uint8", 8), 4: ("int64", 64), 5: ("string", 0),
    6: ("bool", 8), 7: ("int16", 16), 8: ("complex64", 64), 9: ("int8", 8), 10: ("float64", 64),
    11: ("complex128", 128), 12: ("uint64", 64), 13: ("resource", 0), 14: ("variant", 0), 15: ("uint32", 32),
    16: ("uint16", 16), 17: ("int4", 4), 18: ("bfloat16", 16), 19: ("int2", 2), 20: ("uint4", 4),
    21: ("float8_e4m3fn", 8), 22: ("float8_e5m2", 8),
}  # fmt: skip
"""By number in the schema: name, bits of an element."""

_KINDS: Final = tuple(
    "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR "
    "FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC "
    "LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX "
    "SPACE_TO_DEPTH SVDF TANH CONCAT_EMBEDDINGS SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD "
    "UNIDIRECTIONAL_SEQUENCE_RNN GATHER BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE "
    "UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE "
    "BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL "
    "LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT "
    "RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT "
    "UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR "
    "LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK "
    "ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 "
    "NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM BATCH_MATMUL PLACEHOLDER CUMSUM CALL_ONCE "
    "BROADCAST_TO RFFT2D CONV_3D IMAG REAL COMPLEX_ABS HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE "
    "REDUCE_ALL CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL "
    "BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD "
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2 UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR "
    "RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD STABLEHLO_DIVIDE STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM "
    "STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION "
    "STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE "
    "STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG STABLEHLO_MINIMUM STABLEHLO_NEGATE STABLEHLO_OR "
    "STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT STABLEHLO_SELECT STABLEHLO_SUBTRACT STABLEHLO_TANH "
    "STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE "
    "STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE "
    "STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW STABLEHLO_COMPOSITE "
    "STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT STABLEHLO_CASE".split()
)
_CALLS: Final = {"IF": (0, 1), "WHILE": (0, 1), "CALL_ONCE": (0,), "CALL": (0,)}
_CALLS_2: Final = {"STABLEHLO_WHILE": (0, 1), "STABLEHLO_COMPOSITE": (1,)}
"""By kind, the fields of its options that name subgraphs; of the second kind of options."""
_CASE: Final = "STABLEHLO_CASE"
"""Names as many subgraphs as it has branches, in a vector."""
_LOOPS: Final = ("WHILE", "STABLEHLO_WHILE")
_VIEWS: Final = frozenset("RESHAPE SQUEEZE EXPAND_DIMS BITCAST".split())
_RANDOM: Final = frozenset(
    "RANDOM_STANDARD_NORMAL RANDOM_UNIFORM MULTINOMIAL STABLEHLO_RNG_BIT_GENERATOR".split()
)
_EFFECTS: Final = frozenset(
    "CALL_ONCE VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE "
    "HASHTABLE_LOOKUP".split()
)


def read(path: str | os.PathLike[str]) -> Model:
    """Read a file. Raises ``BadInput`` for whatever is wrong with it."""
    place = os.fspath(path)
    data = read_bytes(path, LARGEST_FILE)
    if data[4:8] != b"TFL3":
        raise BadInput("not a TensorFlow Lite model (a FlatBuffer with the identifier TFL3)", place=place)
    reader = Reader(data, place)
    root = reader.table(0)
    kinds = [_kind(code) for code in root.tables(1)]
    sizes = [max(b.vector(0, 1)[1], b.number(2, "<Q")) for b in root.tables(4)]
    subgraphs = tuple(_subgraph(t, kinds, sizes) for t in root.tables(2))
    if not subgraphs:
        raise BadInput("model without subgraphs", place=place)
    for k, g in enumerate(subgraphs):
        _check(g, f"{place}: subgraph {k}", len(subgraphs))
    return Model(Path(place), data, subgraphs)


def _kind(code: Table) -> str:
    number = max(code.number(0, "<b"), code.number(3, "<i"))
    if number == 32:
        return code.text(1) or "CUSTOM"
    return _KINDS[number] if 0 <= number < len(_KINDS) else f"BUILTIN_{number}"


def _subgraph(table: Table, kinds: Sequence[str], sizes: Sequence[int]) -> Subgraph:
    place = table.reader.place
    operators = []
    for k, entry in enumerate(table.tables(3)):
        code = entry.number(0, "<I")
        if code >= len(kinds):
            raise BadInput(f"operator {k} is of kind {code}; the model has {len(kinds)}", place=place)
        calls = _called(entry, kinds[code])
        operators.append(Operator(kinds[code], entry.numbers(1), entry.numbers(2), calls, entry.numbers(8)))
    tensors = tuple(_tensor(t, sizes) for t in table.tables(0))
    return Subgraph(
        table.text(4), tensors, table.numbers(1), table.numbers(2), tuple(operators), table.vector(3, 4)[0]
    )


def _called(entry: Table, kind: str) -> tuple[int, ...]:
    """The subgraphs that an operator names."""
    if kind == _CASE:
        branches = entry.table(12)
        return branches.numbers(0) if branches else ()
    fields = _CALLS.get(kind) or _CALLS_2.get(kind, ())
    options = entry.table(4 if kind in _CALLS else 12) if fields else None
    return tuple(options.number(f, "<i") for f in fields) if options else ()


def _tensor(table: Table, sizes: Sequence[int]) -> Tensor:
    name, shape, kind, buffer = table.text(3), table.numbers(0), table.number(1, "<b"), table.number(2, "<I")
    where = f"{table.reader.place}: tensor {name!r}"
    if kind not in _TYPES:
        raise BadInput(f"unknown type {kind} of a tensor", place=where)
    if any(d < 0 for d in shape) or buffer >= max(len(sizes), 1):
        raise BadInput(f"invalid shape {list(shape)[:8]} or buffer {buffer}", place=where)
    dtype, bits = _TYPES[kind]
    nbytes = None if dtype == "string" else bounded(-(-math.prod(shape) * bits // 8), where)
    held = sizes[buffer] if sizes else 0
    return Tensor(name, dtype, shape, nbytes, held, bool(table.number(5, "<b")), table.numbers(7))


def _check(g: Subgraph, place: str, subgraphs: int) -> None:
    """Raise ``BadInput`` where numbers name no tensor, or a tensor is not made once, before it is read."""
    if any(not 0 <= t < len(g.tensors) for t in (*g.inputs, *g.outputs)):
        raise BadInput("unknown tensor among inputs and results", place=place)
    made = {t for o in g.operators for t in o.outputs}
    empty = {
        k for k, t in enumerate(g.tensors) if t.nbytes == 0
    } - made  # a constant without elements has no bytes
    there = set(g.inputs) | empty | {k for k, t in enumerate(g.tensors) if t.constant or t.variable}
    for k, o in enumerate(g.operators):
        where = f"{place}: operator {k}, a {o.kind}"
        for t in (*o.inputs, *o.outputs, *o.intermediates):
            if not -1 <= t < len(g.tensors):
                raise BadInput(f"unknown tensor {t}; there are {len(g.tensors)}", place=where)
        if missing := [t for t in o.inputs if t >= 0 and t not in there]:
            raise BadInput(f"{g.tensors[missing[0]].name!r} is read before it is made", place=where)
        if twice := [t for t in o.outputs if t >= 0 and t in there]:
            raise BadInput(f"{g.tensors[twice[0]].name!r} is made although it is there", place=where)
        there |= set(o.outputs)
        if any(not 0 <= c < subgraphs for c in o.calls):
            raise BadInput(f"unknown subgraph in {list(o.calls)}; there are {subgraphs}", place=where)
    if unmade := [t for t in g.outputs if t not in there]:
        raise BadInput(f"result {unmade[0]} is not made", place=place)


# --- the graph ---


@dataclass(frozen=True)
class Program:
    """A model and the graph of its first subgraph: op ``k`` of the graph is operator ``k``."""

    model: Model
    graph: Graph
    notes: tuple[str, ...] = ()


def lower(model: Model) -> Program:
    """The graph of a model. Raises ``BadInput`` for subgraphs that call one another in a circle."""
    lowered: dict[int, Graph] = {}
    graph = _lowered(model, 0, (), lowered)
    return Program(model, graph, (*_open_sizes(model), *_texts(model), *_not_called(model, lowered)))


def _texts(model: Model) -> Iterator[str]:
    texts = [repr(t.name) for g in model.subgraphs for t in g.tensors if t.nbytes is None and not t.constant]
    if names := list(dict.fromkeys(texts)):
        yield f"text lies outside of the arena and counts as no bytes: {_listed(names)}"


def _not_called(model: Model, called: dict[int, Graph]) -> Iterator[str]:
    """What is said of the other signatures of a model, whose subgraphs the first one does not call."""
    begin = f"of several signatures that of {model.subgraphs[0].name!r} is planned"
    if names := [repr(g.name) for k, g in enumerate(model.subgraphs) if k not in called]:
        yield f"{begin}; in their order stay {_listed(names)}"


def _open_sizes(model: Model) -> Iterator[str]:
    """What is said of inputs whose sizes the file leaves open, and of results whose sizes follow from data."""
    begin = "sizes that are open count as they stand in the file"
    first = model.subgraphs[0]
    if names := [
        _open_size(first, k) for k in dict.fromkeys(first.inputs) if -1 in first.tensors[k].signature
    ]:
        yield f"{begin}: {_listed(names)}; an interpreter that resizes its inputs takes more"
    if names := [_open_size(g, k) for g in model.subgraphs for k in _sizes_from_data(g)]:
        yield f"{begin}: {_listed(names)}, which follow from data; a run whose data give more takes more"


def _sizes_from_data(g: Subgraph) -> tuple[int, ...]:
    """Results whose sizes a file leaves open although it has all those of what they are made of."""
    return tuple(
        t
        for o in g.operators
        if not any(-1 in g.tensors[i].signature for i in o.inputs if i >= 0)
        for t in o.outputs
        if t >= 0 and -1 in g.tensors[t].signature
    )


def _open_size(g: Subgraph, k: int) -> str:
    return f"{g.tensors[k].name!r} {list(g.tensors[k].signature)[:8]} as {list(g.tensors[k].shape)[:8]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _lowered(model: Model, k: int, around: tuple[int, ...], known: dict[int, Graph]) -> Graph:
    place = str(model.path)
    if k in around or len(around) > DEEPEST:
        raise BadInput(f"subgraph {k} calls itself, or subgraphs more than {DEEPEST} deep", place=place)
    if k not in known:
        g = model.subgraphs[k]
        calls = [tuple(_lowered(model, c, (*around, k), known) for c in o.calls) for o in g.operators]
        name = model.path.stem if k == 0 else g.name or f"subgraph {k}"
        known[k] = _graph(g, calls, name or "model", inner=k > 0)
    return known[k]


def _graph(g: Subgraph, calls: Sequence[tuple[Graph, ...]], name: str, *, inner: bool) -> Graph:
    builder, value_of = GraphBuilder(), dict[int, int]()
    names = [t.name or f"tensor {k}" for k, t in enumerate(g.tensors)]

    def size(k: int) -> int:
        return g.tensors[k].nbytes or 0

    def own(k: int) -> None:
        t = g.tensors[k]
        kind = "input" if k in g.inputs else "state" if t.variable else "constant"
        nbytes = t.constant if kind == "constant" else size(k)
        value_of[k] = builder.tensor(names[k], nbytes, t.dtype, t.shape, kind)
        builder.inputs.append(value_of[k])

    for k in dict.fromkeys(g.inputs):
        own(k)
    for o, inside in zip(g.operators, calls, strict=True):
        for t in o.inputs:
            if t >= 0 and t not in value_of:
                own(t)
        ins = tuple(value_of[t] for t in o.inputs if t >= 0)
        outs, held = [], _held(g, o) if not inner else ()
        for t in held:
            value_of[t] = builder.tensor(names[t], size(t), g.tensors[t].dtype, g.tensors[t].shape, "state")
            builder.inputs.append(value_of[t])
        ins += tuple(value_of[t] for t in held)
        for t in (t for t in o.outputs if t >= 0 and t not in held):
            storage = _view(g, o, t, value_of, builder)
            if storage is None:
                kind = "output" if t in g.outputs else "activation"
                storage = builder.storage(names[t], 0 if inner and t in g.outputs else size(t), kind)
            value_of[t] = builder.value(names[t], storage, g.tensors[t].dtype, g.tensors[t].shape)
            outs.append(value_of[t])
        written = {builder.storage_of(value_of[t]) for t in o.inputs if t >= 0 and g.tensors[t].variable}
        written |= {builder.storage_of(value_of[t]) for t in held}
        flops, made = _flops(g, o), sum(g.tensors[t].nbytes or 0 for t in (*o.inputs, *o.outputs) if t >= 0)
        carried = sum(size(t) for t in o.inputs if t >= 0) if o.kind in _LOOPS else 0
        scratch = sum(size(t) for t in o.intermediates if t >= 0)
        builder.op(
            Op(
                builder.op_name(names[o.outputs[0]] if o.outputs and o.outputs[0] >= 0 else o.kind),
                o.kind, ins, tuple(outs),
                mutates=tuple(sorted(written)),
                random=o.kind in _RANDOM,
                effect=o.kind in _EFFECTS or not outs,
                time=modeled_time(flops, made),
                flops=flops,
                workspace=carried + scratch,
                calls=inside,
            )
        )  # fmt: skip
    for t in g.outputs:
        if t not in value_of:
            own(t)
    callers = set(map(builder.storage_of, builder.inputs))
    results = [value_of[t] for t in g.outputs if builder.storage_of(value_of[t]) not in callers]
    return builder.graph(tuple(dict.fromkeys(results)), name, {"source": "tflite"})


def _held(g: Subgraph, o: Operator) -> tuple[int, ...]:
    """Results that LiteRT keeps from one run to the next: what is made of weights that the file holds in another type
    (half precision) is made in the first one."""
    source = o.inputs[0] if o.inputs else -1
    if o.kind not in ("DEQUANTIZE", "DENSIFY") or source < 0 or not g.tensors[source].constant:
        return ()
    return tuple(t for t in o.outputs if t >= 0 and t not in g.outputs)


def _view(g: Subgraph, o: Operator, t: int, value_of: dict[int, int], builder: GraphBuilder) -> int | None:
    """The storage of an input that a result is a view of: LiteRT shares neither the caller's nor results."""
    if o.kind not in _VIEWS or not o.inputs or o.inputs[0] < 0 or t in g.outputs:
        return None
    source = o.inputs[0]
    storage = builder.storage_of(value_of[source])
    if (
        g.tensors[source].nbytes != g.tensors[t].nbytes
        or value_of[source] in builder.inputs
        or source in g.outputs
    ):
        return None
    return storage


def _flops(g: Subgraph, o: Operator) -> int:
    """Floating-point operations: products exactly, everything else one for each element of the larger side."""
    shapes = [g.tensors[t].shape for t in o.inputs if t >= 0]
    made = [math.prod(g.tensors[t].shape) for t in o.outputs if t >= 0]
    if o.kind in ("CONV_2D", "FULLY_CONNECTED") and len(shapes) > 1 and len(shapes[1]) >= 2:
        return 2 * made[0] * math.prod(shapes[1][1:])
    if o.kind == "DEPTHWISE_CONV_2D" and len(shapes) > 1 and len(shapes[1]) == 4:
        return 2 * made[0] * math.prod(shapes[1][1:3])
    if o.kind == "BATCH_MATMUL" and shapes and shapes[0]:
        return 2 * made[0] * shapes[0][-1]
    return 0 if o.kind in _VIEWS else max(sum(map(math.prod, shapes)), sum(made), 0)
