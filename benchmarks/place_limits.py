"""Placement's promises about time: by how much a time limit is overrun, and how soon Ctrl-C ends a search.

    python benchmarks/place_limits.py [--most 1000000] [--write docs/placement.md]

Of random problems of growing size, and of the first with gaps and with conflicts: the call is made with a time
limit of its own, and then interrupted at moments spread over all of its phases. What the verifier takes afterwards is
measured apart: every answer is checked before it is given.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pages
from place import machine, random_storages

from tightship.plan import Gap, Problem
from tightship.planners.place import portfolio
from tightship.planners.place.orders import Interrupted
from tightship.verify.placement import check_solution

MARK = "<!-- limits -->"
LIMITS = (0.1, 0.5, 2.0)
INTERRUPTS = 8
FOREVER = portfolio.Options(work_limit=10**12, time_limit=None)


def with_gaps(problem: Problem) -> Problem:
    """Those that live long sleep for most of it."""
    buffers = (
        replace(b, gaps=(Gap(b.lower + 5, b.upper - 5),)) if b.upper - b.lower > 50 else b
        for b in problem.buffers
    )
    return replace(problem, buffers=tuple(buffers))


def with_conflicts(problem: Problem) -> Problem:
    """Neighbors in the list may be alive together."""
    count = len(problem.buffers)
    rows = tuple((1 << k + 1) % (1 << count) | (1 << k) >> 1 for k in range(count))
    return replace(problem, conflicts=rows)


def overrun(problem: Problem, limit: float) -> float:
    """Seconds beyond the limit until the planner returns."""
    # A capacity that cannot be met: it has reason to go on.
    wanted = replace(problem, capacity=1)
    began = time.perf_counter()
    portfolio.plan(wanted, portfolio.Options(work_limit=10**12, time_limit=limit))
    return time.perf_counter() - began - limit


def latency(problem: Problem, after: float) -> tuple[float, bool]:
    """Seconds from a signal some time after the call until it returns; and whether with a packing."""
    wanted = replace(problem, capacity=1)
    signal.setitimer(signal.ITIMER_REAL, after)
    due = time.perf_counter() + after
    try:
        portfolio.plan(wanted, FOREVER)
    except Interrupted:
        return time.perf_counter() - due, True
    except KeyboardInterrupt:  # before there was anything
        return time.perf_counter() - due, False
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 0.0, True  # over before it was interrupted


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def rows(most: int) -> Iterator[str]:
    yield f"| buffers | beyond {', '.join(f'{x:g} s' for x in LIMITS)} | after Ctrl-C, median | worst | verifying |"
    yield "| --- | --- | --- | --- | --- |"
    sizes = [size for size in (200, 1_000, 10_000, 100_000, 1_000_000) if size <= 1.2 * most]
    kinds = [(random_storages(size), "") for size in sizes]
    kinds += [
        (with_gaps(random_storages(10_000)), " with gaps"),
        (with_gaps(random_storages(100_000)), " with gaps"),
    ]
    kinds += [(with_conflicts(random_storages(2_000)), " with conflicts")]
    for problem, kind in kinds:
        beyond = [overrun(problem, limit) for limit in LIMITS]
        began = time.perf_counter()
        greedy = portfolio.plan(problem, portfolio.Options(time_limit=0.0))
        first = time.perf_counter() - began
        began = time.perf_counter()
        assert check_solution(problem, greedy) == []
        verifying = time.perf_counter() - began
        span = 1.0 + 2 * first
        waits = [latency(problem, span * (k + 0.5) / INTERRUPTS)[0] for k in range(INTERRUPTS)]
        cells = [", ".join(f"{1000 * x:.0f} ms" for x in beyond)]
        cells += [f"{1000 * x:.0f} ms" for x in (statistics.median(waits), max(waits))]
        yield f"| {len(problem.buffers)}{kind} | {' | '.join(cells)} | {verifying:.2f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Placement's promises about time.")
    parser.add_argument("--most", type=int, default=1_000_000, metavar="BUFFERS")
    parser.add_argument("--write", type=Path, metavar="PAGE.md")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, interrupted)  # as SIGINT is handled; a timer is more punctual than a thread
    said = "\n".join([machine(), "", *rows(args.most), ""])
    print(said)
    if args.write:
        pages.put(args.write, MARK, MARK, said)


if __name__ == "__main__":
    main()
