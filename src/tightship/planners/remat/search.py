"""Our own rematerialisation of a scheduled module: the search of evictions and of an order, limit by limit.

Problem: repeat and move instructions so that the module's peak is within the limit. Measure: seconds of repeated
work, from FLOPs and bytes of each instruction; the peak is XLA's (results throughout, parameters not). Source:
the default planner on each computation. A computation that a loop, branch or call runs is planned apart,
first for the least it can need, then for what is left at its call (R14). Guarantee: the peak given is the one
counted anew on the module written, and never more than XLA's way leaves; the module computes what it computed.
Complexity: that of the default planner, per computation. Known limits: control-dependent instructions run once;
collectives are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from tightship.analysis.bounds import lower_bound
from tightship.errors import BadInput, Infeasible
from tightship.frontends.hlo.module import Computation, Instruction, Module
from tightship.plan import Plan
from tightship.planners import default
from tightship.planners.remat import xla
from tightship.planners.remat._cost import Work, work_of
from tightship.planners.remat._counted import Counted
from tightship.planners.remat._write import Writer, write
from tightship.planners.remat.peak import CALLING, module_peak, peaks, result_bytes, sequential_order
from tightship.planners.remat.xla import Remade, repeatable
from tightship.simulate import replay

__all__ = ["Options", "bound", "may_repeat", "plan"]

_GREEDY = 20_000
"""Instructions of the entry up to which XLA's quadratic way is tried, too, where the limit is not met."""

PURE_CALLS = (
    "__cublas$gemm",
    "__cublas$lt$matmul",
    "__cudnn$convForward",
    "__cudnn$convBiasActivationForward",
)
"""Calls of libraries that give the same result for the same operands and touch nothing else."""


@dataclass(frozen=True, slots=True)
class Options:
    """``seconds``: of search, at most, for each computation. ``work``: ops simulated at most; makes plans
    reproducible. ``libraries``: whether calls of cuBLAS and forward convolutions of cuDNN may be repeated when the
    limit is not met without; XLA never repeats custom calls."""

    seconds: float = 10.0
    work: int = 80_000_000
    libraries: bool = True
    seed: int = 0


def plan(module: Module, limit: int, options: Options | None = None) -> Remade:
    """The module, repeating and moving instructions so that its peak is at most ``limit`` bytes, or the least found.

    Raises ``BadInput`` when the module has no schedule.
    """
    if not module.scheduled:
        raise BadInput("a module has a schedule (is_scheduled=true) to be rematerialised", module.name)
    o = options or Options()
    out = result_bytes(module)
    for libraries in (False, True)[: 1 + o.libraries]:
        search = _Search(module, replace(o, libraries=libraries))
        before = search.peak[module.entry.name]
        if before + out > limit:
            search.module_within(max(0, limit - out))
        if search.met:
            break
    made = search.result(limit)
    if made.met or len(module.entry.instructions) > _GREEDY:
        return made
    theirs = xla.plan(module, limit)
    peak = module_peak(theirs.module)
    return replace(theirs, peak_after=peak) if peak < made.peak_after else made


def bound(module: Module) -> int:
    """Bytes that the module needs however it is ordered and repeated, called computations at their least."""
    work = work_of(module)
    least: dict[str, int] = {}
    for name in sequential_order(module):
        counted = _counted(module, name, least, work, libraries=True)
        least[name] = int(lower_bound(counted.graph))
    return least[module.entry.name] + result_bytes(module)


def _counted(module: Module, name: str, callees: dict[str, int], work: Work, *, libraries: bool) -> Counted:
    may = partial(may_repeat, module, libraries=libraries)
    return Counted(module, module.by_name[name], callees, work.seconds, may)


def may_repeat(module: Module, i: Instruction, *, libraries: bool = True) -> bool:
    """Whether an instruction may run again; calls of libraries that have no effects only with ``libraries``."""
    if i.opcode == "custom-call" and i.attribute("custom_call_has_side_effect") != "true":
        return libraries and i.custom_call_target.startswith(PURE_CALLS)
    return repeatable(module, i)


