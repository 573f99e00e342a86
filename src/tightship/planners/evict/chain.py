"""Dynamic programming over a chain of blocks: what each saves, and which ones are run again together.

Problem: cut the forward where little goes from one part to the next; for every block one of a few saved sets, or, for
a run of blocks, only what enters it, to be run again before its backward, where the same is decided again. Measure:
seconds of recomputation, peak within the limit; the program works with the bytes and seconds of each block by itself,
and learns from the exact bytes of what it finds. Source: the optimal persistent schedules of rotor (Beaumont,
Eyraud-Dubois, Herrmann, Joly, Shilova 2019; before, Griewank 1992 and Gruslys et al. 2016), with options per block as
in Rockmate (Zhao et al. 2023). Guarantee: optimal for a chain of blocks whose costs add up, in memory rounded to
``slots``; none for the graph. Complexity: blocks cubed times slots. Known limits: what is run again in a run that is
itself run again stays by the engine's rule for `PASS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightship.planners.evict import keep, ladder
from tightship.planners.evict._blocks_of_chain import Chain, Choice
from tightship.planners.evict._frame import DROP, EVICT, KEEP, PASS, Bits, Decision, Frame, Progress

__all__ = ["Options", "family", "plan"]

Choices = tuple[tuple[Choice, ...], ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """``blocks``: how many at most. ``prices``: saved sets tried for each. ``slots``: parts memory is counted in.
    ``tries``: how often the program may learn from what it found. ``most``: ops of graphs that it is for. ``work``:
    ops simulated at most, ``seconds``: wall clock at most, to give back what is not needed."""

    blocks: int = 40
    prices: int = 10
    slots: int = 400
    tries: int = 5
    most: int = 20_000
    work: int = 20_000_000
    seconds: float = 5.0


def plan(
    frame: Frame, limit: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found; what is missing to the limit taken by the ladder, what is not needed given back."""
    o = options or Options()
    best = keep.plan(frame, limit)
    if best.met or not len(frame.gaps):
        return best
    rows = [d for d in family(frame, limit, o) if d.valid]
    share = ladder.Options(o.work // 3, o.seconds / 3)
    for met in sorted((d for d in rows if d.met), key=lambda d: d.extra)[:1]:
        best = _better(ladder.relaxed(frame, limit, met, share.work, share.seconds), best)
    for over in sorted((d for d in rows if not d.met), key=lambda d: d.peak)[:2]:
        best = _better(ladder.climb(frame, limit, over.evict, share, progress), best)
    return best


def _better(found: Decision, best: Decision) -> Decision:
    return found if found.beats(best) else best


def family(frame: Frame, limit: int, options: Options | None = None) -> Iterator[Decision]:
    """The program's decisions, with each block by itself and with blocks run again together; none without a chain."""
    o = options or Options()
    if not 0 < frame.boundary < len(frame.order) <= o.most:
        return
    chain = Chain(frame, o.blocks)
    if chain.length < 2:
        return
    choices = chain.choices(o.prices)
    for nested in (False, True):
        yield from _corrected(chain, choices, limit, o, nested)


def _corrected(chain: Chain, choices: Choices, limit: int, o: Options, nested: bool) -> Iterator[Decision]:
    """The program's decision, and those after it has learned what blocks needed beyond what it had believed."""
    frame, within, step = chain.frame, limit, (limit - chain.frame.graph.static_bytes) // 16
    beyond = np.zeros((2, chain.length), dtype=np.int64)
    for _ in range(o.tries):
        made = _Program(chain, choices, within, o.slots, nested, beyond).decisions()
        if made is None:  # the search goes on from what needs a little more
            within += step
            continue
        found = frame.cost(made.bits, limit)
        yield found
        if not found.valid or (found.met and within > limit):
            return
        if found.met:  # a little more than fits, which the ladder makes fit, may be better still
            within += limit - found.peak + step // 4
            continue
        used = chain.used(made.bits)
        short = np.flatnonzero(used > within).tolist()
        if not short:
            return
        for b in short:
            now = beyond[made.ends[b], b]
            beyond[made.ends[b], b] = max(now + int(made.slot), now + used[b] - made.expected[b])


@dataclass(frozen=True, slots=True)
class _Made:
    """A decision, and by block the bytes it should need, and whether (1) the block ends blocks that run again."""

    bits: Bits
    expected: list[int]
    ends: list[int]
    slot: float


class _Program:
    """Seconds that blocks ``first`` to ``last`` run again, by slots of what is kept before them, for every such run:
    with what each block saves itself, or with a first part of them run again after the backward of the second."""

    def __init__(
        self, chain: Chain, choices: Choices, limit: int, slots: int, nested: bool, beyond: NDArray[np.int64]
    ) -> None:
        self.chain, self.choices, self.limit, n = chain, choices, limit, chain.length
        self.slot = max(1, limit - chain.frame.graph.static_bytes) / slots
        self.kept = np.arange(slots + 1)
        self.handed = [round(x / self.slot) for x in chain.hands_on]
        self.sums = np.concatenate([[0.0], np.cumsum(chain.forward)])
        # When blocks run forward again, the gradients made so far and the one on its way are there.
        self.there = [x + y for x, y in zip(chain.results, chain.hands_on, strict=True)]
        self.there[-1] = 0  # nothing is, when they first run
        self.ahead = [min(c.ahead for c in row) for row in choices]
        self.nested, self.beyond = nested, beyond
        # By first block, last block and slots kept before; `later` has what the block before hands on besides.
        self.least = np.full((n + 1, n, slots + 1), np.inf)
        self.later = np.full((n + 1, n, slots + 1), np.inf)
        for last in range(n) if nested else (n - 1,):
            self.least[last + 1, last] = 0.0
            for first in range(last, -1, -1):
                own, parts = self._ways(first, last)
                self.least[first, last] = np.minimum(own.min(axis=0), parts.min(axis=0, initial=np.inf))
                if first:
                    self.later[first, last] = self._with(first, last, self.handed[first - 1])

    def _with(self, first: int, last: int, kept: int) -> Floats:
        """The least of blocks when so many slots more are kept before them."""
        out = np.full(len(self.kept), np.inf)
        if kept < len(out):
            out[: len(out) - kept] = self.least[first, last][kept:]
        return out

    def _needs(self, first: int, last: int, c: Choice) -> int:
        """Bytes for the first of these blocks, beyond what is kept before it."""
        ends = int(first == last < self.chain.length - 1)
        return int(max(c.peak, c.ahead + self.there[last]) + self.beyond[ends, first])

    def _ways(self, first: int, last: int) -> tuple[Floats, Floats]:
        """Seconds by slots kept before: for each choice of the first block, and for each first part of them that is
        run again, by its last block."""
        own = np.full((len(self.choices[first]), len(self.kept)), np.inf)
        for row, c in zip(own, self.choices[first], strict=True):
            least = self._needs(first, last, c)
            fits = self.kept * self.slot + least <= self.limit
            row[fits] = c.time + self._with(first + 1, last, round(c.keeps / self.slot))[fits]
        if not self.nested:
            return own, np.empty((0, len(self.kept)))
        again = self.sums[first + 1 : last + 1] - self.sums[first]
        parts = self.later[first + 1 : last + 1, last] + self.least[first, first:last] + again[:, None]
        most = np.maximum.accumulate(self.ahead[first:last]) + self.there[last]
        parts[self.kept[None, :] * self.slot + most[:, None] > self.limit] = np.inf
        return own, parts

    def decisions(self) -> _Made | None:
        """What the least asks of every gap; None if nothing fits."""
        n = self.chain.length
        made = _Made(self.chain.frame.nothing(), [0] * n, [0] * n, self.slot)
        if not np.isfinite(self.least[0, n - 1][0]):
            return None
        parts = [(0, n - 1, 0, 0)]
        handed: dict[int, int] = {}
        while parts:
            first, last, kept, depth = parts.pop()
            own, again = (ways[:, kept] for ways in self._ways(first, last))
            if not len(again) or own.min() <= again.min():
                c = self.choices[first][int(own.argmin())]
                made.bits[self.chain.gaps[first]] = _at_depth(c.bits, depth)
                made.expected[first] = round(kept * self.slot) + self._needs(first, last, c)
                made.ends[first] = int(first == last < n - 1)
                rest = (first + 1, last, kept + round(c.keeps / self.slot), depth)
            else:
                middle = first + int(again.argmin())
                parts.append((first, middle, kept, depth + 1))
                handed[middle] = min(depth, handed.get(middle, depth))
                rest = (middle + 1, last, kept + self.handed[middle], depth)
            if rest[0] <= last:
                parts.append(rest)
        for b, depth in handed.items():
            row = self.chain.gaps[b][self.chain.goes_on[b]]
            made.bits[row] = _at_depth(np.zeros(len(row), np.uint8), depth)
        return made


def _at_depth(bits: Bits, depth: int) -> Bits:
    """What a block saves when it is run again ``depth`` times: kept once it is restored, the rest not even then."""
    if depth == 0:
        return bits
    stays = EVICT if depth == 1 else PASS
    return np.where(bits == KEEP, stays, DROP).astype(np.uint8)
