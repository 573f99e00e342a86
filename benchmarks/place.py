"""Placement planners against problems: arena over lower bound, and seconds.

    python benchmarks/place.py [--planner NAME ...] [--generate COUNT ...] [PROBLEM.csv ...]

Without problems, training-like ones are generated. A CSV has the columns id, lower, upper, size (lifetimes
half-open).
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tightship.plan import Buffer, Problem
from tightship.planners import planners
from tightship.verify_placement import check_solution

ALIGNMENT = 64


def read(path: Path) -> Problem:
    with path.open(newline="") as file:
        rows = [(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"])) for r in csv.DictReader(file)]
    return Problem(tuple(Buffer(*row) for row in rows))


def training_like(count: int, seed: int = 0) -> Problem:
    """About ``count`` residences of one training step: forward, backward, update.

    A layer's ops make activations, some saved for the backward, and temporaries inside the op. The backward
    takes layers in reverse, makes their gradients (kept for the update) and passes one gradient on; some
    layers are recomputed before it.
    """
    rng = random.Random(seed)
    made: list[tuple[int, int, int]] = []
    layers = max(1, count // 44)
    clock = 0

    def size() -> int:
        scale = rng.choice((1, 64, 256, 256, 1024, 1024, 4096))
        return ALIGNMENT * scale * rng.choice((1, 1, 2, 3, 4, 12))

    plan = [[(size(), rng.random() < 0.6, rng.randrange(3)) for _ in range(8)] for _ in range(layers)]
    # Layers of one kind have the same sizes, as in a model.
    shapes = [plan[rng.randrange(3) % layers] for _ in range(layers)]
    saved: list[list[tuple[int, int]]] = []

    def forward(shape: list[tuple[int, bool, int]], keep: bool) -> list[tuple[int, int]]:
        nonlocal clock
        kept, last = [], clock
        for bytes_, is_saved, temporaries in shape:
            for t in range(temporaries):
                made.append((clock + t, clock + 3, ALIGNMENT * rng.choice((1, 16, 1024))))
            clock += 4
            if is_saved and keep:
                kept.append((clock - 1, bytes_))
            else:
                made.append((clock - 1, clock + 4, bytes_))
        made.append((last, clock + 1, shape[0][0]))
        return kept

    recomputed = [rng.random() < 0.3 for _ in range(layers)]
    for layer in range(layers):
        saved.append(forward(shapes[layer], keep=not recomputed[layer]))
    gradients: list[tuple[int, int]] = []
    for layer in reversed(range(layers)):
        kept = forward(shapes[layer], keep=True) if recomputed[layer] else saved[layer]
        for start, bytes_ in reversed(kept):
            made.append((clock + 1, clock + 6, bytes_))
            made.append((clock + 1, clock + 3, ALIGNMENT * rng.choice((1, 64, 2048))))
            gradients.append((clock + 2, ALIGNMENT * rng.choice((4, 1024, 4096))))
            clock += 4
            made.append((start, clock, bytes_))
    for start, bytes_ in gradients:
        made.append((clock, clock + 2, bytes_))
        made.append((start, clock + 2, bytes_))
        clock += 2
    return Problem(tuple(Buffer(str(k), *row) for k, row in enumerate(sorted(made))))


def problems(args: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    for path in args.problems:
        yield path.stem, read(path)
    for count in args.generate or ([] if args.problems else [2_000, 20_000]):
        for seed in range(args.seeds):
            yield f"training {count} #{seed}", training_like(count, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Placement planners against problems.")
    parser.add_argument("problems", nargs="*", type=Path, metavar="PROBLEM.csv")
    parser.add_argument("--planner", action="append", help="only this one (may be repeated)")
    parser.add_argument(
        "--generate", action="append", type=int, metavar="COUNT", help="a problem of this size"
    )
    parser.add_argument("--seeds", type=int, default=1, help="generated problems of each size")
    args = parser.parse_args()
    chosen = {n: p for n, p in planners("place").items() if not args.planner or n in args.planner}
    table = Table("problem", "buffers", "lower bound", *chosen)
    for name, problem in problems(args):
        cells, bound = [], 0
        for planner in chosen.values():
            solution = planner.plan(problem, planner.options())
            wrong = check_solution(problem, solution)
            bound = solution.lower_bound
            ratio = solution.arena / bound if bound else 1.0
            cells.append(f"[red]{wrong[0].code}" if wrong else f"{ratio:.4f}  {solution.seconds:.3f} s")
        table.add_row(name, str(len(problem.buffers)), str(bound), *cells)
    Console(width=max(120, 24 * (len(chosen) + 3))).print(table)


if __name__ == "__main__":
    main()
