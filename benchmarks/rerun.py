"""What it costs that a step's Python code runs in every step, on stand-ins that compute nothing.

    python benchmarks/rerun.py [--steps N] [--write]

The demonstration's models under `fit`, within nothing but the order. Of each step the part is timed that runs the
code, compares what it asks for and finds the tensors; the rest is the step's ops. ``schedule``: a number of the code
changes in every step (the probability of every dropout, or the loss's weight where the model has none). Eager steps
take turns with ours. Times are medians; ``--write`` puts the table into docs/training.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import torch

import tightship
from tightship.demo import models
from tightship.demo.models import Workload

PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"
BEGIN, END = "<!-- begin: benchmarks/rerun.py -->", "<!-- end: benchmarks/rerun.py -->"
HEAD = (
    "model",
    "functions asked",
    "the code, ms",
    "share of the step",
    "step over eager",
    "with a schedule, ms",
    "share",
)
MARKS = ("---", "---:", "---:", "---:", "---:", "---:", "---:")


class Timed:
    """A fitted step whose first part is timed."""

    def __init__(self, work: Workload) -> None:
        self.model, self.weight = work.make(), 1.0
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.step: Any = tightship.fit(
            self.model,
            lambda model, batch: self.weight * model(**batch).loss,
            optimizer,
            work.batch(0),
            seconds=1.0,
        )
        self.code: list[float] = []
        asked = self.step._asked

        def timed(batch: Any) -> Any:
            began = time.perf_counter()
            found = asked(batch)
            self.code.append(time.perf_counter() - began)
            return found

        self.step._asked = timed

    @property
    def functions(self) -> int:
        return len(self.step._latest.traces[0].calls)

    def change(self, k: int) -> None:
        """Changes a number of the code."""
        drops = [m for m in self.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        for m in drops:
            m.p = 0.1 + 0.001 * (k + 1)
        if not drops:
            self.weight = 1.0 + 0.01 * (k + 1)


def row(work: Workload, steps: int) -> tuple[str, ...]:
    ours, twin = Timed(work), work.make()
    optimizer = torch.optim.AdamW(twin.parameters())
    whole: dict[str, list[float]] = {"fit": [], "eager": [], "schedule": []}
    code: dict[str, list[float]] = {"fit": [], "schedule": []}

    def eager(batch: Any) -> None:
        optimizer.zero_grad()
        twin(**batch).loss.backward()
        optimizer.step()

    for k in range(steps + 2):
        for kind in ("fit", "eager", "schedule"):
            if kind == "schedule":
                ours.change(k)
            began = time.perf_counter()
            eager(work.batch(k)) if kind == "eager" else ours.step(work.batch(k))
            if k >= 2:
                whole[kind].append(time.perf_counter() - began)
                if kind != "eager":
                    code[kind].append(ours.code[-1])
    middle = {k: statistics.median(v) for k, v in whole.items()}
    asked = {k: statistics.median(v) for k, v in code.items()}
    return (
        work.title, str(ours.functions), f"{1e3 * asked['fit']:.1f}", f"{100 * asked['fit'] / middle['fit']:.1f} %",
        f"{middle['fit'] / middle['eager']:.2f}", f"{1e3 * asked['schedule']:.1f}",
        f"{100 * asked['schedule'] / middle['schedule']:.1f} %",
    )  # fmt: skip


def rows(steps: int) -> Iterator[tuple[str, ...]]:
    for work in (models.gpt2(), models.resnet50()):
        yield row(work, steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25, help="steps of each kind")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    args = parser.parse_args()
    text = pages.table(HEAD, MARKS, rows(args.steps))
    said = (
        f"{time.strftime('%Y-%m-%d')}; {platform.machine()}, {torch.get_num_threads()} threads for ops; PyTorch "
        f"{torch.__version__}; {args.steps} steps each, in turns; `python benchmarks/rerun.py`."
    )
    print(f"{said}\n\n{text}")
    if args.write:
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{text}")


if __name__ == "__main__":
    main()
