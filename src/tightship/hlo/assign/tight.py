"""Our buffer assignment: every legal sharing, placed by the portfolio; never larger than XLA's.

Problem, measure and rules: as in ``xla``. Differences: temporaries go into outputs and donated parameters side by
side and at any offset while nothing else is alive there, chosen to lower the peak of what remains; what remains is
placed together, tables of addresses among it, by the placement portfolio with alias sets as groups. Source: ours.
Guarantee: not larger than ``xla``; checked. Complexity: that of the placement; the search is bounded by ``work``.
Known limits: which operand a result is written over is decided before anything is placed.

Hosts: while the most bytes of temporaries are alive, the largest of them that some allocation can take moves there,
at the lowest offset that is free all its life; until none can. Then one may take the place of others that find
another, in another allocation or in the heap, as long as that lowers the most bytes, or makes them alive at fewer
steps. A result may be written over an operand only at its offset.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tightship.baselines import xla_assign
from tightship.hlo import Module
from tightship.hlo.alias import TARGETS, Sharing
from tightship.hlo.assign.allocate import Allocation, Assignment, allocate
from tightship.hlo.assign.check import check
from tightship.hlo.assign.heap import Group, assembled, best_fit, join_in_place, most_alive, replay, stays
from tightship.hlo.dataflow import Buffer
from tightship.hlo.liveness import LiveRanges, over
from tightship.options import option
from tightship.plan import Buffer as Block
from tightship.plan import Problem
from tightship.planners.packing import Search, pack

__all__ = ["Options", "plan"]

_LARGE = 20_000
"""Groups beyond which the best fit is not searched any further; a tenth of that if several buffers share places."""

_CLOSE = 1.0001
"""A total this close to the bound is not worth a search: it could gain a ten thousandth."""


@dataclass(frozen=True, slots=True)
class Options(xla_assign.Options):
    seconds: float = option(5.0, "seconds of search at most")
    work: int = option(100_000, "buffers each search may place at most; makes assignments reproducible")
    seed: int = option(0, "seed of random moves")


def plan(module: Module, options: Options | None = None) -> Assignment:
    """The smallest assignment found; at most XLA's. Raises what ``xla_assign.plan`` raises."""
    o = options or Options()
    began = time.perf_counter()
    best = xla_assign.plan(module, xla_assign.Options(o.target))
    live, sharing = best.live, Sharing(best.live.points, best.target)
    bound = best.lower_bound
    for hosting, joining in ((False, True), (True, True), (True, False)):
        if hosting and not hostable(live):
            break
        if best.total <= bound * _CLOSE or time.perf_counter() - began > o.seconds:
            break
        made = _assign(live, sharing, best.target, hosting, joining, o)
        if made.total < best.total:
            best = made
    if best.planner != "xla":
        check(best, sharing)
    return replace(best, planner="tight", seconds=time.perf_counter() - began)


def _assign(
    live: LiveRanges, sharing: Sharing, target: str, hosting: bool, joining: bool, o: Options
) -> Assignment:
    """One assignment: with XLA's choice of who lies in outputs and donated parameters, or with our own, and with
    every legal sharing, or with XLA's."""
    assigner = allocate(live, sharing, hosting=not hosting)
    out = live.points.live_out
    tables = [a for a in assigner.allocations if a.kind == "tuple" and not any(b in out for b in a.held)]
    fixed = [a for a in assigner.allocations if a not in tables]
    heap = dict(assigner.heap)
    sets = {b: g for g in live.sets for b in g.buffers}
    for table in tables:
        heap.update((b, sets[b]) for b in table.held)
    groups = replay(live, heap, sharing)
    if joining:
        groups = join_in_place(groups, live, sharing)
    if hosting:
        groups = host(live, sharing, groups, [a for a in fixed if not a.read_only], TARGETS[target])
    return assembled(live, sharing, fixed, groups, _place(groups, TARGETS[target], o), target)


