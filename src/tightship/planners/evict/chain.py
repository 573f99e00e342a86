"""Dynamic programming over a chain of blocks: what each saves, and which ones are run again together.

Problem: cut the forward where little goes from one part to the next; for every block one of a few saved sets, or, for
a run of blocks, only what enters it, to be run again before its backward, where the same is decided again. Measure:
seconds of recomputation, peak within the limit; the program works with the bytes and seconds of each block by itself,
the exact peak of what it finds judges, and corrects the limit it works with. Source: the optimal persistent schedules
of rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019; before, Griewank 1992 and Gruslys et al. 2016), with
options per block as in Rockmate (Zhao et al. 2023). Guarantee: optimal for a chain of blocks whose costs add up, in
memory rounded to ``slots``; none for the graph. Complexity: blocks cubed times slots. Known limits: what is run again
in a run that is itself run again stays by the engine's rule for `PASS`.
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

_CLOSE = 1 / 256
"""Of the room beyond the static set: limits nearer than that are not tried."""


@dataclass(frozen=True, slots=True)
class Options:
    """``blocks``: how many at most. ``prices``: saved sets tried for each. ``slots``: parts memory is counted in.
    ``tries``: limits the program works with, one after the other. ``most``: ops of graphs that it is for. ``work``:
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
    """One decision for each limit the program worked with; none where there is no chain."""
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
    """The program's decision for the limit, then for limits corrected by what its decisions really need."""
    room, within = limit - chain.frame.graph.static_bytes, limit
    low, high = limit - room // 4, limit + room // 4
    seen = set()
    for _ in range(o.tries):
        bits = _Program(chain, choices, within, o.slots, nested).decisions()
        if bits is None:
            low = aim = within
        else:
            found = chain.frame.cost(bits, limit)
            if bits.tobytes() not in seen:
                yield found
            seen.add(bits.tobytes())
            low, high = (within, high) if found.met else (low, within)
            over = found.peak - limit
            aim = within - (over if over <= 0 else max(over, int(room * _CLOSE)))
        if high - low <= room * _CLOSE:
            break
        within = aim if low < aim < high else (low + high) // 2


class _Program:
    """Seconds that blocks ``first`` to ``last`` run again, by slots of what is kept before them, for every such run:
    with what each block saves itself, or with a first part of them run again after the backward of the second."""

    def __init__(self, chain: Chain, choices: Choices, limit: int, slots: int, nested: bool) -> None:
        self.chain, self.choices, self.limit, n = chain, choices, limit, chain.length
        self.slot = max(1, limit - chain.frame.graph.static_bytes) / slots
        self.kept = np.arange(slots + 1)
        self.handed = [round(x / self.slot) for x in chain.hands_on]
        self.sums = np.concatenate([[0.0], np.cumsum(chain.forward)])
        # When blocks run forward again, the gradients made so far and the one on its way are there.
        self.there = [x + y for x, y in zip(chain.results, chain.hands_on, strict=True)]
        self.there[-1] = 0  # nothing is, when they first run
        self.ahead = [min(c.ahead for c in row) for row in choices]
        self.nested = nested
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

    def _ways(self, first: int, last: int) -> tuple[Floats, Floats]:
        """Seconds by slots kept before: for each choice of the first block, and for each first part of them that is
        run again, by its last block."""
        own = np.full((len(self.choices[first]), len(self.kept)), np.inf)
        for row, c in zip(own, self.choices[first], strict=True):
            least = max(c.peak, c.ahead + self.there[last])
            fits = self.kept * self.slot + least <= self.limit
            row[fits] = c.time + self._with(first + 1, last, round(c.keeps / self.slot))[fits]
        if not self.nested:
            return own, np.empty((0, len(self.kept)))
        again = self.sums[first + 1 : last + 1] - self.sums[first]
        parts = self.later[first + 1 : last + 1, last] + self.least[first, first:last] + again[:, None]
        most = np.maximum.accumulate(self.ahead[first:last]) + self.there[last]
        parts[self.kept[None, :] * self.slot + most[:, None] > self.limit] = np.inf
        return own, parts

    def decisions(self) -> Bits | None:
        """What the least asks of every gap; None if nothing fits."""
        bits = self.chain.frame.nothing()
        if not np.isfinite(self.least[0, self.chain.length - 1][0]):
            return None
        parts = [(0, self.chain.length - 1, 0, 0)]
        handed: dict[int, int] = {}
        while parts:
            first, last, kept, depth = parts.pop()
            own, again = (ways[:, kept] for ways in self._ways(first, last))
            if not len(again) or own.min() <= again.min():
                c = self.choices[first][int(own.argmin())]
                bits[self.chain.gaps[first]] = _at_depth(c.bits, depth)
                rest = (first + 1, last, kept + round(c.keeps / self.slot), depth)
            else:
                n = first + int(again.argmin())
                parts.append((first, n, kept, depth + 1))
                handed[n] = min(depth, handed.get(n, depth))
                rest = (n + 1, last, kept + self.handed[n], depth)
            if rest[0] <= last:
                parts.append(rest)
        for n, depth in handed.items():
            row = self.chain.gaps[n][self.chain.goes_on[n]]
            bits[row] = _at_depth(np.zeros(len(row), np.uint8), depth)
        return bits


def _at_depth(bits: Bits, depth: int) -> Bits:
    """What a block saves when it is run again ``depth`` times: kept once it is restored, the rest not even then."""
    if depth == 0:
        return bits
    stays = EVICT if depth == 1 else PASS
    return np.where(bits == KEEP, stays, np.where(bits == DROP, DROP, PASS)).astype(np.uint8)
