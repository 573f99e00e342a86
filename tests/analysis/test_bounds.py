"""Bounds against the truth: on graphs small enough to try every order and every recomputation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from support.chains import chain
from support.optimum import least_extra, optimum
from support.strategies import random_graph
from tightship import _core
from tightship.analysis.bounds import Relaxation, lower_bound, time_bound
from tightship.analysis.moment_chain import chain_bound
from tightship.graph import Graph, Op, Storage, Value
from tightship.simulate import baseline, replay

SMALL = [random_graph(seed, 3 + seed % 5, calls=0.0, updates=0.2) for seed in range(120)]
SMALL = [g for g in SMALL if len(g.ops) <= 7 and len(g.storages) <= 11]


def budgets(graph: Graph) -> list[int]:
    peak, bound = replay(graph, baseline(graph)).peak, int(lower_bound(graph))
    return sorted({peak, bound - 64, bound, *((bound * j + peak * (4 - j)) // 256 * 64 for j in (1, 2, 3))})


def truth(graph: Graph, budget: int) -> float:
    try:
        best = least_extra(graph, budget, 60_000)
    except RuntimeError:
        pytest.skip("too many states to try")
    return math.inf if best is None else best


@pytest.mark.parametrize("graph", SMALL, ids=lambda g: g.name)
def test_no_plan_beats_the_bounds(graph: Graph) -> None:
    once = sum(op.time for op in graph.ops)
    for budget in budgets(graph):
        best = truth(graph, budget)
        assert time_bound(graph, budget) <= chain_bound(graph, budget) <= (best + once) * (1 + 1e-9)
        if budget < lower_bound(graph):
            assert best == math.inf


def test_the_bounds_are_worth_something() -> None:
    """Otherwise zero would pass the test above."""
    met = total = 0
    for graph in SMALL:
        try:
            met += least_extra(graph, int(lower_bound(graph)), 60_000) is not None
        except RuntimeError:
            continue
        total += 1
    assert met > 0.8 * total > 0
    graph = chain(12)
    least = int(lower_bound(graph))
    assert time_bound(graph, least) > 24 + 6  # of 12 forward ops at least half run again


def test_all_results_are_there_at_the_end() -> None:
    """Gradients can be made again one by one, but at the end each of them is there, and so is what makes the last."""
    ops = tuple(Op(f"f{k}", "f", (0,), (k + 1,), time=1.0, workspace=8 * k) for k in range(5))
    storages = (Storage("x", 64, "input"), *(Storage(f"y{k}", 64) for k in range(5)))
    graph = Graph(
        ops, tuple(Value(s.name, k) for k, s in enumerate(storages)), storages, (0,), (1, 2, 3, 4, 5)
    )
    assert lower_bound(graph) == 64 + 5 * 64 and lower_bound(graph).op == 0
    assert lower_bound(graph, least=dict.fromkeys(range(6), 0)) == 64 + 5 * 64
    assert time_bound(graph, 6 * 64 - 1) == math.inf and time_bound(graph, 6 * 64) < math.inf


def test_time_bound_is_the_step_itself_where_everything_fits_and_endless_where_nothing_does() -> None:
    graph = chain(10)
    peak = replay(graph, baseline(graph)).peak
    assert time_bound(graph, peak) == 20.0
    assert time_bound(graph, int(lower_bound(graph)) - 1) == math.inf


def test_time_bound_does_not_fall_when_the_budget_does() -> None:
    graph = chain(24)
    peak, least = replay(graph, baseline(graph)).peak, int(lower_bound(graph))
    found = [time_bound(graph, b) for b in range(peak, least - 1, -64)]
    assert all(b >= a - 1e-9 for a, b in pairwise(found))


def test_storages_that_can_wait_elsewhere_weaken_both_bounds() -> None:
    graph = chain(24)
    away = dict.fromkeys(range(len(graph.storages)), 0)
    least = int(lower_bound(graph, least=away))
    assert least <= lower_bound(graph) and time_bound(graph, least, least=away) == 48.0
    half = {s: x.size // 2 for s, x in enumerate(graph.storages)}
    budget = replay(graph, baseline(graph)).peak // 2
    assert 48.0 <= time_bound(graph, budget, least=half) < time_bound(graph, budget)


def test_without_recomputation_the_bound_is_what_must_be_kept() -> None:
    graph = chain(12)
    assert lower_bound(graph, recompute=False) == replay(graph, baseline(graph)).peak


def test_what_is_random_must_be_there() -> None:
    graph = chain(12)
    drawn = tuple(op if op.phase != "forward" else _random(op) for op in graph.ops)
    assert lower_bound(graph.with_ops(drawn)) == replay(graph, baseline(graph)).peak


def test_what_is_random_may_be_drawn_again_from_a_state_where_that_is_allowed() -> None:
    graph = chain(12)
    drawn = graph.with_ops(tuple(op if op.phase != "forward" else _random(op, 8) for op in graph.ops))
    peak = replay(drawn, baseline(drawn)).peak
    assert lower_bound(drawn, redraw=False) == peak > lower_bound(drawn)
    assert time_bound(drawn, peak - 64, redraw=False) == math.inf > time_bound(drawn, peak - 64)


def _random(op: Op, state: int = 0) -> Op:
    return replace(op, random=True, state=state)


@pytest.mark.parametrize("seed", range(30))
def test_the_minimum_cut_is_the_least_of_all_cuts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, m = 7, 16
    tail, head = (rng.integers(0, n, m).astype(np.int32) for _ in range(2))
    capacity = rng.integers(0, 1 << 40, m)
    value, near = _core.min_cut(n, tail, head, capacity, 0, 1)

    def cut(side: int) -> int:
        inside = np.array([side >> v & 1 for v in range(n)], dtype=bool)
        return int(capacity[inside[tail] & ~inside[head]].sum())

    assert value == min(cut(side) for side in range(1 << n) if side & 1 and not side & 2)
    assert near[0] and not near[1] and cut(sum(1 << v for v in range(n) if near[v])) == value


def test_a_network_that_is_none_is_refused() -> None:
    one, big = np.array([0], dtype=np.int32), np.array([9], dtype=np.int32)
    room = np.array([1])
    for args in ((2, one, big, room, 0, 1), (2, one, one, -room, 0, 1), (2, one, one, room, 0, 0)):
        with pytest.raises(ValueError):
            _core.min_cut(*args)


def test_every_moment_bounds_alone() -> None:
    graph = chain(8)
    relaxed = Relaxation(graph)
    peak = replay(graph, baseline(graph)).peak
    assert all(relaxed.least_bytes(relaxed.moment(k)) <= peak for k in range(len(graph.ops)))


def test_a_result_that_may_be_made_before_or_after_is_there_or_what_it_is_made_of() -> None:
    """A drawn mask and a result made of it alone, beside a large op that needs neither of them then."""
    sizes = {"x": 64, "mask": 6400, "y": 64, "result": 6400, "z": 64}
    storages = tuple(Storage(name, size) for name, size in sizes.items())
    values = tuple(Value(name, k) for k, name in enumerate(sizes))
    ops = (
        Op("draw", "draw", (0,), (1,), random=True, time=1.0),
        Op("y", "f", (0, 1), (2,), time=1.0),
        Op("result", "g", (1,), (3,), time=1.0),
        Op("z", "large", (2,), (4,), workspace=12800, time=1.0),
    )
    graph = Graph(ops, values, storages, (0,), (3, 4))
    (best,) = optimum(graph)
    assert lower_bound(graph, redraw=False) == best.nbytes == 64 + 6400 + 64 + 64 + 12800


@pytest.mark.parametrize("best", [300, 437, 803, 900])
def test_the_best_moment_is_looked_for_beside_the_best_ones_so_far(
    best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few from everywhere say where the bound is largest, not how large it is."""
    monkeypatch.setattr(Relaxation, "least_seconds", lambda _, at, *args: max(0.0, 99.0 - abs(at.op - best)))
    graph = chain(600)
    budget = replay(graph, baseline(graph)).peak // 3
    assert time_bound(graph, budget) == 1200.0 + 99.0


