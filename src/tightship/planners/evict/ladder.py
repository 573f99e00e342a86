"""Evict what costs the fewest seconds per byte above the budget, by the exact cost of every candidate.

Problem: choose gaps to recompute so that the peak is within the budget. Measure: seconds added per excess gone, the
excess being the bytes above the budget, summed over all ops. Source: lazy greedy (Minoux 1978); rows of repeated
tensors beside single ones are ours, and so is covering the excess in batches, by estimates, where the work does not
do for a look at every row. Guarantee: never takes what lowers no excess; reproducible. Complexity: a replay per
candidate and per step a few more. Known limits: greedy; what only helps together with something else is found only
where a row has both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightship.options import Deadline, option
from tightship.planners.evict.problem import Bits, Decision, EvictionProblem, Progress

__all__ = ["Options", "climb", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search."""

    work: int = option(100_000_000, "ops simulated at most; makes a plan reproducible")
    seconds: float = option(10.0, "wall clock at most")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """Evictions from nothing, then those not needed given back."""
    return climb(problem, budget, problem.nothing(), options or Options(), progress)


def climb(
    problem: EvictionProblem, budget: int, start: Bits, o: Options, progress: Progress | None = None
) -> Decision:
    """Evict more than ``start`` does, then give back what is not needed. Where the work does not do for a look at
    every row, in batches first (``cover``), by estimates."""
    deadline, spent = Deadline.after(o.seconds), 0
    if o.work < len(problem.rows[0]) * len(problem.order):
        found = problem.decision(problem.engine.cover(budget, start, o.work // 2, o.seconds / 2, progress))
        start, spent = found.evict, found.work
        if found.met:
            return found
    found = problem.decision(
        problem.engine.lazy_greedy(problem.rows, budget, start, o.work - spent, deadline.left, progress)
    )
    found = replace(found, work=found.work + spent)
    if not found.met or not found.extra:
        return found
    better = relaxed(problem, budget, found, o.work // 4, o.seconds / 4)
    return replace(better, work=found.work + better.work)


def relaxed(problem: EvictionProblem, budget: int, found: Decision, work: int, seconds: float) -> Decision:
    """Give back what is not needed to stay within the budget, rows first."""
    spent = 0
    for rows in (problem.groups, problem.singles):
        found = problem.decision(problem.engine.relax(rows, budget, found.evict, work, seconds))
        spent += found.work
    return replace(found, work=spent)
