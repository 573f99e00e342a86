"""Our own rematerialization of a scheduled module: the search of evictions and of an order, for a limit or for many.

Problem: recompute and move instructions so that the module's peak is within the limit. Measure: seconds of repeated
work, from FLOPs and bytes of each instruction; the peak is XLA's (results throughout, parameters not). Source:
the default planner on each computation. A computation that a loop, branch or call runs is planned apart,
first for the least it can need, then for what is left at its call (R14). Guarantee: the peak given is the one
counted anew on the module written, and never a ten-thousandth more than XLA's way leaves; the module computes what it
computed.
Complexity: that of the default planner, per computation. Known limits: what waits for others by a control
dependency runs once; collectives are never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tightship.baselines import xla_remat
from tightship.baselines.xla_remat import Result
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.hlo.module import Computation, Module
from tightship.hlo.remat.as_plan import as_plan
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.emit import write
from tightship.hlo.remat.instructions import Rewrite, ways
from tightship.hlo.remat.lower import Lowering, bound
from tightship.hlo.remat.peak import (
    module_peak,
    peaks,
    require_schedule,
    result_bytes,
    sequential_order,
    with_results,
)
from tightship.options import option
from tightship.plan import Plan
from tightship.planners import default, frontier
from tightship.planners.frontier import Frontier, Other, Said
from tightship.simulate import baseline, replay

__all__ = ["Options", "plan", "tradeoff"]

_GREEDY = 20_000
"""Instructions of the entry up to which XLA's quadratic way is tried, too, where the limit is not met."""

_TRIES = 6
"""Plans of one computation at most: each is for what the last one reached, or kept from recomputing too late."""

_ORDERS = ("sink", "best")
"""Orders that are tried, the second where the first one finds no plan."""
_SMALL = 5_000
"""Instructions of a computation up to which the second is tried, and what cannot be reached is known beforehand."""

_SLACK = 1.0001
"""Where both miss the limit, so much more of XLA's peak is not worth its repetitions: tables of addresses differ."""


_SHARES = (90, 80, 70, 60, 50, 0)
"""Limits that XLA's way is given, in per cent of the module's peak."""
_MOST = 5_000
"""Instructions of the entry up to which XLA's way, which is quadratic, is beside the plans."""


@dataclass(frozen=True, slots=True)
class Options:
    """``work`` makes plans reproducible, ``seconds`` do not. XLA never recomputes calls of ``libraries``."""

    seconds: float = option(10.0, "Time limit of the search in each computation.")
    work: int = option(80_000_000, "Largest number of ops to simulate.")
    libraries: bool = option(
        True,
        "Recompute calls of cuBLAS and forward convolutions of cuDNN where the limit is not met without.",
    )
    seed: int = option(0, "Seed of the search.")
    allow: str = option(
        "recompute",
        "Ways out of memory, between commas: recompute, compress, offload; split, split-rounding (slices).",
    )
    lossy: bool = option(False, "Let single precision be packed as bfloat16.")
    host: int = option(0, "Largest number of bytes in the host's memory at once (0: any number).")


def plan(module: Module, limit: int, options: Options | None = None) -> Result:
    """The module with instructions recomputed and moved so that its peak is at most ``limit``, or the least found.

    Raises ``BadInput`` when the module has no schedule.
    """
    require_schedule(module)
    o = options or Options()
    allow = ways(o.allow)
    small = len(module.entry.instructions) <= _SMALL
    hopeless = small and o.libraries and bound(module, allow, lossy=o.lossy) > limit
    for libraries in (False, True)[hopeless : 1 + o.libraries]:
        made = _Search(module, replace(o, libraries=libraries)).within_limit(limit)
        if made.met:
            break
    if made.met or len(module.entry.instructions) > _GREEDY:
        return made
    theirs = xla_remat.plan(module, limit, xla_remat.Options(allow=o.allow))
    peak = module_peak(theirs.module)
    return replace(theirs, peak_after=peak) if peak * _SLACK < made.peak_after else made


