"""Results in two turns: the steps of both are a plan of the whole, of no more bytes than either turn has beside what
the other leaves, and gradients that are in the way are made late."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise

import pytest

from support.strategies import random_graph
from tightship.analysis.bounds import Relaxation, lower_bound
from tightship.errors import Infeasible
from tightship.graph import Graph, Op, Storage, Value
from tightship.options import NEVER
from tightship.planners import default, run
from tightship.planners.turns import joined, splits, turns, ways
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
        o = default.Options(place=False, redraw=False)
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


def behind(layers: int, front: int = 4_096, weight: int = 1_024, small: int = 512) -> Graph:
    """A step whose first op, which takes long, makes much; what layers behind it read is small; the gradients of
    their weights take as much as what these are made of. The gradient of the first op comes last, and needs what
    that made."""
    ops, storages = list[Op](), [Storage("x", 64, "input")]

    def run(name: str, reads: tuple[int, ...], size: int, time: float, phase: str = "forward") -> int:
        made = len(storages)
        storages.append(Storage(name, size))
        ops.append(Op(name, name, reads, (made,), phase=phase, time=time))
        return made

    made = run("front", (0,), front, 50.0)
    stream = [run("down", (made,), small, 1.0)]
    for k in range(layers):
        stream.append(run(f"layer{k}", (stream[-1],), small, 1.0))
    slope, results = run("loss", (stream[-1],), small, 1.0, "backward"), list[int]()
    for k in reversed(range(layers)):
        results.append(run(f"weight{k}", (stream[k], slope), weight, 1.0, "backward"))
        slope = run(f"slope{k}", (stream[k], slope), small, 1.0, "backward")
    up = run("up", (slope,), front, 1.0, "backward")
    results.append(run("first", (made, up), 64, 1.0, "backward"))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), tuple(results))


def test_of_what_saves_as_much_what_runs_least_again_is_carried() -> None:
    graph = behind(6)
    relaxed, line = Relaxation(graph, redraw=False), replay(graph, baseline(graph))
    rows = splits(graph, relaxed, line, NEVER)
    assert rows and all(a.again < b.again and a.saved < b.saved for a, b in pairwise(rows))
    for row in rows:
        pair = turns(graph, row.late, relaxed.again, row.carried)
        assert pair is not None
        assert row.saved == sum(graph.storages[s].size for s in row.late) - sum(
            graph.storages[s].size for s in row.carried
        )
        twice = sum(graph.ops[k].time for k in set(pair[0].ops).intersection(pair[1].ops))
        assert twice <= row.again
    assert any(row.again < 50.0 and row.saved > 4 * 1_024 for row in rows)  # without the first op


@pytest.mark.parametrize("less", [4, 5])
def test_a_turn_leaves_what_takes_long_for_the_other_one(less: int) -> None:
    graph = behind(6)
    line = replay(graph, baseline(graph))
    budget = line.peak - less * 1_024
    found = default.plan(graph, budget, default.Options(place=False, hand_out=False, work=20_000_000))
    check(graph, found)
    assert found.peak <= budget
    assert found.time < line.time + 50.0  # nothing that is large is made twice


@pytest.mark.parametrize("kept", ["front", "down", "layer*"])
def test_what_a_hint_keeps_is_made_in_no_second_turn(kept: str) -> None:
    graph = behind(6)
    graph = graph.with_ops(tuple(replace(op, module=op.name) for op in graph.ops))
    budget = replay(graph, baseline(graph)).peak - 3 * 1_024
    o = default.Options(place=False, hand_out=False, work=2_000_000, hints=f"{kept}=keep")
    try:
        found = default.plan(graph, budget, o)
    except Infeasible:
        return
    again = [graph.ops[step.op].name for step in found.steps if step.kind == "recompute"]
    assert not [name for name in again if fnmatch(name, kept)]


def test_carried_storages_of_any_graph_make_a_plan_of_it() -> None:
    tried = 0
    for seed in range(300):
        graph = random_graph(seed, 6 + seed % 20, calls=0.0, updates=0.2)
        relaxed = Relaxation(graph, redraw=False)
        for row in splits(graph, relaxed, replay(graph, baseline(graph)), NEVER):
            pair = turns(graph, row.late, relaxed.again, row.carried)
            if pair is None:
                continue
            steps = joined(graph, pair, [baseline(turn.graph) for turn in pair])
            made = run.decision_plan(graph, steps, replay(graph, steps))
            check(graph, made)
            tried += 1
    assert tried > 100


def test_hints_hold_in_two_turns_of_any_graph() -> None:
    tried = again = 0
    for seed in range(300):
        graph = random_graph(seed, 6 + seed % 20, calls=0.0)
        made = [s for s in range(len(graph.storages)) if graph.uses.writers[s] and s not in graph.static]
        kept, leave = frozenset(made[seed % 3 :: 3]), frozenset(made[(seed + 1) % 3 :: 3]) - graph.kept
        results = sorted(graph.kept - graph.static)
        late = frozenset(results[seed % 2 :: 2])
        relaxed = Relaxation(graph, redraw=False, kept=kept)
        pair = turns(graph, late, relaxed.again, leave=leave)
        if not late or pair is None:
            continue
        steps = joined(graph, pair, [baseline(turn.graph) for turn in pair])
        check(graph, run.decision_plan(graph, steps, replay(graph, steps)))
        runs = [step for step in steps if step.kind == "recompute"]
        assert kept.isdisjoint(s for step in runs for s in step.storages)
        assert leave.isdisjoint(pair[0].stay)
        tried, again = tried + 1, again + bool(runs)
    assert tried > 30 and again > 10


@pytest.mark.parametrize("hint", ["front=keep", "down=keep", "down=recompute", "layer*=recompute"])
def test_two_turns_are_found_where_hints_are_given(hint: str) -> None:
    graph = behind(6)
    graph = graph.with_ops(tuple(replace(op, module=op.name) for op in graph.ops))
    line = replay(graph, baseline(graph))
    o = default.Options(place=False, hand_out=False, work=5_000_000, hints=hint)
    found = default.plan(graph, line.peak - 3 * 1_024, o)
    check(graph, found)
    assert found.time < line.time + 50.0  # what takes long is not made twice
    pattern, _, way = hint.partition("=")
    named = {s for k, op in enumerate(graph.ops) if fnmatch(op.name, pattern) for s in graph.uses.defines[k]}
    again = {s for step in found.steps if step.kind == "recompute" for s in step.storages}
    assert named.isdisjoint(again) if way == "keep" else named & again
