"""What PyTorch's caching allocator strands in training steps of varying lengths, and a planned arena does not.

Real steps of small models are recorded on the CPU, request by request. The same requests go to the caching allocator
as it is for GPUs (`baselines/torch_allocator.py`, compared with PyTorch's own request by request), which writes a
snapshot; ``tightship explain`` reads it. With ``--device cuda`` the steps run there, PyTorch's own allocator serves
them, and its own writer writes the snapshot; the dry CUDA runtime of the tests will do. Fragmentation is
1 - alive / reserved, alive being the most bytes that are alive at once, in the 512 bytes that requests are multiples
of. STWeaver (arXiv 2507.16274) reports 79.2 % less of it, on average, in training with pipelines, recomputation,
offloading and experts; GMLake (arXiv 2401.08156) combines LoRA (L), recomputation (R) and offloading (O). A model is
as wide as it takes for its requests to be some megabytes.
"""

from __future__ import annotations

import argparse
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from itertools import islice
from pathlib import Path

import torch
from pages import put, table

from tightship import explain
from tightship.baselines.torch_allocator import CachingAllocator
from tightship.diagnose.snapshot import DeviceReport
from tightship.execute.allocator import record
from tightship.units import format_bytes

Step = Callable[[], None]
DEVICE = "cpu"
FRAMES = [{"filename": "benchmarks/snapshots.py", "line": 1, "name": "step"}]
PAGE = Path(__file__).resolve().parent.parent / "docs/benchmarks.md"


def model_of(kind: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 2000}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=384, n_layer=4, n_head=6, vocab_size=2000)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=1024))
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_key_value_heads": 6, "experts_implementation": "eager"}
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, intermediate_size=512, **experts)
        )
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=1536))


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    """Tokens whose lengths vary."""
    lengths = random.Random(seed)
    while True:
        shape = lengths.choice((2, 4, 6)), lengths.randrange(64, 192)
        yield torch.randint(0, 2000, shape, device=DEVICE)


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
    """An activation's bytes outside of torch's allocator."""
    return torch.empty(0, dtype=tensor.dtype), tensor.detach().cpu().numpy().copy()


def from_host(kept: tuple[torch.Tensor, object]) -> torch.Tensor:
    return torch.from_numpy(kept[1]).clone().to(DEVICE)


def language(
    kind: str, *, recompute: bool = False, offload: bool = False, lora: bool = False
) -> Iterator[Step]:
    """Steps of a language model; ``lora``: low ranks beside frozen weights of attention are trained alone."""
    model = model_of(kind).to(DEVICE)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        low_ranks(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    away = torch.autograd.graph.saved_tensors_hooks(to_host, from_host) if offload else nullcontext()
    for tokens in batches():

        def step(tokens: torch.Tensor = tokens) -> None:
            with away:
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step


def low_ranks(model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    for module in [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.in_features == 384]:
        down = torch.nn.Linear(module.in_features, 8, bias=False).to(DEVICE)
        up = torch.nn.Linear(8, module.out_features, bias=False).to(DEVICE)
        module.register_forward_hook(lambda _, x, y, a=down, b=up: y + b(a(x[0])))
        module.low_rank = torch.nn.ModuleList([down, up])


def pipeline() -> Iterator[Step]:
    """A pipeline's first stage: of eight micro-batches three are under way before the first comes back (1F1B)."""
    model, lengths = model_of("llama").to(DEVICE), batches()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        ahead: list[torch.Tensor] = []
        for tokens in islice(lengths, 8):
            if len(ahead) == 3:
                done = ahead.pop(0)
                done.backward(torch.ones_like(done))
            ahead.append(model.model(input_ids=tokens, use_cache=False).last_hidden_state)
        while ahead:
            done = ahead.pop(0)
            done.backward(torch.ones_like(done))
        optimizer.step()
        optimizer.zero_grad()

    while True:
        yield step


def generation() -> Iterator[Step]:
    """Answers to four prompts at a time, whose caches grow token by token."""
    model, prompts = model_of("llama").to(DEVICE).eval(), batches()

    def step() -> None:
        with torch.no_grad():
            caches = []
            for tokens in islice(prompts, 4):
                caches.append((tokens[:, -1:], model(input_ids=tokens, use_cache=True).past_key_values))
            for _ in range(24):
                for last, cache in caches:
                    model(input_ids=last, past_key_values=cache, use_cache=True)

    while True:
        yield step


def images() -> Iterator[Step]:
    """Steps of a U-Net-like network on images whose sizes vary."""
    from torch import nn

    torch.manual_seed(0)

    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    down = nn.ModuleList([block(3, 32), block(32, 64), block(64, 128)]).to(DEVICE)
    up = nn.ModuleList([block(128, 64), block(64, 32), block(32, 3)]).to(DEVICE)
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], foreach=False)
    sizes = random.Random(0)
    while True:
        shape = sizes.choice((1, 2, 3)), 3, 16 * sizes.randrange(6, 11), 16 * sizes.randrange(6, 11)
        x = torch.randn(shape, device=DEVICE)

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
    "GPT-2, recomputation (R)": lambda: language("gpt2", recompute=True),
    "Llama-like, offloading (O)": lambda: language("llama", offload=True),
    "Llama-like, LoRA, recomputation (LR)": lambda: language("llama", recompute=True, lora=True),
    "Llama-like, LoRA, both (LRO)": lambda: language("llama", recompute=True, offload=True, lora=True),
    "Mixtral-like, 4 experts": lambda: language("mixtral"),
    "Llama-like, a pipeline's first stage (1F1B)": pipeline,
    "Llama-like, four answers at a time": generation,
}


def reported(make: Callable[[], Iterator[Step]], steps: int, seconds: float) -> DeviceReport:
    """What ``explain`` says of the snapshot of a model's first steps, its making included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        (of_device if DEVICE == "cuda" else of_cpu)(make, steps, path)
        (device,) = explain(path, seconds=seconds).devices
    return device


def of_device(make: Callable[[], Iterator[Step]], steps: int, path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python")
    for step in islice(make(), steps):
        step()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def of_cpu(make: Callable[[], Iterator[Step]], steps: int, path: Path) -> None:
    with record() as recording:
        for step in islice(make(), steps):
            step()
    allocator, there = CachingAllocator(history=True), {}
    for event in recording.events:
        if event.kind == "alloc" and event.nbytes:
            there[event.id] = allocator.alloc(event.nbytes, 0, FRAMES)
        elif event.kind == "free" and event.id in there:
            allocator.free(there.pop(event.id))
    path.write_bytes(pickle.dumps(allocator.snapshot()))


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
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where steps run (default: cpu)"
    )
    parser.add_argument("--only", default="", help="models whose name has this")
    chosen = parser.parse_args()
    global DEVICE
    DEVICE = chosen.device
    rows, reduced = [], []
    for name in (n for n in MODELS if chosen.only in n):
        cells, less = row(name, reported(MODELS[name], chosen.steps, chosen.seconds))
        rows.append(cells)
        reduced.append(less)
        print(*cells, sep="  ", flush=True)
    mean = f"On average −{100 * sum(reduced) / len(reduced):.1f} %; published for STWeaver: −79.2 %."
    print(mean)
    if chosen.write:
        text = f"{chosen.steps} steps of each model, on {DEVICE}, {date.today():%-d %B %Y}.\n\n" + table(
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
