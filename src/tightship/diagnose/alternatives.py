"""What else could be done with one tensor that takes another program: streaming it or not, ops in slices or whole.

A parameter or its state that streams (allow=stream) is made by a fetch and written back by a store; with ``keep`` its
bytes are there in every step of the plan in which they are not now, and its copies take no time: the plan's steps are
replayed so. For one that is in memory, ``stream`` takes its bytes away from every step that does not use it, and adds
the seconds of a fetch before each that does and of a store after its update, none of them hidden: an upper bound of
the time. What a plan in slices found out about the program in one piece, and in fewer slices, stands in its ``meta``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.ahead import FETCH, STORE
from tightship.simulate import replay
from tightship.units import format_bytes, format_seconds

__all__ = [
    "Alternative",
    "judged",
    "kept_cost",
    "size_of",
    "slices_of",
    "split_rows",
    "stream_row",
    "stream_words",
    "streamed_as",
    "streamed_cost",
    "tensor_of",
]

Cost = tuple[int, float]
AWAY = ".away"
"""What storages end with that have no bytes here: they stand for what lies in the host's pool."""
_ROWS = re.compile(r"\[\d+:\d+\]$")


@dataclass(frozen=True, slots=True)
class Alternative:
    """``way``: keep, recompute, offload, compress, stream, fetch once, fetch again, split, or whole; ``verdict``:
    chosen, slower, over the budget, tie, faster or not possible, and ``reason`` in words. With it the plan has
    ``peak`` bytes, ``more`` than it has now, and takes ``time`` seconds (0: not known), ``extra`` more."""

    way: str
    verdict: str
    reason: str
    peak: int = 0
    more: int = 0
    time: float = 0.0
    extra: float = 0.0


def judged(way: str, cost: Cost, base: Cost, budget: int | None, missed: str) -> Alternative:
    """What doing it comes to, beside what the plan costs; ``missed``: why a plan does not do what costs it less."""
    (peak, time), more, extra = base, cost[0] - base[0], cost[1] - base[1]
    if budget is not None and cost[0] > max(budget, peak):
        verdict, reason = "over the budget", f"by {format_bytes(cost[0] - budget)}"
    elif abs(extra) <= 1e-9 * max(time, 1e-9):
        verdict, reason = "tie", "no second more or less, and within the budget"
    elif extra > 0:
        verdict, reason = "slower", "the plan gets by with less time"
    else:
        verdict, reason = "faster", missed
    return Alternative(way, verdict, reason, cost[0], more, cost[1], extra)


# --- streams ---


def tensor_of(graph: Graph, s: int) -> str:
    """The name of the tensor that a storage is, or is some rows of, where that streams; else nothing."""
    op = graph.uses.definer[s]
    if op >= 0 and graph.ops[op].target == FETCH:
        return _ROWS.sub("", graph.ops[op].name.removeprefix("fetch "))
    storage = graph.storages[s]
    if op < 0 and not storage.size and storage.name.endswith(AWAY):  # the bytes in the host's pool
        return _ROWS.sub("", storage.name.removesuffix(AWAY))
    return ""


def streamed_as(graph: Graph, s: int) -> tuple[int, ...]:
    """The storages that one streamed tensor is, each made by a fetch of its own, as a whole or some rows of it; none
    for what does not stream."""
    if not (name := tensor_of(graph, s)):
        return ()
    made = [t for t, op in enumerate(graph.uses.definer) if op >= 0 and graph.ops[op].target == FETCH]
    return tuple(t for t in made if tensor_of(graph, t) == name)


def size_of(graph: Graph, parts: Sequence[int]) -> int:
    """Bytes of the whole tensor."""
    rows: dict[str, int] = {}
    for s in parts:
        name = graph.ops[graph.uses.definer[s]].name
        rows[name] = max(rows.get(name, 0), graph.storages[s].size)
    pieces = {n: size for n, size in rows.items() if _ROWS.search(n)}
    return max([sum(pieces.values()), *(size for n, size in rows.items() if n not in pieces)])


def copies_of(graph: Graph, plan: Plan, parts: tuple[int, ...]) -> tuple[int, int, frozenset[int]]:
    """How many fetches and stores of a streamed tensor a plan has, and their ops."""
    name, fetches = tensor_of(graph, parts[0]), {graph.uses.definer[s] for s in parts}
    stores = {
        k
        for k, op in enumerate(graph.ops)
        if op.target == STORE and _ROWS.sub("", op.name.removeprefix("store ")) == name
    }
    run = [s.op for s in plan.steps if s.kind in ("compute", "recompute")]
    return sum(k in fetches for k in run), sum(k in stores for k in run), frozenset(fetches | stores)


def stream_words(graph: Graph, plan: Plan, parts: tuple[int, ...]) -> str:
    fetches, stores, ops = copies_of(graph, plan, parts)
    seconds = sum(
        graph.ops[s.op].time for s in plan.steps if s.op in ops and s.kind in ("compute", "recompute")
    )
    many = f"{fetches} fetch{'es' * (fetches != 1)}, {stores} store{'s' * (stores != 1)}"
    return f"in the host's memory between its uses: {many} a step, {format_seconds(seconds)} of copies"


