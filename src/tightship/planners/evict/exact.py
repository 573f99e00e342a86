"""Constraint programming over retention intervals: the best plan in the order there is, if given the time.

Problem: choose which ops run again before which others, and how long every copy stays; minimize seconds of
recomputation, peak within the budget. Measure: exact bytes and seconds, as the replay counts them. Source: the
retention intervals of Moccasin (Bartan et al. 2023) on the stages of Checkmate (Jain et al. 2020), solved by OR-tools
(CP-SAT, extra ``solver``); begins with what `anneal` found. Up to ``whole`` ops are decided together, more of them
by windows, with the rest as it is. Guarantee: never worse than what it began with; where the solver ends before its
effort does, the least time of all plans that keep the order, run an op again ``again`` times at most, and run what
precedes an op again in that order, too. The same seed, ``work`` and ``effort`` give the same plan. Complexity:
exponential; some twenty ops to proof, two hundred to a good plan. Known limits: recomputation only; no results in the
place of inputs (what the search saves by them it cannot save); what is written in place is run again as a whole.

The ops keep their order; before the op at position *p* (stage *p*), earlier ones may run again, in their order. So
every run has a moment of its own: ``p * (n + 1) + k`` for the op at position *k* in stage *p*, its first run being
in stage *k*. A **copy** is what one run makes of a storage, and stays for one interval. Every read finds a copy that
began before it and has not ended. The copies at one moment, and the workspace of the op that runs, share the memory.
Ops that write one storage together (in place) run again together, as a **unit**.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from tightship.analysis.bounds import Relaxation, single_moments, time_bound
from tightship.analysis.moment_chain import ChainBound
from tightship.cached import cached_property
from tightship.errors import Unsupported
from tightship.graph import Graph
from tightship.options import Deadline, option
from tightship.plan import Step
from tightship.planners.evict import anneal, keep
from tightship.planners.evict.lowering import Run, decide
from tightship.planners.evict.problem import (
    COMPRESS,
    EVICT,
    KEEP,
    OFFLOAD,
    STAY,
    Decision,
    EvictionProblem,
    Progress,
)
from tightship.simulate import extra_bytes

__all__ = ["Model", "Options", "Retention", "Runs", "Unit", "least_extra", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of the search and of the solver; ``work`` and ``effort`` make a plan reproducible."""

    again: int = option(1, "how often an op runs again at most, if the search did not run it more often")
    effort: float = option(10.0, "deterministic seconds of the solver at most")
    work: int = option(15_000_000, "ops simulated at most by the search before the solver")
    seconds: float = option(60.0, "wall clock at most")
    whole: int = option(200, "ops decided together at most")
    window: int = option(60, "units (ops that write one storage) decided together in larger graphs")
    seed: int = option(0, "seed of the search and of the solver")
    goal: float = option(0.0, "seconds of recomputation that are few enough")


_PROOF = 4.0
"""Deterministic seconds of the solver for each chain of moments, at most."""


