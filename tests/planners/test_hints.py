"""Hints are obeyed, or refused with a reason (G2, G11)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.chains import chain
from support.strategies import random_graph
from tightship.cli import main
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.graph import Graph
from tightship.planners.default import Options, plan
from tightship.planners.evict.problem import DROP, EVICT, PASS, EvictionProblem
from tightship.planners.hints import parse_hints, resolve
from tightship.serde import save_graph

QUICK = Options(work=300_000, seconds=30.0)


def layered(n: int) -> Graph:
    graph = chain(n)
    return graph.with_ops(
        tuple(replace(o, module=f"net.{k}" if o.phase == "forward" else "") for k, o in enumerate(graph.ops))
    )


def gone(graph: Graph, hints: str, kind: str, budget: str = "80%", **more: object) -> set[str]:
    made = plan(graph, budget, replace(QUICK, hints=hints, **more))
    return {graph.storages[s].name for step in made.steps if step.kind == kind for s in step.storages}


def test_G02_only_what_a_hint_names_must_be_recomputed() -> None:  # noqa: N802
    graph = layered(12)
    assert {"f2", "f3"} <= gone(graph, "net.2=recompute, net.3=recompute", "recompute", "100%")
    again = gone(graph, "net.2=keep,net.3=keep,net.4=keep", "recompute")
    assert again and not again & {"f2", "f3", "f4"}


def test_G11_what_a_hint_names_is_offloaded() -> None:  # noqa: N802
    assert gone(layered(12), "net.5=offload", "offload", "100%") == {"f5"}


def test_a_pattern_means_the_modules_inside_too() -> None:
    graph = layered(6)
    inner = graph.with_ops(tuple(replace(o, module=o.module and f"{o.module}.act") for o in graph.ops))
    assert set(resolve(inner, [("net.2", "keep")])) == {3}
    assert set(resolve(inner, [("net.*", "keep")])) == set(range(1, 7))


def test_G13_what_cannot_be_done_is_refused_with_the_reason() -> None:  # noqa: N802
    graph = layered(6)
    ops = (replace(graph.ops[0], random=True), *graph.ops[1:])
    with pytest.raises(BadInput, match="f0 draws random numbers"):
        resolve(graph.with_ops(ops), [("net.0", "recompute")])
    with pytest.raises(BadInput, match="no codec makes f1 smaller"):
        resolve(graph, [("net.1", "compress")])
    with pytest.raises(BadInput, match=r"unknown module 'other\.\*'"):
        resolve(graph, [("other.*", "keep")])
    with pytest.raises(BadInput, match="PATTERN=WAY"):
        parse_hints("net.0=forget")
    with pytest.raises(BadInput, match="recompute, compress, offload"):
        plan(graph, "80%", replace(QUICK, allow="magic"))


def test_a_hint_that_later_ones_undo_is_refused() -> None:
    graph = layered(6)
    with pytest.raises(BadInput, match=r"net\.2=keep.*undone by later ones"):
        resolve(graph, [("net.2", "keep"), ("net.*", "recompute")])
    general_first = resolve(graph, [("net.*", "recompute"), ("net.2", "keep")])
    assert general_first[3] == ("keep",) and general_first[4] == ("recompute",)
    assert resolve(graph, [("net.2", "keep"), ("net.*", "keep")]) == resolve(graph, [("net.*", "keep")])


def test_a_pattern_that_matches_nothing_is_told_what_there_is() -> None:
    with pytest.raises(BadInput, match=r"'nett\.1'.*such as net\.1, net\.\d+, net\.\d+"):
        resolve(layered(6), [("nett.1", "keep")])
    with pytest.raises(BadInput, match="this graph has none"):
        resolve(chain(6), [("net.1", "keep")])


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_graph(layered(12), tmp_path / "g.json")
    args = ["plan", str(tmp_path / "g.json"), "-b", "100%", "--work", "300000", "--seconds", "30"]
    out = str(tmp_path / "p.json")
    assert main([*args, "--hints", "net.2=keep,net.3=offload", "--json", "-o", out]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["met"] and rows["offloaded"] == 1
    for hints, said in (
        ("nope=keep", "unknown module 'nope'"),
        ("net.2", "PATTERN=WAY"),
        ("net.2=keep,*=recompute", "undone by later ones"),
        ("net.2=compress", "no codec makes f2 smaller"),
    ):
        assert main([*args, "--hints", hints]) == 2
        assert said in capsys.readouterr().err
    assert main([*args[:2], "-b", "40%", *args[4:], "--hints", "*=keep"]) == 1
    assert "without the hint *=keep: fits" in capsys.readouterr().err


@pytest.mark.parametrize("deep", [False, True])
def test_what_is_kept_is_not_made_again_for_what_reads_it(deep: bool) -> None:
    """After its last use in the order, too, where a recomputation asks for it: it stays until then."""
    rng, again = np.random.default_rng(1), 0
    for seed in range(100):
        graph = random_graph(seed, 6 + seed % 20, calls=0.0, updates=0.2)
        made = [s for s in range(len(graph.storages)) if graph.uses.writers[s] and s not in graph.static]
        kept = {s for s in made if graph.storages[s].size and rng.random() < 0.3}
        order = tuple(range(len(graph.ops)))
        problem = EvictionProblem(graph, order, only=dict.fromkeys(kept, ("keep",)))
        problem = problem.deeper(order) if deep else problem
        for way in (EVICT, PASS, DROP):
            bits = problem.wherever(way)
            if problem.cost(bits, 1 << 62).valid:
                runs = [step for step in problem.steps(bits) if step.kind == "recompute"]
                assert kept.isdisjoint(s for step in runs for s in step.storages)
                again += bool(runs)
    assert again > 100


@pytest.mark.parametrize("budget", ["95%", "90%"])
def test_hints_hold_in_plans_of_any_graph(budget: str) -> None:
    """In whatever way a plan is found: other orders, deep recomputation, two turns, rearranged runs."""
    again = 0
    for seed in range(20):
        graph = random_graph(seed, 24 + seed % 10, calls=0.0)
        graph = graph.with_ops(tuple(replace(op, module=f"net.{k % 5}") for k, op in enumerate(graph.ops)))
        o = replace(QUICK, work=50_000, hints=f"net.{seed % 5}=keep", place=False)
        try:
            kept = resolve(graph, parse_hints(o.hints))
            made = plan(graph, budget, o)
        except (BadInput, Infeasible):
            continue
        runs = [s for step in made.steps if step.kind == "recompute" for s in step.storages]
        assert kept.keys().isdisjoint(runs)
        again += bool(runs)
    assert again


def test_hints_that_no_order_obeys_are_said_to_be_too_much() -> None:
    """What has to be recomputed may need what cannot be there any more: no error of a seed that needs all blocks."""
    for seed in range(12):
        graph = random_graph(seed, 24 + seed % 10, calls=0.0)
        graph = graph.with_ops(tuple(replace(op, module=f"net.{k % 5}") for k, op in enumerate(graph.ops)))
        hints = f"net.{seed % 5}=keep,net.{(seed + 1) % 5}=recompute"
        with suppress(BadInput, Infeasible, Unsupported):
            plan(graph, "85%", replace(QUICK, work=100_000, hints=hints, place=False))
