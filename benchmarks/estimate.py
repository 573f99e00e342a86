"""What `tightship.estimate` says against what the allocator measures, with two other tools' answers beside it.

    python benchmarks/estimate.py [TABLE …] [--only TEXT] [--compiled | --large] [--results FILE] [--write]

Each row is a model of docs/compatibility.md with random weights, trained for two steps on the CPU by a plain loop:
forward pass, backward pass, AdamW, zero_grad. ``measured`` is the most bytes of all live blocks of torch's allocator,
rounded up to 64 each, beside parameters, buffers and batch, which are there before. Beside it, of the same loop: the
peak that ``torch.distributed._tools.mem_tracker`` reports while the loop really runs, and what ``accelerate
estimate-memory`` says of training with Adam, four times the largest of the model's sizes. Tables are those of the
modules ``compat_TABLE.py``; ``--write`` puts the page's table into docs/estimate.md. With ``--compiled`` the loop is
that of ``torch.compile(model)``, measured over two steps once everything is compiled, for the models of `COMPILED`.
With ``--large`` models of billions of parameters are estimated on the meta device, for what that takes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pages
import torch
from compat import Row, Training
from torch.utils._python_dispatch import TorchDispatchMode

import tightship
from tightship.errors import TightshipError
from tightship.execute.allocator import Meter
from tightship.execute.estimate import _training
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.structure import loss_function, tensor_leaves
from tightship.graph import aligned
from tightship.units import format_bytes

TABLES = ("language", "vision", "diffusion", "adapters")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "estimate.md"
BEGIN, END = "<!-- begin: benchmarks/estimate.py -->", "<!-- end: benchmarks/estimate.py -->"
COMPILED_MARKS = "<!-- begin: compiled estimates -->", "<!-- end: compiled estimates -->"
LARGE_MARKS = "<!-- begin: large estimates -->", "<!-- end: large estimates -->"
COMPILED = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "BertForSequenceClassification",
    "T5ForConditionalGeneration", "ViTForImageClassification", "CLIPModel", "resnet18", "UNet2DModel",
    "LoRA on Llama",
)  # fmt: skip
"""Models of the tables that are estimated as ``torch.compile`` makes them."""


def builds(table: str) -> Iterator[tuple[str, Callable[[], Training]]]:
    """The models of a table of docs/compatibility.md, by name."""
    for row in importlib.import_module(f"compat_{table}").rows():
        run = row.run if isinstance(row, Row) else None
        if isinstance(run, partial) and run.args and callable(run.args[0]):
            yield row.name, run.args[0]


def kept(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that modules have as plain attributes (a prompt's tokens of peft)."""
    todo = [
        x
        for m in model.modules()
        for k, x in vars(m).items()
        if k not in ("_parameters", "_buffers", "_modules")
    ]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (dict, list, tuple)):
            todo += x.values() if isinstance(x, dict) else x


