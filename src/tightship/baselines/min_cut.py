"""Save the bytes across the forward's end whose recomputation would cost more; evict the rest.

Problem: the saved set between forward and backward that minimizes bytes + price * seconds of recomputation, for a
range of prices. Measure: extra seconds among those that meet the budget, else the peak. Source: the minimum cut of
PyTorch's ``min_cut_rematerialization_partition`` (Horace He), here over storages, without its bans, which are
heuristics for fusing compilers, and with seconds priced against bytes, so that the prices trace the convex hull of
all saved sets; its knapsack over saved values at an ``activation_memory_budget`` lies on or above that hull.
`between` goes on where a budget lies between two saved sets: it takes the one for the first layers and the other for
the rest, since equal layers change sides at one price. Guarantee: each cut is minimal. Complexity: a maximum flow
per price (Dinic), small in practice. Known limits: blind to where the recomputation lands, so a peak may lie above
keeping everything; a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tightship.options import NEVER, Deadline, option
from tightship.planners.evict.problem import (
    DROP,
    EVICT,
    KEEP,
    PASS,
    STAY,
    Bits,
    Decision,
    EvictionProblem,
    Progress,
    best_of,
)

__all__ = ["Options", "between", "family", "joined", "plan", "sets"]

PLANNER = "evict/min-cut"
"""Its group and its name on the command line."""

_KINDS = (EVICT, PASS, DROP)
_CLOSE = 1.0005
"""Prices nearer than this factor are taken for one."""
_MANY = 10_000
"""Of more ops, what the backward does not read is only tried as it is saved."""
_HIGHEST, _LOWEST = 14, -6
"""Powers of two between which prices are looked for."""

Mask = NDArray[np.bool_]
_Way = tuple[int, bool]
"""How what is dropped leaves, and whether what recomputations alone read stays for them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How many saved sets are tried."""

    prices: int = option(16, "saved sets tried, from the fewest bytes to the fewest seconds")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best of the saved sets."""
    return best_of(family(problem, budget, options))


def family(
    problem: EvictionProblem, budget: int, options: Options | None = None, deadline: Deadline = NEVER
) -> Iterator[Decision]:
    """One decision per saved set and way of dropping the rest, fewest bytes first; the first, if there is none,
    keeps everything. Ends at the deadline."""
    o = options or Options()
    cuts = _Cuts(problem, deadline)
    if not problem.crossing.any():
        yield problem.cost(problem.nothing(), budget)
        return
    seen = set()
    for k in range(o.prices):
        dropped = cuts.dropped(cuts.rate * 2.0 ** (k - 4) if k else 0.0)
        if dropped is None:
            return
        if (key := dropped.tobytes()) in seen:
            continue
        seen.add(key)
        for way in _ways(problem):
            yield problem.cost(_bits(problem, dropped, way), budget)


def between(problem: EvictionProblem, budget: int, deadline: Deadline = NEVER) -> Iterator[Decision]:
    """Decisions just within the budget: between the two neighboring saved sets, one within and one beyond it, a part
    of the layers as in the one and the rest as in the other, for each way of dropping and from either end.

    Ends at the deadline, with what it has."""
    cuts = _Cuts(problem, deadline)
    if not problem.crossing.any():
        return

    def over() -> bool:
        return problem.archive.stopped or deadline.over

    for way in _ways(problem):

        def cost(dropped: Mask, way: _Way = way) -> Decision:
            return problem.cost(_bits(problem, dropped, way), budget)

        pair = cuts.around(cost, over)
        if pair is None:
            continue
        within, beyond = pair
        changed = np.flatnonzero(within != beyond)
        changed = changed[np.argsort(problem.gaps[changed, 1], kind="stable")]
        for part in (changed, changed[::-1]):
            yield _mixed(cost, budget, pair, part, over)


def sets(problem: EvictionProblem) -> list[Bits]:
    """What each of the cuts so far leaves out, once for each way of dropping it."""
    found = {dropped.tobytes(): dropped for dropped in problem.archive.cuts.values()}.values()
    return [_bits(problem, dropped, way) for dropped in found for way in _ways(problem)]


def joined(
    problem: EvictionProblem,
    budget: int,
    best: Decision,
    others: Sequence[Bits],
    work: int,
    deadline: Deadline = NEVER,
) -> Decision:
    """The best so far, or what is better: in some layers what ``others`` have, else as it is. What is recomputed
    through many layers is done once, where those behind them are over. Simulates ``work`` ops at most."""
    begins, at = (0, *problem.begins, len(problem.order)), problem.gaps[:, 1]
    spent = 0
    for first, last in _parts(len(begins) - 1):
        part = (at >= begins[first]) & (at < begins[last]) & problem.crossing
        for bits in others:
            if spent >= work or problem.archive.stopped or deadline.over:
                return replace(best, work=spent)
            found = problem.cost(np.where(part, bits, best.evict), budget, best.extra)
            best, spent = best_of((best, found)), spent + len(problem.order) + found.runs
    return replace(best, work=spent)


