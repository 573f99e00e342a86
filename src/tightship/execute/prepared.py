"""Prepared: kinds of batches captured, planned and run in one arena; what `fit` and `infer` have in common.

Steps write into the caller's parameters, buffers and optimizer state as eager would: a program's slots are bound to
the caller's own tensors. What is checked before a step is identity and address: it costs some microseconds, and
whatever it misses is caught by the executor's first run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tightship import simulate
from tightship.errors import BadInput, Enough, Infeasible, Unsupported
from tightship.execute.allocator import Arena
from tightship.execute.away import Streams
from tightship.execute.binding import Binding, Identity
from tightship.execute.cache import DEFAULT, KeptLooks, KeptPlans, folder_of
from tightship.execute.heap import ONLY_ON_HEAP, faster_on_heap, on_cpu, plan_on_heap
from tightship.execute.host_pool import PinnedPool
from tightship.execute.interpreter import Executor, RunStats
from tightship.execute.part_in_hand import at_work
from tightship.execute.profile import profile
from tightship.execute.settings import Settings
from tightship.execute.split import Change, Choice, Splitting, advice
from tightship.execute.stream import Streaming, least_streamed, streaming_advice
from tightship.execute.weights import into_memory
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.program import Program, tensors_in
from tightship.frontends.torch.rerun.function_trace import FunctionTrace
from tightship.frontends.torch.rerun.stand_ins import Expired
from tightship.frontends.torch.structure import flatten
from tightship.graph import Graph
from tightship.notebook import Shown
from tightship.plan import Plan
from tightship.planners import default
from tightship.planners.default import STREAM
from tightship.process_local import NotCopied, check_process
from tightship.units import format_bytes, format_seconds
from tightship.verify import check

__all__ = [
    "Prepared",
    "Thrashing",
    "Variant",
    "log_plan",
    "within_unplanned",
]

_LOG = logging.getLogger("tightship.plan")
_METRICS = {
    "peak": "measured_peak", "planned": "planned_peak", "unplanned": "unplanned_peak", "process": "process_peak",
    "budget": "budget", "static": "static", "arena": "arena", "reserved": "reserved", "outside": "outside",
    "misses": "misses",
}  # fmt: skip
"""The keys of `Prepared.metrics`, and what `measure` calls them."""

_TRACES = 4
_GONE, _RETURNS = 64, 3
"""Kinds that were let go of which is known that they were there, and how many of them come back until it is said."""


class Thrashing(UserWarning):
    """More kinds of batches take turns than are kept planned."""


@dataclass
class Variant(NotCopied):
    """What was captured and planned for one kind of batch, in one set of modes; ``windows`` are its results in the
    arena, where they stay there. ``part``: which part of a step it runs, where it is not all of it. ``changes``:
    which of the captured ops run in slices, and what of the static set streams."""

    program: Program
    executor: Executor
    binding: Binding
    modes: tuple[Any, ...]
    captured: Program  # before it was measured
    windows: list[Any] | None = None
    traces: list[FunctionTrace] = field(default_factory=list)
    part: str = ""
    changes: tuple[Change, ...] = ()
    whole_peak: int = 0  # unplanned, of the step as it was captured, where what is planned is another program
    told: Any = None  # what other ranks were told of it
    text: str = ""  # that they were told, where something streams
    early: Any = None  # what `InStep` knows of it

    @property
    def unplanned(self) -> int:
        """The peak without a plan, of the program as it was captured."""
        return self.whole_peak or self.executor.plan.peak_before

    def remember(self, trace: FunctionTrace) -> None:
        """Code that asks for this program may do so in several ways."""
        self.traces = [trace, *self.traces][:_TRACES]


class Prepared(NotCopied, Shown):
    """What has been captured and planned for ``model`` (and ``optimizer``): one `Variant` per kind of batch.

    A batch of another structure, shape or dtype, another mode of the model, and data on which the captured control
    flow depends and that answers otherwise, are captured and planned again; the latest kinds are kept, in one arena,
    as they never run at the same time. A model or optimizer whose parts were replaced is captured from scratch.

    One budget holds for all: a percentage is resolved to bytes from the first kind.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings, *,
        trains: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._identity = Identity(model, optimizer, trains=trains)
        self._variants: list[Variant] = []  # the one used last first
        self._arena: Arena | None = None
        self._pool: PinnedPool | None = None
        self._notes: list[str] = []
        self._looks = KeptLooks(folder_of(settings.measuring.get("cache", DEFAULT)))
        self._whole_peak = 0  # unplanned, of what was captured last
        self._limit: int | None = None  # the budget in bytes, known from the first kind of batch on
        self._profiled: list[tuple[Program, Program, float]] = []  # captured, measured, seconds that took
        self._gone: list[str] = []  # kinds that were let go, by the digest of their graph
        self._returned: set[str] = set()
        self._busy = threading.Lock()
        self._with_others = False  # ranks that run the same plan
        self._process = os.getpid()
        where = {k: settings.measuring.get(k) for k in ("folder", "pinned")}
        self._streams = Streams(model, optimizer, **where)

    # --- what a function says of itself ---

    def _capture(self, batch: Any) -> Program:
        raise NotImplementedError

    def _modes(self) -> tuple[Any, ...]:
        """What decides, apart from the batch, which ops eager would run."""
        return self._identity.modes()

    def _check_new(self, batch: Any, leaves: list[Any]) -> None:
        """Raise ``BadInput`` for a batch that nothing is to be captured for."""

    # --- what there is ---

    @property
    def program(self) -> Program:
        """Of the kind of batch used last, like ``plan``, ``graph`` and ``last``."""
        return self._latest.program

    @property
    def plan(self) -> Plan:
        return self._latest.executor.plan

    @property
    def _latest(self) -> Variant:
        if not self._variants:
            raise BadInput("nothing is captured yet: call the step, or prepare(batch)", place="plan")
        return self._variants[0]

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def last(self) -> RunStats | None:
        """What the last run used; None before the first and where nothing can be measured."""
        return self._latest.executor.last

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: what was captured again and why, and which guarantees do not hold here."""
        now = self._latest
        kept = [self._looks.note] if self._looks.note else []
        rows = [*self._notes, *kept, *now.program.notes, *now.executor.notes, *now.executor.plan.notes]
        return tuple(dict.fromkeys(rows))

    @property
    def reserved(self) -> int:
        """Bytes of the arena."""
        return self._arena.size if self._arena is not None else 0

    def measure(self) -> dict[str, int | None]:
        """Bytes of the last run against its plan; None where nothing was measured (yet)."""
        last, plan = self.last, self.plan
        return {
            "budget": plan.budget,
            "static": plan.static,
            "arena": plan.arena,
            "reserved": self.reserved,
            "unplanned_peak": self._latest.unplanned,
            "planned_peak": plan.peak,
            "measured_peak": last.measured_peak if last else None,
            "process_peak": last.process_peak if last else None,
            "outside": last.heap if last else None,
            "misses": last.misses if last else None,
        }

    def metrics(self, prefix: str = "") -> dict[str, int | float]:
        """The numbers of the last run, for any tracker: ``tracker.log(step.metrics("memory/"))``.

        In bytes: ``peak`` (measured), ``planned``, ``unplanned`` (the peak without a plan), ``process`` (the peak of
        all threads), ``budget``, ``static``, ``arena``, ``reserved`` (the arena's size), ``outside`` (at once outside
        of the arena). Counts: ``misses`` (requests that went elsewhere than planned), ``kinds`` (of batches that are
        kept planned). ``time`` and ``time_unplanned`` are seconds of the plan, not of a clock. What is not
        known is left out: what was not measured, a budget that was not given; before the first capture, everything.
        """
        if not self._captured_something():
            return {}
        used = self.measure()
        rows: dict[str, Any] = {key: used.get(name) for key, name in _METRICS.items()}
        rows |= {"kinds": len(self._variants), **self._times()}
        return {f"{prefix}{key}": value for key, value in rows.items() if value is not None}

    def _captured_something(self) -> bool:
        return bool(self._variants)

    def _times(self) -> dict[str, float | None]:
        plan = self._latest.executor.plan
        return {
            key: getattr(plan, name, None)
            for key, name in (("time", "time"), ("time_unplanned", "time_before"))
        }

    def __str__(self) -> str:
        """What is planned and what was measured, in a few lines."""
        name, m = type(self.model).__name__, dict[str, Any](self.metrics())
        if not m:
            return f"step of {name}: nothing is captured yet"
        budget = f", within a budget of {format_bytes(m['budget'])}" if "budget" in m else ", no budget"
        rows = [f"step of {name}{budget}"]
        for key, what in (
            ("planned", "planned peak"),
            ("peak", "measured peak"),
            ("unplanned", "unplanned peak"),
        ):
            if key in m:
                rows.append(f"  {what:16}{format_bytes(m[key])}")
        if "time" in m:
            rows.append(
                f"  {'time':16}{format_seconds(m['time'])}, {format_seconds(m['time_unplanned'])} unplanned"
            )
        rows.append(f"  {'kinds':16}{m['kinds']} of batches are planned")
        notes = self.notes if self._variants else self._notes
        return "\n".join([*rows, *(f"  note: {note}" for note in notes)])

    # --- running ---

    def prepare(self, batch: Any) -> Plan | None:
        """Captures and plans for batches like this one, if that has not been done; runs nothing."""
        with self._exclusive():
            return self._find(batch, flatten(batch))[0].executor.plan

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Two at once would write the same parameters and lie in the same arena."""
        check_process(self._process, self)  # before the lock, which a fork may have found taken
        if not self._busy.acquire(blocking=False):
            raise Unsupported(
                "two calls at once",
                "both would write to one arena",
                "call it from one thread at a time, or make two",
            )
        try:
            if self._streams.gathered:
                fault = "a step inside of `with step.gathered():` would run without what it streams: leave it first"
                raise BadInput(fault, place="step")
            self._streams.open()
            with at_work():
                yield
        finally:
            self._streams.shut()
            self._busy.release()

    # --- finding what to run ---

    def _renew(self) -> None:
        """Forgets what was captured of a model or optimizer that has other parts now."""
        why = self._identity.changed(moves=self._may_move)
        if why is not None:
            self._streams.bring_back()
            where = self._streams.folder, self._streams.pinned
            self._streams = Streams(self.model, self.optimizer, *where)
            self._notes.append(f"captured again: {why}")
            self._variants.clear()
            self._identity = Identity(self.model, self.optimizer, trains=self._identity.trains)
            self._on_replaced()

    @property
    def _may_move(self) -> bool:
        """Whether it makes no difference where parameters lie between steps."""
        return not self.settings.stream

    def _on_replaced(self) -> None:
        """Called when the model or the optimizer has other parts."""

    def _find(self, batch: Any, leaves: list[Any]) -> tuple[Variant, list[Any]]:
        self._renew()
        modes, given = self._modes(), [x for x in leaves if isinstance(x, torch.Tensor)]
        for variant in self._variants:
            if variant.modes != modes or variant.program.batch.misfit(batch, leaves) is not None:
                continue
            tensors = variant.binding.tensors(given)
            if variant.binding.broken_guard(tensors) is None:
                self._use(variant)
                return variant, tensors
        self._check_new(batch, leaves)
        variant = self._capture_variant(batch, modes)
        self._variants.insert(0, variant)
        self._use(variant)
        return variant, variant.binding.tensors(given)

    def _use(self, variant: Variant) -> None:
        """Makes it the one used last, and lets go of the one not used for longest if there are too many."""
        if self._variants[0] is not variant:
            self._variants.remove(variant)
            self._variants.insert(0, variant)
        for gone in [v for v in self._variants if v.part == variant.part][self.settings.variants :]:
            self._variants.remove(gone)
            gone.executor.arena = gone.windows = None
            self._gone = [gone.captured.graph.digest, *self._gone][:_GONE]
        if variant.executor.arena is None:
            self._share_arena()

    def _capture_variant(self, batch: Any, modes: tuple[Any, ...]) -> Variant:
        with self.settings.progress.stage("capturing"):
            return self._variant(self._capture(batch), modes)

    def _note_return(self, graph: Graph) -> None:
        """Warns, once, when kinds of batches that were let go come again and again."""
        before = len(self._returned)
        if graph.digest in self._gone:
            self._returned.add(graph.digest)
        kinds = len({*self._gone, *(v.captured.graph.digest for v in self._variants), graph.digest})
        if before < _RETURNS <= len(self._returned):
            text = (
                f"{kinds} kinds of batches take turns and variants={self.settings.variants} are kept: each is "
                f"captured and planned again when it comes back. Give variants={kinds} or more, or pad batches to "
                "fewer shapes"
            )
            self._notes.append(text)
            warnings.warn(text, Thrashing, stacklevel=6)

    def _variant(
        self, captured: Program, modes: tuple[Any, ...], *, part: str = "", beside: int = 0
    ) -> Variant:
        if part != "update":
            self._note_return(captured.graph)
        self._looks.keep()
        with self.settings.progress.stage("measuring"):
            found = self._planned(captured, beside)
            variant = self._bound(captured, found.program, found.plan, modes, part=part)
        return replace(variant, changes=found.changes, whole_peak=self._whole_peak if found.changes else 0)

    def _bound(
        self, captured: Program, program: Program, plan: Plan, modes: tuple[Any, ...], *, part: str = ""
    ) -> Variant:
        """What runs a plan on the caller's own tensors."""
        self._profiled.clear()
        captured.forget_samples()
        log_plan(plan, part)
        binding = Binding(program, self.model, self.optimizer)
        executor = self._executor(program, plan)
        return Variant(program, executor, binding, modes, captured, part=part)

    def _planned(self, captured: Program, beside: int) -> Choice:
        """The measured program and its plan, with what of it was split, and what streams."""
        self._bring_back()  # ops are measured on copies of it
        base, took = self._measured(captured)
        if self.settings.budget is None:
            return Choice(base, self._plan_within_budget(base.graph, beside, took))
        self._whole_peak = self._resolve_limit(base.graph)
        limit, known = max((self._limit or 0) - beside, 0), set(self._streams.items)
        moves = "offload" in self._allow or "compress" in self._allow

        def plan_of(graph: Graph) -> Plan:
            return self._plan_within_budget(graph, beside, took)

        streaming = None
        if self.settings.stream:
            hints = self.settings.stream_hints
            streaming = Streaming(plan_of, limit, self._streams, moves=moves, hints=hints)
        choose = streaming.choose if streaming else lambda program: Choice(program, plan_of(program.graph))
        try:
            if self.settings.split:
                least = streaming.least if streaming else None
                splitting = Splitting(captured, self.settings.split, moves=moves, least_of=least)
                found = splitting.plan(base, choose, lambda program: self._measured(program)[0], limit)
            else:
                found = choose(base)
        except Infeasible as no:
            if self._with_others:  # advice would be tried on one rank
                raise
            raise no.with_advice((*no.advice, *self._advice_on_ways(captured, base, limit))) from None
        if streaming is not None and self._with_others:
            notes = (*found.program.notes, *streaming.notes(found))
            return replace(
                found, program=replace(found.program, notes=notes)
            )  # it begins on all ranks at once
        if streaming is not None:
            found = streaming.begin(found)
            if known != set(self._streams.items):
                self._variants.clear()  # they have in memory what streams from now on
            self._put_away()
        return found

    def _advice_on_ways(self, captured: Program, base: Program, limit: int) -> Iterator[str]:
        """What streaming and splitting would come to, as far as they were not allowed."""
        ways = [self._allow, self.settings.split, STREAM if self.settings.stream else ""]
        allow, splits, streams = ",".join(filter(None, ways)), bool(ways[1]), bool(ways[2])
        enough: tuple[str, ...] = ()
        if not streams and self._identity.trains:
            enough = streaming_advice(base, limit, allow)
            yield from enough
        if not splits:
            yield from advice(captured, limit, allow, least_streamed if streams else None)
        if not (streams or splits or enough) and self._identity.trains:
            yield from advice(captured, limit, f"{allow},{STREAM}", least_streamed)

    @property
    def _allow(self) -> str:
        return getattr(getattr(self.settings.planner, "options", None), "allow", "recompute")

    def _bring_back(self) -> None:
        """What streams can be read until the next run, without taking memory where it lies in a file: to be captured
        it must be there."""
        if self._streams.items:
            self._streams.bring_back(mapped=True)
            self._identity.moved()

    def _put_away(self) -> None:
        """What streams leaves memory, if it is there; what does not, and lies in a file, is in memory from now on."""
        had = self._streams.put_away()
        stays = into_memory(self._static())
        if had or stays:
            self._identity.moved()

    def _static(self) -> Iterator[torch.Tensor]:
        own = (t for t in (*self.model.parameters(), *self.model.buffers()) if not isinstance(t, Expired))
        yield from (t for t in own if t.layout is torch.strided)
        for one in each(self.optimizer) if self.optimizer is not None else ():
            yield from (
                t for state in one.state.values() for t in tensors_in(state) if t.layout is torch.strided
            )

    def _resolve_limit(self, graph: Graph) -> int:
        """The unplanned peak of a graph; the budget in bytes is a part of the first one's."""
        peak = simulate.replay(graph, simulate.baseline(graph)).peak
        if self._limit is None and self.settings.budget is not None:
            self._limit = self.settings.budget.resolve(peak, static=graph.static_bytes)
        return peak

    def _measured(self, captured: Program) -> tuple[Program, float]:
        """The program with what its ops cost, and the seconds that it took to know."""
        for v in self._variants:
            if v.captured is captured:
                return v.program, 0.0
        known = next((row for row in self._profiled if row[0] is captured), None)
        if known is None:
            began = time.perf_counter()
            say = self.settings.progress.measured
            with self.settings.progress.stage("measuring"):
                program = profile(captured, say=say, **self.settings.measuring)
            known = captured, program, time.perf_counter() - began
            self._profiled.append(known)
        return known[1:]

    def _plan_within_budget(self, graph: Graph, beside: int = 0, took: float = 0.0) -> Plan:
        """A plan within the budget, less bytes that stand ``beside`` it; measuring ``took`` seconds of those that
        there are. What keeps within the budget unplanned is never refused: where only the places of an arena do not
        fit, it runs without one."""
        budget = self.settings.budget
        if budget is None:
            return self._plan(graph, None, took)
        peak, first = self._resolve_limit(graph), not self._variants
        limit = max((self._limit or 0) - beside, 0)
        try:
            return self._plan_or_heap(graph, limit, took)
        except Infeasible as no:
            if peak <= limit:
                return plan_on_heap(graph, limit, default.Options())
            no = within_unplanned(no, peak).beside(beside)
            no = no.with_advice((*self._static_advice(graph), *no.advice))
            if first or budget.bytes is not None:
                raise no from None
            advice = (
                f"the budget is {budget} of the first kind of batch: begin with the largest, or give bytes"
            )
            raise no.with_advice((*no.advice, advice)) from None

    def _plan_or_heap(self, graph: Graph, limit: int, took: float) -> Plan:
        """A plan with an arena, or on the heap, where only that fits or it takes less time."""
        planner, began = self.settings.planner, time.perf_counter()
        if not isinstance(planner, KeptPlans):
            return self._plan(graph, limit, took)

        def on_heap() -> Plan:
            left = default.seconds_left(planner.options.seconds, took + time.perf_counter() - began)
            return planner.with_options({"place": False})(graph, limit, seconds=left)

        try:
            plan = self._plan(graph, limit, took)
        except Infeasible as no:
            if not (planner.options.allow == default.Options().allow and no.placed and on_cpu(graph)):
                raise
            try:
                return replace(plan := on_heap(), notes=(*plan.notes, ONLY_ON_HEAP))
            except Infeasible:
                raise no from None
        return faster_on_heap(graph, limit, plan, on_heap)

    def _plan(self, graph: Graph, limit: int | None, took: float) -> Plan:
        planner, progress = self.settings.planner, self.settings.progress
        with progress.stage("planning", sum(op.time for op in graph.ops)):
            if not isinstance(planner, KeptPlans):
                return planner(graph, limit)
            known = [(v.program.graph, v.executor.plan) for v in self._variants] if limit is not None else []
            left = default.seconds_left(planner.options.seconds, took)
            return planner(graph, limit, progress.planning, known, left)

    def _static_advice(self, graph: Graph) -> tuple[str, ...]:
        """What to say of a percentage that the static set alone is above."""
        budget, static = self.settings.budget, graph.static_bytes
        if budget is None or budget.bytes is not None or self._limit is None or static < self._limit:
            return ()
        return (
            f"parameters, optimizer state and the batch are {format_bytes(static)}, more than {budget} of the "
            'unplanned peak: say how much of the rest there may be, such as "static+60%"',
        )

    def _executor(self, program: Program, plan: Plan) -> Executor:
        s = self.settings
        with s.progress.stage("verifying"):
            check(program.graph, plan)
        where = {k: s.measuring.get(k) for k in ("folder", "pinned")}
        executor = Executor(program, plan, strict=s.strict, hand_out=s.hand_out, pool=self._pool, **where)
        self._pool = executor.pool or self._pool
        return executor

    def _share_arena(self) -> None:
        """One arena for all."""
        had, need = self.reserved, max(v.executor.extent for v in self._variants)
        if need > had:
            for v in self._variants:
                v.executor.arena = v.windows = None
            self._arena = None  # given back before the larger one is taken
            self._arena = self._variants[0].executor.reserve(need)
            if len(self._variants) > 1:
                self._notes.append(f"the arena grew from {format_bytes(had)} to {format_bytes(need)}")
        for v in self._variants:
            v.executor.arena = self._arena


def log_plan(plan: Any, part: str = "") -> None:
    """Say in the log ``tightship.plan`` that a kind of batch, or a ``part`` of its step, is planned."""
    budget = "no budget" if plan.budget is None else f"budget {format_bytes(plan.budget)}"
    _LOG.info(
        "planned %s: peak %s, unplanned %s, %s", part or "a kind of batch", format_bytes(plan.peak),
        format_bytes(plan.peak_before), budget,
    )  # fmt: skip


def within_unplanned(no: Infeasible, peak: int) -> Infeasible:
    """The same, which knows that a step is never refused what it needs unplanned."""
    others = tuple(e for e in no.enough if e.options and e.nbytes < peak)
    own = min((e.nbytes for e in no.enough if not e.options), default=peak)
    return no.with_enough((Enough(min(own, peak)), *others))
