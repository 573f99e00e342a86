"""Results in two turns: where nothing fits, or only what is far above the least time, some are made late.

Problem: a step's plan near the least memory. Measure: bytes, then seconds. Source: ours. The ways to divide a step
are `turns.ways` and `turns.splits`; here a search for each of the two turns says what they come down to, and what
is found is offered to the search for the whole. Guarantee: what is offered is a plan of the whole graph, placed and
within the budget or known to need more. Complexity: some short searches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from tightship.analysis.bounds import Relaxation, lower_bound, relaxation
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.planners import floor, run
from tightship.planners.clock import PREPARED, Clock
from tightship.planners.default_options import Options, order_of, problem_of
from tightship.planners.evict.problem import EvictionProblem, Progress
from tightship.planners.layout import Layout
from tightship.planners.turns import Storages, Turn, joined, splits, turns, ways
from tightship.simulate import Timeline, replay, unplanned

__all__ = ["InTurns"]


_WAYS, _TURNS, _PART = 16, 3, 4
"""How many ways to make results in two turns get a short search for the second turn, how many of them one for both,
and by what the work for each turn is divided."""


_SHORT, _LOOK = 15, 2_000_000
"""By what that is divided for a short one, and ops simulated for a first look."""


_PROBES, _NARROWED, _FASTEST, _FITTED = 5, 2, 2, 3
"""Where two turns may be faster: how many of the ways to divide a step are looked at first, how often the two beside
the best one so far are, too, how many get a search, and how often that is for less bytes as their places take
more."""


_KNOWN_HINTS = {"keep", "recompute"}
"""What hints may say of storages where results are made in two turns."""


_MOST = 5_000
"""Ops of graphs that are divided."""


_ANY = 1e9
"""How many times the least time a plan may take where only its bytes matter."""


class Searching(Protocol):
    """What is used of a search (`search.Search`): for the whole graph, or for one turn."""

    graph: Graph
    problem: EvictionProblem
    options: Options
    before: Timeline
    budget: int | None
    deadline: Deadline
    near: float
    bound: int
    time_bound: float
    reached: floor.Reached
    whole: bool
    in_orders: bool
    interrupted: bool

    @property
    def bytes(self) -> int: ...

    @property
    def once(self) -> Storages: ...

    def ends(self, clock: Clock) -> bool: ...

    def far_off(self, best: floor.Placed | None) -> bool: ...

    def offer(self, line: Timeline, clock: Clock) -> floor.Placed: ...

    def fit(self, progress: Progress | None, clock: Clock) -> tuple[run.Evicted, Layout]: ...

    def come_down(self, clock: Clock) -> None: ...

    def look(self, problem: EvictionProblem, progress: Progress | None, clock: Clock) -> run.Evicted: ...


@dataclass(frozen=True)
class InTurns:
    """Two turns of the graph of a search, the ``whole``; ``search`` makes that of a turn."""

    whole: Searching
    clock: Clock
    search: Callable[[Graph, EvictionProblem, Options, Timeline, int, Deadline], Searching]

    def lower(self) -> None:
        """Where nothing fits, make some results late, in a turn of their own: first those that promise the least peak
        by what was seen of the ones before."""
        assert self.whole.budget is not None
        if self.whole.reached.within(self.whole.budget) is not None or not self._divides():
            return
        start = self.whole.reached.plans[0].found.timeline
        found = ways(self.whole.graph, self._relaxed, start, self.clock.search, self._leave)
        looked: list[tuple[int, int, int, tuple[Turn, Turn]]] = []
        for first, pair in islice(found, _WAYS):
            peak = max(first, self._peak_of(pair[1], first))
            looked.append((peak, first, len(looked), pair))
            if self.whole.ends(self.clock):
                return
        for peak, *_, pair in sorted(looked)[:_TURNS]:
            fits = self.whole.reached.within(self.whole.budget) is not None
            if fits or peak >= self.whole.reached.plans[0].found.timeline.peak or self.whole.ends(self.clock):
                return
            self._take_turns(pair)

    def faster(self) -> None:
        """Where what fits is far above the least time, make some results late, in a turn of their own: of the ways
        that take the least time for the bytes they save, the fastest by what a first look says of the rest."""
        assert self.whole.budget is not None
        best = self.whole.reached.within(self.whole.budget)
        if best is None or not self._divides() or self.whole.ends(self.clock) or not self.whole.far_off(best):
            return
        relaxed = self._relaxed
        rows = splits(self.whole.graph, relaxed, self.whole.before, self.clock.search)
        spare = best.found.timeline.time - self.whole.before.time
        rows = [row for row in rows if row.again < spare and not row.carried & self._leave]
        looked: dict[int, tuple[float, tuple[Turn, Turn] | None]] = {}

        def look(at: Iterable[int]) -> None:
            for k in at:
                if k not in looked and not self.whole.ends(self.clock):
                    pair = turns(self.whole.graph, rows[k].late, relaxed.again, rows[k].carried, self._leave)
                    least = min((extra for extra, _ in looked.values()), default=spare)
                    looked[k] = self._promised(pair, least), pair

        look(len(rows) * i // _PROBES for i in range(_PROBES) if rows)
        for _ in range(_NARROWED):
            at, known = min(looked, key=lambda k: (looked[k][0], -k), default=0), sorted(looked)
            near = [k for k in known if k < at][-1:], [k for k in known if k > at][:1] or [len(rows)]
            look((at + k) // 2 for side in near for k in side if rows)
        for extra, k in sorted((extra, k) for k, (extra, _) in looked.items())[:_FASTEST]:
            pair = looked[k][1]
            if pair is not None and extra < spare and not self.whole.ends(self.clock):
                self._take_faster(pair)

    def _divides(self) -> bool:
        """Whether two turns are worth a look."""
        hinted = {way for hint in self.whole.problem.only.values() for way in hint}
        only = set(self.whole.problem.means) == {"recompute"} and not self.whole.problem.redraws
        return self.whole.whole and only and hinted <= _KNOWN_HINTS and len(self.whole.graph.ops) <= _MOST

    @property
    def _leave(self) -> Storages:
        """What hints say has to be made again."""
        return frozenset(s for s, hint in self.whole.problem.only.items() if hint == ("recompute",))

    @property
    def _relaxed(self) -> Relaxation:
        """What bounds know of the graph, and of the hints."""
        in_place, kept = self.whole.problem.in_place, self.whole.once
        if kept:
            return Relaxation(self.whole.graph, redraw=False, in_place=in_place, kept=kept)
        return relaxation(self.whole.graph, None, redraw=False, in_place=in_place)

    def _promised(self, pair: tuple[Turn, Turn] | None, least: float) -> float:
        """Seconds beyond each op once that a first look finds for two turns; endless where that is not less than
        ``least``."""
        if pair is None:
            return math.inf
        extra = float(self.whole.graph.columns.time[sorted(set(pair[0].ops).intersection(pair[1].ops))].sum())
        for turn in reversed(pair):
            extra += self._glance(turn) if extra < least else math.inf
        return extra

    def _take_faster(self, pair: tuple[Turn, Turn], short: int = 0) -> None:
        """Offer the fastest plan of two turns that has places within the budget; ``short``: by what its peak has to
        be less."""
        assert self.whole.budget is not None
        for _ in range(_FITTED):
            found = list[run.Evicted]()
            for turn in reversed(pair):
                made = self._turn(turn, self.whole.options.work // _PART, short)
                if made is None:
                    return
                found.insert(0, made)
                if found[0].timeline.peak + turn.beside > self.whole.budget - short or self.whole.ends(
                    self.clock
                ):
                    return
            steps = joined(self.whole.graph, pair, [x.steps for x in found])
            needs = self.whole.offer(replay(self.whole.graph, steps), self.clock).needs
            if needs <= self.whole.budget:
                return
            short += needs - self.whole.budget

    def _take_turns(self, pair: tuple[Turn, Turn]) -> None:
        """Offer the best plan of two turns, if it takes less than all before."""
        assert self.whole.budget is not None
        least, found = self.whole.reached.plans[0].found.timeline.peak, list[run.Evicted]()
        enough = max(self._bound_of(turn) + turn.beside for turn in pair)
        for turn in reversed(pair):
            if enough >= least:
                return
            made = self._turn(turn, self.whole.options.work // _PART, enough=enough)
            if made is None:
                return
            found.insert(0, made)
            enough = max(enough, made.timeline.peak + turn.beside)  # the other one need not take less
        if enough < least:
            steps = joined(self.whole.graph, pair, [x.steps for x in found])
            needs = self.whole.offer(replay(self.whole.graph, steps), self.clock).needs
            if needs > self.whole.budget >= enough:
                self._take_faster(pair, needs - self.whole.budget)

    def _turn(self, turn: Turn, work: int, short: int = 0, enough: int = 0) -> run.Evicted | None:
        """The fastest plan found for one turn within the budget (less what is ``short``), or that of the least peak;
        ``enough``: where that is more, any within so many bytes of both turns. None where the hints cannot be obeyed
        in it."""
        within = self.whole.bytes - short
        search = self._of_turn(turn, work, max(within, enough), timed=enough <= within)
        if not search.problem.obeyed:
            return None
        if enough > within:
            search.near = _ANY
        with suppress(Infeasible):
            search.fit(None, self.clock)
        self.whole.interrupted |= search.interrupted
        return (search.reached.within(search.bytes) or search.reached.plans[0]).found

    def _peak_of(self, turn: Turn, enough: int) -> int:
        """Bytes of both turns that a short search for one of them comes down to, or is content with."""
        work = self.whole.options.work // _PART // _SHORT
        search = self._of_turn(turn, work, max(self.whole.bytes, enough), timed=False)
        if not search.problem.obeyed:
            return self.whole.reached.plans[0].found.timeline.peak
        search.near = _ANY
        search.come_down(self.clock)
        self.whole.interrupted |= search.interrupted
        return search.reached.plans[0].found.timeline.peak + turn.beside

    def _bound_of(self, turn: Turn) -> int:
        """Bytes that a turn takes at least, without what is beside it."""
        in_place = self.whole.problem.in_place
        return int(lower_bound(turn.graph, redraw=False, in_place=in_place, deadline=self.whole.deadline))

    def _of_turn(self, turn: Turn, work: int, within: int, *, timed: bool) -> Searching:
        """The search for one turn of two within so many bytes; ``timed``: with a bound on its time."""
        graph, o = turn.graph, replace(self.whole.options, place=False, work=work, hints="")
        before = unplanned(graph)
        order = order_of(graph, o, before.peak, self.clock.search.part(PREPARED))
        problem = problem_of(graph, order, o)  # the hints are about storages, which have the same numbers
        problem = replace(problem, in_place=self.whole.problem.in_place, only=self.whole.problem.only)
        bound, deadline = self._bound_of(turn), self.whole.deadline if timed else Deadline(0.0)
        limit = max(within - turn.beside, bound)
        search = self.search(graph, problem, o, before, limit, deadline)
        search.bound, search.in_orders = bound, self.whole.in_orders
        return search

    def _glance(self, turn: Turn) -> float:
        """Seconds of recomputation that a first look finds for a turn; endless where it meets nothing."""
        search = self._of_turn(turn, _LOOK, self.whole.bytes, timed=False)
        if not search.problem.obeyed:
            return math.inf
        found = search.look(search.problem, None, self.clock)
        self.whole.interrupted |= search.interrupted
        return found.timeline.time - search.before.time if found.decision.met else math.inf
