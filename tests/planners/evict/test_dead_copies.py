"""No copy to the host that is never fetched."""

from __future__ import annotations

import numpy as np
import pytest

from support.strategies import random_graph
from tightship.plan import Plan, Step
from tightship.planners.evict.lowering import drop_dead_copies
from tightship.planners.evict.problem import MEANS, EvictionProblem
from tightship.planners.layout import lay_out
from tightship.simulate import baseline, replay
from tightship.verify import verify


def unfetched(steps: tuple[Step, ...]) -> int:
    out: set[int] = set()
    idle = 0
    for step in steps:
        for s in step.storages:
            if step.kind == "offload":
                out.add(s)
            elif step.kind == "fetch":
                out.discard(s)
            elif step.kind == "free" and step.form == "host" and s in out:
                out.discard(s)
                idle += 1
    return idle + len(out)


def plans(seed: int):
    graph = random_graph(seed, 10 + seed)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), means=("recompute", "offload"))
    rng = np.random.default_rng(seed)
    choices = [0, *MEANS["recompute"], *MEANS["offload"]]
    for _ in range(6):
        evict = rng.choice(choices, size=len(problem.gaps)).astype(np.uint8)
        if problem.cost(evict, 1 << 60).valid:
            yield graph, problem.steps(evict)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_left_is_fetched_and_the_plan_is_no_worse(seed: int) -> None:
    for graph, steps in plans(seed):
        kept = drop_dead_copies(steps)
        before, after = replay(graph, steps), replay(graph, kept)
        assert unfetched(kept) == 0 and after.peak == before.peak and after.time <= before.time + 1e-12
        layout = lay_out(graph, kept)
        base = replay(graph, baseline(graph))
        made = Plan(
            graph.digest, kept, layout.residences, None, after.peak, base.peak, graph.static_bytes, layout.arena,
            layout.handed, 0, after.time, base.time, host=layout.host,
        )  # fmt: skip
        assert verify(graph, made) == []
        assert drop_dead_copies(kept) == kept


def test_there_are_idle_copies_in_what_searches_decide() -> None:
    assert sum(unfetched(steps) for seed in range(30) for _, steps in plans(seed)) > 0
