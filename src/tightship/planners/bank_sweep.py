"""The best choice of pools as far as bytes at each moment go, by a sweep over time.

Problem: units with times in which they take bytes, a cost in each pool, and pools of limited capacity; each unit in
one pool, so that no pool has more than its capacity at any moment. Minimized: the sum of costs. Source: dynamic
programming over the units alive at once, as over a path decomposition of an interval graph. Guarantee: what is found
is optimal. Complexity: moments times pools to the power of the units alive at once, at most ``STATES`` (more: no
answer). Known limits: that the bytes fit at each moment does not mean that they can be placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["STATES", "sweep"]

STATES = 50_000
"""Ways to divide the units alive among pools that are kept at most."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _States:
    """A row for each way to divide the ``units`` alive: their pools, the least ``cost`` of all units so far, the
    least that they add to the bound, and the row of the moment before that it comes from."""

    units: tuple[int, ...]
    pool: npt.NDArray[np.int8]
    cost: Floats
    more: Floats
    origin: Ints

    def rows(self, kept: npt.NDArray[Any]) -> _States:
        return _States(self.units, self.pool[kept], self.cost[kept], self.more[kept], self.origin[kept])

    def without(self, gone: Sequence[int], pools: int) -> _States:
        """The states once some units are gone: of those that are alike then, the cheapest."""
        left = [at for at, k in enumerate(self.units) if k not in gone]
        code = np.zeros(len(self.cost), dtype=np.int64)
        for at in left:
            code = code * pools + self.pool[:, at]
        code = np.unique(code, return_inverse=True)[1]
        order = np.lexsort((self.cost, code))
        first = order[np.flatnonzero(np.diff(code[order], prepend=-1))]
        more = np.full(len(first), np.inf)
        np.minimum.at(more, code, self.more)
        units = tuple(self.units[at] for at in left)
        return _States(units, self.pool[first][:, left], self.cost[first], more, self.origin[first])

    def with_unit(self, k: int, cost: Floats, more: Floats) -> _States:
        """The states with one more unit, in each pool that it may lie in."""
        allowed = np.flatnonzero(np.isfinite(cost[k]))
        count = len(self.cost)
        again = self.rows(np.repeat(np.arange(count), len(allowed)))
        here = np.tile(allowed, count)
        pool = np.column_stack((again.pool, here.astype(np.int8)))
        return _States(
            (*self.units, k), pool, again.cost + cost[k][here], again.more + more[k][here], again.origin
        )

    def held(self, nbytes: Mapping[int, int], pools: int) -> Ints:
        """The bytes in each pool, of units that take so many."""
        held = np.zeros((len(self.cost), pools), dtype=np.int64)
        for at, k in enumerate(self.units):
            if n := nbytes.get(k, 0):
                held[np.arange(len(held)), self.pool[:, at]] += n
        return held


def sweep(
    parts: Sequence[Sequence[tuple[int, int, int]]],
    cost: Floats,
    capacity: Sequence[float],
    more: Floats,
    slack: float,
    over: Callable[[], bool],
) -> list[int] | None:
    """The pools of the cheapest choice. ``parts``: of each unit, from one moment to another so many bytes. ``more``:
    what a unit in a pool adds to a bound, of which a choice that is wanted adds less than ``slack``. Empty if there
    is no such choice, None if it is not known: too many are alive at once, or the time is ``over``."""
    pools, limit = len(capacity), np.array(capacity)
    begins, ends = dict[int, list[int]](), [max(b for _, b, _ in rows) for rows in parts]
    for k, rows in enumerate(parts):
        begins.setdefault(min(a for a, _, _ in rows), []).append(k)
    states = _States((), np.zeros((1, 0), np.int8), np.zeros(1), np.zeros(1), np.zeros(1, np.int64))
    history: list[_States] = []
    for t in sorted({a for rows in parts for a, _, _ in rows}):
        states = replace(states, origin=np.arange(len(states.cost)))
        if gone := [k for k in states.units if ends[k] <= t]:
            states = states.without(gone, pools)
        alive = {*states.units, *begins.get(t, ())}
        nbytes = {k: sum(n for a, b, n in parts[k] if a <= t < b) for k in alive}
        for k in [None, *begins.get(t, ())]:
            states = states if k is None else states.with_unit(k, cost, more)
            fits = (states.held(nbytes, pools) <= limit).all(axis=1) & (states.more < slack)
            states = states.rows(np.flatnonzero(fits))
            if len(states.cost) > STATES or over():
                return None
            if not len(states.cost):
                return []
        history.append(states)
    chosen, row = [0] * len(parts), int(states.cost.argmin())
    for states in reversed(history):
        for k, p in zip(states.units, states.pool[row].tolist(), strict=True):
            chosen[k] = p
        row = int(states.origin[row])
    return chosen
