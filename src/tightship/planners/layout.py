"""Where every byte of a plan lies: steps -> residences, placed.

Time is cut finer than steps: an op's measured requests have events of their own, so that a temporary freed
inside an op can share bytes with a result the same op asks for later, as the allocator will see it.

Without a plan, what a graph keeps in memory is a placement problem for three kinds of order:

==========  ==============================================================================================
sequential  one op after the other, in the graph's order
wide        up to N ops at a time, in steps (``concurrency.waves``): alive from the first to the last step
any         whatever order the dependencies allow: alive in the graph's order, with conflicts for all others
==========  ==============================================================================================

The caller's storages lie elsewhere and are left out. What is kept for it is alive to the end. An op's workspace is
a buffer that only it needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.bounds import lower_bound
from tightship.analysis.concurrency import interference, members, touching, waves
from tightship.analysis.order import predecessors
from tightship.errors import BadInput
from tightship.graph import Graph, aligned
from tightship.plan import FORMS, Buffer, Plan, Problem, Residence, Step
from tightship.planners.place import portfolio
from tightship.simulate import extra_bytes, extras, replay, step_columns, unplanned
from tightship.verify import check

__all__ = [
    "Layout",
    "Lifetimes",
    "Workspace",
    "in_any_order",
    "in_order",
    "in_steps",
    "lay_out",
    "pack_workspaces",
    "residences",
    "ticks_of",
    "unevicted_plan",
]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """A placement problem; ``storages`` and ``ops`` say what buffer k is: a storage, or (-1) an op's workspace."""

    problem: Problem
    storages: tuple[int, ...]
    ops: tuple[int, ...]


def in_order(graph: Graph, order: Sequence[int] | None = None, *, alignment: int | None = None) -> Lifetimes:
    """One op after the other; ``order`` is the graph's own unless another is given."""
    at = [0] * len(graph.ops)
    for position, k in enumerate(order if order is not None else range(len(graph.ops))):
        at[k] = position
    return _alive(graph, at, alignment)


def in_steps(graph: Graph, width: int, *, alignment: int | None = None) -> Lifetimes:
    """Up to ``width`` ops at a time."""
    return _alive(graph, waves(predecessors(graph), width), alignment)


def in_any_order(
    graph: Graph, waits: Sequence[Sequence[int]] | None = None, *, alignment: int | None = None
) -> Lifetimes:
    """Any order that ``waits`` allows (what each op waits for; none given: its dependencies)."""
    found = in_order(graph, alignment=alignment)
    scratch = [k for k, op in enumerate(graph.ops) if extra_bytes(op)]
    rows = interference(graph, predecessors(graph) if waits is None else waits, scratch)
    number = {k: len(graph.storages) + j for j, k in enumerate(scratch)}
    place = {
        s if s >= 0 else number[k]: j for j, (s, k) in enumerate(zip(found.storages, found.ops, strict=True))
    }
    conflicts = []
    for s, k in zip(found.storages, found.ops, strict=True):
        meets = (place.get(t) for t in members(rows[s if s >= 0 else number[k]]))
        conflicts.append(sum(1 << j for j in meets if j is not None))
    return replace(found, problem=replace(found.problem, conflicts=tuple(conflicts)))


def _alive(graph: Graph, at: Sequence[int], alignment: int | None) -> Lifetimes:
    """``at``: the time at which each op runs; ``alignment``: the graph's, unless another is given."""
    alignment = graph.alignment if alignment is None else alignment
    end = max(at, default=-1) + 1
    buffers, storages, ops = [], [], []
    for s, touched in enumerate(touching(graph)):
        size = graph.storages[s].size
        if s in graph.static or not size or not touched:
            continue
        times = [at[k] for k in members(touched)]
        until = end if s in graph.kept else max(times) + 1
        buffers.append(Buffer(graph.storages[s].name, min(times), until, size, alignment))
        storages.append(s)
        ops.append(graph.uses.definer[s])
    for k, op in enumerate(graph.ops):
        if size := extra_bytes(op):
            buffers.append(Buffer(f"{op.name}.workspace", at[k], at[k] + 1, size, alignment))
            storages.append(-1)
            ops.append(k)
    return Lifetimes(Problem(tuple(buffers)), tuple(storages), tuple(ops))


