"""Pack everything that packs without loss while nobody uses it: masks to bits, indices to narrow integers.

Problem: lower the peak without running any op again. Measure: bytes; the seconds of the codecs are a few per cent
of what made the values. Source: Gist (Jain et al., ISCA 2018), its lossless part; which storages, see
``analysis.packing``. Guarantee: the same bits; never copies out or recomputes. Complexity: one replay per halving.
Known limits: largest savings first, not where the peak is; one stretch per storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightship.analysis.packing import packings
from tightship.planners.evict.offload_compress import decided, fewest, spans
from tightship.planners.evict.problem import Decision, Frame

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """``lossy``: single precision may be rounded to bfloat16 too."""

    lossy: bool = False


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """Packs as many storages as the limit asks for, those that save most first."""
    o = options or Options()
    graph, uses = frame.graph, frame.graph.uses
    known = packings(graph, lossy=o.lossy)
    at = {k: p for p, k in enumerate(frame.order)}
    can = [
        replace(a, packing=known[a.storage])
        for a in spans(graph, frame.order)
        if a.storage in known and all(at[w] <= a.last for w in uses.writers[a.storage])
    ]
    can.sort(key=lambda a: a.packing.nbytes - graph.storages[a.storage].size if a.packing else 0)
    return fewest(len(can), lambda n: decided(frame, limit, can[:n]))
