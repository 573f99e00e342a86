"""Time against memory on paper: plans against what PyTorch has, on the same captured steps, at equal peaks.

    python benchmarks/budget.py [--quick] [--seconds X] [--models gpt6,…] [--only PART] [--alone] [--execute]
        [--results FOLDER] [--write]

Each model's forward and backward pass is captured on fake tensors (no memory for the model) and its ops get modeled
times. Others are replayed on that graph by the same simulator: checkpoints around blocks, selective ones that keep
the results of matrix products and convolutions, and what torch's activation_memory_budget saves at 1.0 to 0. For
the peak of each of them a plan is made (``--seconds`` of search for each), and one for the least memory.
``--alone`` plans each peer's peak a second time, without the peers' saved sets to start from. ``--results`` keeps
the table of each model, so that a run that ended early goes on with the next one. ``--models`` also knows models that
the search was not made with (`UNSEEN`).
``--execute`` runs plans for real and measures their peaks (see executed.py). ``--only`` takes one part: peers,
published, activations or executed. ``--write`` puts the tables into docs/benchmarks.md; with ``--only activations``
or ``--only executed``, that table alone.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import activations
import executed
import pages
import torch
import transformers
from rich.console import Console

from tightship import api, sources
from tightship.errors import Infeasible
from tightship.plan import Plan
from tightship.planners.default import Options, plan
from tightship.planners.frontier import Frontier, Other, extra_flops, frontier
from tightship.units import Budget, format_bytes, format_seconds

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benchmarks/budget.py -->", "<!-- end: benchmarks/budget.py -->"

APART = {
    part: tuple(f"<!-- {edge}: benchmarks/budget.py --only {part} -->" for edge in ("begin", "end"))
    for part in ("activations", "executed")
}
"""Parts that have a place of their own in the page."""

WORK = 15_000_000
"""Ops simulated at most for every second: what `tightship plan` has by default."""

Made = tuple[torch.nn.Module, dict[str, Any]]


def tokens(batch: int, length: int, **more: tuple[int, int]) -> dict[str, torch.Tensor]:
    sizes = {"input_ids": (batch, length), "labels": (batch, length), **more}
    return {name: torch.empty(size, dtype=torch.long) for name, size in sizes.items()}


def images(batch: int, size: int, labels: bool = True) -> dict[str, torch.Tensor]:
    pixels = {"pixel_values": torch.empty(batch, 3, size, size)}
    return pixels | ({"labels": torch.empty(batch, dtype=torch.long)} if labels else {})


def gpt(layers: int, batch: int = 8, length: int = 128, width: int = 256) -> Made:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0, use_cache=False,
        resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), tokens(batch, length)


class Plain(torch.nn.Module):
    """Convolution, batch norm, ReLU; four times as many channels at half the size every third time."""

    def __init__(self, width: int = 32, stages: int = 3, depth: int = 3) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        channels = 3
        for stage in range(stages):
            for k in range(depth):
                out = width << stage
                stride = 2 if stage and not k else 1
                conv = torch.nn.Conv2d(channels, out, 3, stride, 1, bias=False)
                layers.append(torch.nn.Sequential(conv, torch.nn.BatchNorm2d(out), torch.nn.ReLU()))
                channels = out
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(channels, 10)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class UNet(torch.nn.Module):
    """Two convolutions a level, down and up again with skip connections (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()

        def twice(a: int, b: int) -> torch.nn.Module:
            parts: list[torch.nn.Module] = []
            for i, o in ((a, b), (b, b)):
                parts += [
                    torch.nn.Conv2d(i, o, 3, 1, 1, bias=False),
                    torch.nn.BatchNorm2d(o),
                    torch.nn.ReLU(),
                ]
            return torch.nn.Sequential(*parts)

        sizes = [width << k for k in range(levels + 1)]
        self.down = torch.nn.ModuleList([twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False)])
        self.up = torch.nn.ModuleList(
            [torch.nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(sizes[:-1])]
        )
        self.join = torch.nn.ModuleList([twice(2 * w, w) for w in reversed(sizes[:-1])])
        self.head = torch.nn.Conv2d(width, 2, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x, skips = pixel_values, []
        for k, block in enumerate(self.down):
            x = block(x if k == 0 else torch.nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips[:-1]), strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


def resnet50(batch: int = 16, size: int = 96) -> Made:
    config = transformers.ResNetConfig(num_labels=10, problem_type="single_label_classification")
    return transformers.ResNetForImageClassification(config), images(batch, size)


def vit(layers: int = 12, batch: int = 8) -> Made:
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=layers, num_attention_heads=3, intermediate_size=768, image_size=96,
        patch_size=8, num_labels=10, problem_type="single_label_classification",
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), images(batch, 96)


