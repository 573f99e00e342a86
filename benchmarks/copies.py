"""Plans that copy, pack and run again: what their steps take beside what was planned.

    python benchmarks/copies.py [--steps N] [--threads N] [--models bert,…] [--seconds S] [--write]

For each model, each budget and each set of ways to leave memory one plan, run in turns with a plan that keeps
everything and with the ordinary training loop, which all have to equal bit by bit. *Planned* is the plan's time over
that of keeping everything, by what was measured here before; *run* is the same of the clock: the median and the
fastest step of each. ``--write`` puts the table into docs/training.md. Takes four minutes on a quiet machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
import torch
from rich.console import Console

import tightship
from tightship.demo import models
from tightship.demo.trial import SETTLE
from tightship.execute.interpreter import PeakMismatch
from tightship.units import format_bytes

ALL = "recompute, compress, offload"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"
BEGIN, END = "<!-- begin: benchmarks/copies.py -->", "<!-- end: benchmarks/copies.py -->"
HEAD = (
    "",
    "budget",
    "allowed",
    "run again",
    "packed",
    "copied out",
    "planned",
    "run, median",
    "fastest",
    "over eager",
)
MARKS = ("---", "---:", "---", *["---:"] * 7)


@dataclass(frozen=True)
class Case:
    title: str
    make: Callable[[], tuple[torch.nn.Module, Any, Any]]  # model, loss, batch
    budgets: tuple[str, ...]
    allowed: tuple[str, ...] = (ALL,)


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


ONCE = "recompute, random ops once"
WAYS = (ONCE, "recompute", "recompute, compress", ALL)
CASES = {
    "bert": Case("BERT with dropout, 3 layers, width 64", bert, ("50%", "35%", "25%"), WAYS),
    "perceptron": Case("perceptron, 6 layers, tensors of 4 MiB", perceptron, ("70%", "55%", "45%")),
    "gpt2": Case(
        "GPT-2, 6 layers, width 256",
        lambda: transformer(models.gpt2(layers=6, width=256, heads=4, length=128, batch=8)),
        ("60%", "40%", "25%"),
    ),
}


@dataclass(frozen=True)
class Run:
    model: torch.nn.Module
    step: Callable[[], object]


def eager(model: torch.nn.Module, loss_fn: Any, batch: Any) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = model(**batch).loss if loss_fn is None else loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Run(model, step)


def planned(case: Case, budget: str | None, allow: str, seconds: float, cache: str) -> tuple[Any, Run]:
    model, loss_fn, batch = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = tightship.fit(
        model,
        loss_fn,
        optimizer,
        batch,
        budget,
        allow=allow.partition(",")[0] if allow == ONCE else allow.replace(" ", ""),
        redraw=allow != ONCE,
        seconds=seconds,
        folder=Path.cwd(),
        cache=cache,
    )
    return step.plan, Run(model, functools.partial(step, batch))


def measured(case: Case, steps: int, seconds: float, cache: str, console: Console) -> list[tuple[str, ...]]:
    runs: dict[Any, Run] = {"eager": eager(*case.make())}
    _, runs["keep"] = planned(case, None, "recompute", seconds, cache)
    plans: dict[tuple[str, str], Any] = {}
    for way in [(budget, allow) for allow in case.allowed for budget in case.budgets]:
        try:
            plans[way], runs[way] = planned(case, *way, seconds, cache)
        except tightship.Infeasible as error:
            plans[way] = error
    middle, least = timed(runs, steps)
    console.print(
        f"{case.title}: eager {middle['eager'] * 1e3:.1f} ms, all kept {middle['keep'] * 1e3:.1f} ms"
    )
    rows = []
    for way, plan in plans.items():
        cells = ["", "", "", f"not reached ({format_bytes(plan.best_peak)})", "", "", ""] if way not in runs else [
            *(str(plan.count(kind)) for kind in ("recompute", "compress", "offload")),
            f"{plan.time / plan.time_before:.2f}",
            f"{middle[way] / middle['keep']:.2f}",
            f"{least[way] / least['keep']:.2f}",
            f"{middle[way] / middle['eager']:.2f}",
        ]  # fmt: skip
        rows.append((case.title, f"{way[0][:-1]} %", way[1], *cells))
        print(*rows[-1], sep=" | ")
    return rows


def timed(runs: dict[Any, Run], steps: int) -> tuple[dict[Any, float], dict[Any, float]]:
    """Seconds of the median and of the fastest step of each, in turns, after a few to settle. Ends the program where
    one of them does not train to the same bits."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for k in range(steps + SETTLE):
        for name, run in runs.items():
            torch.manual_seed(k)
            began = time.perf_counter()
            run.step()
            if k >= SETTLE:
                times[name].append(time.perf_counter() - began)
    expected = list(runs["eager"].model.parameters())
    for name, run in runs.items():
        if not all(map(torch.equal, expected, run.model.parameters())):
            raise SystemExit(f"{name}: other parameters than by the ordinary loop")
    return {n: statistics.median(t) for n, t in times.items()}, {n: min(t) for n, t in times.items()}


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
    console = Console()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as cache:  # measured now, as the steps are
        for name in options.models.split(","):
            rows += measured(CASES[name], options.steps, options.seconds, cache, console)
    if options.write:
        table = pages.table(HEAD, MARKS, rows)
        load = f"load {os.getloadavg()[0]:.0f}"
        where = f"{platform.machine()}, {os.cpu_count()} cores ({load}), {options.threads} for ops"
        said = (
            f"{time.strftime('%Y-%m-%d')}; {where}; PyTorch {torch.__version__}; {options.steps} steps each, in "
            f"turns; `python benchmarks/copies.py`."
        )
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{table}")


if __name__ == "__main__":
    main()
