"""Placement against peers: one Markdown table each for capacities to meet, for arenas, and for growth.

    python benchmarks/place.py [--problems FOLDER] [--write docs/placement.md]

FOLDER holds MiniMalloc's and idealloc's problems (``A.1048576.csv``, …, ``resnet50.csv``, ``pangu_2.6B.csv``);
without it, training-like problems are generated. Everything in a table is of one run. ``--write`` puts the tables
between the lines ``<!-- benchmark -->`` of a page. OR-tools is measured if it is installed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pages

from tightship.plan import Buffer, Problem
from tightship.planners.packing import Search, pack
from tightship.planners.place import portfolio
from tightship.verify.placement import check_solution

REPEATS = 3
LIMIT = 5.0
"""Seconds for a search."""

NAMED = {
    "xla-heap": "XLA",
    "by-breadth": "TFLite",
    "tvm-hill-climb": "TVM",
    "skyline": "skyline",
    "portfolio": "tightship",
}
MARK = "<!-- benchmark -->"

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


def random_storages(count: int, seed: int = 0) -> Problem:
    """Storages that come and go at random, in no order: most live for a few dozen ops, one of a hundred for a tenth
    of all. Their bound is out of reach."""
    rng = random.Random(seed)
    rows = []
    for k in range(count):
        lower = rng.randrange(count)
        life = 1 + int(rng.lognormvariate(2.5, 1.0))
        if rng.randrange(100) == 0:
            life = rng.randrange(1, max(2, count // 10))
        rows.append(Buffer(str(k), lower, lower + life, ALIGNMENT * rng.randrange(1, 1000)))
    return Problem(tuple(rows))


def generated() -> Iterator[tuple[str, Problem]]:
    for count in (200, 2_000, 20_000):
        yield f"training {count}", training_like(count)


def given(folder: Path) -> Iterator[tuple[str, Problem]]:
    for path in sorted(folder.glob("*.csv")):
        yield path.stem, read(path)


def capacities(problems: Sequence[tuple[str, Problem]]) -> Iterator[str]:
    """Seconds of search, and of processors, until the capacity in a problem's name is met."""
    yield "| problem | buffers | capacity / bound | tightship | of processors | OR-tools CP-SAT |"
    yield "| --- | --- | --- | --- | --- | --- |"
    total = work = 0.0
    for name, problem in problems:
        stem, _, number = name.partition(".")
        if not number.isdigit() or len(problem.buffers) < 100:
            continue
        capacity = int(number)
        wanted = replace(problem, capacity=capacity)
        made, spent = [], []
        for _ in range(REPEATS):
            began = time.process_time()
            made.append(portfolio.plan(wanted, portfolio.Options(time_limit=60.0)))
            spent.append(time.process_time() - began)
        assert all(check_solution(wanted, m) == [] for m in made)
        seconds, processors = statistics.median(m.seconds for m in made), statistics.median(spent)
        total, work = total + seconds, work + processors
        cells = [f"{capacity / made[0].lower_bound:.4f}", f"{seconds:.3f} s", f"{processors:.3f} s"]
        yield f"| {stem} | {len(problem.buffers)} | {' | '.join(cells)} | {by_cp_sat(problem, capacity)} |"
    yield f"| together | | | {total:.3f} s | {work:.3f} s | |"


def by_cp_sat(problem: Problem, capacity: int) -> str:
    """The same question as two-dimensional no-overlap."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return "not installed"
    model = cp_model.CpModel()
    unit = int(np.gcd.reduce([b.size for b in problem.buffers]))
    times, bytes_ = [], []
    for b in problem.buffers:
        times.append(model.new_fixed_size_interval_var(b.lower, b.upper - b.lower, b.id))
        size = b.size // unit
        at = model.new_int_var(0, capacity // unit - size, b.id)
        bytes_.append(model.new_fixed_size_interval_var(at, size, b.id))
    model.add_no_overlap_2d(times, bytes_)
    model.add_cumulative(times, [b.size // unit for b in problem.buffers], capacity // unit)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = LIMIT
    solver.parameters.num_workers = os.cpu_count() or 1
    began = time.perf_counter()
    status = solver.solve(model)
    seconds = time.perf_counter() - began
    met = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return f"{seconds:.3f} s" if met else f"not in {LIMIT:.0f} s"


def arenas(problems: Sequence[tuple[str, Problem]]) -> Iterator[str]:
    """Arena over lower bound, and seconds, without a capacity."""
    yield f"| problem | buffers | {' | '.join(NAMED.values())} |"
    yield "| --- " * (len(NAMED) + 2) + "|"
    for name, problem in problems:
        if len(problem.buffers) < 100:
            continue
        cells = []
        for planner in NAMED:
            made = pack(problem, planner, Search(seconds=LIMIT))
            proved = "*" if made.optimal else ""
            cells.append(f"{made.arena / made.lower_bound:.4f}{proved} {made.seconds:.3f} s")
        yield f"| {name.partition('.')[0]} | {len(problem.buffers)} | {' | '.join(cells)} |"


def growth(make: Callable[[int], Problem]) -> Iterator[str]:
    """Of arrays: the first answer, and the call with its defaults but ten seconds at most."""
    each = "arena / bound | seconds | µs of processors per buffer"
    yield f"| buffers | first: {each} | default: {each} | most memory |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for count in (1_000, 10_000, 100_000, 1_000_000):
        rows = [(b.lower, b.upper, b.size) for b in make(count).buffers]
        columns = [np.array(c, dtype=np.int64) for c in zip(*rows, strict=True)]
        cells = []
        for limit in (0.0, 10.0):
            began, before = time.perf_counter(), time.process_time()
            _, arena, bound = portfolio.offsets(*columns, time_limit=limit)
            seconds, spent = time.perf_counter() - began, time.process_time() - before
            cells += [f"{arena / bound:.4f}", f"{seconds:.3f}", f"{1e6 * spent / len(rows):.2f}"]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        yield f"| {len(rows)} | {' | '.join(cells)} | {memory:.2f} GiB |"


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = [x for x in cpu.read_text().splitlines() if x.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    today = datetime.date.today().isoformat()
    return f"{today}, {os.cpu_count()} cores ({model}), Python {platform.python_version()}, load {load:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Placement against peers.")
    parser.add_argument("--problems", type=Path, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    args = parser.parse_args()
    problems = list(given(args.problems) if args.problems else generated())
    said = [machine(), ""]
    for title, rows in (
        (f"Seconds until a capacity is met (medians of {REPEATS}):", capacities(problems)),
        (f"Arena over lower bound (* proved least), and seconds, at most {LIMIT:.0f}:", arenas(problems)),
        ("Training-like problems, growing:", growth(training_like)),
        ("Random problems, growing:", growth(random_storages)),
    ):
        said += [title, "", *rows, ""]
    print("\n".join(said))
    if args.write:
        pages.put(args.write, MARK, MARK, "\n".join(said))


if __name__ == "__main__":
    main()
