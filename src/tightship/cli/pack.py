"""``pack``, and ``verify`` of what it writes: placement problems as files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightship.cli.options import given_options
from tightship.cli.output import INTERRUPTED, Output, writable
from tightship.cli.pools import placed_of, pool_lines, pool_rows, pools_of, side_by_side
from tightship.diagnose.infeasible_subset import Clash, clash
from tightship.errors import BadInput
from tightship.frontends import problem_csv
from tightship.plan import Problem, Solution
from tightship.planners import planner
from tightship.planners.packing import Interrupted, Search, watched
from tightship.planners.packing import pack as place
from tightship.planners.pools import clash_of_pools
from tightship.report.packing import packing_picture
from tightship.report.pages.packing import packing_page
from tightship.report.progress import Line
from tightship.serde import write_file
from tightship.units import MAX_BYTES, format_bytes, format_seconds, parse_bytes
from tightship.verify.placement import check_solution
from tightship.violation import Violation

__all__ = ["is_packing", "pack", "verify_packing"]

_SHOWN = 20  # ids of a clash, and violations, that people are shown


def pack(chosen: argparse.Namespace, out: Output) -> int:
    search = _search(chosen)
    capacity = _capacity(chosen)
    planner(chosen.planner, "place")  # what is unknown is said before the work is done
    path = writable(chosen.output, "--output")
    drawing, page = writable(chosen.picture, "--svg"), writable(chosen.report, "--report")
    with Line(out.errors, f"reading {chosen.problem}"):
        table = problem_csv.read(chosen.problem)
        pools = pools_of(chosen, table, capacity)
        problem_csv.check_pins(table, capacity, pools)
        problem = replace(table.fixed, capacity=None if pools else capacity, pools=pools)
        known = None if chosen.baseline is None else _baseline(chosen.baseline, problem)
    with Line(out.errors, f"packing {chosen.problem}", limit=search.seconds) as line, watched(line.packing):
        try:
            made, interrupted = place(problem, chosen.planner, search, baseline=known), False
        except Interrupted as end:
            made, interrupted = end.solution, True
        met = not any(v.code == "over-capacity" for v in check_solution(problem, made))
        why = None if met else clash_of_pools(problem) if pools else clash(problem, capacity or 0)
    rows = _rows(problem, made) | {"met": met, "clash": _clash_rows(why), "pools": pool_rows(problem, made)}
    rows["interrupted"] = interrupted
    text = [_said(chosen.problem, problem, made), *pool_lines(problem, made)]
    if interrupted:
        text.append("interrupted: this is the best that was found so far")
    if not met:
        text.append(_why(why, made, capacity))
    if path is not None and met:
        problem_csv.write(path, table, made.offsets, made.homes)
        rows["output"] = str(path)
        text.append(f"written to {path}")
    elif path is not None:
        text.append(f"not written to {path}: the capacity is not met")
    if drawing is not None:
        title = Path(chosen.problem).stem
        write_file(drawing, packing_picture(problem, side_by_side(problem, made), title=title).encode())
        rows["picture"] = str(drawing)
        text.append(f"drawn in {drawing}")
    if page is not None:
        shown = packing_page(problem, made, rows, title=Path(chosen.problem).stem)
        write_file(page, shown.encode())
        rows["report"] = str(page)
        text.append(f"shown in {page}")
    out.answer(rows, "\n".join(text))
    return INTERRUPTED if interrupted else 0 if met else 1


def is_packing(path: str) -> bool:
    """Whether a file is to be verified as a packing: by its name, else by how it begins."""
    name = path.lower()
    if name.endswith((".csv", ".json")):
        return name.endswith(".csv")
    try:
        with open(path, "rb") as file:
            return not file.read(64).lstrip().startswith(b"{")
    except (OSError, ValueError):
        return False


def verify_packing(chosen: argparse.Namespace, out: Output) -> int:
    if chosen.source is not None:
        raise BadInput("a packing is verified without a graph", chosen.source, "--source")
    capacity = _capacity(chosen)
    with Line(out.errors, f"reading {chosen.plan}"):
        table = problem_csv.read(chosen.plan)
        pools = pools_of(chosen, table, capacity)
        problem, solution = placed_of(table, pools)
        arena = solution.arena
    found = [_unplaced(b.id, b.lower) for b in table.problem.buffers if b.pinned is None]
    found += check_solution(replace(problem, capacity=None if pools else capacity), solution)
    rows = [
        {"code": v.code, "step": v.step, "subjects": list(v.subjects), "message": v.message} for v in found
    ]
    head = f"{len(table.rows)} buffers, arena {_exact(arena)}"
    if not found:
        text = f"{chosen.plan}: nothing is wrong ({head})"
    else:
        count = f"{len(found)} violation{'s' if len(found) > 1 else ''}"
        lines = [f"{chosen.plan}: {count} ({head})", *(f"  {_timed(v)}" for v in found[:_SHOWN])]
        text = "\n".join(lines + ([f"  … and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []))
    answer = {"violations": rows, "arena": arena, "capacity": capacity, "buffers": len(table.rows)}
    out.answer(answer | ({"pools": pool_rows(problem, solution)} if pools else {}), text)
    return 1 if found else 0


# --- arguments ---


def _search(chosen: argparse.Namespace) -> Search:
    given = given_options(chosen)
    for name in ("seed", "work"):
        if given.get(name, 0) > MAX_BYTES:
            raise BadInput("a number is at most 2^63-1", given[name], f"option --{name}")
    return Search(**given)


def _capacity(chosen: argparse.Namespace) -> int | None:
    return None if chosen.capacity is None else parse_bytes(chosen.capacity, "--capacity")


def _baseline(path: str, problem: Problem) -> list[int]:
    """A known packing's offsets in the problem's order."""
    table = problem_csv.read(path)
    at = {b.id: (k, b) for k, b in enumerate(table.problem.buffers)}
    if missing := [b.id for b in problem.buffers if b.id not in at]:
        raise BadInput("a baseline has every buffer of the problem; it lacks one", missing[0], path)
    if len(at) > len(problem.buffers):
        extra = next(name for name in at if name not in {b.id for b in problem.buffers})
        raise BadInput("a baseline has no other buffers than the problem", extra, path)
    offsets = []
    for b in problem.buffers:
        k, other = at[b.id]
        if (other.lower, other.upper, other.size) != (b.lower, b.upper, b.size):
            rule = (
                f"a baseline is of the same problem: {b.id!r} is alive [{b.lower}, {b.upper}), {b.size} bytes"
            )
            raise BadInput(rule, (other.lower, other.upper, other.size), table.place(k))
        if other.pinned is None:
            raise BadInput("a baseline has an offset for every buffer", b.id, table.place(k))
        offsets.append(other.pinned)
    return offsets


# --- answers ---


def _rows(problem: Problem, made: Solution) -> dict[str, Any]:
    return {
        "arena": made.arena,
        "lower_bound": made.lower_bound,
        "optimal": made.optimal,
        "gap": made.arena / made.lower_bound - 1 if made.lower_bound else 0.0,
        "planner": made.planner,
        "seconds": made.seconds,
        "work": made.work,
        "capacity": problem.capacity,
        "buffers": len(problem.buffers),
    }


def _said(name: str, problem: Problem, made: Solution) -> str:
    verdict = ""
    if problem.capacity is not None:
        within = "within" if made.arena <= problem.capacity else "NOT within"
        verdict = f", {within} the capacity of {_exact(problem.capacity)}"
    above = 100 * (made.arena / made.lower_bound - 1) if made.lower_bound else 0.0
    proof = "reached: no arena is smaller" if made.optimal else f"the arena is {above:.2f} % above it"
    rows = (
        ("arena", f"{_exact(made.arena)}{verdict}"),
        ("lower bound", f"{_exact(made.lower_bound)}, {proof}"),
        ("planner", f"{made.planner}, in {format_seconds(made.seconds)} ({made.work} buffers placed)"),
    )
    count = len(problem.buffers)
    head = f"packing of {name} ({count} buffer{'' if count == 1 else 's'})"
    return "\n".join([head, *(f"  {word:<11}  {said}" for word, said in rows)])


def _why(why: Clash | None, made: Solution, capacity: int | None) -> str:
    if why is None and capacity is not None and made.lower_bound > capacity:
        return "no packing can meet the capacity: the lower bound is above it"
    if why is None:
        return "no packing was found that meets the capacity; that there is none is not proved"
    more = f" and {len(why.ids) - _SHOWN} more" if len(why.ids) > _SHOWN else ""
    names = ", ".join(why.ids[:_SHOWN]) + more
    if len(why.ids) == 1:
        return f"no packing can meet the capacity: {names} alone needs {_exact(why.nbytes)}"
    return (
        f"no packing can meet the capacity: at time {why.time} these {len(why.ids)} are alive together "
        f"and need {_exact(why.nbytes)}:\n  {names}"
    )


def _clash_rows(why: Clash | None) -> Mapping[str, Any] | None:
    return None if why is None else {"time": why.time, "ids": list(why.ids), "bytes": why.nbytes}


def _unplaced(name: str, time: int) -> Violation:
    return Violation("missing", time, (name,), f"buffer {name!r} has no offset")


def _timed(v: Violation) -> str:
    return str(v).replace(" at step ", " at time ", 1) if v.step >= 0 else str(v)


def _exact(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes} B)"
