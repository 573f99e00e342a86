"""The C++ engine against the reference replay: same bytes, same seconds, for any decision."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from support.chains import chain
from support.strategies import random_graph
from tightship.analysis.bounds import lower_bound
from tightship.analysis.order import deepest_first
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners import run
from tightship.planners.evict.problem import DROP, EVICT, KEEP, PASS, STAY, EvictionProblem
from tightship.simulate import baseline, replay
from tightship.verify import check

HUGE = 1 << 60


def masks(problem: EvictionProblem, seed: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    kinds = [KEEP, EVICT, PASS, DROP]
    rows = [rng.choice(kinds[: 2 + k % 3], len(problem.gaps)).astype(np.uint8) for k in range(n)]
    return [np.where(problem.stays & (bits > KEEP), STAY, bits).astype(np.uint8) for bits in rows]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_engine_costs_what_the_replay_of_its_steps_costs(seed: int, deep: bool) -> None:
    graph = random_graph(seed, 10 + seed)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), deep=deep)
    base = replay(graph, baseline(graph))
    for bits in masks(problem, seed, 8):
        found = problem.cost(bits, HUGE)
        if not found.valid:
            assert problem.steps(bits) == ()
            continue
        line = replay(graph, problem.steps(bits))
        if deep:  # that what a recipe reads is not written over yet is what the rules know best
            check(graph, run.decision_plan(graph, line.steps, line, "test"))
        assert line.peak == found.peak
        assert line.time == pytest.approx(base.time + found.extra)
        assert sum(s.kind == "recompute" for s in problem.steps(bits)) == found.runs


def moves(problem: EvictionProblem, seed: int, n: int) -> list[np.ndarray]:
    """Decisions each of which differs from the one before in a few gaps near one another."""
    rng = np.random.default_rng(seed)
    now, rows = problem.nothing(), []
    for _ in range(n):
        at, width = rng.integers(len(now)), rng.integers(1, 4)
        now = now.copy() if rng.random() < 0.9 else problem.nothing()
        now[at : at + width] = rng.choice([KEEP, EVICT, PASS, DROP], len(now[at : at + width]))
        now[problem.stays & (now > KEEP)] = STAY
        rows.append(now)
    return rows


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_decisions_evaluated_from_the_ones_before_cost_the_same(seed: int, deep: bool) -> None:
    graph = random_graph(seed, 60 + 5 * seed) if seed % 4 else chain(40 + seed)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), deep=deep)
    rows = moves(problem, seed, 150)
    limit = graph.static_bytes + (replay(graph, baseline(graph)).peak - graph.static_bytes) * 2 // 3
    walked = problem.engine.walk(rows, limit)
    assert any(c["valid"] for c in walked)
    for bits, found in zip(rows, walked, strict=True):
        alone = problem.engine.evaluate(bits, limit)
        assert found["valid"] == alone["valid"]
        if alone["valid"]:
            assert (found["peak"], found["runs"]) == (alone["peak"], alone["runs"])
            assert found["extra"] == pytest.approx(alone["extra"], abs=1e-9)
            assert found["excess"] == pytest.approx(alone["excess"], abs=1e-3)


def test_nothing_evicted_is_the_baseline() -> None:
    graph = random_graph(3, 40)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    assert replace(problem, in_place=False).steps(problem.nothing()) == baseline(graph)


def test_chain_with_everything_evicted_recomputes_each_op_once() -> None:
    graph = chain(6)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    bits = np.ones(len(problem.gaps), dtype=np.uint8)
    found = problem.cost(bits, HUGE)
    assert found.valid and found.runs >= 5
    assert found.peak <= replay(graph, baseline(graph)).peak


def test_chain_reaches_less_than_keeping_all_and_never_the_bound() -> None:
    graph = chain(64)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    keep = replay(graph, baseline(graph)).peak
    bits = problem.nothing()
    bits[[g for g, (s, _, _) in enumerate(problem.gaps.tolist()) if s % 8]] = 1
    found = problem.cost(bits, HUGE)
    assert lower_bound(graph) <= found.peak < keep / 2


def test_what_is_dropped_whenever_it_can_be_brings_a_chain_to_its_bound() -> None:
    graph = chain(24)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    peaks = {kind: problem.cost(problem.nothing() + np.uint8(kind), HUGE) for kind in (EVICT, DROP)}
    assert peaks[EVICT].peak > peaks[DROP].peak == lower_bound(graph)
    assert peaks[DROP].runs == 24 * 23 // 2  # each op again for every later one


def test_what_cannot_be_made_again_stays_for_its_last_recomputation() -> None:
    """r is drawn at random, read by f; f is evicted past r's last use: r's life is extended, not r drawn again."""
    storages = tuple(Storage(n, 64) for n in ("x", "r", "f", "g", "h"))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    ops = (
        Op("r", "rand", (0,), (1,), random=True),
        Op("f", "f", (0, 1), (2,)),
        Op("g", "g", (2, 0), (3,)),
        Op("pad", "p", (3,), ()),
        Op("h", "h", (2, 3), (4,)),
    )
    graph = Graph(ops, values, storages, (0,), (4,))
    problem = EvictionProblem(graph, tuple(range(5)))
    bits = np.array([int(s == 2) for s in problem.gaps[:, 0]], dtype=np.uint8)
    assert bits.sum() == 1
    steps = problem.steps(bits)
    kinds = [(s.kind, s.op) for s in steps if s.kind != "free"]
    assert ("recompute", 1) in kinds and ("recompute", 0) not in kinds
    assert replay(graph, steps).peak == problem.cost(bits, HUGE).peak


def test_updated_parameter_makes_late_recomputation_invalid() -> None:
    """f reads w; w is updated before f's second reader: making f again would see the new w."""
    storages = (Storage("w", 64, "parameter"), Storage("f", 64), Storage("g", 64), Storage("h", 64))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    ops = (
        Op("f", "f", (0,), (1,)),
        Op("g", "g", (1,), (2,)),
        Op("update", "u", (0, 2), (), (0,)),
        Op("h", "h", (1, 2), (3,)),
    )
    graph = Graph(ops, values, storages, (0,), (3,))
    problem = EvictionProblem(graph, (0, 1, 2, 3))
    bits = np.array([int(s == 1) for s in problem.gaps[:, 0]], dtype=np.uint8)
    assert bits.sum() == 1
    assert not problem.cost(bits, HUGE).valid


