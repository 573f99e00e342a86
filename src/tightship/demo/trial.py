"""One trial: a model trained eagerly and, from the same weights and random state, within a budget.

Both are measured by the same meter in the same way, from before a step's batch is made until the step is over,
and the bytes that stay between steps (parameters, buffers, optimizer state) are added. Steps alternate, so that
what else the machine does slows both.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tightship.api import Planned
from tightship.demo.models import Workload
from tightship.errors import Unsupported
from tightship.execute import allocator
from tightship.execute.allocator import Meter
from tightship.execute.eager import differences, tensors_by_name
from tightship.execute.fit import fit
from tightship.execute.interpreter import PeakMismatch
from tightship.execute.train_step import TrainStep
from tightship.graph import Graph, aligned
from tightship.plan import Plan
from tightship.planners import default
from tightship.report.progress import Line

__all__ = ["SETTLE", "Run", "Trainer", "resident", "trial"]

SETTLE = 2
"""Steps before peaks and times count: the first one makes the optimizer's state."""
SHARE = 0.5
"""The part of what eager needs beyond the static set that the budget leaves."""


@dataclass
class Run:
    """What a trial found; bytes unless said otherwise. Peaks are None where nothing can be measured."""

    model: str
    title: str
    budget: int
    static: int
    eager_peak: int | None
    planned_peak: int
    measured_peak: int | None
    unplanned_peak: int
    lower_bound: int
    arena: int
    misses: int | None
    identical: bool
    different: list[str]
    steps: int
    losses: list[float]
    evictions: int
    moved: int
    time_ratio: float
    eager_seconds: float
    seconds: float
    plan_seconds: float
    fit_seconds: float
    parameters: int
    notes: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """What does not hold of the claim: planned = measured ≤ budget, and bit-identical numbers."""
        faults, measured, planned = [], self.measured_peak, self.planned_peak
        if measured is None or self.eager_peak is None:
            faults.append("nothing was measured: " + "; ".join(self.notes or ["there is no meter here"]))
        elif measured != planned:
            faults.append(f"the measured peak is {measured} B, the planned one {planned} B")
        if max(measured or 0, planned, self.static + self.arena) > self.budget:
            faults.append(f"the budget of {self.budget} B was exceeded")
        if self.misses:
            faults.append(f"{self.misses} misplaced allocations")
        if not self.identical:
            faults.append("not bit-identical to eager: " + ", ".join(self.different[:5]))
        return [f"{self.title}: {fault}" for fault in faults]


class Trainer:
    """A model, its optimizer and its random state; ``step(k)`` trains on batch ``k`` and is measured."""

    def __init__(self, model: torch.nn.Module, workload: Workload, within: TrainStep | None = None) -> None:
        self.model, self.workload, self.within = model, workload, within
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.random = torch.Generator().manual_seed(7).get_state()
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.processor: list[float] = []  # seconds of all cores together
        self.peaks: list[int] = []

    def step(self, k: int) -> None:
        with self._own_random_state():
            if not allocator.available():
                self._timed(k)
                return
            gc.collect()
            between = resident(self.model, self.optimizer)
            with Meter() as meter:
                self._timed(k)
            self.peaks.append(between + meter.peak)

    def _timed(self, k: int) -> None:
        batch = self.workload.batch(k)
        began, worked = time.perf_counter(), time.process_time()
        loss = self._run(batch)
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - worked)
        self.losses.append(loss.detach().clone())

    def _run(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor
        if self.within is not None:
            loss = self.within(batch)
            return loss
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        others = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            yield
        finally:
            self.random = torch.get_rng_state()
            torch.set_rng_state(others)


def resident(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that stay between steps, as the allocator counts them; storages that are shared count once."""
    state = (t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers(), *state)
    }
    return sum(aligned(size) for size in storages.values())


def trial(workload: Workload, steps: int, line: Line, **options: Any) -> tuple[Run, Planned]:
    """Train ``workload`` both ways for ``steps`` steps; ``options`` are the default planner's."""
    eager = Trainer(workload.make(), workload)
    model = copy.deepcopy(eager.model)
    for k in range(SETTLE):
        line.say(f"eager, step {k + 1}", always=True)
        eager.step(k)
    ours = Trainer(model, workload)
    began = time.perf_counter()
    line.say("capturing and measuring each op", always=True)
    budget = _budget(eager, workload)
    ours.within = fit(model, None, ours.optimizer, workload.batch(0), budget, planner=_planner(line, options))
    fit_seconds = time.perf_counter() - began
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PeakMismatch)  # a mismatch is a fault of the run, told at the end
        _train(eager, ours, steps, line)
    return _compared(workload, eager, ours, steps, fit_seconds), Planned(ours.within.plan, ours.within.graph)


def _budget(eager: Trainer, workload: Workload) -> int | str:
    """Half of what eager needs beyond the static set (which the batch is in); without a meter a percentage."""
    if not eager.peaks:
        return "60%"
    static = resident(eager.model, eager.optimizer) + _bytes(workload.batch(0))
    return static + int(SHARE * (eager.peaks[-1] - static))


def _bytes(batch: dict[str, torch.Tensor]) -> int:
    return sum(aligned(t.untyped_storage().nbytes()) for t in batch.values())


def _planner(line: Line, options: dict[str, Any]) -> Callable[[Graph, int | None], Plan]:
    def decide(graph: Graph, budget: int | None) -> Plan:
        line.step_time = sum(op.time for op in graph.ops)
        line.say("planning", always=True)
        return default.plan(graph, budget, default.Options(**options), line.planning)

    return decide


def _train(eager: Trainer, ours: Trainer, steps: int, line: Line) -> None:
    for k in range(SETTLE):
        line.say(f"within the budget, step {k + 1}", always=True)
        ours.step(k)
    for k in range(SETTLE, steps):
        eager.step(k)
        ours.step(k)
        line.say(
            f"step {k + 1} of {steps}, loss {float(ours.losses[-1]):.3f}, eager {float(eager.losses[-1]):.3f}"
        )


def _compared(workload: Workload, eager: Trainer, ours: Trainer, steps: int, fit_seconds: float) -> Run:
    within = ours.within
    if within is None:
        raise Unsupported("a trial", "it compares eager with a planned step")
    plan = within.plan
    different = differences(_tensors(eager), _tensors(ours))
    times = statistics.median(eager.seconds[SETTLE:]), statistics.median(ours.seconds[SETTLE:])
    return Run(
        model=workload.key,
        title=workload.title,
        budget=plan.budget or plan.peak,
        static=plan.static,
        eager_peak=max(eager.peaks[1:], default=None),
        planned_peak=plan.peak,
        measured_peak=max(ours.peaks[1:], default=None),
        unplanned_peak=plan.peak_before,
        lower_bound=plan.lower_bound,
        arena=plan.arena,
        misses=within.last.misses if within.last else None,
        identical=not different,
        different=different,
        steps=steps,
        losses=[float(loss) for loss in ours.losses],
        evictions=plan.count("recompute"),
        moved=plan.moved,
        time_ratio=times[1] / times[0],
        eager_seconds=times[0],
        seconds=times[1],
        plan_seconds=plan.seconds,
        fit_seconds=fit_seconds,
        parameters=sum(p.numel() for p in ours.model.parameters()),
        notes=list(within.notes),
    )


def _tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What has to be bit-identical: losses, parameters, buffers, optimizer state, random state."""
    model = trainer.model
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return tensors_by_name(trainer.losses, parameters, buffers, trainer.optimizer, [trainer.random])
