"""Save the bytes across the forward's end whose recomputation would cost more; evict the rest.

Problem: the saved set between forward and backward that minimises bytes + price * seconds of recomputation, for a
range of prices. Measure: extra seconds among those that meet the limit, else the peak. Source: the minimum cut of
PyTorch's ``min_cut_rematerialization_partition`` (Horace He), here over storages, without its bans, which are
heuristics for fusing compilers, and with seconds priced against bytes, so that the prices trace the convex hull of
all saved sets; its knapsack over saved values at an ``activation_memory_budget`` lies on or above that hull.
Guarantee: each cut is minimal. Complexity: a maximum flow per price (Dinic), small in practice. Known limits: blind
to where the recomputation lands, so a peak may lie above keeping everything; a seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightship.planners.evict._frame import DROP, EVICT, PASS, Decision, Frame

__all__ = ["Options", "family", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """``prices``: how many saved sets are tried, from the fewest bytes to the fewest seconds."""

    prices: int = 16


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """The best of the saved sets."""
    best, *others = family(frame, limit, options)
    for found in others:
        best = found if found.beats(best) else best
    return best


def family(frame: Frame, limit: int, options: Options | None = None) -> list[Decision]:
    """One decision per saved set and way of dropping the rest, fewest bytes first; the first, if there is none,
    keeps everything."""
    o = options or Options()
    boundary = frame.boundary
    crossing = (frame.gaps[:, 1] < boundary) & (frame.gaps[:, 2] >= boundary)
    if not crossing.any():
        return [frame.cost(frame.nothing(), limit)]
    size = np.array([frame.graph.storages[s].size for s in frame.gaps[crossing, 0].tolist()], dtype=float)
    rate = max(1.0, size.sum()) / max(1e-12, frame.engine.base_time)
    found, seen = [], set()
    for k in range(o.prices):
        saved = frame.engine.priced_cut(boundary, rate * 2.0 ** (k - 4) if k else 0.0)
        dropped = crossing & (saved[frame.gaps[:, 0]] == 0)
        if (key := dropped.tobytes()) in seen:
            continue
        seen.add(key)
        found += [
            frame.cost(dropped.astype(np.uint8) * np.uint8(kind), limit) for kind in (EVICT, PASS, DROP)
        ]
    return found
