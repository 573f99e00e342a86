"""The whole trade-off of a graph: plans for many budgets, found together, and what fixed policies give.

Problem: for every budget the fastest plan within it. Measure: seconds against bytes. All budgets share one order
and one problem, so that what the search finds for one is a start for the others. Guarantee: monotone by construction,
since a plan that needs less memory and is no slower is also the plan for more; every plan is verified. Known limits:
those of the default planner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tightship.analysis.order import backward_start
from tightship.baselines import checkpoint
from tightship.errors import BadInput, Infeasible, TightshipError, Unsupported
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.plan import Plan, Step
from tightship.planners import default
from tightship.planners.evict.problem import EVICT, STAY, Decision, EvictionProblem
from tightship.planners.reruns import LOOSER, SLOW
from tightship.simulate import replay, unplanned
from tightship.units import Budget

__all__ = [
    "MOST",
    "Changed",
    "Frontier",
    "Other",
    "below",
    "budget_of",
    "extra_flops",
    "frontier",
    "needs",
    "others",
]

MOST = 200
_SLACK = 30
"""By what part of it the least budget grows where what was reached is not met again."""
_FAR = 4
"""By what part of it at most where a search says what would have been enough."""
_ROOM = 4
"""Of how many points one may be for a little more than the least memory."""
_GAIN = 0.01
"""By so much of the unplanned time a plan is slower before other graphs are tried for its budget."""

Said = Callable[[str], None]


@dataclass(frozen=True)
class Other:
    """What somebody else's policy comes to on this graph: peak bytes, seconds of a step, floating-point operations
    added (a share); and ``ours``, a plan for as much memory, where one was found."""

    name: str
    peak: int
    time: float
    extra_flops: float
    ours: Plan | None = None
    steps: tuple[Step, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Changed:
    """A plan of another graph that does the same, with ops in slices or a static set that streams: ``how``, in a few
    words. Empty where nothing had to be changed."""

    plan: Plan
    graph: Graph = field(repr=False)
    how: str


@dataclass(frozen=True)
class Frontier:
    """Plans for ``budget``s in ascending order, ``others`` to compare with, and a peak no plan can beat;
    ``interrupted``: not all that were asked for; ``notes``: which policies are not there, and why. ``changed``: where
    ops may run in slices, or the static set streams, the plans that such changes made of the graph."""

    graph: Graph
    points: tuple[Plan, ...]
    others: tuple[Other, ...] = ()
    lower_bound: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    changed: tuple[Changed, ...] = ()

    def change_of(self, plan: Plan) -> Changed | None:
        """How a plan's graph was changed, None where it is the given one."""
        return next((c for c in self.changed if c.plan.digest == plan.digest and c.how), None)

    def graph_of(self, plan: Plan) -> Graph:
        """The graph that a plan is for."""
        change = self.change_of(plan)
        return self.graph if change is None else change.graph

    @property
    def before(self) -> tuple[int, float]:
        """Bytes and seconds of the step as it was given, unplanned."""
        plan = self.points[-1]  # which keeps everything, or is no slower
        if not self.changed:
            return plan.peak_before, plan.time_before
        line = unplanned(self.graph)
        return line.peak, line.time

    def more_flops(self, plan: Plan) -> float:
        """Floating-point operations beyond those of the given step, as a share of them."""
        change, once = self.change_of(plan), sum(op.flops for op in self.graph.ops)
        if change is None or not once:
            return extra_flops(self.graph, plan.steps)
        ops = change.graph.ops
        return sum(ops[s.op].flops for s in plan.steps if s.op >= 0) / once - 1

    def best(self, budget: int) -> Plan | None:
        """The fastest of the plans that need at most ``budget`` bytes."""
        return _best(self.points, budget)


def needs(plan: Plan) -> int:
    """The smallest budget that a plan is within."""
    return max(plan.peak, plan.static + plan.arena + plan.handed)


