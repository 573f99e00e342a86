"""The order with the least peak that is found: list schedulers, minimum cuts, and a search that can prove it.

Problem: an order with the least peak, nothing recomputed. Measure: the simulated peak in bytes. Source: `sink`,
`lpmf`, `bfs` and `dfs` as they are, each lowered by `cuts`, then `beam`, then cuts at other places. It ends at once
where a cut proves that no order has a lower peak, which on captured models is mostly the first look. Guarantee: a
legal order, never worse than the graph's own, or than those of PyTorch's Inductor (`lpmf`, `bfs`, `dfs`) on the
same dependencies; of equal ones that which moves updates to their gradients. Complexity: n log n for the
schedulers, ``work`` for the rest; the same work gives the same order everywhere. Known limits: knows nothing of
recomputation, nor of results that take the place of inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from tightship.analysis.moments import Moments
from tightship.analysis.order import Ordered, tables
from tightship.graph import Graph
from tightship.options import Deadline, option
from tightship.planners.order import beam, bfs, cuts, dfs, lpmf, sink

__all__ = ["Options", "order_bound", "plan", "solve"]

_BEAM: Final = 3
"""The part of the work that the beam may do, as its inverse."""
_SCHEDULED: Final = 2e-5
"""Seconds for each op that a list scheduler may take: it does not begin where there are fewer."""
_FIRST: Final = 10
"""The part of the work for a first look, as its inverse, where not the best order is asked for."""
_SMALL: Final = 1000
"""Ops of graphs on which a beam is worth its time: it finds little on larger ones, and cannot prove it."""


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search, and its seed."""

    work: int = option(600_000, "ops in networks that are cut at most; a third as many are tried by the beam")
    seed: int = option(0, "seed of where orders are cut when nothing else helps")
    seconds: float = option(math.inf, "wall clock at most")
    enough: int = option(
        0, "bytes: a tenth of the work does where it finds an order within these, or shows that there is none"
    )


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    return solve(graph, options).order


def solve(graph: Graph, options: Options | None = None) -> Ordered:
    """The best order within the work limit, and what is known of it."""
    o = options or Options()
    if not graph.ops:
        return Ordered((), graph.static_bytes, graph.static_bytes)
    if o.enough:
        found = solve(graph, replace(o, work=o.work // _FIRST, enough=0))
        if not found.bound <= o.enough < found.peak:
            return found
    search = cuts.Search(Moments(graph), o.work, Deadline.after(o.seconds))
    best = _descended(graph, search)
    if best.peak > search.bound and len(graph.ops) <= _SMALL:
        known = Ordered(best.order, best.peak, search.bound)
        best = beam.solve(graph, beam.Options(o.work // _BEAM, seconds=search.deadline.left), known)
    return best if best.optimal else search.kick(best, o.seed)


def order_bound(graph: Graph) -> int:
    """Bytes of peak that no order of the graph's ops goes below, nothing recomputed."""
    return solve(graph).bound


def _descended(graph: Graph, search: cuts.Search) -> Ordered:
    """The best of all starts, each lowered, those of lower peaks before the others: work may not do for all. In a
    training step the first is that with updates at their gradients: of equal orders the one that leaves plans most
    room elsewhere."""
    given, early = tuple(range(len(graph.ops))), sink.plan(graph)
    first, second = (early, given) if any(op.phase != "forward" for op in graph.ops) else (given, early)
    best = search.lower(first)
    if best.peak <= search.bound or search.deadline.over:
        return best
    shared = tables(graph)
    starts = [second]
    for planned in (lpmf, bfs, dfs):
        if search.deadline.left >= _SCHEDULED * len(graph.ops):
            starts.append(planned.schedule(shared))
    for order in sorted(starts, key=lambda o: int(search.moments.during(o).max())):
        lowered = search.lower(order)
        if lowered.peak < best.peak:
            best = lowered
        if best.peak <= search.bound:
            break
    return best
