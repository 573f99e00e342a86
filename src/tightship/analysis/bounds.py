"""Lower bounds on the peak and on the time of any plan: computed apart from every planner, by other means.

`lower_bound` is the largest working set of an op plus what must be live then; `time_bound` what any plan within a
budget takes. Both look at single moments: what several moments ask for together is not seen.

Take the moment at which an op *k* runs for the first time. Whatever the order, its ancestors have run and its
descendants have not. A storage that a descendant reads and an ancestor made is in memory at that moment, or the
op that makes it runs again later, which in turn needs what it reads: in memory at that moment, or made again. The
cheapest such closure is a minimum cut, as in PyTorch's recomputation partitioner (Horace He, 2022), here with
seconds on ops and a price per byte on storages.

- With bytes as capacities and free ops, the cut is the least that must be there beside what *k* itself touches.
- With seconds as capacities and the price chosen so that the bytes just fit, it is a Lagrangian bound (Geoffrion,
  1974) on the seconds of recomputation of every plan within the budget; cuts being integral, it equals the bound
  of the linear relaxation.

Results of the graph count as well that are made by ops which may run before *k* or after it: each is in memory at
that moment, or made later from what is, where running such an op for the first time costs nothing.

Valid for every plan that reorders and recomputes, in any order and any number of times, and for plans that move or
compress storages when ``least`` says how few of a storage's bytes may stay in memory. What *k* may write a result
over need not be there beside it, and then counts like any other storage. Capacities are rounded down to
integers, so that rounding only weakens a bound.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.last_runs import last_run_bound
from tightship.analysis.moments import Moments
from tightship.analysis.order import Mask, Rows, edges, once, pairs, reached
from tightship.analysis.versions import Versions
from tightship.cached import cached_property
from tightship.graph import Graph, distinct
from tightship.options import NEVER, Deadline
from tightship.simulate import SET_MOVES, extras, unplanned

__all__ = [
    "Bound", "Moment", "Priced", "Relaxation", "Ways", "lower_bound", "relaxation", "replayable", "runs_again",
    "single_moments", "time_bound",
]  # fmt: skip

_ENDLESS = 1 << 60
_SCALE = 1 << 44
"""Integer capacity that all seconds of a graph together come to."""
_ROUNDS = 40
_SAFE = 1 - 1e-9
"""What a bound in floating point is multiplied by, so that it never comes out above the true one."""
_MARK_WORK = 100_000_000
"""Edges looked at, at most, while marking what must be in memory (largest storages first)."""
_CUTS = 64
_CUT_WORK = 400_000
"""Moments looked at, at most, and ops in all of them together (an op and all its ancestors make one network)."""
_TOPS, _BESIDE = 3, (1, 2, 4, 8, 16)
"""Of the moments looked at, how many of the best have those so many ops beside them looked at, too."""


class Ways(TypedDict):
    """What the plans may do that a bound is for: the keywords of `lower_bound` and of bounds on the time."""

    redraw: bool
    least: Mapping[int, int]
    in_place: bool


def runs_again(graph: Graph, op: int, *, redraw: bool = True) -> bool:
    """Whether any plan may run the op a second time: it has no effect, draws nothing or (``redraw``) from a state
    that can be saved, and writes nothing of the caller's."""
    o = graph.ops[op]
    writes = any(s in graph.static and s not in o.updates for s in graph.uses.mutates[op])
    return not o.effect and not writes and (not o.random or (redraw and o.state > 0))


@dataclass(frozen=True)
class Moment:
    """The moment op ``op`` first runs: ``own`` bytes that are there in any case (the static set, all that it reads
    and makes, its workspace), and the network of what else is: ``tail``, ``head``, capacities ``seconds`` (scaled)
    and ``bytes`` by edge (each 0 where the other counts; -1: endless)."""

    op: int
    own: int
    tail: NDArray[np.int32]
    head: NDArray[np.int32]
    seconds: NDArray[np.int64]
    bytes: NDArray[np.int64]


class Priced(NamedTuple):
    """A bound in ``seconds``; the seconds of a cut ``within`` the bytes; the edge of the largest storage that this
    cut and the one on the other side of the price do not treat alike (-1: none); the cuts it took."""

    seconds: float
    within: float = math.inf
    edge: int = -1
    cuts: int = 1