def _place(groups: Sequence[Group], alignment: int, o: Options) -> tuple[list[int], int]:
    """Offsets by the better of XLA's best fit and the portfolio."""
    fitted, size = best_fit(groups, alignment)
    shared = any(len(g.members) > 1 for g in groups)
    if not groups or len(groups) > (_LARGE // 10 if shared else _LARGE) or size <= most_alive(stays(groups)):
        return fitted, size
    blocks = {
        m.buffer: Block(
            f"{m.buffer.id}:{m.buffer}",
            m.start,
            m.end,
            group.size,
            alignment,
            group=str(k) if len(group.members) > 1 else "",
        )
        for k, group in enumerate(groups)
        for m in group.members
        if group.size and m.end > m.start
    }
    solution = pack(
        Problem(tuple(blocks.values())), search=Search(seed=o.seed, work=o.work, seconds=o.seconds)
    )
    if solution.arena >= size:
        return fitted, size
    at = dict(zip(blocks, solution.offsets, strict=True))
    return [next((at[m.buffer] for m in g.members if m.buffer in at), 0) for g in groups], solution.arena


_STEPS = 20_000
"""Instructions beyond which hosts are chosen as XLA does."""

_LOOKS = 2_000_000
"""Buffers in hosts that are looked at, at most: large modules take no longer than that."""


def hostable(live: LiveRanges) -> bool:
    """Whether the module is small enough to look at every buffer at every step."""
    return live.end <= _STEPS


def host(
    live: LiveRanges, sharing: Sharing, groups: Sequence[Group], into: Sequence[Allocation], alignment: int
) -> list[Group]:
    """The groups that stay in the heap; the others are held by the allocations in ``into`` afterwards."""
    hosts = sorted(
        (_Host(a, groups, live, sharing, alignment) for a in into if a.kind != "tuple"), key=lambda h: h.size
    )
    return _Hosting(hosts, groups, live).run()


class _Hosting:
    def __init__(self, hosts: Sequence[_Host], groups: Sequence[Group], live: LiveRanges) -> None:
        self.hosts, self.groups = hosts, groups
        self.profile = _Profile(groups, live)
        self.at: dict[int, _Host] = {}

    def run(self) -> list[Group]:
        self._fill()
        while self._improve():
            pass
        for h in self.hosts:
            h.settle()
        return [g for k, g in enumerate(self.groups) if k not in self.at]

    def _looks(self) -> int:
        return sum(h.looks for h in self.hosts)

    def _fill(self) -> None:
        """The largest at the highest peak into any host, until the peak is of those that none takes."""
        refused: set[int] = set()
        while self._looks() < _LOOKS:
            at_peak = [k for k in self._at_peak() if k not in refused]
            if not at_peak:
                return
            if not self._take(at_peak[0]):
                refused.add(at_peak[0])

    def _at_peak(self) -> list[int]:
        """Groups in the heap when the most bytes are, largest first."""
        found = [k for k in self.profile.at_peak() if k not in self.at]
        return sorted(found, key=lambda k: (-self.groups[k].size, k))

    def _take(self, k: int) -> bool:
        for h in self.hosts:
            offset = h.room(k)
            if offset is not None:
                self._put(k, h, offset)
                return True
        return False

    def _put(self, k: int, h: _Host, offset: int) -> None:
        h.guests[k] = offset
        self.at[k] = h
        self.profile.add(k, -1)

    def _remove(self, k: int) -> None:
        del self.at.pop(k).guests[k]
        self.profile.add(k, 1)

    def _improve(self) -> bool:
        """One group at the peak in the place of others, if that helps."""
        before = self.profile.worth()
        for k in self._at_peak():
            for h in self.hosts:
                if self._looks() >= _LOOKS:
                    return False
                for offset, out in h.instead(k):
                    if self._swap(k, h, offset, out, before):
                        return True
        return False

    def _swap(self, k: int, h: _Host, offset: int, out: Sequence[int], before: tuple[int, int]) -> bool:
        """``k`` to ``h`` in the place of ``out``, which go elsewhere; undone if that is not better."""
        places = {j: h.guests[j] for j in out}
        for j in out:
            self._remove(j)
        self._put(k, h, offset)
        moved = [j for j in sorted(out, key=lambda j: (-self.groups[j].size, j)) if self._take(j)]
        if self.profile.worth() < before:
            return True
        for j in (*moved, k):
            self._remove(j)
        for j, place in places.items():
            self._put(j, h, place)
        return False


class _Profile:
    """Bytes in the heap at each step, and who they are at the highest."""

    def __init__(self, groups: Sequence[Group], live: LiveRanges) -> None:
        self.size = [g.size for g in groups]
        self.stays = [live.alive(m.buffer for m in g.members) for g in groups]
        self.first = np.array([s[0][0] for s in self.stays], dtype=np.int64)
        self.last = np.array([s[-1][1] for s in self.stays], dtype=np.int64)
        self.bytes = np.zeros(live.end + 1, dtype=np.int64)
        for k in range(len(groups)):
            self.add(k, 1)

    def add(self, k: int, sign: int) -> None:
        for start, end in self.stays[k]:
            self.bytes[start : end + 1] += sign * self.size[k]

    def worth(self) -> tuple[int, int]:
        """The most bytes, and at how many steps."""
        most = int(self.bytes.max())
        return most, int((self.bytes == most).sum())

    def at_peak(self) -> list[int]:
        step = int(self.bytes.argmax())
        if not self.bytes[step]:
            return []
        found = np.flatnonzero((self.first <= step) & (self.last >= step)).tolist()
        return [k for k in found if any(start <= step <= end for start, end in self.stays[k])]


class _Host:
    """An allocation with its own buffers, and ``guests``: groups by number, with their offsets."""

    def __init__(
        self, a: Allocation, groups: Sequence[Group], live: LiveRanges, sharing: Sharing, alignment: int
    ) -> None:
        self.allocation, self.groups, self.live, self.sharing = a, groups, live, sharing
        self.alignment, self.size = alignment, a.size
        self.own = [b for b in a.held if b in live.ranges]
        self.guests: dict[int, int] = {}
        self.looks = 0

    def settle(self) -> None:
        """The allocation holds its guests."""
        for k, offset in self.guests.items():
            self.allocation.held.update((m.buffer, offset) for m in self.groups[k].members)

    def room(self, k: int) -> int | None:
        """The lowest offset at which the group lies without being in the way."""
        if not self._large_enough(k):
            return None
        clashes = sorted(self._clashes(k))
        at, size = 0, self.groups[k].size
        for low, high, over_it, _ in clashes:
            apart = (lo == at or lo >= at + size or hi <= at for lo, hi, _, _ in clashes)
            if over_it and low == at and all(apart):
                continue
            if low < at + size and high > at:
                at = -(-high // self.alignment) * self.alignment
        return at if at + size <= self.size else None

    def instead(self, k: int) -> list[tuple[int, list[int]]]:
        """(offset, guests that would have to go), fewest bytes first."""
        if not self._large_enough(k):
            return []
        size, found = self.groups[k].size, []
        clashes = list(self._clashes(k))
        if any(
            low == 0 and high == self.size and by < 0 and not over_it for low, high, over_it, by in clashes
        ):
            return []
        highs = (-(-high // self.alignment) * self.alignment for _, high, _, _ in clashes)
        for at in sorted({0, *highs, *(low for low, *_ in clashes)}):
            if at + size > self.size:
                break
            out = {
                by
                for low, high, over_it, by in clashes
                if low < at + size and high > at and not (over_it and low == at)
            }
            if out and -1 not in out:
                found.append((sum(self.groups[j].size for j in out), at, sorted(out)))
        return [(at, out) for _, at, out in sorted(found)[:2]]

    def _large_enough(self, k: int) -> bool:
        return 0 < self.groups[k].size <= self.size

    def _clashes(self, k: int) -> Iterator[tuple[int, int, bool, int]]:
        """(low, high, whether one is only written over the other, the guest or -1) of all that is alive when a
        member of the group is."""
        ranges = self.live.ranges
        residents = [(b, 0, self.size, -1) for b in self.own]
        for j, offset in self.guests.items():
            high = offset + self.groups[j].size
            residents += [(m.buffer, offset, high, j) for m in self.groups[j].members]
        members = [m.buffer for m in self.groups[k].members]
        self.looks += len(residents) * len(members)
        for new in members:
            r = ranges[new]
            for held, low, high, by in residents:
                q = ranges[held]
                if q.start <= r.end and q.end >= r.start:
                    yield low, high, self._over(held, new), by

    def _over(self, held: Buffer, new: Buffer) -> bool:
        """Whether the two only meet where one is written over the other."""
        a, b = self.live.ranges[held], self.live.ranges[new]
        first, second = (held, new) if a.end == b.start else (new, held)
        before, after = self.live.ranges[first], self.live.ranges[second]
        if before.end != after.start or before.start >= before.end or first.nbytes != second.nbytes:
            return False
        return over(self.live, first, second, self.sharing)
