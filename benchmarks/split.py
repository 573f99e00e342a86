"""Language models below the floor of whole logits: the least budget that is reached, and time, against slices.

    python benchmarks/split.py [--quick] [--slices 2,8,…] [--steps N] [--batch N] [--peers] [--write]

GPT-2 (random weights, AdamW) trains within the least budget that a plan was found for, with the logits' chain in so
many slices. Planned and measured bytes are compared; the loss and the parameters after the first step with a float64
reference, beside eager's. The reference is of one run of the same model in double precision. ``--peers``: instead of
that, the same training step within budgets, in eager, with the head by hand and by `linear_cross_entropy` in slices,
and compiled with Inductor's chunker; the most bytes of all live tensors, parameters and state included, are measured
in the same way for all. ``--write`` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
import torch
import transformers
from rich.console import Console
from torch.utils.checkpoint import checkpoint

from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible
from tightship.execute import split as deciding
from tightship.execute.allocator import Meter
from tightship.execute.fit import fit
from tightship.execute.profile import profile
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.split import split
from tightship.frontends.torch.split_chains import chains
from tightship.graph import Graph
from tightship.planners import default

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benchmarks/split.py -->", "<!-- end: benchmarks/split.py -->"
PEERS = "<!-- begin: benchmarks/split.py --peers -->", "<!-- end: benchmarks/split.py --peers -->"
ALLOW = f"recompute,{default.ROUNDING}"
MIB = 2**20
CONFIG = {"n_layer": 6, "n_embd": 256, "n_head": 8, "vocab_size": 50257, "n_positions": 512}
QUICK = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 5000, "n_positions": 64}
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Row:
    """Bytes, the median of a step's seconds; errors are distances from the reference, of the parameters by norm."""

    slices: str
    bound: int
    planned: int
    measured: int
    seconds: float
    loss_error: float
    error: float


def model_and_batch(quick: bool, rows: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = QUICK if quick else CONFIG
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop))
    ids = torch.randint(0, sizes["vocab_size"], (rows or (4 if quick else 8), sizes["n_positions"]))
    return model, {"input_ids": ids, "labels": ids}


