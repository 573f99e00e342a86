"""Results made in two turns, near the least memory: some of them late, from nothing, when all others are there.

While an op that needs much runs for the last time, results that it does not lead to are in memory, or are made after
it. Those that need little of their own to be made, as the gradients of the last layer's weights, had better be late:
the first turn is planned without them, the second one makes them alone, and runs again what that takes. Each turn is
a graph by itself, with its own order and evictions; what one leaves is beside the other.
What runs but once runs in the first turn, and what the second one reads of that stays; what hints keep is made by
ops that run but once, and no turn leaves the other what a hint says has to be recomputed. What stays may also be what
would take long to make again and is small: a minimum cut says what, by the price of a byte (`splits`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from tightship import _core
from tightship.analysis.bounds import Relaxation, lower_bound
from tightship.analysis.order import Mask, edges, pairs, reached
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.plan import Step
from tightship.simulate import Timeline

__all__ = ["Split", "Storages", "Turn", "joined", "splits", "turns", "ways"]

_SMALL = 0.004
"""Results of less than this part of the peak are not worth a turn."""
_LOOKS, _OFFERED = 20, 2
"""Ways to make so many results late that are looked at, with those that are offered, and the latter."""
_BEGINNINGS, _SPLITS, _SPLIT_OPS = 40, 80, 160_000
"""How many beginnings of all large results are made late, how many sets of them there are with others, and ops in all
of them together."""
_PRICES = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Parts of a step's time that as many bytes as its peak are worth."""
_ENDLESS, _TICKS = 1 << 60, 1 << 44
"""A capacity that no cut comes to, and what the time of all ops comes to."""