def kept_cost(graph: Graph, plan: Plan, tensors: Sequence[tuple[int, ...]]) -> Cost:
    """Peak and seconds of the plan's steps if streamed tensors, each some storages, were there all the time."""
    line, there = replay(graph, plan.steps), set[int]()
    every = {s for parts in tensors for s in parts}
    size = sum(size_of(graph, parts) for parts in tensors)
    peak = graph.static_bytes + size
    for step, nbytes in zip(plan.steps, line.during, strict=True):
        if step.kind in ("compute", "recompute"):
            made = graph.uses.defines[step.op] if step.kind == "compute" else step.storages
            there |= every.intersection(made)
        peak = max(peak, nbytes + size - sum(graph.storages[s].size for s in there))
        if step.kind == "free" and step.form == "full":
            there.difference_update(step.storages)
    free = {k for parts in tensors for k in copies_of(graph, plan, parts)[2]}
    ops = tuple(replace(op, time=0.0) if k in free else op for k, op in enumerate(graph.ops))
    return peak, replay(replace(graph, ops=ops), plan.steps).time


def streamed_cost(graph: Graph, plan: Plan, storages: Sequence[int]) -> tuple[Cost, int]:
    """Peak and seconds of the plan's steps if tensors of the caller's streamed, and how many fetches that takes."""
    line, uses, sizes = replay(graph, plan.steps), graph.uses, {s: graph.storages[s].size for s in storages}
    all_, fetches, seconds = sum(sizes.values()), 0, 0.0
    peak, here, written = graph.static_bytes - all_, set[int](), set[int]()
    for step, nbytes in zip(plan.steps, line.during, strict=True):
        runs = step.kind in ("compute", "recompute")
        used = {s for s in (*uses.reads[step.op], *uses.mutates[step.op]) if s in sizes} if runs else set()
        written |= {s for s in uses.mutates[step.op] if s in sizes} if runs else set()
        for s in used - here:
            fetches, seconds = fetches + 1, seconds + graph.machine.seconds("fetch", sizes[s])
        here = used if runs else here
        peak = max(peak, nbytes - all_ + sum(sizes[s] for s in used))
    seconds += sum(graph.machine.seconds("offload", sizes[s]) for s in written)
    return (peak, line.time + seconds), fetches


def stream_row(graph: Graph, plan: Plan, s: int) -> Alternative:
    """What streaming a tensor of the caller's would come to."""
    if graph.storages[s].kind not in ("parameter", "state"):
        return Alternative("stream", "not possible", "parameters and optimizer state stream alone")
    if not any(op.phase == "update" for op in graph.ops):
        return Alternative("stream", "not possible", "parameters stream in training steps alone")
    line = replay(graph, plan.steps)
    cost, fetches = streamed_cost(graph, plan, [s])
    found = judged("stream", cost, (line.peak, line.time), plan.budget, "")
    many = f"{fetches} fetch{'es' * (fetches != 1)}, no copy hidden behind ops"
    return replace(found, reason=f"{many}; {found.reason}") if found.verdict != "over the budget" else found


# --- slices ---


def slices_of(graph: Graph, plan: Plan, s: int) -> Mapping[str, Any] | None:
    """What a plan says of the storage that ``s`` is a slice of: its ``name`` and ``bytes`` in one piece, and the
    plan's ``split``. None for what is no slice."""
    split = plan.meta.get("split")
    if not isinstance(split, dict) or not isinstance(split.get("storages"), dict):
        return None
    row = split["storages"].get(graph.storages[s].name)
    if not isinstance(row, list) or [type(x) for x in row] != [str, int]:
        return None
    return split | {"name": row[0], "bytes": row[1]}


def split_rows(graph: Graph, plan: Plan, s: int) -> Iterator[Alternative]:
    """Why a storage is there in slices, and what fewer of them, or none, would come to."""
    split = slices_of(graph, plan, s)
    if split is None:
        return
    base = plan.peak, plan.time
    sizes = f"{format_bytes(graph.storages[s].size)} of {format_bytes(split['bytes'])}"
    most = f"; {n} slices at most" if (n := split.get("slices")) else ""
    reason = f"a slice of {split['name']}, {sizes}{most}"
    yield Alternative("split", "chosen", reason, plan.peak, 0, plan.time)
    whole = split.get("whole", {})
    if isinstance(whole, dict) and isinstance(whole.get("peak"), int):
        yield _found(
            "whole", whole["peak"], whole.get("time"), base, plan.budget, bool(whole.get("searched"))
        )
    for row in split.get("tried", ()):
        if isinstance(row, dict) and isinstance(row.get("needs"), int):
            way = f"{row.get('slices')} slices"
            yield _found(way, row["needs"], None, base, plan.budget, bool(row.get("searched")))


def _found(way: str, peak: int, time: object, base: Cost, budget: int | None, searched: bool) -> Alternative:
    """Of another program: its plan where there is one within the budget, else what it needs."""
    if isinstance(time, float):
        return judged(way, (peak, time), base, budget, "the search has not found it")
    how = "as far as was searched" if searched else "no plan of it needs less, which is proved"
    over = peak - (base[0] if budget is None else budget)
    return Alternative(
        way, "over the budget", f"by {format_bytes(max(over, 0))}, {how}", peak, peak - base[0]
    )
