"""Constraint programming over retention intervals: the best plan in the frame's order, if given the time.

Problem: choose which ops run again before which others, and how long every copy stays; minimise seconds of
recomputation, peak within the limit. Measure: exact bytes and seconds, as the replay counts them. Source: the
retention intervals of Moccasin (Bartan et al. 2023) on the stages of Checkmate (Jain et al. 2020), solved by OR-tools
(CP-SAT, extra ``solver``); begins with what `anneal` found. Up to ``whole`` ops are decided together, more of them
by windows, with the rest as it is. Guarantee: never worse than what it began with; where the solver ends before its
effort does, the least time of all plans that keep the order, run an op again ``again`` times at most, and run what
precedes an op again in that order, too. The same seed, ``work`` and ``effort`` give the same plan. Complexity:
exponential; some twenty ops to proof, two hundred to a good plan. Known limits: recomputation only; no results in the
place of inputs (what the search saves by them it cannot save); what is written in place is run again as a whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tightship.analysis.bounds import time_bound
from tightship.errors import Unsupported
from tightship.planners.evict import anneal, keep
from tightship.planners.evict.lowering import carried_out
from tightship.planners.evict.problem import OFFLOAD, PACK, Decision, Frame
from tightship.planners.evict.retention import Effort, Model, Retention

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """``again``: how often an op runs again at most, if the search did not run it more often. ``effort``: of the
    solver, in its deterministic seconds, and ``work``: ops simulated by the search before it; these make a plan
    reproducible. ``seconds``: wall clock at most. ``whole``: ops decided together at most; ``window``: units (an op,
    or several that write one storage) decided together in larger graphs."""

    again: int = 1
    effort: float = 10.0
    work: int = 15_000_000
    seconds: float = 60.0
    whole: int = 200
    window: int = 60
    seed: int = 0


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """The best decision found. Raises ``Unsupported`` without OR-tools."""
    o = options or Options()
    until = time.perf_counter() + o.seconds
    all_kept = keep.plan(frame, limit)
    if all_kept.met or _copies_asked_for(frame):
        return all_kept
    cp_model = _solver()
    best = anneal.plan(frame, limit, anneal.Options(work=o.work, seconds=o.seconds / 4, seed=o.seed))
    bound = max(0.0, time_bound(frame.graph, limit) - sum(op.time for op in frame.graph.ops))
    if frame.archive.stopped or math.isinf(bound):
        return best
    problem = Retention(frame)
    runs = problem.runs(frame.lower(best, limit))
    windows = list(_windows(problem, o))
    for free in windows:
        left = until - time.perf_counter()
        if left <= 0 or (best.met and best.extra <= bound * (1 + 1e-9)):
            break
        model = Model(cp_model, problem, limit, runs, o.again, free, bound)
        solved = model.solved(Effort(o.effort / len(windows), left, o.seed))
        if solved is not None:
            found = carried_out(frame, solved[1], limit)
            if found.beats(best):
                best, runs = found, solved[0]
    return best


def _windows(problem: Retention, o: Options) -> Iterator[Collection[int] | None]:
    """Units to be decided together, by position, each in two windows; None: all of them."""
    if problem.n <= o.whole:
        yield None
        return
    units = [u for u, unit in enumerate(problem.units) if unit.stages]
    for start in range(0, max(1, len(units) - o.window // 2), max(1, o.window // 2)):
        yield frozenset(units[start : start + o.window])


def _copies_asked_for(frame: Frame) -> bool:
    """Whether something has to be packed or copied out, which is not modelled here."""
    return any(may and not may & ~(1 << PACK | 1 << OFFLOAD) for may in frame.engine.allowed.tolist())


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as missing:
        raise Unsupported(
            "the planner exact", "OR-tools, which `pip install tightship[solver]` brings"
        ) from missing
    return cp_model
