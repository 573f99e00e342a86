"""What can be packed is read off the graph: types, sizes, producers, uses."""

from __future__ import annotations

import pytest

from tightship.analysis.packing import Packing, packings
from tightship.graph import Graph, Op, Storage, Value, aligned
from tightship.plan import Plan, Step
from tightship.verify import verify

_ITEM = {"bool": 1, "int64": 8, "int32": 4, "float32": 4, "float64": 8}


def one(target: str, source: tuple[int, ...], dtype: str, shape: tuple[int, ...], *more: Op) -> Graph:
    """An op on a source of floats makes storage 1; ``more`` ops follow, on values 0 (source) and 1 (made)."""
    values = (_value("x", 0, "float32", source), _value("y", 1, dtype, shape))
    storages = tuple(Storage(v.name, aligned(_count(v.shape) * _ITEM[v.dtype])) for v in values)
    return Graph((Op("op", target, (0,), (1,)), *more), values, storages, (0,))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _value(name: str, s: int, dtype: str, shape: tuple[int, ...]) -> Value:
    stride = tuple(_count(shape[i + 1 :]) for i in range(len(shape)))
    return Value(name, s, dtype, shape, stride)


BIG = (4, 1000)
ROW = Op("use", "aten.embedding.default", (0, 1), ())
SCALE = Op("scale", "aten.div_.Scalar", (1,), (), (1,))
DRAW = Op("draw", "aten.bernoulli_.float", (1,), (), (1,), random=True)
ADD = Op("add", "aten.add_.Tensor", (1, 0), (), (1,))

CASES = {
    "booleans": (one("aten.le.Tensor", BIG, "bool", BIG), Packing("bits", 512)),
    "pooled": (one("aten.max_pool2d_with_indices.default", (2, 8, 16, 16), "int64", (2, 8, 8, 8)),
               Packing("uint8", 1024)),
    "pooled wide": (one("aten.max_pool2d_with_indices.default", (1, 1, 300, 300), "int64", (1, 1, 150, 150)),
                    Packing("int32", 90048)),
    "pooled, just over": (one("aten.max_pool2d_with_indices.default", (2, 8, 16, 17), "int64", (2, 8, 8, 8)),
                          Packing("int16", 2048)),
    "pooled, over 15 bits": (one("aten.max_pool2d_with_indices.default", (1, 1, 200, 200), "int64", (1, 1, 50, 50)),
                             Packing("uint16", 5056)),
    "argmax": (one("aten.argmax.default", BIG, "int64", (1000,)), Packing("int16", 2048)),
    "sorted": (one("aten.topk.default", BIG, "int64", BIG), Packing("int16", 8000)),
    "used as an index": (one("aten.gone.default", (200, 8), "int64", (500,), ROW), Packing("uint8", 512)),
    "a mask": (one("aten.empty_like.default", BIG, "float32", BIG, DRAW, SCALE), Packing("mask", 512)),
    "an unscaled mask": (one("aten.bernoulli.p", BIG, "float64", BIG), Packing("mask", 512)),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_packings_and_the_verifiers_own_view_of_them(what: str) -> None:
    graph, expected = CASES[what]
    assert packings(graph) == {1: expected}
    assert faults(graph, expected) == set()
    smaller = {"uint8": "int8", "int16": "uint8", "uint16": "int16", "int32": "uint16"}.get(expected.codec)
    if smaller:
        width = int(smaller.lstrip("uint")) // 8
        count = _count(graph.values[1].shape)
        assert faults(graph, Packing(smaller, aligned(count * width))) == {"codec"}
    assert faults(graph, Packing(expected.codec, expected.nbytes + 64)) == {"codec"}


def faults(graph: Graph, packing: Packing) -> set[str]:
    steps = [
        *(Step("compute", op=k) for k in range(len(graph.ops))),
        Step("compress", storages=(1,), nbytes=packing.nbytes, codec=packing.codec),
        Step("free", storages=(1,), form="packed"),
        Step("free", storages=(1,)),
    ]
    plan = Plan(graph.digest, tuple(steps), static=graph.static_bytes)
    return {v.code for v in verify(graph, plan)} - {"peak-mismatch", "time-mismatch"}


NOT = {
    "numbers": one("aten.add.Tensor", BIG, "float32", BIG),
    "integers of unknown range": one("aten.add.Tensor", BIG, "int64", BIG),
    "written after its range was known": one("aten.argmax.default", BIG, "int64", (1000,), ADD),
    "a mask that something is added to": one("aten.empty_like.default", BIG, "float32", BIG, DRAW, ADD),
    "scaled, never drawn": one("aten.empty_like.default", BIG, "float32", BIG, SCALE),
    "too small to gain": one("aten.le.Tensor", (8,), "bool", (8,)),
}


@pytest.mark.parametrize("what", NOT)
def test_what_nothing_is_known_of_is_not_packed(what: str) -> None:
    assert packings(NOT[what]) == {}
    if "small" not in what:
        for codec, size in (("uint8", 1), ("int16", 2), ("mask", 0), ("bits", 0)):
            n = _count(NOT[what].values[1].shape)
            nbytes = aligned(n * size if size else -(-n // 8) + (4 if codec == "mask" else 0))
            assert faults(NOT[what], Packing(codec, nbytes)) == {"codec"}


def test_loss_is_a_request() -> None:
    graph = one("aten.add.Tensor", BIG, "float32", BIG)
    assert packings(graph, lossy=True) == {1: Packing("bf16", 8000)}
    assert packings(one("aten.add.Tensor", BIG, "float64", BIG), lossy=True) == {}


def test_two_types_in_one_storage_are_left_alone() -> None:
    graph = one("aten.le.Tensor", BIG, "bool", BIG)
    view = Value("view", 1, "uint8", BIG, (1000, 1))
    ops = (Op("op", "aten.le.Tensor", (0,), (1, 2)),)
    assert packings(Graph(ops, (*graph.values, view), graph.storages, (0,))) == {}
