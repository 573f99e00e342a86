"""Requests: what is asked for, in one value. The public functions fill them in, and the command line parses its
arguments into them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tightship.diagnose.remedies import advised
from tightship.errors import BadInput, Infeasible
from tightship.graph import Graph
from tightship.options import filled
from tightship.plan import Plan
from tightship.planners import PlannerInfo, planners
from tightship.planners.batch import MaxBatch
from tightship.planners.batch import max_batch as search_batch
from tightship.planners.default import (
    Options,
    PlanOptions,
    allows_stream,
    divide_allow,
    plan_alone,
    read_options,
    seconds_left,
)
from tightship.planners.default import plan as search_plan
from tightship.planners.frontier import Changed, below
from tightship.planners.frontier import frontier as search_frontier
from tightship.result import Explained, Frontier, Planned, SplitPlanned
from tightship.simulate import unplanned
from tightship.sources import ModelStep, torch_saved
from tightship.units import BudgetLike, parse_budget, resolve_budget

if TYPE_CHECKING:
    from tightship.integrations.ways import Ways

__all__ = [
    "BatchRequest",
    "FrontierRequest",
    "PlanRequest",
    "Progress",
    "Say",
    "SnapshotRequest",
    "plan_options",
    "systems",
]

Progress = Callable[[int, float, bool], bool]
Say = Callable[[str], None]


@dataclass(frozen=True)
class PlanRequest:
    """A plan of ``graph`` within ``budget``, by the default planner or by the one named ``planner`` alone, with that
    planner's ``options``. ``cache``: the folder that plans of the default planner are kept in. ``took``: how many of
    the options' seconds measuring took. ``program``: what the graph was captured as, and ``step``: the model, where
    its ops may be split."""

    graph: Graph
    budget: BudgetLike = None
    planner: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    cache: Path | str | None = None
    took: float = 0.0
    program: object = None
    step: ModelStep | None = None

    def solve(self, progress: Progress | None = None) -> Planned:
        """The verified plan. Raises ``Infeasible``, ``BadInput`` for names and options that there are not."""
        answer = self._solved(progress)
        notes: tuple[str, ...] = () if self.step is None else self.step.notes
        if self.program is not None and self.graph.meta.get("source") in ("onnx", "tflite"):
            notes = cast(Any, self.program).notes  # on how the file was read
        return answer.changed(notes=(*answer.plan.notes, *notes)) if notes else answer

    def _solved(self, progress: Progress | None) -> Planned:
        graph, budget = self.graph, self.budget
        if self.planner is None:
            options, way = divide_allow(plan_options(graph, self.options))
            options, streams = allows_stream(options)
            if way or streams:
                ways = self._ways(options, way, streams, progress)
                if budget is not None:
                    return self._changed(ways)
            try:
                made = self._by_default(graph, budget, options, progress)
                if way or streams:
                    made = replace(made, notes=(*made.notes, "without a budget nothing is split or streamed"))
                return Planned(made, graph)
            except Infeasible as no:
                raise no.with_advice((*no.advice, *self._advice_on_ways(no.budget, options))) from None
        known = systems()
        if self.planner not in known:
            rule = f"unknown planner {self.planner!r}: those that plan alone are {', '.join(sorted(known))}"
            raise BadInput(rule)
        info = known[self.planner]
        options = filled(info.options, self.options, f"planner {self.planner!r}")
        if info.group == "evict":
            return Planned(plan_alone(graph, info, options, budget), graph)
        plan: Plan = info.plan(graph, options)
        limit = resolve_budget(budget, plan.peak_before, static=plan.static)
        return Planned(replace(plan, budget=limit), graph)

    def _by_default(
        self, graph: Graph, budget: BudgetLike, options: Options, progress: Progress | None
    ) -> Plan:
        left = seconds_left(options.seconds, self.took)
        if self.cache is None:
            return advised(graph, budget, replace(options, seconds=left), progress)
        from tightship.execute.cache import KeptPlans, folder_of

        return KeptPlans(folder_of(self.cache), options)(graph, budget, progress, seconds=left)

    def _advice_on_ways(self, limit: int, options: Options) -> tuple[str, ...]:
        """What splitting, and streaming, would come to where they were not allowed."""
        if self.program is not None and self.graph.meta.get("source") == "onnx":
            from tightship.integrations.onnx_split import advice as of_rows

            return of_rows(cast(Any, self.program), limit, options.allow)
        if self.program is None or self.step is None:
            return ()
        from tightship.execute.split import advice
        from tightship.execute.stream import streaming_advice

        said = advice(cast(Any, self.program), limit, options.allow)
        if any(op.phase == "update" for op in self.graph.ops):
            said += streaming_advice(cast(Any, self.program), limit, options.allow)
        return said

    def _ways(self, options: Options, way: str, streams: bool, progress: Progress | None) -> Ways:
        """How ops may run in slices, and parameters and optimizer state leave memory. Raises ``Unsupported``."""
        from tightship.integrations.ways import Ways

        def plan_of(graph: Graph, limit: int, chosen: Options) -> Plan:
            return self._by_default(graph, limit, chosen, progress)

        cache = "default" if self.cache is None else self.cache
        timed = None if self.step is None else partial(self.step.timed, cache=cache)
        return Ways(self.graph, self.program, timed, way, options, plan_of, streams=streams)

    def _changed(self, ways: Ways) -> Planned:
        """A plan in which that is done where the budget asks for it."""
        peak = unplanned(self.graph).peak
        limit = resolve_budget(self.budget, peak, static=self.graph.static_bytes)
        assert limit is not None
        made = ways.plan(limit)
        if made.program is None:
            return Planned(made.plan, self.graph)
        return SplitPlanned(made.plan, made.program.graph, made.program, made.peak, made.time, made.how)


@dataclass(frozen=True)
class FrontierRequest:
    """Plans of ``graph`` for ``points`` budgets. ``program``: what it was captured as, if it was; ``peers``: beside
    other policies; ``options``: the default planner's, for all budgets together. ``step``: the model, where its ops
    may be split or its parameters stream; half of the search is then for such plans."""

    graph: Graph
    points: int = 9
    program: object = None
    peers: bool = True
    options: Mapping[str, object] = field(default_factory=dict)
    step: ModelStep | None = None

    def solve(self, say: Say | None = None) -> Frontier:
        saved = {}
        if self.peers and self.program is not None:
            if say is not None:
                say("what torch's activation_memory_budget saves")
            saved = torch_saved(self.program)
        options, way = divide_allow(plan_options(self.graph, self.options))
        options, streams = allows_stream(options)
        if not (way or streams):
            found = search_frontier(self.graph, self.points, options, saved, say, peers=self.peers)
            return Frontier.of(found)
        from tightship.integrations.ways import Ways

        def plan_of(graph: Graph, limit: int, chosen: Options) -> Plan:
            return search_plan(graph, limit, chosen)

        timed = None if self.step is None else partial(self.step.timed, cache="default")
        ways = Ways(self.graph, self.program, timed, way, options, plan_of, streams=streams)
        half = replace(ways.options, seconds=options.seconds / 2, work=options.work // 2)
        found = search_frontier(self.graph, self.points, half, saved, say, peers=self.peers)
        each = replace(half, seconds=half.seconds / self.points, work=half.work // self.points)
        return Frontier.of(below(found, self.points, ways.least(), partial(_changed_at, ways, each), say))


def _changed_at(ways: Ways, each: Options, budget: int) -> Changed | int:
    """A plan within a budget in slices or with streams; the bytes that were enough, 0 if unknown, where there is
    none."""
    try:
        found = ways.plan(budget, each)
    except Infeasible:
        return ways.reached
    return Changed(found.plan, ways.graph if found.program is None else found.program.graph, found.how)


@dataclass(frozen=True)
class BatchRequest:
    """The largest batch whose ``step`` fits ``budget``; ``dim``: which dimension is the batch; ``options``: those of
    the default planner."""

    step: ModelStep
    budget: BudgetLike
    dim: int = 0
    options: Mapping[str, object] = field(default_factory=dict)

    def first(self) -> Graph:
        """The graph at the sample's own batch. Raises what the model raises."""
        return self.step.graph_at(self.step.batch_size(self.dim), self.dim)

    def solve(self, say: Say | None = None, first: Graph | None = None) -> MaxBatch:
        """The answer; ``first``: what `first` gave, if it was asked before."""
        start = self.step.batch_size(self.dim)
        budget = None if self.budget is None else parse_budget(self.budget)
        if budget is None:
            raise BadInput("the largest batch requires a budget in bytes", place="budget")
        own = first or self.first()
        o = plan_options(own, self.options)
        o = replace(o, seconds=o.seconds / 4, work=o.work // 4)

        def graph_of(n: int) -> Graph:
            return own if n == start else self.step.graph_at(n, self.dim)

        return search_batch(graph_of, budget, o, start=start, say=say)


@dataclass(frozen=True)
class SnapshotRequest:
    """What the memory snapshot in a file of PyTorch's says. ``seconds``: what placing the requests of each device may
    take; ``alloc_conf``: settings of the allocator that are tried, too."""

    path: str | os.PathLike[str]
    seconds: float = 10.0
    alloc_conf: str | None = None

    def solve(self) -> Explained:
        from tightship.baselines.torch_allocator_settings import Settings
        from tightship.diagnose.snapshot import explain_snapshot
        from tightship.frontends.memory_snapshot import read_snapshot

        tried = None if self.alloc_conf is None else Settings.parse(self.alloc_conf)
        found = explain_snapshot(read_snapshot(self.path), seconds=self.seconds, settings=tried)
        return Explained(os.fspath(self.path), found)


def plan_options(graph: Graph, options: Mapping[str, object]) -> Options:
    """The default planner's options; the results of a whole step leave the arena unless it is said otherwise."""
    whole = any(op.phase == "update" for op in graph.ops)
    return read_options(cast(PlanOptions, {"hand_out": whole, **options}), "plan")


def systems() -> dict[str, PlannerInfo]:
    """The planners that take a graph as it is and plan alone, by the name that `planners` gives them."""
    groups = ("", "share", "evict")
    return {n: i for n, i in planners().items() if i.group in groups and n != "default"}
