"""Problems that live ranges alone do not tell: by pairs of buffers, or in parts.

Gaps, windows and conflicts become, for two buffers a and b, ranges of ``offset(a) - offset(b)`` that are not
allowed. Memory is that of the pairs. Of more than ``MOST_PARTS``, buffers are told by the parts of them that are
alive, and only conflicts by pairs: any number of buffers, but without exact search. All planners work on both as they
do on live ranges, because the core packs them in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tightship import _core
from tightship.errors import BadInput
from tightship.plan import Problem

__all__ = ["MOST_PAIRS", "MOST_PARTS", "LoosePlacer", "clique", "pairs", "parts_of", "placer_of"]

Ints = npt.NDArray[np.int64]

MOST_PARTS = 4_000
"""Parts of buffers, up to which these are told by pairs: 8 million at most."""

MOST_PAIRS = 20_000_000
"""Conflicts, at most: about 1.5 GB while they are made."""

_EXHAUSTED, _BEYOND = 40, 100_000
"""Buffers up to which all of the work may go into looking at every placement, and the work beyond: most of them are
then never reached, and climbing gets further."""

_ROWS = 512
"""Rows of conflicts that are taken apart at a time."""

_CLIQUES, _LOOKED = 64, 200_000
"""Buffers, largest first, around which a set of buffers all in conflict is looked for; and buffers looked at."""


Columns = tuple[Ints, Ints, Ints]
"""Sizes, alignments and pins of a problem's buffers."""


def placer_of(problem: Problem, became: Sequence[int], columns: Columns, parts: Ints) -> LoosePlacer:
    """What the core's ``Placer`` is for whole live ranges, for a problem that these do not tell all of. ``became``:
    to which buffer of the merged problem, whose columns and parts these are, each buffer belongs."""
    size, least = columns[0], clique(problem)
    if len(parts) <= MOST_PARTS:
        core: Any = _core.RelatedPlacer(*columns, *pairs(problem, became, parts))
        return LoosePlacer(core, size, core.exhaust, least)
    beside = _conflicts(problem, np.array(became, dtype=np.int64))
    tables = [np.ascontiguousarray(c) for table in (parts, beside) for c in table.T]
    return LoosePlacer(_core.PartPlacer(*columns, *tables), size, None, least, by_time=not len(beside))


class LoosePlacer:
    """The methods of the core's ``Placer``, over one of pairs or parts. ``exhaust``: exact search, if there is one;
    ``peak``: a lower bound; ``by_time``: buffers that share no time are known to be in nobody's way."""

    def __init__(
        self, core: Any, size: Ints, exhaust: Any = None, peak: int = 0, *, by_time: bool = False
    ) -> None:
        self.core, self.size, self.exhaust, self.peak, self.by_time = core, size, exhaust, peak, by_time
        self.pack, self.climb, self.hinted, self.fill = core.pack, core.climb, core.hinted, core.fill

    @property
    def clash(self) -> int:
        return int(self.core.clash)

    @property
    def work(self) -> int:
        return int(self.core.work)

    @property
    def interrupted(self) -> bool:
        return bool(self.core.interrupted)

    def exact(
        self, start: Ints, *, seed: int, work: int, seconds: float, goal: int, wanted: bool, threads: int
    ) -> tuple[Ints, int, Ints]:
        """Offsets, a lower bound (0: none was proved), and nobody in particular who proves it. ``seed``, ``wanted``
        and ``threads`` change nothing."""
        nobody = np.empty(0, dtype=np.int64)
        if self.exhaust is None:
            return start, 0, nobody
        work = work if len(self.size) <= _EXHAUSTED else min(work, _BEYOND)
        offsets, complete = self.exhaust(start, work=work, seconds=seconds, goal=goal)
        return offsets, int((offsets + self.size).max(initial=0)) if complete else 0, nobody


def parts_of(merged: Problem, lower: Ints, upper: Ints, size: Ints) -> Ints:
    """Rows of (buffer, since, until, low, high), in the order of the buffers: its bytes that are alive then."""
    rows = [(k, *part) for k, b in enumerate(merged.buffers) if b.gaps and b.size for part in b.parts()]
    pieces = np.array([row for row in rows if row[3] < row[4]], dtype=np.int64).reshape(-1, 5)
    whole = size > 0
    whole[[k for k, b in enumerate(merged.buffers) if b.gaps]] = False
    k = np.flatnonzero(whole)
    table = np.concatenate((pieces, np.stack((k, lower[k], upper[k], np.zeros_like(k), size[k]), axis=1)))
    return table[np.argsort(table[:, 0], kind="stable")]