@dataclass(frozen=True, slots=True)
class Layout:
    """Placed residences; ``arena`` bytes they span, ``load`` the most of them alive at once (the bound), ``handed``
    bytes of results that leave it, ``host`` bytes spanned in the host pool."""

    residences: tuple[Residence, ...]
    arena: int
    load: int
    handed: int
    host: int = 0


_FORMS = ("full", "host", "packed", "state")
"""In the order in which residences of one storage and step stand."""


def _unplaced(graph: Graph, steps: Sequence[Step]) -> dict[str, NDArray[np.int64]]:
    """Every residence the steps imply outside the static set, in order of their first step, as columns of what is
    known before they are placed."""
    steps, c, extra = tuple(steps), graph.columns, extras(graph)
    columns = step_columns(graph, steps)
    if columns is None:
        raise BadInput("a step's kind is one of plan.KINDS", place=f"plan for {graph.name!r}")
    measured = np.diff(c.requests) > 0
    found: dict[str, NDArray[np.int64]] = graph.uses.facts.residences(
        c.state,
        np.where(measured, extra - c.workspace, extra),
        c.requests,
        c.request_size,
        c.request_storage,
        c.request_start,
        c.request_end,
        columns,
    )
    found["form"] = np.array([_FORMS.index(form) for form in FORMS])[found["form"]]
    rank = np.lexsort((found["form"], found["storage"], found["request"], found["start"]))
    return {name: column[rank] for name, column in found.items()}


def _placed(
    rows: dict[str, NDArray[np.int64]], offset: NDArray[np.int64], out: NDArray[np.bool_]
) -> tuple[Residence, ...]:
    """Residences at their offsets; ``out``: those that leave the arena."""
    pools, forms = np.array(["device", "host", "out"], dtype=object), np.array(_FORMS, dtype=object)
    pool = np.where(out, 2, rows["form"] == _FORMS.index("host"))
    named = {"pool": pools[pool].tolist(), "form": forms[rows["form"]].tolist(), "offset": offset}
    return _core.records(Residence, len(offset), rows | named)


def residences(graph: Graph, steps: Sequence[Step]) -> tuple[Residence, ...]:
    """Every residence the steps imply outside the static set, in order of their first step, not yet placed."""
    rows = _unplaced(graph, steps)
    nowhere = np.zeros(len(rows["start"]), dtype=np.int64)
    return _placed(rows, nowhere, nowhere > 0)


