"""Least peak memory first: of the ops that do not raise the peak the one that leaves least, else the smallest.

Problem: an order with a low peak. Measure: bytes beyond the static set. Source: Han et al. (DAC 2006, "Buffer
memory optimization for video codec application modeled in Simulink"), as PyTorch's Inductor has it
(`torch._inductor.memory`); on a graph it chooses the order that Inductor does, ties included. Guarantee: a legal
order. Complexity: n log n in ops, linear in edges. Known limits: looks one op ahead, so what only pays two ops
later is not seen; the caller keeps the order only if its peak is lower.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tightship.analysis.order import Tables, tables
from tightship.graph import Graph

__all__ = ["Options", "plan", "schedule"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(graph: Graph, options: Options | None = None) -> tuple[int, ...]:
    """A legal order of the graph's ops."""
    return schedule(tables(graph))


def schedule(t: Tables) -> tuple[int, ...]:
    """The order, of tables that are there already."""
    waiting = [len(b) for b in t.before]
    left = [len(r) + stays for r, stays in zip(t.readers, t.stays, strict=True)]  # that still need a storage
    ends = [
        lost + sum(t.size[s] for s in r if left[s] == 1) for lost, r in zip(t.loses, t.reads, strict=True)
    ]
    ready = _Ready(t.makes)
    for k, count in enumerate(waiting):
        if not count:
            ready.put(k, t.makes[k] - ends[k])
    live, top = 0, t.results
    order: list[int] = []
    while len(order) < len(waiting):
        k = ready.take(top - live)
        order.append(k)
        top = max(top, live + t.makes[k])
        live += t.makes[k] - ends[k]
        for a in t.after[k]:
            waiting[a] -= 1
            if not waiting[a]:
                ready.put(a, t.makes[a] - ends[a])
        for s in t.reads[k]:
            left[s] -= 1
            if left[s] == 1:
                for r in t.readers[s]:
                    ends[r] += t.size[s]
                    if not waiting[r] and ready.has(r):
                        ready.put(r, t.makes[r] - ends[r])
    return tuple(order)


class _Ready:
    """Ops that may run, each with what it leaves behind, in a tree over their sizes: the one that leaves least
    among those of at most a size is found in log n steps."""

    def __init__(self, size: Sequence[int]) -> None:
        n = len(size)
        rank = sorted(range(n), key=lambda k: (size[k], k))
        self.ops = n
        self.sizes = [size[k] for k in rank]
        self.at = [0] * n
        for j, k in enumerate(rank):
            self.at[k] = j
        self.leaves = 1 << max(0, n - 1).bit_length()
        self.none = (max(size, default=0) + 1) * (n + 1)  # above any key: what is left is at most the size
        self.tree = [self.none] * (2 * self.leaves)

    def put(self, k: int, leaves: int) -> None:
        self._set(self.at[k], leaves * self.ops + k)

    def has(self, k: int) -> bool:
        return self.tree[self.leaves + self.at[k]] != self.none

    def take(self, room: int) -> int:
        """Takes out the op that leaves least of those that fit; if none fits, of the smallest."""
        fitting = bisect_right(self.sizes, room)
        key = self._least(0, fitting)
        if key == self.none:
            smallest = self.sizes[self._first()]
            key = self._least(bisect_left(self.sizes, smallest), bisect_right(self.sizes, smallest))
        k = key % self.ops
        self._set(self.at[k], self.none)
        return k

    def _set(self, j: int, key: int) -> None:
        tree, j = self.tree, j + self.leaves
        tree[j] = key
        while j > 1:
            a, b = tree[j], tree[j ^ 1]
            j >>= 1
            least = a if a < b else b
            if tree[j] == least:
                return
            tree[j] = least

    def _least(self, start: int, end: int) -> int:
        tree, least = self.tree, self.none
        start, end = start + self.leaves, end + self.leaves
        while start < end:
            if start & 1:
                least = min(least, tree[start])
                start += 1
            if end & 1:
                end -= 1
                least = min(least, tree[end])
            start, end = start >> 1, end >> 1
        return least

    def _first(self) -> int:
        j = 1
        while j < self.leaves:
            j *= 2
            if self.tree[j] == self.none:
                j += 1
        return j - self.leaves
