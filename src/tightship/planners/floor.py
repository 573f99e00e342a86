"""What is known before a search, and what is done near the least memory: what was reached for the graph, the plan of
a graph of the same ops, every plan of a small graph, and harder placement.

`Reached` has the plans of a graph for which every byte had a place, none of which another beats in both bytes and
seconds. A plan for less memory is an answer for more, so what was reached once is never refused later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tightship.analysis.moments import Runs, runs_of
from tightship.analysis.order import is_legal
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.plan import Plan, Step
from tightship.planners import run
from tightship.planners.evict import states
from tightship.planners.evict.problem import (
    COMPRESS,
    DROP,
    EVICT,
    KEEP,
    OFFLOAD,
    PASS,
    STAY,
    Decision,
    EvictionProblem,
)
from tightship.planners.layout import Layout, lay_out
from tightship.planners.order import cuts
from tightship.simulate import Timeline, replay

__all__ = [
    "Placed",
    "Placement",
    "Reached",
    "every_plan",
    "order_in",
    "reached",
    "rearranged",
    "released_early",
    "reordered",
    "same_ops",
    "seed",
]

_FEW, _STATES = 16, 1_000_000
"""Ops of graphs of which every plan is tried, and runs of them tried at most."""
_KEPT = 4_000_000
"""Ops of all plans that are kept for a graph."""
_FIRST, _AGAIN, _LEAST = 1.0, 10.0, 0.1
"""Seconds of the clock that offsets may take, the first time and where they are too far up (their limits of work
mostly end first), and that they may take in any case: less leaves holes of a fifth."""
_WORK, _MORE_WORK = 400_000, 4_000_000
"""Of the search for offsets, likewise."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What was decided, where it lies, and the least budget that it is within."""

    found: run.Evicted
    layout: Layout
    needs: int


@dataclass(slots=True)
class Reached:
    """Plans found so far, the smallest first, ``most`` of them: of large graphs each takes much memory."""

    most: int = 1_000
    plans: list[Placed] = field(default_factory=list)

    def offer(self, made: Placed) -> None:
        time = made.found.timeline.time
        if any(x.needs <= made.needs and x.found.timeline.time <= time for x in self.plans):
            return
        rest = [x for x in self.plans if x.needs < made.needs or x.found.timeline.time < time]
        self.plans = sorted([*rest, made], key=lambda x: x.needs)
        if len(self.plans) > self.most:  # the least, and what was offered last, are what calls ask for
            out = next(x for x in self.plans[1:] if x is not made)
            self.plans = [x for x in self.plans if x is not out]

    def within(self, budget: int) -> Placed | None:
        """The fastest for a budget: that of the largest that fits."""
        return next((x for x in reversed(self.plans) if x.needs <= budget), None)


