"""The trade-off as a whole: monotone, verified, beside what fixed policies come to."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from support.chains import chain
from support.strategies import random_graph
from tightship import api
from tightship.analysis.order import backward_start
from tightship.baselines import checkpoint
from tightship.cli import main
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.default import Options
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.frontier import Frontier, extra_flops, frontier, needs, with_saved
from tightship.report.numbers import frontier_rows
from tightship.report.picture import frontier_picture
from tightship.report.text import frontier_tables, rendered
from tightship.serde import save_graph
from tightship.simulate import baseline, replay
from tightship.verify import verify

QUICK = Options(work=1_500_000, seconds=30.0, hand_out=False)


def layered(layers: int = 6, ops: int = 4) -> Graph:
    """A chain whose ops stand in numbered modules."""
    from dataclasses import replace

    graph = chain(layers * ops)
    named = []
    for k, op in enumerate(graph.ops):
        target = "aten.mm.default" if k % 4 == 0 else "f"
        named.append(replace(op, module=f"net.{int(op.name[1:]) // ops}", flops=10, target=target))
    return graph.with_ops(tuple(named))


def found(points: int = 5) -> Frontier:
    return frontier(layered(), points, QUICK)


def test_more_budget_never_gives_a_slower_plan() -> None:
    """The peak and the time of other planners are not monotone in the budget; here they are by construction."""
    f = found(7)
    assert len(f.points) == 7
    for less, more in pairwise(f.points):
        assert less.budget < more.budget and less.time >= more.time  # type: ignore[operator]
    for p in f.points:
        assert verify(f.graph, p) == [] and p.met and needs(p) <= (p.budget or 0)
        assert f.lower_bound <= p.peak and p.time_before <= p.time_bound <= p.time


@pytest.mark.parametrize("seed", range(12))
def test_monotone_on_graphs_of_any_kind(seed: int) -> None:
    f = frontier(random_graph(seed, 25), 4, Options(work=200_000, seconds=20.0, hand_out=False))
    assert all(a.time >= b.time and needs(a) <= (a.budget or 0) for a, b in pairwise(f.points))
    assert all(verify(f.graph, p) == [] for p in f.points)


def test_the_ends_are_keeping_everything_and_the_least_that_was_reached() -> None:
    f = found()
    assert f.points[-1].count("recompute") == 0 and f.points[-1].time == f.points[-1].time_before
    assert min(p.peak for p in f.points) == f.points[0].peak < f.points[-1].peak
    assert f.best(f.points[0].peak - 1) is None and f.best(1 << 40) == f.points[-1]


def test_one_point_keeps_everything_and_none_is_refused() -> None:
    assert len(frontier(chain(9), 1, QUICK).points) == 1
    for points in (0, -3, 1_000):
        with pytest.raises(BadInput, match="points"):
            frontier(chain(9), points, QUICK)


def test_no_policy_is_better_than_a_plan_for_as_much_memory() -> None:
    f = found()
    assert {o.name for o in f.others} == {"per block", "selective"}
    for o in f.others:
        assert o.peak < f.points[-1].peak and o.time > f.points[-1].time
        assert o.ours is not None and needs(o.ours) <= o.peak and o.ours.time <= o.time


def test_checkpoint_keeps_what_goes_between_blocks_and_runs_each_block_once_more() -> None:
    graph = layered(layers=5, ops=4)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    d = checkpoint.plan(problem, 0)
    assert d.steps is not None
    again = [s.op for s in d.steps if s.kind == "recompute"]
    assert again and len(again) == len(set(again)) == 5 * 3 + 1  # what the next block reads is kept
    line = replay(graph, d.steps)
    assert (line.peak, line.time) == (d.peak, 40.0 + 16) and d.peak < replay(graph, baseline(graph)).peak
    kept = checkpoint.plan(problem, 0, checkpoint.Options(selective=True))
    assert 0 < kept.runs < d.runs and kept.peak > d.peak
    assert checkpoint.plan(problem, 0, checkpoint.Options(depth=2)).runs == 0


def routed() -> Graph:
    """A block as of a mixture of experts: scores are read by the backward before they are overwritten."""
    X, A, T, E, M, N, P, Y, G, R = range(10)
    rows: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
        ("net.0", (X,), (A,), ()), ("net.0", (A,), (T,), ()), ("", (T,), (E,), ()), ("net.0", (T,), (), (T,)),
        ("net.0", (T, A), (M,), ()), ("net.0", (M,), (N,), ()), ("net.0", (N,), (P,), ()), ("net.1", (P,), (Y,), ()),
        ("", (Y,), (G,), ()), ("", (G, M, N, E), (R,), ()),
    ]  # fmt: skip
    ops = tuple(
        Op(f"op{k}", "f", reads, makes, writes, time=1.0, module=m, phase="forward" if m else "backward")
        for k, (m, reads, makes, writes) in enumerate(rows)
    )
    storages = tuple(Storage(f"s{k}", 640, "input" if k == X else "activation") for k in range(10))
    values = tuple(Value(f"v{k}", k) for k in range(10))
    return Graph(ops, values, storages, (X,), (R,))


def test_a_backward_op_that_runs_early_does_not_move_the_checkpoints() -> None:
    graph = routed()
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    assert backward_start(graph, problem.order) == 8
    d = checkpoint.plan(problem, 0)
    assert d.valid and d.steps is not None
    assert [s.op for s in d.steps if s.kind == "recompute"] == [7, 0, 1, 3, 4, 5]
    assert with_saved(problem, frozenset()).runs


def test_a_policy_that_fails_loses_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, right = layered(), checkpoint.plan

    def fails(problem: EvictionProblem, budget: int, o: checkpoint.Options) -> Any:
        if o.selective:
            raise BadInput("an op is computed once, and recomputed only after that", "op 'x'")
        return right(problem, budget, o)

    monkeypatch.setattr(checkpoint, "plan", fails)
    f = frontier(graph, 2, QUICK, {"all": frozenset(range(len(graph.storages)))})
    assert {o.name for o in f.others} == {"per block", "all"}
    assert [n.partition(": ")[0] for n in f.notes] == ["selective", "selective, inner"]
    assert all("computed once" in n for n in f.notes) and len(f.points) > 1


@pytest.mark.slow
def test_a_mixture_of_experts_has_all_rows() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tightship import sources

    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, vocab_size=64, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="batched_mm")
        ids = torch.zeros((2, 16), dtype=torch.long)
    program = sources.ModelStep(model, {"input_ids": ids, "labels": ids}).program()
    f = frontier(program.graph, 2, QUICK, sources.torch_saved(program))
    assert {"per block", "selective", "torch 0.5"} <= {o.name for o in f.others} and not f.notes


def test_block_names() -> None:
    assert checkpoint.block_of("a.h.3.mlp.c", 1) == "a.h.3"
    assert checkpoint.block_of("a.stages.0.layers.2.conv", 2) == "a.stages.0.layers.2"
    assert checkpoint.block_of("a.h.3.mlp", 2) == checkpoint.block_of("head", 1) == ""


def test_with_everything_saved_nothing_is_recomputed() -> None:
    graph = chain(10)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    assert with_saved(problem, frozenset(range(len(graph.storages)))).extra == 0
    assert with_saved(problem, frozenset()).extra > 0


def test_extra_flops_are_those_of_recomputation() -> None:
    graph = layered()
    f = frontier(graph, 3, QUICK)
    p = f.points[0]
    assert extra_flops(graph, p.steps) == p.count("recompute") / len(graph.ops)


# --- what is shown ---


def test_rows_tables_and_picture() -> None:
    f = found(3)
    rows = json.loads(json.dumps(frontier_rows(f)))
    assert [r["budget"] for r in rows["points"]] == [p.budget for p in f.points]
    assert {"peak_after", "time_after", "time_bound", "met", "extra_flops"} <= set(rows["points"][0])
    assert [r["name"] for r in rows["peers"]] == ["per block", "selective"]
    text = rendered(frontier_tables(f))
    assert "per block" in text and "no plan needs less than" in text
    drawn = frontier_picture(f)
    assert drawn.startswith("<svg") and drawn.count('class="activation"') == 3 and "selective" in drawn
    assert "<script" not in drawn and "http://www.w3.org/2000/svg" in drawn


def test_the_api_takes_a_graph_and_refuses_unknown_options() -> None:
    f = api.frontier(chain(12), points=2, work=200_000)
    assert len(f.points) == 2 and f.points[-1].met
    with pytest.raises(BadInput, match="options"):
        api.frontier(chain(12), magic=1)


def test_command_line(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    save_graph(layered(), tmp_path / "graph.json")
    args = ["frontier", str(tmp_path / "graph.json"), "--points", "3", "--work", "500000"]
    assert main([*args, "--json", "--svg", str(tmp_path / "f.svg")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows["points"]) == 3 and (tmp_path / "f.svg").read_text().startswith("<svg")
    assert main([*args, "--no-peers"]) == 0
    assert "per block" not in capsys.readouterr().out
    assert main(["frontier", str(tmp_path / "graph.json"), "--points", "0"]) == 2
    assert "a frontier has 1 to 200" in capsys.readouterr().err


def test_a_policy_that_is_faster_than_what_was_found_is_the_plan() -> None:
    """With next to no search the others' own plans stand in, placed and verified."""
    graph = layered(layers=8)
    f = frontier(graph, 3, Options(work=10, seconds=0.01, hand_out=False))
    for o in f.others:
        within = [p for p in f.points if needs(p) <= o.peak]
        assert o.ours is None or (o.ours.time <= o.time and verify(graph, o.ours) == [])
        assert o.ours is not None or not within
