"""Search legal orders for the least peak: a widening beam over sets of finished ops, exact where it fits.

Problem: an order of all ops that minimizes the peak, nothing recomputed. Measure: the simulated peak in bytes.
Source: dynamic programming over down-sets of the dependency order with a soft budget (Ahn et al. 2020, "Ordering
Chaos"; Liberis and Lane 2019); cutting each layer to the best few and widening it is ours, and so is taking an op
at once where that cannot be wrong. Guarantee: a legal order, never worse than the graph's own; optimal when the peak
meets the lower bound or no layer had to be cut (`solve` says so). Complexity: ``work`` ops tried, each looked at
against sets of n bits; the same work gives the same order everywhere. Known limits: knows nothing of recomputation
and of results in the places of inputs; above `MOST` ops it returns the graph's own order; the cut of layers knows
only peak and bytes, which is little on graphs of hundreds of ops (`cuts` is better there).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tightship.analysis.bounds import lower_bound
from tightship.analysis.order import Ordered, dependents, predecessors
from tightship.graph import Graph
from tightship.options import Deadline, option
from tightship.simulate import extra_bytes, unplanned

__all__ = ["MOST", "Options", "plan", "solve"]

MOST: Final = 20_000
"""Ops of a graph that is searched."""


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search."""

    work: int = option(400_000, "ops tried at most")
    widest: int = option(20_000, "sets of finished ops of one size that are kept at most")
    seconds: float = option(math.inf, "wall clock at most")


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    return solve(graph, options).order


def solve(graph: Graph, options: Options | None = None, known: Ordered | None = None) -> Ordered:
    """The best order within the work limit, and what is known of it. ``known``: an order, and a bound on all orders,
    from elsewhere."""
    o = options or Options()
    if known is None:
        given, peak = tuple(range(len(graph.ops))), unplanned(graph).peak
        known = Ordered(given, peak, int(lower_bound(graph, recompute=False)))
    best = replace(known, work=0)
    if not best.order or len(best.order) > MOST or best.optimal:
        return best
    search = _Search(graph, best.bound, o.work, Deadline.after(o.seconds))
    width = 1
    while True:
        search.limit = best.peak
        order, peak, whole = search.run(width)
        if order is not None and peak < best.peak:
            best = replace(best, order=order, peak=peak)
        best = replace(best, work=search.work)
        if whole or best.optimal:
            return replace(best, bound=best.peak)
        if search.spent() or width >= o.widest:
            return best
        width *= 4


@dataclass(slots=True)
class _State:
    """Ops that are ``done`` (bits), bytes alive after them, the peak so far, ops that may come next, and the order
    they came in (linked, last first)."""

    done: int
    live: int
    peak: int
    ready: tuple[int, ...]
    path: Any
    count: int


class _Search:
    """One graph's tables; ``limit``: peaks from there on are of no interest."""

    def __init__(self, graph: Graph, floor: int, most: int, deadline: Deadline) -> None:
        uses, self.deadline = graph.uses, deadline
        self.floor, self.most, self.work, self.limit = floor, most, 0, floor
        size = [s.size for s in graph.storages]
        before = predecessors(graph)
        self.after = dependents(graph)
        self.needs = [sum(1 << b for b in row) for row in before]
        self.made = [sum(size[s] for s in d) for d in uses.defines]
        self.during = [m + extra_bytes(op) for m, op in zip(self.made, graph.ops, strict=True)]
        stay = graph.static | graph.kept
        users = [0] * len(size)
        for k in range(len(graph.ops)):
            for s in (*uses.reads[k], *uses.defines[k]):
                users[s] |= 1 << k
        # Of each op: (users, size) of what may end with it.
        self.ends = [
            [(users[s], size[s]) for s in (*r, *d) if s not in stay and size[s]]
            for r, d in zip(uses.reads, uses.defines, strict=True)
        ]
        self.start = _State(
            0,
            graph.static_bytes,
            graph.static_bytes,
            tuple(k for k, b in enumerate(before) if not b),
            None,
            0,
        )

    def run(self, width: int) -> tuple[tuple[int, ...] | None, int, bool]:
        """The best order of a beam of this width, its peak, and whether nothing was left out that could be better."""
        n, whole = len(self.needs), True
        layers: list[dict[int, _State]] = [{} for _ in range(n + 1)]
        first = self.take_harmless(self.start)
        layers[first.count][first.done] = first
        for count in range(first.count, n):
            states = list(layers[count].values())
            layers[count] = {}
            if len(states) > width:
                states.sort(key=lambda s: (s.peak, s.live))
                del states[width:]
                whole = False
            for state in states:
                for new in self.next(state):
                    known = layers[new.count].get(new.done)
                    if known is None or new.peak < known.peak:
                        layers[new.count][new.done] = new
            if self.spent():
                return None, 0, False
        last = layers[n].get((1 << n) - 1)
        if last is None:
            return None, 0, whole
        return _order(last.path), last.peak, whole

    def spent(self) -> bool:
        return self.work >= self.most or self.deadline.over

    def next(self, state: _State) -> Iterator[_State]:
        for k in state.ready:
            peak = max(state.peak, state.live + self.during[k])
            self.work += 1
            if peak < self.limit:
                yield self.take_harmless(self.step(state, k, peak))

    def step(self, state: _State, k: int, peak: int) -> _State:
        done = state.done | 1 << k
        live = state.live + self.made[k] - self.freed(k, done)
        new = [a for a in self.after[k] if not self.needs[a] & ~done]
        ready = (
            tuple(sorted([r for r in state.ready if r != k] + new))
            if new
            else tuple(r for r in state.ready if r != k)
        )
        return _State(done, live, peak, ready, (k, state.path), state.count + 1)

    def freed(self, k: int, done: int) -> int:
        return sum(size for users, size in self.ends[k] if not users & ~done)

    def take_harmless(self, state: _State) -> _State:
        """Run ops that cannot be wrong now: they fit under the peak there is anyway, and leave no more behind
        than they end. Whatever order comes after, it needs no more for having them done."""
        while True:
            room = max(state.peak, self.floor)
            for k in state.ready:
                if state.live + self.during[k] <= room:
                    self.work += 1
                    if self.freed(k, state.done | 1 << k) >= self.made[k]:
                        state = self.step(state, k, max(state.peak, state.live + self.during[k]))
                        break
            else:
                return state


def _order(path: Any) -> tuple[int, ...]:
    order = []
    while path is not None:
        k, path = path
        order.append(k)
    return tuple(reversed(order))
