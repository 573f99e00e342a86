"""Whether rectangles overlap, all of them at once: what the verifier asks first.

A binary tree over the times at which rectangles begin; each lies at the O(log n) highest nodes that its time covers.
Two that meet in time meet at a node where one lies and the other lies at it or below it. So none overlap exactly
when, at every node, those that lie there are disjoint in bytes, from one another and from all that lie below. All
nodes of a level are looked at together: O(n log² n) in all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["disjoint"]

Ints = npt.NDArray[np.int64]


def disjoint(since: Ints, until: Ints, start: Ints, end: Ints) -> bool:
    """Whether no two of the rectangles [since, until) x [start, end) share a point."""
    solid = np.flatnonzero((since < until) & (start < end))
    by_time = solid[
        np.argsort(since[solid], kind="stable")
    ]  # what is near in the tree is near in memory, too
    since, until, start, end = (column[by_time] for column in (since, until, start, end))
    count = len(since)
    begins = np.append(True, since[1:] != since[:-1])[:count]
    first, last = np.cumsum(begins) - 1, np.searchsorted(since[begins], until)
    by_start = np.argsort(start, kind="stable")
    rank = np.empty(count, dtype=np.int64)
    rank[by_start] = np.arange(count)
    rising, left, right = np.arange(count), first, last
    for level in range(64):
        here = left < right
        rising, left, right = rising[here], left[here], right[here]
        if not len(rising):
            break
        odd_left = left % 2 == 1
        odd_right = (right % 2 == 1) & (left + odd_left < right)
        nodes = np.concatenate((left[odd_left], right[odd_right] - 1))
        keys = nodes * count + rank[np.concatenate((rising[odd_left], rising[odd_right]))]
        left, right = (left + odd_left) // 2, (right - odd_right) // 2
        keys.sort()
        node, at = keys // count, by_start[keys % count]
        if ((node[1:] == node[:-1]) & (end[at[:-1]] > start[at[1:]])).any():
            return False
        for edge in (first >> level, (last - 1) >> level):
            below = np.flatnonzero((edge << level < first) | ((edge + 1) << level > last))
            key = edge[below] * count + rank[below]
            if _touch((keys, node, start[at], end[at]), key, edge[below], start[below], end[below]):
                return False
    return True


def _touch(lying: tuple[Ints, Ints, Ints, Ints], key: Ints, edge: Ints, start: Ints, end: Ints) -> bool:
    """Whether one of the spans [start, end) below a node ``edge`` meets one of those that lie there. ``lying``: their
    keys, sorted, nodes, starts and ends."""
    keys, node, low, high = lying
    if not len(keys):
        return False
    after = np.searchsorted(keys, key)
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(keys) - 1)
    below = (node[before] == edge) & (high[before] > start) & (low[before] < end)
    above = (node[after] == edge) & (high[after] > start) & (low[after] < end)
    return bool(below.any() or above.any())