class Relaxation:
    """A graph, prepared for bounds at any of its ops.

    ``least`` is the bytes in which a storage can wait until it is needed again: of its packed form, or none where
    it can be moved out of memory. All of its own, where nothing is said. ``redraw``: random ops may run again.
    ``in_place``: results may take the places of inputs. ``kept``: storages that are not made again, so that their ops
    are not run a second time.
    """

    def __init__(
        self,
        graph: Graph,
        least: Mapping[int, int] | None = None,
        *,
        redraw: bool = True,
        in_place: bool = True,
        kept: Collection[int] = (),
    ) -> None:
        self.graph = graph
        self.redraw = redraw
        self.kept = kept
        self.uses = graph.uses
        self.size = graph.columns.size
        self.static = np.zeros(len(self.size), dtype=np.bool_)
        self.static[list(graph.static)] = True
        self.waits = self.size.copy()
        for storage, nbytes in (least or {}).items():
            self.waits[storage] = min(nbytes, self.size[storage])
        starts = graph.columns.overwrites[0]
        self.pairs = {
            k: [p for p in graph.ops[k].overwrites if p[0] not in graph.static]
            for k in np.flatnonzero(np.diff(starts)).tolist()
            if in_place
        }
        self.total = math.fsum(graph.columns.time)
        self.last_runs: tuple[int, int] | None = None  # as `last_run_bound` found it

    @cached_property
    def nodes(self) -> int:
        """Nodes of a network: source, sink, ops, versions needed, versions to be made."""
        return 2 + len(self.graph.ops) + 2 * len(self.versions.size)

    @cached_property
    def _backward(self) -> Rows:
        return edges(self.graph, forward=False)

    @cached_property
    def _forward(self) -> Rows:
        return edges(self.graph, forward=True)

    @cached_property
    def again(self) -> Mask:
        """By op, whether any plan may run it a second time."""
        columns, writes = self.graph.columns, np.diff(self.uses.facts.mutates[0])
        found = (columns.effect == 0) & (columns.random == 0) & (writes == 0)
        for k in np.flatnonzero(~found).tolist():
            found[k] = runs_again(self.graph, k, redraw=self.redraw)
        found[[k for s in self.kept for k in self.uses.writers[s]]] = False
        return found

    @cached_property
    def _scaled(self) -> NDArray[np.int64]:
        """Seconds of running each op again, as integers; endless for what never does."""
        columns = self.graph.columns
        seconds = columns.time + SET_MOVES * self.graph.machine.state * (columns.random != 0)
        scaled = (seconds / self.total * _SCALE).astype(np.int64) if self.total else np.int64(0)
        return np.where(self.again, scaled, -1)

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Parts of the time that ops take when they run again, as cuts count them; 0 for what never does."""
        return np.maximum(self._scaled, 0) / _SCALE

    @cached_property
    def versions(self) -> Versions:
        """What is needed and made: of a storage that ops write in place, each version."""
        return Versions(self.graph, self.waits)

    @cached_property
    def own(self) -> NDArray[np.int64]:
        """By op, the bytes that are there while it runs, whatever the plan."""
        graph = self.graph
        own = extras(graph) + graph.static_bytes
        for rows in (pairs(self.uses.facts.defines), pairs(self.uses.facts.reads)):
            np.add.at(own, rows[:, 0], np.where(self.static, 0, self.size)[rows[:, 1]])
        for k in self.pairs:
            own[k] -= self.reused(k)
        return own

    def reused(self, k: int) -> int:
        """The most bytes of inputs whose places results of op ``k`` may take."""
        inputs, results = ({p[side] for p in self.pairs.get(k, ())} for side in (0, 1))
        return min(sum(int(self.size[s]) for s in side) for side in (inputs, results))

    def written_over(self, k: int) -> int:
        """The version in whose place a result of op ``k`` may lie; -1 without one, or where it is not known which."""
        if len(self.pairs.get(k, ())) != 1:
            return -1
        (over, _), uses = self.pairs[k][0], self.uses
        writes = uses.needs[k][uses.reads[k].index(over)]
        return int(self.versions.at(np.array([over]), np.array([writes]))[0])

    def moment(self, k: int, until: int | None = None) -> Moment:
        """The network of op ``k``. Nodes: 0 source, 1 sink, then ops, versions needed, versions to be made. With
        ``until``, an op that runs after it in every order, only what runs up to then needs anything."""
        versions = self.versions
        n, m = len(self.graph.ops), len(versions.size)
        before, after = reached((k,), self._backward), reached((k,), self._forward)
        soon, last = after, versions.results
        if until is not None:
            soon, last = after & reached((until,), self._backward), last[:0]
            soon[until] = True
        ran = before.copy()
        if len(last):  # what else makes results may have run before or not: afterwards, it costs nothing
            ran |= ~after
            ran[k] = False
        there = ran[versions.maker]  # perhaps made before, and not among what the op holds anyway
        there[versions.touches[versions.touches[:, 0] == k, 1]] = False
        if (over := self.written_over(k)) >= 0:
            there[over] = True
        reads = versions.reads[there[versions.reads[:, 1]]]
        again, later = reads[ran[reads[:, 0]]], reads[soon[reads[:, 0]]]
        wanted = distinct(np.concatenate((later[:, 1], last[there[last]])))
        held, ops = np.flatnonzero(there), np.flatnonzero(ran)
        seconds = np.where(before, self._scaled, 0)[ops]
        need, make = 2 + n, 2 + n + m
        tails: list[NDArray[Any]] = [
            np.zeros(len(wanted)),
            2 + again[:, 0],
            need + held,
            make + held,
            2 + ops,
        ]
        heads: list[NDArray[Any]] = [
            need + wanted,
            need + again[:, 1],
            make + held,
            2 + versions.maker[held],
            np.ones(len(ops)),
        ]
        ends = [np.full(len(wanted) + len(again), -1), np.full(len(held), -1)]
        none = [np.zeros(len(held), np.int64), np.zeros(len(ops), np.int64)]
        return Moment(
            k,
            int(self.own[k]),
            np.concatenate(tails).astype(np.int32),
            np.concatenate(heads).astype(np.int32),
            np.concatenate([ends[0], none[0], ends[1], seconds]),
            np.concatenate([ends[0], versions.size[held], ends[1], none[1]]),
        )

    def _cut(self, at: Moment, capacity: NDArray[np.int64], deadline: Deadline) -> tuple[int, Mask | None]:
        """The capacity of a minimum cut and the side of the source. Without time for it, a capacity that it has at
        least, and no side."""
        value, near = _core.min_cut(self.nodes, at.tail, at.head, capacity, 0, 1, deadline.left)
        return int(value), near.astype(np.bool_) if len(near) else None

    def least_bytes(self, at: Moment, deadline: Deadline = NEVER) -> int:
        """Bytes no plan can do without while the op of ``at`` runs for the first time."""
        endless = (at.bytes < 0) | (at.seconds < 0)
        value, _ = self._cut(at, np.where(endless, _ENDLESS, at.bytes), deadline)
        return at.own + value

    def least_seconds(self, at: Moment, budget: int, deadline: Deadline = NEVER) -> float:
        """Seconds of recomputation that every plan within ``budget`` bytes spends after the op of ``at`` first ran;
        infinite when there is no such plan. Less where the deadline ends it."""
        return self.priced(at, at.bytes, budget - at.own, deadline).seconds

    def priced(self, at: Moment, nbytes: NDArray[np.int64], room: int, deadline: Deadline = NEVER) -> Priced:
        """The cuts of a moment at the price at which its bytes just fit into ``room``; ``nbytes`` stands for its
        ``bytes``: 0 for a storage whose bytes ``room`` is already without, -1 for one that is not in memory."""
        endless = (nbytes < 0) | (at.seconds < 0)
        held, spent = np.where(endless, 0, nbytes), np.where(endless, 0, at.seconds)
        second = self.total / _SCALE

        def line(near: Mask) -> tuple[int, int, Mask]:
            cut = near[at.tail] & ~near[at.head]
            return int(spent[cut].sum()), int(held[cut].sum()), cut

        least, near = self._cut(at, np.where(endless, _ENDLESS, nbytes), deadline)
        if least > room:
            return Priced(math.inf)
        if near is None:
            return Priced(0.0)
        high = line(near)  # fewest bytes
        value, near = self._cut(at, np.where(endless, _ENDLESS, spent), deadline)
        if near is None:
            return Priced(value * second * _SAFE)
        low = line(near)  # fewest seconds
        best = float(value)
        if low[1] <= room:
            return Priced(best * second * _SAFE, best * second)
        cuts = 2
        for _ in range(_ROUNDS):
            price = (high[0] - low[0]) / (low[1] - high[1])
            capacity = np.where(endless, _ENDLESS, spent + (held * price).astype(np.int64))
            value, near = self._cut(at, capacity, deadline)
            cuts, best = cuts + 1, max(best, value - price * room)
            if near is None:
                break
            found = line(near)
            if found[:2] in (low[:2], high[:2]):
                break
            if found[0] + price * found[1] >= (high[0] + price * high[1]) * _SAFE:
                break
            low, high = (found, high) if found[1] > room else (low, found)
        apart = np.flatnonzero((low[2] != high[2]) & (held > 0))
        edge = int(apart[held[apart].argmax()]) if len(apart) else -1
        return Priced(best * second * _SAFE, high[0] * second, edge, cuts)


def relaxation(graph: Graph, least: Mapping[int, int] | None, *, redraw: bool, in_place: bool) -> Relaxation:
    """One relaxation serves both bounds; those with storages that wait in fewer bytes are not kept."""
    if least:
        return Relaxation(graph, least, redraw=redraw, in_place=in_place)
    found: Relaxation = once(
        graph, f"_relaxed_{redraw}_{in_place}", lambda g: Relaxation(g, redraw=redraw, in_place=in_place)
    )
    return found


class Bound(int):
    """A number of bytes that also knows the op that forces it (``op``, -1: the static set alone)."""

    op: int = -1


def replayable(graph: Graph, storage: int) -> bool:
    """Whether a storage's contents can be made again: every op that writes it is pure, writes nothing else but
    what it defines or leaves alone on replay, and sees final contents only (or the caller's)."""
    uses = graph.uses
    if storage in graph.static:
        return False
    for w in uses.writers[storage]:
        op = graph.ops[w]
        if not op.pure or any(m != storage and m not in op.updates for m in uses.mutates[w]):
            return False
        for t, need in zip(uses.reads[w], uses.needs[w], strict=True):
            if t == storage or t in graph.static or t in op.updates:
                continue
            if need != len(uses.writers[t]):
                return False
    return bool(uses.writers[storage])


def lower_bound(
    graph: Graph, *, recompute: bool = True, redraw: bool = True, least: Mapping[int, int] | None = None,
    in_place: bool = True, deadline: Deadline = NEVER,
) -> Bound:  # fmt: skip
    """Bytes no plan can stay under, whatever its order and however often it recomputes: for each op, the static
    set, what it reads, writes and needs while it runs, and what must be there too because it was made before the op
    in every order, is needed after it in every order, and cannot be made again from less; and for the end of a step,
    all results (in training, every gradient that no update consumes).

    Without ``recompute`` nothing can be made again or written over, and every op is passed at its best moment
    (`moments`); without ``redraw`` nothing random is. ``least`` is the bytes in which storages can wait (see
    `Relaxation`): for plans that compress storages, or move them out. ``in_place``: results may take the places
    of inputs. At the ``deadline``, the best bound so far.
    """
    relaxed = relaxation(graph, least, redraw=redraw, in_place=in_place and recompute)
    if not graph.ops:
        return Bound(graph.static_bytes)
    load = relaxed.own.copy()
    _add_stuck(relaxed, load, recompute, deadline)
    moments = None if recompute else Moments(graph)
    line = unplanned(graph)
    kept = {s.op: n for s, n in zip(line.steps, line.levels, strict=True) if s.op >= 0}
    most = int(load.max())
    for k in _few(np.argsort(-load, kind="stable").tolist(), _most(len(load))):
        if deadline.over:
            break
        if kept[k] < most:  # keeping everything is a plan, too: no bound at this op is above what it needs
            continue
        if moments is None:
            found = relaxed.least_bytes(relaxed.moment(k), deadline)
        else:
            found = moments.passing(k).bytes
        load[k] = max(int(load[k]), found)
        most = max(most, int(load[k]))
    best = int(load.argmax())
    end, last = _at_end(relaxed, alone=recompute and not least)
    nbytes, op = (int(load[best]), best) if load[best] >= end else (end, last)
    found, at = last_run_bound(relaxed, nbytes, deadline, enough=line.peak) if recompute else (nbytes, op)
    bound = Bound(found)
    bound.op = at if found > nbytes else op
    return bound


def _at_end(relaxed: Relaxation, *, alone: bool) -> tuple[int, int]:
    """Bytes when the last result comes to stay, and the op that makes it (-1: none has to).

    All other results are there already. If results can only be made (``alone``), not unpacked or copied back, the op
    that makes the last one holds what it reads and makes besides: the least that any such op needs counts.
    """
    graph, uses = relaxed.graph, relaxed.uses
    size = relaxed.size
    stay = graph.static | graph.kept
    floor = graph.static_bytes + int(size[list(graph.kept - graph.static)].sum())
    made = np.zeros(len(size), dtype=np.bool_)
    made[list(graph.kept - graph.static)] = True
    written = pairs(uses.facts.writers)
    makers = distinct(written[made[written[:, 0]], 1])
    if not alone or not len(makers):
        return floor, -1

    stays = np.zeros(len(size), dtype=np.bool_)
    stays[list(stay)] = True
    beside = extras(graph).copy()
    for rows in (uses.facts.reads, uses.facts.defines):
        touched = pairs(rows)
        np.add.at(beside, touched[:, 0], np.where(stays, 0, size)[touched[:, 1]])
    for k in relaxed.pairs:
        beside[k] -= relaxed.reused(k)
    beside = np.maximum(beside, 0)
    last = int(makers[beside[makers].argmin()])
    return floor + int(beside[last]), last


def _most(ops: int) -> int:
    """How many moments the work allows."""
    return min(_CUTS, max(2, _CUT_WORK // max(1, ops)))


def _few(ranked: Sequence[int], most: int) -> list[int]:
    """The first of ``ranked`` and some from everywhere else."""
    first = ranked[: most // 2]
    rest = sorted(set(ranked) - set(first))
    return [*first, *(rest[j] for j in _spread(len(rest), most - len(first)))]


def _spread(n: int, most: int) -> Iterable[int]:
    """At most ``most`` of ``range(n)``, evenly."""
    return range(n) if n <= most else sorted({(2 * j + 1) * n // (2 * most) for j in range(most)})


def _add_stuck(relaxed: Relaxation, load: NDArray[np.int64], recompute: bool, deadline: Deadline) -> None:
    """Add to every op's bytes the storages that no plan can make again and that are there while it runs."""
    graph, uses, waits = relaxed.graph, relaxed.uses, relaxed.waits
    first = uses.facts.definer
    stuck = (first >= 0) & (waits > 0) & ~relaxed.static
    if recompute:
        stuck[stuck] = ~relaxed.again[first[stuck]]
    rows = np.flatnonzero(stuck)
    forward, backward = (edges(graph, forward=forward) for forward in (True, False))
    most = max(1, _MARK_WORK // max(1, len(load) + len(forward[1])))
    for s in rows[np.argsort(-waits[rows], kind="stable")][:most].tolist():
        if deadline.over:
            break
        there = reached((first[s],), forward)
        if s not in graph.kept:
            there &= reached(uses.readers[s], backward)
        there[[first[s], *uses.readers[s]]] = False
        load[there] += waits[s]


def time_bound(
    graph: Graph, budget: int, *, redraw: bool = True, least: Mapping[int, int] | None = None,
    in_place: bool = True, deadline: Deadline = NEVER,
) -> float:  # fmt: skip
    """Seconds no plan within ``budget`` bytes can stay under: every op once, and the recomputation that a Lagrangian
    relaxation shows to be unavoidable. Infinite where the relaxation shows that no plan meets the budget.

    Valid for any order and any recomputation (without ``redraw``: that runs no random op again), and with ``least``
    (see `Relaxation`) also for plans that compress or move storages without ever waiting for it. Looks at moments at
    which keeping everything would be over the budget. At the ``deadline``, the best bound so far.
    """
    found = single_moments(graph, budget, redraw=redraw, least=least, in_place=in_place, deadline=deadline)
    return math.fsum(graph.columns.time) + max(found.values(), default=0.0)


def single_moments(
    graph: Graph, budget: int, *, redraw: bool = True, least: Mapping[int, int] | None = None,
    in_place: bool = True, deadline: Deadline = NEVER,
) -> dict[int, float]:  # fmt: skip
    """By op (-1: the end): seconds of recomputation that its moment shows, as `time_bound` looks at them."""
    relaxed = relaxation(graph, least, redraw=redraw, in_place=in_place)
    if _at_end(relaxed, alone=not least)[0] > budget:
        return {-1: math.inf}
    line = unplanned(graph)
    over = {s.op: n for s, n in zip(line.steps, line.levels, strict=True) if n > budget and s.op >= 0}
    found: dict[int, float] = {}
    if not over or deadline.over:
        return found

    def look(ops: Iterable[int]) -> None:
        for k in ops:
            if k not in found and len(found) < most and not (found and deadline.over):
                found[k] = relaxed.least_seconds(relaxed.moment(k), budget, deadline)

    most = max(4, _most(len(graph.ops)))
    ranked = sorted(over, key=lambda k: -over[k])
    look(_few(ranked, most // 2))
    while (
        len(found) < most and not deadline.over
    ):  # around the best one, and, once all that is known, the next ones
        known = len(found)
        for best in sorted(found, key=lambda k: -found[k])[:_TOPS]:
            look(k for d in _BESIDE for k in (best - d, best + d) if k in over)
            if len(found) > known:
                break
        else:
            break
    return found
