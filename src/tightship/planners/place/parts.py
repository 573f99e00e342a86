"""A problem without gaps that says something of one with gaps: it asks for fewer bytes, so any bound of it is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tightship.errors import BadInput
from tightship.plan import Buffer, Problem

__all__ = ["check_gaps", "cut"]


def check_gaps(problem: Problem) -> None:
    """Raise ``BadInput`` for gaps that break a rule, and for what cannot be checked part by part."""
    for b in problem.buffers:
        if not b.gaps:
            continue
        if rule := b.gap_fault:
            raise BadInput(rule, b.gaps, f"buffer {b.id!r}")
        if b.alignment < 1:
            raise BadInput("an alignment is at least 1", b.alignment, f"buffer {b.id!r}")
        if b.pinned is not None and (b.pinned < 0 or b.pinned % b.alignment):
            raise BadInput("a pinned offset is a multiple of the alignment", b.pinned, f"buffer {b.id!r}")


def cut(problem: Problem) -> Problem:
    """Every part a buffer of its own, free to lie anywhere (pinned ones lie where they are)."""
    return replace(problem, buffers=tuple(c for b in problem.buffers for c in _cut(b)))


def _cut(b: Buffer) -> Sequence[Buffer]:
    if not b.gaps:
        return [b]
    return [
        Buffer(
            b.id,
            since,
            until,
            high - low,
            math.gcd(b.alignment, low),
            None if b.pinned is None else b.pinned + low,
        )
        for since, until, low, high in b.parts()
    ]
