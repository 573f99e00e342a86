"""Arenas of one training step under three kinds of order, for the models of the tests.

    python benchmarks/orders.py [MODEL ...] [--write]

Bytes of what a step makes (workspaces aside), each placed by the default planner: one op after the other; up to 2
and 4 ops at a time; any order the dependencies allow. Beside them whole buffers shared by name (memonger, along the
graph's order and for any), and no reuse at all. ``--write`` puts the table into docs/orders.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pages
import torch
from rich.console import Console

from tightship.baselines.memonger import Options, recycled
from tightship.frontends.torch.capture.step import capture_step
from tightship.graph import Graph
from tightship.plan import Solution
from tightship.planners.layout import in_any_order, in_order, in_steps
from tightship.planners.packing import Search, pack

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "orders.md"
BEGIN, END = "<!-- orders: begin -->", "<!-- orders: end -->"
HEAD = (
    "model",
    "ops",
    "no reuse",
    "in order",
    "2 wide",
    "4 wide",
    "any order",
    "by name, in order",
    "by name, any",
)


def captured(name: str) -> Graph:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.models import MODELS

    model, loss, batch = MODELS[name]()
    return capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0)).graph


def row(name: str) -> list[str]:
    graph = captured(name)
    lives = in_order(graph), in_steps(graph, 2), in_steps(graph, 4), in_any_order(graph)
    packed = [pack(life.problem, search=Search(work=100_000, seconds=5.0)) for life in lives]
    shared = [sum(recycled(graph, Options(any_order=a))[0].sizes) for a in (False, True)]
    total = sum(b.size for b in lives[0].problem.buffers)
    return [name, str(len(graph.ops)), f"{total:,}", *map(said, packed), *(f"{n:,}" for n in shared)]


def said(solution: Solution) -> str:
    """Bytes; with how far they are above the lower bound, where they are."""
    gap = solution.arena / solution.lower_bound - 1 if solution.lower_bound else 0.0
    return f"{solution.arena:,}" + (f" (+{100 * gap:.1f} %)" if gap else "")


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.models import MODELS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    chosen = parser.parse_args()
    console = Console(stderr=True)
    rows = []
    for name in chosen.models or sorted(MODELS):
        console.print(name)
        rows.append(row(name))
    table = pages.table(HEAD, ("---", *["---:"] * (len(HEAD) - 1)), rows)
    print(table)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, table)


if __name__ == "__main__":
    main()
