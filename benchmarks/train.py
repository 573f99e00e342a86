"""Training within a budget: tightship against what PyTorch has for it, in one interleaved run.

    python benchmarks/train.py [--quick] [--steps N] [--threads N] [--models gpt2,…] [--write]

Everything runs on the CPU, op by op, from the same weights and random state on the same batches:

    eager         the ordinary training loop
    per block     torch.utils.checkpoint around every block (not reentrant)
    torch B       torch.compile(backend="aot_eager") with torch's activation_memory_budget = B, a share of what is
                  saved between forward and backward
    tightship P   tightship.fit within the static set and P % of what eager needs beyond it

Peaks are those of one meter at the allocator, from before a step's batch is made until the step is over; steps of
all take turns, and times are medians: of processor time on one thread, which a busy machine disturbs less, else of
the clock. ``--write`` puts the tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pages
import torch
from rich.console import Console
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import tightship
from tightship.demo import models
from tightship.demo.models import Workload
from tightship.demo.trial import SETTLE, Trainer
from tightship.execute.interpreter import PeakMismatch
from tightship.units import format_bytes, format_seconds

SHARES = (80, 70, 60, 50, 40, 30)
TORCH = (1.0, 0.75, 0.5, 0.25, 0.0)
BLOCKS = {"GPT2Block", "ResNetBottleNeckLayer", "ViTLayer", "BertLayer"}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benchmarks/train.py -->", "<!-- end: benchmarks/train.py -->"

FULL = {"gpt2": models.gpt2, "resnet50": models.resnet50, "vit": models.vit, "bert": models.bert}
SMALL: dict[str, Callable[[], Workload]] = {
    "gpt2": functools.partial(models.gpt2, layers=3, width=32, heads=2, length=32, batch=4),
    "resnet50": functools.partial(models.resnet50, depths=(4, 4), widths=(64, 128), size=32, batch=4),
    "vit": functools.partial(models.vit, layers=3, width=32, heads=2, size=32, batch=4),
    "bert": functools.partial(models.bert, layers=3, width=32, heads=2, length=32, batch=4),
}


@dataclass
class Row:
    """One way to train a model: bytes of its peak, seconds of a step, and what it took to get there."""

    name: str
    budget: int | None = None
    peak: int | None = None
    planned: int | None = None
    seconds: float = 0.0
    ratio: float = 0.0
    prepared: float = 0.0
    same: bool = False
    said: str = ""


@dataclass
class Table:
    title: str
    static: int
    rows: list[Row]


def per_block(model: torch.nn.Module) -> torch.nn.Module:
    """Checkpoints every block, the ordinary way: for ResNet, too, for which transformers has no switch."""
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return model


def with_torch_budget(model: torch.nn.Module, share: float) -> torch.nn.Module:
    """Compiled by aot_eager. A backend of its own, or dynamo would take one share's code for all."""

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return aot_eager(gm, inputs)

    model.compile(backend=backend)
    return model


def others(workload: Workload) -> Iterator[tuple[Row, Callable[[], Trainer]]]:
    def trainer(change: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], Trainer]:
        return lambda: Trainer(change(workload.make()), workload)

    yield Row("eager"), trainer(lambda model: model)
    yield Row("per block"), trainer(per_block)
    for share in TORCH:
        yield Row(f"torch {share:g}"), trainer(functools.partial(with_torch_budget, share=share))


def ours(workload: Workload, row: Row, options: dict[str, float]) -> Trainer:
    trainer = Trainer(workload.make(), workload)
    model, optimizer = trainer.model, trainer.optimizer
    trainer.within = tightship.fit(model, None, optimizer, workload.batch(0), row.budget, **options)
    row.planned = trainer.within.plan.peak
    return trainer


def started(row: Row, make: Callable[[], Trainer]) -> Trainer | None:
    """A trainer that has settled; None, and why, if it cannot be had."""
    began = time.perf_counter()
    try:
        trainer = make()
        for k in range(SETTLE):
            trainer.step(k)
    except tightship.Infeasible as error:
        row.said = f"no plan found (best {format_bytes(error.best_peak)})"
        return None
    except Exception as error:  # another library's failure is a result here
        row.said = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        return None
    row.prepared = time.perf_counter() - began - trainer.seconds[-1] * SETTLE
    return trainer


def measured(workload: Workload, steps: int, options: dict[str, float], console: Console) -> Table:
    running: list[tuple[Row, Trainer]] = []
    rows: list[Row] = []

    def start(row: Row, make: Callable[[], Trainer]) -> None:
        console.print(f"  {row.name} …", end=" ")
        rows.append(row)
        trainer = started(row, make)
        if trainer is not None:
            running.append((row, trainer))
        console.print(row.said or f"ready in {format_seconds(row.prepared)}")

    for row, make in others(workload):
        start(row, make)
    eager = running[0][1]
    static = _static(eager, workload)
    for share in SHARES:
        budget = static + share * (eager.peaks[-1] - static) // 100
        row = Row(f"tightship {share} %", budget)
        start(row, functools.partial(ours, workload, row, options))
    for k in range(SETTLE, steps):
        for _, trainer in running:
            trainer.step(k)
        console.print(f"  step {k + 1} of {steps}")
    for row, trainer in running:
        row.peak = max(trainer.peaks[1:])
        row.seconds = statistics.median(_times(trainer))
        row.ratio = row.seconds / statistics.median(_times(eager))
        row.same = all(torch.equal(a, b) for a, b in zip(trainer.losses, eager.losses, strict=True))
    return Table(workload.title, static, rows)


