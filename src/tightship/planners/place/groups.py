"""Colocation groups as one buffer each: as large as its largest member, alive where any of them is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tightship.errors import BadInput
from tightship.plan import Buffer, Gap, Problem

__all__ = ["merge"]


def merge(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """The problem without groups and conflicts, and for every buffer of the problem the one that it became.

    A merged buffer has the id of its first member, the windows of those alive, and everything that one of them
    asks for. Raises ``BadInput`` for members that cannot share an offset.
    """
    if not any(b.group for b in problem.buffers):
        return replace(problem, conflicts=()), tuple(range(len(problem.buffers)))
    first: dict[str, int] = {}
    members: list[list[int]] = []
    became: list[int] = []
    for k, b in enumerate(problem.buffers):
        at = first.setdefault(b.group, len(members)) if b.group else len(members)
        if at == len(members):
            members.append([])
        members[at].append(k)
        became.append(at)
    groups = [[problem.buffers[k] for k in rows] for rows in members]
    buffers = tuple(_one(g) if len(g) > 1 else replace(g[0], group="") for g in groups)
    return replace(problem, buffers=buffers, conflicts=()), tuple(became)


def _one(group: Sequence[Buffer]) -> Buffer:
    name = group[0].group

    def fault(rule: str, value: object, b: Buffer) -> BadInput:
        return BadInput(f"{rule} (colocation group {name!r})", value, f"buffer {b.id!r}")

    for b in group:
        if rule := b.gap_fault:
            raise BadInput(rule, b.gaps, f"buffer {b.id!r}")
        if any(gap.window for gap in b.gaps):
            raise fault("a member's gaps have no windows", b.gaps, b)
        if b.lower >= b.upper:
            raise BadInput("a live range [lower, upper) is not empty", b.lower, f"buffer {b.id!r}")
        if b.alignment < 1:
            raise BadInput("an alignment is at least 1", b.alignment, f"buffer {b.id!r}")
    alignment = math.lcm(*(b.alignment for b in group))
    pins = {b.pinned: b for b in group if b.pinned is not None}
    if len(pins) > 1:
        raise fault("members are pinned to one offset", sorted(pins), list(pins.values())[1])
    for offset, b in pins.items():
        if offset % alignment:
            raise fault(f"members are pinned to a multiple of {alignment}, as all ask for", offset, b)
    pools = next((b.pools for b in group if b.pools), ())
    for b in group:
        if b.pools:
            pools = tuple(p for p in pools if p in b.pools)
        if b.pools and not pools:
            raise fault("members have a pool in common", b.pools, b)
    hint = next((b.hint for b in group if b.hint is not None), None)
    lower, upper, size = min(b.lower for b in group), max(b.upper for b in group), max(b.size for b in group)
    gaps = _gaps(group, size)
    return Buffer(group[0].id, lower, upper, size, alignment, next(iter(pins), None), gaps, hint, "", pools)


def _gaps(group: Sequence[Buffer], size: int) -> tuple[Gap, ...]:
    """Where less than the largest member is alive."""
    parts = sorted(p for b in group for p in b.parts())
    cuts = sorted({t for b in group for t in (b.lower, b.upper)} | {t for p in parts for t in p[:2]})
    alive: list[tuple[int, int]] = []  # (until, bytes)
    gaps: list[Gap] = []
    k = 0
    for since, until in pairwise(cuts):
        while k < len(parts) and parts[k][0] <= since:
            alive.append((parts[k][1], parts[k][3]))
            k += 1
        alive = [a for a in alive if a[0] > since]
        most = max((nbytes for _, nbytes in alive), default=0)
        if most == size:
            continue
        window = (0, most) if most else None
        if gaps and gaps[-1].upper == since and gaps[-1].window == window:
            gaps[-1] = Gap(gaps[-1].lower, until, window)
        else:
            gaps.append(Gap(since, until, window))
    return tuple(gaps)
