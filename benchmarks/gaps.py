"""How far plans are from what no plan is below: known models, and others, at many budgets.

    python benchmarks/gaps.py [--models gpt6,qwen3,…] [--shares 70,60,50,40,35] [--write]

The forward and backward passes of budget.py's models, of others from transformers, of a DenseNet and an LSTM written
out are captured with modeled times. Each budget is a share of what a step needs beyond its static set, and is
planned alone by the default limits of work, as `tightship plan` does. A cell says the extra time and, in brackets,
the time that no plan is below; ``--write`` puts the table into docs/search.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import branching
import pages
import torch
import transformers
from budget import FULL, UNSEEN, Made, captured, images, tokens
from rich.console import Console

from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.planners import default
from tightship.simulate import baseline, replay

PAGE = Path(__file__).resolve().parent.parent / "docs" / "search.md"
BEGIN, END = "<!-- begin: benchmarks/gaps.py -->", "<!-- end: benchmarks/gaps.py -->"
SHARES = (70, 60, 50, 40, 35)
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512}


def language(
    model: str, config: str, batch: int = 8, length: int = 128, **more: object
) -> Callable[[], Made]:
    """A model of transformers that reads tokens and predicts tokens."""

    def make() -> Made:
        settings = getattr(transformers, config)(**{**SMALL, "num_hidden_layers": 6, **more})
        settings.use_cache = False
        return getattr(transformers, model)(settings), tokens(batch, length)

    return make


def swin() -> Made:
    config = transformers.SwinConfig(
        image_size=64, patch_size=2, embed_dim=48, depths=[2, 2, 4], num_heads=[2, 4, 8], window_size=4
    )
    return transformers.SwinForImageClassification(config), images(4, 64)


def densenet() -> Made:
    return branching.NETWORKS["densenet"][1](), {"x": torch.empty(8, 3, 96, 96)}


class Unrolled(torch.nn.Module):
    """An LSTM's cell, step after step."""

    def __init__(self, steps: int = 24, width: int = 128) -> None:
        super().__init__()
        self.cell, self.head, self.steps = torch.nn.LSTMCell(64, width), torch.nn.Linear(width, 10), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, found = None, []
        for step in range(self.steps):
            state = self.cell(x[:, step], state)
            found.append(self.head(state[0]))
        return torch.stack(found, 1)


def lstm() -> Made:
    return Unrolled(), {"x": torch.empty(32, 24, 64)}


GATED = {"intermediate_size": 704, "num_key_value_heads": 2, "head_dim": 64}
RELATIVE = {
    "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512, "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"], "position_buckets": 32,
}  # fmt: skip
OTHERS: dict[str, tuple[str, Callable[[], Made]]] = {
    "qwen3": ("Qwen3-like, 6 layers, width 256", language("Qwen3ForCausalLM", "Qwen3Config", **GATED)),
    "gemma2": ("Gemma 2-like, 6 layers, width 256", language("Gemma2ForCausalLM", "Gemma2Config", **GATED)),
    "opt": ("OPT, 6 layers, width 256", language(
        "OPTForCausalLM", "OPTConfig", ffn_dim=1024, word_embed_proj_dim=256, dropout=0.0)),
    "roberta": ("RoBERTa with dropout, 6 layers, width 256", language("RobertaForMaskedLM", "RobertaConfig")),
    "deberta": ("DeBERTa-v2 with dropout, 4 layers, width 128", language(
        "DebertaV2ForMaskedLM", "DebertaV2Config", 4, 64, **RELATIVE)),
    "mamba": ("Mamba, 4 layers, width 128, 24 tokens", language(
        "MambaForCausalLM", "MambaConfig", 2, 24, num_hidden_layers=4, hidden_size=128, state_size=8)),
    "swin": ("Swin, 4 images of 64×64", swin),
    "densenet": ("DenseNet-121, 8 images of 96×96", densenet),
    "lstm": ("LSTM, 24 steps written out", lstm),
}  # fmt: skip


def cell(graph: Graph, share: int) -> tuple[str, float | None]:
    """What the table says, and the gap in points; None where no plan was found."""
    before = replay(graph, baseline(graph))
    budget = graph.static_bytes + (before.peak - graph.static_bytes) * share // 100
    try:
        plan = default.plan(graph.with_ops(graph.ops), budget, default.Options(hand_out=False, seconds=120.0))
    except Infeasible as no:
        return ("none" if no.impossible else "not found"), None
    least = plan.time_bound if plan.time_bound is not None else plan.time_before
    extra, bound = (100 * max(0.0, t / plan.time_before - 1) for t in (plan.time, least))
    return f"+{extra:.2f} ({bound:.2f})", extra - bound


def table(rows: Sequence[tuple[str, list[str]]], shares: Sequence[int]) -> str:
    head = ("model", *(f"{share} %" for share in shares))
    return pages.table(head, ("---", *["---:"] * len(shares)), ((title, *cells) for title, cells in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", help="names, with commas")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--write", action="store_true", help="put the table into docs/search.md")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known, console = FULL | UNSEEN | OTHERS, Console()
    names = chosen.models.split(",") if chosen.models else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no model {unknown[0]!r}: {', '.join(known)}")
    shares = [int(share) for share in chosen.shares.split(",")]
    rows, gaps = [], []
    for name in names:
        title, make = known[name]
        graph = captured(make).graph
        found = [cell(graph, share) for share in shares]
        rows.append((title, [text for text, _ in found]))
        gaps += [gap for _, gap in found if gap is not None]
        console.print(title, *rows[-1][1], sep="; ", soft_wrap=True)
    few = sum(gap <= 1.0 for gap in gaps)
    text = f"{datetime.date.today()}; of {len(gaps)} plans {few} are within a point of the bound."
    text = f"{text}\n\n{table(rows, shares)}"
    console.print(text, markup=False, soft_wrap=True)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