def budget_of(plan: Plan) -> int:
    """The budget of a plan; without one, what it needs."""
    return needs(plan) if plan.budget is None else plan.budget


def extra_flops(graph: Graph, steps: tuple[Step, ...]) -> float:
    """Floating-point operations of all recomputation, as a share of those of the step."""
    once = sum(op.flops for op in graph.ops)
    again = sum(graph.ops[s.op].flops for s in steps if s.kind == "recompute")
    return again / once if once else 0.0


def frontier(
    graph: Graph,
    points: int = 9,
    options: default.Options | None = None,
    saved: Mapping[str, frozenset[int]] | None = None,
    say: Said | None = None,
    *,
    peers: bool = True,
    beside: Sequence[Other] = (),
    stuck: frozenset[int] = frozenset(),
) -> Frontier:
    """Plans for ``points`` budgets from the least that is reached to what keeping everything needs.

    ``options.seconds`` and ``options.work`` are for all budgets together, those of the other policies among them:
    each is compared with a plan for as much memory, and is the plan where it is the faster one. ``saved`` adds to
    them: what is kept between forward and backward, by name; so does ``beside``, with steps of this graph or without.
    A policy that this graph has no way to carry out is left out, and ``notes`` say so.
    ``stuck``: storages that can be recomputed, but not compressed or offloaded. ``say`` is told what is being done.
    An interrupt ends the search and gives back what there is, if there is anything.
    """
    if not 1 <= points <= MOST:
        raise BadInput(f"{points} points: expected 1 to {MOST}", place="points")
    began = time.perf_counter()
    o = options or default.Options()
    before = unplanned(graph).peak
    problem = replace(default.problem_of(graph, default.order_of(graph, o, before), o), stuck=stuck)
    notes: list[str] = []
    saved = (saved or {}) if peers else {}
    if peers:
        theirs = EvictionProblem(graph, problem.order, in_place=False)
        beside = (*others(theirs, saved, notes.append), *beside)
    else:
        beside = ()
    for kept in saved.values() if "recompute" in problem.means else ():
        with suppress(TightshipError):  # `others` says which, and why
            problem.archive.offer(with_saved(problem, kept))
    searches = points + len(beside) + len(LOOSER) + 1
    each = replace(o, seconds=o.seconds / searches, work=o.work // searches)
    made = [default.plan(graph, None, each, problem=problem)]
    tell, until = say or (lambda text: None), Deadline(began + o.seconds)
    search = _Search(graph, problem, each, made, tell, until, searches - 1)
    budgets = [needs(made[0])]
    interrupted = False
    try:
        for budget in search.spread(points):
            budgets.append(budget)
        for x in beside:
            if made[0].lower_bound <= x.peak < budgets[0] and x.peak not in budgets:
                reached = search.at(x.peak, "as much memory as others")
                if reached == x.peak < min(budgets):
                    budgets.append(x.peak)
            search.adopt(x, notes)
    except KeyboardInterrupt:
        if len(made) < 2:
            raise
        interrupted = True
    bound = min(p.lower_bound for p in made)
    beside = tuple(replace(x, ours=_best(made, x.peak)) for x in beside)
    seconds = time.perf_counter() - began
    return Frontier(graph, search.monotone(budgets), beside, bound, seconds, interrupted, tuple(notes))


@dataclass
class _Search:
    """Plans made so far (the first keeps everything), and how to make more of them: ``more`` of them at most until
    the deadline, which share what is left."""

    graph: Graph
    problem: EvictionProblem
    each: default.Options
    made: list[Plan]
    say: Said
    deadline: Deadline
    more: int

    def at(self, budget: int, why: str) -> int:
        """Plan for a budget; the least bytes that were enough, placed, should it not be met."""
        self.say(why)
        options = replace(self.each, seconds=max(self.each.seconds, self.deadline.left / max(1, self.more)))
        self.more -= 1
        try:
            self.made.append(default.plan(self.graph, Budget(bytes=budget), options, problem=self.problem))
        except Infeasible as no:
            return max(no.best_peak, no.placed or 0)
        return budget

    def adopt(self, other: Other, notes: list[str]) -> None:
        """Take another's steps for the plan where ours for as much memory is slower."""
        best = _best(self.made, other.peak)
        allowed = other.steps and not self.problem.only and "recompute" in self.problem.means
        if not allowed or (best is not None and best.time <= other.time):
            return
        try:
            self.made.append(default.plan_steps(self.problem, other.steps, self.each, other.name))
        except TightshipError as error:
            notes.append(f"{other.name}: no plan of ours, {str(error).splitlines()[0]}")

    def spread(self, points: int) -> Iterator[int]:
        """Plan for all budgets but that of the first plan: the tightest one, then from the largest down."""
        if points == 1:
            return
        full = needs(self.made[0])
        least = self.made[0].lower_bound
        while len(self.made) == 1 and least < full:
            reached = self.at(least, "the least memory")
            least = reached if reached > least else least + least // _SLACK
        least = needs(self.made[-1])
        yield least
        eased = self._eased(least, full)
        first = 1
        if eased is not None and points >= _ROOM:
            yield eased
            first = 2
        for j in range(first, points - 1):
            budget = full - (full - least) * (j + 1 - first) // (points - first)
            self.at(budget, f"budget {j + 1} of {points}")
            yield budget

    def _eased(self, least: int, full: int) -> int | None:
        """Where the least memory takes far longer than it has to: plan for a little more, which is mostly far faster,
        then for the least again, which begins with what that found. The budget that is far faster still."""
        slow = self.made[-1]
        if not self._far(slow.time, slow.time_bound):
            self.more -= len(LOOSER) + 1
            return None
        budgets = [budget for part in LOOSER if (budget := least + int(least * part)) < full]
        for budget in budgets:
            self.at(budget, "a little more than the least memory")
        self.at(least, "the least memory again")
        again = _best(self.made, least)
        for budget in sorted(budgets):
            best = _best(self.made, budget)
            if best is not None and again is not None and self._far(again.time, best.time):
                return budget
        return None

    def _far(self, time: float, least: float) -> bool:
        return time - least > SLOW * self.made[0].time_before

    def monotone(self, budgets: Sequence[int]) -> tuple[Plan, ...]:
        """For each budget the fastest of all plans within it."""
        found = []
        for budget in sorted(set(budgets)):
            best = _best(self.made, budget)
            if best is not None:
                known = next((p.time_bound for p in self.made if p.budget == budget), None)
                if known is None:
                    known = default.least_time(self.graph, self.problem, budget)
                found.append(replace(best, budget=budget, time_bound=min(known, best.time)))
        return tuple(found)


def _best(made: Sequence[Plan], budget: int) -> Plan | None:
    fits = [p for p in made if needs(p) <= budget]
    return min(fits, key=lambda p: (p.time, needs(p)), default=None)


# --- below the floor of one graph ---


def below(
    base: Frontier, points: int, least: int, at: Callable[[int], Changed | int], say: Said | None = None
) -> Frontier:
    """``base`` with plans that may change the graph, for ``points`` budgets from the least that is reached so to what
    keeping everything needs. ``least``: bytes that none of them goes below; ``at`` plans for a budget, or gives the
    bytes that would have been enough, 0 if it does not know. Where a plan of the given graph takes the unplanned
    time, nothing is changed. Bounds of time are those of the graph that a plan is for."""
    began, tell = time.perf_counter(), say or (lambda text: None)
    made = [Changed(p, base.graph, "") for p in base.points]
    full, reached = needs(base.points[-1]), needs(base.points[0])
    interrupted, budgets = base.interrupted, {full}

    def add(budget: int, why: str) -> int:
        tell(why)
        found = at(budget)
        if isinstance(found, int):
            return found
        made.append(found)
        return budget

    try:
        budget = least if not interrupted else reached
        while budget < reached:
            enough = add(budget, f"the least memory, with changes: {budget:,} bytes")
            if enough == budget:
                reached = needs(made[-1].plan)
            else:
                far = min(enough, budget + budget // _FAR)  # it may be of the given graph alone
                budget = max(far, budget + budget // _SLACK, budget + 1)
        budgets.add(reached)
        for j in range(points - 2 if not interrupted else 0):
            budget = full - (full - reached) * (j + 1) // (points - 1)
            budgets.add(budget)
            known = _fastest(made, budget)
            if known is None or known.plan.time > base.points[-1].time_before * (1 + _GAIN):
                add(budget, f"budget {j + 2} of {points}, with changes")
    except KeyboardInterrupt:
        interrupted = True
        budgets |= {budget_of(p) for p in base.points}
    rows: dict[int, Changed] = {}
    for budget in sorted(budgets):
        if (best := _fastest(made, budget)) is not None:
            bound = min(best.plan.time_bound, best.plan.time)
            rows[budget] = replace(best, plan=replace(best.plan, budget=budget, time_bound=bound))
    bound = min([least, *(c.plan.lower_bound for c in made if c.how)], default=base.lower_bound)
    seconds = base.seconds + time.perf_counter() - began
    return replace(
        base, points=tuple(c.plan for c in rows.values()), lower_bound=min(bound, base.lower_bound),
        seconds=seconds, interrupted=interrupted, changed=tuple(rows.values()),
    )  # fmt: skip


def _fastest(made: Sequence[Changed], budget: int) -> Changed | None:
    fits = [c for c in made if needs(c.plan) <= budget]
    return min(fits, key=lambda c: (c.plan.time, needs(c.plan)), default=None)


# --- what others do ---


def others(
    problem: EvictionProblem, saved: Mapping[str, frozenset[int]], say: Said | None = None
) -> tuple[Other, ...]:
    """Fixed policies on the same graph in the same order, simulated: checkpoints around blocks, and saved sets
    from which the rest is recomputed where the backward needs it. ``say`` is told of each that cannot be carried
    out, which is left out."""
    policies: dict[str, Callable[[], Decision]] = {
        name: partial(checkpoint.plan, problem, 0, o)
        for name, o in {
            "per block": checkpoint.Options(),
            "per inner block": checkpoint.Options(depth=2),
            "selective": checkpoint.Options(selective=True),
            "selective, inner": checkpoint.Options(depth=2, selective=True),
        }.items()
    }
    fixed = tuple(policies)
    policies |= {name: partial(with_saved, problem, kept) for name, kept in saved.items()}
    rows = []
    for name, decide in policies.items():
        try:
            found = decide()
            if found.runs or name not in fixed:
                rows.append(_row(problem, name, found))
        except TightshipError as error:  # theirs: the frontier is ours without it
            why = error.why if isinstance(error, Unsupported) else str(error).splitlines()[0]
            if say is not None:
                say(f"{name}: left out, {why}")
    return tuple(rows)


def with_saved(
    problem: EvictionProblem, saved: frozenset[int], crossing: NDArray[np.bool_] | None = None
) -> Decision:
    """Everything but ``saved`` leaves between forward and backward. ``crossing``: which gaps go from the one to the
    other, where there are several of them, one behind another."""
    if all(op.phase != "backward" for op in problem.graph.ops):
        return problem.cost(problem.nothing(), 0)
    if crossing is None:
        boundary = backward_start(problem.graph, problem.order)
        crossing = (problem.gaps[:, 1] < boundary) & (problem.gaps[:, 2] >= boundary)
    there = np.isin(problem.gaps[:, 0], list(saved))
    bits = (crossing & ~there).astype(np.uint8) * np.uint8(EVICT)
    bits[problem.stays & there] = STAY
    return problem.cost(bits, 0)


def _row(problem: EvictionProblem, name: str, d: Decision) -> Other:
    steps = problem.lower(d)
    line = replay(problem.graph, steps)
    return Other(name, line.peak, line.time, extra_flops(problem.graph, steps), steps=steps)
