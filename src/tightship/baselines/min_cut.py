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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tightship.deadline import NEVER, Deadline
from tightship.options import option
from tightship.planners.evict.problem import (
    DROP,
    EVICT,
    PASS,
    Bits,
    Decision,
    EvictionProblem,
    Progress,
    best_of,
)

__all__ = ["Options", "between", "family", "plan"]

PLANNER = "evict/min-cut"
"""Its group and its name on the command line."""

_KINDS = (EVICT, PASS, DROP)
_CLOSE = 1.0005
"""Prices nearer than this factor are taken for one."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Options:
    """How many saved sets are tried."""

    prices: int = option(16, "saved sets tried, from the fewest bytes to the fewest seconds")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best of the saved sets."""
    return best_of(family(problem, budget, options))


def family(problem: EvictionProblem, budget: int, options: Options | None = None) -> Iterator[Decision]:
    """One decision per saved set and way of dropping the rest, fewest bytes first; the first, if there is none,
    keeps everything."""
    o = options or Options()
    cuts = _Cuts(problem)
    if not problem.crossing.any():
        yield problem.cost(problem.nothing(), budget)
        return
    seen = set()
    for k in range(o.prices):
        dropped = cuts.dropped(cuts.rate * 2.0 ** (k - 4) if k else 0.0)
        if (key := dropped.tobytes()) in seen:
            continue
        seen.add(key)
        for kind in _KINDS:
            yield problem.cost(_bits(dropped, kind), budget)


def between(problem: EvictionProblem, budget: int, deadline: Deadline = NEVER) -> Iterator[Decision]:
    """Decisions just within the budget: between the two neighboring saved sets, one within and one beyond it, a part
    of the layers as in the one and the rest as in the other, for each way of dropping and from either end.

    Ends at the deadline, with what it has."""
    cuts = _Cuts(problem)
    if not problem.crossing.any():
        return

    def over() -> bool:
        return problem.archive.stopped or deadline.over

    for kind in _KINDS:

        def cost(dropped: Mask, kind: int = kind) -> Decision:
            return problem.cost(_bits(dropped, kind), budget)

        pair = cuts.around(cost, over)
        if pair is None:
            continue
        within, beyond = pair
        changed = np.flatnonzero(within != beyond)
        changed = changed[np.argsort(problem.gaps[changed, 1], kind="stable")]
        for part in (changed, changed[::-1]):
            yield _mixed(cost, within, beyond, part, over)


def _mixed(
    cost: Callable[[Mask], Decision],
    within: Mask,
    beyond: Mask,
    part: NDArray[np.int64],
    over: Callable[[], bool],
) -> Decision:
    """The fewest of ``part`` as in ``within``, the rest as in ``beyond``, that the budget asks for."""
    best, low, high = cost(within), 0, len(part)
    while high - low > 1 and not over():
        middle = (low + high) // 2
        now = beyond.copy()
        now[part[:middle]] = within[part[:middle]]
        found = cost(now)
        best = best_of((best, found))
        low, high = (low, middle) if found.met else (middle, high)
    return best


def _bits(dropped: Mask, kind: int) -> Bits:
    return dropped.astype(np.uint8) * np.uint8(kind)


@dataclass
class _Cuts:
    """What is not saved across the boundary, by price in bytes per second; the dearer recomputation, the less."""

    problem: EvictionProblem
    known: dict[float, Mask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        storages = problem.graph.storages
        size = sum(float(storages[s].size) for s in problem.gaps[problem.crossing, 0].tolist())
        self.rate = max(1.0, size) / max(1e-12, problem.engine.base_time)

    def dropped(self, price: float) -> Mask:
        if price not in self.known:
            saved = self.problem.engine.priced_cut(self.problem.boundary, price)
            self.known[price] = self.problem.crossing & (saved[self.problem.gaps[:, 0]] == 0)
        return self.known[price]

    def around(self, cost: Callable[[Mask], Decision], over: Callable[[], bool]) -> tuple[Mask, Mask] | None:
        """Neighbors within and beyond the budget, found by halving a range of prices; None for none within."""
        high = self.rate * 2.0**14
        beyond = self.dropped(high)
        for k in range(13, -7, -1):
            low = self.rate * 2.0**k
            within = self.dropped(low)
            if cost(within).met:
                break
            if over():
                return None
            high, beyond = low, within
        else:
            return None
        while high > low * _CLOSE and not over():
            price = (low * high) ** 0.5
            now = self.dropped(price)
            if cost(now).met:
                low, within = price, now
            else:
                high, beyond = price, now
        return within, beyond
