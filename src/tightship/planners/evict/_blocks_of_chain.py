"""The forward pass as a chain of blocks that little goes between, and what each of them may save, with its price."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tightship.planners.evict import min_cut
from tightship.planners.evict._frame import DROP, EVICT, KEEP, PASS, Bits, Frame

__all__ = ["Chain", "Choice"]

_FEW = (1, 2, 3)
"""How many storages may go from block to block."""
_LONG = 1 / 4
"""More of them only if a block is longer than this part of the forward."""
_SMALL = 1 / 64
"""Storages of less than this part of the largest one do not count where blocks are cut."""
_FAR = 1 / 3
"""Nor do those that go on for this part of the forward: masks, what an encoder gives to all of a decoder, skips."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a block may save: decisions for its gaps (``bits``, parallel to the chain's gaps of that block), bytes
    kept for its backward, seconds run again there, and the most bytes, beyond what earlier blocks keep, while the
    block runs forward (``ahead``), and in either direction (``peak``)."""

    bits: Bits
    keeps: int
    time: float
    ahead: int
    peak: int


class Chain:
    """A frame's forward ops in ``blocks`` runs at most, each about as long as the others or a single op."""

    def __init__(self, frame: Frame, blocks: int) -> None:
        self.frame = frame
        self.boundary = frame.boundary
        self.size = np.array([s.size for s in frame.graph.storages], dtype=np.int64)
        self.time = np.array([frame.graph.ops[k].time for k in frame.order])
        self.place = np.empty(len(frame.order), dtype=np.int64)
        self.place[list(frame.order)] = np.arange(len(frame.order))
        rows = frame.gaps
        self.across = np.flatnonzero((rows[:, 1] < self.boundary) & (rows[:, 2] >= self.boundary))
        """Gaps from the forward into the backward."""
        self._span()
        self.cuts = self._cut(blocks)
        """Where blocks begin, and the boundary at the end."""

    def _span(self) -> None:
        """From where to where each storage goes within the forward."""
        uses, static = self.frame.graph.uses, self.frame.graph.static
        n = len(self.size)
        self.made, self.read = np.full(n, -1), np.full(n, -1)
        for s in range(n):
            if s in static or uses.definer[s] < 0:
                continue
            self.made[s] = self.place[uses.definer[s]]
            early = [int(self.place[k]) for k in uses.readers[s] if self.place[k] < self.boundary]
            self.read[s] = max(early, default=self.made[s])

    def _cut(self, blocks: int) -> list[int]:
        across = self._across()
        total = self.time[: self.boundary].sum()
        best, longest = [0], total
        for few in _FEW:
            cuts = [0]
            for c in range(1, self.boundary):
                if 0 < across[c] <= few and self.time[cuts[-1] : c].sum() >= total / max(1, blocks):
                    cuts.append(c)
            most = max(self.time[a:b].sum() for a, b in pairwise([*cuts, self.boundary]))
            if most < longest:
                best, longest = cuts, most
            if most <= total * _LONG:
                break
        return [*best, self.boundary]

    def _across(self) -> list[int]:
        """By position: how many storages of some size go from before it to ops from it on, before the backward; 0
        where the backward does not want one of them, so that nothing would be saved there."""
        wanted = set(self.frame.gaps[self.across, 0].tolist())
        inside = (self.made >= 0) & (self.made < self.boundary) & (self.read > self.made)
        small = self.size[inside].max(initial=0) * _SMALL
        inside &= (self.size >= small) & (self.read - self.made <= self.boundary * _FAR)
        begin: dict[int, list[int]] = defaultdict(list)
        for s in np.flatnonzero(inside).tolist():
            begin[int(self.made[s]) + 1].append(s)
        now: list[int] = []
        out = []
        for c in range(self.boundary):
            now = [s for s in now if self.read[s] >= c] + begin[c]
            out.append(len(now) if wanted.issuperset(now) else 0)
        return out

    @property
    def length(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def block(self) -> NDArray[np.int64]:
        """By position: the block of a forward op, and the one whose backward is under way."""
        out = np.zeros(len(self.frame.order), dtype=np.int64)
        out[: self.boundary] = np.searchsorted(self.cuts, np.arange(self.boundary), side="right") - 1
        now = self.length - 1
        for at in range(self.boundary, len(out)):
            for s in self.frame.graph.uses.reads[self.frame.order[at]]:
                if 0 <= self.made[s] < self.boundary:
                    now = min(now, self._user(s))
            out[at] = now
        return out

    def _user(self, s: int) -> int:
        """The block whose backward reads a storage: the one that makes it, or the next if it goes there."""
        made = int(np.searchsorted(self.cuts, self.made[s], side="right")) - 1
        return min(made + 1, self.length - 1) if self.read[s] >= self.cuts[made + 1] else made

    @cached_property
    def gaps(self) -> tuple[NDArray[np.int64], ...]:
        """By block: gaps from its forward into the backward, of what it makes."""
        made = self.block[self.made[self.frame.gaps[self.across, 0]]]
        return tuple(self.across[made == b] for b in range(self.length))

    @cached_property
    def goes_on(self) -> tuple[NDArray[np.bool_], ...]:
        """By block, parallel to its gaps: whether the storage goes to a later block."""
        return tuple(
            self.read[self.frame.gaps[row, 0]] >= self.cuts[b + 1] for b, row in enumerate(self.gaps)
        )

    @cached_property
    def hands_on(self) -> tuple[int, ...]:
        """By block: bytes of what goes to later blocks and into the backward."""
        return tuple(
            int(self.size[self.frame.gaps[row, 0]][on].sum())
            for row, on in zip(self.gaps, self.goes_on, strict=True)
        )

    @cached_property
    def forward(self) -> NDArray[np.float64]:
        """Seconds of each block's forward."""
        return np.array([self.time[a:b].sum() for a, b in pairwise(self.cuts)])

    @cached_property
    def results(self) -> tuple[int, ...]:
        """By block: bytes of results (gradients) that are there when its backward begins."""
        graph = self.frame.graph
        out = np.zeros(self.length, dtype=np.int64)
        for s in graph.kept - graph.static:
            if self.made[s] >= self.boundary:
                out[: self.block[self.made[s]]] += self.size[s]
        return tuple(out.tolist())

    def used(self, bits: Bits) -> NDArray[np.int64]:
        """By block: the most bytes in use while it runs, forward or backward."""
        out = np.zeros(self.length, dtype=np.int64)
        np.maximum.at(out, self.block, self.frame.engine.profile(bits))
        return out

    def choices(self, prices: int) -> tuple[tuple[Choice, ...], ...]:
        """By block: what none of the others is as good as in bytes kept, seconds and peak together; what all blocks
        do at one price is simulated at once."""
        found: list[dict[bytes, Choice]] = [{} for _ in range(self.length)]
        for bits in {bits.tobytes(): bits for bits in self._policies(prices)}.values():
            for b, choice in enumerate(self._measured(bits)):
                found[b].setdefault(choice.bits.tobytes(), choice)
        return tuple(_undominated(list(row.values())) for row in found)

    def _policies(self, prices: int) -> Iterator[Bits]:
        """Decisions for the whole chain: everything kept, nothing but what goes from block to block, and saved sets
        by price, besides."""
        frame = self.frame
        yield frame.nothing()
        inside = np.zeros(len(frame.gaps), dtype=np.uint8)
        for row, on in zip(self.gaps, self.goes_on, strict=True):
            inside[row[~on]] = 1
        for kind in (EVICT, PASS, DROP):
            yield inside * np.uint8(kind)
        for d in min_cut.family(frame, 0, min_cut.Options(prices)):
            yield d.evict * inside

    def _measured(self, bits: Bits) -> list[Choice]:
        frame = self.frame
        bits = np.where(frame.engine.allowed >> bits & 1, bits, KEEP).astype(np.uint8)
        if not frame.cost(bits, 0).valid:
            return []
        keeps = [int(self.size[frame.gaps[row, 0]][bits[row] == KEEP].sum()) for row in self.gaps]
        before = np.concatenate([[0], np.cumsum(keeps)])
        use = frame.engine.profile(bits)
        time = np.zeros(self.length)
        again = self.place[frame.again(bits)]
        np.add.at(time, self.block[again], self.time[again])
        ahead = np.maximum.reduceat(use[: self.boundary], self.cuts[:-1])
        peak = ahead.copy()
        np.maximum.at(peak, self.block, use)
        return [
            Choice(bits[row], keeps[b], float(time[b]), int(ahead[b] - before[b]), int(peak[b] - before[b]))
            for b, row in enumerate(self.gaps)
        ]


def _undominated(row: list[Choice]) -> tuple[Choice, ...]:
    row.sort(key=lambda c: (c.time, c.keeps, c.peak))
    out: list[Choice] = []
    for c in row:
        if not any(x.keeps <= c.keeps and x.peak <= c.peak for x in out):
            out.append(c)
    return tuple(out)