Storages = frozenset[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A part of a graph as a graph with the same values and storages: ``ops`` of the whole, in its order; what is
    there at the end (``stay``), and the bytes ``beside`` it all the time."""

    graph: Graph
    ops: tuple[int, ...]
    stay: Storages
    beside: int


def ways(
    graph: Graph, relaxed: Relaxation, line: Timeline, deadline: Deadline, leave: Storages = frozenset()
) -> Iterator[tuple[int, tuple[Turn, Turn]]]:
    """Pairs of turns that make large results, alone or with those made next to them, late, and what the first one
    needs at least as far as is easily seen: of every number of results those of which both turns promise least.
    ``line``: of the least peak so far; ``leave`` as for `turns`."""
    queues = defaultdict[int, list[tuple[int, int, int, Storages, tuple[Turn, Turn] | None]]](list)
    for nth, (first, second, some) in enumerate(_guesses(graph, relaxed, line)):
        heappush(queues[len(some)], (max(first, second), -first, nth, some, None))
    for queue in queues.values():
        offered = 0
        for _ in range(_LOOKS):
            if not queue or queue[0][0] >= line.peak or offered == _OFFERED or deadline.over:
                break
            _, first, nth, some, pair = heappop(queue)
            if pair is not None:
                offered += 1
                yield -first, pair
            elif (pair := turns(graph, some, relaxed.again, leave=leave)) is not None:
                late = pair[1]
                least = lower_bound(late.graph, redraw=False, in_place=bool(relaxed.pairs), deadline=deadline)
                heappush(queue, (max(-first, late.beside + least), first, nth, some, pair))


def _guesses(graph: Graph, relaxed: Relaxation, line: Timeline) -> Iterator[tuple[int, int, Storages]]:
    """Results to make late, and what both turns need at least, as far as is easily seen."""
    made = {step.op: i for i, step in enumerate(line.steps) if step.kind == "compute"}
    writers, size = graph.uses.writers, graph.columns.size
    results = [s for s in graph.kept - graph.static if writers[s]]
    total, backward = int(size[results].sum()), edges(graph, forward=False)
    large = [s for s in results if size[s] >= _SMALL * line.peak]
    own = np.where(relaxed.again, relaxed.own, 0)
    for some in _windows(sorted(large, key=lambda s: made[writers[s][-1]])):
        early = sum(int(size[s]) for s in some if made[writers[s][-1]] < line.peak_step)
        if not early:
            continue
        makers = [k for s in some for k in writers[s]]
        runs = reached(makers, backward)
        runs[makers] = True
        yield line.peak - early, int(own[runs].max()) + total - int(size[some].sum()), frozenset(some)


class Split(NamedTuple):
    """Results to make late, storages to leave for that (``carried``), seconds of what runs again for them, and the
    bytes of the former beyond those of the latter."""

    again: float
    saved: int
    late: Storages
    carried: Storages


def splits(graph: Graph, relaxed: Relaxation, line: Timeline, deadline: Deadline) -> list[Split]:
    """Ways to make large results late, none of which saves as many bytes as one that takes less time, the fastest
    first. ``line`` says in which order they are made."""
    made = {step.op: i for i, step in enumerate(line.steps) if step.kind == "compute"}
    writers, size = graph.uses.writers, graph.columns.size
    large = [s for s in graph.kept - graph.static if writers[s] and size[s] >= _SMALL * line.peak]
    rows = sorted(large, key=lambda s: (made[writers[s][-1]], s))
    sets = dict.fromkeys(frozenset(some) for some in (*_beginnings(rows), *_windows(rows)))
    found, network = list[Split](), _Network(relaxed)
    for some in list(sets)[: max(2, min(_SPLITS, _SPLIT_OPS // max(1, len(graph.ops))))]:
        if deadline.over:
            break
        found += network.splits(some, line.peak)
    best: list[Split] = []
    for split in sorted(found, key=lambda x: (x.again, -x.saved)):
        if split.saved > (best[-1].saved if best else 0):
            best.append(split)
    return best


def _beginnings(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    step = -(-len(rows) // _BEGINNINGS)
    return (rows[:length] for length in range(max(1, step), len(rows), max(1, step)))


class _Network:
    """What runs again for late results: nodes for source and sink, for each op, and for each storage as it is needed
    and as it is made."""

    def __init__(self, relaxed: Relaxation) -> None:
        graph, facts = relaxed.graph, relaxed.uses.facts
        self.relaxed, self.backward = relaxed, edges(graph, forward=False)
        self.size, self.writers = graph.columns.size, relaxed.uses.writers
        n, static = len(graph.ops), relaxed.static
        self.need, self.make, self.nodes = 2 + n, 2 + n + len(self.size), 2 + n + 2 * len(self.size)
        self.single = np.diff(facts.writers[0]) == 1
        op, storage = pairs(facts.reads).T
        single = self.single[storage]
        rows = [np.stack((op, self.need + storage))[:, single]]
        some = (
            ~static[storage] & ~single
        )  # what several ops write is made by as many of them as wrote it before
        for k, s, needs in zip(op[some], storage[some], facts.needs[1][some], strict=True):
            before = self.writers[s][:needs]
            rows.append(np.stack((np.full(len(before), k), 2 + np.array(before, dtype=np.int64))))
        self.reader, self.head = np.concatenate(rows, axis=1)
        storage, self.writer = pairs(facts.writers)[self.single[pairs(facts.writers)[:, 0]]].T
        self.made = storage

    def _closure(self, makers: Sequence[int]) -> Mask:
        runs = reached(makers, self.backward)
        runs[makers] = True
        return runs

    def splits(self, late: Storages, peak: int) -> Iterator[Split]:
        """What is best carried to the second turn, by the price of a byte: a minimum cut between what the late
        results need and the ops that would run again."""
        relaxed, need, make = self.relaxed, self.need, self.make
        graph, again = relaxed.graph, relaxed.again
        makers = sorted({k for s in late for k in self.writers[s]})
        early = sorted({k for s in graph.kept - graph.static - late for k in self.writers[s]})
        first, second = self._closure(early) | ~again, self._closure(makers)
        reads, ops = second[self.reader], np.flatnonzero(second & first)
        writer, made = self.writer[second[self.writer]], self.made[second[self.writer]]
        heads = 2 + np.array(makers), self.head[reads], 2 + writer, make + made, np.ones(len(ops))
        tails = np.zeros(len(makers)), 2 + self.reader[reads], make + made, need + made, 2 + ops
        tail, head = (np.concatenate(x).astype(np.int32) for x in (tails, heads))
        always = np.full(len(makers) + int(reads.sum()) + len(made), _ENDLESS)
        seconds = np.where(again[ops], relaxed.seconds[ops] * _TICKS, _ENDLESS)
        for price in _PRICES:
            nbytes = np.where(first[writer], np.ceil(self.size[made] * (price * _TICKS / peak)), _ENDLESS)
            capacity = np.concatenate((always, nbytes, seconds)).astype(np.int64)
            value, near = _core.min_cut(self.nodes, tail, head, capacity, 0, 1, math.inf)
            if value >= _ENDLESS:
                return
            near = near.astype(np.bool_)
            carried = made[near[need + made] & ~near[make + made]]
            runs = float(graph.columns.time[ops[near[2 + ops]]].sum())
            saved = int(self.size[sorted(late)].sum() - self.size[carried].sum())
            yield Split(runs, saved, late, frozenset(carried.tolist()))


def _windows(rows: Sequence[int]) -> Iterator[list[int]]:
    length = 1
    while length < len(rows):
        for at in range(0, len(rows), max(1, length // 2)):
            yield list(rows[at : at + length])
        length *= 2


def turns(
    graph: Graph,
    late: Storages,
    again: Mask,
    carried: Storages = frozenset(),
    leave: Storages = frozenset(),
) -> tuple[Turn, Turn] | None:
    """The two turns that make ``late`` results in the second one, for which the first one leaves what is ``carried``,
    and nothing of what has to ``leave``; None where that cannot be."""
    uses = graph.uses
    results = graph.kept - graph.static
    first, _ = _closure(graph, (results - late) | carried, range(0), np.flatnonzero(~again).tolist())
    if first is None:
        return None
    there = {s for s in range(len(graph.storages)) if uses.writers[s] and first.issuperset(uses.writers[s])}
    left = {s for s in there if s in carried or not all(again[k] for k in uses.writers[s])}
    second, given = _closure(graph, late, (results - late) | left, ())
    if second is None or given & leave or not all(again[k] for k in first & second):
        return None
    rest = set(range(len(graph.ops))) - first - second
    if rest:  # what leads to no result
        more, _ = _closure(graph, frozenset(), range(0), sorted(rest))
        assert more is not None
        first |= more
        if not all(again[k] for k in first & second):
            return None
    alone = second - first
    if _stale(graph, first, second) or any(c in alone for k in first for c in graph.ops[k].control):
        return None
    stay = (results - late) | given
    size = graph.columns.size
    beside = int(size[sorted(stay - given)].sum())
    return _turn(graph, first, frozenset(), stay, 0), _turn(graph, second, given, late, beside)


def _stale(graph: Graph, first: set[int], second: set[int]) -> bool:
    """Whether one of the ops reads what the caller owns before it is written as it has to be, or after it was written
    again."""
    uses = graph.uses

    def wrong(k: int, s: int, writes: int) -> bool:
        before, after = uses.writers[s][:writes], uses.writers[s][writes:]
        late = k in second and bool(after) and s not in graph.ops[k].updates
        early = k in first and not first.issuperset(before)
        return late or early or (k not in first and not first.isdisjoint(after))

    return any(
        s in graph.static and wrong(k, s, writes)
        for k in first | second
        for s, writes in zip(uses.reads[k], uses.needs[k], strict=True)
    )


def _closure(
    graph: Graph, results: Iterable[int], there: Iterable[int], ops: Iterable[int]
) -> tuple[set[int] | None, Storages]:
    """The ops that make results, and those given, from what is ``there`` and the caller's, with what of that they
    read; None for the ops where they read it as it was before a later write."""
    uses, there, wanted = graph.uses, frozenset(there) | graph.static, set(results)
    found, given = set(ops), set[int]()
    stack = list(found)

    def want(s: int, writes: int) -> None:
        new = [k for k in uses.writers[s][:writes] if k not in found]
        found.update(new)
        stack.extend(new)

    for s in wanted:
        want(s, len(uses.writers[s]))
    while stack:
        k = stack.pop()
        views = {uses.maker[v] for v in graph.ops[k].inputs if graph.values[v].storage not in there}
        new = views - found - {-1}
        found |= new
        stack.extend(new)
        for s, writes in zip(uses.reads[k], uses.needs[k], strict=True):
            if s not in there or s in wanted:
                want(s, writes)
            elif s not in graph.static:
                if writes < len(uses.writers[s]):
                    return None, frozenset()
                given.add(s)
    again = {s for s in given if not found.isdisjoint(uses.writers[s])}  # beside other results of an op
    if any(len(uses.writers[s]) > 1 for s in again):
        return None, frozenset()
    if again:  # what makes views of them is needed, too
        return _closure(graph, wanted, there - graph.static - again, ops)
    return found, frozenset(given)


def _turn(graph: Graph, ops: set[int], given: Storages, stay: Storages, beside: int) -> Turn:
    order = tuple(sorted(ops))
    place = {k: i for i, k in enumerate(order)}
    rows = [graph.ops[k] for k in order]
    made = {v for op in rows for v in op.outputs}
    made_or_given = made.union(graph.inputs)
    values = [(v, x.storage) for v, x in enumerate(graph.values)]
    part = replace(
        graph,
        ops=tuple(replace(op, control=tuple(place[c] for c in op.control if c in place)) for op in rows),
        inputs=(
            *graph.inputs,
            *(v for v, s in values if s in given | graph.static and v not in made_or_given),
        ),
        outputs=tuple(v for v, s in values if s in stay and (v in made or s in graph.static)),
    )
    return Turn(part, order, stay, beside)


def joined(graph: Graph, parts: Sequence[Turn], steps: Sequence[Sequence[Step]]) -> tuple[Step, ...]:
    """The steps of both turns as steps of the graph: what ran before is recomputed, but for what is there."""
    ran: set[int] = set()
    there: Storages = frozenset()
    found: list[Step] = []
    for part, own in zip(parts, steps, strict=True):
        for step in own:
            if step.kind == "free":
                left = tuple(s for s in step.storages if s not in there)
                if left:
                    found.append(replace(step, storages=left))
                continue
            found += _run(graph, replace(step, op=part.ops[step.op]), there, ran)
        there |= part.stay
    if gone := tuple(sorted(there - graph.kept)):
        found.append(Step("free", storages=gone))
    return tuple(found)


def _run(graph: Graph, step: Step, there: Storages, ran: set[int]) -> Iterator[Step]:
    k = step.op
    made = graph.uses.defines[k] if step.kind == "compute" else step.storages
    kept = [pair for pair in step.reuses if pair[1] not in there]
    if k in ran:
        left = tuple(s for s in made if s not in there)
        yield replace(step, kind="recompute", storages=left, reuses=tuple(kept))
    else:
        ran.add(k)
        yield step
    if len(kept) < len(step.reuses):  # no result takes their places
        yield Step("free", storages=tuple(a for a, b in step.reuses if b in there))