class _Reads(TorchDispatchMode):
    """Takes down which storages are read."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[int] = set()

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keys.update(map(compat.storage_key, tensors_in((args, kwargs or {}))))
        return fn(*args, **(kwargs or {}))


def read_beside(training: Training, batch: Any) -> Iterator[torch.Tensor]:
    """Tensors that the loss has from where it was made (a scheduler's table), and reads."""
    cells = [c.cell_contents for c in getattr(training.loss_fn, "__closure__", None) or ()]
    held = [t for x in cells for t in tensors_in([x, *getattr(x, "__dict__", {}).values()])]
    if held:
        with torch.no_grad(), _Reads() as reads:
            loss_function(training.loss_fn, batch)(training.model, batch)
        yield from (t for t in held if compat.storage_key(t) in reads.keys)


def measured(training: Training, loop: Any, optimizer: Any) -> int:
    batch = training.batch(0)
    tensors = (
        *read_beside(training, batch),
        *training.model.parameters(),
        *training.model.buffers(),
        *tensor_leaves(batch),
        *kept(training.model),
    )
    homes = {compat.storage_key(t): t for t in tensors}
    static = sum(aligned(t.untyped_storage().nbytes()) for t in homes.values())
    held = None
    gc.collect()  # what others have left would lower the level when it ends
    with Meter() as meter:
        for _ in range(2):
            held = loop(training.model, batch, optimizer)
    del held
    return static + meter.peak


def measured_compiled(training: Training, loop: Any, optimizer: Any) -> int:
    """The most bytes of two steps of the compiled loop, once it is compiled."""
    model, batch = torch.compile(training.model), training.batch(0)
    held = None
    for _ in range(2):
        held = loop(model, batch, optimizer)
    states = [t for s in optimizer.state.values() for t in tensor_leaves(s)]
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    tensors = (
        *training.model.parameters(), *training.model.buffers(), *tensor_leaves(batch), *kept(training.model),
        *states, *gradients, *tensor_leaves(held),
    )  # fmt: skip
    homes = {compat.storage_key(t): aligned(t.untyped_storage().nbytes()) for t in tensors}
    del tensors, states, gradients
    gc.collect()
    with Meter() as meter:
        for _ in range(2):
            held = loop(model, batch, optimizer)
    return sum(homes.values()) + meter.peak


def by_mem_tracker(training: Training, loop: Any, optimizer: Any) -> int | None:
    from torch.distributed._tools.mem_tracker import MemTracker

    batch, tracker = training.batch(0), MemTracker()
    try:
        tracker.track_external(training.model, optimizer, *tensor_leaves(batch))
        with tracker:
            for _ in range(2):
                loop(training.model, batch, optimizer)
                tracker.reset_mod_stats()  # it asks for that between steps
        found = tracker.get_tracker_snapshot("peak")
    except Exception:  # it is a tool of torch's own, whose limits are not ours
        return None
    return int(sum(sizes["Total"] for sizes in found.values()))


def by_accelerate(model: torch.nn.Module) -> int | None:
    try:
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return None
    return int(4 * calculate_maximum_sizes(model)[0])


def one_compiled(build: Callable[[], Training]) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    training = build()
    optimizer = training.optimizer(training.parameters(training.model))
    batch, began = training.batch(0), time.process_time()
    found = {}
    for compiled in (False, True):
        began = time.process_time()
        try:
            answer = tightship.estimate(training.model, batch, optimizer, training.loss_fn, compiled=compiled)
        except TightshipError as error:
            return {"refused": str(error)}
        found["estimate" if compiled else "eager"] = answer.peak
    seconds = time.process_time() - began
    loss_fn = loss_function(training.loss_fn, batch)
    loop = partial(_training, loss_fn=loss_fn, cast=nullcontext, accumulate=1, set_to_none=True)
    return {**found, "measured": measured_compiled(training, loop, optimizer), "seconds": seconds}


def compiled_page(results: dict[str, dict[str, Any]]) -> str:
    rows = [(name, r) for name, r in results.items() if "measured" in r]
    exact = sum(r["estimate"] == r["measured"] for _, r in rows)
    lines = [
        f"{exact} of {len(rows)} models: not a byte off. torch {torch.__version__}, CPU.", "",
        "| model | measured | estimate | off by | eager |", "| --- | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, r in rows:
        off, sizes = f"{r['estimate'] - r['measured']:,} B", (r["measured"], r["estimate"])
        cells = (name, *map(format_bytes, sizes), off, format_bytes(r["eager"]))
        lines.append("| " + " | ".join(cells) + " |")
    lines += [""] + [
        f"- {n} is refused: {r['refused'].partition(';')[0]}" for n, r in results.items() if "refused" in r
    ]
    return "\n".join(lines).rstrip() + "\n"


def large() -> str:
    """A Llama of 6.7 billion parameters on the meta device: the estimate, its CPU seconds, and what this process has
    taken in all, imports included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.zeros(2, 2048, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    head = ("loop on an H100", "estimate", "CPU seconds", "of the process", "its memory")
    lines = ["| " + " | ".join(head) + " |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, options in (("AdamW", {}), ("AdamW, checkpoints", {"checkpoint": True})):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig())
        optimizer = torch.optim.AdamW(model.parameters())
        began = time.process_time()
        need = tightship.estimate(model, batch, optimizer, device="h100", **options)
        now = time.process_time()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        row = (name, format_bytes(need.total), f"{now - began:.1f}", f"{now:.1f}", format_bytes(most))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def one(build: Callable[[], Training]) -> dict[str, Any]:
    torch.manual_seed(0)
    training = build()
    optimizer = training.optimizer(training.parameters(training.model))
    batch, began = training.batch(0), time.process_time()
    try:
        estimate = tightship.estimate(training.model, batch, optimizer, training.loss_fn)
    except TightshipError as error:
        return {"refused": str(error)}
    seconds = time.process_time() - began
    loss_fn = loss_function(training.loss_fn, batch)
    loop = partial(_training, loss_fn=loss_fn, cast=nullcontext, accumulate=1, set_to_none=True)
    real = measured(training, loop, optimizer)
    torch.manual_seed(0)
    other = build()
    theirs = by_mem_tracker(other, loop, other.optimizer(other.parameters(other.model)))
    return {
        "estimate": estimate.peak, "measured": real, "mem_tracker": theirs,
        "accelerate": by_accelerate(training.model), "seconds": seconds,
    }  # fmt: skip


def page(results: dict[str, dict[str, Any]]) -> str:
    rows = [(name, r) for name, r in results.items() if "measured" in r]
    exact = sum(r["estimate"] == r["measured"] for _, r in rows)
    head = ("model", "measured", "estimate", "off by", "mem_tracker", "accelerate")
    lines = [
        f"{exact} of {len(rows)} models: not a byte off. torch {torch.__version__}, CPU.", "",
        "| " + " | ".join(head) + " |", "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, r in rows:
        real = r["measured"]
        theirs = [f"{(r[k] - real) / real:+.1%}" if r[k] is not None else "fails" for k in head[4:]]
        off = f"{r['estimate'] - real:,} B"
        lines.append(
            "| " + " | ".join((name, format_bytes(real), format_bytes(r["estimate"]), off, *theirs)) + " |"
        )
    refused = [(name, r["refused"]) for name, r in results.items() if "refused" in r]
    lines += [""] + [f"- {name} is refused: {why.partition(';')[0]}" for name, why in refused]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", default=TABLES, metavar="TABLE")
    parser.add_argument("--only", default="", metavar="TEXT")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--compiled", action="store_true")
    kind.add_argument("--large", action="store_true")
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.large:
        table = large()
        print(table, end="")
        if chosen.write:
            pages.put(PAGE, *LARGE_MARKS, table)
        return 0
    results: dict[str, dict[str, Any]] = {}
    if chosen.results and chosen.results.exists():
        results = json.loads(chosen.results.read_text())
    for table in chosen.tables:
        for name, build in builds(table):
            left_out = chosen.only not in name or (chosen.compiled and name not in COMPILED)
            if left_out or name in results:
                continue
            try:
                results[name] = one_compiled(build) if chosen.compiled else one(build)
            except ImportError as error:
                print(f"{name}: not run, {error.name} is missing", file=sys.stderr)
                continue
            print(name, json.dumps(results[name]), flush=True)
            if chosen.results:
                chosen.results.write_text(json.dumps(results, indent=1))
    if chosen.write and chosen.compiled:
        pages.put(PAGE, *COMPILED_MARKS, compiled_page(results))
    elif chosen.write:
        pages.put(PAGE, BEGIN, END, page(results))
    wrong = [n for n, r in results.items() if r.get("estimate") != r.get("measured")]
    print(
        f"{len(results) - len(wrong)} of {len(results)} without a difference; others: {', '.join(wrong) or 'none'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