def _times(trainer: Trainer) -> list[float]:
    """Seconds of the steps that count: of the processor on one thread, where that says the same and a busy
    machine disturbs it less, else of the clock."""
    return (trainer.processor if torch.get_num_threads() == 1 else trainer.seconds)[SETTLE:]


def _static(trainer: Trainer, workload: Workload) -> int:
    from tightship.demo.trial import resident
    from tightship.graph import aligned

    batch = sum(aligned(t.untyped_storage().nbytes()) for t in workload.batch(0).values())
    return resident(trainer.model, trainer.optimizer) + batch


# --- tables ---


def markdown(table: Table, how: str = "") -> str:
    eager = table.rows[0]
    lines = [
        f"### {table.title}",
        "",
        f"Eager: peak {format_bytes(eager.peak or 0)}, of which the static set is {format_bytes(table.static)}; "
        f"a step takes {format_seconds(eager.seconds)}. {how}".strip(),
        "",
        "| | budget | measured peak | beyond static | step time | prepared in | losses | fastest other that fits |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in table.rows:
        budget = format_bytes(row.budget) if row.budget is not None else ""
        if row.peak is None:
            lines.append(f"| {row.name} | {budget} | {row.said} | | | | | {_rival(row, table)} |")
            continue
        beyond = 100 * (row.peak - table.static) / max(1, (eager.peak or 0) - table.static)
        exact = " (as planned)" if row.planned == row.peak else " (NOT as planned)" if row.planned else ""
        same = "eager's" if row.same else "differ"
        lines.append(
            f"| {row.name} | {budget} | {format_bytes(row.peak)}{exact} | {beyond:.0f} % | {row.ratio:.2f}× | "
            f"{format_seconds(row.prepared)} | {same} | {_rival(row, table)} |"
        )
    return "\n".join(lines) + "\n"


def _rival(row: Row, table: Table) -> str:
    """The fastest of the others whose measured peak is within a budget of ours."""
    if row.budget is None:
        return ""
    fits = [r for r in table.rows if r.budget is None and r.peak is not None and r.peak <= row.budget]
    best = min(fits, key=lambda r: r.ratio, default=None)
    return f"{best.name}, {best.ratio:.2f}×" if best else "none"


def about(steps: int) -> str:
    one = torch.get_num_threads() == 1
    return (
        f"PyTorch {torch.__version__}, {'one thread' if one else f'{torch.get_num_threads()} threads'}, "
        f"{platform.machine()}, medians of {steps - SETTLE} steps, all ways in turns; AdamW. Step times are "
        f"seconds of the {'processor' if one else 'clock'}."
    )


def write(text: str) -> None:
    """Put one model's table into the page, in the place of its last one; the others stay."""
    kept = pages.between(PAGE, BEGIN, END)[1]
    sections = [f"### {s.strip()}\n" for s in kept.split("### ")[1:]]
    title = text.partition("\n")[0]
    if title not in (s.partition("\n")[0] for s in sections):
        sections.append(text)
    sections = [text if s.partition("\n")[0] == title else s for s in sections]
    pages.put(PAGE, BEGIN, END, "\n".join(sections))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, to see that it runs")
    parser.add_argument("--steps", type=int, help="steps of each way (default: 8; quick: 5)")
    parser.add_argument("--models", default=",".join(FULL), help="which, by name, with commas")
    parser.add_argument("--threads", type=int, help="of PyTorch (default: its own choice)")
    parser.add_argument(
        "--write", action="store_true", help=f"put the tables into {PAGE.parent.name}/{PAGE.name}"
    )
    chosen = parser.parse_args()
    steps = chosen.steps or (5 if chosen.quick else 8)
    made = SMALL if chosen.quick else FULL
    options = {"work": 500_000, "seconds": 1.0} if chosen.quick else {}
    torch.set_num_threads(chosen.threads or torch.get_num_threads())
    warnings.simplefilter("ignore", PeakMismatch)  # a mismatch is in the table
    console = Console(stderr=True, highlight=False)
    for name in chosen.models.split(","):
        workload = made[name]()
        console.print(workload.title, style="bold")
        torch._dynamo.reset()
        text = markdown(measured(workload, steps, options, console), about(steps))
        print(text)
        if chosen.write:
            write(text)


if __name__ == "__main__":
    main()
