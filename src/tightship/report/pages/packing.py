"""A packing as a page: where every buffer lies, how many bytes are alive, and what is alive where most are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from tightship.plan import Buffer, Problem, Solution
from tightship.report.packing import COLORS, age
from tightship.report.pages import Fact, Section, cut, page_of, table
from tightship.units import format_bytes, format_seconds

__all__ = ["packing_page"]


def packing_page(problem: Problem, solution: Solution, rows: Mapping[str, Any], *, title: str = "") -> str:
    """The page's text. ``rows``: the numbers that ``pack --json`` prints."""
    facts: list[Fact] = [
        ("arena", solution.arena, "bytes"),
        ("lower bound", solution.lower_bound, "bytes"),
        ("capacity", problem.capacity, "bytes"),
        ("without sharing", sum(b.size for b in problem.buffers), "bytes"),
        ("buffers", len(problem.buffers), "count"),
    ]
    proof = "least possible" if solution.optimal else "the lower bound is not reached"
    about = f"{solution.planner}, in {format_seconds(solution.seconds)}; {proof}"
    about += "" if rows.get("met", True) else "; the capacity is NOT met"
    return page_of(title or "packing", about, facts, _sections(problem, solution), rows)


def _sections(problem: Problem, solution: Solution) -> list[Section]:
    since = min((b.lower for b in problem.buffers), default=0)
    until = max((b.upper for b in problem.buffers), default=1)
    names: dict[str, int] = {"": 0}
    spaces: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    homes = solution.homes or (("arena", 0),) * len(problem.buffers)
    for b, offset, home in zip(problem.buffers, solution.offsets, homes, strict=False):
        spaces[home] += _stays(b, offset, age(b, until - since), names.setdefault(b.id, len(names)))
    lines = [] if solution.homes else _lines(problem, solution)
    arena = {
        "kind": "arena", "heading": "Where every buffer lies", "across": "time", "view": "time", "lines": lines,
        "start": since, "end": max(until, since + 1), "names": list(names),
        "bands": [(f"age{k}", _lives(k)) for k in range(len(COLORS))],
        "spaces": [
            {"name": pool if heap == 0 else f"{pool}, heap {heap}", "stays": stays}
            | {"size": max([r[2] + r[3] for r in stays] + [line[1] for line in lines], default=1)}
            for (pool, heap), stays in sorted(spaces.items())
        ] or [{"name": "arena", "stays": [], "size": 1}],
    }  # fmt: skip
    times, alive = _alive(problem.buffers)
    memory = {
        "kind": "memory", "heading": "Bytes alive", "across": "time", "bands": [("activation", "alive")],
        "lines": [(name, n, tint) for name, n, tint in _lines(problem, solution) if name != "lower bound"],
        "panels": [{"caption": "alive at each time", "columns": [alive], "times": times, "view": "time",
                    "start": since, "end": max(until, since + 1), "peak": max(alive, default=0)}],
    }  # fmt: skip
    return [arena, memory, _peak(problem, solution, times, alive)]


def _stays(b: Buffer, offset: int, shade: int, name: int) -> list[list[int]]:
    """What of a buffer is alive; with gaps, all of it is behind that, pale."""
    whole = [[b.lower, b.upper, offset, b.size, shade, name, 0, 1]] if b.gaps else []
    return whole + [[x, y, offset + low, high - low, shade, name, 0] for x, y, low, high in b.parts()]


def _lives(k: int) -> str:
    return {0: "lives shortest", len(COLORS) - 1: "longest"}.get(k, "")


def _lines(problem: Problem, solution: Solution) -> list[tuple[str, int, str]]:
    lines = [("lower bound", solution.lower_bound, "bound")] if solution.lower_bound else []
    if problem.capacity is not None and problem.capacity <= 1.5 * solution.arena:
        lines.append(("capacity", problem.capacity, "budget"))
    return lines


def _alive(buffers: Sequence[Buffer]) -> tuple[list[int], list[int]]:
    """Times at which it changes, and the bytes alive from each on."""
    change: dict[int, int] = defaultdict(int)
    for b in buffers:
        for since, until, low, high in b.parts():
            change[since] += high - low
            change[until] -= high - low
    times = sorted(change)
    alive = list(accumulate(change[t] for t in times))
    return (times, alive) if times else ([0], [0])


def _peak(problem: Problem, solution: Solution, times: Sequence[int], alive: Sequence[int]) -> Section:
    most = max(alive)
    when = times[alive.index(most)]
    rows: list[list[Any]] = []
    for k, b in enumerate(problem.buffers):
        here = sum(high - low for since, until, low, high in b.parts() if since <= when < until)
        if here:
            at = solution.offsets[k] if solution.offsets else None
            rows.append([b.id, here, at, b.lower, b.upper])
    rows.sort(key=lambda r: -r[1])
    names = [
        ("buffer", "text"),
        ("bytes alive", "bytes"),
        ("offset", "count"),
        ("from", "count"),
        ("to", "count"),
    ]
    section = table("Where most is alive", names, cut(rows, 1))
    return section | {"said": f"{format_bytes(most)} in {len(rows)} buffers at time {when}"}
