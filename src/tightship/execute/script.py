"""A plan's residences and an op's measured requests -> the allocator's script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tightship.errors import BadInput
from tightship.frontends.torch.program import Program
from tightship.graph import Graph, Request, aligned
from tightship.plan import Plan, Residence, Step

__all__ = ["HEAP", "Orders", "device_of", "orders", "requests_of"]

HEAP = -1


@dataclass(frozen=True)
class Orders:
    """What every step will ask for and where it goes: the arguments of ``allocator.Script``, limit aside.

    ``extent`` is the bytes the offsets span, ``placed`` whether the plan says where anything goes. ``over`` is empty
    where no result takes the place of an input.
    """

    sizes: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray
    extent: int
    placed: bool
    over: np.ndarray


def device_of(graph: Graph) -> str | None:
    """The one device on which the graph's ops need memory (``cpu`` if none does); None if there are several."""
    defines = graph.uses.defines
    needy = (
        o for k, o in enumerate(graph.ops) if o.workspace or any(graph.storages[s].size for s in defines[k])
    )
    found = {o.device for o in needy} or {"cpu"}
    return found.pop() if len(found) == 1 else None


def requests_of(program: Program, op: int, again: bool) -> tuple[Request, ...]:
    """The requests of an op, or of the way it is run as a recomputation."""
    usual = program.graph.ops[op].requests
    return program.replay_requests.get(op, usual) if again else usual


def orders(program: Program, plan: Plan, *, hand_out: bool = True) -> Orders:
    """Places every request of ``plan.steps``.

    Outputs of the graph go to the caller and lie outside the arena, unless they are not to be handed out. A
    temporary of a replay that asks for other bytes than the op it stands for lies outside too: the placement
    knows the op only. Raises ``BadInput`` when a request has no residence, or one of another size.
    """
    graph, uses = program.graph, program.graph.uses
    handed = graph.kept - graph.static if hand_out else frozenset()
    stays: dict[tuple[int, int, str], Residence] = {}
    scratch: dict[tuple[int, int], Residence] = {}
    for r in plan.residences:
        if r.storage >= 0 or r.form == "state":
            stays[r.request if r.form == "state" else r.storage, r.start, r.form] = r
        else:
            scratch[r.start, r.request] = r
    sizes: list[int] = []
    offsets: list[int] = []
    starts = [0]
    over: list[int] = []  # requests that take an input's place
    for i, step in enumerate(plan.steps):
        again = step.kind == "recompute"
        for s, form, size in _moved(program, step):
            sizes.append(aligned(size))
            there = stays.get((s, i, form))
            offsets.append(_offset(program, step.op, i, sizes[-1], there) if plan.residences else HEAP)
        if again or step.kind == "compute":
            foreign = again and step.op in program.replay_requests
            for k, request in enumerate(requests_of(program, step.op, again)):
                s = uses.defines[step.op][request.storage] if request.storage >= 0 else -1
                if any(b == s for _, b in step.reuses):
                    over.append(len(sizes))
                sizes.append(aligned(request.size))
                if not plan.residences or s in handed or (foreign and s < 0):
                    offsets.append(HEAP)
                    continue
                found = stays.get((s, i, "full")) if s >= 0 else scratch.get((i, k))
                offsets.append(_offset(program, step.op, i, sizes[-1], found))
        starts.append(len(sizes))
    ends = (o + n for o, n in zip(offsets, sizes, strict=True) if o != HEAP)
    extent = max(ends, default=0)
    a, b, c = (np.array(row, dtype=np.int64) for row in (sizes, offsets, starts))
    taking = np.zeros(len(sizes) if over else 0, dtype=np.int64)
    taking[over] = 1
    return Orders(a, b, c, extent, bool(plan.residences), taking)


def _moved(program: Program, step: Step) -> Iterator[tuple[int, str, int]]:
    """What a step asks for beside its op: (storage or op, form, bytes). Random states come before the op's own."""
    graph = program.graph
    if step.kind in ("fetch", "decompress", "compress"):
        for s in step.storages:
            size = step.nbytes if step.kind == "compress" else graph.storages[s].size
            if size:
                yield s, "packed" if step.kind == "compress" else "full", size
    elif step.saves or (step.kind == "recompute" and graph.ops[step.op].random):
        yield step.op, "state", graph.ops[step.op].state


def _offset(program: Program, op: int, step: int, size: int, found: Residence | None) -> int:
    place = f"step {step}"
    if op >= 0:
        place += f": op {program.graph.ops[op].name!r} at {program.graph.place(op)}"
    if found is None:
        raise BadInput("a plan says where each request of an op goes", f"{size} bytes without a place", place)
    if aligned(found.size) < size:
        raise BadInput("a residence has the size of its request", f"{found.size} for {size} bytes", place)
    return found.offset if found.pool == "device" else HEAP
