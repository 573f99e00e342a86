"""The arena's alignment is the graph's, wherever something is placed or verified."""

import pytest

from support.strategies import random_graph
from tightship import graph as graphs
from tightship.plan import Plan
from tightship.planners import planner
from tightship.planners.layout import in_order, lay_out
from tightship.simulate import baseline
from tightship.verify import verify


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_another_default_alignment_takes_one_constant(
    alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "ALIGNMENT", alignment)
    graph = random_graph(3, 25)
    assert graph.alignment == alignment
    assert {b.alignment for b in in_order(graph).problem.buffers} == {alignment}
    placed: list[Plan] = [planner(name).plan(graph) for name in ("aitemplate", "memonger")]
    layout = lay_out(graph, baseline(graph))
    for residences in (layout.residences, *(made.residences for made in placed)):
        assert residences and all(r.offset % alignment == 0 for r in residences)
    assert all(verify(graph, made) == [] for made in placed)


def test_the_verifier_knows_the_alignment_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(3, 25)
    made: Plan = planner("memonger").plan(graph)
    assert verify(graph, made) == []
    monkeypatch.setattr(graphs, "ALIGNMENT", 4096)
    assert {v.code for v in verify(random_graph(3, 25), made)} >= {"misaligned"}
