"""What dynamic programming over blocks and an exact solver reach where the search leaves most to its bound.

    python benchmarks/blocks.py [--rows gpt6:35,cnn:40:2,…] [--work N] [--write]

The graphs of budget.py, at a percentage of their unplanned peak: the planner ``chain`` by itself; the default
search, which has it as a seed; and ``exact``, which goes on from the search (an effort of 0 leaves it out). Work and
effort are limited, not time, so that the load of the machine does not show in the extra times. No results in the
place of inputs, which the solver knows nothing of. Where it runs, the bound is what it proves, too.
``--write`` puts the table into docs/search.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import budget
import pages
import transformers

from tightship.baselines import chain
from tightship.options import NEVER
from tightship.planners.default import Options, least_time, order_of, problem_of
from tightship.planners.evict import anneal, exact
from tightship.simulate import baseline, replay

PAGE = Path(__file__).resolve().parent.parent / "docs" / "search.md"
BEGIN, END = "<!-- begin: benchmarks/blocks.py -->", "<!-- end: benchmarks/blocks.py -->"
ROWS = "gpt6:35,cnn:40:2,resnet50:68,monet-unet:35,bert:37,bert:33"
HEAD = ("model", "budget", "`chain`", "search", "`exact`", "no plan below", "seconds of the processor")
MARKS = ("---", "---:", "---:", "---:", "---:", "---:", "---:")


def row(name: str, percent: float, work: int, effort: float) -> list[str]:
    made = budget.PUBLISHED[name][1] if name in budget.PUBLISHED else budget.FULL[name][1]
    graph = budget.captured(made).graph
    peak = replay(graph, baseline(graph)).peak
    plain = Options(reuse=False)
    order = order_of(graph, plain, peak)
    limit = int(peak * percent / 100)
    once = sum(op.time for op in graph.ops)
    options = (
        chain.Options(),
        anneal.Options(work=work, seconds=600.0),
        exact.Options(work=work, effort=effort, seconds=600.0),
    )
    cells, spent = [], []
    for planner, o in zip((chain, anneal, exact), options, strict=True):
        if planner is exact and not effort:
            cells.append("")
            continue
        began = time.process_time()
        fresh = problem_of(graph, order, plain)
        found = planner.plan(fresh, limit, o)
        spent.append(f"{time.process_time() - began:.1f}")
        cells.append(f"{100 * found.extra / once:+.2f} %" if found.met else "not met")
    bound = max(0.0, least_time(graph, fresh, limit) / once - 1)
    if effort:
        bound = max(bound, exact.least_extra(graph, limit, NEVER, redraw=False, in_place=False) / once)
    title = f"{name}, {len(graph.ops)} ops"
    return [title, f"{percent:g} %", *cells, f"{100 * bound:+.2f} %", ", ".join(spent)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "model:percentage of its unplanned peak:effort of the solver, in its deterministic seconds (default 0)"
    parser.add_argument("--rows", default=ROWS, help=text)
    parser.add_argument("--work", type=int, default=30_000_000, help="ops simulated by the search")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = []
    for part in chosen.rows.split(","):
        name, percent, *effort = part.split(":")
        found.append(row(name, float(percent), chosen.work, float(effort[0]) if effort else 0.0))
        print(found[-1], flush=True)
    table = pages.table(HEAD, MARKS, found)
    print(table)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, table)


if __name__ == "__main__":
    main()
