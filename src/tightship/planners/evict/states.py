"""Every order, eviction, repetition and place of a small graph, as paths through states: the best plan there is.

Problem: the fastest plan within the budget, in whatever order, with as many runs of each op as it takes. Measure:
exact bytes and seconds, as the replay counts them; with ``place`` the arena's bytes, every copy at an offset of its
own. Source: shortest paths (Dijkstra 1959) over what has run and what is in memory, and where; a copy that lies as
low as it can lies on a stack of others, which leaves few offsets to try. Guarantee: where ``work`` does not end it,
the least time of all plans that recompute, or proof that none fits. Complexity: exponential; up to some six ops with
offsets, sixteen without. Known limits: recomputation only, at most 64 ops; the problem's order is of no account.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from tightship.analysis.order import predecessors
from tightship.graph import Graph, aligned
from tightship.options import option
from tightship.plan import Step
from tightship.planners.evict import keep
from tightship.planners.evict.problem import Decision, EvictionProblem, Progress, csr
from tightship.simulate import extra_bytes, replay, unplanned

__all__ = ["MOST_OPS", "Options", "Shortest", "placed", "plan", "searchable", "shortest"]

MOST_OPS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What counts, and limits of the search."""

    work: int = option(1_000_000, "runs of ops tried at most; makes a plan reproducible")
    seconds: float = option(8.0, "wall clock at most")
    place: bool = option(False, "give every copy an offset, all of them within the budget")
    hand_out: bool = option(False, "what is kept lies outside the arena, and counts from the start")


@dataclass(frozen=True, slots=True)
class Shortest:
    """The steps of the fastest plan (None: there is none), its seconds of recomputation, whether everything was tried
    that could be better, and the runs that were."""

    steps: tuple[Step, ...] | None
    extra: float
    complete: bool
    work: int


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision; keep everything where none is found."""
    kept = keep.plan(problem, budget)
    o = options or Options()
    if kept.met or not searchable(problem):
        return kept
    found = shortest(problem, budget, o)
    if found.steps is None:
        return kept
    line = replay(problem.graph, found.steps)
    runs = sum(step.kind == "recompute" for step in found.steps)
    extra = max(0.0, line.time - unplanned(problem.graph).time)
    return Decision(
        problem.nothing(), line.peak, extra, runs, line.peak <= budget, work=found.work, steps=found.steps
    )


def searchable(problem: EvictionProblem) -> bool:
    """Whether recomputation is allowed, of all storages, in a graph of few ops."""
    return len(problem.order) <= MOST_OPS and "recompute" in problem.means and not problem.only


def shortest(problem: EvictionProblem, budget: int, o: Options, cutoff: float = math.inf) -> Shortest:
    """The fastest plan within ``budget`` bytes that takes at most ``cutoff`` seconds beyond each op once."""
    graph = problem.graph
    size, first, last, rows, defined = _requests(graph)
    steps, extra, met, complete, work, stopped = problem.engine.states(
        before=csr(_before(problem)),
        temporaries=csr(rows),
        size=np.array(size, dtype=np.int64),
        first=np.array(first, dtype=np.int32),
        last=np.array(last, dtype=np.int32),
        defined=csr(defined),
        limit=budget,
        place=o.place,
        hand_out=o.hand_out,
        work=o.work,
        seconds=o.seconds,
        cutoff=cutoff,
    )
    problem.archive.stopped |= stopped
    made = problem.steps_of(steps) if met else None
    return Shortest(made, extra, complete, work)


def placed(
    problem: EvictionProblem, budget: int, o: Options, fits: Callable[[tuple[Step, ...]], bool]
) -> Shortest:
    """The fastest plan within ``budget`` bytes whose layout ``fits``: the fastest of all by its bytes alone, where
    that has a place for everything, or by the places themselves."""
    found = shortest(problem, budget, replace(o, place=False))
    if not o.place or problem.archive.stopped or (found.steps is None and found.complete):
        return found
    if found.steps is not None and fits(found.steps):
        return found
    left = replace(o, work=o.work - found.work)
    exact = shortest(problem, budget, left)
    if exact.steps is not None and not fits(exact.steps):
        return replace(exact, steps=None, complete=False)
    return exact


def _before(problem: EvictionProblem) -> list[list[int]]:
    """What runs before each op, the random ops that the graph takes for pure ones in their order."""
    rows = [set(row) for row in predecessors(problem.graph)]
    for a, b in pairwise(problem.chained):
        rows[b].add(a)
    return [sorted(row) for row in rows]


_END = (1 << 31) - 1


def _requests(
    graph: Graph,
) -> tuple[list[int], list[int], list[int], list[list[int]], list[list[int]]]:
    """Temporaries of all ops: size, first and last tick; by op, which are its own, and the ticks of its results."""
    size: list[int] = []
    first: list[int] = []
    last: list[int] = []
    rows: list[list[int]] = []
    defined: list[list[int]] = []
    fit = partial(aligned, alignment=graph.alignment)
    for k, op in enumerate(graph.ops):
        begin = len(size)
        for r in op.requests:
            if r.storage < 0 and r.size:
                size.append(fit(r.size))
                first.append(r.start)
                last.append(r.end if r.end >= 0 else _END)
        if block := extra_bytes(op) - (op.workspace if op.requests else 0):
            size.append(fit(block))
            first.append(-1)
            last.append(_END)
        rows.append(list(range(begin, len(size))))
        starts = {r.storage: r.start for r in op.requests if r.storage >= 0}
        defined.append([starts.get(j, -1) for j in range(len(graph.uses.defines[k]))])
    return size, first, last, rows, defined
