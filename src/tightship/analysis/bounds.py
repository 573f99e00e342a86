"""Lower bounds on the peak and on the time of any plan: computed apart from every planner, by other means.

`lower_bound` is the largest working set of an op plus what must be live then; `time_bound` what any plan within a
budget takes. Both look at single moments (`relaxation`): what several moments ask for together is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tightship.analysis.moments import Moments
from tightship.analysis.order import predecessors, successors
from tightship.analysis.relaxation import Relaxation, runs_again
from tightship.graph import Graph
from tightship.simulate import baseline, extra_bytes, replay

__all__ = ["Bound", "lower_bound", "replayable", "time_bound"]

_MARK_WORK = 20_000_000
"""Edges looked at, at most, while marking what must be in memory (largest storages first)."""
_CUTS = 64
_CUT_WORK = 400_000
"""Moments looked at, at most, and ops in all of them together (an op and all its ancestors make one network)."""


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


def _marks(start: Sequence[int], edges: Sequence[Sequence[int]]) -> tuple[set[int], int]:
    seen = set(start)
    stack = list(start)
    work = 0
    while stack:
        for b in edges[stack.pop()]:
            work += 1
            if b not in seen:
                seen.add(b)
                stack.append(b)
    return seen, work


def lower_bound(
    graph: Graph, *, recompute: bool = True, redraw: bool = True, least: Mapping[int, int] | None = None,
    in_place: bool = True,
) -> Bound:  # fmt: skip
    """Bytes no plan can stay under, whatever its order and however often it recomputes: for each op, the static
    set, what it reads, writes and needs while it runs, and what must be there too because it was made before the op
    in every order, is needed after it in every order, and cannot be made again from less; and for the end of a step,
    all results (in training, every gradient that no update consumes).

    Without ``recompute`` nothing can be made again or written over, and every op is passed at its best moment
    (`moments`); without ``redraw`` nothing random is. ``least`` is the bytes in which storages can wait (see
    `Relaxation`): for plans that compress storages, or move them out. ``in_place``: results may take the places
    of inputs.
    """
    relaxed = Relaxation(graph, least, redraw=redraw, in_place=in_place and recompute)
    load = [relaxed.own(k) for k in range(len(graph.ops))]
    if not load:
        return Bound(graph.static_bytes)
    _add_stuck(relaxed, load, recompute)
    if recompute:
        ranked = sorted(range(len(load)), key=lambda k: -load[k])
        for k in _few(ranked, len(load)):
            load[k] = max(load[k], relaxed.least_bytes(relaxed.moment(k)))
    else:
        moments = Moments(graph)
        ranked = sorted(range(len(load)), key=lambda k: -load[k])
        for k in _few(ranked, len(load)):
            load[k] = max(load[k], moments.passing(k).bytes)
    best = max(range(len(load)), key=load.__getitem__)
    end, last = _at_end(relaxed, alone=recompute and not least)
    bound = Bound(max(load[best], end))
    bound.op = best if load[best] >= end else last
    return bound


def _at_end(relaxed: Relaxation, *, alone: bool) -> tuple[int, int]:
    """Bytes when the last result comes to stay, and the op that makes it (-1: none has to).

    All other results are there already. If results can only be made (``alone``), not unpacked or copied back, the op
    that makes the last one holds what it reads and makes besides: the least that any such op needs counts.
    """
    graph, uses = relaxed.graph, relaxed.uses
    size = relaxed.size.tolist()
    stay = graph.static | graph.kept
    floor = graph.static_bytes + sum(size[s] for s in graph.kept - graph.static)
    makers = {w for s in graph.kept - graph.static for w in uses.writers[s]}
    if not alone or not makers:
        return floor, -1

    def beside(k: int) -> int:
        touched = {*uses.reads[k], *uses.defines[k]} - stay
        return max(0, sum(size[s] for s in touched) + extra_bytes(graph.ops[k]) - relaxed.reused(k))

    last = min(sorted(makers), key=beside)
    return floor + beside(last), last


def _few(ranked: Sequence[int], ops: int) -> list[int]:
    """The first of ``ranked`` and some from everywhere else, as many as the work allows."""
    most = min(_CUTS, max(2, _CUT_WORK // max(1, ops)))
    first = ranked[: most // 2]
    rest = sorted(set(ranked) - set(first))
    return [*first, *(rest[j] for j in _spread(len(rest), most - len(first)))]


def _spread(n: int, most: int) -> Iterable[int]:
    """At most ``most`` of ``range(n)``, evenly."""
    return range(n) if n <= most else sorted({(2 * j + 1) * n // (2 * most) for j in range(most)})


def _add_stuck(relaxed: Relaxation, load: list[int], recompute: bool) -> None:
    """Add to every op's bytes the storages that no plan can make again and that are there while it runs."""
    graph, uses, waits = relaxed.graph, relaxed.uses, relaxed.waits.tolist()
    before = predecessors(graph)
    after = successors(before)

    def stays(s: int) -> bool:
        return not recompute or not all(
            runs_again(graph, w, redraw=relaxed.redraw) for w in uses.writers[s][:1]
        )

    stuck = [
        s for s in range(len(waits)) if s not in graph.static and waits[s] and uses.writers[s] and stays(s)
    ]
    work = 0
    for s in sorted(stuck, key=lambda s: -waits[s]):
        if work > _MARK_WORK:
            break
        later, w1 = _marks(uses.writers[s][:1], after)
        if s in graph.kept:
            earlier: set[int] = later
            w2 = 0
        else:
            earlier, w2 = _marks(uses.readers[s], before)
        work += w1 + w2
        touching = {uses.definer[s], *uses.readers[s]}
        for k in later & earlier:
            if k not in touching:
                load[k] += waits[s]


def time_bound(
    graph: Graph, budget: int, *, redraw: bool = True, least: Mapping[int, int] | None = None,
    in_place: bool = True,
) -> float:  # fmt: skip
    """Seconds no plan within ``budget`` bytes can stay under: every op once, and the recomputation that a Lagrangian
    relaxation shows to be unavoidable. Infinite where the relaxation shows that no plan meets the budget.

    Valid for any order and any recomputation (without ``redraw``: that runs no random op again), and with ``least``
    (see `Relaxation`) also for plans that compress or move storages without ever waiting for it. Looks at moments at
    which keeping everything would be over the budget.
    """
    total = math.fsum(op.time for op in graph.ops)
    relaxed = Relaxation(graph, least, redraw=redraw, in_place=in_place)
    if _at_end(relaxed, alone=not least)[0] > budget:
        return math.inf
    steps = baseline(graph)
    during = replay(graph, steps).during
    over = {s.op: n for s, n in zip(steps, during, strict=True) if s.kind == "compute" and n > budget}
    if not over:
        return total
    found: dict[int, float] = {}

    def look(ops: Iterable[int]) -> None:
        for k in ops:
            if k not in found and len(found) < most:
                found[k] = relaxed.least_seconds(relaxed.moment(k), budget)

    most = min(_CUTS, max(4, _CUT_WORK // len(graph.ops)))
    ranked = sorted(over, key=lambda k: -over[k])
    look(_few(ranked, len(graph.ops) * 2))
    while len(found) < most:  # around the best one, nearer and nearer
        best, known = max(found, key=lambda k: found[k]), len(found)
        look(k for d in (1, 2, 4, 8, 16) for k in (best - d, best + d) if k in over)
        if len(found) == known:
            break
    return total + max(found.values())
