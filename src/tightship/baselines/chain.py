"""Dynamic programming over a chain of blocks: what each saves, and which ones are run again together.

Problem: cut the forward where little goes from one part to the next; for every block one of a few saved sets, or, for
a run of blocks, only what enters it, to be run again before its backward, where the same is decided again. Measure:
seconds of recomputation, peak within the budget; the program has the bytes and seconds of each block by itself, and
learns from the exact bytes of what it finds. Source: the optimal persistent schedules of rotor (Beaumont,
Eyraud-Dubois, Herrmann, Joly, Shilova 2019; before, Griewank 1992 and Gruslys et al. 2016), with options per block as
in Rockmate (Zhao et al. 2023). Guarantee: optimal for a chain of blocks whose costs add up, in memory rounded to
``slots``; none for the graph. Complexity: blocks cubed times slots. Known limits: what is run again in a run that is
itself run again stays by the engine's rule for `PASS`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tightship.baselines import min_cut
from tightship.cached import cached_property
from tightship.options import option
from tightship.planners.evict import keep, ladder
from tightship.planners.evict.problem import (
    DROP,
    EVICT,
    KEEP,
    PASS,
    Bits,
    Decision,
    EvictionProblem,
    Progress,
    best_of,
)

__all__ = ["Chain", "Choice", "Options", "family", "plan"]

PLANNER = "evict/chain"
"""Its group and its name on the command line."""


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
    """A problem's forward ops in ``blocks`` runs at most, each about as long as the others or a single op."""

    def __init__(self, problem: EvictionProblem, blocks: int) -> None:
        self.problem = problem
        self.boundary = problem.boundary
        self.size = np.array([s.size for s in problem.graph.storages], dtype=np.int64)
        self.time = np.array([problem.graph.ops[k].time for k in problem.order])
        self.place = np.empty(len(problem.order), dtype=np.int64)
        self.place[list(problem.order)] = np.arange(len(problem.order))
        self.across = np.flatnonzero(problem.crossing & ~problem.stays)
        """Gaps from the forward into the backward."""
        self._span()
        self.cuts = self._cut(blocks)
        """Where blocks begin, and the boundary at the end."""

    def _span(self) -> None:
        """From where to where each storage goes within the forward."""
        uses, static = self.problem.graph.uses, self.problem.graph.static
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
        wanted = set(self.problem.gaps[self.across, 0].tolist())
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
        out = np.zeros(len(self.problem.order), dtype=np.int64)
        out[: self.boundary] = np.searchsorted(self.cuts, np.arange(self.boundary), side="right") - 1
        now = self.length - 1
        for at in range(self.boundary, len(out)):
            for s in self.problem.graph.uses.reads[self.problem.order[at]]:
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
        made = self.block[self.made[self.problem.gaps[self.across, 0]]]
        return tuple(self.across[made == b] for b in range(self.length))

    @cached_property
    def goes_on(self) -> tuple[NDArray[np.bool_], ...]:
        """By block, parallel to its gaps: whether the storage goes to a later block."""
        return tuple(
            self.read[self.problem.gaps[row, 0]] >= self.cuts[b + 1] for b, row in enumerate(self.gaps)
        )

    @cached_property
    def hands_on(self) -> tuple[int, ...]:
        """By block: bytes of what goes to later blocks and into the backward."""
        return tuple(
            int(self.size[self.problem.gaps[row, 0]][on].sum())
            for row, on in zip(self.gaps, self.goes_on, strict=True)
        )

    @cached_property
    def forward(self) -> NDArray[np.float64]:
        """Seconds of each block's forward."""
        return np.array([self.time[a:b].sum() for a, b in pairwise(self.cuts)])

    @cached_property
    def results(self) -> tuple[int, ...]:
        """By block: bytes of results (gradients) that are there when its backward begins."""
        graph = self.problem.graph
        out = np.zeros(self.length, dtype=np.int64)
        for s in graph.kept - graph.static:
            if self.made[s] >= self.boundary:
                out[: self.block[self.made[s]]] += self.size[s]
        return tuple(out.tolist())

    def used(self, bits: Bits) -> NDArray[np.int64]:
        """By block: the most bytes in use while it runs, forward or backward."""
        out = np.zeros(self.length, dtype=np.int64)
        np.maximum.at(out, self.block, self.problem.engine.profile(bits))
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
        problem = self.problem
        yield problem.nothing()
        inside = np.zeros(len(problem.gaps), dtype=np.uint8)
        for row, on in zip(self.gaps, self.goes_on, strict=True):
            inside[row[~on]] = 1
        for kind in (EVICT, PASS, DROP):
            yield inside * np.uint8(kind)
        for d in min_cut.family(problem, 0, min_cut.Options(prices)):
            yield d.evict * inside

    def _measured(self, bits: Bits) -> list[Choice]:
        problem = self.problem
        bits = np.where(problem.engine.allowed >> bits & 1, bits, KEEP).astype(np.uint8)
        if not problem.cost(bits, 0).valid:
            return []
        keeps = [int(self.size[problem.gaps[row, 0]][bits[row] == KEEP].sum()) for row in self.gaps]
        before = np.concatenate([[0], np.cumsum(keeps)])
        use = problem.engine.profile(bits)
        time = np.zeros(self.length)
        again = self.place[problem.again(bits)]
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


