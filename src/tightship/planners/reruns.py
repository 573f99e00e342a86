"""Change a plan run by run: what runs again, and where.

Problem: a faster plan within a budget, or one of fewer bytes, from one that is there. Measure: exact bytes and
seconds of every candidate. Source: ours; simulated annealing (Kirkpatrick et al. 1983), with parts of a plan left out
and made anew (large neighborhoods, Shaw 1998). Decisions about gaps say one thing for all recomputations within a
gap, and nothing of what these read of one another. Here a plan is the sequence of its runs alone (`cpp/reruns.h`):
what a run makes stays until the last one that reads it, so that a run left out takes bytes instead of time, and a run
put in the other way round. Guarantee: never worse than what it began with; the same seed and work give the same plan.
Complexity: a walk over the runs for each candidate. Known limits: plans that copy or pack, and those with hints, stay
as they are; so does what several ops write, in every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tightship.graph import Graph
from tightship.plan import Step
from tightship.planners import floor
from tightship.planners.clock import Clock
from tightship.planners.default_options import Options
from tightship.planners.evict.lowering import save_random_states
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import Timeline, replay

__all__ = ["LOOSER", "SLOW", "Reruns"]

_LARGEST = 20_000
"""Ops of graphs whose plans are changed."""
_CALLS, _MOST = 30_000, 40_000_000
"""Candidates of one run of annealing, and runs of ops simulated for them at most."""
_SHORT = 2
"""By what that is divided where a plan is close to the least time."""
_HEAT = 0.003
"""The first temperature, in step times."""
_FAR = 0.01
"""So far above the goal, as a part of the step's time, is not close to it."""
_DOWN, _LEAST, _TURNS_DOWN = 0.015, 0.001, 12
"""By what part of the peak plans come down each time, at first and at least, and how often."""
_TURNS, _FROM = 4, 3
"""How often what came of one is changed again; of how many plans that need more than there is."""
_NEARLY = 1.1
"""How many times the budget a plan may need from which one within it is looked for."""
SLOW = 0.1
"""So far above the goal, likewise, is far longer than it has to be."""
LOOSER = (0.02, 0.005)
"""By which parts of the budget a plan may need more from which one within it is looked for there."""
_SEEDS = 2
"""How many other seeds are tried where the fastest plan is not close to the goal."""
_HOLES = 3
"""How often fewer bytes are aimed at as the places of everything take more."""


class Searching(Protocol):
    """What is used of a search (`search.Search`)."""

    graph: Graph
    problem: EvictionProblem
    options: Options
    before: Timeline
    near: float
    quick: bool
    time_bound: float
    reached: floor.Reached
    seen: list[floor.Placed]
    interrupted: bool

    @property
    def bytes(self) -> int: ...

    def ends(self, clock: Clock) -> bool: ...

    def looser(self, budget: int, clock: Clock) -> Timeline | None: ...

    def afresh(self, again: int, clock: Clock) -> Timeline: ...

    def offer(self, line: Timeline, clock: Clock, *, hard: bool = True) -> floor.Placed: ...


