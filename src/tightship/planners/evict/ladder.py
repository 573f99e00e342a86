"""Evict what costs the fewest seconds per byte above the limit, by the exact cost of every candidate.

Problem: choose gaps to recompute so that the peak is within the limit. Measure: seconds added per excess gone, the
excess being the bytes above the limit, summed over all ops. Source: lazy greedy (Minoux 1978); rows of repeated
tensors beside single ones are ours. Guarantee: never takes what lowers no excess; reproducible. Complexity: a replay
per candidate and per step a few more. Known limits: greedy; what only helps together with something else is found
only where a row has both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightship.planners.evict.problem import Bits, Decision, Frame, Progress

__all__ = ["Options", "climb", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """``work``: ops simulated at most. ``seconds``: wall clock at most."""

    work: int = 100_000_000
    seconds: float = 10.0


def plan(
    frame: Frame, limit: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """Evictions from nothing, then those not needed given back."""
    return climb(frame, limit, frame.nothing(), options or Options(), progress)


def climb(frame: Frame, limit: int, start: Bits, o: Options, progress: Progress | None = None) -> Decision:
    """As ``plan``, from decisions that are there already."""
    found = frame.found(frame.engine.lazy_greedy(frame.rows, limit, start, o.work, o.seconds, progress))
    if not found.met or not found.extra:
        return found
    better = relaxed(frame, limit, found, o.work // 4, o.seconds / 4)
    return replace(better, work=found.work + better.work)


def relaxed(frame: Frame, limit: int, found: Decision, work: int, seconds: float) -> Decision:
    """What is not needed to stay within the limit given back, rows first."""
    spent = 0
    for rows in (frame.groups, frame.singles):
        found = frame.found(frame.engine.relax(rows, limit, found.evict, work, seconds))
        spent += found.work
    return replace(found, work=spent)