def least_extra(graph: Graph, budget: int, deadline: Deadline, *, redraw: bool, in_place: bool) -> float:
    """Seconds of recomputation that every plan within ``budget`` takes, as far as the solver proves it from several
    moments at once; infinite where there is no plan. Raises ``Unsupported`` without OR-tools."""
    relaxed = Relaxation(graph, redraw=redraw, in_place=in_place)
    found = single_moments(graph, budget, redraw=redraw, in_place=in_place, deadline=deadline)
    top = max(found, key=found.__getitem__, default=-1)
    return ChainBound(_solver(), relaxed).extra(budget, _PROOF, deadline, top)


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best decision found. Raises ``Unsupported`` without OR-tools."""
    o = options or Options()
    until = time.perf_counter() + o.seconds
    all_kept = keep.plan(problem, budget)
    if all_kept.met or _copies_asked_for(problem):
        return all_kept
    cp_model = _solver()
    best = anneal.plan(problem, budget, anneal.Options(work=o.work, seconds=o.seconds / 4, seed=o.seed))
    bound = max(0.0, time_bound(problem.graph, budget) - sum(op.time for op in problem.graph.ops))
    if problem.archive.stopped or math.isinf(bound):
        return best
    retention = Retention(problem)
    runs = retention.runs(problem.lower(best, budget))
    windows = list(_windows(retention, o))
    for free in windows:
        left = until - time.perf_counter()
        if left <= 0 or (best.met and best.extra <= max(o.goal, bound * (1 + 1e-9))):
            break
        model = Model(cp_model, retention, budget, runs, o.again, free, bound)
        solved = model.solve(o.effort / len(windows), left, o.seed)
        if solved is not None:
            found = decide(problem, budget, solved[1])
            if found.beats(best):
                best, runs = found, solved[0]
    return best


def _windows(retention: Retention, o: Options) -> Iterator[Collection[int] | None]:
    """Units to be decided together, by position, each in two windows; None: all of them."""
    if retention.n <= o.whole:
        yield None
        return
    units = [u for u, unit in enumerate(retention.units) if unit.stages]
    for start in range(0, max(1, len(units) - o.window // 2), max(1, o.window // 2)):
        yield frozenset(units[start : start + o.window])


def _copies_asked_for(problem: EvictionProblem) -> bool:
    """Whether something has to be packed or copied out, which is not modeled here."""
    return any(may and not may & ~(1 << COMPRESS | 1 << OFFLOAD) for may in problem.engine.allowed.tolist())


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as missing:
        raise Unsupported(
            "the planner exact", "OR-tools, which `pip install tightship[solver]` brings"
        ) from missing
    return cp_model


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops that run again together, by position; what they make, as (storage, position of the op that defines it,
    position of the last that writes it); what they read of others, as (storage, position); the stages in which they
    may run again; whether they may do so without having run at their place; seconds of one run."""

    at: tuple[int, ...]
    makes: tuple[tuple[int, int, int], ...]
    reads: tuple[tuple[int, int], ...]
    stages: range
    late: bool
    time: float


@dataclass(frozen=True, slots=True)
class Runs:
    """By unit: whether it runs at its place, and the stages in which it runs again."""

    first: tuple[bool, ...]
    again: tuple[tuple[int, ...], ...]


class Retention:
    """A problem as units and the reads between them. Bytes and seconds are those of its graph."""

    def __init__(self, problem: EvictionProblem) -> None:
        self.problem, self.graph, self.order = problem, problem.graph, problem.order
        self.n = len(problem.order)
        self.place = {k: at for at, k in enumerate(problem.order)}
        empty = (s for s, x in enumerate(self.graph.storages) if not x.size)
        self.held = self.graph.static | frozenset(empty)
        """Storages whose stay is nobody's choice: the caller's, and those of no bytes."""

    def moment(self, stage: Any, at: int) -> Any:
        return stage * (self.n + 1) + at

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """By the position of their first op."""
        root = list(range(self.n))

        def find(k: int) -> int:
            while root[k] != k:
                k = root[k]
            return k

        for s, writers in enumerate(self.graph.uses.writers):
            for w in writers[1:] if s not in self.graph.static else ():
                a, b = find(self.place[writers[0]]), find(self.place[w])
                root[max(a, b)] = min(a, b)
        rows: dict[int, list[int]] = defaultdict(list)
        for at in range(self.n):
            rows[find(at)].append(at)
        return tuple(self._unit(tuple(row)) for row in rows.values())

    def _unit(self, row: tuple[int, ...]) -> Unit:
        uses, ops = self.graph.uses, self.graph.ops
        made = {s: at for at in row for s in uses.defines[self.order[at]]}
        reads, again, end = [], True, self.n
        for at in row:
            k = self.order[at]
            again &= ops[k].pure and all(s in made or s in ops[k].updates for s in uses.mutates[k])
            for s, need in zip(uses.reads[k], uses.needs[k], strict=True):
                if s in made or s in ops[k].updates:
                    continue
                if s in self.graph.static:
                    changes = [self.place[w] for w in uses.writers[s][need:]]
                    end = min((end, *changes))  # what the caller's storage held until then is gone after it
                    continue
                again &= need == len(uses.writers[s])  # contents that are still to change are not made again
                if s not in self.held:
                    reads.append((s, at))
        stages = range(row[-1] + 1, end + 1) if again else range(0)
        first = self.order[row[0]]
        alone = len(row) == 1 and not uses.mutates[first] and first not in self._fixed
        read = bool(made) and all(s not in self.held and uses.readers[s] for s in made)
        late = bool(stages) and alone and read
        makes = tuple((s, at, max(self.place[w] for w in uses.writers[s])) for s, at in made.items())
        seconds = sum(ops[self.order[at]].time for at in row)
        return Unit(row, makes, tuple(reads), stages, late, seconds)

    @cached_property
    def _fixed(self) -> frozenset[int]:
        """Ops that others wait for, though no value says so."""
        return frozenset((*self.problem.chained, *(c for o in self.graph.ops for c in o.control)))

    @cached_property
    def unit_at(self) -> dict[int, int]:
        """The unit of each position."""
        return {at: u for u, unit in enumerate(self.units) for at in unit.at}

    @cached_property
    def first_reads(self) -> tuple[tuple[int, int, int], ...]:
        """What first runs read of finished storages, as (storage, position, unit), and what must be there at the end
        (unit -1). What is not finished is there anyway: a first copy stays at least until it is."""
        ready = {s: last for unit in self.units for s, _, last in unit.makes}
        rows = [
            (s, at, self.unit_at[at])
            for at, k in enumerate(self.order)
            for s in self.graph.uses.reads[k]
            if s not in self.held and at > ready[s]
        ]
        return (*rows, *((s, self.n, -1) for s in sorted(self.graph.kept - self.held)))

    @cached_property
    def stays(self) -> dict[int, int]:
        """By storage: the position up to which its first copy has to stay, because that was asked for."""
        out: dict[int, int] = {}
        for (s, _, to), may in zip(
            self.problem.gaps.tolist(), self.problem.engine.allowed.tolist(), strict=True
        ):
            if not may & (1 << EVICT | 1 << STAY) and may >> KEEP & 1:
                out[s] = max(out.get(s, 0), to)
        return out

    @cached_property
    def workspace(self) -> tuple[int, ...]:
        """By position: bytes the op there needs beyond its results."""
        return tuple(extra_bytes(self.graph.ops[k]) for k in self.order)

    def runs(self, steps: Sequence[Step]) -> Runs:
        """The runs in a plan's steps."""
        first = [False] * len(self.units)
        again: list[list[int]] = [[] for _ in self.units]
        stage = 0
        for step in steps:
            if step.kind not in ("compute", "recompute"):
                continue
            at = self.place[step.op]
            u = self.unit_at[at]
            if step.kind == "compute" and at >= stage:
                stage, first[u] = at + 1, True
            elif self.units[u].at[0] == at and stage not in again[u]:
                again[u].append(stage)
        return Runs(tuple(first), tuple(map(tuple, again)))