def reached(graph: Graph, allowed: Hashable) -> Reached:
    """What was reached for a graph, as long as it lives, by plans that may do what ``allowed`` says."""
    # Where cached properties are kept.
    known: dict[Hashable, Reached] = graph.__dict__.setdefault("_reached", {})
    return known.setdefault(allowed, Reached(max(2, _KEPT // max(1, len(graph.ops)))))


# --- a plan of the same ops in other sizes ---


def same_ops(a: Graph, b: Graph) -> bool:
    """Whether two graphs are the same but for sizes, times and names: what is decided for one can be done in the
    other."""

    def wired(graph: Graph) -> Iterator[object]:
        yield graph.inputs, graph.outputs, len(graph.storages)
        yield tuple(v.storage for v in graph.values)
        for o in graph.ops:
            yield o.target, o.inputs, o.outputs, o.mutates, o.updates, o.control, o.random, o.effect, o.phase

    return len(a.ops) == len(b.ops) and all(x == y for x, y in zip(wired(a), wired(b), strict=True))


def order_in(plan: Plan) -> tuple[int, ...]:
    """The order of the ops in a plan."""
    return tuple(step.op for step in plan.steps if step.kind == "compute")


def seed(problem: EvictionProblem, plan: Plan) -> None:
    """Puts into the problem's archive what a plan of the same ops, in the problem's order, does with every gap."""
    leaves: dict[int, list[tuple[int, int]]] = {}
    position = -1
    for step in plan.steps:
        if step.kind == "compute":
            position += 1
        decision = _LEAVES.get(step.kind)
        if decision is not None and step.form == "full":
            for s in step.storages:
                leaves.setdefault(s, []).append((position, decision))
    evict = problem.nothing()
    for g, (s, begins, ends) in enumerate(problem.gaps.tolist()):
        # What is packed or copied out is then freed, too.
        evict[g] = max((d for at, d in leaves.get(s, ()) if begins <= at < ends), default=KEEP)
    evict[problem.stays] = np.where(evict[problem.stays], KEEP, STAY)
    evict[(problem.engine.allowed >> evict & 1) == 0] = KEEP
    problem.archive.offer(problem.cost(evict, _UNLIMITED))


def reordered(
    problem: EvictionProblem,
    graph: Graph,
    steps: Sequence[Step],
    deadline: Deadline,
    *,
    at_least: bool = False,
) -> EvictionProblem | None:
    """The problem in the order of first runs in which ``steps`` of the graph (with its random ops), their
    recomputations as they are, need less memory than in theirs; its archive has what they do with every gap. None
    where cuts find no such order; with ``at_least`` it is theirs then."""
    runs = runs_of(graph, steps)
    if runs is None:
        return None
    given = range(len(runs.ops))
    found = cuts.Search(runs.moments, _CUT_WORK, deadline).lower(given)
    order = runs.order(found.order)
    if found.peak >= int(runs.moments.during(given).max()):
        if not at_least:
            return None
        order = runs.order(given)
    if not is_legal(graph, order):
        return None
    other = problem.in_order(order)
    gone = other.nothing()
    for g, (s, begins, ends) in enumerate(other.gaps.tolist()):
        if ends < len(order):
            gone[g] = runs.stays.get((s, order[begins])) != runs.stays.get((s, order[ends]))
    for way in (EVICT, PASS, DROP):
        bits = gone * np.uint8(way)
        bits[(other.engine.allowed >> bits & 1) == 0] = KEEP
        other.archive.offer(other.cost(bits, _UNLIMITED))
    return other


def rearranged(graph: Graph, steps: Sequence[Step], deadline: Deadline) -> tuple[Step, ...] | None:
    """The same runs, recomputations too, in an order in which they need less; None where cuts find none, and for
    steps that do more than run ops and free storages."""
    if any(step.saves or step.form != "full" for step in steps):
        return None
    runs = runs_of(graph, steps, apart=True)
    if runs is None:
        return None
    given = range(len(runs.ops))
    found = cuts.Search(runs.moments, _CUT_WORK, deadline).lower(given)
    return runs.steps(found.order) if found.peak < int(runs.moments.during(given).max()) else None


def released_early(graph: Graph, steps: Sequence[Step]) -> tuple[Step, ...] | None:
    """The same runs, with each after which less is in memory right behind the last one that it waits for: updates
    then run once their gradients are there. None where that changes nothing, and for steps that do more than run ops
    and free storages. It may need more: what a run frees in one order another reads later in this one."""
    if any(step.saves or step.form != "full" for step in steps):
        return None
    runs = runs_of(graph, steps, apart=True)
    if runs is None:
        return None
    waits: list[list[int]] = [[] for _ in runs.ops]
    for later, sooner in runs.moments.waits.tolist():
        waits[later].append(sooner)
    less = _bytes_left(runs) < 0
    keys: list[tuple[int, ...]] = []
    for i in range(len(runs.ops)):
        behind = max((keys[k] for k in waits[i]), default=(-1,)) if less[i] else ()
        keys.append((*behind, i))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return runs.steps(order) if order != list(range(len(order))) else None


def _bytes_left(runs: Runs) -> NDArray[np.int64]:
    """By run, the bytes it leaves in memory beyond those it frees, in the order in which they are."""
    m = runs.moments
    last = m.definer.copy()
    np.maximum.at(last, m.reads[:, 0], m.reads[:, 1])
    ends = np.flatnonzero(~m.kept)
    freed = np.bincount(last[ends], m.size[ends], len(runs.ops))
    return (m.makes - freed).astype(np.int64)


_UNLIMITED = (1 << 63) - 1
_CUT_WORK = 600_000
"""Runs in networks that are cut at most for another order."""
_LEAVES = {"free": EVICT, "compress": COMPRESS, "offload": OFFLOAD}


@dataclass(frozen=True, slots=True)
class Placement:
    """How the residences of a graph's plans are placed; ``place``: at all; ``hand_out`` as for `lay_out`."""

    graph: Graph
    place: bool
    hand_out: bool
    seed: int

    def lay(self, found: run.Evicted, deadline: Deadline, budget: int | None = None) -> Placed:
        """Offsets for everything; with more effort where the first ones alone are above a budget."""
        layout = self.layout(found.steps, max(_LEAST, min(_FIRST, deadline.left)))
        made = Placed(found, layout, self.needs(found.timeline, layout))
        if budget is None or made.needs <= budget or found.timeline.peak > budget:
            return made
        room = budget - self.graph.static_bytes - layout.handed
        if room < layout.load:
            return made
        layout = self.layout(found.steps, min(_AGAIN, deadline.left), _MORE_WORK, room)
        again = Placed(found, layout, self.needs(found.timeline, layout))
        return min(again, made, key=lambda x: x.needs)

    def needs(self, line: Timeline, layout: Layout) -> int:
        """The bytes that a plan needs once everything has a place."""
        return max(line.peak, self.graph.static_bytes + layout.arena + layout.handed)

    def layout(
        self, steps: Sequence[Step], seconds: float = _FIRST, work: int = _WORK, capacity: int | None = None
    ) -> Layout:
        """Where everything lies; nothing where nothing is placed."""
        if not self.place:
            return Layout((), 0, 0, 0)
        return lay_out(
            self.graph,
            steps,
            hand_out=self.hand_out,
            seconds=seconds,
            work=work,
            seed=self.seed,
            capacity=capacity,
        )


def every_plan(
    problem: EvictionProblem, placement: Placement, budget: int, work: int, deadline: Deadline
) -> Placed | None:
    """The fastest plan within a budget of a graph of few ops; None where not all were tried, or none fits."""
    graph = placement.graph
    if not states.searchable(problem) or len(graph.ops) > _FEW or set(problem.means) != {"recompute"}:
        return None
    tried: list[Placed] = []

    def fits(steps: tuple[Step, ...]) -> bool:
        line = replay(graph, steps)
        decision = Decision(problem.nothing(), line.peak, 0.0, 0, met=True, steps=steps, ended="optimal")
        tried.append(placement.lay(run.Evicted(decision, steps, line), deadline, budget))
        return tried[-1].needs <= budget

    hand_out = placement.place and placement.hand_out
    limits = states.Options(min(work, _STATES), deadline.left, placement.place, hand_out)
    found = states.placed(problem, budget, limits, fits)
    if found.steps is None or not found.complete:
        return None
    if not tried:
        fits(found.steps)
    return tried[-1]
