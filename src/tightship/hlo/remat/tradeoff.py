"""Time against memory for a scheduled HLO module: plans of its entry for many budgets, beside XLA's own way.

Peaks are XLA's: the module's results throughout, its parameters not. What loops, branches and calls run is as it is,
and counts as scratch of its call; a plan for one budget (`tightship plan module.txt --budget B`) plans these, too,
and writes the module. XLA's way is its greedy rematerialization at limits from nine tenths of the peak down.
"""

from __future__ import annotations

from dataclasses import replace

from tightship.baselines import xla_remat
from tightship.graph import Graph
from tightship.hlo import Module
from tightship.hlo.remat.as_plan import as_plan
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.instructions import ways
from tightship.hlo.remat.lower import Lowering, bound
from tightship.hlo.remat.peak import (
    module_peak,
    peaks,
    require_schedule,
    sequential_order,
    with_results,
)
from tightship.planners import default, frontier
from tightship.planners.frontier import Frontier, Other, Said

__all__ = ["tradeoff"]

_SHARES = (90, 80, 70, 60, 50, 0)
"""Limits that XLA's way is given, in per cent of the module's peak."""
_MOST = 5_000
"""Instructions of the entry up to which XLA's way, which is quadratic, is beside the plans."""


def tradeoff(
    module: Module,
    points: int = 9,
    options: default.Options | None = None,
    say: Said | None = None,
    *,
    peers: bool = True,
) -> Frontier:
    """Plans for ``points`` budgets, from the least that is reached to the module as it is.

    Raises ``BadInput`` for a module without a schedule.
    """
    require_schedule(module)
    o = replace(options or default.Options(), place=False, hand_out=False)
    least = bound(module, ways(o.allow), lossy=o.lossy)  # the number of a plan for one budget
    at = Lowering(module, module.entry.name, peaks(module), work_of(module))
    graph = with_results(module, at.graph)
    if say is not None and peers:
        say("XLA's own way")
    beside = _xla(module, graph) if peers and len(at.ops) <= _MOST else ()
    found = frontier.frontier(graph, points, o, None, say, peers=peers, beside=beside, stuck=at.stuck)
    plans = tuple(replace(p, lower_bound=least) for p in found.points)
    return replace(found, points=plans, lower_bound=least)


def _xla(module: Module, graph: Graph) -> tuple[Other, ...]:
    """What XLA's rematerialization comes to, each result once."""
    work, names, before = work_of(module), sequential_order(module), module_peak(module)
    once = sum(sum(work.flops[name].values()) for name in names)
    found: dict[int, Other] = {}
    for share in _SHARES:
        made = xla_remat.plan(module, before * share // 100)
        if made.peak_after in found or made.peak_after >= before:
            continue
        entry, plan = as_plan(module, made, "xla")
        longer = plan.time - plan.time_before + sum(i.plan.time - i.plan.time_before for i in plan.inner)
        same = (
            entry.ops == graph.ops
        )  # nothing inside calls was changed: the steps are a plan of this graph, too
        again = made.flops(work, names) / once - 1 if once else 0.0
        found[made.peak_after] = Other(
            f"xla {share} %" + ", missed" * (not made.met),
            made.peak_after,
            plan.time_before + longer,
            again,
            steps=plan.steps if same else (),
        )
    return tuple(found.values())
