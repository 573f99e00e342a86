"""The cheapest few changes that lower a graph's peak, each simulated: what `tightship explain` ends with.

Problem: a handful of changes that a person can understand, such as "offload the inputs of twelve blocks". Measure:
seconds per byte that the peak falls. What is changed together are storages of one role in repeated layers which are
in memory at the peak; each such group is tried in every way of leaving memory, each change on top of those before.
Guarantee: peak and seconds are those of the steps that carry the changes out, replayed; none on optimality. Source:
the groups of ``evict.problem``. Complexity: groups x ways x changes evaluations. Known limits: one group at a time,
``GROUPS`` of them; where two have to leave for the peak to fall, neither is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tightship.analysis.structure import pattern
from tightship.graph import Graph
from tightship.planners import run
from tightship.planners.evict.problem import COMPRESS, EVICT, OFFLOAD, PASS, Bits, Decision, EvictionProblem
from tightship.simulate import Timeline, baseline, replay

__all__ = ["GROUPS", "Change", "changes"]

GROUPS = 60
"""Groups that are tried, those with most bytes at the peak first."""

_LEAST = 0.01
"""A change saves at least this share of the bytes beyond the static set."""

_DECISIONS = {"recompute": (EVICT, PASS), "compress": (COMPRESS,), "offload": (OFFLOAD,)}


@dataclass(frozen=True)
class Change:
    """``way``: order, recompute, compress or offload; ``count`` storages (of order: ops) that ``what`` names, made on
    line ``source``. ``saves`` bytes of the peak and ``extra`` seconds of a step, each on top of the changes before;
    ``peak`` and ``time`` are those with all of them."""

    way: str
    count: int
    what: str
    source: str
    saves: int
    extra: float
    peak: int
    time: float


def changes(
    graph: Graph, most: int = 3, means: Sequence[str] = (), *, reorder: bool = True
) -> tuple[Change, ...]:
    """At most ``most`` changes, in the order in which they are made. ``means``: recompute, compress, offload; without
    any named, all of them for a step that trains, and only to recompute for a graph that computes results."""
    forward = all(op.phase == "forward" for op in graph.ops)
    means = means or (("recompute",) if forward else tuple(_DECISIONS))
    line = replay(graph, baseline(graph))
    order, chosen = _ordered(graph, line) if reorder else (tuple(range(len(graph.ops))), [])
    if chosen:
        line = replay(graph, baseline(graph, order))
    problem = EvictionProblem(graph, order, tuple(means))
    bits = problem.nothing()
    least = max(1, int(_LEAST * (line.peak - graph.static_bytes)))
    while len(chosen) < most and len(problem.gaps):
        now = problem.cost(bits, line.peak)
        tried = [t for t in _tries(problem, bits, line) if line.peak - t.cost.peak >= least]
        if not tried:
            break
        best = min(tried, key=lambda t: _price(t.cost, now, line))
        after = replay(graph, problem.lower(best.cost, best.cost.peak))
        chosen.append(_change(graph, best, line, after))
        bits, line = best.cost.evict, after
    return tuple(chosen)


def _price(then: Decision, now: Decision, line: Timeline) -> float:
    """Seconds for each byte; of two that cost nothing, the one that saves more is the cheaper."""
    return (then.extra - now.extra + 1e-3 * line.time) / (line.peak - then.peak)


@dataclass(frozen=True)
class _Try:
    """A group of storages that leave in one way, and what that comes to."""

    way: str
    storages: tuple[int, ...]
    cost: Decision


def _ordered(graph: Graph, line: Timeline) -> tuple[tuple[int, ...], list[Change]]:
    """The order with less memory, as the first change, if there is one: it costs nothing."""
    given = tuple(range(len(graph.ops)))
    name = "best" if all(op.phase == "forward" for op in graph.ops) else "sink"
    order = run.order(name, graph)
    other = replay(graph, baseline(graph, order))
    saves = line.peak - other.peak
    if saves < max(1, _LEAST * (line.peak - graph.static_bytes)):
        return given, []
    follows = dict(pairwise(order))
    moved = sum(1 for k in given[:-1] if follows.get(k) != k + 1)
    what = "updates run when their gradient is there" if name == "sink" else "another order of the ops"
    extra = other.time - line.time
    return order, [Change("order", moved, what, "", saves, extra, other.peak, other.time)]


def _tries(problem: EvictionProblem, bits: Bits, line: Timeline) -> Iterator[_Try]:
    """What can be changed next: only what is in memory at the present peak makes it fall."""
    here = {s: nbytes for s, nbytes in line.at_peak if s >= 0 and s not in problem.graph.static}
    groups: dict[tuple[int, ...], int] = {}
    for row in problem.classes:
        gaps = tuple(g for g in row if not bits[g] and int(problem.gaps[g][0]) in here)
        if gaps:
            groups[gaps] = sum(here[s] for s in {int(problem.gaps[g][0]) for g in gaps})
    for gaps in sorted(groups, key=lambda row: (-groups[row], row))[:GROUPS]:
        for way in problem.means:
            if (change := _best(problem, bits, gaps, way, line)) is not None:
                yield change


def _best(
    problem: EvictionProblem, bits: Bits, gaps: tuple[int, ...], way: str, line: Timeline
) -> _Try | None:
    """A group leaves memory in one way between the uses around the peak; None where that saves nothing."""
    best: Decision | None = None
    for decision in _DECISIONS[way]:
        then = bits.copy()
        then[list(gaps)] = decision
        # With no limit at all copies are waited for at once; the second time only where the peak asks for it.
        least = problem.cost(then, 0)
        if not least.valid or least.peak >= line.peak:
            continue
        cost = problem.cost(then, least.peak)
        if cost.valid and cost.peak < line.peak and (best is None or cost.extra < best.extra):
            best = cost
    if best is None:
        return None
    return _Try(way, tuple(dict.fromkeys(int(s) for s in problem.gaps[list(gaps), 0])), best)


def _change(graph: Graph, best: _Try, line: Timeline, after: Timeline) -> Change:
    ops = [graph.uses.definer[s] for s in best.storages]
    sources = list(dict.fromkeys(graph.ops[k].source for k in ops if graph.ops[k].source))
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return Change(
        best.way,
        len(best.storages),
        pattern([graph.storages[s].name for s in best.storages]),
        (sources[0] if sources else "") + more,
        line.peak - after.peak,
        after.time - line.time,
        after.peak,
        after.time,
    )
