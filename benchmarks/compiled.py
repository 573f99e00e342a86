"""Compiled code within budgets in bytes: tightship's compiled mode beside Inductor's own ways and eager.

    python benchmarks/compiled.py [--model gpt,…] [--budgets 80%,60%,…] [--rounds 5] [--results FILE] [--json]

A row for each model and way: the peak that was planned and the one that was measured (forward and backward pass,
with parameters, batch and gradients), the time of a step over stock Inductor's, and of the first step over stock
Inductor's first step. Ways: eager; Inductor at several ``activation_memory_budget`` values; Inductor with a
checkpoint around each block; tightship exact; tightship compiled without a budget and at each of ``--budgets``, of
stock Inductor's peak. Each way runs beside stock Inductor in this process; steps are timed in turns. Models are made
from configurations, with random weights. With ``--results`` each row is written to the file once it is there, and
those that are in it are not run again. Kernels come from Inductor's cache of C++ where it has them: empty
``TORCHINDUCTOR_CACHE_DIR`` for cold compile times.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tightship
from tightship.execute.allocator import Meter
from tightship.integrations.torch_compile import compiled_plans

STOCK = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)


# --- models ---


class Block(nn.Module):
    """A block of a GPT, its attention written out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (d // self.heads) ** -0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), self.dropout, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout, self.training)


class GPT(nn.Module):
    """A GPT that gives its loss."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        length: int = 128,
        vocabulary: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def gpt(dropout: float = 0.0) -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 128, a batch of 8 times 128 tokens, a vocabulary of 512."""
    return GPT(dropout=dropout), tuple(torch.randint(0, 512, (8, 128)) for _ in range(2))


class Loss(nn.Module):
    """A model whose output's mean square is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


class Residual(nn.Module):
    """Two convolutions with group norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rows = [m for _ in range(2) for m in (nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width))]
        self.body = nn.Sequential(*rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


def convnet() -> tuple[nn.Module, tuple[Any, ...]]:
    """Residual blocks of convolutions with group norms, on 16 images of 32 by 32."""
    body = [nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(4)), nn.AdaptiveAvgPool2d(1)]
    return Loss(nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 10))), (torch.randn(16, 3, 32, 32),)


class Answer(nn.Module):
    """A model of transformers with the mean square of what it answers as its loss."""

    def __init__(self, model: nn.Module, names: Sequence[str], result: str = "logits") -> None:
        super().__init__()
        self.model, self.names, self.result = model, tuple(names), result

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        answer = self.model(**dict(zip(self.names, inputs, strict=True)))
        return getattr(answer, self.result).square().mean()


def tokens(rows: int = 8, length: int = 64, vocabulary: int = 256) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, length))


def gpt2(layers: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """GPT-2 of a width of 64, on 8 times 64 tokens."""
    import transformers as t

    config = t.GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, vocab_size=256, n_positions=64, use_cache=False
    )
    return Answer(t.GPT2LMHeadModel(config), ["input_ids"]), (tokens(),)


def llama() -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 64, two heads of keys, on 8 times 64 tokens."""
    import transformers as t

    config = t.LlamaConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=172,
        vocab_size=256, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return Answer(t.LlamaForCausalLM(config), ["input_ids"]), (tokens(),)


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 64 with dropout, on 8 times 64 tokens."""
    import transformers as t

    config = t.BertConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, vocab_size=256,
        max_position_embeddings=64,
    )  # fmt: skip
    return Answer(t.BertForMaskedLM(config), ["input_ids"]), (tokens(),)


def t5() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two layers each of 64, on 8 times 64 and 8 times 32 tokens."""
    import transformers as t

    config = t.T5Config(
        d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4, vocab_size=256, use_cache=False
    )
    return Answer(t.T5ForConditionalGeneration(config), ["input_ids", "decoder_input_ids"]), (
        tokens(), tokens(length=32),
    )  # fmt: skip


def vit() -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 64, on 8 images of 64 by 64 in patches of 8."""
    import transformers as t

    config = t.ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, image_size=64, patch_size=8
    )  # fmt: skip
    return Answer(t.ViTForImageClassification(config), ["pixel_values"]), (torch.randn(8, 3, 64, 64),)


def convnext() -> tuple[nn.Module, tuple[Any, ...]]:
    """Widths of 16 to 64, on 8 images of 64 by 64."""
    import transformers as t

    config = t.ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1])
    return Answer(t.ConvNextForImageClassification(config), ["pixel_values"]), (torch.randn(8, 3, 64, 64),)


