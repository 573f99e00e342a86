"""Checkpoint per block: keep one tensor per layer (or a few), recompute the rest.

Problem: the saved set of activation checkpointing, found without being told where the blocks are. Measure:
extra seconds among those that meet the limit, else the peak. Source: Chen et al. 2016, "Training deep nets with
sublinear memory cost"; PyTorch's ``checkpoint`` around each block. Every class of repeated tensors is tried as the
set to keep, alone and then together with the best so far. Guarantee: none on optimality; a good seed. Complexity:
classes x replay. Known limits: only sees repeated structure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tightship.planners.evict.problem import DROP, EVICT, KEEP, PASS, Bits, Decision, Frame

__all__ = ["Options", "plan"]


_SPACES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Distances, in layers, between those whose tensors are kept."""


@dataclass(frozen=True, slots=True)
class Options:
    """``keep``: how many classes are kept at most. ``tries``: candidates at most. ``work``: ops simulated at most.
    ``seconds``: wall clock at most."""

    keep: int = 3
    tries: int = 800
    work: int = 40_000_000
    seconds: float = 10.0


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """The best of: evict everything but up to ``keep`` classes of repeated tensors, in every layer or every n-th; the
    tensors between are restored on the way and stay, so that a segment is recomputed layer by layer."""
    o = options or Options()
    far = _crossing(frame)
    classes = [r for r in frame.classes if len(r) > 2 and far[list(r)].any()]
    classes.sort(key=lambda r: -sum(int(frame.graph.storages[frame.gaps[g][0]].size) for g in r))
    until = time.perf_counter() + o.seconds
    best = _search(frame, limit, o, far, classes, EVICT, until)
    for rest in (PASS, DROP):
        if rest == DROP and best.met:
            break  # it costs more than the others, and only reaches less
        found = _search(frame, limit, o, far, classes, rest, until)
        best = found if found.beats(best) else best
    return best


def _search(
    frame: Frame,
    limit: int,
    o: Options,
    far: Bits,
    classes: list[tuple[int, ...]],
    rest: int,
    until: float,
) -> Decision:
    best = frame.cost(far * np.uint8(rest), limit)
    tries, most = 0, min(o.tries, o.work // (4 * max(1, len(frame.order))))
    for _ in range(o.keep):
        start, round_best = best.evict, best
        for row in classes:
            for every in _SPACES:
                if every > 1 and every * 2 > len(row):
                    break
                tries += 1
                if tries > most or frame.archive.stopped or time.perf_counter() > until:
                    return round_best if round_best.beats(best) else best
                bits = start.copy()
                bits[list(row)] = np.minimum(bits[list(row)], EVICT)
                bits[list(row[::every])] = KEEP
                found = frame.cost(bits, limit)
                if found.beats(round_best):
                    round_best = found
        if round_best is best:
            break
        best = round_best
    return best


def _crossing(frame: Frame) -> Bits:
    """Gaps from the forward into the backward (without phases: across the point where most bytes are alive)."""
    middle = frame.boundary
    return ((frame.gaps[:, 1] < middle) & (frame.gaps[:, 2] >= middle)).astype(np.uint8)
