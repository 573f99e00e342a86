"""The exact planner: what trying everything finds, and never worse than the search it begins with."""

from __future__ import annotations

import builtins
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from support.chains import chain, limit_of, trained
from support.optimum import least_extra
from support.strategies import random_graph
from tightship.analysis.bounds import Relaxation, time_bound
from tightship.analysis.moment_chain import ChainBound, chain_bound
from tightship.errors import Unsupported
from tightship.graph import Graph
from tightship.options import NEVER
from tightship.planners import default
from tightship.planners.evict import anneal, exact
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.hints import parse_hints, resolve
from tightship.simulate import baseline, replay

TESTS = Path(__file__).parents[2]
PROVE = exact.Options(again=4, effort=5.0, seconds=30.0, work=20_000)


def problem_of(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def in_order(graph: Graph) -> Graph:
    """The graph, with one order only in which its ops may run at first."""
    rows = (replace(op, control=(k - 1,)) if k else op for k, op in enumerate(graph.ops))
    return graph.with_ops(tuple(rows))


def test_nothing_is_imported_before_it_is_asked_for_and_its_absence_is_said(monkeypatch) -> None:
    real = builtins.__import__

    def absent(name, *rest, **more):
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    graph = chain(12)
    assert exact.plan(problem_of(graph), limit_of(graph, 1.0)).extra == 0
    with pytest.raises(Unsupported, match=r"tightship\[solver\]"):
        exact.plan(problem_of(graph), limit_of(graph, 0.5))


@pytest.mark.parametrize("seed", range(24))
def test_trying_everything_agrees_for_up_to_six_ops(seed: int) -> None:
    """All orders of repetitions are tried. (Nothing writes what the caller owns: the trying does not see that.)"""
    pytest.importorskip("ortools")
    graph = in_order(random_graph(seed, 4 + seed % 3, updates=0.0, stats=0.0, inplace=0.0, overwrites=0.0))
    for part in (0.6, 0.8, 0.95):
        limit = limit_of(graph, part)
        try:
            least = least_extra(graph, limit)
        except RuntimeError:
            continue  # too many states
        found = exact.plan(problem_of(graph), limit, PROVE)
        assert found.met == (least is not None)
        assert least is None or found.extra == pytest.approx(least)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_in_place_is_planned_soundly(seed: int) -> None:
    """As a whole only, which may cost more than the least of all."""
    pytest.importorskip("ortools")
    graph = in_order(random_graph(seed, 6, updates=0.2, inplace=0.4))
    for part in (0.6, 0.9):
        limit = limit_of(graph, part)
        found = exact.plan(problem_of(graph), limit, PROVE)
        if found.met:
            assert replay(graph, found.steps or problem_of(graph).steps(found.evict)).peak <= limit
            assert (least_extra(graph, limit) or 0.0) <= found.extra + 1e-9


def test_windows_of_a_larger_graph_never_make_it_worse() -> None:
    pytest.importorskip("ortools")
    graph = random_graph(3, 60)
    limit = limit_of(graph, 0.6)
    few = exact.Options(effort=0.5, work=50_000, whole=20, window=16)
    start = anneal.plan(problem_of(graph), limit, anneal.Options(work=50_000, seconds=15.0))
    found = exact.plan(problem_of(graph), limit, few)
    assert not start.beats(found)
    again = exact.plan(problem_of(graph), limit, few)
    assert (found.steps, found.extra) == (again.steps, again.extra)


def test_what_is_to_be_kept_stays() -> None:
    pytest.importorskip("ortools")
    graph = chain(8)
    named = graph.with_ops(tuple(replace(op, module=f"net.{op.name}") for op in graph.ops))
    only = resolve(named, parse_hints("net.f2=keep,net.f4=keep"))
    assert only
    problem = EvictionProblem(named, tuple(range(len(named.ops))), only=only)
    found = exact.plan(problem, limit_of(named, 0.8), PROVE)
    again = {s.op for s in found.steps or problem.steps(found.evict) if s.kind == "recompute"}
    assert found.met and again and not again & {2, 4}


def test_ops_that_write_one_storage_are_one_unit() -> None:
    graph = random_graph(2, 30, inplace=0.5)
    problem = exact.Retention(problem_of(graph))
    for s, writers in enumerate(graph.uses.writers):
        if s not in graph.static and writers:
            assert len({problem.unit_at[w] for w in writers}) == 1
    assert sorted(at for unit in problem.units for at in unit.at) == list(range(len(graph.ops)))


def test_a_solver_that_is_stopped_anywhere_does_not_end_the_process() -> None:
    """OR-tools ends it where it is told to repair hints and stopped while it loads the model that does so."""
    pytest.importorskip("ortools")
    code = (
        "from support.chains import chain; from tightship.planners.evict import exact;"
        "from tightship.planners.evict.problem import EvictionProblem as Problem; graph = chain(12);"
        "problem = Problem(graph, tuple(range(len(graph.ops)))); total = sum(s.size for s in graph.storages);"
        "found = [exact.plan(problem, int(part * total), exact.Options(effort=k / 4000, seconds=60, work=500))"
        " for part in (0.3, 0.5) for k in range(1, 17)]; print(len(found))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "32\n"), ended.stderr


def test_ctrl_c_is_heard_after_the_solver_as_before() -> None:
    pytest.importorskip("ortools")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    graph = chain(6)
    try:
        exact.plan(
            problem_of(graph), limit_of(graph, 0.6), exact.Options(work=20_000, effort=0.2, seconds=20.0)
        )
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # the process would end here
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_proved_of_several_moments_holds_for_every_plan_and_is_mostly_the_least() -> None:
    pytest.importorskip("ortools")
    met = equal = 0
    for seed in range(24):
        graph = trained(seed)
        for part in (0.65, 0.75, 0.85):
            limit = limit_of(graph, part)
            try:
                least = least_extra(graph, limit, 100_000)
            except RuntimeError:  # too many states
                continue
            proved = exact.least_extra(graph, limit, NEVER, redraw=True, in_place=True)
            if least is None:
                continue
            assert proved <= least * (1 + 1e-9)
            met += least > 0
            equal += least > 0 and proved >= least * (1 - 1e-9)
    assert met >= 15 and equal >= met * 2 // 3


def test_what_is_proved_without_the_solver_holds_for_every_plan_and_is_more_than_one_moment_shows() -> None:
    more = met = 0
    for seed in range(24):
        graph = trained(seed)
        once = sum(op.time for op in graph.ops)
        for part in (0.65, 0.75, 0.85):
            limit = limit_of(graph, part)
            try:
                least = least_extra(graph, limit, 100_000)
            except RuntimeError:  # too many states
                continue
            one, several = time_bound(graph, limit), chain_bound(graph, limit)
            assert one <= several
            if least is None:
                continue
            assert several - once <= least * (1 + 1e-9) + 1e-9
            met += least > 0
            more += several > one * (1 + 1e-6)
    assert met >= 15 and more >= met // 3


def test_storages_that_are_whole_fill_multiples_of_what_divides_them() -> None:
    """Room for one and a half of them is room for one: single moments and prices on bytes see halves."""
    graph = chain(9)
    once, peak = sum(op.time for op in graph.ops), replay(graph, baseline(graph)).peak
    for nbytes in range(peak - 64 * 6, peak, 16):
        whole = graph.static_bytes + (nbytes - graph.static_bytes) // 64 * 64
        assert chain_bound(graph, nbytes) == pytest.approx(chain_bound(graph, whole))
    assert any(
        chain_bound(graph, n) > time_bound(graph, n) + 1e-6 * once for n in range(peak - 384, peak, 16)
    )


@pytest.mark.parametrize("seed", range(8))
def test_moments_through_any_op_are_passed_one_after_the_other(seed: int) -> None:
    graph = trained(seed)
    chains = ChainBound(None, Relaxation(graph))
    for op in range(len(graph.ops)):
        rows = chains.through(op, range(len(graph.ops)))
        assert op in rows and all(chains.before(b)[a] for a, b in pairwise(rows))


def test_with_the_solver_a_plan_is_proved_the_best_that_is_so_without() -> None:
    pytest.importorskip("ortools")
    found = {}
    for way in ("anneal", "exact"):
        o = default.Options(evict=way, place=False, seconds=60.0, gap=0.0)
        found[way] = default.plan(chain(9), "60%", o)
    assert found["exact"].time <= found["anneal"].time
    assert found["anneal"].time_bound < found["exact"].time_bound == pytest.approx(found["exact"].time)
    assert found["exact"].termination == "optimal"