def test_what_several_recomputations_read_can_be_dropped_after_each() -> None:
    """Two late branches, each made of a large half that others read as well, are summed at the end: with both halves
    kept until the sum, the peak is one half more."""
    rows = [
        ("l0", "x"), ("l1", "x"), ("a0", "l0"), ("a1", "l1"), ("c", "a0 a1"), ("b0", "l0 a0"), ("b1", "l1 a1"),
        ("d", "c"), ("sum", "b0 b1 d"),
    ]  # fmt: skip
    names = ["x", *(name for name, _ in rows)]
    storages = tuple(Storage(name, 6400 if name[0] == "l" else 64) for name in names)
    ops = tuple(
        Op(name, "f", tuple(names.index(x) for x in reads.split()), (names.index(name),), time=1.0)
        for name, reads in rows
    )
    values = tuple(Value(name, k) for k, name in enumerate(names))
    graph = Graph(ops, values, storages, (0,), (len(names) - 1,))
    problem = EvictionProblem(graph, tuple(range(len(ops))))
    first = [names[s][0] for s, _, _ in problem.gaps.tolist()]
    held, dropped = (
        problem.cost(
            np.array([d if x == "l" else EVICT if x == "b" else KEEP for x in first], np.uint8), HUGE
        )
        for d in (EVICT, DROP)
    )
    assert held.valid and dropped.valid and held.extra == dropped.extra
    assert held.peak - dropped.peak == 6400


def accumulated() -> Graph:
    """Of ``g`` something large is made, read now and later; only after that is ``g`` added to in place."""
    sizes = {"x": 64, "g": 64, "wide": 512, "other": 512, "near": 64, "far": 64, "late": 64}
    storages = tuple(Storage(name, n, "input" if name == "x" else "unknown") for name, n in sizes.items())
    at = {name: k for k, name in enumerate(sizes)}

    def op(name: str, reads: str, makes: str, mutates: tuple[int, ...] = ()) -> Op:
        rows = (tuple(at[n] for n in row.split()) for row in (reads, makes))
        return Op(name, name, *rows, mutates=mutates, time=1.0)

    ops = (
        op("g", "x", "g"), op("wide", "g", "wide"), op("near", "wide", "near"), op("other", "near", "other"),
        op("far", "other", "far"), op("late", "wide far", "late"), op("add", "g late", "", (at["g"],)),
    )  # fmt: skip
    return Graph(ops, tuple(Value(s.name, k) for k, s in enumerate(storages)), storages, (0,), (at["g"],))


def test_what_was_made_of_something_written_over_later_may_be_made_again_until_then() -> None:
    graph = accumulated()
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    wide = next(k for k, s in enumerate(graph.storages) if s.name == "wide")
    gaps = [g for g, (s, _, _) in enumerate(problem.deeper(problem.order).gaps.tolist()) if s == wide]
    assert gaps and not any(s == wide for s, _, _ in problem.gaps.tolist())
    bits = problem.deeper(problem.order).nothing()
    bits[gaps] = EVICT
    found = problem.deeper(problem.order).cost(bits, HUGE)
    assert found.valid and found.runs == 1
    steps = problem.deeper(problem.order).steps(bits)
    assert replay(graph, steps).peak == found.peak < replay(graph, baseline(graph)).peak - 400
    check(graph, run.decision_plan(graph, steps, replay(graph, steps), "test"))


