"""Plans that copy out: what their steps take beside what was planned.

    python benchmarks/copies.py [--steps N] [--threads N] [--models bert,…] [--seconds S] [--write]

For each model and budget one plan with everything allowed that gives back the same bits but drawing again
(recompute, compress, offload), run in turns with a plan that keeps everything and with the ordinary training loop.
*Planned* is the plan's time over that of keeping everything, by the figures measured here before; *run* is the same
of the clock, median and fastest step of each. ``--write`` puts the table into docs/training.md. Takes four minutes.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pages
import tightship
from tightship.demo import models
from tightship.execute.interpreter import PeakMismatch

ALLOW = "recompute,compress,offload"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"
BEGIN, END = "<!-- begin: benchmarks/copies.py -->", "<!-- end: benchmarks/copies.py -->"
HEAD = (
    "model",
    "budget",
    "copies out",
    "run again",
    "packed",
    "planned",
    "run, median",
    "fastest",
    "over eager",
)
MARKS = ("---", *["---:"] * 8)


@dataclass(frozen=True)
class Case:
    title: str
    make: Callable[[], tuple[torch.nn.Module, Any, Any]]  # model, loss, batch
    budgets: tuple[str, ...]


def perceptron() -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    x = torch.randn(2048, 512)
    return torch.nn.Sequential(*layers), lambda model, batch: model(batch).square().mean(), x


def transformer(workload: models.Workload) -> tuple[torch.nn.Module, Any, Any]:
    return workload.make(), None, workload.batch(0)


def bert(**sizes: int) -> tuple[torch.nn.Module, Any, Any]:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.randint(0, 512, (8, 64))
    return transformers.BertForMaskedLM(config).train(), None, {"input_ids": ids, "labels": ids}


CASES = {
    "bert": Case("BERT with dropout, 3 layers, width 64", bert, ("60%", "35%", "25%")),
    "perceptron": Case("perceptron, 6 layers, tensors of 4 MiB", perceptron, ("70%", "55%", "45%")),
    "gpt2": Case(
        "GPT-2, 6 layers, width 256",
        lambda: transformer(models.gpt2(layers=6, width=256, heads=4, length=128, batch=8)),
        ("60%", "40%", "25%"),
    ),
}


def eager(model: torch.nn.Module, loss_fn: Any, batch: Any) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = model(**batch).loss if loss_fn is None else loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def planned(case: Case, budget: str | None, seconds: float) -> Any:
    model, loss_fn, batch = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = tightship.fit(
        model, loss_fn, optimizer, batch, budget, allow=ALLOW, seconds=seconds, folder=Path.cwd()
    )
    return step, functools.partial(step, batch)


def measured(case: Case, steps: int, seconds: float, console: Console) -> list[tuple[str, ...]]:
    runs: dict[str, Callable[[], object]] = {}
    made: dict[str, Any] = {}
    runs["eager"] = eager(*case.make())
    _, runs["keep"] = planned(case, None, seconds)
    for budget in case.budgets:
        try:
            made[budget], runs[budget] = planned(case, budget, seconds)
        except tightship.Infeasible as error:
            console.print(f"  {case.title} at {budget}: {error}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(steps + 3):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if k >= 3:
                times[name].append(time.perf_counter() - began)
    middle, least = ({name: f(t) for name, t in times.items()} for f in (statistics.median, min))
    console.print(f"  eager {middle['eager'] * 1e3:.1f} ms, keeping everything {middle['keep'] * 1e3:.1f} ms")
    rows = []
    for budget, step in made.items():
        plan = step.plan
        counts = [str(plan.count(kind)) for kind in ("offload", "recompute", "compress")]
        figures = (
            plan.time / plan.time_before,
            middle[budget] / middle["keep"],
            least[budget] / least["keep"],
            middle[budget] / middle["eager"],
        )
        rows.append((case.title, f"{budget[:-1]} %", *counts, *(f"{f:.2f}" for f in figures)))
        console.print("  " + " | ".join(rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of search for each plan")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("error", PeakMismatch)
    console, rows = Console(), []
    for name in options.models.split(","):
        rows += measured(CASES[name], options.steps, options.seconds, console)
    if options.write:
        table = pages.table(HEAD, MARKS, rows)
        where = f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} of them for ops"
        said = (
            f"{time.strftime('%Y-%m-%d')}; {where}; PyTorch {torch.__version__}; {options.steps} steps each, in "
            f"turns; `python benchmarks/copies.py`."
        )
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{table}")


if __name__ == "__main__":
    main()
