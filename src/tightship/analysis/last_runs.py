"""A lower bound on the peak from the last runs of ops: what has to be in memory when large ops run for the last time.

Moments of first runs (`bounds`) say little of results: at an op's first run none has to be made yet, and at the end,
when all are there, nothing large runs. But take any set of ops. Whatever the plan, one of them, *k*, is the last of
the set that runs. While it does, what it reads and makes is in memory, with its workspace and the static set. After
that no op of the set runs again, so every result is in memory at that moment, or is made later by ops outside of the
set from what is in memory then. The fewest bytes with which that can be, what *k* touches being free, are a minimum
cut; with what *k* touches they are the least with which *k* can be the last. No plan needs less than the least over
all *k* of the set.

By then every op of the set has run, and all that it waits for: of those, ones that can run but once do not run
again either. That holds for every order, any number of repetitions and every set. A large set leaves little that can
be made afterwards, but has small ops; a small one has large ops alone. For a number of bytes, ops that can be the
last with no more are taken away until none can, as cores of graphs are found (Matula and Beck 1983): what is left is
the largest set that proves the number, and where nothing is left, no set does. Numbers are tried from above, as few
ops can be in their sets.

What *k* reads was made before it, and lay in memory together. So the moments before are looked at, too, from the last
to the first, as pebbles are counted: going back from a moment at which some versions of storages have to be there,
the next event is an op that makes one of them, or any op of the set. While it runs, the others are there as well, and
what the op reads has to be there before it; to make results, the ops of the set that are known to run later may be
used, the others not. An op can be the last with no more bytes than the number only if some chain of such events needs
no more until nothing large is needed any more. What is small is left out.

A storage that ops write several times over is several versions, of which each op reads one and the next write makes
another: what was made with an earlier one cannot be made with the last.

What *k* may write a result over need not be there beside it, and counts like any other storage. What waits in fewer
bytes, packed or moved out, counts with those, and then nothing is said of the moments before. Complexity: some
minimum cuts for each large op and each event, as long as work is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.order import reached
from tightship.analysis.versions import Versions, VersionSet
from tightship.graph import Graph, Rows, Uses
from tightship.options import NEVER, Deadline

__all__ = ["last_run_bound"]

_ENDLESS = 1 << 60
_PARTS, _HALVES, _HALVINGS = 12, 3, 6
"""Numbers that are tried from above, between the first that is proved and the one before it, and between what is
known and the most that moments before last runs may prove."""
_EDGES, _EARLIER, _LARGE = 40_000_000, 4_000_000, 5_000
"""Edges of all cuts together, at most, those for moments before last runs, and ops of graphs that are looked at."""
_FOR_OP, _FEW = 2, 16
"""Cuts for moments before last runs, at most, for each op and for so many more: small graphs are soon done."""
_CHAINS, _SMALL = 60, 0.3
"""Moments before an op that are looked at, at most, and the part of the largest storage from which on storages count
there."""

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Relaxed(Protocol):
    """What is asked of a `bounds.Relaxation`."""

    graph: Graph
    uses: Uses
    static: Mask
    waits: Ints
    pairs: dict[int, list[tuple[int, int]]]
    last_runs: tuple[int, int] | None

    @property
    def own(self) -> Ints: ...
    @property
    def again(self) -> Mask: ...
    @property
    def versions(self) -> Versions: ...
    @property
    def _backward(self) -> Rows: ...


def last_run_bound(
    relaxed: Relaxed, least: int, deadline: Deadline = NEVER, *, enough: int | None = None
) -> tuple[int, int]:
    """Bytes that no plan can stay under, ``least`` or more, which is known to be such a number, and the op that can
    be the last of a set with these (-1: ``least`` is not surpassed). ``enough``: what some plan needs, so that
    more cannot be proved."""
    if len(relaxed.own) > _LARGE or (enough is not None and least >= enough):
        return least, -1
    if relaxed.last_runs is None:
        cuts = _LastRuns(relaxed, deadline, enough)
        best, at = cuts.alone(least)
        if cuts.whole:
            best, at = cuts.after_earlier(best, at)
        if deadline.over:
            return best, at
        relaxed.last_runs = best, at
    return max((least, -1), relaxed.last_runs)


class _LastRuns:
    """The network of what has to be in memory for the results to be there, or to be made, at the end. Nodes: 0 the
    source, 1 the sink, then ops, versions needed, versions to be made. ``work``: edges that may still be cut;
    ``touched``: by op, the bytes of what it reads and makes that may count in a cut; ``base``: the cut when no op
    runs any more."""

    def __init__(self, relaxed: Relaxed, deadline: Deadline, enough: int | None) -> None:
        self.enough = _ENDLESS if enough is None else enough
        self.relaxed, self.deadline, self.work, self.earlier = relaxed, deadline, _EDGES, False
        self.stored = stored = relaxed.versions
        self.sizes: list[int] = stored.size.tolist()
        n, m = len(relaxed.own), len(stored.storage)
        need, make = 2 + n, 2 + n + m
        self.nodes, ops, versions = 2 + n + 2 * m, np.arange(n), np.arange(m)
        results, reads = stored.results, stored.reads
        tail = [0 * results, 2 + reads[:, 0], make + versions, need + versions, 2 + ops]
        head = [need + results, need + reads[:, 1], 2 + stored.maker, make + versions, 0 * ops + 1]
        self.tail, self.head = (np.concatenate(rows).astype(np.int32) for rows in (tail, head))
        endless = np.full(len(results) + len(reads) + m, _ENDLESS)
        self.capacity = np.concatenate([endless, stored.size, np.zeros(n, np.int64)])
        self.first_version, switches = len(endless), len(endless) + m
        self.cuts = _core.Cuts(self.nodes, self.tail, self.head, self.capacity, 0, 1, switches)
        self.touched = np.array([self.bytes(row) for row in stored.touched], dtype=np.int64)
        self.once = np.flatnonzero(~relaxed.again)
        self.whole = bool((relaxed.waits == relaxed.graph.columns.size).all())
        self.base = self.cut(np.ones(n, dtype=np.bool_))

    def bytes(self, versions: Iterable[int]) -> int:
        return sum(self.sizes[v] for v in versions)

    def alone(self, least: int) -> tuple[int, int]:
        """The bound and the op that forces it, looking at last runs alone."""
        best, at, most = least, -1, min(self.enough, int(self.relaxed.own.max()) + self.base)
        part = max(1, (most - least) // _PARTS)
        for level in range(most - part, least - 1, -part):  # the sets of high ones are small
            best, at = max((best, at), self.passed(level))
            if best > least:
                break
            most = level
        return self._between(best, at, most, _HALVES) if best > least else (best, at)

    def after_earlier(self, best: int, at: int) -> tuple[int, int]:
        """The same, looking at what happens before last runs, too."""
        self.earlier, cuts = True, _FOR_OP * (_FEW + len(self.relaxed.own))
        self.work = min(_EARLIER, cuts * len(self.tail))
        own = self.relaxed.own
        most = int((2 * own - self.relaxed.graph.static_bytes).max()) + self.base
        return self._between(best, at, most, _HALVINGS)

    def _between(self, best: int, at: int, most: int, halves: int) -> tuple[int, int]:
        most = min(most, self.enough)
        for _ in range(halves):
            if best >= most:
                break
            level = (best + most) // 2
            value, op = self.passed(level)
            best, at = max((best, at), (value, op))
            most = most if value else level
        return best, at

    def passed(self, level: int) -> tuple[int, int]:
        """The least bytes with which an op of the largest set that proves more than ``level`` is the last, and that
        op; 0 where there is none, or no work left to tell."""
        own = self.relaxed.own
        inside = own + self.base > level  # no cut is more without an op
        if self.earlier:  # as much again may have to be there beside what an op touches
            inside = 2 * own - self.relaxed.graph.static_bytes + self.base > level
        while inside.any():
            over, some = self.over(inside), not self.earlier
            cut = self.cut(over)
            if some and (out := inside & (own + cut <= level)).any():  # what it touches is no part of the cut
                inside &= ~out
                continue
            value = own + np.maximum(0, cut - self.touched)
            value[~inside] = _ENDLESS
            for k in np.flatnonzero(value <= level)[::-1].tolist():  # what waits for it may follow at once
                value[k] = self.during(k, frozenset(), over, level)
                if some and value[k] <= level:
                    inside[k] = False
            if self.earlier:
                earlier = _Earlier(self, inside, level)
                for k in np.flatnonzero(value <= level).tolist():
                    value[k] = max(int(value[k]), earlier.least(k))
            if self.work <= 0 or self.deadline.over:
                break
            if (out := value <= level).any():
                inside &= ~out
            else:
                return int(value.min()), int(value.argmin())
        return 0, -1

    def over(self, inside: Mask) -> Mask:
        """Ops that do not run any more when the last one of a set has."""
        if not len(self.once):
            return inside
        over = inside.copy()
        before = reached(np.flatnonzero(inside).tolist(), self.relaxed._backward)
        over[self.once[before[self.once]]] = True
        return over

    def during(self, k: int, needed: VersionSet, over: Mask, level: int) -> int:
        """Bytes while op ``k`` runs at least, where what is ``needed`` is there then and afterwards, and none of the
        ops ``over`` runs any more; some that are more than ``level`` do."""
        stored, relaxed, free = self.stored, self.relaxed, self.stored.touched[k] | needed
        value = int(relaxed.own[k]) + self.bytes(needed - stored.touched[k])
        taken = relaxed.pairs.get(k, ())
        left = [
            p for p in taken if int(stored.first[p[0]]) not in needed
        ]  # what is needed is not written over
        if len(left) < len(taken):
            value += self._reused(taken) - self._reused(left)
        if value > level:
            return value
        if len(taken) == 1 and left:  # of several it is not known which is written over
            free -= {int(stored.first[left[0][0]])}
        return value + self.cut(over, free)

    def _reused(self, taken: Sequence[tuple[int, int]]) -> int:
        """The most bytes of inputs whose places results may take (as `Relaxation.reused`)."""
        size = self.relaxed.graph.columns.size
        return min(sum(int(size[s]) for s in {p[side] for p in taken}) for side in (0, 1))

    def cut(self, over: Mask, free: Iterable[int] = ()) -> int:
        """Bytes of what has to be in memory when none of the ops ``over`` runs any more, beside what is ``free``; 0
        where no work is left."""
        if self.work <= 0:
            return 0
        self.work -= len(self.tail)
        return self.cuts.value(
            over.view(np.uint8), self.first_version + np.array(sorted(free), dtype=np.int64)
        )


class _Earlier:
    """The moments before the last run of a set (``inside``), for plans of no more bytes than a ``level``."""

    def __init__(self, of: _LastRuns, inside: Mask, level: int) -> None:
        self.of, self.inside, self.level = of, inside, level
        size = of.stored.size
        self.large = size >= max(1, int(size.max(initial=0) * _SMALL))
        self.set = np.flatnonzero(inside)
        self.known: dict[frozenset[int], tuple[Mask, int]] = {}

    def least(self, k: int) -> int:
        """The fewest bytes, more than the level, that some moment before op ``k`` takes, being the last; 0 where no
        more than the level may do."""
        found = self._least(k, others=False)  # mostly one does without others of the set
        return found if not found else self._least(k, others=True)

    def _least(self, k: int, *, others: bool) -> int:
        start = self._needs(k), frozenset([k])
        stack, seen, low = [start], {start}, _ENDLESS
        while stack:
            needed, later = stack.pop()
            if not needed or len(seen) > _CHAINS or self.of.work <= 0:
                return 0
            found = []
            for op, nbytes in self._events(needed, later, others):
                if nbytes > self.level:
                    low = min(low, nbytes)
                    continue
                left = needed - self.of.stored.made[op] | self._needs(op)
                then = left, later | {op} if self.inside[op] else later
                if then not in seen:
                    seen.add(then)
                    found.append(then)
            stack += sorted(found, key=lambda then: -self.of.bytes(then[0]))  # the least of them next
        return low

    def _needs(self, op: int) -> VersionSet:
        return frozenset(v for v in self.of.stored.read[op] if self.large[v])

    def _events(self, needed: VersionSet, later: frozenset[int], others: bool) -> Iterable[tuple[int, int]]:
        """What may be the event right before what is ``needed`` is there, when the ops ``later`` are those of the
        set that run after it: ops, and bytes while they run."""
        of, stored = self.of, self.of.stored
        over, cut = self._left(later)
        makers = {stored.maker[v] for v in needed}
        total = of.bytes(needed)
        beside = np.full(len(of.touched), total)
        for v in needed:
            beside[stored.users[v]] -= stored.size[v]
        roughly = of.relaxed.own + beside + np.maximum(0, cut - of.touched - total)
        rest = self.set.tolist() if others else ()
        for op in [*sorted(makers), *(k for k in rest if k not in makers)]:
            ran = op in later or (over[op] and not self.inside[op])
            if ran and not of.relaxed.again[op]:  # it runs once, and at another time
                continue
            if op not in makers and roughly[op] > self.level:
                yield op, int(roughly[op])
            else:
                yield op, of.during(op, needed, over, self.level)

    def _left(self, later: frozenset[int]) -> tuple[Mask, int]:
        """Ops that do not run any more after a moment, and the cut then."""
        if later not in self.known:
            left = self.inside.copy()
            left[list(later)] = False
            over = self.of.over(left)
            self.known[later] = over, self.of.cut(over)
        return self.known[later]