def sgd(model: Any) -> torch.optim.Optimizer:
    """Errors of gradients show in one step of it as they are; AdamW's first step hides their size."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def stepped(model: Any, batch: Any) -> tuple[float, list[torch.Tensor]]:
    """The loss and the parameters after one step in eager."""
    loss = model(**batch).loss
    loss.backward()
    sgd(model).step()
    return float(loss.detach()), [p.detach() for p in model.parameters()]


def wide_step(model: Any, batch: Any) -> tuple[float, list[torch.Tensor]]:
    """The same all in float64: transformers rounds logits to float32 by itself."""
    logits, labels = model.double()(input_ids=batch["input_ids"]).logits, batch["labels"]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    sgd(model).step()
    return float(loss.detach()), [p.detach() for p in model.parameters()]


def distance(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    return sum(float((a.double() - b).square().sum()) for a, b in zip(found, reference, strict=True)) ** 0.5


def least(graph: Graph) -> int:
    """The least budget that a short search reaches, everything placed."""
    o = default.Options(seconds=10.0, work=20_000_000)
    bound = int(lower_bound(graph))
    try:
        return default.plan(graph, bound, o).peak
    except Infeasible as no:
        return int(no.placed or no.best_peak)


def fitted(model: Any, batch: Any, budget: int, optimizer: Any) -> Any:
    for _ in range(6):
        try:
            return fit(model, None, optimizer(model), batch, budget, allow=ALLOW, seconds=10.0, strict=True)
        except Infeasible:
            budget = budget * 103 // 100
    raise SystemExit(f"no plan near {budget / MIB:.0f} MiB")


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def measured(model: Any, batch: Any, count: int, steps: int, reference: Any) -> Row:
    deciding.SLICES = (count,)
    captured = capture_step(model, None, adamw(model), batch)
    program = profile(split(captured, {chains(captured)[0]: count}))
    bound = int(lower_bound(program.graph))
    budget = least(program.graph)
    step = fitted(copy.deepcopy(model), batch, budget, adamw)
    times = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - began)
    numbers = step.measure()
    one = copy.deepcopy(model)
    loss = float(fitted(one, batch, budget, sgd)(batch).detach())
    error = distance([p.detach() for p in one.parameters()], reference[1])
    peak = numbers["measured_peak"] or 0
    seconds = statistics.median(times[1:])
    return Row(
        str(count), bound, numbers["planned_peak"] or 0, peak, seconds, abs(loss - reference[0]), error
    )


def eager(model: Any, batch: Any, steps: int, reference: Any) -> Row:
    captured = profile(capture_step(model, None, adamw(model), batch))
    loss, parameters = stepped(copy.deepcopy(model), batch)
    twin = copy.deepcopy(model)
    optimizer, times = adamw(twin), []
    for _ in range(steps + 1):
        began = time.perf_counter()
        twin(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    bound, floor = int(lower_bound(captured.graph)), least(captured.graph)
    error = distance(parameters, reference[1])
    seconds = statistics.median(times[1:])
    return Row("whole (time: eager)", bound, floor, 0, seconds, abs(loss - reference[0]), error)


def markdown(rows: list[Row], what: str) -> str:
    head = (
        "slices",
        "bound",
        "least planned",
        "measured",
        "seconds a step",
        "loss: error",
        "parameters: error",
    )
    marks = ("---:", *["---:"] * 6)
    cells = [
        (
            r.slices, *(f"{n / MIB:.1f}" if n else "" for n in (r.bound, r.planned, r.measured)),
            f"{r.seconds:.2f}", f"{r.loss_error:.1e}", f"{r.error:.2e}",
        )
        for r in rows
    ]  # fmt: skip
    return f"{datetime.date.today()}; {what}; MiB.\n\n{pages.table(head, marks, cells)}\n"


# --- beside other ways ---


def chunked(slices: int) -> Any:
    """The loss with the head's part made again for each slice in the backward pass: as one writes it by hand."""

    def part(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")

    def loss(model: Any, batch: Any) -> torch.Tensor:
        hidden, labels, weight = head_of(model, batch)
        rows = zip(hidden.chunk(slices), labels.chunk(slices), strict=True)
        parts = [checkpoint(part, h, weight, y, use_reentrant=False) for h, y in rows]
        return torch.stack(parts).sum() / len(labels)

    return loss


def linear(slices: int) -> Any:
    """The loss by torch's own op, which makes gradients in the forward pass."""
    made: Any = torch.nn

    def loss(model: Any, batch: Any) -> Any:
        hidden, labels, weight = head_of(model, batch)
        options = made.LinearCrossEntropyOptions(
            batch_chunk_size=-(-len(labels) // slices), chunking_method=None
        )
        return made.functional.linear_cross_entropy(hidden, weight, labels, options=options)

    return loss


def head_of(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = model.transformer(batch["input_ids"]).last_hidden_state[:, :-1]
    return hidden.flatten(0, 1), batch["labels"][:, 1:].flatten(), model.lm_head.weight


def whole(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def timed(run: Any, batch: Any, steps: int, level: int) -> tuple[int, float, float]:
    """The most bytes beyond ``level`` there were before, the median of a step's seconds, and the last loss; the
    first step, which compiles and makes the optimizer's state, is not counted."""
    run(batch)
    times, loss, most = [], 0.0, 0
    for _ in range(steps):
        with Meter() as meter:
            began = time.perf_counter()
            loss = float(run(batch).detach())
            times.append(time.perf_counter() - began)
        most = max(most, meter.peak)
    return level + most, statistics.median(times), loss


def trained(model: Any, loss_of: Any) -> Any:
    optimizer = adamw(model)

    def run(batch: Any) -> Any:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run


def peers(model: Any, batch: Any, counts: list[int], steps: int) -> list[tuple[str, ...]]:
    """Rows of peak, time and loss for each way; static bytes are parameters and both moments."""
    static = 3 * sum(p.numel() * p.itemsize for p in model.parameters())
    rows, losses = list[tuple[str, ...]](), list[float]()

    def row(way: str, run: Any) -> None:
        began = time.perf_counter()
        try:
            peak, seconds, loss = timed(run, batch, steps, static)
        except (RuntimeError, NotImplementedError) as error:
            rows.append((way, "", "", "", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"))
            return
        losses.append(loss)
        beyond = f"{(peak - static) / MIB:.1f}"
        rows.append((way, f"{peak / MIB:.1f}", beyond, f"{seconds:.2f}", f"{abs(loss - losses[0]):.1e}"))
        console.print(" | ".join(rows[-1]), f"({time.perf_counter() - began:.0f} s in all)")

    row("eager", trained(copy.deepcopy(model), whole))
    for count in counts:
        row(f"by hand, {count} slices", trained(copy.deepcopy(model), chunked(count)))
        if hasattr(torch.nn.functional, "linear_cross_entropy"):
            row(f"linear_cross_entropy, {count} slices", trained(copy.deepcopy(model), linear(count)))
    for count in counts:
        deciding.SLICES = (count,)
        one = copy.deepcopy(model)
        captured = capture_step(one, None, adamw(one), batch)
        floor = least(profile(split(captured, {chains(captured)[0]: count})).graph)
        row(f"tightship, {count} slices, least", fitted(one, batch, floor, adamw))
        roomy = fitted(copy.deepcopy(model), batch, floor * 5 // 4, adamw)
        row(f"tightship, {count} slices, least + 25 %", roomy)
    for count in (0, *counts[:1]):
        options = {"auto_chunker.enable": count > 0} | ({"auto_chunker.num_chunk": count} if count else {})
        compiled = torch.compile(whole, options=options)
        row(f"Inductor, {f'chunker, {count}' if count else 'whole'}", trained(copy.deepcopy(model), compiled))
    return rows


def beside(rows: list[tuple[str, ...]], what: str) -> str:
    head = ("way", "peak", "beyond the static set", "seconds a step", "loss: from eager's")
    return f"{datetime.date.today()}; {what}; MiB.\n\n{pages.table(head, ('---', *['---:'] * 4), rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--slices", default="2,4,8,16,32,64", help="how many, with commas (2,4,8,16,32,64)")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed (3)")
    parser.add_argument("--batch", type=int, default=0, help="sequences (8; 4 of the tiny model)")
    parser.add_argument("--peers", action="store_true", help="other ways to have the head in slices")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, batch = model_and_batch(chosen.quick, chosen.batch)
    if chosen.peers:
        counts = [int(n) for n in chosen.slices.split(",")]
        rows_beside = peers(model, batch, counts, chosen.steps)
        said = f"batch {len(batch['input_ids'])}, {torch.get_num_threads()} threads, median of {chosen.steps} steps"
        print(beside(rows_beside, said))
        if chosen.write:
            pages.put(PAGE, *PEERS, beside(rows_beside, said))
        return
    reference = wide_step(copy.deepcopy(model), batch)
    what = f"{torch.get_num_threads()} threads, median of {chosen.steps} steps"
    rows = [eager(model, batch, chosen.steps, reference)]
    for count in map(int, chosen.slices.split(",")):
        console.print(markdown(rows[-1:], what))
        rows.append(measured(model, batch, count, chosen.steps, reference))
    print(markdown(rows, what))
    if chosen.write:
        pages.put(PAGE, BEGIN, END, markdown(rows, what))


if __name__ == "__main__":
    main()
