"""The search of the default planner for one budget: evictions in several orders, in parts and turns, with places."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise

from tightship.analysis.bounds import lower_bound
from tightship.analysis.linked_moments import linked_bound
from tightship.diagnose.advice import advice
from tightship.errors import Infeasible, VerificationFailed
from tightship.graph import Graph
from tightship.options import NEVER, Deadline
from tightship.plan import Plan, Step
from tightship.planners import floor, planner, run
from tightship.planners.ahead import begun_ahead, largest_gather, runs_beside
from tightship.planners.clock import PREPARED, Clock
from tightship.planners.default_options import (
    Options,
    allowed,
    least_time,
    ways_of,
)
from tightship.planners.evict import ladder
from tightship.planners.evict.lowering import drop_dead_runs
from tightship.planners.evict.problem import Decision, EvictionProblem, Progress
from tightship.planners.in_orders import LARGE, InOrders
from tightship.planners.in_turns import InTurns
from tightship.planners.layout import Layout
from tightship.planners.place.greedy import MANY
from tightship.planners.place.portfolio import CLOSE
from tightship.planners.reruns import Reruns
from tightship.planners.turns import Storages
from tightship.simulate import Timeline, replay, unplanned
from tightship.verify import check

__all__ = ["Search", "displaced", "top_of_peak"]


_TIGHTEN, _SHORT = 8, 15
"""How often evictions are searched again because the placement came out larger than the peak, and by what part of
the work."""


_FIRST, _FIRST_OF_MANY, _PLACES = 0.8, 0.5, 0.4
"""The parts of the time left that the search before that, the same on large graphs (each search again takes long),
and places for what it found, may take."""


_FAR = 0.01
"""Other orders are tried where the fastest plan is above the least time by more than this part of it."""


_FAR_OFF = 0.03
"""By which part of the least time what fits is above it where dearer searches are worth it."""


_EVEN = 1e-6
"""Seconds of each op, where all take the same."""


_CLOSE_BY = 1.05
"""How many times the budget what was found may need for another search, for less."""


_LOOK = 2_000_000
"""Ops simulated for a first look at something else, the same where nothing fits."""


_EXACT_PLANNER = "exact"
"""What also proves more than the others."""


_EXACT = 1 + 1e-9
"""Times that differ by less than this factor are equal: sums in other orders."""


_AHEAD = (1.0, 0.6, 0.3)
"""Parts of the bytes that are left beyond the peak, for gathers that begin ahead: less where places do not do."""


_GATHERS = (1, 2, 4)
"""How many of the largest gathers a search leaves bytes for."""


_LESS = 3
"""By what the work of a search beside the first one is divided."""


_PART_OF_LOOSER = 4
"""By what the time left is divided for a search for more bytes."""


_SHORTLY = 1.0
"""Seconds at least for the places of everything with gathers begun ahead."""


@dataclass
class Search:
    """One problem and budget (None: keep everything); how far the search is."""

    graph: Graph
    problem: EvictionProblem
    options: Options
    before: Timeline
    budget: int | None
    deadline: Deadline = NEVER
    """Of the bounds."""
    near: float = 0.0
    """By which part of the least time a plan may be above it that is good enough."""
    best: run.Evicted | None = None
    last: run.Evicted | None = None
    seen: list[floor.Placed] = field(default_factory=list)
    """What searches ended with, whether something beats it or not."""
    only_places: bool = False
    interrupted: bool = False
    quick: bool = False
    """Whether the bound on the time is that of each moment alone, which is lower and sooner there."""
    whole: bool = True
    """Whether it is not a turn of another one."""
    aims: bool = True
    """Whether it may search for less where nothing fits."""
    least_look: int | None = None
    """The least peak of the first looks at orders, while nothing fits."""
    in_orders: bool = True
    """Whether other orders may need less with brief recomputation."""
    bound: int = field(init=False)
    time_bound: float = field(init=False)
    placement: floor.Placement = field(init=False)
    reached: floor.Reached = field(init=False)

    def __post_init__(self) -> None:
        graph, budget, o = self.graph, self.budget, self.options
        self.placement = floor.Placement(graph, o.place, o.hand_out, o.seed)
        self.reached = floor.reached(graph, allowed(self.problem, o))
        self.time_bound = 0.0
        if budget is not None:
            self.time_bound = least_time(graph, self.problem, budget, self.deadline, quick=self.quick)
            if (
                o.evict == _EXACT_PLANNER
                and self.problem.means == ("recompute",)
                and not self.problem.redraws
            ):
                self.time_bound = max(self.time_bound, self._proved(budget))
        self.bound = int(lower_bound(graph, **ways_of(self.problem), deadline=self.deadline))

    def _proved(self, budget: int) -> float:
        """A bound on the time for which there is a solver."""
        from tightship.planners.evict import exact  # takes long to import

        deadline, in_place = self.deadline, self.problem.in_place
        extra = exact.least_extra(self.graph, budget, deadline, redraw=False, in_place=in_place)
        return math.fsum(self.graph.columns.time) + extra

    def prove_more(self, line: Timeline, clock: Clock) -> None:
        """A bound from more moments together, where the plan is far above the one that the search began with."""
        if line.time <= self.time_bound + _FAR * self.before.time or self.ends(clock):
            return
        if self.budget is not None and self.time_bound:
            args = (self.graph, self.budget, line, self.time_bound)
            self.time_bound = linked_bound(*args, **ways_of(self.problem), deadline=clock.search)

    def _without_solver(self, progress: Progress | None, clock: Clock) -> floor.Placed | None:
        """What the default search finds in half of the time, if that is near enough to what the solver proved."""
        assert self.budget is not None
        o = replace(self.options, evict=Options().evict, seconds=clock.search.left / 2)
        other = replace(self, options=o, best=None, last=None)
        with suppress(Infeasible):
            other.fit(progress, Clock(o.seconds))
        self.interrupted |= other.interrupted
        best = self.reached.within(self.budget)
        if self.interrupted:
            return best
        if best is None or best.found.timeline.time > self.time_bound * (1 + self.options.gap):
            return None
        return best

    def fit(self, progress: Progress | None, clock: Clock) -> tuple[run.Evicted, Layout]:
        """Evictions and a layout within the budget: the best of a small graph, or the faster one of what is found
        and what was reached before."""
        budget, placement = self.budget, self.placement
        if budget is not None:
            best = floor.every_plan(self.problem, placement, budget, self.options.work, clock.search)
            if best is not None:
                self.reached.offer(best)
                return best.found, best.layout
            if self.options.evict == _EXACT_PLANNER and (best := self._without_solver(progress, clock)):
                return best.found, best.layout
        reruns = Reruns(self, clock)
        if budget is not None and self.whole:
            reruns.known()
        made = self.searched(self.problem, progress, clock)
        if budget is not None:
            first = self.problem
            if self.whole:
                reruns.first()
            self._elsewhere(progress, clock)
            self._aim_lower(first, progress, clock)
            if self.whole:
                reruns.last()
            made = self.reached.within(budget)
        if made is None and self.interrupted:
            raise KeyboardInterrupt
        if made is None:
            raise self.infeasible()
        if self.last is not None and made.found is not self.last:  # of a search that ended some other way
            decision = replace(made.found.decision, ended=self.last.decision.ended)
            return replace(made.found, decision=decision), made.layout
        return made.found, made.layout

    def ahead(
        self, found: run.Evicted, layout: Layout, progress: Progress | None, clock: Clock
    ) -> tuple[run.Evicted, Layout]:
        """The same with gathers between ranks, and copies of what streams, beside other ops, or that of another
        search, a brief one, which leaves bytes for gathers: whichever is faster."""
        if not runs_beside(self.graph):
            return found, layout
        size, options = largest_gather(self.graph), replace(self.options, work=self.options.work // _LESS)
        best = self._begun_ahead(found, layout, clock)
        for count in _GATHERS if size and self.budget is not None and not self.interrupted else ():
            lower = self.budget - count * size if self.budget is not None else 0
            if clock.search.over or lower <= max(self.bound, self.graph.static_bytes):
                break
            other = replace(
                self, budget=lower, options=options, best=None, last=None, whole=False, quick=True
            )
            with suppress(Infeasible, KeyboardInterrupt):
                again = self._begun_ahead(*other.fit(progress, clock), clock)
                best = min(best, again, key=lambda row: row[0].timeline.time)
            self.interrupted |= other.interrupted
        if best[0].timeline.time < found.timeline.time:
            self.time_bound = 0.0  # it is one of steps that wait for one another
            return best
        return found, layout

    def _begun_ahead(self, found: run.Evicted, layout: Layout, clock: Clock) -> tuple[run.Evicted, Layout]:
        line, placement = found.timeline, self.placement
        budget = self.budget if self.budget is not None else placement.needs(line, layout)
        for share in _AHEAD:
            limit = line.peak + int((budget - line.peak) * share)
            steps = begun_ahead(self.graph, line, limit)
            if steps is None:
                break
            other = replay(self.graph, steps)
            if not other.time < line.time or other.peak > budget:
                continue
            made = placement.layout(steps, max(_SHORTLY, clock.deadline.left))
            if placement.needs(other, made) <= budget:
                return replace(found, steps=steps, timeline=other), made
        return found, layout

    def _elsewhere(self, progress: Progress | None, clock: Clock) -> None:
        """Search in other orders, and with results in two turns, where nothing fits or only what is far above the
        least time."""
        if self.options.order != Options().order or self.bound > self.bytes:
            return
        orders, in_turns = InOrders(self, progress, clock), InTurns(self, clock, partial(Search, whole=False))
        orders.other()
        in_turns.lower()
        orders.rearranged()
        in_turns.faster()

    def ends(self, clock: Clock) -> bool:
        return self.interrupted or clock.search.over

    @property
    def bytes(self) -> int:
        """The budget, where there is one."""
        assert self.budget is not None
        return self.budget

    @property
    def once(self) -> Storages:
        """What hints forbid to make again."""
        return frozenset(s for s, hint in self.problem.only.items() if "recompute" not in hint)

    def far_off(self, best: floor.Placed | None) -> bool:
        """Whether nothing fits, or what does is so far above the least time that dearer searches are worth it."""
        return best is None or best.found.timeline.time > self.time_bound + _FAR_OFF * self.before.time

    def search_from(self, found: run.Evicted, progress: Progress | None, clock: Clock) -> None:
        """Search in the order of a plan, from what it does."""
        part = clock.search.part(PREPARED)
        problem = floor.reordered(self.problem, self.graph, found.steps, part, at_least=True)
        if problem is not None and problem.obeyed and not self.ends(clock):
            self.searched(problem, progress, clock)

    def offer(self, line: Timeline, clock: Clock, *, hard: bool = True) -> floor.Placed:
        """Keep such steps of the graph, if nothing beats them; ``hard``: with more effort for their places where the
        first ones are above the budget."""
        assert self.budget is not None
        steps = drop_dead_runs(self.graph, line.steps, self.problem.chained)
        if len(steps) < len(line.steps):
            line = replay(self.graph, steps)
        extra = max(0.0, line.time - self.before.time)
        decision = Decision(
            self.problem.nothing(), line.peak, extra, 0, line.peak <= self.budget, steps=line.steps
        )
        found = run.Evicted(decision, line.steps, line)
        made = self.placement.lay(found, clock.deadline.part(_PLACES), self.budget if hard else None)
        self.reached.offer(made)
        return made

    def _aim_lower(self, problem: EvictionProblem, progress: Progress | None, clock: Clock) -> None:
        """Where what was found needs a little more than there is, search for the bound, as if nothing else had been,
        then as if all ops took the same time: what a search comes down to depends on its target and on times by
        chance, and what such a one meets is never refused."""
        ops = self.graph.ops
        if not self._nearly_met(clock):
            return
        other = self._for_bound(problem, self.graph.with_ops(ops), progress, clock)
        self.seen += other.seen
        for made in other.reached.plans:
            self.reached.offer(made)
        if self._nearly_met(clock):
            even = self.graph.with_ops(tuple(replace(op, time=_EVEN) for op in ops))
            for made in self._for_bound(problem, even, progress, clock).reached.plans[:1]:
                self.offer(replay(self.graph, made.found.steps), clock)
        if (found := self.reached.within(self.bytes)) is not None:
            self.search_from(found.found, progress, clock)

    def _nearly_met(self, clock: Clock) -> bool:
        """Whether nothing is within the budget, but a plan that needs a little more."""
        budget, least = self.bytes, self.reached.plans[0].needs
        close = self.bound < budget < least <= budget * _CLOSE_BY
        return self.aims and self.whole and close and not self.ends(clock)

    def _for_bound(
        self, problem: EvictionProblem, graph: Graph, progress: Progress | None, clock: Clock
    ) -> Search:
        """A search for the bound, which has ended, in a graph that nothing was reached for."""
        args = graph, replace(problem, graph=graph), self.options, unplanned(graph), self.bound
        other = Search(*args, self.deadline, self.near, aims=False)
        with suppress(Infeasible, KeyboardInterrupt):
            other.fit(progress, clock)
        self.interrupted |= other.interrupted
        return other

    def looser(self, budget: int, clock: Clock) -> Timeline | None:
        """What a search for more bytes finds, in a part of the time, that knows nothing of this one."""
        problem = replace(self.problem)  # with an archive of its own
        args = (self.graph, problem, self.options, self.before, budget, self.deadline, self.near)
        other = Search(*args, whole=False, quick=self.quick)
        line = None
        with suppress(Infeasible, KeyboardInterrupt):
            line = other.fit(None, Clock(clock.search.left / _PART_OF_LOOSER))[0].timeline
        self.interrupted |= other.interrupted
        return line

    def afresh(self, again: int, clock: Clock) -> Timeline:
        """What another seed finds from nothing in the order of the last search, in a part of its work."""
        problem = self.problem.in_order(self.problem.order)
        work = self.options.work // _LESS
        found = self._evict(problem, self.bytes, clock.search, work, None, again=again)
        self.interrupted |= problem.archive.stopped
        return found.timeline

    def come_down(self, clock: Clock) -> None:
        """A search for few bytes that leaves out what takes long."""
        with suppress(KeyboardInterrupt):
            self.searched(self.problem, None, clock)
            InOrders(self, None, clock).come_down()

    def near_enough(self) -> bool:
        """Whether there is a plan, and above the least time by no more than ``_FAR`` as a part of it, or than is good
        enough."""
        assert self.budget is not None
        best = self.reached.within(self.budget)
        return best is not None and best.found.timeline.time <= self.time_bound * (1 + max(_FAR, self.near))

    def look(self, problem: EvictionProblem, progress: Progress | None, clock: Clock) -> run.Evicted:
        """What is found in a short while, without dear seeds."""
        assert self.budget is not None
        work = min(_LOOK, self.options.work)
        found = self._evict(problem, self.budget, clock.search, work, progress, dear=False)
        self.interrupted |= problem.archive.stopped
        problem.archive.stopped = False
        return found

    def searched(
        self, problem: EvictionProblem, progress: Progress | None, clock: Clock
    ) -> floor.Placed | None:
        """Evictions and a layout; searched again under a lower budget while the layout is above it."""
        budget = self.budget
        if budget is None:
            made = self._tried(problem, self.before.peak, self.options.work, progress, clock, clock.search)
            self.last = made.found
            return made
        # What has to be placed keeps some time for the case that the first places do not do.
        first = clock.search.part(self._first_part())
        again = self.best is not None
        work = self.options.work // (_LESS if again else 1)  # in another order
        made = self._tried(problem, budget, work, progress, clock, first)
        self.last = made.found
        # What the search does not count: holes between places, and states of random numbers that are kept.
        if made.found.decision.met and made.needs > budget:
            self.only_places |= made.found.timeline.peak <= budget
            return self._tightened(problem, made, progress, clock)
        return made

    def _first_part(self) -> float:
        if not self.options.place:
            return 1.0
        return _FIRST_OF_MANY if len(self.graph.ops) > LARGE else _FIRST

    def _tightened(
        self, problem: EvictionProblem, made: floor.Placed, progress: Progress | None, clock: Clock
    ) -> floor.Placed:
        """Under a lower budget each time, until the places are within the one asked for: as much lower as bytes are
        missing, more where that does not do, less where no evictions do. Each is searched for a short while, from
        where the last one ended: the bytes that holes take depend more on chance than on any effort."""
        assert self.budget is not None
        budget, below, above = self.budget, 0, self.budget
        line, decided = made.found.timeline, made.found.decision.peak
        margin = made.needs - (decided if decided < budget < line.peak else budget)
        if len(self.graph.ops) > LARGE:  # each turn takes long
            margin += margin // 2
        for k in range(_TIGHTEN):
            if self.interrupted or clock.search.over or not 0 < margin < budget - self.bound:
                break
            part, work = clock.search.part(1 / (_TIGHTEN - k)), self.options.work // _SHORT
            if made.found.decision.steps is None:
                lower = ladder.Options(work, part.left / 2)
                start = made.found.decision.evict
                problem.archive.offer(ladder.climb(problem, budget - margin, start, lower, progress))
            made = self._tried(problem, budget - margin, work, progress, clock, part)
            if made.needs <= budget:
                break
            if made.found.decision.met:
                below = margin
                margin = min(
                    margin + max(made.needs - budget, margin // 2), 2 * margin, (margin + above) // 2
                )
            else:
                above = margin
                margin = (below + above) // 2
            if above - below <= 1:
                break
        return made

    def _tried(
        self, problem: EvictionProblem, target: int, work: int, progress: Progress | None, clock: Clock,
        deadline: Deadline,
    ) -> floor.Placed:  # fmt: skip
        """What is found for a target, placed for the budget."""
        found = self._evict(problem, target, deadline, work, progress)
        self.interrupted |= problem.archive.stopped
        problem.archive.stopped = False
        if self.best is None or found.timeline.peak < self.best.timeline.peak:
            self.best = found
        if self.budget is not None and not found.decision.met and self.interrupted:
            raise KeyboardInterrupt
        made = self.placement.lay(found, clock.deadline.part(_PLACES), self.budget)
        self.reached.offer(made)
        self.seen.append(made)
        return made

    def _evict(
        self, problem: EvictionProblem, budget: int, deadline: Deadline, work: int, progress: Progress | None,
        *, dear: bool = True, again: int = 0,
    ) -> run.Evicted:  # fmt: skip
        o, info = self.options, planner(self.options.evict, "evict")
        least = self.time_bound if self.time_bound < math.inf else 0.0
        known = {
            "seconds": deadline.left, "work": work, "seed": o.seed + again, "gap": o.gap,
            "goal": least * (1 + max(o.gap, self.near)) - self.before.time, "dear": dear,
        }  # fmt: skip
        options = info.options(**{f.name: known[f.name] for f in fields(info.options) if f.name in known})
        many = o.place and len(self.graph.ops) > MANY  # their places span a little more than the peak
        for limit in (budget - budget // CLOSE, budget) if many else (budget,):
            found = run.evict(
                info, problem, limit, options, progress, graph=self.graph, or_keep=True, verify=False
            )
            late = deadline.over and found.decision.peak > budget
            if found.decision.met or problem.archive.stopped or late:
                break
        return found

    def ended(self, found: run.Evicted) -> str:
        """Why the search ended, one of ``plan.TERMINATIONS``."""
        least = self.before.time if self.budget is None else self.time_bound
        if found.timeline.time <= least * _EXACT:
            return "optimal"
        if found.timeline.time <= least * (1 + self.options.gap):
            return "gap"
        if found.decision.ended != "gap":
            return found.decision.ended
        # What is left is of lower targets, for the offsets.
        return "similar" if self.near > self.options.gap else "stagnation"

    def verified(
        self, steps: Sequence[Step], line: Timeline, layout: Layout, planner: str, began: float
    ) -> Plan:
        """The plan with what it was asked for, what none can go below, and who made it."""
        graph, o, budget = self.graph, self.options, self.budget
        made = replace(
            run.decision_plan(graph, steps, line, planner, lossy=o.lossy),
            residences=layout.residences,
            arena=layout.arena,
            handed=layout.handed,
            host=layout.host,
            budget=budget,
            lower_bound=self.bound,
            time_bound=self.time_bound,
            host_budget=o.host or None,
            moved=displaced(tuple(step.op for step in steps if step.kind == "compute")),
            seconds=time.perf_counter() - began,
        )
        try:
            check(graph, made)
        except VerificationFailed:
            self.reached.plans.clear()  # no answer for later calls
            raise
        return made

    def infeasible(self) -> Infeasible:
        """What was reached: the least bytes that a plan ever needed, or, of one with a peak within the budget, those
        that it needs once everything has a place."""
        assert self.budget is not None and self.best is not None
        graph, least = self.graph, self.reached.plans[0]
        found = self.best if self.only_places else least.found
        line = found.timeline
        return Infeasible(
            budget=self.budget,
            lower_bound=self.bound,
            best_peak=line.peak if self.only_places else least.needs,
            top=top_of_peak(graph, line, found.steps),
            placed=least.needs if self.only_places else None,
            at=graph.ops[found.steps[line.peak_step].op].name if line.peak_step >= 0 else "",
            advice=advice(graph, self.budget, line.at_peak),
        )


def displaced(order: tuple[int, ...]) -> int:
    """How many ops run after another one than in the graph's own order."""
    successor = dict(pairwise(order))
    return sum(1 for k in range(len(order) - 1) if successor.get(k) != k + 1)


def top_of_peak(
    graph: Graph, line: Timeline, steps: Sequence[Step], n: int = 8
) -> tuple[tuple[str, int, str], ...]:
    """The largest storages outside the static set at the peak: (name, bytes, where they were made)."""
    rows = []
    for s, size in line.at_peak:
        if s in graph.static or not size:
            continue
        op = steps[line.peak_step].op if s < 0 else graph.uses.definer[s]
        name = f"while {graph.ops[op].name} runs" if s < 0 else graph.storages[s].name
        rows.append((name, size, graph.place(op)))
    return tuple(sorted(rows, key=lambda r: -r[1])[:n])