class _Search:
    """Plans for the computations of a module; ``peak`` of each as it is planned now."""

    def __init__(self, module: Module, options: Options) -> None:
        self.module, self.options = module, options
        self.allow = ways(options.allow)
        shared = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "libraries"}
        self.chosen = default.Options(place=False, **shared)
        self.work = work_of(module)
        self.out = result_bytes(module)
        self.peak = dict(peaks(module))
        self.first = dict(self.peak)
        self.plans: dict[str, Plan] = {}
        self.lowered: dict[tuple[str, frozenset[str], tuple[int, ...]], Lowering] = {}
        self.once: dict[str, frozenset[str]] = {}

    def within_limit(self, limit: int) -> Result:
        """Plan the entry for a peak of ``limit`` bytes, its callees only when they have to need less."""
        entry = self.module.entry.name
        target = room = max(0, limit - self.out)
        best = self._written(limit)
        for _ in range(3):
            if best.met:
                break
            met = self._entry_within(entry, target)
            made = self._written(limit)
            if made.peak_after < best.peak_after:
                best = made
            if not met:
                break
            target = max(0, target - (made.peak_after - self.out - room))
        return best

    def _entry_within(self, entry: str, limit: int) -> bool:
        inner = [c for c in sequential_order(self.module) if c != entry]
        self.plans.clear()
        self.peak.update({c: self.first[c] for c in inner})
        if self.within(entry, limit):
            return True
        if any(self.peak[c] for c in inner):
            for c in inner:
                self.within(c, 0)
            met = self.within(entry, limit)
            self._relax(entry, limit)
            return met
        return False

    def within(self, name: str, limit: int) -> bool:
        """Plan one computation for a peak of ``limit`` bytes, or of the least that is found."""
        at = self._graph(name)
        known = at.least(self.allow, lossy=self.options.lossy) if len(at.ops) <= _SMALL else 0
        target = max(limit, known)
        for share in (1, *[4] * (_TRIES - 1)):
            found = self._tried(at, target, share)
            if isinstance(found, int):
                target = found
            elif late := at.late(found.steps):
                self.once[name] = self.once.get(name, frozenset()) | late
                at = self._graph(name)
            else:
                self.plans[name], self.peak[name] = found, found.peak
                return target == limit
        return False

    def _tried(self, at: Lowering, target: int, share: int) -> Plan | int:
        """A plan within ``target``, in the first order that has one, or the least peak reached."""
        o = self.chosen
        before = replay(at.graph, baseline(at.graph)).peak
        least = before
        for order in _ORDERS[: 1 + (len(at.ops) <= _SMALL)]:
            chosen = replace(o, order=order, seconds=o.seconds / share, work=o.work // share)
            frame = default.problem_of(at.graph, default.order_of(at.graph, chosen, before), chosen)
            try:
                return default.plan(at.graph, target, chosen, problem=replace(frame, stuck=at.stuck))
            except Infeasible as error:
                least = min(least, max(error.best_peak, error.lower_bound))
            share *= 2
        return least

    def _graph(self, name: str) -> Lowering:
        calls = {c for i in self.module.by_name[name].instructions if i.row.holds for c in i.called}
        once = self.once.get(name, frozenset())
        key = name, once, tuple(self.peak[c] for c in sorted(calls))
        if key not in self.lowered:
            self.lowered[key] = Lowering(
                self.module, name, dict(self.peak), self.work, self.options.libraries, once
            )
        return self.lowered[key]

    def _relax(self, name: str, limit: int) -> None:
        """Give what is left at each call to what is called: first its own plan, if that fits."""
        at, steps = self._graph(name), self.plans[name].steps
        line = replay(at.graph, steps)
        room: dict[str, int] = {}
        for step, used in zip(steps, line.during, strict=True):
            if step.kind != "compute" or not at.ops[step.op].row.holds:
                continue
            called = at.ops[step.op].called
            spare = max(0, max(limit, line.peak) - used - self._tables(name) - max(map(self._tables, called)))
            for c in called:
                room[c] = min(room.get(c, limit), self.peak[c] + spare // len(called))
        for c, most in room.items():
            if self.first[c] <= most:
                self.plans.pop(c, None)
                self.peak[c] = self.first[c]
            elif most > self.peak[c]:
                self.within(c, most)

    def _tables(self, name: str) -> int:
        """Bytes of tables of addresses in a computation, which plans do not count."""
        rows = self.module.by_name[name].instructions
        return sum(part.nbytes for i in rows for _, part in i.shape.positions if part.is_tuple)

    def _written(self, limit: int) -> Result:
        """The module as it is planned now."""
        rewrite, changed, again = Rewrite(self.module), dict[str, Computation](), list[str]()
        for name, plan in self.plans.items():
            at = self._graph(name)
            changed[name] = write(at, plan.steps, rewrite)
            again += [at.ops[step.op].name for step in plan.steps if step.kind == "recompute"]
        module, entry = rewrite.written(changed), self.module.entry.name
        added = sum(
            len(module.by_name[n].instructions) - len(self.module.by_name[n].instructions) for n in self.first
        )
        before, after = self.first[entry] + self.out, peaks(module)[entry] + self.out
        return Result(module, limit, before, after, tuple(again), added, rewrite.origin, rewrite.transfers)


# --- many limits ---


def tradeoff(
    module: Module,
    points: int = 9,
    options: default.Options | None = None,
    say: Said | None = None,
    *,
    peers: bool = True,
) -> Frontier:
    """Time against memory: plans of the module's entry for ``points`` budgets, from the least that is reached to the
    module as it is, beside XLA's own way, at limits from nine tenths of the peak down.

    What loops, branches and calls run is as it is, and counts as scratch of its call; `plan` plans these, too.
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