def test_what_is_made_by_several_writes_costs_all_of_them_again() -> None:
    """a is made by f, read, and written in place by g and h; only the last version is read in the end."""
    names = ("x", "a", "early", "large", "late")
    storages = tuple(Storage(n, 640 if n == "large" else 64) for n in names)
    values = tuple(Value(n, i) for i, n in enumerate(names))
    ops = (
        Op("f", "f", (0,), (1,), time=1.0),
        Op("read", "r", (1,), (2,), time=1.0),
        Op("g", "g", (1,), (), mutates=(1,), time=2.0),
        Op("h", "h", (1,), (), mutates=(1,), time=4.0),
        Op("wide", "w", (2,), (3,), time=1.0, control=(3,)),
        Op("end", "e", (1, 3), (4,), time=1.0),
    )
    graph = Graph(ops, values, storages, (0,), (4,))
    once = sum(op.time for op in ops)
    relaxed = Relaxation(graph, in_place=False)
    at = relaxed.moment(4)  # while `wide` runs, a may be there or be made again
    assert relaxed.least_seconds(at, at.own + 64) == 0
    assert relaxed.least_seconds(at, at.own) == pytest.approx(1.0 + 2.0 + 4.0)
    assert time_bound(graph, at.own + 64, in_place=False) == pytest.approx(once)
