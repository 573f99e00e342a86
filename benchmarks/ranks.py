"""One model on several ranks: bytes and time within budgets, replicated and sharded, beside DistributedDataParallel.

    python benchmarks/ranks.py [--ranks N] [--steps N] [--write]

A GPT of torch's own layers with dropout, on gloo. Peaks are those of rank 0, everything included; of
DistributedDataParallel's step that which all requests of its process reach together. Steps take turns with its steps,
and times are medians. A row says whether losses are bit-identical. ``--write`` puts the table into the page.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F

import tightship
from tightship.errors import Infeasible
from tightship.execute import allocator
from tightship.units import format_bytes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "distributed.md"
BEGIN, END = "<!-- begin: benchmarks/ranks.py -->", "<!-- end: benchmarks/ranks.py -->"
HEAD = ("parameters", "budget", "planned peak", "measured peak", "ops run again", "step over DDP's", "losses")
MARKS = ("---", "---:", "---:", "---:", "---:", "---:", "---")
BUDGETS = ("100%", "60%", "40%", "30%")
WIDTH, LAYERS, TOKENS, WORDS, ROWS = 128, 4, 128, 2000, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(LAYERS)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> Any:
        x = self.words(words) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: Any, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def ddp() -> Callable[[torch.Tensor], torch.Tensor]:
    model = Model()
    wrapped, optimizer = (
        nn.parallel.DistributedDataParallel(model),
        torch.optim.AdamW(model.parameters(), 1e-3),
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def row(budget: str, shard: bool, batches: list[torch.Tensor]) -> list[str]:
    """One row of the table, as this rank measures it."""
    head = ["sharded" if shard else "replicated", budget]
    model = Model()
    optimizer, how = torch.optim.AdamW(model.parameters(), 1e-3), tightship.DataParallel(shard=shard)
    try:
        step = tightship.fit(model, loss_of, optimizer, batches[0], budget, parallel=how, progress=False)
    except Infeasible as no:
        return [*head, f"none below {format_bytes(no.best_peak)} found", "", "", "", ""]
    other, losses = ddp(), []
    times: tuple[list[float], list[float]] = ([], [])
    for k, batch in enumerate(batches):
        for of, call in zip(times, (step, other), strict=True):
            torch.manual_seed(1000 * dist.get_rank() + k)
            start = time.perf_counter()
            losses.append(call(batch))
            of.append(time.perf_counter() - start)
    same = all(torch.equal(a, b) for a, b in zip(losses[::2], losses[1::2], strict=True))
    used, again = step.measure(), step.plan.count("recompute")
    over = statistics.median(times[0]) / statistics.median(times[1])
    peaks = [format_bytes(used[name] or 0) for name in ("planned_peak", "measured_peak")]
    return [*head, *peaks, str(again), f"{over:.2f}", "bit-identical" if same else "differ"]


def work(rank: int, ranks: int, port: int, steps: int, answer: str) -> None:
    torch.set_num_threads(1)
    allocator.load()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    drawn = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, WORDS, (ROWS, TOKENS), generator=drawn) for _ in range(steps)]
    with allocator.Meter() as meter:
        step = ddp()
        for batch in batches[:2]:
            step(batch)
    del step
    rows = [["DistributedDataParallel", "", "", format_bytes(meter.peak), "", "1.00", ""]]
    rows += [row(budget, shard, batches) for shard in (False, True) for budget in BUDGETS]
    if rank == 0:
        Path(answer).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--steps", type=int, default=7, help="steps of each kind")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder) / "rows.json")
        multiprocessing.spawn(work, (args.ranks, port, args.steps, answer), nprocs=args.ranks)
        rows = json.loads(Path(answer).read_text(encoding="utf-8"))
    said = (
        f"{time.strftime('%Y-%m-%d')}; {args.ranks} ranks of one thread each on {platform.machine()}; PyTorch "
        f"{torch.__version__}; {args.steps} steps, in turns; `python benchmarks/ranks.py`."
    )
    text = pages.table(HEAD, MARKS, rows)
    print(f"{said}\n\n{text}")
    if args.write:
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{text}")


if __name__ == "__main__":
    main()
