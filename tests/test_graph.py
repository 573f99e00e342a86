"""Graph: what is refused, what follows from it, and that its digest means its structure."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import graphs, random_graph, random_order
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Request, Storage, Value, aligned, alignment_of, walk

X, S = Storage("x", 64, "input"), Storage("s", 128)


def tiny(**changes: Any) -> Graph:
    """x -> s, then s is written in place and read as v."""
    made = {
        "ops": (Op("make", "f", (0,), (1,)), Op("write", "f_", (1, 0), (2,), mutates=(1,))),
        "values": (Value("x", 0), Value("s", 1), Value("v", 1)),
        "storages": (X, S),
        "inputs": (0,),
        "outputs": (2,),
        **changes,
    }
    return Graph(**made)


def ops(*rows: Op) -> dict[str, Any]:
    return {"ops": rows}


WRONG = {
    "not negative": {"storages": (X, replace(S, size=-1))},
    "index of Graph.storages": {"values": (Value("x", 0), Value("s", 2), Value("v", 1))},
    "graph input is an index": {"inputs": (3,)},
    "op's input is an index": ops(Op("make", "f", (7,), (1,))),
    "op's output is an index": ops(Op("make", "f", (0,), (-1,))),
    "defined before it is used": ops(Op("make", "f", (1,), (2,))),
    "defined once": ops(Op("make", "f", (0,), (1,)), Op("again", "f", (0,), (1,))),
    "mutated storage is an index": ops(Op("make", "f", (0,), (1, 2), mutates=(9,))),
    "part of Op.mutates": ops(Op("make", "f", (0,), (1, 2), updates=(0,))),
    "stands earlier": ops(Op("make", "f", (0,), (1, 2), control=(0,))),
    "graph output is a defined value": {"outputs": (3,)},
}


@pytest.mark.parametrize("rule", WRONG)
def test_wrong_graphs_are_refused_by_name(rule: str) -> None:
    with pytest.raises(BadInput, match=rule) as caught:
        tiny(**WRONG[rule])
    assert caught.value.place


def test_a_graph_output_that_nothing_defines_is_refused() -> None:
    with pytest.raises(BadInput, match="defined value"):
        tiny(**ops(Op("make", "f", (0,), (1,))))


def test_a_storage_that_is_written_before_it_is_there_is_refused() -> None:
    graph = tiny(**ops(Op("early", "f_", (0,), (), mutates=(1,)), Op("make", "f", (0,), (1, 2))))
    with pytest.raises(BadInput, match="defined before it is used"):
        _ = graph.uses


def test_a_graph_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        tiny().name = "other"  # type: ignore[misc]


def test_uses_follow_aliases_and_count_writes() -> None:
    uses = tiny().uses
    assert uses.defines == ((1,), ())
    assert uses.reads == ((0,), (1, 0))
    assert uses.needs == ((0,), (1, 0))
    assert uses.mutates == ((), (1,))
    assert uses.definer == (-1, 0)
    assert uses.writers == ((), (0, 1))
    assert uses.readers == ((0, 1), (1,))


def test_static_set_and_results() -> None:
    graph = tiny()
    assert graph.static == {0} and graph.kept == {1} and graph.static_bytes == 64


def test_two_inputs_of_one_storage_are_counted_once() -> None:
    graph = tiny(values=(Value("x", 0), Value("s", 1), Value("v", 1), Value("tied", 0)), inputs=(0, 3))
    assert graph.static_bytes == 64


CHANGED = {
    "a size": {"storages": (X, replace(S, size=192))},
    "a pool": {"storages": (X, replace(S, pool="sram"))},
    "a shape": {"values": (Value("x", 0), Value("s", 1, shape=(3,)), Value("v", 1))},
    "an offset": {"values": (Value("x", 0), Value("s", 1), Value("v", 1, offset=1))},
    "outputs": {"outputs": (1,)},
    **{
        name: {"ops": (tiny().ops[0], replace(tiny().ops[1], **{name: value}))}
        for name, value in {
            "target": "g_", "inputs": (1,), "mutates": (), "updates": (1,), "random": True, "effect": True,
            "control": (0,), "calls": (tiny(),),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGED)
def test_the_digest_changes_with_the_structure(what: str) -> None:
    assert tiny(**CHANGED[what]).digest != tiny().digest


def test_the_digest_stays_with_measurements_and_names() -> None:
    measured = replace(tiny().ops[1], time=3.0, workspace=64, requests=(Request(64, -1, 0, 1),), name="w2")
    assert tiny(ops=(tiny().ops[0], measured)).digest == tiny().digest
    assert tiny().with_ops((tiny().ops[0], measured)).ops[1].time == 3.0
    assert tiny(name="other", meta={"a": 1}).digest == tiny().digest


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_sizes_are_rounded_up(size: int, expected: int) -> None:
    assert aligned(size) == expected


def test_places_name_the_module_and_the_line() -> None:
    graph = tiny(**ops(Op("make", "f", (0,), (1, 2), module="net.0", source="net.py:3")))
    assert graph.place(0) == "net.0 · net.py:3"
    assert tiny().place(0) == "make"


def test_walk_visits_called_graphs() -> None:
    inner = tiny(name="inner")
    outer = tiny(name="outer", **ops(Op("loop", "while", (0,), (1, 2), calls=(inner, inner))))
    assert [path for path, _ in walk(outer)] == ["outer", "outer/loop/inner", "outer/loop/inner"]


# The random graphs of the other tests


def test_random_graphs_follow_from_their_seed() -> None:
    assert random_graph(3, 30) == random_graph(3, 30) != random_graph(4, 30)
    with pytest.raises(AssertionError, match="knobs"):
        random_graph(0, 1, nonsense=1.0)


def test_random_graphs_have_a_bit_of_everything() -> None:
    ops_ = [op for seed in range(30) for op in random_graph(seed, 40).ops]
    for name in (f.name for f in fields(Op)):
        if name not in ("phase", "device", "module", "target", "flops"):
            assert len({repr(getattr(op, name)) for op in ops_}) > 1, name


@given(graphs(static_writes=1.0), st.integers(0, 1 << 30))
def test_random_orders_keep_what_every_op_sees(graph: Graph, seed: int) -> None:
    order, uses = random_order(graph, seed), graph.uses
    assert sorted(order) == list(range(len(graph.ops)))
    seen = [0] * len(graph.storages)
    for k in order:
        assert [seen[s] for s in uses.reads[k]] == list(uses.needs[k])
        for s in (*uses.defines[k], *uses.mutates[k]):
            seen[s] += 1
    where = {k: i for i, k in enumerate(order)}
    assert all(where[c] < where[k] for k, op in enumerate(graph.ops) for c in op.control)


@pytest.mark.parametrize(("device", "expected"), [("cpu", 64), ("meta", 64), ("cuda", 512), ("cuda:3", 512)])
def test_sizes_are_multiples_of_what_the_devices_allocator_aligns_to(device: str, expected: int) -> None:
    assert alignment_of(device) == expected
    assert aligned(1, alignment_of(device)) == expected