def _parts(layers: int) -> Iterator[tuple[int, int]]:
    """Where parts of so many layers begin and end: all fronts and backs, then those between, the shortest first."""
    yield from ((0, k) for k in range(1, layers))
    yield from ((k, layers) for k in range(1, layers))
    for length in range(1, layers - 1):
        yield from ((k, k + length) for k in range(1, layers - length))


def _mixed(
    cost: Callable[[Mask], Decision],
    budget: int,
    pair: tuple[Mask, Mask],
    part: NDArray[np.int64],
    over: Callable[[], bool],
) -> Decision:
    """The fewest of ``part`` as in the first of the pair, the rest as in the second, that the budget asks for. Peaks
    are nearly linear in how many there are, so that few are looked at; every third time the middle one."""
    within, beyond = pair
    best = cost(within)
    low, high, least, most = 0, len(part), best.peak, cost(beyond).peak
    for turn in range(2 * len(part)):
        if high - low <= 1 or over():
            break
        linear = turn % 3 < 2 and most > budget >= least
        share = (most - budget) / (most - least) if linear else 0.5
        middle = min(max(low + 1, math.ceil(low + share * (high - low))), high - 1)
        now = beyond.copy()
        now[part[:middle]] = within[part[:middle]]
        found = cost(now)
        best = best_of((best, found))
        if found.met:
            high, least = middle, found.peak
        else:
            low, most = middle, found.peak if found.valid else most
    return best


def _ways(problem: EvictionProblem) -> Iterator[_Way]:
    stay = problem.stays.any()
    for stays in (True, False) if stay and len(problem.order) <= _MANY else (bool(stay),):
        yield from ((kind, stays) for kind in _KINDS)


def _bits(problem: EvictionProblem, dropped: Mask, way: _Way) -> Bits:
    """What is dropped leaves; of what nothing but recomputations would read, the rest stays for them, or not."""
    kind, stays = way
    bits = dropped.astype(np.uint8) * np.uint8(kind)
    bits[problem.stays] = np.where(dropped[problem.stays] | (not stays), KEEP, STAY)
    return bits


@dataclass
class _Cuts:
    """What is not saved across the boundary, by price in bytes per second; the dearer recomputation, the less."""

    problem: EvictionProblem
    deadline: Deadline = NEVER

    def __post_init__(self) -> None:
        problem = self.problem
        storages = problem.graph.storages
        size = sum(float(storages[s].size) for s in problem.gaps[problem.crossing, 0].tolist())
        self.rate = max(1.0, size) / max(1e-12, problem.engine.base_time)
        self.known = problem.archive.cuts

    def dropped(self, price: float) -> Mask | None:
        """None where there is no time for the cut."""
        if price not in self.known:
            left = self.deadline.left
            saved = self.problem.engine.priced_cut(self.problem.boundary, price, left)
            if not len(saved):
                return None
            self.known[price] = self.problem.crossing & (saved[self.problem.gaps[:, 0]] == 0)
        return self.known[price]

    def around(self, cost: Callable[[Mask], Decision], over: Callable[[], bool]) -> tuple[Mask, Mask] | None:
        """Neighbors within and beyond the budget: the highest power of two as a price that is within it and the one
        above, and the range between them halved again and again; None for none within."""
        high, beyond, within = _HIGHEST, self._at(_HIGHEST), None
        for k in self._changes(_HIGHEST, _LOWEST):
            now = self._at(k)
            if now is not None and cost(now).met:
                high, within = k, now
                break
            if over():
                return None
            beyond = now
        if within is None or beyond is None:
            return None
        return self._halved(self.rate * 2.0**high, within, beyond, cost, over)

    def _halved(
        self,
        low: float,
        within: Mask,
        beyond: Mask,
        cost: Callable[[Mask], Decision],
        over: Callable[[], bool],
    ) -> tuple[Mask, Mask]:
        high = 2 * low
        while high > low * _CLOSE and not over():
            price = (low * high) ** 0.5
            now = self.dropped(price)
            if now is None:
                break
            if np.array_equal(now, within):
                low = price
            elif np.array_equal(now, beyond):
                high = price
            elif cost(now).met:
                low, within = price, now
            else:
                high, beyond = price, now
        return within, beyond

    def _at(self, power: int) -> Mask | None:
        return self.dropped(self.rate * 2.0**power)

    def _changes(self, high: int, low: int) -> Iterator[int]:
        """The powers of two, from the highest, whose set is another than that of the one above. Between prices of one
        set there is no other."""
        above, below = self._at(high), self._at(low)
        if above is None or below is None or np.array_equal(above, below):
            return
        if high - low == 1:
            yield low
            return
        middle = (high + low) // 2
        yield from self._changes(high, middle)
        yield from self._changes(middle, low)
