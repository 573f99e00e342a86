"""What ops need while they run: a small packing for each, where temporaries that follow one another share bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightship.graph import aligned
from tightship.plan import Residence
from tightship.planners.place import portfolio

__all__ = ["Scratch", "pack_scratch"]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes that an op needs beyond its values, and where each of its temporaries lies in them."""

    size: int
    offsets: dict[Residence, int]


def pack_scratch(rows: Sequence[Residence], alignment: int) -> dict[int, Scratch]:
    """By step, of the residences without a storage; ``first`` and ``last`` are the times within the step."""
    by_step: dict[int, list[Residence]] = {}
    for r in rows:
        if r.storage < 0:
            by_step.setdefault(r.start, []).append(r)
    found = {}
    for step, mine in by_step.items():
        end = max((r.last for r in mine), default=0) + 1
        lower = [max(r.first, 0) for r in mine]
        upper = [
            max(r.last, at + 1) if r.last >= 0 else max(end, at + 1)
            for r, at in zip(mine, lower, strict=True)
        ]
        sizes = [aligned(r.size, alignment) for r in mine]
        offsets, arena, _ = portfolio.offsets(lower, upper, sizes, time_limit=None, work_limit=1_000)
        found[step] = Scratch(arena, dict(zip(mine, offsets.tolist(), strict=True)))
    return found