Choices = tuple[tuple[Choice, ...], ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """The size of the program, and limits of the search around it."""

    blocks: int = option(40, "blocks at most")
    prices: int = option(10, "saved sets tried for each block")
    slots: int = option(400, "parts that memory is counted in")
    tries: int = option(5, "how often the program may learn from what it found")
    most: int = option(20_000, "graphs with more ops are not searched")
    work: int = option(20_000_000, "ops simulated at most, to give back what is not needed")
    seconds: float = option(5.0, "wall clock at most, to give back what is not needed")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found; what is missing to the budget taken by the ladder, what is not needed given back."""
    o = options or Options()
    best = keep.plan(problem, budget)
    if best.met or not len(problem.gaps):
        return best
    rows = [d for d in family(problem, budget, o) if d.valid]
    share = ladder.Options(o.work // 3, o.seconds / 3)
    for met in sorted((d for d in rows if d.met), key=lambda d: d.extra)[:1]:
        best = best_of((best, ladder.relaxed(problem, budget, met, share.work, share.seconds)))
    for over in sorted((d for d in rows if not d.met), key=lambda d: d.peak)[:2]:
        best = best_of((best, ladder.climb(problem, budget, over.evict, share, progress)))
    return best


def family(problem: EvictionProblem, budget: int, options: Options | None = None) -> Iterator[Decision]:
    """The program's decisions, with each block by itself and with blocks run again together; none without a
    chain."""
    o = options or Options()
    if not 0 < problem.boundary < len(problem.order) <= o.most:
        return
    chain = Chain(problem, o.blocks)
    if chain.length < 2:
        return
    choices = chain.choices(o.prices)
    if not all(choices):  # no decision for the whole chain can be carried out
        return
    for nested in (False, True):
        yield from _corrected(chain, choices, budget, o, nested)


def _corrected(chain: Chain, choices: Choices, budget: int, o: Options, nested: bool) -> Iterator[Decision]:
    """The program's decision, and those after it has learned what blocks needed beyond what it had believed."""
    problem, within, step = chain.problem, budget, (budget - chain.problem.graph.static_bytes) // 16
    beyond = np.zeros((2, chain.length), dtype=np.int64)
    for _ in range(o.tries):
        made = _Program(chain, choices, within, o.slots, nested, beyond).decisions()
        if made is None:  # the search goes on from what needs a little more
            within += step
            continue
        found = problem.cost(made.bits, budget)
        yield found
        if not found.valid or (found.met and within > budget):
            return
        if found.met:  # a little more than fits, which the ladder makes fit, may be better still
            within += budget - found.peak + step // 4
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
        self, chain: Chain, choices: Choices, budget: int, slots: int, nested: bool, beyond: NDArray[np.int64]
    ) -> None:
        self.chain, self.choices, self.budget, n = chain, choices, budget, chain.length
        self.slot = max(1, budget - chain.problem.graph.static_bytes) / slots
        self.kept = np.arange(slots + 1)
        self.kept_bytes: list[float] = (self.kept * self.slot).tolist()
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
        after = self.least[first + 1, last]
        for row, c in zip(own, self.choices[first], strict=True):
            fit = bisect_right(self.kept_bytes, self.budget - self._needs(first, last, c))
            kept = round(c.keeps / self.slot)
            fit = min(fit, len(after) - kept)
            if fit > 0:
                row[:fit] = after[kept : kept + fit] + c.time
        if not self.nested:
            return own, np.empty((0, len(self.kept)))
        again = self.sums[first + 1 : last + 1] - self.sums[first]
        parts = self.later[first + 1 : last + 1, last] + self.least[first, first:last] + again[:, None]
        most = np.maximum.accumulate(self.ahead[first:last]) + self.there[last]
        parts[self.kept[None, :] * self.slot + most[:, None] > self.budget] = np.inf
        return own, parts

    def decisions(self) -> _Made | None:
        """What the least asks of every gap; None if nothing fits."""
        n = self.chain.length
        made = _Made(self.chain.problem.nothing(), [0] * n, [0] * n, self.slot)
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