def resnet50() -> tuple[nn.Module, tuple[Any, ...]]:
    """ResNet-50's blocks at an eighth of its width, on 8 images of 64 by 64."""
    import transformers as t

    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3])
    return Answer(t.ResNetForImageClassification(config), ["pixel_values"]), (torch.randn(8, 3, 64, 64),)


class Double(nn.Sequential):
    """Two convolutions with group norms, of a U-Net."""

    def __init__(self, a: int, b: int) -> None:
        rows = [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU()]
        super().__init__(*rows, nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())


class UNet(nn.Module):
    """Two levels with skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(3, width), Double(width, 2 * width)])
        self.middle = Double(2 * width, 4 * width)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * k * width, k * width, 2, stride=2) for k in (2, 1))
        self.up = nn.ModuleList([Double(4 * width, 2 * width), Double(2 * width, width)])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([kept.pop(), grow(x)], 1))
        return self.last(x)


class Experts(nn.Module):
    """A block of a mixture: every expert sees all tokens, weighted by a softmax over the best two."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scores, chosen = self.gate(h).topk(2, -1)
        weights = torch.zeros_like(self.gate(h)).scatter(-1, chosen, scores.softmax(-1))
        made = F.gelu(torch.einsum("btd,edf->betf", h, self.up))
        return x + torch.einsum("betd,bte->btd", torch.einsum("betf,efd->betd", made, self.down), weights)


def mixture() -> tuple[nn.Module, tuple[Any, ...]]:
    """Three layers of 64, four experts, 8 times 64 tokens."""
    return Loss(nn.Sequential(*(Experts(64, 4) for _ in range(3)))), (torch.randn(8, 64, 64),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "gpt": gpt,
    "gpt-dropout": lambda: gpt(0.1),
    "convnet": convnet,
    "gpt2-6": lambda: gpt2(6),
    "gpt2-12": lambda: gpt2(12),
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "convnext": convnext,
    "resnet50": resnet50,
    "unet": lambda: (Loss(UNet()), (torch.randn(4, 3, 64, 64),)),
    "mixture": mixture,
}

BLOCKS = {
    "Block", "Residual", "Double", "Experts", "GPT2Block", "LlamaDecoderLayer", "BertLayer", "T5Block", "ViTLayer",
    "ConvNextLayer", "ResNetBottleNeckLayer",
}  # fmt: skip
"""Classes that a checkpoint goes around."""


def with_checkpoints(model: nn.Module) -> nn.Module:
    """The model with a checkpoint around each block."""
    found = [m for m in model.modules() if type(m).__name__ in BLOCKS]
    assert found, f"no blocks in {type(model).__name__}"
    for block in found:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


# --- ways ---


