"""Results written over operands wherever that is legal, not only where XLA's heap does it.

XLA writes a result over an operand that is an instruction's own, and neither of them one of several buffers at one
place. As legal are operands that come out of tuples, and buffers that loops, branches or donation keep together, as
long as no other two of the buffers at both places are alive at one time.
"""

from __future__ import annotations

from collections.abc import Sequence

from tightship.hlo.assign.bound import over
from tightship.hlo.assign.heap import Group
from tightship.hlo.dataflow import Buffer
from tightship.hlo.in_place import Sharing
from tightship.hlo.liveness import LiveRanges

__all__ = ["joined"]

_PAIRS = 10_000
"""Pairs of buffers at two places beyond which the places stay two."""


def joined(groups: Sequence[Group], live: LiveRanges, sharing: Sharing) -> list[Group]:
    """The groups, those of one size joined of which one is written over the other."""
    found: dict[int, Group] = dict(enumerate(groups))
    of = {m.buffer: k for k, g in found.items() for m in g.members}
    for new in sorted(of, key=lambda b: (live.ranges[b].start, b.id)):
        for old in _operands(new, live):
            k, n = of.get(old, -1), of[new]
            if k in (-1, n) or found[k].size != found[n].size or not over(live, old, new, sharing):
                continue
            if _legal(found[k], found[n], live, sharing):
                members = sorted((*found[k].members, *found.pop(n).members), key=lambda m: m.start)
                found[k] = Group(found[k].size, members)
                of.update((m.buffer, k) for m in members)
                break
    return list(found.values())


def _operands(new: Buffer, live: LiveRanges) -> list[Buffer]:
    """What ends where ``new`` begins, of all that the instruction is given."""
    start = live.ranges[new].start
    given = dict.fromkeys(b for n in new.node.operands for b in n.at if b in live.ranges)
    return [b for b in given if live.ranges[b].end == start > live.ranges[b].start]


def _legal(a: Group, b: Group, live: LiveRanges, sharing: Sharing) -> bool:
    """Whether the members of both may lie at one place."""
    if len(a.members) * len(b.members) > _PAIRS:
        return False
    for x in a.members:
        p = live.ranges[x.buffer]
        for y in b.members:
            q = live.ranges[y.buffer]
            if p.start > q.end or q.start > p.end:
                continue
            first, second = (x.buffer, y.buffer) if p.end == q.start else (y.buffer, x.buffer)
            r = live.ranges[first]
            if (
                r.end != live.ranges[second].start
                or r.start == r.end
                or not over(live, first, second, sharing)
            ):
                return False
    return True
