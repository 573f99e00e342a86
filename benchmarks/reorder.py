"""Reordering alone: the least peaks of our orders and of those that PyTorch's Inductor chooses from.

    python benchmarks/reorder.py [--graphs train/gpt6,wired,…] [--random N] [--write]
    python benchmarks/reorder.py --plans [--graphs …]

Graphs: the models of budget.py as inference, as forward and backward, and as a step with AdamW; networks that branch
(branching.py), as inference and as forward and backward; XLA's modules of tests/data. Inductor's orders are made by
its own functions (`torch._inductor.memory.topological_sort_lpmf`, `_bfs`, `_dfs`), which get the same sizes and the
same dependencies: data, hazards on shared storages, the random chain, effects, control. Every order is judged by the
same simulator. ``no order below`` is a bound. Then ``--random`` random graphs of up to seven ops, against the best of
all their orders. Seconds are those of the processor. ``--write`` puts the tables into docs/benchmarks.md.

``--plans`` says instead what plans within budgets cost that recompute and begin with our order or with `sink`.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages
import torch
import transformers
from branching import NETWORKS
from budget import FULL, Made
from rich.console import Console

from support.hlo_data import CPU, GPU, module
from support.inductor import METHODS, scheduled
from support.optimum import least_peak
from support.strategies import random_graph
from tightship import sources
from tightship.analysis.order import Ordered
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.hlo.remat.as_plan import graph_before
from tightship.planners import default, planner
from tightship.planners.order import beam, best
from tightship.simulate import baseline, replay

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benchmarks/reorder.py -->", "<!-- end: benchmarks/reorder.py -->"
HEAD = ("graph", "ops", "given", "sink", "beam", "ours", *METHODS, "no order below", "ours in", "")
MIB = 2**20
PLANNING = 6_000_000
"""Ops simulated for each plan."""
PROOF = 4_000_000
"""Ops tried where the bound is still open."""


def of_models(kind: str, make: Callable[[], Made]) -> Graph:
    """A model of budget.py on the meta device, captured as ``infer``, ``train`` or ``step``."""
    with torch.device("meta"):
        model, sample = make()
    if kind == "train":
        return captured(model, sample)
    if kind == "step":
        own = "labels" in sample  # the model says its loss itself
        loss = None if own else lambda model, batch: model(**batch).sum()
        return captured(model, sample, loss_fn=loss, optimizer=torch.optim.AdamW(model.parameters()))
    inputs = {name: t for name, t in sample.items() if name != "labels"}
    if model.config.is_encoder_decoder if hasattr(model, "config") else False:
        inputs["decoder_input_ids"] = sample["labels"]
    return captured(model.eval(), inputs, train=False)


def of_networks(kind: str, make: Callable[[], torch.nn.Module], size: int) -> Graph:
    with torch.device("meta"):
        model, images = make(), torch.empty(8, 3, size, size)
    return captured(model.train(kind == "train"), (images,), train=kind == "train")


def captured(model: torch.nn.Module, sample: Any, **how: Any) -> Graph:
    graph: Graph = sources.ModelStep(model, sample, **how).program().graph
    return graph


def graphs() -> dict[str, tuple[str, Callable[[], Graph]]]:
    """By name: title, and what makes the graph."""
    rows: dict[str, tuple[str, Callable[[], Graph]]] = {}
    titles = {"infer": "inference", "train": "forward and backward", "step": "step with AdamW"}
    for kind, said in titles.items():
        for name, (title, make) in FULL.items():
            rows[f"{kind}/{name}"] = f"{title}; {said}", lambda k=kind, m=make: of_models(k, m)
    for kind in ("infer", "train"):
        for name, (title, net, size) in NETWORKS.items():
            key = f"{kind}/{name}"
            rows[key] = f"{title}; {titles[kind]}", lambda k=kind, m=net, s=size: of_networks(k, m, s)
    for name in (*CPU, *GPU):
        rows[f"hlo/{name}"] = f"XLA module {name}", lambda n=name: graph_before(module(n))
    return rows


def peaks(graph: Graph) -> tuple[dict[str, int], int, float]:
    """Peaks by way, the bound, and seconds of our best."""
    began = time.process_time()
    ours = best.solve(graph)
    seconds = time.process_time() - began
    orders = {
        "given": tuple(range(len(graph.ops))),
        "sink": planner("sink", "order").plan(graph),
        "beam": beam.solve(graph).order,
        "ours": ours.order,
    }
    theirs = scheduled(graph)
    orders |= {method: theirs.order(method) for method in METHODS}
    found = {way: replay(graph, baseline(graph, order)).peak for way, order in orders.items()}
    return found, ours.bound if ours.optimal else proved(graph, ours), seconds


def proved(graph: Graph, ours: Ordered) -> int:
    """What no order goes below, with more work than planning takes."""
    further = beam.solve(graph, beam.Options(PROOF, widest=PROOF), ours)
    return further.peak if further.optimal else ours.bound


def row(title: str, graph: Graph) -> list[str]:
    found, bound, seconds = peaks(graph)
    best_other = min(found[method] for method in METHODS)
    gap = found["ours"] / bound - 1
    mark = (
        "**worse**"
        if found["ours"] > best_other
        else f"{100 * gap:.1f} % open"
        if gap
        else "the least there is"
    )
    sizes = [f"{found[way] / MIB:.2f}" for way in ("given", "sink", "beam", "ours", *METHODS)]
    return [title, str(len(graph.ops)), *sizes, f"{bound / MIB:.2f}", f"{seconds:.2f} s", mark]


def on_random(count: int) -> str:
    """How often each way finds the least peak of all orders, on random graphs of up to seven ops."""
    ways = ("given", "sink", "beam", "ours", *METHODS)
    hits, least_of_theirs = dict.fromkeys(ways, 0), 0
    for seed in range(count):
        graph = random_graph(seed, 3 + seed % 5, updates=0.0)
        found, least = peaks(graph)[0], least_peak(graph)
        least_of_theirs += min(found[m] for m in METHODS) == least
        for way in ways:
            hits[way] += found[way] == least
    told = ", ".join(f"{way} {n}" for way, n in hits.items())
    return (
        f"On {count} random graphs of 3 to 7 ops (views, mutations, random chain, effects, control edges, "
        f"workspaces), each way finds the least peak of all orders so often: {told}; the best of Inductor's three: "
        f"{least_of_theirs}."
    )


def plans(graph: Graph) -> Iterator[list[str]]:
    """Extra time at budgets, in % of the step, of plans that begin with `sink` and with our order."""
    for share in (85, 60, 45, 35, 28):
        cells = []
        for order in ("sink", "best"):
            chosen = default.Options(order=order, work=PLANNING, seconds=600.0, place=False, hand_out=False)
            try:
                made = default.plan(graph, f"{share}%", chosen)
                cells.append(f"{100 * (made.time / made.time_before - 1):+.2f} %")
            except Infeasible as no:
                cells.append(f"none, {no.best_peak / MIB:.2f} MiB at least")
        yield [f"{share} %", *cells]


def main() -> None:
    known = graphs()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", help=f"whose names have one of these in them, of {', '.join(known)}")
    parser.add_argument("--random", type=int, default=500, metavar="N", help="random graphs (default: 500)")
    parser.add_argument("--plans", action="store_true", help="compare plans that begin with the orders")
    parser.add_argument(
        "--write", action="store_true", help=f"put the tables into {PAGE.parent.name}/{PAGE.name}"
    )
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    console = Console(stderr=True, highlight=False)
    parts = chosen.graphs.split(",") if chosen.graphs else [""]

    def rows() -> Iterator[list[str]]:
        for name, (title, make) in known.items():
            if any(part in name for part in parts):
                console.print(name)
                if chosen.plans:
                    yield from ([title, *cells] for cells in plans(make()))
                else:
                    yield row(title, make())

    if chosen.plans:
        print(pages.table(("graph", "budget", "sink", "ours"), ("---", "---:", "---:", "---:"), rows()))
        return

    table = pages.table(HEAD, ("---", *["---:"] * (len(HEAD) - 2), "---"), rows())
    about = (
        f"{datetime.date.today()}; {platform.machine()}, Python {platform.python_version()}, PyTorch "
        f"{torch.__version__}; MiB."
    )
    text = "\n\n".join([about, table, on_random(chosen.random)])
    print(text)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
