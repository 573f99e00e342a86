"""The least memory at all: fixed policies' and ours, beside what no plan can do without.

    python benchmarks/least.py [--work N] [--models gpt6,…] [--steps | --near] [--write]

Parameters, buffers and the batch are there all the time, and at the end of a forward and backward pass so are all
gradients: no plan can have less. What a policy or a plan decides about is what is beyond these; the last columns
compare that. *All ways* allows recomputing, redrawing, packing without loss, and copying out. The search is limited
by work (``--work``: ops simulated, some 50 million a second), so that the machine's load does not matter.
``--write`` puts the table into docs/benchmarks.md.

``--steps``: another table, of whole training steps with AdamW, whose static set is three times the parameters: the
least by recomputing, and with ops in slices (`split-rounding`), with streaming, and with both, where everything that
can stream does; and with both where plans may also redraw, pack without loss, and copy out. Slices are those of the
least bound, as far as probes believe their results. Requests that ops make for themselves are not known on fake
tensors, and not in it (AdamW that is not fused takes two).

``--near``: of small models, the least reached and how many of ten budgets from there to 5 % above it are refused,
each by a search that knows nothing of the others; recomputing only, in an arena. The table goes into docs/search.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pages
import torch
import transformers
from budget import FULL, PAGE, SMALL, captured, gpt
from rich.console import Console

from tightship import sources
from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible
from tightship.execute import profile
from tightship.execute.split import Splitting
from tightship.execute.stream import all_streamed, least_streamed
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.split import split
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.planners import default
from tightship.planners.default import ROUNDING
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.frontier import Other, others
from tightship.simulate import baseline, replay

BEGIN, END = "<!-- begin: benchmarks/least.py -->", "<!-- end: benchmarks/least.py -->"
STEPS = "<!-- begin: benchmarks/least.py --steps -->", "<!-- end: benchmarks/least.py --steps -->"
NEAR = "<!-- begin: benchmarks/least.py --near -->", "<!-- end: benchmarks/least.py --near -->"
WAYS = {"recompute": "recompute", "all ways": "recompute,compress,offload"}
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """Bytes: the static set and the results, the best of the other policies, ours and the bound by ways."""

    title: str
    static: int
    results: int
    other: Other
    ours: dict[str, int]
    bounds: dict[str, int]


def bound_of(graph: Graph, allow: str) -> int:
    """Bytes no plan can stay under that may do so much."""
    if allow == "recompute":
        return int(lower_bound(graph))
    return int(lower_bound(graph, least=dict.fromkeys(range(len(graph.storages)), 0)))


def least(graph: Graph, allow: str, work: int) -> int:
    """The least peak that a search of so much work reaches."""
    o = default.Options(allow=allow, work=work, seconds=3600.0, place=False, hand_out=False)
    bound = bound_of(graph, allow)  # for less there is no search
    order = default.order_of(graph, o, replay(graph, baseline(graph)).peak)
    frame = replace(default.problem_of(graph, order, o), in_place=True)  # as if all were placed
    try:
        return default.plan(graph, bound, o, problem=frame).peak
    except Infeasible as no:
        return int(no.best_peak)


def measured(name: str, quick: bool, work: int) -> Row:
    title, make = (SMALL if quick else FULL)[name]
    program = captured(make)
    graph = program.graph
    order = default.order_of(graph, default.Options(), replay(graph, baseline(graph)).peak)
    policies = others(EvictionProblem(graph, order, in_place=False), sources.torch_saved(program))
    return Row(
        title,
        graph.static_bytes,
        sum(graph.storages[s].size for s in graph.kept - graph.static),
        min(policies, key=lambda x: (x.peak, x.time)),
        {way: least(graph, allow, work) for way, allow in WAYS.items()},
        {way: bound_of(graph, allow) for way, allow in WAYS.items()},
    )


def loss_of(model: Any, batch: Any) -> Any:
    out = model(**batch)
    return out.loss if hasattr(out, "loss") else out.square().mean()


def whole_step(title: str, make: Any, work: int) -> tuple[str, ...]:
    """Of a training step: what it needs unplanned, and the least by ways."""
    with torch.device("meta"):
        model, sample = make()
    optimizer = torch.optim.AdamW(model.parameters())
    program = profile.model(capture_step(model, loss_of, optimizer, sample))
    splitting = Splitting(program, ROUNDING, least_of=least_streamed)
    chosen = splitting.nearest(0, Deadline.after(60.0))
    sliced = program
    if chosen is not None and chosen[0] < least_streamed(program):
        kept, _ = splitting.believed(chosen[1])
        if kept:
            sliced = profile.model(split(program, kept))
    graph = program.graph
    peaks = [replay(graph, baseline(graph)).peak]
    for made in (program, sliced):
        peaks += [least(x.graph, "recompute", work) for x in (made, all_streamed(made))]
    unplanned, alone, streamed, slices, both = peaks
    slices, both = min(slices, alone), min(both, streamed)
    every = min(both, *(least(all_streamed(x).graph, WAYS["all ways"], work) for x in (program, sliced)))
    cells = (graph.static_bytes, unplanned, alone, slices, streamed, both, every)
    shares = (both / alone, every / alone, both / graph.static_bytes)
    return title, *map(mib, cells), *(f"{100 * x:.0f} %" for x in shares)


# --- budgets near the least ---


class GraphNetwork(torch.nn.Module):
    """Layers of attention over the edges of a graph, each with a residual connection."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.scores = torch.nn.ModuleList(torch.nn.Linear(2 * width, 1) for _ in range(layers))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer, score in zip(self.layers, self.scores, strict=True):
            h = layer(x)
            pairs = torch.cat([h[source], h[target]], 1)
            weight = torch.nn.functional.leaky_relu(score(pairs)).exp()
            whole = torch.zeros_like(x[:, :1]).index_add(0, target, weight)
            x = x + torch.zeros_like(h).index_add(0, target, weight * h[source]) / (whole + 1e-6)
            x = torch.nn.functional.elu(x)
        return x


