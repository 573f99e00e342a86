"""Copy storages out between two uses, largest first, until the limit is met.

Problem: lower the peak without running any op again. Measure: seconds that ops wait for copies and lose to them.
Source: vDNN (Rhu et al., MICRO 2016), with copies begun as early, and bytes given back as late, as their overlap with
compute asks.
Guarantee: the same bits; never recomputes or packs; at most ``host`` bytes outside. Complexity: one replay per
halving, twice. Known limits: largest first, not where the peak is; one stretch per storage; when the limit is not
met with overlap, all copies are waited for at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightship.planners.evict.offload_compress import Aside, decided, fewest, overlapped, spans
from tightship.planners.evict.problem import Decision, Frame

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """``host``: bytes copied out at a time, at most (counted as if all were there at once); 0: no limit."""

    host: int = 0


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """Copies out as many storages as the limit asks for."""
    o = options or Options()
    can = _within(frame, spans(frame.graph, frame.order), o.host)
    beside = fewest(len(can), lambda n: decided(frame, limit, overlapped(frame.graph, frame.order, can[:n])))
    if beside.met:
        return beside
    apart = fewest(len(can), lambda n: decided(frame, limit, can[:n]))
    return apart if apart.beats(beside) else beside


def _within(frame: Frame, can: list[Aside], most: int) -> list[Aside]:
    if not most:
        return can
    found, taken = [], 0
    for a in can:
        size = frame.graph.storages[a.storage].size
        if taken + size <= most:
            found.append(a)
            taken += size
    return found
