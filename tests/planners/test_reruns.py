"""Plans changed run by run: as the replay counts them, verified, never worse, and better than gaps can say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from support.strategies import random_graph
from tightship.graph import Graph
from tightship.planners import frontier as frontiers
from tightship.planners import run, search
from tightship.planners.default import Options, plan
from tightship.planners.evict.problem import EVICT, EvictionProblem
from tightship.planners.reruns import runs_of
from tightship.simulate import Timeline, baseline, replay
from tightship.verify import verify

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import growth

HEAT, WORK = 0.01, 60_000


def begun(graph: Graph, seed: int, *, in_place: bool = True, deep: bool = False) -> Timeline | None:
    """Steps that recompute what random gaps say."""
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), in_place=in_place, deep=deep)
    bits, rng = problem.nothing(), np.random.default_rng(seed)
    bits[((problem.engine.allowed >> EVICT & 1) > 0) & (rng.random(len(bits)) < 0.6)] = EVICT
    steps = problem.steps(bits)
    return replay(graph, steps) if steps else None


@pytest.mark.parametrize("deep", (False, True))
@pytest.mark.parametrize("in_place", (False, True))
def test_what_comes_of_a_plan_is_counted_right_verified_and_never_worse(in_place: bool, deep: bool) -> None:
    """Of graphs with operations in place, views and updates; for a limit that the steps meet, and for a lower one."""
    faster = lower = 0
    for seed in range(60):
        graph = random_graph(seed, 12 + seed % 30, updates=0.2)
        line = begun(graph, seed, in_place=in_place, deep=deep)
        if line is None:
            continue
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))), in_place=in_place)
        runs = runs_of(line.steps)
        for limit in (line.peak, graph.static_bytes + (line.peak - graph.static_bytes) * 4 // 5):
            columns, cost, _, _ = problem.engine.resequence(runs, limit, HEAT, WORK, WORK, 60.0, seed)
            assert cost["valid"]
            found = replay(graph, problem.steps_of(columns))
            assert found.peak == cost["peak"]
            base = replay(graph, baseline(graph)).time
            assert found.time == pytest.approx(base + cost["extra"])
            assert verify(graph, run.decision_plan(graph, found.steps, found)) == []
            if limit == line.peak:
                assert found.peak <= limit and found.time <= line.time * (1 + 1e-9)
                faster += found.time < line.time * (1 - 1e-9)
            else:
                assert found.peak <= max(limit, line.peak)
                lower += found.peak < line.peak
    assert faster >= 10 and lower >= 5


def test_the_same_seed_and_work_make_the_same_steps() -> None:
    graphs = (random_graph(seed, 40) for seed in range(20))
    graph, line = next((g, line) for g in graphs if (line := begun(g, 3)) is not None)
    engine = EvictionProblem(graph, tuple(range(len(graph.ops)))).engine
    args = (runs_of(line.steps), line.peak, HEAT, WORK, WORK, 60.0)
    first, again = (engine.resequence(*args, 1)[0] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first[:2], again[:2], strict=True))


def test_an_op_that_is_missing_is_refused() -> None:
    graph = random_graph(3, 10)
    n = len(graph.ops)
    engine = EvictionProblem(graph, tuple(range(n))).engine
    with pytest.raises(ValueError, match=f"ops has {n - 1} of {n} ops; must have every op"):
        engine.resequence(np.arange(n - 1, dtype=np.int32), 1000, HEAT, 10, 10, 1.0, 0)


@pytest.mark.parametrize(("dropout", "shares"), ((0.0, (34, 28)), (0.1, (28, 26))))
def test_plans_near_the_least_memory_recompute_less(
    monkeypatch: pytest.MonkeyPatch, dropout: float, shares: tuple[int, int]
) -> None:
    """With and without: a model's step at budgets just above the least; states of random ops are no more than they
    are for those that run again."""
    torch = pytest.importorskip("torch")
    from tightship.sources import ModelStep

    class Feed(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            bent: torch.Tensor = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h**3)))
            return x + self.down(torch.nn.functional.dropout(bent, dropout) if dropout else bent)

    with torch.device("meta"):
        model, x = torch.nn.Sequential(*(Feed() for _ in range(4))), torch.empty(256, 64)
    graph = ModelStep(model, {"input": x}).program().graph
    o = Options(place=False, hand_out=False, seconds=60.0, work=20_000_000)
    above = replay(graph, baseline(graph)).peak - graph.static_bytes
    budgets = [graph.static_bytes + above * percent // 100 for percent in shares]

    def times() -> list[float]:
        made = [plan(graph.with_ops(graph.ops), budget, o) for budget in budgets]
        assert all(p.peak <= budget for p, budget in zip(made, budgets, strict=True))
        return [p.time / p.time_before for p in made]

    after = times()
    monkeypatch.setattr(search.Reruns, "first", lambda self: None)
    monkeypatch.setattr(search.Reruns, "last", lambda self: None)
    before = times()
    assert after[0] < before[0] - 0.03 and after[1] < before[1] - 0.3


def test_the_least_memory_takes_no_longer_for_what_was_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for the least leaves a plan that recomputes everything; what a little more allows is made smaller."""
    graph, least = growth.stack(6), 42_467_392
    o = Options(work=200_000, seconds=600.0, place=False, hand_out=False, redraw=False)
    found = plan(graph, least, o)
    assert found.met and found.peak <= least and verify(graph, found) == []
    asked = []
    monkeypatch.setattr(search.Search, "looser", lambda self, budget, clock: asked.append(budget))
    alone = plan(graph.with_ops(graph.ops), least, o)
    assert asked and least < asked[0] <= least * 1.02
    assert found.time < alone.time / 2


def test_the_least_memory_begins_with_what_is_known_for_a_little_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan for a little more memory, made for the same graph before, needs no search of its own."""
    graph, least = growth.stack(6), 42_467_392
    o = Options(work=200_000, seconds=600.0, place=False, hand_out=False, redraw=False)
    monkeypatch.setattr(search.Search, "looser", lambda self, budget, clock: None)
    alone = plan(graph.with_ops(graph.ops), least, o)
    plan(graph, least * 51 // 50, o)
    found = plan(graph, least, o)
    assert found.met and found.peak <= least and verify(graph, found) == []
    assert found.time < alone.time / 2


def test_a_frontier_begins_with_no_absurd_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the least memory takes far longer than it has to, it is planned again with what a little more allows,
    which has a row of its own where it is far faster still."""
    o = Options(work=2_000_000, seconds=600.0, place=False, hand_out=False, redraw=False)
    monkeypatch.setattr(search.Search, "looser", lambda self, budget, clock: None)
    least, more, *rest = frontiers.frontier(growth.stack(8), 4, o, peers=False).points
    assert least.budget < more.budget <= least.budget * 1.02 and len(rest) == 2
    assert more.time < least.time - 0.1 * least.time_before
    monkeypatch.setattr(frontiers._Search, "_eased", lambda self, least, full: None)
    alone, *rest = frontiers.frontier(growth.stack(8), 4, o, peers=False).points
    assert alone.budget == least.budget and least.time < alone.time / 2 and len(rest) == 3
