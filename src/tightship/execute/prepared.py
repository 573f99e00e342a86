"""Prepared: kinds of batches captured, planned and run in one arena; what `fit` and `infer` have in common."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tightship import simulate
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute.allocator import Arena
from tightship.execute.binding import Binding, Identity
from tightship.execute.interpreter import Executor, RunStats
from tightship.execute.pinned_pool import Pinned
from tightship.execute.profile import profile
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.rerun.function_trace import FunctionTrace
from tightship.frontends.torch.structure import flatten
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import default
from tightship.process_local import NotCopied, check_process
from tightship.units import Budget, format_bytes
from tightship.verify import check

__all__ = ["Planner", "Prepared", "Settings", "Variant"]

_TRACES = 4

Planner = Callable[[Graph, int | None], Plan]


@dataclass(frozen=True)
class Settings:
    """How kinds of batches are planned and run: ``variants`` of them are kept, ``hand_out`` and ``strict`` are as for
    `Executor`, ``measuring`` are the arguments of `profile`."""

    budget: Budget | None
    planner: Planner
    measuring: dict[str, Any]
    strict: bool = False
    variants: int = 4
    hand_out: bool = True


@dataclass
class Variant(NotCopied):
    """What was captured and planned for one kind of batch, in one set of modes; ``windows`` are its results in the
    arena, where they stay there."""

    program: Program
    executor: Executor
    binding: Binding
    modes: tuple[Any, ...]
    captured: Program  # before it was measured
    windows: list[Any] | None = None
    traces: list[FunctionTrace] = field(default_factory=list)

    def remember(self, trace: FunctionTrace) -> None:
        """Code that asks for this program may do so in several ways."""
        self.traces = [trace, *self.traces][:_TRACES]


class Prepared(NotCopied):
    """What has been captured and planned for ``model`` (and ``optimizer``): one `Variant` per kind of batch.

    A batch of another structure, shape or dtype, another mode of the model, and data on which the captured control
    flow depends and that answers otherwise, are captured and planned again; the latest kinds are kept, in one arena,
    as they never run at the same time. A model or optimizer whose parts were replaced is captured from scratch.

    One budget holds for all: a percentage is resolved to bytes from the first kind.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings
    ) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self._identity = Identity(model, optimizer)
        self._variants: list[Variant] = []  # the one used last first
        self._arena: Arena | None = None
        self._pool: Pinned | None = None
        self._notes: list[str] = []
        self._limit: int | None = (
            None  # the budget in bytes, once the first kind of batch has said what it is
        )
        self._busy = threading.Lock()
        self._process = os.getpid()

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
            raise BadInput(
                "a plan is there once something was captured", "nothing", "call it, or prepare(batch)"
            )
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
        rows = [*self._notes, *now.program.notes, *now.executor.notes, *now.executor.plan.notes]
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
            "unplanned_peak": plan.peak_before,
            "planned_peak": plan.peak,
            "measured_peak": last.measured_peak if last else None,
            "process_peak": last.process_peak if last else None,
            "outside": last.heap if last else None,
            "misses": last.misses if last else None,
        }

    # --- running ---

    def prepare(self, batch: Any) -> Plan:
        """Captures and plans for batches like this one, if that has not been done; runs nothing."""
        with self._alone():
            return self._find(batch, flatten(batch))[0].executor.plan

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two at once would write the same parameters and lie in the same arena."""
        check_process(self._process, self)  # before the lock, which a fork may have found taken
        if not self._busy.acquire(blocking=False):
            raise Unsupported(
                "two calls at once",
                "both would lie in one arena, and what one makes the other would overwrite",
                "call it from one thread at a time, or make two",
            )
        try:
            yield
        finally:
            self._busy.release()

    # --- finding what to run ---

    def _renew(self) -> None:
        """Forgets what was captured of a model or optimizer that has other parts now."""
        why = self._identity.changed()
        if why is not None:
            self._notes.append(f"captured again: {why}")
            self._variants.clear()
            self._identity = Identity(self.model, self.optimizer)
            self._renewed()

    def _renewed(self) -> None:
        """Called when the model or the optimizer has other parts."""

    def _find(self, batch: Any, leaves: list[Any]) -> tuple[Variant, list[Any]]:
        self._renew()
        modes = self._modes()
        for variant in self._variants:
            if variant.modes != modes or variant.program.batch.misfit(batch, leaves) is not None:
                continue
            tensors = variant.binding.tensors(leaves)
            if variant.binding.broken_guard(tensors) is None:
                self._use(variant)
                return variant, tensors
        self._check_new(batch, leaves)
        variant = self._made(batch, modes)
        self._variants.insert(0, variant)
        self._use(variant)
        return variant, variant.binding.tensors(leaves)

    def _use(self, variant: Variant) -> None:
        """Makes it the one used last, and lets go of the one not used for longest if there are too many."""
        if self._variants[0] is not variant:
            self._variants.remove(variant)
            self._variants.insert(0, variant)
        while len(self._variants) > self.settings.variants:
            gone = self._variants.pop()
            gone.executor.arena = gone.windows = None
        if variant.executor.arena is None:
            self._share()

    def _made(self, batch: Any, modes: tuple[Any, ...]) -> Variant:
        return self._variant(self._capture(batch), modes)

    def _variant(self, captured: Program, modes: tuple[Any, ...]) -> Variant:
        program = profile(captured, **self.settings.measuring)
        plan = self._planned(program.graph)
        binding = Binding(program, self.model, self.optimizer)
        return Variant(program, self._executor(program, plan), binding, modes, captured)

    def _planned(self, graph: Graph) -> Plan:
        """A plan within the budget. What keeps within it unplanned is never refused: where only the places of an
        arena do not fit, it runs without one."""
        budget = self.settings.budget
        if budget is None:
            return self.settings.planner(graph, None)
        peak, first = simulate.replay(graph, simulate.baseline(graph)).peak, self._limit is None
        if self._limit is None:
            self._limit = budget.resolve(peak, static=graph.static_bytes)
        try:
            return self.settings.planner(graph, self._limit)
        except Infeasible as no:
            if peak <= self._limit:
                plan = default.plan(graph, self._limit, default.Options(place=False))
                note = "an arena does not fit the budget, the peak does: the plan runs on the ordinary heap"
                return replace(plan, notes=(*plan.notes, note))
            if first or budget.bytes is not None:
                raise
            said = (
                f"the budget is {budget} of the first kind of batch, and stays what it was then: begin with the "
                "largest kind of batch, or give a budget in bytes"
            )
            raise no.with_advice((*no.advice, said)) from None

    def _executor(self, program: Program, plan: Plan) -> Executor:
        check(program.graph, plan)
        s = self.settings
        where = {k: s.measuring.get(k) for k in ("folder", "pinned")}
        executor = Executor(program, plan, strict=s.strict, hand_out=s.hand_out, pool=self._pool, **where)
        self._pool = executor.pool or self._pool
        return executor

    def _share(self) -> None:
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
