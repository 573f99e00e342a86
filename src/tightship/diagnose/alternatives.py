"""What else could be done with one tensor that takes another program: streaming it or not, ops in slices or whole.

A parameter or its state that streams (allow=stream) is made by a fetch and written back by a store; with ``keep`` its
bytes are there in every step of the plan in which they are not now, and its copies take no time: the plan's steps are
replayed so. For one that is in memory, ``stream`` takes its bytes away from every step that does not use it, and adds
the seconds of a fetch before each that does and of a store after its update, none of them hidden: an upper bound of
the time. What a plan in slices found out about the program in one piece, and in fewer slices, stands in its ``meta``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    "kept_in_memory",
    "slices_of",
    "split_rows",
    "stream_row",
    "stream_words",
    "streamed_as",
]

Cost = tuple[int, float]


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


def streamed_as(graph: Graph, s: int) -> tuple[int, ...]:
    """The storages that one streamed tensor is, each made by a fetch of its own; none for what does not stream."""
    op = graph.uses.definer[s]
    if op < 0 or graph.ops[op].target != FETCH:
        return ()
    name = graph.ops[op].name
    return tuple(
        t for t, made in enumerate(graph.uses.definer) if made >= 0 and graph.ops[made].name == name
        and graph.ops[made].target == FETCH
    )  # fmt: skip


def copies_of(graph: Graph, plan: Plan, parts: tuple[int, ...]) -> tuple[int, int, frozenset[int]]:
    """How many fetches and stores of a streamed tensor a plan has, and their ops."""
    fetches = {graph.uses.definer[s] for s in parts}
    names = {graph.ops[k].name.removeprefix("fetch ") for k in fetches}
    stores = {
        k for k, op in enumerate(graph.ops) if op.target == STORE and op.name.removeprefix("store ") in names
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


def kept_in_memory(graph: Graph, plan: Plan, parts: tuple[int, ...]) -> Cost:
    """Peak and seconds of the plan's steps if a streamed tensor were there all the time."""
    line, size, there, peak = replay(graph, plan.steps), max(graph.storages[s].size for s in parts), set(), 0
    for step, nbytes in zip(plan.steps, line.during, strict=True):
        if step.kind in ("compute", "recompute"):
            made = graph.uses.defines[step.op] if step.kind == "compute" else step.storages
            there |= set(parts).intersection(made)
        peak = max(peak, nbytes + size - sum(graph.storages[s].size for s in there))
        if step.kind == "free" and step.form == "full":
            there.difference_update(step.storages)
    ops = copies_of(graph, plan, parts)[2]
    free = tuple(replace(op, time=0.0) if k in ops else op for k, op in enumerate(graph.ops))
    return max(peak, graph.static_bytes + size), replay(replace(graph, ops=free), plan.steps).time


def stream_row(graph: Graph, plan: Plan, s: int) -> Alternative:
    """What streaming a tensor of the caller's would come to."""
    storage, uses = graph.storages[s], graph.uses
    if storage.kind not in ("parameter", "state"):
        return Alternative("stream", "not possible", "parameters and optimizer state stream alone")
    if not any(op.phase == "update" for op in graph.ops):
        return Alternative("stream", "not possible", "parameters stream in training steps alone")
    line, peak, fetches, before = replay(graph, plan.steps), graph.static_bytes - storage.size, 0, False
    writes = 0
    for step, nbytes in zip(plan.steps, line.during, strict=True):
        runs = step.kind in ("compute", "recompute")
        used = runs and (s in uses.reads[step.op] or s in uses.mutates[step.op])
        writes += runs and s in uses.mutates[step.op]
        fetches += used and not before
        before = used if runs else before
        peak = max(peak, nbytes - (0 if used else storage.size))
    seconds = fetches * graph.machine.seconds("fetch", storage.size)
    seconds += bool(writes) * graph.machine.seconds("offload", storage.size)
    found = judged("stream", (peak, line.time + seconds), (line.peak, line.time), plan.budget, "")
    about = f"{fetches} fetch{'es' * (fetches != 1)}, no copy hidden behind ops; {found.reason}"
    return replace(found, reason=about if found.verdict != "over the budget" else found.reason)


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
    return {"name": row[0], "bytes": row[1]} | split


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
