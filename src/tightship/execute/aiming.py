"""Plans for inner targets, until what a compiler makes of one is within the budget and no looser one much faster.

Problem: the fastest plan whose compiled code is within a budget, where a planner knows only a model of that code.
Method: the planner aims at a target; the candidate that follows is lowered and replayed to the byte; the target moves
by what the replay was off, between the tightest known to be too loose and the loosest that fits. What the first
replays that do not fit had in use beyond the model becomes part of the model first; where nothing fits so, the
planner aims by the model alone, then with lessons again, the first from what came nearest. Guarantee: every candidate
was replayed; none of optimality.
Work: `FEW` lowerings, then `LOWERINGS` in each of two passes; a plan each, of a part of the planner's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tightship import simulate
from tightship.errors import Infeasible
from tightship.execute.cache import KeptPartitions, Partition, Unplanned, partition_plan
from tightship.execute.compiled import StepReplay
from tightship.frontends.torch.capture.fused import with_workspaces
from tightship.frontends.torch.compat_inductor import NotLowered
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.plan import Plan
from tightship.planners import default
from tightship.planners.evict.problem import EvictionProblem

__all__ = [
    "STOCK",
    "Aim",
    "Candidate",
    "Model",
    "Seeds",
    "fastest",
    "found_or_kept",
    "row_of",
    "source_of",
    "unplanned_of",
]

FEW = 6
"""Candidates that are lowered at first, at most: with a lesson or two that is nearly always enough."""
LOWERINGS = 8
"""Candidates that are lowered in each pass after that, at most."""
LESSONS = 2
"""Replays that the model learns from in a pass, at most."""
FAR = 0.05
"""Of the budget beyond the static set: what does not fit by so much is no near miss."""
CLOSE = 0.02
"""No looser plan is looked for where so much of the budget beyond the static set is left, or less."""
GAIN = 0.02
"""Of a step's modeled time: nothing is lowered that is expected to save less."""

NEARER = 8
"""After a miss, the next target is lower by such a part of `CLOSE` at least, then by twice as much each time."""

WORK = 10
"""By what the work of a plan is divided: what code takes that no model knows makes more difference than its last part
of a percent."""

ORDERED = 0.25
"""Of a plan's time limit: the order is decided within it."""

STOCK: Final = (0.7, 0.5, 0.3, 0.1, 0.0)
"""The ``activation_memory_budget`` values whose partitions are looked at beside ours."""

T = TypeVar("T")


def source_of(share: float | None) -> str:
    """What a candidate that is not of a plan is called: Inductor's own at an ``activation_memory_budget``, or, for
    None, a checkpoint around each block."""
    return "each block computed again" if share is None else f"Inductor at activation_memory_budget {share}"


@dataclass(frozen=True, eq=False)
class Candidate(Generic[T]):
    """What could be compiled, with its replayed ``peak``. ``needed``: what it takes with its arena; ``replay``: None
    where it was chosen in an earlier run; ``share``: the ``activation_memory_budget`` that it is Inductor's own of;
    ``seconds`` of what is recomputed are modeled."""

    made: T
    source: str
    peak: int
    needed: int
    replay: StepReplay | None
    recomputed: int = 0
    seconds: float = 0.0
    share: float | None = None
    plan: Plan | None = None

    def workspaces(self) -> dict[str, int]:
        """Of kernels of somebody else's, by node, where it was replayed."""
        return {} if self.replay is None else self.replay.workspaces()


def row_of(c: Candidate[Any], lowered: int, *, lean: bool = False) -> Partition:
    """A candidate as it is kept; so many were ``lowered`` until it was found."""
    return Partition(
        c.source, c.share, partition_plan(c.plan), c.peak, c.needed, c.recomputed, c.seconds, lowered, lean
    )


def unplanned_of(first: Candidate[Any] | None) -> Unplanned:
    """What Inductor's own takes, which was lowered."""
    assert first is not None and first.replay is not None
    r = first.replay
    return Unplanned(r.static, tuple(r.peaks), r.rest, tuple(r.handed), first.needed)


class Seeds(Protocol[T]):
    """What others would save, as candidates: each ``activation_memory_budget`` of Inductor's, and, for None, what a
    checkpoint around each block does (``seed`` gives None where there are no blocks). ``seconds``: of what it
    computes again, modeled; ``least``: bytes that its peak is not below; ``lowered``: the candidate, replayed."""

    def seed(self, share: float | None) -> T | None: ...

    def seconds(self, made: T) -> float: ...

    def least(self, made: T) -> int: ...

    def lowered(self, made: T, share: float | None) -> Candidate[T]: ...


