"""Evict at the highest point, cheapest seconds per byte first, until the budget is met.

Problem: choose gaps to recompute so that the peak is within the budget. Measure: seconds of recomputation per
byte gone from the point of the peak; where that gets stuck (in deep chains, all of which would be made again at
once), from a checkpoint per block. Source: the loop of XLA's HloRematerialization (behaviors R5, R9, R18,
R19), on gaps and with true costs. Guarantee: never accepts a step that raises the overall peak; reproducible.
Complexity: near-linear (batches of evictions per replay). Known limits: greedy; does not see that two evictions
share a recomputation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tightship.options import option
from tightship.planners.evict import blocks
from tightship.planners.evict.problem import Decision, EvictionProblem, Progress, best_of

__all__ = ["Options", "from_checkpoints", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search."""

    work: int = option(200_000_000, "ops simulated at most; makes a plan reproducible")
    seconds: float = option(10.0, "wall clock at most")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """Evictions chosen greedily, then those not needed given back group by group."""
    return from_checkpoints(problem, budget, options or Options(), progress)


def from_checkpoints(
    problem: EvictionProblem, budget: int, o: Options, progress: Progress | None = None,
    checkpoints: Decision | None = None,
) -> Decision:  # fmt: skip
    """As `plan`; ``checkpoints`` is what `blocks` has found, where that is known."""
    until = time.perf_counter() + o.seconds

    def left() -> float:
        return max(0.0, until - time.perf_counter())

    first = problem.decision(problem.engine.greedy(budget, problem.nothing(), o.work, o.seconds, progress))
    if not first.met:
        few = blocks.Options(work=o.work // 4, seconds=0.5 * left())
        start = checkpoints or blocks.plan(problem, budget, few)
        second = start
        if start.valid and not start.met:
            second = problem.decision(problem.engine.greedy(budget, start.evict, o.work, left(), progress))
        first = best_of((first, second))
    if not first.met:
        return first
    return problem.decision(problem.engine.relax(problem.groups, budget, first.evict, o.work, left()))
