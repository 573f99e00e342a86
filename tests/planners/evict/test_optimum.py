"""Small graphs: the search finds what trying every decision finds, and more memory never costs more time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from chains import chain
from strategies import random_graph
from tightship.planners.evict import anneal
from tightship.planners.evict._frame import Frame
from tightship.simulate import baseline, replay

FEW = anneal.Options(work=200_000, seconds=30.0)
HUGE = 1 << 60


def frame_of(graph) -> Frame:
    return Frame(graph, tuple(range(len(graph.ops))))


@pytest.mark.parametrize("seed", range(30))
def test_brute_force_over_all_decisions_agrees_for_up_to_seven_ops(seed: int) -> None:
    graph = random_graph(seed, 5, updates=0.2)
    frame = frame_of(graph)
    assert len(graph.ops) <= 9
    choices = [[k for k in range(3) if a >> k & 1] for a in frame.engine.allowed.tolist()]
    if np.prod([len(c) for c in choices], initial=1) > 3000:
        pytest.skip("too many to try")
    every = [frame.cost(np.array(bits, np.uint8), HUGE) for bits in product(*choices)]
    every = [d for d in every if d.valid]
    base = replay(graph, baseline(graph)).peak
    for limit in sorted({d.peak for d in every if d.peak <= base}):
        least = min(d.extra for d in every if d.peak <= limit)
        found = anneal.plan(frame_of(graph), limit, FEW)
        assert found.met and found.extra == pytest.approx(least)


@pytest.mark.parametrize("graph", [chain(25), random_graph(5, 60), random_graph(11, 80)])
def test_with_more_memory_a_frame_never_gives_a_slower_plan(graph) -> None:
    frame = frame_of(graph)
    base = replay(graph, baseline(graph)).peak
    room = base - graph.static_bytes
    last = float("inf")
    for part in (50, 60, 70, 80, 90, 100):
        found = anneal.plan(frame, graph.static_bytes + room * part // 100, FEW)
        if found.met:
            assert found.extra <= last
            last = found.extra
