"""Small graphs: the search finds what trying every decision finds, never less than what trying every plan finds, and
more memory never costs more time."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from support.chains import chain
from support.optimum import least_extra
from support.strategies import random_graph
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.planners import default
from tightship.planners.evict import anneal
from tightship.planners.evict.problem import Decision, EvictionProblem
from tightship.simulate import baseline, replay
from tightship.verify import verify

FEW = anneal.Options(work=200_000, seconds=30.0)
PLAIN = {"updates": 0.0, "stats": 0.0, "effect": 0.02, "random": 0.03, "calls": 0.0}
"""Nothing writes what the caller owns: trying everything does not see that."""
WAYS = {"recompute": ("recompute",), "copies": ("recompute", "compress", "offload")}


def problem_of(graph: Graph, means: tuple[str, ...] = ("recompute",)) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))), means)


def decisions(problem: EvictionProblem, most: int) -> list[np.ndarray] | None:  # type: ignore[type-arg]
    """Every combination of what the gaps may be; None if there are too many."""
    choices = [[k for k in range(6) if a >> k & 1] for a in problem.engine.allowed.tolist()]
    if np.prod([len(c) for c in choices], initial=1) > most:
        return None
    return [np.array(bits, np.uint8) for bits in product(*choices)]


def agreed(graph: Graph, means: tuple[str, ...], most: int) -> Counter[str]:
    """How many limits were looked at, and at how many of them something had to leave memory."""
    problem, count = problem_of(graph, means), Counter[str]()
    every = decisions(problem, most)
    if every is None or len(every) == 1:
        return count
    base = replay(graph, baseline(graph)).peak

    def at(limit: int) -> list[Decision]:
        return [d for d in (problem.cost(bits, limit) for bits in every) if d.valid]

    for limit in sorted({d.peak for d in at(base) if d.peak <= base}):
        least = min((d.extra for d in at(limit) if d.peak <= limit), default=None)
        found = anneal.plan(problem_of(graph, means), limit, FEW)
        assert found.met == (least is not None), graph.name
        assert least is None or found.extra == pytest.approx(least), graph.name
        count["limits"] += 1
        count["at a cost"] += bool(least)
    return count


@pytest.mark.parametrize(
    ("ways", "seeds", "most", "least"), [("recompute", 100, 4000, 25), ("copies", 80, 600, 20)]
)
def test_brute_force_over_all_decisions_agrees_for_up_to_seven_ops(
    ways: str, seeds: int, most: int, least: int
) -> None:
    count = Counter[str]()
    for seed in range(seeds):
        graph = random_graph(seed, 7, updates=0.1)
        if len(graph.ops) <= 8:
            count += agreed(graph, WAYS[ways], most)
    assert count["at a cost"] >= least, count


def test_no_plan_is_better_than_the_best_and_most_are_as_good() -> None:
    """Against every order, and every repetition at any time: the search decides in one order, and makes again as late
    as possible. How often that is the best there is, is counted; a plan better than the best would be a wrong one."""
    o, count = default.Options(work=100_000, seconds=30.0, place=False, hand_out=False), Counter[str]()
    for seed in range(70):
        graph = random_graph(seed, 6, overwrites=0.0, **PLAIN)
        room = replay(graph, baseline(graph)).peak - graph.static_bytes
        for part in (9, 8, 7, 6):
            limit = graph.static_bytes + room * part // 10
            try:
                best = least_extra(graph, limit, 20_000)
            except RuntimeError:
                continue
            try:
                made = default.plan(graph, limit, o)
            except Infeasible as no:
                assert best is None or not no.impossible, graph.name
                count["missed" if best is not None else "none"] += 1
                continue
            assert verify(graph, made) == []
            assert best is not None and made.time - made.time_before >= best - 1e-9, graph.name
            count["equal" if made.time - made.time_before <= best + 1e-9 else "slower"] += 1
    assert count["equal"] >= 0.6 * (count["equal"] + count["slower"] + count["missed"]), count
    assert count["none"] and count["equal"] >= 15, count


@pytest.mark.parametrize("graph", [chain(25), random_graph(5, 60), random_graph(11, 80)])
def test_with_more_memory_a_frame_never_gives_a_slower_plan(graph: Graph) -> None:
    problem = problem_of(graph)
    base = replay(graph, baseline(graph)).peak
    room = base - graph.static_bytes
    last = float("inf")
    for part in (50, 60, 70, 80, 90, 100):
        found = anneal.plan(problem, graph.static_bytes + room * part // 100, FEW)
        if found.met:
            assert found.extra <= last
            last = found.extra
