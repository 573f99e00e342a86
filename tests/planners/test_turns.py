"""Results in two turns: the steps of both are a plan of the whole, of no more bytes than either turn has beside what
the other leaves, and gradients that are in the way are made late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.strategies import random_graph
from tightship.analysis.bounds import Relaxation, lower_bound
from tightship.errors import Infeasible
from tightship.graph import Graph, Op, Storage, Value
from tightship.options import NEVER
from tightship.planners import default, run
from tightship.planners.turns import joined, turns, ways
from tightship.simulate import baseline, replay
from tightship.verify import check


def in_turns(graph: Graph, late: frozenset[int]) -> tuple[int, int] | None:
    """Peaks of the whole and of the larger turn, both in the given order."""
    again = Relaxation(graph, redraw=False).again
    pair = turns(graph, late, again)
    if pair is None:
        return None
    own = [baseline(turn.graph) for turn in pair]
    steps = joined(graph, pair, own)
    line = replay(graph, steps)
    check(graph, run.decision_plan(graph, steps, line))
    most = max(replay(turn.graph, s).peak + turn.beside for turn, s in zip(pair, own, strict=True))
    return line.peak, most


def test_two_turns_of_any_graph_are_a_plan_of_it() -> None:
    tried = 0
    for seed in range(400):
        graph = random_graph(seed, 4 + seed % 20, calls=0.0)
        results = sorted(graph.kept - graph.static)
        late = frozenset(results[seed % 3 :: 2])
        if not late or late == frozenset(results):
            continue
        peaks = in_turns(graph, late)
        if peaks is None:
            continue
        whole, most = peaks
        assert whole <= most
        tried += 1
    assert tried > 30


def stacked(layers: int) -> Graph:
    """Small inputs of layers that each need much; the first result needs little of its own, and is made early."""
    storages = [Storage("x", 64, "input"), Storage("early", 256)]
    ops = [Op("early", "e", (0,), (1,), time=1.0)]
    results = [1]
    for k in range(layers):
        a, b, r = (len(storages) + j for j in range(3))
        storages += [Storage(f"a{k}", 512), Storage(f"b{k}", 512), Storage(f"r{k}", 64)]
        ops += [
            Op(f"a{k}", "a", (0,), (a,), time=1.0),
            Op(f"b{k}", "b", (a,), (b,), time=1.0),
            Op(f"r{k}", "r", (a, b), (r,), time=1.0),
        ]
        results.append(r)
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), tuple(results))


def test_what_is_in_the_way_is_made_late() -> None:
    graph = stacked(6)
    line = replay(graph, baseline(graph))
    relaxed = Relaxation(graph, redraw=False)
    first, pair = next(ways(graph, relaxed, line, NEVER))
    assert first <= line.peak - 256 and 1 in pair[1].stay
    peaks = in_turns(graph, frozenset([1]))
    assert peaks is not None and peaks[0] <= line.peak - 256


def test_what_the_caller_sees_written_is_not_read_late_as_it_was() -> None:
    storages = (Storage("x", 64, "input"), Storage("a", 64), Storage("b", 64))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    ops = (
        Op("a", "a", (0,), (1,), time=1.0),
        Op("w", "w", (0,), (), mutates=(0,), time=1.0),
        Op("b", "b", (0,), (2,), time=1.0),
    )
    graph = Graph(ops, values, storages, (0,), (1, 2))
    again = Relaxation(graph, redraw=False).again
    assert turns(graph, frozenset([1]), again) is None
    assert turns(graph, frozenset([2]), again) is not None


@pytest.mark.parametrize("brief", [False, True])
def test_what_briefly_waits_costs_what_its_steps_do(brief: bool) -> None:
    """The engine's numbers are the replay's, whichever way recomputations share what they read."""
    valid = 0
    for seed in range(120):
        graph = random_graph(seed, 6 + seed % 12, calls=0.0, updates=0.2)
        o = default.Options(place=False)
        problem = default.problem_of(graph, tuple(range(len(graph.ops))), o).deeper(
            tuple(range(len(graph.ops)))
        )
        problem = replace(problem, brief=brief)
        for to in (1, 3):
            c = problem.cost(problem.wherever(to), 1 << 62)
            if c.valid:
                valid += 1
                assert replay(graph, problem.steps(c.evict)).peak == c.peak
    assert valid > 50


def test_a_plan_in_turns_is_an_answer_and_is_not_refused_later() -> None:
    graph = stacked(8)
    o = default.Options(place=False, work=2_000_000)
    try:
        found = default.plan(graph, int(lower_bound(graph)), o).peak
    except Infeasible as no:
        found = no.best_peak
    assert default.plan(graph, found, o).peak <= found