class Model(Protocol):
    """A model of compiled code, as ``capture.fused`` makes."""

    @property
    def graph(self) -> Graph: ...

    @property
    def calls(self) -> Mapping[int, Any]: ...

    def with_excess(self, graph: Graph, plan: Plan, passes: Sequence[Sequence[tuple[str, int]]]) -> Graph: ...


class _Aimed(NamedTuple, Generic[T]):
    """What follows from a target: the candidate and the ``peak`` of its plan as the model has it; or the ``least``
    that the planner reaches on its model; or nothing, where the compiler fails."""

    candidate: Candidate[T] | None = None
    peak: int = 0
    least: int | None = None


@dataclass
class Aim(Generic[T]):
    """Aims plans of ``model`` at ``budget``, of which ``static`` bytes are always in use. ``candidate`` lowers and
    replays what a plan says. ``workspaces``: of kernels of somebody else's, by node, where a replay has them.
    ``known``: what other aims at this model came to, by what the model had learned, the target, and whether plans
    were ``thorough``: they come to fewer bytes, and take three times as long to say that there is none."""

    model: Model
    options: default.Options
    candidate: Callable[[Plan], Candidate[T]]
    budget: int
    static: int
    workspaces: Mapping[str, int] = field(default_factory=dict)
    known: dict[tuple[bytes, int, bool], _Aimed[T]] = field(default_factory=dict)
    thorough: bool = False
    found: list[Candidate[T]] = field(default_factory=list)
    """What was looked at."""
    learned: list[Candidate[T]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.graph = with_workspaces(self.model.graph, self.model.calls, self.workspaces)
        self.options = replace(self.options, place=False, reuse=False, work=self.options.work // WORK)
        self.slack = GAIN * sum(op.time for op in self.graph.ops)
        self.unplanned = simulate.replay(self.graph, simulate.baseline(self.graph)).peak

    def run(self, *, briefly: bool = False) -> list[Candidate[T]]:
        """What was looked at, by now: some of it is within the budget, or nothing that the planner came to is, or,
        ``briefly``, it was far from it at first."""
        for lessons, most in ((LESSONS, FEW), (0, LOWERINGS), (LESSONS, LOWERINGS)):
            self.graph = self.start
            self.learned.clear()
            if lessons and self.found:
                self._learns(min(self.found, key=lambda c: c.needed))
            self.found += [c for c in self._aimed(lessons, most) if c not in self.found]
            fits = any(c.needed <= self.budget for c in self.found)
            if fits or (briefly and all(map(self._far, self.found))):
                break
        return self.found

    def hopeless(self, seconds: float) -> bool:
        """Whether a plan of ours that computes again for so long, or longer, was far from fitting."""
        return any(c.seconds >= seconds for c in self.found if self._far(c))

    def _far(self, c: Candidate[T]) -> bool:
        return c.needed - self.budget > FAR * (self.budget - self.static)

    def _aimed(self, lessons: int, most: int) -> list[Candidate[T]]:
        found: list[Candidate[T]] = []
        close = int(CLOSE * (self.budget - self.static))
        low, high, target, nearer = self.static, None, self.budget, close // NEARER
        reached: int | None = None  # the least that the planner came to
        missed = False  # with what has been learned so far
        for _ in range(most):
            c, modeled, least = self._at(target)
            if least is not None:
                if (high is not None and least >= high) or (reached is not None and least >= reached):
                    break
                reached = low = target = least
                c, modeled, _ = self._at(least)
            if c is None:
                break
            found.append(c)
            off = self.budget - c.needed
            # What is near is mostly met by a lower target: with one more lesson the model may be too careful.
            learns = off < -close or (off < 0 and missed)
            if learns and len(self.learned) < lessons and self._learns(c):
                high, reached, target, missed = None, None, self.budget, False
                continue
            missed = missed or off < 0
            if off >= 0:
                low = max(low, target)
                if off <= close or self._gain(c, off) <= self.slack:
                    break
                next_ = target + off
            else:
                high = target if high is None else min(high, target)
                next_, nearer = min(target + off, modeled - nearer), 2 * nearer
            if high is not None and not low < next_ < high:
                next_ = (low + high) // 2
            if next_ == target or (high is not None and high - low <= close):
                break
            target = next_
        return found

    def _gain(self, c: Candidate[T], off: int) -> float:
        """Seconds that a plan of ``off`` more bytes is expected to save: in proportion to the bytes that recomputing
        has saved."""
        return c.seconds * min(1.0, off / max(self.unplanned - c.needed, 1))

    def _learns(self, c: Candidate[T]) -> bool:
        """Gives the model what a candidate's replay had in use beyond it; whether that was anything."""
        if c.plan is None or c.replay is None or c in self.learned:
            return False
        self.learned.append(c)
        before = self.graph
        self.graph = self.model.with_excess(before, c.plan, c.replay.levels())
        return self.graph.ops != before.ops

    def _problem(self, target: int) -> EvictionProblem:
        """The graph in the order of a plan for the target. Results take the places of inputs as compilers have it,
        which needs no offsets of ours."""
        graph, o = self.graph, self.options
        order = default.order_of(graph, o, self.unplanned, Deadline.after(ORDERED * o.seconds), target)
        return replace(default.problem_of(graph, order, o), in_place=True)

    def _at(self, target: int) -> _Aimed[T]:
        key = self.graph.columns.workspace.tobytes(), target, self.thorough
        if key not in self.known:
            self.known[key] = self._planned(target)
        return self.known[key]

    def _planned(self, target: int) -> _Aimed[T]:
        try:
            plan = default.plan(
                self.graph, target, self.options, problem=self._problem(target), prove=self.thorough
            )
        except Infeasible as error:
            return self._least(error)
        graph, peak = self.model.graph, plan.peak
        if self.graph is not graph:  # what was learned is not of the model that plans are kept for
            line = simulate.replay(graph, plan.steps)
            plan = replace(
                plan, digest=graph.digest, peak=line.peak, peak_before=self.unplanned, time=line.time, lower_bound=0,
                time_bound=0.0,
            )  # fmt: skip
        try:
            return _Aimed(self.candidate(plan), peak)
        except NotLowered:
            return _Aimed()

    def _least(self, no: Infeasible) -> _Aimed[T]:
        """The least that the planner reaches; where it is proven that the target cannot be met, that has not been
        looked for, and the least is what follows from the bound."""
        if not no.impossible:
            return _Aimed(least=no.best_peak)
        found = self._at(no.lower_bound)
        return found if found.candidate is None else _Aimed(least=no.lower_bound)


def found_or_kept(
    kept: KeptPartitions, unplanned: Unplanned, budget: int, search: Callable[[], Candidate[T]],
    again: Callable[[Partition], Candidate[T]] | None, least: Callable[[], Partition],
) -> Candidate[T]:  # fmt: skip
    """What ``search`` finds within the budget; or, as ``again`` makes it, what was kept of another budget and is
    within this one, too. Raises ``Infeasible``, whose ``least`` is kept from then on."""
    try:
        return search()
    except Infeasible:
        row = kept.within(budget) if again is not None else None
        if again is not None and row is not None:
            return again(row)
        kept.reached(unplanned, least())
        raise


def fastest(
    found: Sequence[Candidate[T]], shares: Sequence[float | None], seeds: Seeds[T], budget: int, static: int,
    aim: Aim[T] | None = None,
) -> Candidate[T]:  # fmt: skip
    """The fastest within the budget of what was ``found`` (some of it by ``aim``) and of what others would save:
    ``shares``, the fastest first. Raises ``Infeasible``."""
    slack = 0.0 if aim is None else aim.slack
    best = min((c for c in found if c.needed <= budget), key=lambda c: c.seconds, default=None)
    reached = min(c.needed for c in found)
    slower = False  # at lower budgets Inductor computes more again, and from some on needs more each time
    before: int | None = None
    for share in shares:
        if best is not None and best.seconds <= slack:
            break
        made = None if slower and share is not None else seeds.seed(share)
        if made is None:
            continue
        seconds = seeds.seconds(made)
        if best is not None and seconds >= best.seconds - slack:
            slower = slower or share is not None
            continue
        if best is not None and aim is not None and aim.hopeless(seconds):
            continue
        if seeds.least(made) > (reached if best is None else budget):
            continue
        try:
            c = seeds.lowered(made, share)
        except NotLowered:
            continue
        reached = min(reached, c.needed)
        if share is not None:
            slower = slower or (before is not None and c.needed > before)
            before = c.needed
        if c.needed <= budget and (best is None or c.seconds < best.seconds):
            best = c
    if best is None:
        raise Infeasible(budget=budget, lower_bound=static, best_peak=reached, compiled=True)
    return best
