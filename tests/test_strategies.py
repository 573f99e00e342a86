"""Random graphs have every trait that plans are tested on, often enough; the search believes what is simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from support.strategies import random_graph
from tightship.analysis.bounds import replayable
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.planners import default
from tightship.planners.evict import anneal
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import baseline, replay
from tightship.verify import verify

EVERY_WAY = "recompute,redraw,compress,offload"


def traits(graph: Graph) -> Iterator[str]:
    uses = graph.uses
    shared = Counter(v.storage for v in graph.values)
    made = [s for s, x in enumerate(graph.storages) if s not in graph.static and x.size]
    again = [replayable(graph, s) for s in made]
    yield from ["recomputable"] * any(again) + ["not recomputable"] * (not all(again))
    yield from ["aliased"] * (max(shared.values()) > 1) + ["empty"] * any(not x.size for x in graph.storages)
    for k, op in enumerate(graph.ops):
        new = set(uses.defines[k])
        yield from ["several results"] * (len(new) > 1) + ["control"] * bool(op.control)
        yield from ["in place"] * bool(set(op.mutates) - graph.static) + ["statistics"] * bool(op.updates)
        yield from ["overwrites"] * bool(op.overwrites) + ["effect"] * op.effect + ["calls"] * bool(op.calls)
        yield from ["random"] * op.random + ["drawn again"] * bool(op.random and op.state)
        yield from ["view"] * (bool(op.outputs) and not new) + ["requests"] * bool(op.requests)


def test_every_trait_is_in_many_graphs() -> None:
    count = Counter(t for seed in range(100) for t in set(traits(random_graph(seed, 25))))
    every = {
        "recomputable", "not recomputable", "aliased", "empty", "several results", "control", "in place",
        "statistics", "overwrites", "effect", "calls", "random", "drawn again", "view", "requests",
    }  # fmt: skip
    assert set(count) == every and min(count.values()) >= 30, count


@pytest.mark.parametrize(
    "means", [("recompute",), ("recompute", "compress"), ("recompute", "compress", "offload")]
)
def test_the_search_believes_what_is_simulated(means: tuple[str, ...]) -> None:
    """Peak, seconds and bytes outside of what was decided are those of its steps, replayed."""
    used = Counter[str]()
    for seed in range(30):
        graph = random_graph(seed, 25)
        frame = EvictionProblem(graph, tuple(range(len(graph.ops))), means)
        base = replay(graph, baseline(graph))
        limit = graph.static_bytes + (base.peak - graph.static_bytes) * (4 + seed % 5) // 10
        found = anneal.plan(frame, limit, anneal.Options(work=60_000, seconds=30.0))
        steps = frame.steps(found.evict, limit)
        line = replay(graph, steps)
        assert found.valid and (line.peak, line.host_peak) == (found.peak, found.host), graph.name
        assert line.time == pytest.approx(base.time + found.extra), graph.name
        used.update(s.kind for s in steps)
    assert used[means[-1]] >= 20, used


@pytest.mark.parametrize("allow", ["recompute", EVERY_WAY])
def test_every_plan_is_verified_and_simulates_to_what_it_says(allow: str) -> None:
    o, kinds = default.Options(work=60_000, seconds=30.0, allow=allow), Counter[str]()
    for seed in range(20):
        pure = (
            {"effect": 0.0, "random": 0.0, "calls": 0.0, "updates": 0.0, "workspace": 0.1} if seed % 2 else {}
        )
        graph = random_graph(100 + seed, 24, **pure)
        base, needed = replay(graph, baseline(graph)).peak, graph.static_bytes
        for _ in range(4):  # the least, with a place for everything; then half of what is beyond it
            try:
                made = default.plan(graph, needed, o)
            except Infeasible as no:
                assert no.best_peak >= min(no.lower_bound, no.budget), graph.name
                needed = max(no.best_peak, no.placed or 0, needed + 64)
                continue
            line = replay(graph, made.steps)
            assert verify(graph, made) == [] and made.met, graph.name
            assert (line.peak, line.time) == (made.peak, pytest.approx(made.time)), graph.name
            assert made.lower_bound <= made.peak and made.time_bound <= made.time * (1 + 1e-9), graph.name
            kinds.update({"met": 1, **{k: made.count(k) for k in ("recompute", "offload", "compress")}})
            needed = (needed + base) // 2
    assert kinds["met"] >= 25 and kinds["recompute" if allow == "recompute" else "offload"] >= 5, kinds
