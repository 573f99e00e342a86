"""Pack a placement problem with any placement planner: pools, gaps, hints and a packing to beat are taken care of.

A planner places in one arena. Groups, conflicts and gaps every planner knows exactly. Planners that search are
followed by a first fit that takes the hints. What comes out has passed ``check_solution``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightship.errors import BadInput, VerificationFailed
from tightship.options import option
from tightship.plan import Problem, Solution
from tightship.planners import PlannerInfo, planner
from tightship.planners.place.best_of import Interrupted, watched
from tightship.planners.place.problem import hinted
from tightship.planners.pools import spill
from tightship.verify.placement import check_solution

__all__ = ["DEFAULT", "Interrupted", "Search", "pack", "watched"]

DEFAULT = "portfolio"


@dataclass(frozen=True, slots=True)
class Search:
    """When a search ends. The same seed and work give the same answer unless the time ended it. Planners that do not
    search need none of them."""

    seed: int = option(0, "where the search begins")
    work: int = option(200_000, "buffers that each search may place")
    seconds: float = option(10.0, "time in all")


def pack(
    problem: Problem,
    planner_name: str = DEFAULT,
    search: Search | None = None,
    *,
    baseline: Sequence[int] | None = None,
) -> Solution:
    """Offsets for a problem, checked. ``baseline``: offsets of a packing that the answer is not worse than.

    Raises ``Interrupted``, a ``KeyboardInterrupt``, with the best so far when Ctrl-C ends a search."""
    run, limits = _Run(planner(planner_name, "place")), search or Search()
    if baseline is not None and problem.pools:
        raise BadInput("cannot be used with pools: a baseline is a packing in one arena", place="baseline")
    if baseline is not None:
        _check_baseline(problem, baseline)
    if problem.pools:
        began = time.perf_counter()
        until = began + limits.seconds
        solution = spill(problem, lambda part: _one_arena(part, run, _within(limits, until)))
        solution = replace(solution, seconds=time.perf_counter() - began)
    else:
        solution = _one_arena(problem, run, limits)
    if baseline is not None and (arena := _arena(problem, baseline)) < solution.arena:
        solution = replace(solution, offsets=tuple(map(int, baseline)), arena=arena, planner="baseline")
    # Whether a capacity is met is the answer, not a fault of it.
    if wrong := [v for v in check_solution(problem, solution) if v.code != "over-capacity"]:
        raise VerificationFailed(wrong, f"planner {solution.planner!r}")
    if run.interrupted:
        raise Interrupted(solution)
    return solution


@dataclass(slots=True)
class _Run:
    """A planner, and whether Ctrl-C has ended its search: then what is left to do is done without searching."""

    info: PlannerInfo
    interrupted: bool = False

    @property
    def searches(self) -> bool:
        return not self.interrupted and "work_limit" in self._names

    @property
    def _names(self) -> set[str]:
        return {f.name for f in dataclasses.fields(self.info.options)}

    def plan(self, problem: Problem, search: Search, seconds: float) -> Solution:
        """The planner's answer; the search's limits are its options, as far as it has them."""
        if self.interrupted:
            seconds = 0.0
        given = {"seed": search.seed, "work_limit": search.work, "time_limit": seconds}
        options = self.info.options(**{name: value for name, value in given.items() if name in self._names})
        try:
            solution: Solution = self.info.plan(problem, options)
        except Interrupted as end:
            self.interrupted, solution = True, end.solution
        return solution


def _one_arena(problem: Problem, run: _Run, limits: Search) -> Solution:
    solution = run.plan(problem, limits, limits.seconds)
    if run.searches and any(b.hint is not None for b in problem.buffers):
        solution = _hinted(problem, solution, limits)
    return solution


def _within(limits: Search, until: float) -> Search:
    """Limits of one of several placements: a part of the time that is left."""
    return replace(limits, seconds=max(0.05, (until - time.perf_counter()) / 3))


def _hinted(problem: Problem, solution: Solution, search: Search) -> Solution:
    """The packing that follows the hints, where it is as small."""
    began = time.perf_counter()
    found = hinted(problem, solution.arena + 1, max(search.seconds - solution.seconds, 0.0))
    solution = replace(solution, seconds=solution.seconds + time.perf_counter() - began)
    if found is None:
        return solution
    offsets = tuple(found.tolist())
    return replace(solution, offsets=offsets, arena=_arena(problem, offsets), planner="hints")


def _check_baseline(problem: Problem, offsets: Sequence[int]) -> None:
    arena = _arena(problem, offsets)
    wrong = check_solution(replace(problem, capacity=None), Solution(tuple(map(int, offsets)), arena))
    if wrong:
        raise BadInput(f"wrong packing: {wrong[0].message}", place="baseline")


def _arena(problem: Problem, offsets: Sequence[int]) -> int:
    return max((x + b.size for b, x in zip(problem.buffers, offsets, strict=False)), default=0)
