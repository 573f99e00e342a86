"""fit: a training step within a budget, as a function of the batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tightship import simulate
from tightship.errors import BadInput, Unsupported
from tightship.execute.allocator import Arena
from tightship.execute.binding import Binding, Identity
from tightship.execute.interpreter import Executor, RunStats
from tightship.execute.profile import profile
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.step import capture_step
from tightship.frontends.torch.structure import flatten
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.units import Budget, parse_budget
from tightship.verify import check

__all__ = ["TrainStep", "fit"]

Planner = Callable[[Graph, int | None], Plan]


def fit(
    model: torch.nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    sample_batch: Any,
    budget: Any = None,
    *,
    planner: Planner | None = None,
    strict: bool = False,
    cache: Path | str | None = "default",
    seconds_per_op: float = 0.01,
    variants: int = 4,
    folder: Path | str | None = None,
    **options: Any,
) -> TrainStep:
    """A training step of ``model`` that stays within ``budget``.

    ``step = fit(model, loss_fn, optimizer, batch, "60%")`` and then ``loss = step(batch)`` do what
    ``optimizer.zero_grad(); loss = loss_fn(model, batch); loss.backward(); optimizer.step()`` does, to the
    bit, in the caller's own model and optimizer. ``loss_fn`` and batches are as `capture_step` takes them.

    ``budget`` is bytes, text such as ``6GiB``, or a percentage of the unplanned peak (``60%``); it counts
    parameters, buffers, optimizer state, the batch, and everything the step makes, results included. None
    keeps everything, in the better order. ``planner`` replaces the default planner, to which
    ``options`` go. ``variants`` is how many kinds of batches are kept planned. ``strict``: as for `Executor`.
    ``cache`` and ``seconds_per_op``: as for `profile`. ``folder``: where offloaded bytes go, in files without names
    (default: the system's folder for temporary files).

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    if variants < 1:
        raise BadInput("at least one kind of batch is kept", variants, "fit(variants=…)")
    if planner is None:
        planner = _default_planner(options)
    elif options:
        raise BadInput("options go to the default planner", sorted(options), "fit")
    wanted = None if budget is None else parse_budget(budget)
    measuring = {"cache": cache, "seconds_per_op": seconds_per_op, "folder": folder}
    step = TrainStep(model, loss_fn, optimizer, wanted, planner, measuring, strict, variants)
    step.prepare(sample_batch)
    return step


def _default_planner(options: dict[str, Any]) -> Planner:
    from tightship.planners.default import Options, plan

    try:
        chosen = Options(**options)
    except TypeError as error:
        raise BadInput(
            f"options are those of the default planner ({error})", sorted(options), "fit"
        ) from error
    return lambda graph, budget: plan(graph, budget, chosen)


@dataclass
class _Variant:
    """What was captured and planned for one kind of batch, in one set of modes."""

    program: Program
    executor: Executor
    binding: Binding
    modes: tuple[Any, ...]


class TrainStep:
    """Made by `fit`. ``step(batch)`` trains on a batch and returns the loss, or (loss, what came with it).

    A batch of another structure, shape or dtype, another training mode, and data on which the captured
    control flow depends and that answers otherwise, are captured and planned again; the latest kinds are
    kept, in one arena. A model or optimizer whose parts were replaced or moved is captured again from
    scratch. ``p.grad`` is neither read nor written. One thread at a time: a call while another is running raises
    ``Unsupported``. If a step raises, the parameters whose update had run are
    updated and the others are not (running statistics and random state likewise): load a checkpoint, or go
    on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        budget: Budget | None,
        planner: Planner,
        measuring: dict[str, Any],
        strict: bool,
        variants: int,
    ) -> None:
        self.model, self.loss_fn, self.optimizer, self.budget = model, loss_fn, optimizer, budget
        self._planner, self._measuring, self._strict, self._most = planner, measuring, strict, variants
        self._identity = Identity(model, optimizer)
        self._variants: list[_Variant] = []  # the one used last first
        self._arena: Arena | None = None
        self._notes: list[str] = []
        self._busy = threading.Lock()

    def __call__(self, batch: Any) -> Any:
        with self._alone():
            leaves = flatten(batch)
            variant, tensors = self._find(batch, leaves)
            results = variant.executor.run(tensors)
            compat.mark_stepped(self.optimizer)
            return variant.program.result_spec.unflatten(results)

    def prepare(self, batch: Any) -> Plan:
        """Captures and plans for batches like this one, if that has not been done; runs nothing."""
        with self._alone():
            return self._find(batch, flatten(batch))[0].executor.plan

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two at once would write the same parameters and lie in the same arena."""
        if not self._busy.acquire(blocking=False):
            raise Unsupported(
                "calling a training step while another call of it runs",
                "both would update the same parameters, from one arena",
                "call it from one thread at a time",
            )
        try:
            yield
        finally:
            self._busy.release()

    @property
    def program(self) -> Program:
        """Of the kind of batch used last, like ``plan``, ``graph`` and ``last``."""
        return self._variants[0].program

    @property
    def plan(self) -> Plan:
        return self._variants[0].executor.plan

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def last(self) -> RunStats | None:
        """What the last step used; None before the first and where nothing can be measured."""
        return self._variants[0].executor.last

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: what was captured again and why, and which guarantees do not hold here."""
        current = self._variants[0]
        rows = [*self._notes, *current.program.notes, *current.executor.notes, *current.executor.plan.notes]
        return tuple(dict.fromkeys(rows))

    def measure(self) -> dict[str, int | None]:
        """Bytes of the last step against its plan; None where nothing was measured (yet)."""
        last, plan = self.last, self.plan
        return {
            "budget": plan.budget,
            "static": plan.static,
            "arena": plan.arena,
            "unplanned_peak": plan.peak_before,
            "planned_peak": plan.peak,
            "measured_peak": last.measured_peak if last else None,
            "process_peak": last.process_peak if last else None,
            "misses": last.misses if last else None,
        }

    # --- finding what to run ---

    def _find(self, batch: Any, leaves: list[Any]) -> tuple[_Variant, list[Any]]:
        why = self._identity.changed()
        if why is not None:
            self._notes.append(f"captured again: {why}")
            self._variants.clear()
            self._identity = Identity(self.model, self.optimizer)
        modes = self._identity.modes()
        for k, variant in enumerate(self._variants):
            if variant.modes != modes or variant.program.batch.misfit(batch) is not None:
                continue
            tensors = variant.binding.tensors(leaves)
            if variant.binding.broken_guard(tensors) is None:
                if k:
                    self._variants.insert(0, self._variants.pop(k))
                return variant, tensors
        variant = self._made(batch, modes)
        self._variants.insert(0, variant)
        del self._variants[self._most :]
        self._share()
        return variant, variant.binding.tensors(leaves)

    def _made(self, batch: Any, modes: tuple[Any, ...]) -> _Variant:
        program = capture_step(self.model, self.loss_fn, self.optimizer, batch)
        program = profile(program, **self._measuring)
        budget = None
        if self.budget is not None:
            unplanned = simulate.replay(program.graph, simulate.baseline(program.graph)).peak
            budget = self.budget.resolve(unplanned)
        plan = self._planner(program.graph, budget)
        check(program.graph, plan)
        executor = Executor(program, plan, strict=self._strict, folder=self._measuring["folder"])
        return _Variant(program, executor, Binding(program, self.model, self.optimizer), modes)

    def _share(self) -> None:
        """One arena for all: they never run at the same time."""
        need = max(v.executor.extent for v in self._variants)
        if self._arena is None or self._arena.size < need:
            for v in self._variants:
                v.executor.arena = None
            self._arena = None  # given back before the larger one is taken
            self._arena = self._variants[0].executor.reserve(need) if need else None
        for v in self._variants:
            v.executor.arena = self._arena