def bert(layers: int = 12, batch: int = 8) -> Made:
    config = transformers.BertConfig(
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=512,
    )
    return transformers.BertForMaskedLM(config), tokens(batch, 128)


def llama(layers: int = 8, batch: int = 4) -> Made:
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=688, vocab_size=512,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), tokens(batch, 256)


def t5(layers: int = 6, batch: int = 8) -> Made:
    config = transformers.T5Config(
        d_model=256, d_kv=64, d_ff=1024, num_layers=layers, num_heads=4, vocab_size=512, use_cache=False,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), tokens(batch, 128)


FULL: dict[str, tuple[str, Callable[[], Made]]] = {
    "gpt6": ("GPT-2-like, 6 layers, width 256", lambda: gpt(6)),
    "gpt24": ("GPT-2-like, 24 layers, width 256", lambda: gpt(24)),
    "cnn": ("Plain CNN with batch norm, 16 images of 96×96", lambda: (Plain(), images(16, 96, False))),
    "resnet50": ("ResNet-50, 16 images of 96×96", resnet50),
    "unet": ("U-Net, 2 images of 128×128", lambda: (UNet(), images(2, 128, False))),
    "vit": ("ViT, 12 layers, width 192", vit),
    "bert": ("BERT with dropout, 12 layers, width 256", bert),
    "llama": ("Llama-like, 8 layers, width 256", llama),
    "t5": ("T5, 6 + 6 layers, width 256", t5),
}


def distilbert() -> Made:
    config = transformers.DistilBertConfig(
        dim=256, hidden_dim=1024, n_layers=6, n_heads=4, vocab_size=512, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.DistilBertForMaskedLM(config), tokens(8, 128)


def mixtral() -> Made:
    config = transformers.MixtralConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, num_local_experts=4, use_cache=False, experts_implementation="batched_mm",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), tokens(4, 128)


def segformer() -> Made:
    config = transformers.SegformerConfig(
        num_labels=10, problem_type="single_label_classification", hidden_dropout_prob=0.0, drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.SegformerForImageClassification(config), images(4, 64)


def mobilenet() -> Made:
    config = transformers.MobileNetV2Config(
        num_labels=10, problem_type="single_label_classification", classifier_dropout_prob=0.0
    )
    return transformers.MobileNetV2ForImageClassification(config), images(8, 96)


def clip() -> Made:
    text = {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
        "vocab_size": 512, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 511,
    }  # fmt: skip
    vision = {
        "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 3,
        "image_size": 64, "patch_size": 8,
    }  # fmt: skip
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=128)
    )
    words = {"input_ids": torch.empty(8, 32, dtype=torch.long), "return_loss": True}
    return model, images(8, 64, labels=False) | words


