"""Versions of storages: what each write in place makes of one, as a bound sees it.

A storage that ops write several times over is several versions. Each op reads one of them; a write reads one and
makes the next. At any moment at most one version of a storage is in memory, so that whatever needs another one waits
for every write from the one that is there to that, or from the first one on. In static single assignment form (Cytron
et al. 1991) that is said without a word about memory: a write is an op that reads a version and makes another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tightship.analysis.order import pairs
from tightship.cached import cached_property
from tightship.graph import Graph

__all__ = ["VersionSet", "Versions"]

Ints = NDArray[np.int64]
VersionSet = frozenset[int]


class Versions:
    """The versions of the storages that ops of a graph make, numbered: what each is of (``storage``), its ``size`` in
    bytes while it waits (``waits``, by storage), the op that makes it (``maker``); of each storage how many
    (``count``) and the ``first``. ``touches``: (op, version) of every read; ``reads``: without those of ops that
    write a storage of one version in place, which what an op leaves alone when it runs again has; ``results``:
    versions that are there at the end."""

    def __init__(self, graph: Graph, waits: Ints) -> None:
        self.graph, uses = graph, graph.uses
        facts = uses.facts
        there = facts.definer >= 0
        there[list(graph.static)] = False
        writers = np.diff(facts.writers[0])
        self.count = np.where(there, np.maximum(1, writers), 0)
        for op in graph.ops:
            self.count[list(op.updates)] = np.minimum(1, self.count[list(op.updates)])
        self.first = np.cumsum(self.count) - self.count
        self.storage = np.repeat(np.arange(len(there)), self.count)
        self.size = waits[self.storage]
        nth = np.arange(len(self.storage)) - self.first[self.storage]
        self.maker = facts.definer[self.storage].astype(np.int64)
        later = np.flatnonzero(nth)
        self.maker[later] = facts.writers[1][facts.writers[0][self.storage[later]] + nth[later]]
        rows, needs = pairs(facts.reads), np.asarray(facts.needs[1], dtype=np.int64)
        seen = there[rows[:, 1]]
        rows, needs = rows[seen], needs[seen]
        self.touches = np.stack([rows[:, 0], self.at(rows[:, 1], needs)], axis=1)
        self.reads = self.touches[~(_among(rows, pairs(facts.mutates)) & (self.count[rows[:, 1]] == 1))]
        results = np.array(sorted(graph.kept - graph.static), dtype=np.int64)
        results = results[there[results]]
        self.results = self.at(results, self.count[results])

    def at(self, storages: Ints, writes: Ints) -> Ints:
        """The versions of storages after so many writes."""
        return self.first[storages] + np.clip(writes, 1, self.count[storages]) - 1

    @cached_property
    def read(self) -> list[VersionSet]:
        """By op: the versions it reads."""
        return _sets(len(self.graph.ops), self.reads)

    @cached_property
    def made(self) -> list[VersionSet]:
        """By op: the versions it makes."""
        return _sets(len(self.graph.ops), np.stack([self.maker, np.arange(len(self.maker))], axis=1))

    @cached_property
    def touched(self) -> list[VersionSet]:
        """By op: versions of which some bytes are there while it runs."""
        made = np.stack([self.maker, np.arange(len(self.maker))], axis=1)
        return _sets(len(self.graph.ops), np.concatenate([self.touches, made]))

    @cached_property
    def users(self) -> list[list[int]]:
        """By version: the ops that touch it."""
        found: list[list[int]] = [[] for _ in self.storage]
        for k, touched in enumerate(self.touched):
            for v in touched:
                found[v].append(k)
        return found


def _among(rows: Ints, others: Ints) -> NDArray[np.bool_]:
    """Which pairs are among others."""
    most = 1 + max(rows[:, 1].max(initial=0), others[:, 1].max(initial=0))
    return np.isin(rows[:, 0] * most + rows[:, 1], others[:, 0] * most + others[:, 1])


def _sets(n: int, rows: Ints) -> list[VersionSet]:
    found: list[set[int]] = [set() for _ in range(n)]
    for k, v in rows.tolist():
        found[k].add(v)
    return [frozenset(row) for row in found]
