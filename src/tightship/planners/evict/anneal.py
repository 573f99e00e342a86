"""Simulated annealing over groups of repeated tensors, from the best of many seeds; the default.

Problem: choose gaps to recompute; minimize seconds of recomputation, peak within the budget. Measure: the exact
simulated peak and time of every candidate. Source: Kirkpatrick et al. 1983; moving isomorphic layers together is
ours. Seeds: keep everything, checkpoints as people set them, saved sets by price and mixed of two layer by layer,
what the problem's archive has; where none of them is within the budget, batches of evictions that cover the excess
(ours), and greed after that; where those and annealing leave more than a point to the goal, also checkpoints as
blocks are found, dynamic programming over a chain of blocks, and the ladder from each side of the budget. Ends at
the goal, once a whole run of annealing gained less than the gap, or a later one little of what is left; where that is
more than a point above the goal, runs begin anew from where the first one began, some times. Guarantee:
never worse than any seed tried, nor than what was found for less memory on the same problem; the same seed and work
limit give the same plan, and more work goes on where less of it ends. Complexity: a replay per candidate, anytime.
Known limits: no proof of optimality; the gap to the lower bound is reported instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tightship.baselines import chain, checkpoint, min_cut
from tightship.options import Deadline, option
from tightship.planners.evict import blocks, greedy, keep, ladder
from tightship.planners.evict.problem import OFFLOAD, Bits, Decision, EvictionProblem, Progress, best_of

__all__ = ["Options", "plan"]

_CALLS, _LEAST, _MOST, _GROWTH = 10_000, 3_000, 8_000_000, 2
"""Candidates in the first run of annealing; at least so many, where they simulate more than so many ops; and how much
longer each later run is. What a run does depends on no limit of work, so that with more of it the same things are
tried, and then more."""
_HEAT, _HOTTEST = 6.0, 0.1
"""The first temperature of every run, in step times: over the number of gaps, and at most."""
_MIX, _CHAIN, _BLOCKS = 7_500_000, 7_500_000, 37_500_000
_JOIN, _GREEDY, _LADDER, _RELAX = 7_500_000, 15_000_000, 15_000_000, 4_500_000
"""Ops simulated at most for one seed of each kind."""
_COVER = 3
"""The part of the work and of the time that covering the excess may take, as its inverse, and greed after that."""
_MIXED, _BESIDE = 2e-5, 10_000
"""Seconds that seeds may take for each op, and for as many more, whatever the limit, while nothing is within the
budget."""
_SLOW = 0.2
"""A run of annealing after the first that gains less than this part of what is left to the goal is the last."""
_FAR = 0.01
"""So far above the goal, as a part of the step's time, dearer seeds are tried."""
_JOINED = 3
"""How often what runs of annealing came to is joined with the best so far, as long as that gains."""
_EXCHANGES = 0.1
"""Of the moves of runs that begin anew, the part after which one tensor of a layer has what another one had."""
_RESTARTS = 3
"""How often annealing begins anew where what gains nothing more is so far above the goal."""