def pairs(problem: Problem, became: Sequence[int], parts: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(one, two, low, high): what ``low < offset[one] - offset[two] < high`` is not allowed for, of the merged
    problem's buffers."""
    table = parts[np.argsort(parts[:, 1], kind="stable")]
    owner, since, until, low, high = (np.ascontiguousarray(c) for c in table.T)
    # Those that begin while a part is alive meet it; of two that meet, one begins while the other is alive.
    stop = np.searchsorted(since, until)
    many = stop - np.arange(1, len(since) + 1)
    total = int(many.sum())
    _limit(total)
    a = np.repeat(np.arange(len(since)), many)
    b = np.arange(total) - np.repeat(np.cumsum(many) - many, many) + a + 1
    differ = owner[a] != owner[b]
    a, b = a[differ], b[differ]
    meeting = np.stack([owner[a], owner[b], low[b] - high[a], high[b] - low[a]], axis=1)
    also = _conflicts(problem, np.array(became, dtype=np.int64))
    _limit(len(meeting) + len(also))
    found = np.concatenate([meeting, also])
    swap = found[:, 0] > found[:, 1]
    found[swap] = np.stack([found[swap, 1], found[swap, 0], -found[swap, 3], -found[swap, 2]], axis=1)
    found = found[np.lexsort(found.T)]
    again = (found[1:] == found[:-1]).all(axis=1)
    found = np.delete(found, np.flatnonzero(again), axis=0)
    return tuple(np.ascontiguousarray(c) for c in found.T)  # type: ignore[return-value]


def clique(problem: Problem) -> int:
    """The most bytes found in a set of buffers each of which is in every other one's way, in some order: no
    placement spans less. Searched around the largest buffers, heaviest first."""
    if not problem.conflicts:
        return 0
    rows = _in_the_way(problem)
    size = [b.size for b in problem.buffers]
    by_size = sorted(range(len(size)), key=lambda k: (-size[k], k))
    best = 0
    for k in by_size[: min(_CLIQUES, 1 + _LOOKED // len(size))] if size else ():
        common, total = rows[k], size[k]
        for j in by_size:
            if common >> j & 1:
                common &= rows[j]
                total += size[j]
        best = max(best, total)
    return best


def _in_the_way(problem: Problem) -> list[int]:
    """For every buffer a bit set of those that are whole in its way: in conflict, or alive at one time."""
    buffers = problem.buffers
    rows = list(problem.conflicts)
    whole = [(k, b) for k, b in enumerate(buffers) if b.size and not b.gaps]
    events = [(b.upper, 0, k) for k, b in whole] + [(b.lower, 1, k) for k, b in whole]
    alive = begun = 0
    before: dict[int, int] = {}
    for _, begins, k in sorted(events):
        if begins:
            rows[k] |= alive
            alive, begun = alive | 1 << k, begun | 1 << k
            before[k] = begun
        else:
            rows[k] |= begun & ~before[k]  # who has begun since
            alive &= ~(1 << k)
    allies: dict[str, int] = {}
    for k, b in enumerate(buffers):
        allies[b.group] = allies.get(b.group, 0) | 1 << k
    return [
        row & ~(allies[b.group] if b.group else 1 << k)
        for k, (row, b) in enumerate(zip(rows, buffers, strict=True))
    ]


def _conflicts(problem: Problem, became: Ints) -> Ints:
    buffers, rows = problem.buffers, problem.conflicts
    if not rows:
        return np.empty((0, 4), dtype=np.int64)
    if len(rows) != len(buffers):
        raise BadInput(f"{len(rows)} rows for {len(buffers)} buffers", place="Problem.conflicts")
    count = len(buffers)
    width = -(-count // 8)
    if any(row < 0 or row >> count for row in rows):
        raise BadInput("a row has bits beyond the buffers", place="Problem.conflicts")
    _limit(sum(row.bit_count() for row in rows) // 2)
    found = []
    for at in range(0, count, _ROWS):
        some = b"".join(row.to_bytes(width, "little") for row in rows[at : at + _ROWS])
        packed = np.frombuffer(some, dtype=np.uint8)
        filled = np.flatnonzero(packed)
        byte, bit = np.nonzero(np.unpackbits(packed[filled, None], axis=1, bitorder="little"))
        one, column = np.divmod(filled[byte], width)
        two = 8 * column + bit
        found.append(np.stack((np.minimum(one + at, two), np.maximum(one + at, two)), axis=1))
    one, two = np.unique(np.concatenate(found), axis=0).T
    size = np.array([b.size for b in buffers], dtype=np.int64)
    ranges = np.stack([became[one], became[two], -size[one], size[two]], axis=1).astype(np.int64)
    return ranges[(one != two) & (became[one] != became[two]) & (size[one] > 0) & (size[two] > 0)]


def _limit(count: int) -> None:
    if count > MOST_PAIRS:
        raise BadInput(
            f"{count} pairs of buffers in conflict, at most {MOST_PAIRS}", place="placement problem"
        )