class _Search:
    """Plans for the computations of a module; ``peak`` of each as it is planned now."""

    def __init__(self, module: Module, options: Options) -> None:
        self.module, self.options = module, options
        self.work = work_of(module)
        self.peak = dict(peaks(module))
        self.first = dict(self.peak)
        self.plans: dict[str, Plan] = {}
        self.made = module
        self.origin: dict[str, str] = {}
        self.met = True

    def module_within(self, limit: int) -> None:
        """Plan the entry; its callees only when they have to need less."""
        entry, target = self.module.entry.name, limit
        for _ in range(3):
            self._entry_within(entry, target)
            self.made = self._written()
            over = peaks(self.made)[entry] - limit
            if over <= 0 or not self.met:
                return
            target = max(0, target - over)

    def _entry_within(self, entry: str, limit: int) -> None:
        inner = [c for c in sequential_order(self.module) if c != entry]
        self.plans.clear()
        self.peak.update({c: self.first[c] for c in inner})
        if self.within(entry, limit) or not any(self.peak[c] for c in inner):
            return
        for c in inner:
            self.within(c, 0)
        self.within(entry, limit)
        self._relax(entry, limit)

    def within(self, name: str, limit: int) -> bool:
        """Plan one computation for a peak of ``limit`` bytes, or of the least that is found."""
        counted = self._graph(name)
        target = limit
        for _ in range(4):
            options = default.Options(
                seconds=self.options.seconds, work=self.options.work, seed=self.options.seed, place=False
            )
            try:
                self.plans[name] = default.plan(counted.graph, target, options)
                self.peak[name] = self.plans[name].peak
                break
            except Infeasible as error:
                target = max(error.best_peak, error.lower_bound)
        self.met = target == limit
        return self.met

    def _graph(self, name: str) -> Counted:
        return _counted(self.module, name, self.peak, self.work, libraries=self.options.libraries)

    def _relax(self, name: str, limit: int) -> None:
        """Give what is left at each call to what is called: first its own plan, if that fits."""
        counted, steps = self._graph(name), self.plans[name].steps
        line = replay(counted.graph, steps)
        room: dict[str, int] = {}
        for step, used in zip(steps, line.during, strict=True):
            if step.kind != "compute" or counted.ops[step.op].opcode not in CALLING:
                continue
            called = counted.ops[step.op].called
            spare = max(0, max(limit, line.peak) - used)
            for c in called:
                room[c] = min(room.get(c, limit), self.peak[c] + spare // len(called))
        for c, most in room.items():
            if self.first[c] <= most:
                self.plans.pop(c, None)
                self.peak[c] = self.first[c]
            elif most > self.peak[c]:
                self.within(c, most)

    def _written(self) -> Module:
        writer = Writer(self.module)
        changed = {name: self._rewrite(name, made, writer) for name, made in self.plans.items()}
        self.origin = writer.origin
        return writer.copies.written(changed)

    def _rewrite(self, name: str, made: Plan, writer: Writer) -> Computation:
        return write(self._graph(name), made.steps, writer)

    def result(self, limit: int) -> Remade:
        out = result_bytes(self.module)
        entry = self.module.entry.name
        runs = sum(len(c.instructions) for c in self.made.computations if c.name in self.peak)
        added = runs - sum(len(self.module.by_name[name].instructions) for name in self.peak)
        before, after = self.first[entry] + out, peaks(self.made)[entry] + out
        return Remade(self.made, limit, before, after, self.recomputed(), added, self.origin)

    def recomputed(self) -> tuple[str, ...]:
        found = []
        for name, made in self.plans.items():
            ops = self._graph(name).ops
            found += [ops[step.op].name for step in made.steps if step.kind == "recompute"]
        return tuple(found)
