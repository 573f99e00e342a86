"""Our buffer assignment: every legal sharing, placed by the portfolio; never larger than XLA's.

Problem, measure and rules: as in ``xla``. Differences: temporaries go into outputs and donated parameters side by
side and at any offset while nothing else is alive there, chosen to lower the peak of what remains; what remains is
placed together, tables of addresses among it, by the placement portfolio with alias sets as groups. Source: ours.
Guarantee: not larger than ``xla``; checked. Complexity: that of the placement; the search is bounded by ``work``.
Known limits: which operand a result is written over is decided before anything is placed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightship.baselines import xla_assign
from tightship.hlo import Module
from tightship.hlo.alias import TARGETS, Sharing
from tightship.hlo.assign.allocate import Assignment, allocate
from tightship.hlo.assign.check import check
from tightship.hlo.assign.heap import Group, assembled, best_fit, join_in_place, most_alive, replay, stays
from tightship.hlo.assign.output_donation import host, hostable
from tightship.hlo.liveness import LiveRanges
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
