"""Behaviors of XLA's rematerialization on modules that XLA compiled, and on training steps of real models."""

# ruff: noqa: N802

from __future__ import annotations

from dataclasses import replace

import pytest

from support import hlo_data
from support.zoo import captured
from tightship.analysis.bounds import lower_bound
from tightship.baselines import xla as evict
from tightship.baselines import xla_remat
from tightship.baselines.xla_body import Body, Tracker
from tightship.graph import Graph
from tightship.hlo import Module
from tightship.hlo.module import Names
from tightship.hlo.remat.peak import module_peak, peaks, result_bytes
from tightship.planners.evict.problem import Decision, EvictionProblem
from tightship.simulate import baseline, replay

LOOPS = ("cpu_control", "cpu_lstm", "cpu_tx_scan")


def frame(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def planned(graph: Graph, part: float, **options: object) -> Decision:
    """What is decided for a limit between the static set and the peak."""
    base = replay(graph, baseline(graph)).peak
    limit = graph.static_bytes + int(part * (base - graph.static_bytes))
    return evict.plan(frame(graph), limit, evict.Options(**options))  # type: ignore[arg-type]


def tracker(m: Module) -> Tracker:
    return Tracker(m, Body(m.entry, Names(())))


@pytest.mark.parametrize("name", hlo_data.CPU)
def test_R02_R03_R04_buffers_of_a_module_know_their_users_and_loops_make_none(name: str) -> None:
    m = hlo_data.module(name)
    books = tracker(m)
    for k, b in enumerate(books.buffers):
        assert k in b.node.defined and b.node.opcode != "while"
        assert all(k in use.node.used for use in b.users)
    parameters = [n for n in books.body if n.opcode == "parameter"]
    assert parameters and all(books.made(n) == 0 for n in parameters)
    assert all(
        books.made(books.body.by_name[i.name]) == 0 for i in m.entry.instructions if i.opcode == "while"
    )
    assert result_bytes(m) > 0 and module_peak(m) == peaks(m)[m.entry.name] + result_bytes(m)


@pytest.mark.parametrize("name", LOOPS)
def test_R14_peaks_of_what_a_module_calls_are_added_at_the_call(name: str) -> None:
    m = hlo_data.module(name)
    found = peaks(m)
    called = {c for i in m.entry.instructions if i.opcode == "while" for c in i.called}
    assert called and found[m.entry.name] >= max(found[c] for c in called) > 0
    limit = int(0.8 * module_peak(m))
    made = xla_remat.plan(m, limit)
    assert made.peak_after == module_peak(made.module) <= made.peak_before
    assert made.met == (made.peak_after <= limit)  # R15


@pytest.mark.parametrize("name", hlo_data.GPU)
def test_R05_R06_R10_R11_R15_steps_on_a_module_end_under_the_limit_or_out_of_candidates(name: str) -> None:
    m = hlo_data.module(name, hlo_data.BEFORE)
    never = {"parameter", "constant", "while", "conditional", "custom-call", "call", "all-reduce"}
    kinds = {i.name: i.opcode for i in m.entry.instructions}
    for part in (0.9, 0.7, 0.5):
        limit = int(part * module_peak(m))
        made = xla_remat.plan(m, limit)
        assert made.met == (made.peak_after <= limit) and made.peak_after <= made.peak_before
        assert all(kinds[made.origin.get(n, n)] not in never for n in made.recomputed)
        at = {i.name: k for k, i in enumerate(made.module.entry.instructions)}
        for i in made.module.entry.instructions:
            assert all(at[o] < at[i.name] for o in (*i.operands, *i.control_predecessors))
        users = {o for i in made.module.entry.instructions for o in i.operands}
        clones = [n for n in at if n in made.origin and n != made.module.entry.root.name]
        assert all(n in users for n in clones)  # nothing that nobody reads is left


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_R07_R08_R09_R18_R20_ours_on_a_model_is_no_slower_than_xlas_rules(name: str) -> None:
    graph = captured(name)
    graph = graph.with_ops(tuple(replace(op, time=1e-3) for op in graph.ops))
    for part in (0.9, 0.8):
        theirs, ours = planned(graph, part, policy="xla"), planned(graph, part, policy="ours")
        assert ours.met >= theirs.met
        if theirs.met:
            assert ours.extra <= theirs.extra * (1 + 1e-9)
        assert lower_bound(graph) <= min(ours.peak, theirs.peak)
    single, groups = (planned(graph, 0.5, block=block) for block in (1, 8))
    assert (groups.met, -groups.peak) >= (single.met, -single.peak)


@pytest.mark.parametrize("name", ["gpt2", "resnet", "bert"])
def test_R19_ours_never_raises_the_peak_of_a_model(name: str) -> None:
    graph = captured(name)
    base = replay(graph, baseline(graph)).peak
    for part in (0.9, 0.6, 0.3, 0.0):
        assert planned(graph, part).peak <= base


def test_R17_work_on_models_grows_with_their_ops() -> None:
    work = {len(g.ops): planned(g, 0.7).work for g in map(captured, ("cnn", "gpt2", "vit", "bert"))}
    small, large = min(work), max(work)
    assert work[large] <= work[small] * 4 * large / small
