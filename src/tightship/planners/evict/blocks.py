"""Checkpoint per block: keep one tensor per layer (or a few), recompute the rest.

Problem: the saved set of activation checkpointing, found without being told where the blocks are. Measure:
extra seconds among those that meet the budget, else the peak. Source: Chen et al. 2016, "Training deep nets with
sublinear memory cost"; PyTorch's ``checkpoint`` around each block. Every class of repeated tensors is tried as the
set to keep, alone and then together with the best so far. Guarantee: none on optimality; a good seed. Complexity:
classes x replay. Known limits: only sees repeated structure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tightship.options import option
from tightship.planners.evict.problem import (
    DROP,
    EVICT,
    KEEP,
    PASS,
    Bits,
    Decision,
    EvictionProblem,
    Progress,
    best_of,
)

__all__ = ["Options", "plan"]


_SPACES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Distances, in layers, between those whose tensors are kept."""


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search."""

    keep: int = option(3, "classes of repeated tensors that are kept at most")
    tries: int = option(800, "candidates at most")
    work: int = option(40_000_000, "ops simulated at most; makes a plan reproducible")
    seconds: float = option(10.0, "wall clock at most")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best of: evict everything but up to ``keep`` classes of repeated tensors, in every layer or every n-th; the
    tensors between are restored on the way and stay, so that a segment is recomputed layer by layer."""
    o = options or Options()
    far = problem.crossing.astype(np.uint8)
    classes = [r for r in problem.classes if len(r) > 2 and far[list(r)].any()]
    classes.sort(key=lambda r: -sum(int(problem.graph.storages[problem.gaps[g][0]].size) for g in r))
    until = time.perf_counter() + o.seconds
    best = _search(problem, budget, o, far, classes, EVICT, until)
    for rest in (PASS, DROP):
        if rest == DROP and best.met:
            break  # it costs more than the others, and only reaches less
        best = best_of((best, _search(problem, budget, o, far, classes, rest, until)))
    return best


def _search(
    problem: EvictionProblem,
    budget: int,
    o: Options,
    far: Bits,
    classes: list[tuple[int, ...]],
    rest: int,
    until: float,
) -> Decision:
    best = problem.cost(far * np.uint8(rest), budget)
    tries, most = 0, min(o.tries, o.work // (4 * max(1, len(problem.order))))
    for _ in range(o.keep):
        start, round_best = best.evict, best
        for row in classes:
            for every in _SPACES:
                if every > 1 and every * 2 > len(row):
                    break
                tries += 1
                if tries > most or problem.archive.stopped or time.perf_counter() > until:
                    return best_of((best, round_best))
                bits = start.copy()
                bits[list(row)] = np.minimum(bits[list(row)], EVICT)
                bits[list(row[::every])] = KEEP
                round_best = best_of((round_best, problem.cost(bits, budget)))
        if round_best is best:
            break
        best = round_best
    return best