_CHECKPOINTS = tuple(checkpoint.Options(depth, selective) for depth in (1, 2) for selective in (False, True))


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search, its goal, and its seed."""

    work: int = option(150_000_000, "ops simulated at most; makes a plan reproducible")
    seconds: float = option(8.0, "wall clock at most")
    seed: int = option(0, "seed of the random moves")
    goal: float = option(0.0, "seconds of recomputation that are few enough")
    gap: float = option(0.001, "gains of less than this part of the step's time do not keep the search going")
    dear: bool = option(True, "also seeds that take long, where the others leave much to be gained")


@dataclass
class _Search:
    """A problem and a budget; what is left of work and time, and the best found so far."""

    problem: EvictionProblem
    budget: int
    options: Options
    progress: Progress | None
    best: Decision
    work: int
    deadline: Deadline
    over: list[Decision] = field(default_factory=list)
    """Seeds above the budget."""
    ends: list[Bits] = field(default_factory=list)
    """What runs of annealing ended with, and is not joined with the best yet."""
    joined: Decision | None = None
    """The best that all others before are joined with."""
    least: Deadline = field(init=False)
    """Until then seeds are tried in any case: without, plans of large graphs would take much longer, or not fit."""

    def __post_init__(self) -> None:
        least = Deadline.after(_MIXED * (_BESIDE + len(self.problem.order)))
        self.least = max(self.deadline, least, key=lambda d: d.at)

    @property
    def ended(self) -> str:
        """Why there is nothing more to do, as in ``plan.TERMINATIONS``; empty: there is."""
        if self.problem.archive.stopped:
            return "interrupted"
        if self.best.met and self.best.extra <= self.options.goal:
            return "gap"
        if self.work <= 0:
            return "work"
        return "seconds" if self.deadline.over else ""

    def share(self, work: int, seconds: float) -> tuple[int, float]:
        """So much work and such a share of the time, or what is left."""
        return max(0, min(work, self.work)), seconds * self.deadline.left

    def spend(self, found: Decision) -> Decision:
        self.work -= found.work
        return found

    def take(self, found: Iterable[Decision], *, until_met: bool = False) -> None:
        """Look at decisions until nothing more is to be done; ``until_met``: until ``least``, while none is within
        the budget."""
        for d in found:
            if d.valid and not d.met:
                self.over.append(d)
            self.best = best_of((self.best, d))
            told = self.progress is not None and self.progress(self.best.peak, self.best.extra, self.best.met)
            self.problem.archive.stopped |= told
            more = until_met and not self.best.met and self.ended != "interrupted" and not self.least.over
            if self.ended and not more:
                return

    @property
    def far(self) -> bool:
        """Whether the best is within the budget, and takes much more time than the goal."""
        best = self.best
        return best.met and best.extra > self.options.goal + _FAR * self.problem.engine.base_time

    def gained(self, before: Decision) -> bool:
        """Whether the best is better than ``before`` by enough to go on."""
        now = self.best
        if now.met and before.met:
            return before.extra - now.extra > self.options.gap * self.problem.engine.base_time
        return now.met or before.peak - now.peak > self.options.gap * before.peak


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found until the goal, the end of all gains, a limit, or Ctrl-C: ``ended`` says which."""
    o = options or Options()
    all_kept = keep.plan(problem, budget)
    if all_kept.met or not len(problem.gaps):
        return replace(all_kept, ended="optimal" if all_kept.met else "stagnation")
    search = _Search(problem, budget, o, progress, all_kept, o.work, Deadline.after(o.seconds))
    try:
        _run(search)
    except KeyboardInterrupt:
        problem.archive.stopped = True
    problem.archive.offer(search.best)
    return replace(search.best, work=o.work - search.work, ended=search.ended or "stagnation")


def _run(search: _Search) -> None:
    """Seeds, annealing until it gains nothing, dearer seeds where that is far from the goal, and annealing again.
    Saved sets come first: they take the fewest replays, and leave little where layers are many."""
    problem, o = search.problem, search.options
    search.take(problem.archive.around(search.budget, problem))
    if search.best.met and search.ended:
        return
    search.take(_mixed(search), until_met=True)
    if not search.best.met:
        search.take(_covered(search))
    if not search.ended or not (search.best.met or search.least.over):
        search.take(_by_hand(problem, search.budget), until_met=True)
    runs = _Runs(search)
    if search.best.met and not search.ended:
        search.take(_relaxed(search))
        runs.until_no_gain()
    if o.dear and not search.ended and (not search.best.met or search.far):
        before = search.best
        search.take(_dear_seeds(search))
        if not before.met or search.gained(before):
            runs.until_no_gain()


