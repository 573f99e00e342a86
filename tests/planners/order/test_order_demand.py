"""By demand: legal, every op right before what needs it, the deepest input first; made again so, plans need less."""

from __future__ import annotations

import pytest

from support.strategies import random_graph
from tightship.analysis.order import is_legal
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.evict.problem import DROP, EvictionProblem
from tightship.planners.order import demand
from tightship.simulate import replay


def graph_of(sizes: dict[str, int], rows: list[tuple[str, str]], results: str) -> Graph:
    """Ops named by what they make: (result, reads)."""
    storages = tuple(Storage(name, n, "input" if name == "x" else "unknown") for name, n in sizes.items())
    at = {name: k for k, name in enumerate(sizes)}
    ops = tuple(
        Op(made, made, tuple(at[r] for r in reads.split()), (at[made],), time=1.0) for made, reads in rows
    )
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    return Graph(ops, values, storages, (0,), tuple(at[r] for r in results.split()))


@pytest.mark.parametrize("seed", range(40))
def test_every_order_is_legal(seed: int) -> None:
    graph = random_graph(seed, 5 + seed)
    assert is_legal(graph, demand.plan(graph))


def test_what_nothing_needs_yet_runs_later_and_the_deepest_input_first() -> None:
    sizes = {"x": 64, "early": 256, "flat": 256, "u": 256, "deep": 256, "sum": 64, "end": 64}
    rows = [
        ("early", "x"),
        ("flat", "x"),
        ("u", "x"),
        ("deep", "u"),
        ("sum", "flat deep"),
        ("end", "early sum"),
    ]
    graph = graph_of(sizes, rows, "sum end")
    names = [graph.ops[k].name for k in demand.plan(graph)]
    assert names == ["u", "deep", "flat", "sum", "early", "end"]


def test_what_is_made_again_deepest_first_needs_less() -> None:
    sizes = {"x": 64, "flat": 256, "u": 256, "deep": 256, "sum": 64, "more": 64, "end": 64}
    rows = [
        ("flat", "x"),
        ("u", "x"),
        ("deep", "u"),
        ("sum", "deep flat"),
        ("more", "sum"),
        ("end", "flat deep more"),
    ]
    graph = graph_of(sizes, rows, "end")
    problem = EvictionProblem(graph, (1, 2, 0, 3, 4, 5), in_place=False)
    peaks = []
    for p in (problem, problem.deeper(problem.order)):
        dropped = p.wherever(DROP)
        peaks.append(p.cost(dropped, 1 << 40).peak)
        assert replay(graph, p.steps(dropped)).peak == peaks[-1]
    assert peaks[1] < peaks[0]