def lay_out(
    graph: Graph,
    steps: Sequence[Step],
    *,
    hand_out: bool = True,
    seconds: float = 2.0,
    work: int = 400_000,
    seed: int = 0,
    capacity: int | None = None,
) -> Layout:
    """Offsets for everything the steps make, in the arena and in the host pool. With ``hand_out`` the graph's
    outputs leave the arena: they are given to the caller in memory of their own (pool ``out``). ``capacity``: any
    arena within it is small enough, and none above it."""
    rows, n = _unplaced(graph, steps), len(steps)
    ticks = ticks_of(graph, steps)
    kept = np.zeros(len(graph.storages) + 1, dtype=np.bool_)  # the last one: of what is no storage
    kept[list(graph.kept if hand_out else ())] = True
    leaves = kept[rows["storage"]] & (rows["end"] == n)
    host = rows["form"] == _FORMS.index("host")
    offset = np.zeros(len(leaves), dtype=np.int64)
    span: dict[str, tuple[int, int]] = {}
    for pool in ("device", "host"):
        mine = np.flatnonzero(~leaves & (host == (pool == "host")))
        first, last, chain = _chains(rows, mine, steps)
        lower = ticks[rows["start"][first]] + np.maximum(rows["first"][first], 0)
        end, within = rows["end"][last], rows["last"][last]
        upper = np.where(within >= 0, ticks[end - 1] + within, ticks[end])
        sizes = -(-rows["size"][first] // graph.alignment) * graph.alignment
        offsets, extent, load = portfolio.offsets(
            lower, upper, sizes, time_limit=seconds, work_limit=work, seed=seed,
            capacity=capacity if pool == "device" else None,
        )  # fmt: skip
        offset[mine] = offsets[chain]
        span[pool] = int(extent), int(load)
    handed = int(rows["size"][leaves].sum())
    return Layout(_placed(rows, offset, leaves), *span["device"], handed, span["host"][0])


def ticks_of(graph: Graph, steps: Sequence[Step]) -> NDArray[np.int64]:
    """When each step begins, and the last ends, in events."""
    c = graph.columns
    width = np.ones(len(graph.ops) + 1, dtype=np.int64)  # the last one: of what runs no op
    ends = np.maximum(c.request_start + 1, c.request_end) + 1
    np.maximum.at(width, np.repeat(np.arange(len(graph.ops)), np.diff(c.requests)), ends)
    runs = _core.codes(steps, "kind", ("compute", "recompute")) < 2
    ticks = np.zeros(len(steps) + 1, dtype=np.int64)
    np.cumsum(width[np.where(runs, _core.integers(steps, "op"), -1)], out=ticks[1:])
    return ticks


Ints = NDArray[np.int64]


def _chains(rows: dict[str, Ints], mine: Ints, steps: Sequence[Step]) -> tuple[Ints, Ints, Ints]:
    """The residences ``mine``, in order of their first step, in chains of which each but the first takes the place of
    the one before it: the first and the last of each chain, and the chain of each residence."""
    starts, flat = _core.rows(steps, "reuses")
    if not len(flat):
        return mine, mine, np.arange(len(mine))
    at = np.repeat(np.arange(len(steps)), np.diff(starts))[::2].tolist()
    took = {(b, i): a for i, a, b in zip(at, flat[::2].tolist(), flat[1::2].tolist(), strict=True)}
    first: list[int] = []
    last: list[int] = []
    chain: list[int] = []
    ended: dict[tuple[int, int], int] = {}  # (storage, step) -> the chain that ends there so far
    columns = (rows[name][mine].tolist() for name in ("storage", "start", "end", "form"))
    for j, storage, start, end, form in zip(mine.tolist(), *columns, strict=True):
        full = form == _FORMS.index("full")
        before = (took.get((storage, start), -1), start)
        number = ended.pop(before, -1) if full else -1
        if number < 0:
            number = len(first)
            first.append(j)
            last.append(j)
        last[number] = j
        chain.append(number)
        if full and storage >= 0:
            ended[storage, end] = number
    return tuple(np.array(x, dtype=np.int64) for x in (first, last, chain))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that an op needs beyond its values, and where each of its temporaries lies in them."""

    size: int
    offsets: dict[Residence, int]


def pack_workspaces(rows: Iterable[Residence], alignment: int) -> dict[int, Workspace]:
    """By step, of the residences without a storage: a small packing of each op's own, where temporaries that follow
    one another share bytes. ``first`` and ``last`` are the times within the step."""
    by_step: dict[int, list[Residence]] = {}
    for r in rows:
        if r.storage < 0:
            by_step.setdefault(r.start, []).append(r)
    found = {}
    for step, mine in by_step.items():
        end = max(r.last for r in mine) + 1
        lower = [max(r.first, 0) for r in mine]
        upper = [max(r.last if r.last >= 0 else end, at + 1) for r, at in zip(mine, lower, strict=True)]
        sizes = [aligned(r.size, alignment) for r in mine]
        offsets, arena, _ = portfolio.offsets(lower, upper, sizes, time_limit=None, work_limit=1_000)
        found[step] = Workspace(arena, dict(zip(mine, offsets.tolist(), strict=True)))
    return found


def unevicted_plan(
    graph: Graph,
    steps: tuple[Step, ...],
    placed: Iterable[Residence],
    planner: str,
    *,
    began: float,
    facts: Mapping[str, Any],
    note: str,
    arena: int | None = None,
) -> Plan:
    """A verified plan of steps that compute and free only, with its residences where they are given; ``facts`` go
    into ``meta`` by the planner's name. ``arena``: what they span, unless more is given."""
    rows, line, before = tuple(placed), replay(graph, steps), unplanned(graph)
    made = Plan(
        digest=graph.digest,
        steps=steps,
        residences=rows,
        peak=line.peak,
        peak_before=before.peak,
        static=graph.static_bytes,
        arena=max((r.offset + r.size for r in rows), default=0) if arena is None else arena,
        lower_bound=int(lower_bound(graph)),
        time=line.time,
        time_before=before.time,
        planner=planner,
        seconds=time.perf_counter() - began,
        notes=(note,),
        meta={planner: dict(facts)},
    )
    check(graph, made)
    return made
