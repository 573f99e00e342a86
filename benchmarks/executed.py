"""Peaks simulated and executed: the forward and backward pass of each model, run op by op on this machine.

Beside the plan stand two ways of PyTorch's own, run eagerly under the same meter at the allocator: everything kept,
and torch.utils.checkpoint around every numbered module. Each is simulated on the graph that was captured and profiled
on this machine; the plan is for the peak that checkpoints really took, and may draw dropout again, as they do. A part
of budget.py: ``--only executed``.
"""

from __future__ import annotations

import datetime
import functools
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from torch.utils.checkpoint import checkpoint

from tightship import sources
from tightship.baselines import checkpoint as blocks
from tightship.errors import Infeasible
from tightship.execute.allocator import Meter
from tightship.execute.interpreter import Executor
from tightship.execute.prepared import Binding
from tightship.frontends.torch.structure import flatten
from tightship.planners import default
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.frontier import others
from tightship.simulate import baseline, replay
from tightship.units import format_bytes

__all__ = ["about", "table"]

Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]

_HEAD = [
    "| model | eager: simulated | measured | checkpoint per block: simulated | measured | extra time | "
    "plan for that peak: planned | measured | extra time |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
]


def about() -> str:
    return (
        f"{datetime.date.today()}; {platform.machine()}, PyTorch {torch.__version__}; extra times are simulated, "
        "from ops measured one by one; recomputation only."
    )


def table(models: Mapping[str, tuple[str, Callable[[], Made]]], seconds: float, console: Console) -> str:
    """Markdown: a row for each model."""
    lines = [*_HEAD]
    for name, (title, make) in models.items():
        console.print(f"executed: {name}")
        lines.append(f"| {title} | {' | '.join(_row(make, seconds))} |")
    return "\n".join(lines) + "\n"


def _row(make: Callable[[], Made], seconds: float) -> list[str]:
    torch.manual_seed(0)
    model, blank = make()
    sample = {
        k: torch.zeros_like(x) if x.dtype == torch.long else torch.randn_like(x) for k, x in blank.items()
    }
    program = sources.ModelStep(model, sample).program()
    graph = program.graph
    given = EvictionProblem(graph, tuple(range(len(graph.ops))))
    simulated = replay(graph, baseline(graph)).peak
    per_block = next((o for o in others(given, {}) if o.name == "per block"), None)
    eager = graph.static_bytes + _rise(model, sample)
    cells = [format_bytes(simulated), format_bytes(eager)]
    budget = _checkpointed(model, sample, graph.static_bytes) if per_block is not None else eager // 2
    if per_block is None:
        cells += ["", "", ""]
    else:
        once = replay(graph, baseline(graph)).time
        extra = f"{100 * (per_block.time / once - 1):+.1f} %"
        cells += [format_bytes(per_block.peak), format_bytes(budget), extra]
    return [*cells, *_ours(program, model, sample, budget, seconds)]


def _ours(
    program: Any, model: torch.nn.Module, sample: dict[str, torch.Tensor], budget: int, seconds: float
) -> list[str]:
    """A plan within the budget, run once: planned and measured peak, extra time."""
    o = default.Options(hand_out=False, seconds=seconds)
    try:
        plan = default.plan(program.graph, budget, o)
    except Infeasible as no:
        return [f"{format_bytes(no.best_peak)} at best", "none found", ""]
    executor = Executor(program, plan, strict=True, hand_out=False)
    executor.run(Binding(program, model, None).tensors(flatten(sample)))
    measured = executor.last.measured_peak
    extra = f"{100 * (plan.time / plan.time_before - 1):+.1f} %"
    return [
        format_bytes(plan.peak),
        format_bytes(measured) + " (as planned)" * (measured == plan.peak),
        extra,
    ]


def _checkpointed(model: torch.nn.Module, sample: dict[str, torch.Tensor], static: int) -> int:
    """The peak with torch.utils.checkpoint around every numbered module."""
    wrapped = [m for name, m in model.named_modules() if name and blocks.block_of(name, 1) == name]
    for module in wrapped:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    try:
        return static + _rise(model, sample)
    finally:
        for module in wrapped:
            del module.forward


def _rise(model: torch.nn.Module, sample: dict[str, torch.Tensor]) -> int:
    """How far one forward and backward pass in eager rises above what was there."""
    model.train()
    with Meter() as meter:
        out = model(**sample)
        loss = out if isinstance(out, torch.Tensor) else out.get("loss", None)
        (out.sum() if loss is out else loss).backward()
    for p in model.parameters():
        p.grad = None
    return meter.peak
