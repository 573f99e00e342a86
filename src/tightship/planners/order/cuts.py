"""Lower an order's peak by minimum cuts: run before the op at the peak what leaves least behind, the rest after it.

Problem: an order with the least peak, nothing recomputed. Measure: the simulated peak in bytes. Source: ours, on
closures as minimum cuts (Picard 1976; `analysis.moments`). For the op at the peak the cut gives the ops that should
have run before it. They are moved, all others keep their order, and the next peak is cut inside the sets chosen so
far, until the peak is lower everywhere or a cut says that it cannot be. Where that ends, the order is cut at
another op and the search goes on from there. Guarantee: a legal order, never worse than the one it begins with;
least of all when the cut of some op, with nothing chosen before, is as large as the peak (`Ordered.optimal`).
Complexity: a minimum cut for each op moved past, ``work`` ops in all; the same work gives the same order
everywhere. Known limits: knows nothing of recomputation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tightship.analysis.moments import Ints, Moments, Passing
from tightship.analysis.order import Mask, Ordered
from tightship.graph import Graph
from tightship.options import NEVER, Deadline, option

__all__ = ["Options", "Search", "plan"]

_PRICES: Final = (0, 64, 4096, 1 << 16, 1 << 20)
"""Bytes that a set may have more for each op that need not move."""
_CHECKED: Final = 8
"""Ops near the peak whose cuts are taken for the bound."""
_BESIDE: Final = 1000
"""Ops that could be looked at in the time that a cut takes beside its network."""
_FEW: Final = 4
"""Cuts that are made in any case."""


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search, and its seed."""

    work: int = option(600_000, "ops in all networks that are cut at most; a few cuts are always made")
    seed: int = option(0, "seed of where orders are cut when nothing else helps")
    seconds: float = option(math.inf, "wall clock at most")


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    if not graph.ops:
        return ()
    o = options or Options()
    search = Search(Moments(graph), o.work, Deadline.after(o.seconds))
    return search.kick(search.lower(range(len(graph.ops))), o.seed).order


class Search:
    """Cuts of one graph: how much was looked at (``work``), and the largest of those that bind every order."""

    def __init__(self, moments: Moments, most: int, deadline: Deadline = NEVER) -> None:
        self.moments, self.work, self.bound, self.deadline = moments, 0, moments.at_end(), deadline
        self.most = max(most, _FEW * (moments.ops + _BESIDE))

    def lower(self, order: Sequence[int]) -> Ordered:
        """The order, lowered until nothing lowers it further."""
        found = self.descend(np.array(order, dtype=np.int64))
        self.raise_bound(found, self.peak(found))
        return self.result(found)

    def kick(self, best: Ordered, seed: int) -> Ordered:
        """What the rest of the work finds from there: the order is cut somewhere else and lowered again."""
        rng = random.Random(seed)
        order, peak = np.array(best.order, dtype=np.int64), best.peak
        while self.bound < peak and not self.spent():
            other = self.descend(self.cut_elsewhere(order, rng))
            if (then := self.peak(other)) <= peak:
                order, peak = other, then
        return self.result(order)

    def result(self, order: Ints) -> Ordered:
        return Ordered(tuple(order.tolist()), self.peak(order), self.bound)

    def spent(self) -> bool:
        return self.work >= self.most or self.deadline.over

    def peak(self, order: Ints) -> int:
        return int(self.moments.during(order).max())

    def passing(self, k: int, first: Mask | None, price: int, within: tuple[Mask, Mask] | None) -> Passing:
        self.work += self.moments.ops + _BESIDE
        found = self.moments.passing(k, first, price, within)
        if not price and within is None:
            self.bound = max(self.bound, found.bytes)
        return found

    def raise_bound(self, order: Ints, peak: int) -> None:
        """Takes the cuts that may bind: those of the ops with most bytes."""
        for at in np.argsort(-self.moments.during(order), kind="stable")[:_CHECKED]:
            if self.bound >= peak or self.spent():
                return
            self.passing(int(order[at]), None, 0, None)

    def descend(self, order: Ints) -> Ints:
        """The order, lowered until nothing lowers it further."""
        while (better := self.better(order)) is not None:
            order = better
        return order

    def better(self, order: Ints) -> Ints | None:
        """An order with a lower peak, if one is found."""
        top = self.peak(order)
        for price in _PRICES:
            for last in (False, True):
                if self.spent() or self.bound >= top:
                    return None
                if (found := self.attempt(order, top, price, last)) is not None:
                    return found
        return None

    def attempt(self, order: Ints, top: int, price: int, last: bool) -> Ints | None:
        """All ops with ``top`` bytes and more are passed with less, one after the other (of equal ones the first or
        the last before the others), each within the sets chosen before: ``chain``, from no op to all."""
        m, n = self.moments, self.moments.ops
        chain = [np.zeros(n, dtype=np.bool_), np.ones(n, dtype=np.bool_)]
        while not self.spent():
            during = m.during(order)
            if int(during.max()) < top:
                return order
            at = int(n - 1 - during[::-1].argmax() if last else during.argmax())
            k = int(order[at])
            j = next(j for j, done in enumerate(chain) if done[k])
            within = (chain[j - 1], chain[j]) if len(chain) > 2 else None
            found = self.passing(k, _first(order, at), price, within)
            if found.bytes >= top:
                return None
            order = _passed(order, k, found.done)
            after = found.done.copy()
            after[k] = True
            chain[j:j] = [found.done, after]
        return None

    def cut_elsewhere(self, order: Ints, rng: random.Random) -> Ints:
        """The order cut at one of the ops with more bytes than most, whatever that does elsewhere."""
        ranked = np.argsort(-self.moments.during(order), kind="stable")
        for _ in range(1 + rng.randrange(2)):
            k = int(order[ranked[rng.randrange(1 + len(ranked) // 2)]])
            at = int(np.flatnonzero(order == k)[0])
            order = _passed(order, k, self.passing(k, _first(order, at), rng.choice(_PRICES[:3]), None).done)
        return order


def _first(order: Ints, count: int) -> Mask:
    """The first ops of an order, as a mask."""
    mask = np.zeros(len(order), dtype=np.bool_)
    mask[order[:count]] = True
    return mask


def _passed(order: Ints, k: int, done: Mask) -> Ints:
    """The order with the ops ``done`` before ``k``, all others after it."""
    rest = ~done[order] & (order != k)
    return np.concatenate([order[done[order]], [k], order[rest]])