_TICKS = 10_000_000
"""Integer time that all ops together come to."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """What one run makes of one storage: in memory from moment ``begin`` to ``end``, both included, and whole after
    ``ready``; ``there`` if that run happens (a literal, or 1)."""

    begin: Any
    ready: Any
    end: Any
    length: Any
    there: Any


class _Again(NamedTuple):
    """One more run of a unit: in stage ``stage``, if ``there``."""

    stage: Any
    there: Any


@dataclass(frozen=True, slots=True)
class _Find:
    """A read of ``storage`` at ``at`` by run ``run`` (0: the first) of unit ``unit`` (-1: by whoever takes the
    results), and a literal for each copy that it may find."""

    storage: int
    unit: int
    run: int
    at: int
    ways: tuple[Any, ...]


class Model:
    """``runs`` are what it begins with; every unit may run again ``most`` times, or as often as it does there. Only
    units in ``free`` change their runs (None: all); every copy may stay for another time. ``bound`` is a time no plan
    is below, in seconds beyond those of the first runs."""

    def __init__(
        self,
        cp: Any,
        retention: Retention,
        budget: int,
        runs: Runs,
        most: int,
        free: Collection[int] | None = None,
        bound: float = 0.0,
    ) -> None:
        self.cp, self.retention, self.runs = cp, retention, runs
        self.model = cp.CpModel()
        self.size = [s.size for s in retention.graph.storages]
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        self.first: list[Any] = []
        self.again: list[list[_Again]] = []
        self.copies: dict[int, list[_Copy]] = defaultdict(list)
        self.finds: list[_Find] = []
        for u, unit in enumerate(retention.units):
            self._first(u, unit, free is None or u in free)
            self._again(u, unit, most, free is None or u in free)
        self._reads()
        self.model.add_cumulative(self.intervals, self.demands, budget - retention.graph.static_bytes)
        self._objective(bound)

    def _first(self, u: int, unit: Unit, free: bool) -> None:
        if unit.late and free:
            first = self.model.new_bool_var("")
        else:
            first = 1 if self.runs.first[u] else self.model.new_constant(0)
        self.first.append(first)
        for s, at, ready in unit.makes:
            if s not in self.retention.held:
                stay = max(ready, self.retention.stays.get(s, 0))
                end = self._moment_var(self.retention.moment(stay, stay))
                self._copy(
                    s, (self.retention.moment(at, at), self.retention.moment(ready, ready), end), first
                )
        for at in unit.at:
            t = self.retention.moment(at, at)
            self._takes((t, t), first, self.retention.workspace[at])

    def _again(self, u: int, unit: Unit, most: int, free: bool) -> None:
        m, known, rows = self.model, self.runs.again[u], []
        stages = self.cp.Domain.from_values(list(unit.stages))
        count = len(known) if not free or not unit.stages else max(most, len(known))
        for j in range(count):
            if free:
                there, stage = m.new_bool_var(""), m.new_int_var_from_domain(stages, "")
            else:
                there, stage = 1, known[j]
            rows.append(_Again(stage, there))
            for s, at, ready in unit.makes:
                if s not in self.retention.held:
                    begin, whole = self.retention.moment(stage, at), self.retention.moment(stage, ready)
                    end = self._moment_var(0)
                    constraint = m.add(end >= whole)
                    if not isinstance(there, int):
                        constraint.only_enforce_if(there)
                    self._copy(s, (begin, whole, end), there)
            for at in unit.at:
                t = self.retention.moment(stage, at)
                self._takes((t, t), there, self.retention.workspace[at])
        if free:
            for a, b in pairwise(rows):
                m.add_implication(b.there, a.there)
                m.add(a.stage < b.stage).only_enforce_if(b.there)
        if unit.late and free:
            m.add_bool_or([self.first[u], *(r.there for r in rows)])
        self.again.append(rows)

    def _moment_var(self, least: int) -> Any:
        return self.model.new_int_var(least, self.retention.moment(self.retention.n, self.retention.n), "")

    def _copy(self, storage: int, span: tuple[Any, Any, Any], there: Any) -> None:
        begin, ready, end = span
        length = self._takes((begin, end), there, self.size[storage])
        self.copies[storage].append(_Copy(begin, ready, end, length, there))

    def _takes(self, span: tuple[Any, Any], there: Any, nbytes: int) -> Any:
        if not nbytes:
            return None
        begin, end = span
        length = self.model.new_int_var(1, self.retention.moment(self.retention.n + 1, 0), "")
        if isinstance(there, int):
            self.intervals.append(self.model.new_interval_var(begin, length, end + 1, ""))
        else:
            self.intervals.append(self.model.new_optional_interval_var(begin, length, end + 1, there, ""))
        self.demands.append(nbytes)
        return length

    def _reads(self) -> None:
        p = self.retention
        for s, at, who in p.first_reads:
            self._find(s, (who, 0, at), p.moment(at, at), self.first[who] if who >= 0 else 1)
        for u, unit in enumerate(p.units):
            for j, run in enumerate(self.again[u]):
                for s, at in unit.reads:
                    self._find(s, (u, j + 1, at), p.moment(run.stage, at), run.there)

    def _find(self, storage: int, who: tuple[int, int, int], moment: Any, there: Any) -> None:
        """A read finds a copy that is whole and has not ended."""
        m, ways = self.model, []
        for c in self.copies[storage]:
            way = m.new_bool_var("")
            m.add(c.ready < moment).only_enforce_if(way)
            m.add(c.end >= moment).only_enforce_if(way)
            if not isinstance(c.there, int):
                m.add_implication(way, c.there)
            ways.append(way)
        clause = m.add_bool_or(ways)
        if not isinstance(there, int):
            clause.only_enforce_if(there)
        self.finds.append(_Find(storage, *who, tuple(ways)))

    def _objective(self, bound: float) -> None:
        units = self.retention.units
        self.scale = _TICKS / (sum(u.time for u in units) or 1.0)
        terms: list[Any] = [0]
        for unit, first, again in zip(units, self.first, self.again, strict=True):
            ticks = round(unit.time * self.scale)
            terms += [ticks * r.there for r in again]
            terms.append(ticks * (first - 1))
        total = sum(terms)
        if not isinstance(total, int):
            # Rounded times may add up to less than the bound by half a tick for each run.
            self.model.add(total >= int(bound * self.scale) - sum(map(len, self.again)) - len(units))
            self.model.minimize(total)

    def solve(self, work: float, seconds: float, seed: int) -> tuple[Runs, list[Run]] | None:
        """The best runs found, and the same in their order, within ``work`` deterministic ``seconds`` of the solver;
        None for none."""
        self._hint()
        solver = self.cp.CpSolver()
        p = solver.parameters
        p.random_seed, p.max_time_in_seconds, p.max_deterministic_time = seed, seconds, work
        # Several strategies in turns on one thread: the same answer on every machine. Hints are not repaired:
        # OR-tools 9.15 ends the process when time is up while it loads the model that repairs them.
        p.num_workers, p.interleave_search = 8, True
        p.catch_sigint_signal = False  # it would leave Ctrl-C to the system, which ends the process
        status = solver.solve(self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None
        first = tuple(isinstance(f, int) or bool(solver.value(f)) for f in self.first)
        again, rows = [], []
        for u, unit in enumerate(self.retention.units):
            ran = first[u]
            if ran:
                rows += [(self.retention.moment(at, at), Run(self.retention.order[at])) for at in unit.at]
            stages = []
            for j, run in enumerate(self.again[u]):
                if solver.value(run.there):
                    stages.append(solver.value(run.stage))
                    rows += self._run(solver, unit, j, stages[-1], ran)
                    ran = True
            again.append(tuple(stages))
        rows.sort(key=lambda row: row[0])
        return Runs(first, tuple(again)), [run for _, run in rows]

    def _run(self, solver: Any, unit: Unit, j: int, stage: int, again: bool) -> list[tuple[int, Run]]:
        """One more run of a unit, and what stays of it; the first one, if it has not run ``again``."""
        rows = []
        for at in unit.at:
            moment = self.retention.moment(stage, at)
            stay = [
                s
                for s, made, ready in unit.makes
                if made == at and s not in self.retention.held
                # Copies of a run stand after that of the first.
                if ready > at or solver.value(self.copies[s][j + 1].end) > moment
            ]
            op = self.retention.order[at]
            rows.append((moment, Run(op, True, tuple(stay)) if again else Run(op)))
        return rows

    def _hint(self) -> None:
        """All variables, as in the runs to begin with: each read finds the last copy made before it."""
        m, p = self.model, self.retention
        stages = [[-1, *again] for again in self.runs.again]
        spans: dict[tuple[int, int], list[int]] = {}  # (storage, run): begin, ready, end
        for u, unit in enumerate(p.units):
            for s, at, ready in unit.makes:
                for j, stage in enumerate(stages[u]):
                    if j or self.runs.first[u]:
                        begin, whole = (p.moment(x if stage < 0 else stage, x) for x in (at, ready))
                        stay = 0 if j else p.stays.get(s, 0)
                        spans[s, j] = [begin, whole, max(whole, p.moment(stay, stay))]
        for find in self.finds:
            chosen = -1
            if find.unit < 0 or (
                self.runs.first[find.unit] if not find.run else find.run < len(stages[find.unit])
            ):
                moment = p.moment(stages[find.unit][find.run] if find.run else find.at, find.at)
                before = [
                    j for j in range(len(find.ways)) if spans.get((find.storage, j), [0, moment])[1] < moment
                ]
                chosen = max(before, key=lambda j: spans[find.storage, j][1], default=-1)
                if chosen >= 0:
                    spans[find.storage, chosen][2] = max(spans[find.storage, chosen][2], moment)
            for j, way in enumerate(find.ways):
                m.add_hint(way, j == chosen)
        for u, again in enumerate(self.again):
            if not isinstance(self.first[u], int):
                m.add_hint(self.first[u], self.runs.first[u])
            for j, run in enumerate(again):
                if not isinstance(run.there, int):
                    known = self.runs.again[u]
                    m.add_hint(run.there, j < len(known))
                    m.add_hint(run.stage, known[j] if j < len(known) else p.units[u].stages[0])
        for s, copies in self.copies.items():
            for j, c in enumerate(copies):
                begin, whole, end = spans.get((s, j), (0, 0, 0))
                m.add_hint(c.end, end)
                m.add_hint(c.length, end + 1 - begin)
