"""Other orders: where nothing fits, or only what is far above the least time, the search goes on in some more.

Problem: one budget, as for the search. Measure: seconds, then bytes. Source: ours. The order of the least peak
without evictions may be a bad one to evict in, so there are searches with recomputation that takes less memory, in
the order in which what was found needs least, in named orders, and with brief recomputation; and the runs of plans
that need a little more are put into an order that takes less. First looks, of little work, say which of them get a
whole search. Guarantee: that of the search, which keeps what is found. Complexity: some searches, each of a third of
the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tightship.graph import Graph
from tightship.options import Deadline
from tightship.planners import floor, run
from tightship.planners.clock import PREPARED, Clock
from tightship.planners.evict.problem import EvictionProblem, Progress
from tightship.planners.shave import shaved
from tightship.planners.turns import Storages
from tightship.simulate import Timeline, replay

__all__ = ["LARGE", "InOrders"]


_DEMAND, _DEEP = "demand", 20_000
"""The order in which recomputation takes least, and ops of graphs for which it is worked out."""


_ORDERS = ("sink", "given", "lpmf")


_AGAIN, _LOWERED = 4, 10
"""How often the runs of what was found are put into another order; of how many of the least plans they are."""


_EARLIER = 6
"""How often at most those after which less is in memory are moved to where they may run."""


_NEARLY = 1.002
"""Over what part of the time that is needed already it is left at a first look."""


LARGE = 5_000
"""Ops of graphs on which each search again takes long."""


class Searching(Protocol):
    """What is used of a search (`search.Search`)."""

    graph: Graph
    problem: EvictionProblem
    best: run.Evicted | None
    seen: list[floor.Placed]
    whole: bool
    least_look: int | None
    in_orders: bool
    interrupted: bool
    reached: floor.Reached

    @property
    def bytes(self) -> int: ...

    @property
    def once(self) -> Storages: ...

    def ends(self, clock: Clock) -> bool: ...

    def near_enough(self) -> bool: ...

    def far_off(self, best: floor.Placed | None) -> bool: ...

    def look(self, problem: EvictionProblem, progress: Progress | None, clock: Clock) -> run.Evicted: ...

    def searched(
        self, problem: EvictionProblem, progress: Progress | None, clock: Clock
    ) -> floor.Placed | None: ...

    def search_from(self, found: run.Evicted, progress: Progress | None, clock: Clock) -> None: ...

    def offer(self, line: Timeline, clock: Clock) -> floor.Placed: ...


@dataclass
class InOrders:
    """Other orders for a search, as far as they were tried."""

    search: Searching
    progress: Progress | None
    clock: Clock
    tried: list[tuple[int, ...]] = field(default_factory=list)
    lowered: bool = False
    """Whether one needed less with brief recomputation."""

    @property
    def _fits(self) -> bool:
        return self.search.reached.within(self.search.bytes) is not None

    @property
    def _ends(self) -> bool:
        """Whether there is a plan that is near enough to the least time, or no more time."""
        return self.search.near_enough() or self.search.ends(self.clock)

    def other(self) -> None:
        """Search in other orders while nothing fits, or only what is far above the least time."""
        search = self.search
        self.tried = [search.problem.order]
        self._lower_look(search.problem)
        self._deeper()
        if not self._fits:
            self._own()
        self._named()
        self._own()
        if not self._fits and search.problem.deep and not search.ends(self.clock):
            self._briefer()

    def come_down(self) -> None:
        """Search for few bytes in orders that take no search to find."""
        self.tried = [self.search.problem.order]
        self._deeper()
        self._own()

    def _briefer(self) -> None:
        """The same with recomputation for a moment only."""
        search = self.search
        search.problem = search.problem.briefer
        self._lower_look(search.problem)
        self._search_in(search.problem)
        self.tried = [search.problem.order]
        if not self._fits:
            self._own()
        if not self._fits:
            self._named()

    def _deeper(self) -> None:
        """Search with recomputation that takes less memory, from here on where that is of use."""
        search = self.search
        if self._ends or len(search.graph.ops) > _DEEP:
            return
        best = search.reached.within(search.bytes)
        order = run.order(_DEMAND, search.graph, self.clock.search)
        self.tried.append(order)
        problem = search.problem.deeper(order)
        self._lower_look(problem)
        self._search_in(problem)
        if best is None or search.reached.within(search.bytes) is not best:
            search.problem = problem

    def _own(self) -> None:
        """Search in the order in which what was found so far needs least, again as long as nothing fits."""
        search = self.search
        for turn in range(_AGAIN):
            best = search.reached.within(search.bytes)
            start = best.found if best is not None else search.best
            if self._ends or start is None or (turn and best):
                return
            part = self.clock.search.part(PREPARED)
            problem = floor.reordered(search.problem, search.graph, start.steps, part)
            if problem is None or problem.order in self.tried:
                return
            self.tried.append(problem.order)
            self._search_in(problem)

    def _named(self) -> None:
        search = self.search
        for name in _ORDERS:
            if self._ends:
                return
            given = tuple(range(len(search.graph.ops)))
            order = given if name == "given" else run.order(name, search.graph, self.clock.search)
            if order not in self.tried:
                self.tried.append(order)
                if not self._in_named(search.problem.in_order(order)):
                    return

    def _in_named(self, problem: EvictionProblem) -> bool:
        """Search in an order, while nothing fits only where a first look promises fewer bytes; whether to go on with
        the next one. Looks say little of brief recomputation: there it is as long as orders lower the peak, and for a
        turn where one did for the whole."""
        search = self.search
        if self._fits:
            self._search_in(problem)
            return True
        if not problem.brief:
            if search.whole and self._lower_look(problem):
                self._search_in(problem)
            return search.whole
        if not search.in_orders:
            return False
        least = search.reached.plans[0].found.timeline.peak
        self._search_in(problem)
        lower = search.reached.plans[0].found.timeline.peak < least
        self.lowered |= lower
        search.in_orders = self.lowered
        return lower

    def _search_in(self, problem: EvictionProblem) -> None:
        """Search in another order, where a first look says that it is as good or nothing fits yet."""
        search = self.search
        best = search.reached.within(search.bytes)
        if not problem.obeyed:
            return
        if best is None or self._as_good(search.look(problem, self.progress, self.clock), best):
            search.searched(problem, self.progress, self.clock)

    def _lower_look(self, problem: EvictionProblem) -> bool:
        """Whether something fits, or a first look at an order is content with fewer bytes than all those before."""
        search = self.search
        if self._fits or search.ends(self.clock) or not problem.obeyed:
            return True
        peak, least = search.look(problem, self.progress, self.clock).decision.peak, search.least_look
        search.least_look = min(peak, least or peak)
        return not search.interrupted and (least is None or peak < least)

    def _as_good(self, found: run.Evicted, best: floor.Placed) -> bool:
        """Whether what was found in a short while promises as much as there is already."""
        near = found.timeline.time <= best.found.timeline.time * _NEARLY
        return found.decision.met and near and not self.search.interrupted

    # --- the order of all runs ---

    def rearranged(self) -> None:
        """Where nothing fits, or only what is far above the least time, lower the plans that need a little more than
        there is, and search in the order of the one that comes of it, as long as that gains something."""
        search, done = self.search, set[tuple[int, float]]()
        for _ in range(_AGAIN):
            best, least = search.reached.within(search.bytes), search.reached.plans[0]
            if len(search.graph.ops) > LARGE or not search.far_off(best):
                return
            for key, made in self._to_lower():
                if search.ends(self.clock):
                    return
                if key not in done:
                    done.add(key)
                    self._lower(made.found)
            start = search.reached.within(search.bytes) or search.reached.plans[0]
            if start is (best or least):
                return
            search.search_from(start.found, self.progress, self.clock)

    def _to_lower(self) -> list[tuple[tuple[int, float], floor.Placed]]:
        """Plans that need more than there is, by what they need and take, the least first: a worse one may come down
        further."""
        search = self.search
        rows = {(x.needs, x.found.timeline.time): x for x in (*search.seen, *search.reached.plans)}
        return [(key, rows[key]) for key in sorted(rows) if key[0] > search.bytes][:_LOWERED]

    def _lower(self, found: run.Evicted) -> None:
        """Put the runs of a plan, recomputations too, into an order that takes less, and recompute more of what lies
        idle at its peaks."""
        search, deadline = self.search, self.clock.search.part(PREPARED)
        steps = floor.rearranged(search.graph, found.steps, deadline)
        line = self._shaved(found.timeline if steps is None else replay(search.graph, steps), deadline)
        for _ in range(_EARLIER):
            steps = floor.released_early(search.graph, line.steps)
            early = None if steps is None else self._shaved(replay(search.graph, steps), deadline)
            if early is None or early.peak >= line.peak:
                break
            line = early
        if line is not found.timeline:
            search.offer(line, self.clock)

    def _shaved(self, line: Timeline, deadline: Deadline) -> Timeline:
        search = self.search
        return (
            shaved(search.graph, line, deadline, search.once) if "recompute" in search.problem.means else line
        )