def test_what_was_written_over_is_made_again_in_the_version_that_is_read() -> None:
    graph = accumulated()
    graph = graph.with_ops((*graph.ops, replace(graph.ops[2], name="again", outputs=())))
    order = tuple(range(len(graph.ops)))
    problem = EvictionProblem(graph, order, deep=True)
    bits = problem.nothing()
    for g, (s, _, to) in enumerate(problem.gaps.tolist()):
        if graph.storages[s].name == "wide" and to == len(order) - 1:
            bits[g] = DROP
    assert bits.any()
    found = problem.cost(bits, HUGE)
    steps = problem.steps(bits)
    assert found.valid and (found.peak, found.extra) == (
        replay(graph, steps).peak,
        replay(graph, steps).time - len(order),
    )
    check(graph, run.decision_plan(graph, steps, replay(graph, steps), "test"))
    # The sum went, its first version was made of nothing but the input, and what was added had to be made again.
    again = [graph.ops[k].name for k in problem.again(bits)]
    assert again[:2] == ["g", "wide"] and again.count("add") == 1


@pytest.mark.parametrize("seed", range(12))
def test_any_decision_costs_what_its_steps_do_and_they_are_right(seed: int) -> None:
    """Graphs with writes in place and results in the middle, nearly everything evicted, results too."""
    ran = 0
    for case in range(8):
        graph = random_graph(100 * seed + case, 6 + case, calls=0.0, updates=0.2 * (case % 2))
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))), deep=True)
        chosen = np.random.default_rng(case)
        allowed = [[w for w in (EVICT, PASS, DROP) if bits >> w & 1] for bits in problem.engine.allowed]
        for _ in range(3):
            bits = problem.nothing()
            for g, ways in enumerate(allowed):
                bits[g] = chosen.choice(ways) if ways and chosen.random() < 0.9 else KEEP
            found = problem.cost(bits, HUGE)
            if not found.valid:
                continue
            line = replay(graph, steps := problem.steps(bits))
            assert line.peak == found.peak
            assert line.time == pytest.approx(math.fsum(op.time for op in graph.ops) + found.extra)
            check(graph, run.decision_plan(graph, steps, line, "test"))
            ran += found.runs > 0
    assert ran


def test_results_are_made_again_at_the_end_where_less_is_needed_then() -> None:
    """What makes a large gradient and a small result: the result comes back when the gradient is gone."""
    sizes = {"x": 64, "a": 256, "g": 256, "r": 64, "b": 256, "c": 512, "q": 16}
    storages = tuple(Storage(name, n, "input" if name == "x" else "unknown") for name, n in sizes.items())
    ops = (
        Op("a", "a", (0,), (1,), time=1.0),
        Op("g", "g", (1,), (2, 3), time=1.0),
        Op("b", "b", (2,), (4,), time=1.0),
        Op("c", "c", (4,), (5,), time=1.0),
        Op("q", "q", (5,), (6,), time=1.0),
    )
    graph = Graph(ops, tuple(Value(s.name, k) for k, s in enumerate(storages)), storages, (0,), (3, 6))
    problem = EvictionProblem(graph, tuple(range(len(ops))), deep=True)
    rows = problem.gaps.tolist()
    bits = np.array([EVICT if s == 3 and to == len(ops) else KEEP for s, _, to in rows], np.uint8)
    assert bits.any() and not any(to == len(ops) for *_, to in replace(problem, deep=False).gaps.tolist())
    found, kept = problem.cost(bits, HUGE), problem.cost(problem.nothing(), HUGE)
    assert kept.peak - found.peak == 64 and found.runs == 2
    steps = problem.steps(bits)
    check(graph, run.decision_plan(graph, steps, replay(graph, steps), "test"))


def test_what_takes_most_to_make_again_is_made_first() -> None:
    sizes = {"x": 64, "a": 256, "b": 256, "c": 256, "sum": 64}
    storages = tuple(Storage(name, n, "input" if name == "x" else "unknown") for name, n in sizes.items())
    ops = (
        Op("a", "a", (0,), (1,), time=1.0),
        Op("b", "b", (0,), (2,), time=1.0),
        Op("c", "c", (2,), (3,), time=1.0),  # needs b beside it
        Op("sum", "sum", (1, 3), (4,), time=1.0),
    )
    graph = Graph(ops, tuple(Value(s.name, k) for k, s in enumerate(storages)), storages, (0,), (4,))
    (starts, reads), _ = deepest_first(graph)
    assert reads[starts[3] : starts[4]].tolist() == [3, 1]
    assert reads[starts[2] : starts[3]].tolist() == [2]
