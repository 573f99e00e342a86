"""The search: more work is never worse, more memory never slower, and the same seed gives the same plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.chains import chain
from support.strategies import random_graph
from tightship.analysis.structure import block_of
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners import frontier
from tightship.planners.default import Options
from tightship.planners.evict import anneal
from tightship.planners.evict.problem import EvictionProblem, families
from tightship.simulate import baseline, replay


def problem_of(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def tight(graph: Graph, part: int = 60) -> int:
    peak = replay(graph, baseline(graph)).peak
    return graph.static_bytes + (peak - graph.static_bytes) * part // 100


@pytest.mark.parametrize(
    "graph", [chain(25), *(random_graph(seed, 60) for seed in (3, 5, 11))], ids=lambda g: g.name
)
def test_more_work_is_never_worse(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs do depends on no limit of work: the runs of a small one are the first of a large one."""
    monkeypatch.setattr(anneal, "_LEAST", 0)
    monkeypatch.setattr(anneal, "_MOST", 20_000)
    last = (1, float("inf"))
    for work in (0, 5_000, 20_000, 60_000, 100_000, 200_000, 400_000):
        found = anneal.plan(problem_of(graph), tight(graph), anneal.Options(work=work, seconds=60.0))
        now = (0, found.extra) if found.met else (1, float(found.peak))
        assert now <= last, work
        last = now


@pytest.mark.parametrize("seed", range(4))
def test_a_frontier_is_monotone(seed: int) -> None:
    graph = random_graph(seed, 40)
    found = frontier.frontier(graph, 6, Options(work=600_000, seconds=60.0, place=False))
    times = [p.time for p in found.points]
    assert times == sorted(times, reverse=True)
    assert all(frontier.needs(p) <= (p.budget or 0) and p.time_bound <= p.time for p in found.points)


_SAME = """
import hashlib
from support.chains import chain
from support.strategies import random_graph
from tightship.planners.evict import anneal
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import baseline, replay
for graph in (chain(25), random_graph(5, 60)):
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    limit = graph.static_bytes + (replay(graph, baseline(graph)).peak - graph.static_bytes) * 6 // 10
    found = anneal.plan(problem, limit, anneal.Options(work=300_000, seconds=60.0, seed=3))
    print(hashlib.sha256(found.evict.tobytes()).hexdigest(), found.peak, found.extra)
"""


def test_the_same_seed_and_work_give_the_same_plan_in_every_process() -> None:
    tests = Path(__file__).resolve().parents[2]
    said = set()
    for hashed in ("0", "1", "random"):
        path = os.pathsep.join([str(tests), *filter(None, sys.path)])
        env = os.environ | {"PYTHONHASHSEED": hashed, "PYTHONPATH": path}
        said.add(
            subprocess.run([sys.executable, "-c", _SAME], env=env, check=True, capture_output=True).stdout
        )
    assert len(said) == 1 and len(said.pop().split()) == 6


def named(modules: list[str]) -> Graph:
    """An op per name, each of which reads the one before, and a last one that reads all."""
    storages = [Storage("x", 64, "input"), *(Storage(f"s{k}", 64) for k in range(len(modules) + 1))]
    ops = [Op(f"o{k}", "f", (k,), (k + 1,), time=1.0, module=name) for k, name in enumerate(modules)]
    ops.append(Op("last", "f", tuple(range(1, len(modules))), (len(modules) + 1,), time=1.0))
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), (len(modules) + 1,))


def test_twins_play_one_role_in_different_layers() -> None:
    graph = named(["in", *(f"h.{k}.{part}" for k in range(3) for part in ("a", "b", "b")), "out", "out"])
    problem = problem_of(graph)
    (family,) = families(graph, [(s, a, b) for s, a, b in problem.gaps.tolist()], problem.classes)
    roles = [[(graph.ops[int(problem.gaps[g][0]) - 1].module) for g in row if g >= 0] for row in family]
    assert sorted(roles) == [[f"h.{k}.{part}" for k in range(3)] for part in ("a", "b", "b")]
    assert len({g for row in family for g in row}) == 9  # two ops of one role in a layer are told apart
    rows, starts = problem.isomorphic_layers
    assert starts.tolist() == [0, 3] and rows[1].tolist() == [g for row in family for g in row]


def test_without_names_classes_of_one_length_are_layers() -> None:
    graph = chain(9)
    assert not any(block_of(op.module, 1) for op in graph.ops)
    classes = [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert families(graph, [], classes) == (((0, 1, 2), (3, 4, 5)),)


def test_what_is_restored_from_far_back_is_a_plan_and_not_the_end_of_the_process() -> None:
    graph = chain(12_000)
    problem = problem_of(graph)
    bits = ((problem.gaps[:, 1] < 12_000) & (problem.gaps[:, 2] >= 12_000)).astype("uint8")
    decision = problem.cost(bits, 0)
    assert decision.valid and decision.runs == int(bits.sum())


def test_layers_without_a_gap_in_common_are_no_family() -> None:
    """A model whose numbered modules keep nothing of their own from one use to the next."""
    pytest.importorskip("torch")
    from support.zoo import captured

    problem = problem_of(captured("checkpointed"))
    rows, starts = problem.isomorphic_layers
    assert len(problem.gaps) and (starts[1:] > starts[:-1]).all() and len(rows[0]) - 1 == starts[-1]
    assert anneal.plan(problem, 1, anneal.Options(work=20_000, seconds=60.0)).valid