@dataclass
class _Runs:
    """Annealing from the best so far, again and again, longer from the second time on."""

    search: _Search
    size: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        ops = max(1, len(self.search.problem.order))
        self.size = max(_LEAST * ops, min(_CALLS * ops, _MOST))

    def until_no_gain(self) -> None:
        """Annealing from the best as long as that gains; far from the goal also from where the first run began, by
        other moves, in two runs each time: what a run comes down to depends on them by chance. What several came to,
        and saved sets, are joined layer by layer."""
        search, start = self.search, self.search.best
        search.take(_joined(search))
        while not search.ended:
            before = search.best
            search.take(self._one(before))
            search.take(_joined(search))
            if not search.gained(before) or (self.count > 1 and self._slowed(before)):
                break
        for _ in range(_RESTARTS):
            here = start
            for growth in (1, _GROWTH):
                if search.ended or not (search.options.dear and search.far):
                    return
                made = list(self._one(here, growth))
                here = best_of((here, *made))
                search.take(made)
            search.take(_joined(search))

    def _slowed(self, before: Decision) -> bool:
        """Whether the last run gained a small part of what is left to the goal: the next one would hardly gain."""
        now, goal = self.search.best, self.search.options.goal
        return before.met and before.extra - now.extra < _SLOW * (now.extra - goal)

    def _one(self, start: Decision, growth: int = 0) -> Iterator[Decision]:
        search, problem = self.search, self.search.problem
        size = self.size * (growth or (_GROWTH if self.count else 1))
        heat = min(_HOTTEST, _HEAT / len(problem.gaps))
        work, seconds = search.share(size, 0.9)
        seed = search.options.seed + self.count
        self.count += 1
        run = problem.engine.anneal(
            problem.groups, *problem.isomorphic_layers, search.budget, start.evict, heat, size, work, seconds,
            _EXCHANGES if growth else 0.0, seed, search.progress,
        )  # fmt: skip
        found = search.spend(problem.decision(run))
        yield found
        if found.met:
            work, seconds = search.share(size // 8, 0.5)
            found = search.spend(ladder.relaxed(problem, search.budget, found, work, seconds))
            yield found
            search.ends.append(found.evict)


def _by_hand(problem: EvictionProblem, budget: int) -> Iterator[Decision]:
    """Everything outside, what people keep by hand, and minimum cuts by themselves."""
    if (outside := problem.wherever(OFFLOAD)).any():  # the least memory there is in this order
        yield problem.cost(outside, budget)
    for by_hand in _CHECKPOINTS:
        bits = checkpoint.dropped(problem, by_hand)
        if bits.any():
            yield problem.cost(bits, budget)
    yield from min_cut.family(problem, budget)


def _mixed(search: _Search) -> Iterator[Decision]:
    """Saved sets mixed of two; where one is far from the goal, also less what it need not evict."""
    problem, budget = search.problem, search.budget
    for d in min_cut.between(problem, budget, search.least):
        yield d
        if d.met:
            work, seconds = search.share(_MIX, 0.05)
            yield search.spend(ladder.relaxed(problem, budget, d, work, seconds))


def _covered(search: _Search) -> Iterator[Decision]:
    """What takes the excess away wherever it is, and then at the peak: graphs without layers, or with lives of every
    length, have little that moves together."""
    problem, budget = search.problem, search.budget
    start = problem.nothing()
    for climb in (problem.engine.cover, problem.engine.greedy):
        work, seconds = search.share(search.work // _COVER, 1 / _COVER)
        found = search.spend(problem.decision(climb(budget, start, work, seconds, search.progress)))
        yield found
        if found.met or not found.valid:
            return
        start = found.evict


def _joined(search: _Search) -> Iterator[Decision]:
    """The best so far, far from the goal, with some of its layers as other runs or saved sets have them; again while
    that gains."""
    for _ in range(_JOINED):
        before = search.best
        if search.ended or not (search.options.dear and search.far):
            return
        work, _ = search.share(_JOIN, 0.0)
        others = [*search.ends, *(() if before is search.joined else min_cut.sets(search.problem))]
        search.joined, search.ends = before, []
        yield search.spend(
            min_cut.joined(search.problem, search.budget, before, others, work, search.deadline)
        )
        if not search.gained(before):
            return


def _relaxed(search: _Search) -> Iterator[Decision]:
    """The best so far, less what it need not evict."""
    work, seconds = search.share(_RELAX, 0.03)
    yield search.spend(ladder.relaxed(search.problem, search.budget, search.best, work, seconds))


def _dear_seeds(search: _Search) -> Iterator[Decision]:
    """What takes longer, and helps where saved sets leave much to be gained."""
    problem, budget = search.problem, search.budget
    work, seconds = search.share(_CHAIN, 0.05)
    yield search.spend(chain.plan(problem, budget, chain.Options(work=work, seconds=seconds)))
    work, seconds = search.share(_BLOCKS, 0.2)
    checkpoints = blocks.plan(problem, budget, blocks.Options(work=work, seconds=seconds))
    yield checkpoints
    work, seconds = search.share(_GREEDY, 0.1)
    yield search.spend(
        greedy.from_checkpoints(problem, budget, greedy.Options(work, seconds), search.progress, checkpoints)
    )
    if search.best.met:
        return
    # Up from below the budget is done by giving back, down from above it by the ladder.
    starts = [problem.nothing()]
    if search.over:
        starts.insert(0, min(search.over, key=lambda d: d.peak).evict)
    for start in starts:
        work, seconds = search.share(_LADDER, 0.1)
        yield search.spend(
            ladder.climb(problem, budget, start, ladder.Options(work, seconds), search.progress)
        )
