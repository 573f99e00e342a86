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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightship.analysis.bounds import lower_bound
from tightship.analysis.concurrency import interference, members, touching, waves
from tightship.analysis.order import predecessors
from tightship.graph import Graph, Op, aligned
from tightship.plan import Buffer, Plan, Problem, Residence, Step
from tightship.planners.place import portfolio
from tightship.simulate import extra_bytes, replay, unplanned
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


def _width(op: Op) -> int:
    ends = [max(r.start + 1, r.end) for r in op.requests]
    return max(ends, default=0) + 1


def residences(graph: Graph, steps: Sequence[Step]) -> Iterator[Residence]:
    """Every residence the steps imply outside the static set, in order of their first step, not yet placed."""
    uses = graph.uses
    size = [s.size for s in graph.storages]
    begun: dict[tuple[int, str], tuple[int, int, int]] = {}
    states: dict[int, int] = {}
    out: list[Residence] = []
    for i, step in enumerate(steps):
        if step.kind in ("compute", "recompute"):
            op = graph.ops[step.op]
            made = uses.defines[step.op]
            first = {r.storage: r.start for r in op.requests if r.storage >= 0}
            for a, b in step.reuses:
                start, event, nbytes = begun.pop((a, "full"))
                out.append(Residence(a, start, i, nbytes, first=event))
                first[made.index(b)] = -1
            for j, s in enumerate(made):
                if step.kind == "compute" or s in step.storages:
                    begun[s, "full"] = (i, first.get(j, -1), size[s])
                elif size[s]:
                    out.append(Residence(s, i, i + 1, size[s], first=first.get(j, -1)))
            if op.requests or op.workspace or op.calls:
                out.extend(_workspace(op, i))
            if step.saves:
                states[step.op] = i
            elif step.kind == "recompute" and op.state:
                out.append(Residence(-1, i, i + 1, op.state, form="state", request=step.op))
        elif step.form == "state":
            start, nbytes = states.pop(step.op), graph.ops[step.op].state
            out.append(Residence(-1, start, i, nbytes, form="state", request=step.op))
        elif step.kind == "free":
            for s in step.storages:
                start, event, nbytes = begun.pop((s, step.form))
                if nbytes:
                    pool = "host" if step.form == "host" else "device"
                    out.append(Residence(s, start, i, nbytes, 0, pool, step.form, first=event))
        elif step.kind in ("fetch", "decompress"):
            begun.update({(s, "full"): (i, -1, size[s]) for s in step.storages})
        elif step.kind == "offload":
            begun.update({(s, "host"): (i, -1, size[s]) for s in step.storages})
        else:
            begun.update({(s, "packed"): (i, -1, step.nbytes) for s in step.storages})
    for (s, form), (start, event, nbytes) in begun.items():
        if nbytes:
            pool = "host" if form == "host" else "device"
            out.append(Residence(s, start, len(steps), nbytes, 0, pool, form, first=event))
    yield from sorted(out, key=lambda r: (r.start, r.request, r.storage, r.form))


def _workspace(op: Op, i: int) -> Iterator[Residence]:
    for k, r in enumerate(op.requests):
        if r.storage < 0 and r.size:
            yield Residence(-1, i, i + 1, r.size, request=k, first=r.start, last=r.end)
    block = extra_bytes(op) - (op.workspace if op.requests else 0)
    if block:
        yield Residence(-1, i, i + 1, block)


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
    rows, n = list(residences(graph, steps)), len(steps)
    ticks = _ticks(graph, steps)
    kept = graph.kept if hand_out else frozenset()
    leaves = [r.storage in kept and r.end == n for r in rows]
    offset = [0] * len(rows)
    span: dict[str, tuple[int, int]] = {}
    for pool in ("device", "host"):
        mine = [j for j, r in enumerate(rows) if not leaves[j] and r.pool == pool]
        chains = _chains(rows, mine, steps)
        firsts, lasts = [rows[c[0]] for c in chains], [rows[c[-1]] for c in chains]
        lower = ticks[_column(r.start for r in firsts)] + _column(max(r.first, 0) for r in firsts)
        end, within = _column(r.end for r in lasts), _column(r.last for r in lasts)
        upper = np.where(within >= 0, ticks[end - 1] + within, ticks[end])
        sizes = _column(r.size for r in firsts)
        sizes = -(-sizes // graph.alignment) * graph.alignment
        offsets, extent, load = portfolio.offsets(
            lower, upper, sizes, time_limit=seconds, work_limit=work, seed=seed,
            capacity=capacity if pool == "device" else None,
        )  # fmt: skip
        for chain, o in zip(chains, offsets.tolist(), strict=True):
            for j in chain:
                offset[j] = o
        span[pool] = int(extent), int(load)
    done = [
        Residence(
            r.storage, r.start, r.end, r.size, offset[j], "out" if leaves[j] else r.pool, r.form, r.request,
            r.first, r.last,
        )
        for j, r in enumerate(rows)
    ]  # fmt: skip
    handed = sum(r.size for j, r in enumerate(rows) if leaves[j])
    return Layout(tuple(done), *span["device"], handed, span["host"][0])


def _ticks(graph: Graph, steps: Sequence[Step]) -> NDArray[np.int64]:
    """When each step begins, and the last ends, in events."""
    ops = graph.ops
    widths = [
        _width(ops[step.op]) if step.kind in ("compute", "recompute") and ops[step.op].requests else 1
        for step in steps
    ]
    ticks = np.zeros(len(steps) + 1, dtype=np.int64)
    np.cumsum(widths, out=ticks[1:])
    return ticks


def _column(numbers: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(numbers, dtype=np.int64)


def _chains(rows: Sequence[Residence], mine: Sequence[int], steps: Sequence[Step]) -> list[list[int]]:
    """The residences ``mine``, in order of their first step, of which each but the first takes the place of the one
    before it."""
    took = {(b, i): a for i, step in enumerate(steps) for a, b in step.reuses}
    chains: list[list[int]] = []
    ended: dict[tuple[int, int], list[int]] = {}  # (storage, step) -> the chain that ends there so far
    for j in mine:
        r = rows[j]
        chain: list[int] = []
        if took and r.form == "full":
            chain = ended.pop((took.get((r.storage, r.start), -1), r.start), chain)
        if not chain:
            chains.append(chain)
        chain.append(j)
        if took and r.form == "full" and r.storage >= 0:
            ended[r.storage, r.end] = chain
    return chains


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