class Way:
    """One way to run a model's step."""

    def __init__(self, name: str, model: nn.Module, batch: tuple[Any, ...], call: Callable[..., Any]) -> None:
        self.name, self.model, self.batch, self.call = name, model, batch, call
        self.first = 0.0
        self.least: int | None = None
        self.peak = 0
        self.budget: int | None = None
        self.planned: int | None = None
        self.note = ""

    def step(self) -> float:
        self.model.zero_grad()
        began = time.perf_counter()
        self.call(*self.batch).backward()
        return time.perf_counter() - began

    def prepare(self) -> None:
        """The first steps, and the peak of the last of them."""
        self.first = self.step()
        self.step()
        self.model.zero_grad()
        static = sum(
            -(-t.untyped_storage().nbytes() // 64) * 64 for t in [*self.model.parameters(), *self.batch]
        )
        static += sum(-(-t.untyped_storage().nbytes() // 64) * 64 for t in self.model.buffers())
        with Meter() as meter:
            self.step()
        self.peak = static + meter.peak


def stock(model: nn.Module, share: float) -> Callable[..., Any]:
    """Inductor at an ``activation_memory_budget``, which it reads while it compiles."""
    compiled = torch.compile(model, dynamic=False)

    def call(*batch: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compiled(*batch)

    return call


Make = Callable[[nn.Module], Callable[..., Any]]


def ours(**options: Any) -> Make:
    """tightship's backend."""
    return lambda model: torch.compile(model, backend="tightship", options={"strict": True, **options})


def ways(peak: int, budgets: Sequence[str]) -> Iterator[tuple[str, Make]]:
    """All but stock Inductor, whose peak it is, by name."""
    yield "eager", lambda model: model
    for share in STOCK[1:]:
        yield f"Inductor {share}", lambda model, share=share: stock(model, share)  # type: ignore[misc]
    yield CHECKPOINTED, lambda model: stock(with_checkpoints(model), 1.0)
    yield "tightship compiled", ours(mode="compiled")
    for budget in budgets:
        nbytes = int(peak * float(budget.rstrip("%")) / 100)
        yield f"tightship compiled {budget}", ours(mode="compiled", budget=nbytes)
    yield "tightship exact", ours()


CHECKPOINTED = "Inductor, checkpoint per block"
REFERENCE = "Inductor 1.0"


def prepared(name: str, label: str, make: Make) -> Way:
    """A way of the model of that name, after its first steps; or with a note of why there are none."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = MODELS[name]()
    way = Way(label, model, batch, make(model))
    try:
        way.prepare()
    except tightship.Infeasible as error:
        way.note, way.budget, way.least = "infeasible", error.budget, error.best_peak
    except Exception as error:  # of whatever is beside: the other rows are worth having
        lines = str(error).splitlines() or [""]
        way.note = f"{type(error).__name__}: {lines[0][:200]}"
    else:
        if label.startswith("tightship compiled"):
            (graph,) = compiled_plans(way.call)
            way.planned, way.budget = graph.plan.peak, graph.plan.budget
    say(f"{name} {label}: {way.peak} {way.note} first {way.first:.1f} s")
    return way


def row_of(name: str, way: Way, base: Way, rounds: int) -> dict[str, Any]:
    """The row of a way, timed in turns with stock Inductor's."""
    row: dict[str, Any] = {"model": name, "way": way.name, "budget": way.budget}
    row |= dict.fromkeys(("planned_peak", "measured_peak", "time_ratio", "compile_ratio"))
    row |= {"note": way.note, "least": way.least, "load": round(os.getloadavg()[0], 1)}
    if way.note:
        return row
    if way is base:
        return row | {"measured_peak": way.peak, "time_ratio": 1.0, "compile_ratio": 1.0}
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        times[0].append(way.step())
        times[1].append(base.step())
    ratio = statistics.median(times[0]) / statistics.median(times[1])
    return row | {
        "planned_peak": way.planned, "measured_peak": way.peak, "time_ratio": round(ratio, 3),
        "compile_ratio": round(way.first / base.first, 3),
    }  # fmt: skip


def rows_of(
    name: str, budgets: Sequence[str], rounds: int, known: Sequence[dict[str, Any]], keep: Callable[..., None]
) -> list[dict[str, Any]]:
    """The rows of one model: those that are ``known``, and all others, each given to ``keep`` once it is there."""
    had = {r["way"]: r for r in known if r["model"] == name}
    wanted = [REFERENCE, *(label for label, _ in ways(0, budgets))]
    if all(label in had for label in wanted):
        return [had[label] for label in wanted]
    base = prepared(name, REFERENCE, lambda model: stock(model, 1.0))
    assert not base.note, base.note
    if REFERENCE not in had:
        had[REFERENCE] = row_of(name, base, base, rounds)
        keep(had[REFERENCE])
    for label, make in ways(base.peak, budgets):
        if label not in had:
            had[label] = row_of(name, prepared(name, label, make), base, rounds)
            keep(had[label])
    return [had[label] for label in wanted]


def read(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file of results, a JSON object in each line; one that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            say(f"{path}: left out {line[:60]!r}")
    return rows


def write(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to a file of results, on a line of its own."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    cut_off = before and not before.endswith("\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + json.dumps(row) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", "--models", default=",".join(MODELS), help="some of %(default)s")
    parser.add_argument("--budgets", default="90%%,80%%,70%%,60%%,50%%", help="of stock Inductor's peak")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--results", type=Path, metavar="FILE", help="file of rows, which is read first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    names = given.model.split(",")
    if unknown := [n for n in names if n not in MODELS]:
        parser.error(f"no model {unknown[0]!r}: {', '.join(MODELS)}")
    budgets = [b for b in given.budgets.replace("%%", "%").split(",") if b]
    known = read(given.results)

    def keep(row: dict[str, Any]) -> None:
        if given.results is not None:
            write(given.results, row)

    rows = [r for name in names for r in rows_of(name, budgets, given.rounds, known, keep)]
    if given.json:
        print(json.dumps({"rows": rows}))
        return
    for r in rows:
        print(" | ".join(str(r[k]) for k in r))


if __name__ == "__main__":
    main()
