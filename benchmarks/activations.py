"""A quarter of the activations: what plans cost at 27 % of the bytes that a step needs beyond what is always there.

FastSA is published to take 73 % less memory for activations at 18 % more time, as an average over its own models.
What counts as activations differs between papers, so both ways stand here: beyond parameters, batch and gradients
(which all are there at the end of a step), and beyond parameters and batch alone, where a bound allows it. Part of
budget.py: ``python benchmarks/budget.py --only activations``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.planners import default
from tightship.simulate import baseline, replay
from tightship.units import format_bytes

__all__ = ["PUBLISHED", "SHARE", "table"]

SHARE = 0.27
PUBLISHED = 18
"""Per cent of extra time at 27 % of the activations, as FastSA's authors give it."""

_HEAD = [
    "| model | everything | budget: 27 % beyond static and gradients | peak | extra time | no plan below | "
    "budget: 27 % beyond static | peak | extra time | no plan below |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
]


def table(models: dict[str, Callable[[], Graph]], seconds: float, work: int) -> str:
    """Markdown: a row for each model, by its title; each plan has so many seconds and so much work."""
    lines, found = [*_HEAD], tuple[list[float], list[float]](([], []))
    for title, make in models.items():
        graph = make()
        peak = replay(graph, baseline(graph)).peak
        gradients = sum(graph.storages[s].size for s in graph.kept - graph.static)
        cells = [title, format_bytes(peak)]
        for floor, extras in zip((graph.static_bytes + gradients, graph.static_bytes), found, strict=True):
            budget = floor + int(SHARE * max(0, peak - floor))
            cells += [format_bytes(budget), *_cells(graph, budget, seconds, work, extras)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", " ".join(_averages(found))]
    return "\n".join(lines) + "\n"


def _cells(graph: Graph, budget: int, seconds: float, work: int, extras: list[float]) -> list[str]:
    """Peak, extra time and the bound on it; ``extras`` gets the extra time."""
    if lower_bound(graph) > budget:
        return [f"no plan needs less than {format_bytes(int(lower_bound(graph)))}", "", ""]
    o = default.Options(seconds=seconds, work=work, hand_out=False)
    try:
        p = default.plan(graph, budget, o)
    except Infeasible as no:
        return [f"{format_bytes(no.best_peak)} at best", "none found", ""]
    extras.append(p.time / p.time_before - 1)
    return [
        format_bytes(p.peak),
        f"{100 * extras[-1]:+.1f} %",
        f"{100 * (p.time_bound / p.time_before - 1):+.1f} %",
    ]


def _averages(found: tuple[list[float], list[float]]) -> Iterator[str]:
    yield f"Published (FastSA): -73 % at +{PUBLISHED} % on average."
    for what, extras in zip(("static and gradients", "static alone"), found, strict=True):
        if extras:
            mean = 100 * statistics.mean(extras)
            yield f"Ours, 27 % of what is beyond {what}: {mean:+.1f} % on average of {len(extras)} models."
