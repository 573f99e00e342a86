"""What PyTorch's caching allocator strands in training steps of varying lengths, and a planned arena does not.

Real steps of small models are recorded on the CPU, request by request. The same requests go to the caching allocator
as it is for GPUs (`baselines/torch_allocator.py`, compared with PyTorch's own request by request), which writes a
snapshot; ``tightship explain`` reads it. Fragmentation is 1 - alive / reserved, alive being the most bytes that are
alive at once, in the 512 bytes that requests are multiples of. STWeaver (arXiv 2507.16274) reports 79.2 % less of it,
on average. A model is as wide as it takes for its requests to be some megabytes.
"""

from __future__ import annotations

import argparse
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from pages import put, table

from tightship import explain
from tightship.baselines.torch_allocator import CachingAllocator
from tightship.diagnose.snapshot import DeviceReport
from tightship.execute.allocator import record
from tightship.units import format_bytes

Step = Callable[[], None]
FRAMES = [{"filename": "benchmarks/snapshots.py", "line": 1, "name": "step"}]
PAGE = Path(__file__).resolve().parent.parent / "docs/benchmarks.md"


def language(config: str) -> Iterator[Step]:
    """Steps of a language model on batches whose lengths vary."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 2000}
    if config == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=384, n_layer=4, n_head=6, vocab_size=2000)
        )
    elif config == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=1024))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=1536))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    lengths = random.Random(0)
    while True:
        tokens = torch.randint(0, 2000, (lengths.choice((2, 4, 6)), lengths.randrange(64, 192)))

        def step(tokens: torch.Tensor = tokens) -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step


def images() -> Iterator[Step]:
    """Steps of a U-Net-like network on images whose sizes vary."""
    from torch import nn

    torch.manual_seed(0)

    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    down = nn.ModuleList([block(3, 32), block(32, 64), block(64, 128)])
    up = nn.ModuleList([block(128, 64), block(64, 32), block(32, 3)])
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], foreach=False)
    sizes = random.Random(0)
    while True:
        x = torch.randn(sizes.choice((1, 2, 3)), 3, 16 * sizes.randrange(6, 11), 16 * sizes.randrange(6, 11))

        def step(x: torch.Tensor = x) -> None:
            y = x
            for part in down:
                y = nn.functional.max_pool2d(part(y), 2)
            for part in up:
                y = nn.functional.interpolate(part(y), scale_factor=2)
            (y - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step


MODELS: dict[str, Callable[[], Iterator[Step]]] = {
    "GPT-2, 4 layers, width 384": lambda: language("gpt2"),
    "Llama-like, 4 layers, width 384": lambda: language("llama"),
    "BERT, 4 layers, width 384": lambda: language("bert"),
    "U-Net-like, images of 96 to 160": images,
}


def reported(make: Callable[[], Iterator[Step]], steps: int, seconds: float) -> DeviceReport:
    """What ``explain`` says of the snapshot of a model's first steps, its making included."""
    with record() as recording:
        source = make()
        for _ in range(steps):
            next(source)()
    allocator, there = CachingAllocator(history=True), {}
    for event in recording.events:
        if event.kind == "alloc" and event.nbytes:
            there[event.id] = allocator.alloc(event.nbytes, 0, FRAMES)
        elif event.kind == "free" and event.id in there:
            allocator.free(there.pop(event.id))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        path.write_bytes(pickle.dumps(allocator.snapshot()))
        (device,) = explain(path, seconds=seconds).devices
    return device


def row(name: str, d: DeviceReport) -> tuple[list[str], float]:
    """A row of the table, and how much less fragmentation there is."""
    before, after = 1 - d.lower_bound / d.reserved, 1 - d.lower_bound / d.arena
    less = 1 - after / before if before else 0.0
    expandable = next(s.reserved for s in d.savings if s.name == "expandable_segments")
    cells = [name, f"{d.requests:,}", *map(format_bytes, (d.lower_bound, d.reserved, expandable, d.arena))]
    return [*cells, f"{100 * before:.1f} %", f"{100 * after:.2f} %", f"−{100 * less:.1f} %"], less


HEAD = (
    "steps of", "requests", "alive at once (the bound)", "reserved", "expandable segments", "planned arena",
    "fragmentation", "with the arena", "less",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="training steps of each model (default: 4)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of placing each (default: 20)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    chosen = parser.parse_args()
    rows, reduced = [], []
    for name, make in MODELS.items():
        cells, less = row(name, reported(make, chosen.steps, chosen.seconds))
        rows.append(cells)
        reduced.append(less)
        print(*cells, sep="  ", flush=True)
    mean = f"On average −{100 * sum(reduced) / len(reduced):.1f} %; published for STWeaver: −79.2 %."
    print(mean)
    if chosen.write:
        text = f"{chosen.steps} steps of each model.\n\n" + table(
            HEAD, ("---", *["---:"] * (len(HEAD) - 1)), rows
        )
        put(
            PAGE,
            "<!-- begin: benchmarks/snapshots.py -->",
            "<!-- end: benchmarks/snapshots.py -->",
            f"{text}\n\n{mean}",
        )


if __name__ == "__main__":
    main()
