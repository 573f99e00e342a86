"""Budgets equal to an optimum: how many of them the default planner meets, on small random graphs.

    python benchmarks/optimum.py [--graphs N] [--ops 2,3,4,5,6]

Every graph has recomputation, results in the place of inputs, views, mutations, kept results and workspaces. Its
best plans in both bytes and seconds are known by trying everything: by the peak alone (``peak``), with a place for
everything in one arena (``arena``), and with results outside of the arena (``out``). A budget is each of those plans'
bytes. It is met equally fast, met slower, missed by the search (no peak within it), or missed by the places alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.plan import Step
from tightship.planners import default
from tightship.planners.evict import states
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.layout import lay_out

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.optimum import optimum
from support.strategies import random_graph

MODES = ("peak", "arena", "out")
_STEP = 64


def budgets(graph: Graph, mode: str) -> Iterator[tuple[int, float]]:
    """Bytes of the best plans, and their seconds of recomputation."""
    points = optimum(graph)
    if mode == "peak":
        yield from ((p.nbytes, p.extra) for p in points)
        return
    out = mode == "out"
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    limits = states.Options(work=3_000_000, seconds=60.0, place=True, hand_out=out)
    for point in points:
        handed = sum(graph.storages[s].size for s in graph.kept - graph.static) if out else 0
        budget = max(point.nbytes, graph.static_bytes + handed)
        while True:
            found = states.placed(problem, budget, limits, lambda s, b=budget: _needs(graph, s, out) <= b)
            if not found.complete:
                break
            if found.steps is not None:
                yield budget, found.extra
                break
            budget += _STEP


def _needs(graph: Graph, steps: tuple[Step, ...], out: bool) -> int:
    layout = lay_out(graph, steps, hand_out=out)
    return graph.static_bytes + layout.arena + layout.handed


def met(graph: Graph, budget: int, extra: float, mode: str) -> str:
    """What becomes of one budget."""
    o = default.Options(work=100_000, seconds=30.0, place=mode != "peak", hand_out=mode == "out")
    problem = default.problem_of(graph, default.order_of(graph, o, 1 << 60), o)
    try:
        made = default.plan(graph, budget, o, problem=replace(problem, in_place=True))
    except Infeasible as no:
        return "search" if no.placed is None else "places"
    return "equal" if made.time - made.time_before <= extra + 1e-9 else "slower"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=60, help="graphs of each number of ops")
    parser.add_argument("--ops", default="2,3,4,5,6", help="numbers of ops")
    chosen = parser.parse_args()
    for mode in MODES:
        count = Counter[str]()
        for seed in range(chosen.graphs):
            for n in map(int, chosen.ops.split(",")):
                graph = random_graph(seed, n, updates=0.1)
                for budget, extra in dict(budgets(graph, mode)).items():
                    count[met(graph, budget, extra, mode)] += 1
        row = ", ".join(f"{name} {count[name]}" for name in ("equal", "slower", "search", "places"))
        print(f"{mode}: {sum(count.values())} budgets: {row}")


if __name__ == "__main__":
    main()
