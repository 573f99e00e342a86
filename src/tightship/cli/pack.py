"""``pack``, and ``verify`` of what it writes: placement problems as files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tightship.cli.output import INTERRUPTED, Output, targets, write_targets
from tightship.errors import BadInput, Violation
from tightship.files import write_file
from tightship.frontends import problem_csv
from tightship.frontends.problem_csv import Table, chosen_conflicts
from tightship.options import given_options
from tightship.plan import Buffer, Pool, Problem, Solution
from tightship.planners import planner
from tightship.planners.packing import Interrupted, Search, spans, watched
from tightship.planners.packing import pack as place
from tightship.report.c_header import header_of_packing
from tightship.report.progress import Line
from tightship.units import format_bytes, format_seconds, parse_bytes
from tightship.verify.placement import check_solution

if TYPE_CHECKING:
    from tightship.diagnose.infeasible_subset import InfeasibleSubset
    from tightship.planners.banks import Banked

__all__ = ["bank_lines", "bank_rows", "pack", "verify_packing", "why_unmet"]

_ANY_HEAP = 2**62  # of a packing that is verified without being told a limit
_SHOWN = 20  # ids of a clash, and violations, that people are shown


def pack(chosen: argparse.Namespace, out: Output) -> int:
    search = Search(**given_options(chosen))
    capacity = _capacity(chosen)
    planner(chosen.planner, "place")  # what is unknown is said before the work is done
    files = targets(chosen)
    with Line(out.live, f"reading {chosen.problem}"):
        table = problem_csv.read(chosen.problem)
        pools = _pools_of(chosen, table, capacity)
        problem_csv.check_pins(table, capacity, pools)
        problem = replace(table.fixed, capacity=None if pools else capacity, pools=pools)
        known = None if chosen.baseline is None else _baseline(chosen.baseline, problem)
    banked: Banked | None = None
    with Line(out.live, f"packing {chosen.problem}", limit=search.seconds) as line, watched(line.packing):
        try:
            if chosen.bank:
                from tightship.planners.banks import assign_banks

                banked = assign_banks(problem, chosen.planner, search)
                solution, interrupted = banked.solution, False
            else:
                solution, interrupted = place(problem, chosen.planner, search, baseline=known), False
        except Interrupted as end:
            if chosen.bank:  # what was found is a part of it
                raise KeyboardInterrupt from None
            solution, interrupted = end.solution, True
        met = not any(v.code == "over-capacity" for v in check_solution(problem, solution))
        unmet, why = ({"clash": None, "too_large": []}, "") if met else why_unmet(problem, solution)
    rows = _rows(problem, solution) | {"met": met} | unmet
    rows |= {"pools": _pool_rows(problem, solution), "interrupted": interrupted}
    text = [_said(chosen.problem, problem, solution), *_pool_lines(problem, solution)]
    if banked is not None:
        rows |= bank_rows(problem, banked)
        text += bank_lines(banked)
    if interrupted:
        text.append("interrupted: this is the best that was found so far")
    if not met:
        text.append(why)
        for name in ("output", "arena_header"):
            if (path := files.pop(name, None)) is not None:
                text.append(f"not written to {path}: the capacity is not met")
    title, drawn = Path(chosen.problem).stem, _side_by_side(problem, solution)
    answer = SimpleNamespace(
        save=lambda path: problem_csv.write(path, table, solution.offsets, solution.homes),
        picture=lambda path: _draw(path, problem, drawn, title),
        report=lambda path: _show(path, problem, solution, rows, title),
        arena_header=lambda path: write_file(path, header_of_packing(problem, solution, title).encode()),
    )
    write_targets(answer, files, rows, text)
    out.answer(rows, "\n".join(text))
    return INTERRUPTED if interrupted else 0 if met else 1


def verify_packing(chosen: argparse.Namespace, out: Output) -> int:
    if chosen.source is not None:
        raise BadInput(f"--source {chosen.source} with a packing: only plans are verified against a graph")
    capacity = _capacity(chosen)
    with Line(out.live, f"reading {chosen.plan}"):
        table = problem_csv.read(chosen.plan)
        pools = _pools_of(chosen, table, capacity)
        problem, solution = _placed_of(table, pools)
        arena = solution.arena
    faults = [
        Violation("missing", b.lower, (b.id,), f"buffer {b.id!r} has no offset")
        for b in table.problem.buffers
        if b.pinned is None
    ]
    faults += check_solution(replace(problem, capacity=None if pools else capacity), solution)
    head = f"{len(table.rows)} buffers, arena {_exact(arena)}"
    if not faults:
        text = f"{chosen.plan}: OK (0 violations, {head})"
    else:
        count = f"{len(faults)} violation{'s' if len(faults) > 1 else ''}"
        lines = [f"{chosen.plan}: {count} ({head})", *(f"  {_timed(v)}" for v in faults[:_SHOWN])]
        text = "\n".join(lines + ([f"  … and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []))
    answer = {"violations": [asdict(v) for v in faults], "arena": arena}
    answer |= {"capacity": capacity, "buffers": len(table.rows)}
    out.answer(answer | ({"pools": _pool_rows(problem, solution)} if pools else {}), text)
    return 1 if faults else 0


# --- arguments ---


def _capacity(chosen: argparse.Namespace) -> int | None:
    return None if chosen.capacity is None else parse_bytes(chosen.capacity, "--capacity")


def _baseline(path: str, problem: Problem) -> list[int]:
    """A known packing's offsets in the problem's order."""
    table = problem_csv.read(path)
    at = {b.id: (k, b) for k, b in enumerate(table.problem.buffers)}
    if missing := [b.id for b in problem.buffers if b.id not in at]:
        raise BadInput(f"missing buffer {missing[0]!r} of the problem", place=path)
    if len(at) > len(problem.buffers):
        extra = next(name for name in at if name not in {b.id for b in problem.buffers})
        raise BadInput(f"unknown buffer {extra!r}: the problem has none of this name", place=path)
    offsets = []
    for b in problem.buffers:
        k, other = at[b.id]
        if (other.lower, other.upper, other.size) != (b.lower, b.upper, b.size):
            rule = f"buffer {b.id!r} is alive [{other.lower}, {other.upper}) with {other.size} bytes; "
            rule += f"in the problem [{b.lower}, {b.upper}) with {b.size}"
            raise BadInput(rule, place=table.place(k))
        if other.pinned is None:
            raise BadInput(
                f"buffer {b.id!r} has no offset; a baseline has one for every buffer", place=table.place(k)
            )
        offsets.append(other.pinned)
    return offsets


# --- answers ---


def _draw(path: Path, problem: Problem, solution: Solution, title: str) -> None:
    from tightship.report.packing import packing_picture

    write_file(path, packing_picture(problem, solution, title=title).encode())


def _show(path: Path, problem: Problem, solution: Solution, rows: Mapping[str, Any], title: str) -> None:
    from tightship.report.pages.packing import packing_page

    write_file(path, packing_page(problem, solution, rows, title=title).encode())


def _rows(problem: Problem, solution: Solution) -> dict[str, Any]:
    names = ("arena", "lower_bound", "optimal", "gap", "planner", "seconds", "work")
    rows = {n: _gap(solution) if n == "gap" else getattr(solution, n) for n in names}
    return rows | {"capacity": problem.capacity, "buffers": len(problem.buffers)}


def _gap(solution: Solution) -> float:
    return solution.arena / solution.lower_bound - 1 if solution.lower_bound else 0.0


def _said(name: str, problem: Problem, solution: Solution) -> str:
    verdict = ""
    if problem.capacity is not None:
        within = "within" if solution.arena <= problem.capacity else "NOT within"
        verdict = f", {within} the capacity of {_exact(problem.capacity)}"
    seconds = format_seconds(solution.seconds)
    above = f"the arena is {100 * _gap(solution):.2f} % above it"
    proof = "reached: no arena is smaller" if solution.optimal else above
    rows = (
        ("arena", f"{_exact(solution.arena)}{verdict}"),
        ("lower bound", f"{_exact(solution.lower_bound)}, {proof}"),
        ("planner", f"{solution.planner}, in {seconds} ({solution.work} buffers placed)"),
    )
    count = len(problem.buffers)
    head = f"packing of {name} ({count} buffer{'' if count == 1 else 's'})"
    return "\n".join([head, *(f"  {word:<11}  {said}" for word, said in rows)])


def why_unmet(problem: Problem, solution: Solution) -> tuple[dict[str, Any], str]:
    """Which buffers do not fit, for programs and for people."""
    from tightship.diagnose.infeasible_subset import infeasible_subset, infeasible_subset_of_pools, too_large

    limit = problem.capacity or 0
    subset = infeasible_subset_of_pools(problem) if problem.pools else infeasible_subset(problem, limit)
    alone = too_large(problem)
    rows = {"clash": _subset_rows(subset), "too_large": [{"id": b.id, "bytes": b.size} for b in alone]}
    return rows, _why(subset, alone, solution, problem.capacity)


def _why(
    why: InfeasibleSubset | None, alone: Sequence[Buffer], solution: Solution, capacity: int | None
) -> str:
    if alone:
        names = ", ".join(f"{b.id} alone needs {_exact(b.size)}" for b in alone[:_SHOWN])
        more = f", and {len(alone) - _SHOWN} more are too large" if len(alone) > _SHOWN else ""
        where = "the capacity" if capacity is not None else "the capacity of any pool that it may go to"
        return f"no packing can meet {where}: {names}{more}"
    if why is None and capacity is not None and solution.lower_bound > capacity:
        return "no packing can meet the capacity: the lower bound is above it"
    if why is None:
        return "no packing was found that meets the capacity; that there is none is not proved"
    more = f" and {len(why.ids) - _SHOWN} more" if len(why.ids) > _SHOWN else ""
    names = ", ".join(why.ids[:_SHOWN]) + more
    return (
        f"no packing can meet the capacity: at time {why.time} these {len(why.ids)} are alive together "
        f"and need {_exact(why.nbytes)}:\n  {names}"
    )


def _subset_rows(why: InfeasibleSubset | None) -> Mapping[str, Any] | None:
    return None if why is None else {"time": why.time, "ids": list(why.ids), "bytes": why.nbytes}


def _timed(v: Violation) -> str:
    return str(v).replace(" at step ", " at time ", 1) if v.step >= 0 else str(v)


def _exact(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes} B)"


# --- banks ---


def bank_rows(problem: Problem, banked: Banked) -> dict[str, Any]:
    """What lies in each bank, and what the traffic costs."""
    pools = [
        dict(row) | {"speed": pool.speed, "traffic": banked.traffic[pool.name]}
        for pool, row in zip(problem.pools, _pool_rows(problem, banked.solution), strict=True)
    ]
    return {"pools": pools, "cost": banked.cost, "cost_bound": banked.bound, "cost_optimal": banked.optimal}


def bank_lines(banked: Banked) -> list[str]:
    """The same for people."""
    proof = "no choice costs less" if banked.optimal else f"at most {100 * banked.gap:.2f} % above the least"
    every = sum(banked.traffic.values())
    shares = ", ".join(f"{name} {format_bytes(n)}" for name, n in banked.traffic.items())
    return [
        f"  traffic      {format_bytes(every)} read and written: {shares}",
        f"  cost         {format_bytes(round(banked.cost))} of the fastest bank's, {proof}",
    ]


# --- pools ---


def _pools_of(chosen: argparse.Namespace, table: Table, capacity: int | None) -> tuple[Pool, ...]:
    """The pools of a problem: those given, else those that its file names; none if it needs none.

    Raises ``BadInput`` for pools that nobody may go to, and for rows that name pools there are not."""
    given: dict[str, Pool] = {}
    if banks := getattr(chosen, "bank", None):
        for option in ("pool", "heap", "capacity", "baseline"):
            if getattr(chosen, option, None):
                raise BadInput(f"--{option} does not go with --bank")
        from tightship.planners.banks import parse_banks

        given = {bank.name: bank for bank in parse_banks(banks)}
    for text in chosen.pool:
        name, equals, size = text.partition("=")
        if name.split() != [name] or name in given:
            raise BadInput(f"{text!r} is not NAME or NAME=BYTES with a new name", place="--pool")
        given[name] = Pool(name, parse_bytes(size, "--pool") if equals else None)
    source = "--bank" if banks else "--pool"
    rows = zip(table.problem.buffers, table.homes, strict=True)
    named = [(k, n) for k, (b, (pool, _)) in enumerate(rows) for n in (*b.pools, pool) if n]
    if given:
        for k, name in named:
            if name not in given:
                raise BadInput(
                    f"unknown pool {name!r}; {source} gives {', '.join(given)}", place=table.place(k)
                )
        free = any(not b.pools for b in table.fixed.buffers)
        for name in given:
            if not free and name not in table.pool_names:
                raise BadInput(f"no buffer may go to pool {name!r}", place=source)
    pools = given or {name: Pool(name) for name in table.pool_names}
    heaps = _heaps(chosen, list(pools))
    if capacity is not None and pools:
        raise BadInput("--capacity is for one arena: give each pool its own, --pool NAME=BYTES")
    if not pools and not heaps and not any(heap for _, heap in table.homes):
        return ()
    several = {pool for pool, heap in table.homes if heap}
    return tuple(
        replace(pool, heap=heaps.get(name, _ANY_HEAP if name in several else None))
        for name, pool in (pools or {"": Pool("", capacity)}).items()
    )


def _heaps(chosen: argparse.Namespace, pools: Sequence[str]) -> dict[str, int]:
    heaps: dict[str, int] = {}
    for text in chosen.heap:
        name, equals, size = text.rpartition("=")
        if not equals and len(pools) > 1:
            raise BadInput(
                f"{text!r} names no pool: with several, a heap limit is NAME=BYTES", place="--heap"
            )
        if not equals:
            name = pools[0] if pools else ""
        if name not in (pools or [""]) or name in heaps:
            known = ", ".join(pools) or "none"
            raise BadInput(f"{text!r}: unknown pool, or a second limit (pools: {known})", place="--heap")
        heaps[name] = parse_bytes(size, "--heap")
        if not heaps[name]:
            raise BadInput(f"{text!r}: a heap has at least 1 byte", place="--heap")
    return heaps


def _placed_of(table: Table, pools: tuple[Pool, ...]) -> tuple[Problem, Solution]:
    """The problem of the buffers that have an offset, not pinned, and where they lie."""
    if not table.has_offsets:
        raise BadInput("missing column 'offset': a packing has one", place=f"{table.name}:1")
    keep = [k for k, b in enumerate(table.problem.buffers) if b.pinned is not None]
    loose = table.unpinned.buffers  # made anew each time it is asked for
    buffers = tuple(loose[k] for k in keep)
    if not pools:
        buffers = tuple(replace(b, pools=()) for b in buffers)
    offsets = tuple(table.problem.buffers[k].pinned or 0 for k in keep)
    homes = tuple(table.homes[k] for k in keep) if pools else ()
    conflicts = chosen_conflicts(table.problem.conflicts, keep)
    problem = Problem(buffers, conflicts=conflicts, pools=pools)
    solution = Solution(offsets, 0, homes=homes)
    tops = _spans(problem, solution)
    return problem, replace(solution, arena=sum(tops.values()))


def _pool_rows(problem: Problem, solution: Solution) -> list[Mapping[str, Any]]:
    """Of each pool what lies in it; nothing for a problem of one arena."""
    tops = _spans(problem, solution)
    rows: list[Mapping[str, Any]] = []
    for pool in problem.pools:
        heaps = [top for (name, _), top in sorted(tops.items()) if name == pool.name]
        rows.append(
            {
                "name": pool.name,
                "capacity": pool.capacity,
                "heap": None if pool.heap == _ANY_HEAP else pool.heap,
                "arena": sum(heaps),
                "heaps": heaps,
                "buffers": sum(1 for name, _ in solution.homes if name == pool.name),
            }
        )
    return rows


def _pool_lines(problem: Problem, solution: Solution) -> list[str]:
    lines = []
    for row in _pool_rows(problem, solution):
        most = row["capacity"]
        of = "" if most is None else f" of {format_bytes(most)}"
        of += ", NOT within it" if most is not None and row["heap"] is None and row["arena"] > most else ""
        heaps = f" in {len(row['heaps'])} heaps" if row["heap"] is not None else ""
        title = f"pool {row['name']}" if row["name"] else "heaps"
        lines.append(f"  {title:<11}  {format_bytes(row['arena'])}{of}{heaps}, {row['buffers']} buffers")
    return lines


def _side_by_side(problem: Problem, solution: Solution) -> Solution:
    """The pools' heaps one above the other, as one arena that can be drawn."""
    if not problem.pools:
        return solution
    base, at = 0, {}
    for home, top in sorted(_spans(problem, solution).items()):
        at[home] = base
        base += top
    offsets = tuple(x + at[home] for x, home in zip(solution.offsets, solution.homes, strict=True))
    return replace(solution, offsets=offsets)


def _spans(problem: Problem, solution: Solution) -> dict[tuple[str, int], int]:
    return spans(problem, solution.offsets, solution.homes or (("", 0),) * len(solution.offsets))
