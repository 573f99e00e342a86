"""Every buffer in bytes of its own (no reuse), the reference for what placement saves.

Problem: offsets for buffers with known live ranges. Minimised: nothing; the arena is the sum of the sizes.
Source: every memory planner's baseline. Guarantee: valid for any execution order. Complexity: linear. Known
limits: all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightship.plan import Problem, Solution
from tightship.planners.place.problem import FREE, frame

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    a = f.arrays
    top = int(np.where(a.pinned == FREE, 0, a.pinned + a.size).max(initial=0))
    offsets = a.pinned.copy()
    for i in np.flatnonzero(a.pinned == FREE).tolist():
        unit = int(a.alignment[i])
        offsets[i] = -(-top // unit) * unit if a.size[i] else 0
        top = max(top, int(offsets[i] + a.size[i]))
    return f.solution(offsets, "naive")