@dataclass
class Reruns:
    """The plans that a search finds."""

    search: Searching
    clock: Clock
    changed: list[Timeline] = field(default_factory=list)
    """What came of the first search, far from the goal."""
    looser: list[Timeline] = field(default_factory=list)
    """What a little more memory allows, where that was asked for."""

    def known(self) -> None:
        """Begin with what is known for a little more memory, where nothing as good is for the budget."""
        search, budget = self.search, self.search.bytes
        line = self._reached(budget + int(budget * max(LOOSER)))
        if line is None or search.quick or not self._may() or self._reached(budget) is not None:
            return
        line = self._fastest(self._lowest(line), budget)
        best = search.reached.within(budget)
        if best is not None:
            self._place(line, best.found.timeline)
        elif line.peak <= budget:
            search.offer(line, self.clock)

    def first(self) -> None:
        """Change what the first search found: where nothing is within the budget, or what comes of it is close to the
        goal. Else other orders are compared with what it was before, for they are changed afterwards, too."""
        if not self._may():
            return
        best = self.search.reached.within(self.search.bytes)
        if best is None:
            return self._lower(1)
        best = self._less_slow(best)
        line = self._fastest(best.found.timeline, self.search.bytes)
        if self._close(line):
            self._place(line, best.found.timeline)
        else:
            self.changed.append(line)

    def last(self) -> None:
        """Change the fastest plans that were found, where more than the gap is left to the goal; where none is within
        the budget, those of the fewest bytes."""
        if not self._may():
            return
        if self.search.reached.within(self.search.bytes) is None:
            self._lower(_FROM)
        best = self.search.reached.within(self.search.bytes)
        if best is not None:
            self._less_slow(best)
            self._faster()

    def _may(self) -> bool:
        search = self.search
        few = len(search.graph.ops) <= _LARGEST
        return few and not search.problem.only and "recompute" in search.problem.means

    def _lower(self, count: int) -> None:
        """Make the least plans, so many, smaller, until one is within the budget. Not in a quick search, for it takes
        longer than the search before it."""
        if self.search.quick:
            return
        for start in self.search.reached.plans[:count]:
            line = self._lowest(start.found.timeline)
            lower = line is not start.found.timeline
            if lower and self.search.offer(line, self.clock).needs <= self.search.bytes:
                return

    def _lowest(self, line: Timeline) -> Timeline:
        """What comes of steps that need more than there is, down to the budget: by a little each time, for far from
        its limit annealing does not know which bytes are too many."""
        down = _DOWN
        for turn in range(_TURNS_DOWN):
            if line.peak <= self.search.bytes or down < _LEAST:
                break
            made = self._changed(line, max(self.search.bytes, int(line.peak * (1 - down))), 1, turn)
            if made is None or made.peak > line.peak * (1 - down / 2):
                down /= 3
            if made is not None and made.peak < line.peak:
                line = made
        return line

    def _less_slow(self, best: floor.Placed) -> floor.Placed:
        """Where what fits takes far longer than it has to: what a little more memory allows, made smaller. Searches
        for the least leave plans that recompute everything, and stay there."""
        search, budget = self.search, self.search.bytes
        for part in LOOSER if not (search.quick or self.looser) else ():
            if not self._slow(best.found.timeline):
                break
            more = budget + int(budget * part)
            line = self._reached(more) or search.looser(more, self.clock)
            if line is not None:
                self.looser.append(line)
                self._place(self._fastest(self._lowest(line), budget), best.found.timeline)
                best = search.reached.within(budget) or best
        return best

    def _reached(self, budget: int) -> Timeline | None:
        """What is known to be within a budget, if that is not far longer than it has to be."""
        known = self.search.reached.within(budget)
        return None if known is None or self._slow(known.found.timeline) else known.found.timeline

    def _faster(self) -> None:
        search, budget = self.search, self.search.bytes
        best = search.reached.within(budget)
        assert best is not None
        line = self._fastest(min(self._begun(best.found.timeline), key=lambda x: x.time), budget)
        self._place(self._afresh(line), best.found.timeline)

    def _afresh(self, best: Timeline) -> Timeline:
        """Where the fastest steps are not close to the goal, what comes of those that other seeds find: annealing
        that ended far from it would end there again."""
        search, budget = self.search, self.search.bytes
        for again in range(1, 1 + _SEEDS):
            if search.quick or self._above(best) <= _FAR * search.before.time / 2 or search.ends(self.clock):
                break
            line = self._fastest(search.afresh(again, self.clock), budget)
            if line.peak <= budget and line.time < best.time:
                best = line
        return best

    def _place(self, line: Timeline, best: Timeline) -> None:
        """Offsets for steps that are faster than the best with a place for everything, or, where they leave too large
        holes, for what comes of the best with a peak as many bytes lower; with more effort for the fastest where none
        do."""
        search, budget = self.search, self.search.bytes
        first, limit = line, budget
        for _ in range(_HOLES):
            if line.time >= best.time or search.ends(self.clock):
                break
            needs = search.offer(line, self.clock, hard=False).needs
            if needs <= budget:
                return
            limit -= needs - budget
            line = self._fastest(best, limit)
            if line.peak > limit:
                break
        if first.time < best.time and not search.ends(self.clock):
            search.offer(first, self.clock)

    def _begun(self, best: Timeline) -> list[Timeline]:
        """The fastest steps so far, and, where these are not close to the goal, what comes of others."""
        search, budget = self.search, self.search.bytes
        if self._close(best):
            return [best]
        rows = {(x.found.timeline.time, x.found.timeline.peak): x.found.timeline for x in search.seen}
        near = [rows[key] for key in sorted(rows) if key[1] <= budget * _NEARLY and rows[key] is not best]
        made = [self._changed(line, budget, 1, 0) for line in near[:_FROM]]
        return [best, *self.changed, *(line for line in made if line is not None and line.peak <= budget)]

    def _close(self, line: Timeline) -> bool:
        return self._above(line) <= _FAR * self.search.before.time

    def _slow(self, line: Timeline) -> bool:
        return self._above(line) > SLOW * self.search.before.time

    def _above(self, line: Timeline) -> float:
        """By how many seconds steps are above the goal."""
        search = self.search
        return line.time - search.time_bound * (1 + max(search.options.gap, search.near))

    def _fastest(self, line: Timeline, limit: int) -> Timeline:
        """What comes of steps within a limit, until it is near the goal or gains nothing more."""
        search, idle = self.search, 0
        for turn in range(_TURNS):
            if self._above(line) <= 0 or idle > 1:
                break
            made = self._changed(line, limit, _SHORT if self._close(line) else 1, turn)
            if made is None or made.peak > limit or (line.peak <= limit and made.time >= line.time):
                idle += 1
                continue
            idle = idle + 1 if line.time - made.time < search.options.gap * search.before.time else 0
            line = made
        return line

    def _changed(self, line: Timeline, limit: int, part: int, seed: int) -> Timeline | None:
        """What comes of steps, for a limit on their peak; None where nothing can be changed."""
        states = self._states(line)
        made = self._annealed(line, limit - states, part, seed)
        if made is None or made.peak <= limit or self._states(made) <= states:
            return made
        return self._annealed(line, limit - self._states(made), part, seed)

    def _states(self, line: Timeline) -> int:
        """Bytes of the random states that are kept for recomputations, which annealing does not count."""
        again = {step.op for step in line.steps if step.kind == "recompute"}
        return sum(self.search.graph.ops[k].state for k in again if self.search.graph.ops[k].random)

    def _annealed(self, line: Timeline, limit: int, part: int, seed: int) -> Timeline | None:
        search = self.search
        runs = runs_of(line.steps)
        if runs is None or search.ends(self.clock):
            return None
        work = min(_CALLS * len(runs), _MOST, search.options.work) // part
        columns, cost, _, stopped = search.problem.engine.resequence(
            runs, limit, _HEAT, work, work, self.clock.search.left, search.options.seed + seed
        )
        search.interrupted |= stopped
        if not cost["valid"]:
            return None
        steps = save_random_states(search.graph, search.problem.steps_of(columns))
        return replay(search.graph, steps)


def runs_of(steps: Sequence[Step]) -> NDArray[np.int32] | None:
    """The ops that steps run, in order; None of steps that do more than run ops and free storages."""
    plain = all(step.kind in ("compute", "recompute", "free") and not step.waits for step in steps)
    return np.array([s.op for s in steps if s.kind != "free"], dtype=np.int32) if plain else None
