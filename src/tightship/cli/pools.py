"""Pools on the command line of ``pack`` and ``verify``: options in, and what is said of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tightship.errors import BadInput
from tightship.frontends.problem_csv import Table, chosen_conflicts
from tightship.plan import Pool, Problem, Solution
from tightship.units import format_bytes, parse_bytes

__all__ = ["placed_of", "pool_lines", "pool_rows", "pools_of", "side_by_side"]

_ANY_HEAP = 2**62  # of a packing that is verified without being told a limit


def pools_of(chosen: argparse.Namespace, table: Table, capacity: int | None) -> tuple[Pool, ...]:
    """The pools of a problem: those given, else those that its file names; none if it needs none.

    Raises ``BadInput`` for pools that nobody may go to, and for rows that name pools there are not."""
    given: dict[str, int | None] = {}
    for text in chosen.pool:
        name, equals, size = text.partition("=")
        if name.split() != [name] or name in given:
            raise BadInput("a pool is NAME or NAME=BYTES, named once and without spaces", text, "--pool")
        given[name] = parse_bytes(size, "--pool") if equals else None
    rows = zip(table.problem.buffers, table.homes, strict=True)
    named = [(k, n) for k, (b, (pool, _)) in enumerate(rows) for n in (*b.pools, pool) if n]
    if given:
        for k, name in named:
            if name not in given:
                raise BadInput(f"a pool is one of {', '.join(given)}", name, table.place(k))
        free = any(not b.pools for b in table.fixed.buffers)
        for name in given:
            if not free and name not in table.pool_names:
                raise BadInput("a pool is one that some buffer may go to", name, "--pool")
    pools = given or dict.fromkeys(table.pool_names)
    heaps = _heaps(chosen, list(pools))
    if capacity is not None and pools:
        raise BadInput(
            "a capacity is for one arena; a pool has its own (--pool NAME=BYTES)", capacity, "--capacity"
        )
    if not pools and not heaps and not any(heap for _, heap in table.homes):
        return ()
    several = {pool for pool, heap in table.homes if heap}
    made = []
    for name, limit in (pools or {"": capacity}).items():
        made.append(Pool(name, limit, heaps.get(name, _ANY_HEAP if name in several else None)))
    return tuple(made)


def _heaps(chosen: argparse.Namespace, pools: Sequence[str]) -> dict[str, int]:
    heaps: dict[str, int] = {}
    for text in chosen.heap:
        name, equals, size = text.rpartition("=")
        if not equals and len(pools) > 1:
            raise BadInput("with several pools, a heap limit is NAME=BYTES", text, "--heap")
        if not equals:
            name = pools[0] if pools else ""
        if name not in (pools or [""]) or name in heaps:
            known = ", ".join(pools) or "none here"
            raise BadInput(f"a heap limit is of a pool ({known}), and given once", text, "--heap")
        heaps[name] = parse_bytes(size, "--heap")
        if not heaps[name]:
            raise BadInput("a heap has at least 1 byte", text, "--heap")
    return heaps


def placed_of(table: Table, pools: tuple[Pool, ...]) -> tuple[Problem, Solution]:
    """The problem of the buffers that have an offset, not pinned, and where they lie."""
    if not table.has_offsets:
        raise BadInput("a packing has a column 'offset'", ",".join(table.header), f"{table.name}:1")
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
    tops = _tops(problem, solution)
    return problem, replace(solution, arena=sum(tops.values()))


def pool_rows(problem: Problem, made: Solution) -> list[Mapping[str, Any]]:
    """Of each pool what lies in it; nothing for a problem of one arena."""
    tops = _tops(problem, made)
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
                "buffers": sum(1 for name, _ in made.homes if name == pool.name),
            }
        )
    return rows


def pool_lines(problem: Problem, made: Solution) -> list[str]:
    lines = []
    for row in pool_rows(problem, made):
        of = "" if row["capacity"] is None else f" of {format_bytes(row['capacity'])}"
        heaps = f" in {len(row['heaps'])} heaps" if row["heap"] is not None else ""
        title = f"pool {row['name']}" if row["name"] else "heaps"
        lines.append(f"  {title:<11}  {format_bytes(row['arena'])}{of}{heaps}, {row['buffers']} buffers")
    return lines


def side_by_side(problem: Problem, made: Solution) -> Solution:
    """The pools' heaps one above the other, as one arena that can be drawn."""
    if not problem.pools:
        return made
    base, at = 0, {}
    for home, top in sorted(_tops(problem, made).items()):
        at[home] = base
        base += top
    offsets = tuple(x + at[home] for x, home in zip(made.offsets, made.homes, strict=True))
    return replace(made, offsets=offsets)


def _tops(problem: Problem, made: Solution) -> dict[tuple[str, int], int]:
    tops: dict[tuple[str, int], int] = {}
    homes = made.homes or (("", 0),) * len(made.offsets)
    for b, x, home in zip(problem.buffers, made.offsets, homes, strict=True):
        tops[home] = max(tops.get(home, 0), x + b.size)
    return tops