class Unrolled(torch.nn.Module):
    """A recurrent network, its steps written out."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.steps, self.cell = steps, torch.nn.LSTMCell(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros_like(x[0])
        for step in range(self.steps):
            h, c = self.cell(x[step], (h, c))
        return h


def graph_network() -> Any:
    edges = torch.zeros(512, dtype=torch.int64)
    return GraphNetwork(4, 32), {"x": torch.zeros(128, 32), "source": edges, "target": edges}


def wav2vec2() -> Any:
    sizes = dict(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192, vocab_size=32
    )
    convolutions = dict(
        conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16
    )
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, mask_time_prob=0.0, layerdrop=0.0)
    return transformers.Wav2Vec2Model(config), {"input_values": torch.zeros(4, 1600)}


def small_vit() -> Any:
    sizes = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=64, patch_size=8))
    return model, {"pixel_values": torch.zeros(16, 3, 64, 64)}


SMALLEST: dict[str, tuple[str, Any]] = {
    "gnn": ("Graph network with attention, 4 layers", graph_network),
    "lstm": ("LSTM, unrolled over 4 steps", lambda: (Unrolled(4, 64), {"x": torch.zeros(4, 16, 64)})),
    "gpt3": ("GPT-2-like, 3 layers, width 64", lambda: gpt(3, 4, 64, 64)),
    "wav2vec2": ("Wav2Vec2, 4 layers, width 96", wav2vec2),
    "vit4": ("ViT, 4 layers, width 64", small_vit),
}


def near(title: str, make: Any, work: int) -> tuple[str, ...]:
    """Of a model: how many of ten budgets from the least reached to 5 % above it are refused."""
    graph = captured(make).graph
    o = default.Options(work=work, seconds=3600.0, hand_out=False)

    def peak(budget: int) -> int:
        """What is reached for a budget; negative where that is refused."""
        try:
            made = default.plan(graph.with_ops(graph.ops), budget, o)
        except Infeasible as no:
            return -max(no.placed or 0, no.best_peak)
        return made.static + made.arena + made.handed

    bound = int(lower_bound(graph, redraw=False))
    reached = abs(peak(bound))
    budgets = [reached + reached * k // 180 for k in range(10)]
    found = [peak(budget) for budget in budgets]
    refused = sum(f < 0 for f in found)
    cells = (len(graph.ops), bound, reached)
    return title, *(f"{n:,}" for n in cells), f"{100 * (reached / bound - 1):.1f} %", f"{refused} of 10"


def table_of_near(rows: Sequence[tuple[str, ...]], work: int) -> str:
    head = (
        "model",
        "ops",
        "no plan below",
        "least reached",
        "above it",
        "budgets up to 5 % above it refused",
    )
    said = f"{datetime.date.today()}; bytes; {work // 10**6} million ops simulated for each budget at most."
    return f"{said}\n\n{pages.table(head, ('---', *['---:'] * (len(head) - 1)), rows)}\n"


def table_of_steps(rows: Sequence[tuple[str, ...]], work: int) -> str:
    head = (
        "model", "static", "unplanned", "recompute", "and slices", "and streaming", "and both", "all ways",
        "both of recompute", "all ways of recompute", "both of static",
    )  # fmt: skip
    said = f"{datetime.date.today()}; MiB; {work // 10**6} million ops simulated for each figure."
    return f"{said}\n\n{pages.table(head, ('---', *['---:'] * (len(head) - 1)), rows)}\n"


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.2f}"


def markdown(rows: Sequence[Row], work: int) -> str:
    lines = [
        f"{datetime.date.today()}; MiB; {work // 10**6} million ops simulated for each figure.",
        "",
        "| model | static + gradients | best other | ours: recompute | all ways | bounds on both | whole, both | "
        "beyond static + gradients, both |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        floor, best = r.static + r.results, r.other.peak
        a, b = r.ours.values()
        shares = [f"{100 * (x / best - 1):+.0f} %" for x in (a, b)]
        beyond = [f"{100 * ((x - floor) / (best - floor) - 1):+.0f} %" for x in (a, b)]
        bounds = ", ".join(mib(x) for x in r.bounds.values())
        row = f"| {r.title} | {mib(r.static)} + {mib(r.results)} | {mib(best)} ({r.other.name}) | {mib(a)} | "
        lines.append(f"{row}{mib(b)} | {bounds} | {', '.join(shares)} | {', '.join(beyond)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument(
        "--work", type=int, default=150_000_000, help="ops simulated for each figure (150000000)"
    )
    parser.add_argument(
        "--steps", action="store_true", help="whole training steps, with both ways below the floor"
    )
    parser.add_argument(
        "--near",
        action="store_true",
        help="budgets just above the least, of small models",
    )
    parser.add_argument("--models", help="which, by name, with commas")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    console = Console(stderr=True, highlight=False)
    rows, steps, models = [], [], SMALLEST if chosen.near else SMALL if chosen.quick else FULL
    for name in chosen.models.split(",") if chosen.models else models:
        console.print(name, style="bold")
        if chosen.steps:
            steps.append(whole_step(*models[name], chosen.work))
            print(*steps[-1], sep=" | ", flush=True)
            continue
        if chosen.near:
            steps.append(near(*models[name], chosen.work))
            print(*steps[-1], sep=" | ", flush=True)
            continue
        rows.append(measured(name, chosen.quick, chosen.work))
        print(markdown(rows[-1:], chosen.work))
    if chosen.write and chosen.near:
        pages.put(PAGE.with_name("search.md"), *NEAR, table_of_near(steps, chosen.work))
    elif chosen.write and chosen.steps:
        pages.put(PAGE, *STEPS, table_of_steps(steps, chosen.work))
    elif chosen.write:
        pages.put(PAGE, BEGIN, END, markdown(rows, chosen.work))


if __name__ == "__main__":
    main()
