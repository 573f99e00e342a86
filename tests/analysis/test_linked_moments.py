"""Bounds from moments taken together: never above the best plan there is, and more than each by itself shows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest

from support.chains import chain, limit_of, trained
from support.optimum import least_extra
from support.strategies import random_graph
from tightship import _core
from tightship.analysis.bounds import Relaxation
from tightship.analysis.linked_moments import _Program, linked_bound
from tightship.analysis.moment_chain import ChainBound, chain_bound
from tightship.graph import Graph
from tightship.options import NEVER, Deadline
from tightship.planners import default
from tightship.simulate import replay, unplanned


def seconds_of(graph: Graph, limit: int, last: int, *, between: bool) -> float:
    """What all moments that precede an op, and its own, and those after it, prove together."""
    relaxed = Relaxation(graph)
    moments = ChainBound(None, relaxed).through(last, range(len(graph.ops)))
    part, _ = _Program(relaxed, moments, limit, between=between, deadline=NEVER).proved(
        9.0, 10_000_000, NEVER
    )
    return part * sum(op.time for op in graph.ops)


@pytest.mark.parametrize("between", [False, True])
def test_no_plan_is_faster(between: bool) -> None:
    met = near = 0
    graphs = [trained(seed) for seed in range(18)] + [
        random_graph(seed, 5, updates=0.3) for seed in range(12)
    ]
    for nth, graph in enumerate(g for g in graphs if len(g.ops) <= 12):
        for part in (0.65, 0.8):
            limit = limit_of(graph, part)
            try:
                least = least_extra(graph, limit, 20_000)
            except RuntimeError:  # too many states
                continue
            if not least:
                continue
            proved = seconds_of(graph, limit, nth % len(graph.ops), between=between)
            assert proved <= least * (1 + 1e-9)
            met += 1
            near += proved >= least * 0.99
    assert met >= 10 and near >= met // 4, (met, near)


def uneven(seed: int) -> Graph:
    """A chain of storages and ops that are not alike."""
    graph, rng = chain(14), random.Random(seed)
    storages = tuple(replace(s, size=64 * rng.randint(1, 6)) for s in graph.storages)
    return replace(
        graph, storages=storages, ops=tuple(replace(op, time=rng.randint(1, 5)) for op in graph.ops)
    )


def test_moments_together_prove_more_than_their_sum() -> None:
    """What is in memory at one moment was needed before it, and does not come from nowhere."""
    o = default.Options(place=False, hand_out=False, work=200_000)
    for seed in (1, 2, 3):
        graph = uneven(seed)
        limit = limit_of(graph, 0.4)
        line, known = replay(graph, default.plan(graph, limit, o).steps), chain_bound(graph, limit)
        assert known * 1.02 < linked_bound(graph, limit, line, known) <= line.time


def test_a_plan_far_above_its_bound_gets_a_higher_one() -> None:
    graph = uneven(2)
    limit = limit_of(graph, 0.4)
    plan = default.plan(graph, limit, default.Options(place=False, hand_out=False, work=200_000))
    assert chain_bound(graph, limit) * 1.02 < plan.time_bound <= plan.time


def test_where_nobody_reads_the_bound_none_is_looked_for(monkeypatch) -> None:
    """The plan is the same."""
    graph, o = uneven(2), default.Options(place=False, hand_out=False, work=200_000)
    limit = limit_of(graph, 0.4)
    plan = default.plan(graph, limit, o)
    monkeypatch.setattr("tightship.planners.search.linked_bound", None)
    quick = default.plan(graph, limit, o, prove=False)
    assert quick.steps == plan.steps and quick.time_bound < plan.time_bound


def test_a_bound_is_never_less_than_what_is_known() -> None:
    graph = chain(12)
    limit, line = limit_of(graph, 0.5), unplanned(graph)
    total = math.fsum(graph.columns.time)
    for known in (total, 1.5 * line.time, math.inf):
        assert linked_bound(graph, limit, line, known) >= known
    assert linked_bound(graph, limit, line, total * 1.001, deadline=Deadline(0.0)) == total * 1.001


@dataclass(frozen=True)
class AfterLooks(Deadline):
    """A deadline that is over after so many looks at it."""

    looks: Iterator[int] = field(default_factory=count)
    most: int = 0

    @property
    def over(self) -> bool:
        return next(self.looks) >= self.most

    @property
    def left(self) -> float:
        return 0.0 if self.over else 1.0


def test_a_deadline_may_end_it_anywhere() -> None:
    graph = uneven(2)
    limit = limit_of(graph, 0.4)
    line = replay(graph, default.plan(graph, limit, default.Options(place=False, hand_out=False)).steps)
    known, reached = chain_bound(graph, limit), set()
    for most in range(400):
        deadline = AfterLooks(most=most)
        found = linked_bound(graph, limit, line, known, deadline=deadline)
        assert known <= found <= line.time
        reached.add(found)
        if next(deadline.looks) < most:  # it ended by itself
            break
    assert len(reached) > 1 and max(reached) == linked_bound(graph, limit, line, known)


# x + y <= 1.5, both from 0 to 1
ROWS = (np.array([0, 2]), np.array([0, 1], dtype=np.int32))
SMALL = {
    "coefficient": np.ones(2), "limit": np.array([1.5]), "cost": np.array([3.0, 2.0]),
    "low": np.zeros(2), "high": np.ones(2),
}  # fmt: skip


def test_a_linear_program_is_bounded_by_its_dual() -> None:
    """Minimize 3x + 2y where x + y is at least 1.5: 2 + 1.5."""
    program = SMALL | {"coefficient": -np.ones(2), "limit": np.array([-1.5])}
    value, prices = _core.linear_bound(ROWS, *program.values(), rounds=2000, enough=10.0)
    assert 3.499 < value <= 3.5 and prices[0] == pytest.approx(3, rel=1e-2)
    few, _ = _core.linear_bound(ROWS, *program.values(), rounds=40, enough=10.0)
    assert few <= 3.5
    assert _core.linear_bound(ROWS, *program.values(), rounds=0, enough=10.0)[0] == 0


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"cost": np.ones(1)}, "rows"),
        ({"coefficient": np.ones(3)}, "coefficient"),
        ({"limit": np.ones(2)}, "rows"),
        ({"low": np.zeros(1)}, "low"),
        ({"high": np.array([1.0, math.inf])}, r"high\[1\] is inf.*must be finite"),
    ],
)
def test_a_program_that_does_not_fit_together_is_refused(wrong: dict[str, np.ndarray], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        _core.linear_bound(ROWS, *(SMALL | wrong).values(), rounds=1, enough=1.0)
