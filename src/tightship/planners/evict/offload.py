"""Copy storages out between two uses, largest first, until the budget is met.

Problem: lower the peak without running any op again. Measure: seconds that ops wait for copies and lose to them.
Source: vDNN (Rhu et al., MICRO 2016), with copies begun as early, and bytes given back as late, as their overlap with
compute asks.
Guarantee: the same bits; never recomputes or packs; at most ``host`` bytes outside. Complexity: one replay per
halving, twice. Known limits: largest first, not where the peak is; one stretch per storage; when the budget is not
met with overlap, all copies are waited for at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.options import option
from tightship.planners.evict.lowering import Transfer, decide, fewest, longest_transfers, overlap
from tightship.planners.evict.problem import Decision, EvictionProblem, Progress, best_of

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """How much memory of the host there is."""

    host: int = option(0, "bytes on the host at most, counted as if all were there at once; 0: no limit")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """Offload as many storages as the budget asks for."""
    o = options or Options()
    choices = _within(problem, longest_transfers(problem.graph, problem.order), o.host or problem.host)

    def overlapped(n: int) -> Decision:
        return decide(problem, budget, transfers=overlap(problem.graph, problem.order, choices[:n]))

    best = fewest(len(choices), overlapped)
    if best.met:
        return best
    waiting = fewest(len(choices), lambda n: decide(problem, budget, transfers=choices[:n]))
    return best_of((best, waiting))


def _within(problem: EvictionProblem, transfers: list[Transfer], host: int | None) -> list[Transfer]:
    """Those that fit into the host's memory together, greedily."""
    found, used = [], 0
    for t in transfers:
        size = problem.graph.storages[t.storage].size
        if not host or used + size <= host:
            found.append(t)
            used += size
    return found
