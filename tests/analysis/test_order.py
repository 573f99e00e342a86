"""Edges between ops: data, hazards on one storage, the random chain, effects, control."""

from __future__ import annotations

import pytest

from support.chains import chain
from support.lowering import random_order, random_steps
from support.strategies import random_graph
from tightship.analysis.bounds import lower_bound, replayable
from tightship.analysis.order import is_legal, predecessors
from tightship.analysis.structure import colors, layer, role
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.order import sink
from tightship.simulate import baseline, replay


def hazards() -> Graph:
    storages = tuple(Storage(n, 64) for n in "wabc")
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    ops = (
        Op("a", "t", (0,), (1,)),
        Op("write", "t", (1,), (), (0,)),
        Op("b", "t", (0,), (2,), random=True),
        Op("c", "t", (1,), (3,), random=True, control=(1,)),
        Op("print", "t", (1,), (), effect=True),
        Op("send", "t", (1,), (), effect=True),
    )
    return Graph(ops, values, storages, (0,), (2, 3))


def test_edges_are_data_hazards_chains_and_control() -> None:
    before = predecessors(hazards())
    assert before == ((), (0,), (1,), (0, 1, 2), (0,), (0, 4))


def test_an_order_is_legal_when_every_edge_is_kept() -> None:
    graph = hazards()
    assert is_legal(graph, (0, 4, 5, 1, 2, 3))
    assert not is_legal(graph, (0, 2, 1, 3, 4, 5))
    assert not is_legal(graph, (0, 1, 2, 3, 4))


@pytest.mark.parametrize("seed", range(20))
def test_sink_is_legal_and_keeps_the_results(seed: int) -> None:
    graph = random_graph(seed, 60)
    order = sink.plan(graph)
    assert is_legal(graph, order)
    replay(graph, baseline(graph, order))


def test_sink_moves_updates_to_their_gradients() -> None:
    """Ten parameters: gradients are made one after the other, all updates stand at the end."""
    n = 10
    storages = [Storage(f"w{k}", 64, "parameter") for k in range(n)]
    storages += [Storage(f"g{k}", 64, "gradient") for k in range(n)]
    values = [Value(s.name, i) for i, s in enumerate(storages)]
    ops = [Op(f"grad{k}", "t", (k,), (n + k,), phase="backward") for k in range(n)]
    ops += [Op(f"update{k}", "u", (n + k,), (), (k,), phase="update") for k in range(n)]
    graph = Graph(tuple(ops), tuple(values), tuple(storages), tuple(range(n)))
    order = sink.plan(graph)
    assert order == tuple(x for k in range(n) for x in (k, n + k))
    assert replay(graph, baseline(graph)).peak == 64 * 2 * n
    assert replay(graph, baseline(graph, order)).peak == 64 * (n + 1)


@pytest.mark.parametrize("seed", range(40))
def test_no_legal_plan_is_below_the_lower_bound(seed: int) -> None:
    graph = random_graph(seed, 5 + seed)
    bound = lower_bound(graph)
    assert replay(graph, baseline(graph)).peak >= bound
    assert replay(graph, baseline(graph, random_order(graph, seed))).peak >= bound
    away = lower_bound(
        graph, least=dict.fromkeys(range(len(graph.storages)), 0)
    )  # they copy out and pack, too
    assert replay(graph, random_steps(graph, seed)).peak >= away


def test_bound_of_a_chain_is_its_largest_working_set() -> None:
    graph = chain(50)
    assert lower_bound(graph) == 64 * 4
    assert lower_bound(graph, recompute=False) == replay(graph, baseline(graph)).peak


def test_bound_counts_what_cannot_be_made_again() -> None:
    graph = chain(10)
    fixed = graph.with_ops(tuple(Op(**{**_fields(o), "random": o.phase == "forward"}) for o in graph.ops))
    assert lower_bound(fixed) == replay(fixed, baseline(fixed)).peak


def _fields(op: Op) -> dict[str, object]:
    return {name: getattr(op, name) for name in op.__dataclass_fields__}


def test_replayable_needs_purity_and_final_contents() -> None:
    graph = hazards()
    assert [replayable(graph, s) for s in range(4)] == [False, True, False, False]


def test_repeated_layers_have_one_color_and_one_role() -> None:
    graph = chain(12)
    hues = colors(graph)
    assert len(set(hues[4:8])) == 1
    assert len(set(hues)) < len(hues) / 2
    named = graph.with_ops(
        tuple(Op(**{**_fields(o), "module": f"h.{k}.mlp"}) for k, o in enumerate(graph.ops))
    )
    assert role(named, 2) == role(named, 5) != role(named, 20)
    assert layer(named, 3) == "h.3"
