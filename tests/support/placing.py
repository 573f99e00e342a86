"""Placement problems for tests, and slow definitions to hold fast code against."""

import csv
import dataclasses
import itertools
import os
import random
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tightship.plan import Buffer, Problem, Solution
from tightship.planners import planner
from tightship.verify.placement import check_solution

SHARED = Path(os.environ.get("TIGHTSHIP_SHARED", Path(__file__).resolve().parents[3] / "shared"))


def packing(name: str) -> Problem:
    """A problem of the shared data; skips the test when it is not there."""
    path = SHARED / "data" / "packing" / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"no {path}: set TIGHTSHIP_SHARED to a folder with data/packing")
    with path.open(newline="") as file:
        rows = [(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"])) for r in csv.DictReader(file)]
    return Problem(tuple(Buffer(*row) for row in rows))


@st.composite
def problems(draw: st.DrawFn, most: int = 12, plain: bool = False) -> Problem:
    """Small problems; unless plain with alignments, empty buffers and pins that do not clash."""
    buffers: list[Buffer] = []
    for k in range(draw(st.integers(0, most))):
        lower = draw(st.integers(-3, 9))
        upper = lower + draw(st.integers(1, 6))
        size = draw(st.integers(1 if plain else 0, 9))
        buffer = Buffer(f"b{k}", lower, upper, size)
        if not plain and draw(st.booleans()):
            alignment = draw(st.sampled_from((2, 3, 4, 8)))
            buffer = Buffer(f"b{k}", lower, upper, size, alignment)
            pinned = alignment * draw(st.integers(0, 6))
            pin = Buffer(f"b{k}", lower, upper, size, alignment, pinned)
            if draw(st.integers(0, 3)) == 0 and not any(
                b.pinned is not None and shares(b, b.pinned, pin, pinned) for b in buffers
            ):
                buffer = pin
        buffers.append(buffer)
    return Problem(tuple(buffers))


def planted(count: int, seed: int, height: int = 64) -> Problem:
    """At least ``count`` buffers that fill ``height`` bytes at all times, in one placement at least: a rectangle,
    cut again and again in two, or in five around a middle."""
    rng = random.Random(seed)
    whole = [(0, 4 * count, 0, height)]
    while len(whole) < count:
        k = rng.choices(range(len(whole)), [(b - a) * (d - c) for a, b, c, d in whole])[0]
        a, b, c, d = whole.pop(k)
        if b - a >= 4 and d - c >= 4 and rng.random() < 0.3:
            t, u = sorted(rng.sample(range(a + 1, b), 2))
            x, y = sorted(rng.sample(range(c + 1, d), 2))
            around = [(a, u, c, x), (u, b, c, y), (t, b, y, d), (a, t, x, d)]
            whole += [*around, (t, u, x, y)]
        elif d - c < 2 or (b - a >= 2 and rng.random() < 0.5):
            t = rng.randrange(a + 1, b)
            whole += [(a, t, c, d), (t, b, c, d)]
        else:
            x = rng.randrange(c + 1, d)
            whole += [(a, b, c, x), (a, b, x, d)]
    rng.shuffle(whole)
    return Problem(tuple(Buffer(f"p{k}", a, b, d - c) for k, (a, b, c, d) in enumerate(whole)))


def stepped(count: int, seed: int) -> Problem:
    """Random problem large enough for the spans of the core to be joined and split in many ways."""
    rng = random.Random(seed)
    rows = []
    for k in range(count):
        lower = rng.randrange(count)
        alignment = rng.choice((1, 1, 64, 256))
        rows.append(
            Buffer(str(k), lower, lower + rng.choice((1, 2, 5, 40, count)), rng.randrange(2000), alignment)
        )
    return Problem(tuple(rows))


def assert_right(problem: Problem, solution: Solution) -> None:
    assert check_solution(problem, solution) == []
    assert overlapping(problem, solution) == set()
    tops = (x + b.size for b, x in zip(problem.buffers, solution.offsets, strict=True))
    assert solution.arena == max(tops, default=0) >= solution.lower_bound


def shares(a: Buffer, x: int, b: Buffer, y: int) -> bool:
    """The definition of an overlap."""
    return _meets(a, b) and max(x, y) < min(x + a.size, y + b.size)


def overlapping(problem: Problem, solution: Solution) -> set[frozenset[str]]:
    placed = zip(problem.buffers, solution.offsets, strict=True)
    pairs = itertools.combinations(placed, 2)
    return {frozenset((a.id, b.id)) for (a, x), (b, y) in pairs if shares(a, x, b, y)}


def lowest(buffer: Buffer, placed: list[tuple[Buffer, int]]) -> int:
    """First fit by definition: the lowest aligned offset at which nothing is shared."""
    offset = 0
    while any(shares(buffer, offset, b, x) for b, x in placed):
        offset += buffer.alignment
    return offset


def smallest_hole(buffer: Buffer, placed: list[tuple[Buffer, int]]) -> int:
    """Best fit by definition: the smallest hole between those alive at the same time, else above them."""
    spans = [(x, x + b.size) for b, x in placed if b.size and _meets(buffer, b)]
    taken = {byte for x, y in spans for byte in range(x, y)}
    holes, offset, top = [], 0, max((y for _, y in spans), default=0)
    while offset < top:
        offset = -(-offset // buffer.alignment) * buffer.alignment
        if offset in taken or offset >= top:
            offset += 1
            continue
        end = offset
        while end not in taken and end < top:
            end += 1
        holes.append((end - offset, offset))
        offset = end
    fitting = [h for h in holes if h[0] >= buffer.size]
    return min(fitting)[1] if fitting else -(-top // buffer.alignment) * buffer.alignment


def _meets(a: Buffer, b: Buffer) -> bool:
    return max(a.lower, b.lower) < min(a.upper, b.upper)


def optimum(problem: Problem) -> int:
    """The least arena, by first fit in every order (some order of first fit is optimal)."""
    pinned = [(b, b.pinned) for b in problem.buffers if b.pinned is not None]
    free = [b for b in problem.buffers if b.pinned is None]
    best = None
    for order in itertools.permutations(free):
        placed = list(pinned)
        for b in order:
            placed.append((b, lowest(b, placed)))
        arena = max((x + b.size for b, x in placed), default=0)
        best = arena if best is None else min(best, arena)
    return best or 0


def solve(name: str, problem: Problem, seed: int = 0, work: int = 3_000) -> Solution:
    """What a placement planner makes of a problem: limited by work alone, so that it is the same every time."""
    info = planner(name, "place")
    given = {"seed": seed, "work_limit": work, "time_limit": None}
    fields = {f.name for f in dataclasses.fields(info.options)}
    made: Solution = info.plan(problem, info.options(**{k: v for k, v in given.items() if k in fields}))
    return made
