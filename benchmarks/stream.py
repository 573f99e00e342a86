"""Streaming: a step with AdamW whose parameters and state do not fit, against eager, which has them in memory.

    python benchmarks/stream.py [--quick] [--steps N] [--threads N] [--shares 0.67,0.5] [--folder DIR] [--write]

GPT-2 of 12 layers, real width (``--quick``: width 128); the budget is a share of the static set, which is parameters
and both moments. Eager and the streamed step take turns on the same batches, and losses, parameters and moments are
compared bit by bit. AdamW is fused: the other needs two temporaries as large as the embedding. Bytes moved are those
that the plan's steps copy to and from the file, the bound is the longer of eager's step and of these bytes at the
bandwidths that were measured for the plan. ``--write`` puts the table into docs/streaming.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import torch
import transformers
from rich.console import Console

import tightship
from tightship.units import format_bytes, format_seconds

PAGE = Path(__file__).resolve().parent.parent / "docs" / "streaming.md"
BEGIN, END = "<!-- begin: benchmarks/stream.py -->", "<!-- end: benchmarks/stream.py -->"
HEAD = (
    "budget",
    "static set",
    "streamed",
    "planned peak",
    "measured",
    "moved a step",
    "eager",
    "bound",
    "streamed step",
    "bits",
)
MARKS = ("---:",) * (len(HEAD) - 1) + ("---",)


def loss_of(model: Any, batch: Any) -> Any:
    return model(input_ids=batch, labels=batch).loss


def moved(step: Any) -> tuple[int, float]:
    """Bytes that a step copies, and the seconds that takes at the measured bandwidths."""
    nbytes, seconds, graph = 0, 0.0, step.graph
    for s in step.plan.steps:
        if s.op >= 0 and graph.ops[s.op].target in ("tightship.fetch", "tightship.store"):
            op = graph.ops[s.op]
            value = op.outputs[0] if op.target == "tightship.fetch" else op.inputs[0]
            nbytes += graph.storages[graph.values[value].storage].size
            seconds += op.time
    return nbytes, seconds


def same(step: Any, ours: Any, theirs: Any) -> bool:
    (model, optimizer), (twin, other) = ours, theirs
    with step.gathered():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            rows = [(p, q), *((optimizer.state[p][k], other.state[q][k]) for k in other.state[q])]
            if not all(torch.equal(a, b) for a, b in rows):
                return False
    return True


def measured(options: argparse.Namespace, share: float) -> tuple[str, ...]:
    torch.manual_seed(0)
    width, words, length = (128, 512, 32) if options.quick else (768, 50257, 64)
    config = transformers.GPT2Config(
        n_layer=12, n_embd=width, n_head=4 if options.quick else 12, n_positions=length, vocab_size=words,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in (model, twin))
    static = 3 * sum(p.numel() * p.itemsize for p in model.parameters())
    batches = [torch.randint(0, words, (1, length)) for _ in range(options.steps)]
    step = tightship.fit(
        model,
        loss_of,
        optimizer,
        batches[0],
        int(share * static),
        allow="recompute,stream",
        folder=options.folder,
    )
    times: dict[str, list[float]] = {"eager": [], "streamed": []}
    bits = True
    for k, batch in enumerate(batches):
        torch.manual_seed(k)
        began = time.perf_counter()
        loss = loss_of(twin, batch)
        loss.backward()
        other.step()
        times["eager"].append(time.perf_counter() - began)
        other.zero_grad()
        torch.manual_seed(k)
        began = time.perf_counter()
        ours = step(batch)
        times["streamed"].append(time.perf_counter() - began)
        bits = bits and torch.equal(ours, loss.detach())
        del loss
    bits = bits and same(step, (model, optimizer), (twin, other))
    found, (nbytes, seconds) = step.measure(), moved(step)
    eager, streamed = (statistics.median(times[k][1:] or times[k]) for k in ("eager", "streamed"))
    streams = step._streams.nbytes
    return (
        f"{share:.0%}: {format_bytes(int(share * static))}", format_bytes(static), format_bytes(streams),
        f"{found['planned_peak']:,} B", f"{found['measured_peak']:,} B", format_bytes(nbytes), format_seconds(eager),
        format_seconds(max(eager, seconds)), format_seconds(streamed), "eager's" if bits else "OTHERS",
    )  # fmt: skip


def rows(options: argparse.Namespace, console: Console) -> Iterator[tuple[str, ...]]:
    for share in options.shares.split(","):
        row = measured(options, float(share))
        console.print(" | ".join(row))
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shares", default="0.5", help="of the static set, between commas")
    parser.add_argument("--folder", default=None, help="where the file without a name lies")
    parser.add_argument("--write", action="store_true", help="put the table into docs/streaming.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = pages.table(HEAD, MARKS, list(rows(options, Console(width=200))))
    if options.write:
        threads = f"{options.threads} thread{'s' * (options.threads > 1)}"
        note = f"{options.steps} steps each, {threads}; times of one machine among others' work."
        pages.put(PAGE, BEGIN, END, f"{found}\n\n{note}")


if __name__ == "__main__":
    main()