def whisper() -> Made:
    config = transformers.WhisperConfig(
        vocab_size=512, num_mel_bins=40, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, d_model=128, max_source_positions=100,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    sample = {"input_features": torch.empty(4, 40, 200), "labels": torch.empty(4, 64, dtype=torch.long)}
    return transformers.WhisperForConditionalGeneration(config), sample


UNSEEN: dict[str, tuple[str, Callable[[], Made]]] = {
    "distilbert": ("DistilBERT, 6 layers, width 256", distilbert),
    "mixtral": ("Mixtral-like, 4 layers, 4 experts", mixtral),
    "segformer": ("Segformer, 4 images of 64×64", segformer),
    "mobilenet": ("MobileNetV2, 8 images of 96×96", mobilenet),
    "clip": ("CLIP, 6 + 6 layers", clip),
    "whisper": ("Whisper, 4 + 4 layers, width 128", whisper),
}
"""Models that the search was not made with; taken by name."""
SMALL: dict[str, tuple[str, Callable[[], Made]]] = {
    "gpt6": ("GPT-2-like, 2 layers", lambda: gpt(2, 2, 32, 64)),
    "cnn": ("Plain CNN with batch norm", lambda: (Plain(8, 2, 2), images(2, 32, False))),
    "unet": ("U-Net", lambda: (UNet(8, 2), images(1, 32, False))),
    "bert": ("BERT with dropout, 2 layers", lambda: bert(2, 2)),
    "t5": ("T5, 1 + 1 layers", lambda: t5(1, 2)),
}
# Model, peak without planning and [(budget, extra time)], as published (GB, per cent).
PUBLISHED: dict[str, tuple[str, Callable[[], Made], float, list[tuple[float, float]]]] = {
    "monet-resnet50": (
        "ResNet-50, 184 images of 224×224 (MONeT)", lambda: resnet50(184, 224), 15.06, [(10.01, 3.2), (4.99, 12.0)],
    ),
    "monet-unet": (
        "U-Net, 11 images of 416×608 (MONeT)",
        lambda: (UNet(), {"pixel_values": torch.empty(11, 3, 416, 608)}), 14.32, [(5.01, 11.5)],
    ),
}  # fmt: skip


def captured(make: Callable[[], Made]) -> Any:
    with torch.device("meta"):
        model, sample = make()
    return sources.ModelStep(model, sample).program()


def measured(make: Callable[[], Made], seconds: float, console: Console) -> Frontier:
    program = captured(make)
    saved = sources.torch_saved(program)
    searches = 2 + len(saved) + 4 + 3  # the least memory may take four
    options = Options(seconds=seconds * searches, work=int(seconds * WORK) * searches, hand_out=False)
    return frontier(program.graph, 2, options, saved, lambda text: console.print("  ", text))


Alone = Mapping[str, Plan | None]
"""By peer: a plan for as much memory by a search that knows no peer's saved set, if it found one."""


def planned_alone(f: Frontier, seconds: float, console: Console) -> Alone:
    """What `tightship plan` finds for the peak of every peer, each from nothing."""
    options = Options(seconds=seconds, work=int(seconds * WORK), hand_out=False)
    found: dict[str, Plan | None] = {}
    for o in f.others:
        console.print("  ", f"alone, as much memory as {o.name}")
        try:
            found[o.name] = plan(f.graph, Budget(bytes=o.peak), options)
        except Infeasible:
            found[o.name] = None
    return found


def percent(x: float) -> str:
    return f"{100 * x:+.1f} %"


def markdown(title: str, f: Frontier, alone: Alone | None = None) -> str:
    once, full, least = f.points[0].time_before, f.points[-1].peak, f.points[0]
    lines = [
        f"### {title}",
        "",
        f"{len(f.graph.ops)} ops; everything kept: {format_bytes(full)}, of it {format_bytes(f.graph.static_bytes)} "
        f"static; {format_seconds(once)}. No plan needs less than {format_bytes(f.lower_bound)}.",
        "",
        "| other | peak | extra time | extra FLOPs | ours at that peak: time | FLOPs | no plan below | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for o in sorted(f.others, key=lambda o: -o.peak):
        lines.append(_row(f, o, once))
        if alone is not None:
            lines.append(_row_alone(f, o, alone[o.name], once))
    lines.append(
        f"| (ours, least memory) | {format_bytes(least.peak)} | | | {percent(least.time / once - 1)} | "
        f"{percent(extra_flops(f.graph, least.steps))} | {percent(least.time_bound / once - 1)} | {_least(f)} |"
    )
    return "\n".join(lines) + "\n"


def _row(f: Frontier, o: Other, once: float) -> str:
    theirs = (
        f"| {o.name} | {format_bytes(o.peak)} | {percent(o.time / once - 1)} | {percent(o.extra_flops)} |"
    )
    if o.ours is None:
        return f"{theirs} none found | | | **behind** |"
    worse = o.ours.time > o.time * (1 + 1e-9)
    verdict = "**behind**" if worse else "more than all" if o.peak > f.points[-1].peak else ""
    ours = f"{percent(o.ours.time / once - 1)} | {percent(extra_flops(f.graph, o.ours.steps))}"
    return f"{theirs} {ours} | {percent(max(o.ours.time_bound, once) / once - 1)} | {verdict} |"


def _row_alone(f: Frontier, o: Other, found: Plan | None, once: float) -> str:
    """The same peak without the peers' saved sets to start from: behind, where the search needs them."""
    named = f"| ({o.name}: planned alone) | {format_bytes(o.peak)} | | |"
    if found is None:
        return f"{named} none found | | | **behind** |"
    verdict = "**behind**" if found.time > o.time * (1 + 1e-9) else ""
    ours = f"{percent(found.time / once - 1)} | {percent(extra_flops(f.graph, found.steps))}"
    return f"{named} {ours} | {percent(found.time_bound / once - 1)} | {verdict} |"


def _least(f: Frontier) -> str:
    """Our least peak beside the others' least, beyond the static set and all in all."""
    best = min(o.peak for o in f.others)
    static = f.graph.static_bytes
    part = (f.points[0].peak - static) / (best - static) - 1
    return f"{percent(f.points[0].peak / best - 1)} against the least of the others, {percent(part)} beyond static"


def published(name: str, seconds: float) -> str:
    title, make, before, rows = PUBLISHED[name]
    graph = captured(make).graph
    lines = [
        f"### {title}",
        "",
        "| published: budget of | extra time | ours: budget of | peak | extra time | no plan below |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for budget, extra in rows:
        share = f"{100 * budget / before:.1f}%"
        theirs = f"| {budget} of {before} GB | +{extra} %"
        try:
            p = api.plan_graph(graph, share, seconds=seconds, work=10**10).plan
        except Infeasible as no:
            lines.append(f"{theirs} | {share} | {format_bytes(no.best_peak)} at best | none found | |")
            continue
        bound = percent(p.time_bound / p.time_before - 1)
        budget_of = f"{format_bytes(p.budget or 0)} of {format_bytes(p.peak_before)}"
        lines.append(
            f"{theirs} | {budget_of} | {format_bytes(p.peak)} | {percent(p.time / p.time_before - 1)} | {bound} |"
        )
    return "\n".join(lines) + "\n"


def quarter(made: Mapping[str, tuple[str, Callable[[], Made]]], seconds: float) -> str:
    """Plans at a quarter of the activations."""
    models = {title: (lambda make=make: captured(make).graph) for title, make in made.values()}
    return activations.table(models, seconds, int(seconds * WORK))


def about(seconds: float) -> str:
    return (
        f"{datetime.date.today()}; {platform.machine()}, {os.cpu_count()} cores shared with other work; Python "
        f"{platform.python_version()}, PyTorch {torch.__version__}; {seconds:g} s of search for each row, modeled "
        "times (50 GFLOP/s, 10 GB/s, 5 µs an op), fp32, recomputation only."
    )


def parts_of(chosen: argparse.Namespace, console: Console) -> Iterator[tuple[str, str]]:
    """The tables asked for, each with the part that it belongs to."""
    made = SMALL if chosen.quick else FULL | UNSEEN
    seconds = chosen.seconds or (0.5 if chosen.quick else 10.0)
    wanted = (
        chosen.models.split(",") if chosen.models else [*(SMALL if chosen.quick else [*FULL, *PUBLISHED])]
    )
    models = {name: made[name] for name in wanted if name in made}
    for name in wanted:
        part = "published" if name in PUBLISHED else "peers"
        if chosen.only not in (None, part):
            continue
        console.print(name, style="bold")
        kept = Path(chosen.results, f"{name}.md") if chosen.results else None
        if kept is not None and kept.exists():
            yield part, kept.read_text()
            continue
        if name in PUBLISHED:
            text = published(name, 3 * seconds)
        else:
            f = measured(made[name][1], seconds, console)
            text = markdown(made[name][0], f, planned_alone(f, seconds, console) if chosen.alone else None)
        if kept is not None:
            kept.write_text(text)
        yield part, text
    if chosen.only in (None, "activations"):
        console.print("activations", style="bold")
        yield "activations", quarter(models, seconds)
    if chosen.only == "executed" or chosen.execute:
        yield "executed", executed.table(models, seconds, console)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, a minute in all")
    parser.add_argument("--seconds", type=float, help="of search for each budget (default: 10; quick: 0.5)")
    parser.add_argument("--models", help="which, by name, with commas")
    parser.add_argument("--only", choices=("peers", "published", *APART), help="one part alone")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="a row more for each peer: its peak, planned without the peers' saved sets",
    )
    parser.add_argument(
        "--results", help="a folder for the table of each model, which is not taken again once it is there"
    )
    parser.add_argument("--execute", action="store_true", help="also run plans and measure their peaks")
    parser.add_argument(
        "--write", action="store_true", help=f"put the tables into {PAGE.parent.name}/{PAGE.name}"
    )
    chosen = parser.parse_args()
    if chosen.write and chosen.only in ("peers", "published"):
        parser.error("these two are written together: without --only")
    transformers.logging.set_verbosity_error()
    seconds = chosen.seconds or (0.5 if chosen.quick else 10.0)
    found: dict[str, list[str]] = {}
    for part, text in parts_of(chosen, Console(stderr=True, highlight=False)):
        found.setdefault(part, []).append(text)
        print(text)
    if not chosen.write:
        return
    if chosen.only is None:
        pages.put(
            PAGE, BEGIN, END, "\n".join([about(seconds), "", *found["peers"], *found.get("published", [])])
        )
    for part, marks in APART.items():
        if part in found:
            said = about(seconds) if part != "executed" else executed.about()
            pages.put(PAGE, *marks, "\n".join([said, "", *found[part]]))


if __name__ == "__main__":
    main()
