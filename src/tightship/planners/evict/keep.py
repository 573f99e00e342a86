"""Keep everything: nothing is evicted.

Problem: the reference every other plan is measured against. Measure: none. Source: what eager execution does,
less what it holds longer than needed. Guarantee: no extra time. Complexity: one replay.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.planners.evict.problem import Decision, EvictionProblem, Progress

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The decision that evicts nothing."""
    return problem.cost(problem.nothing(), budget)
