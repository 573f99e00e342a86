"""Planned requests: from a plan's residences and the ops' measured requests, what the allocator replays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tightship.errors import BadInput
from tightship.frontends.torch.program import Program
from tightship.graph import Graph, Request, aligned
from tightship.plan import Plan, Residence, Step

__all__ = ["HEAP", "PlannedRequests", "device_of", "needs_memory", "planned_requests"]

HEAP = -1


@dataclass(frozen=True)
class PlannedRequests:
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

    def of_steps(self, steps: range) -> PlannedRequests:
        """Those of consecutive steps."""
        a, b = int(self.starts[steps.start]), int(self.starts[steps.stop])
        starts = self.starts[steps.start : steps.stop + 1] - a
        return replace(
            self, sizes=self.sizes[a:b], offsets=self.offsets[a:b], starts=starts, over=self.over[a:b]
        )


def device_of(graph: Graph) -> str | None:
    """The one device on which the graph's ops need memory (``cpu`` if none does); None if there are several."""
    devices = {op.device for k, op in enumerate(graph.ops) if needs_memory(graph, k)} or {"cpu"}
    return devices.pop() if len(devices) == 1 else None


def needs_memory(graph: Graph, op: int) -> bool:
    """Whether the op asks for workspace, or for bytes of a storage it defines."""
    sizes = (graph.storages[s].size for s in graph.uses.defines[op])
    return bool(graph.ops[op].workspace) or any(sizes)


def planned_requests(program: Program, plan: Plan, *, hand_out: bool = True) -> PlannedRequests:
    """Places every request of ``plan.steps``.

    Outputs of the graph go to the caller and lie outside the arena, unless they are not to be handed out. A
    temporary of a replay that asks for other bytes than the op it stands for lies outside too: the placement
    knows the op only. Raises ``BadInput`` when a request has no residence, or one of another size.
    """
    graph, uses = program.graph, program.graph.uses
    handed = graph.kept - graph.static if hand_out else frozenset()
    residences: dict[tuple[int, int, str], Residence] = {}
    workspace: dict[tuple[int, int], Residence] = {}
    for r in plan.residences:
        if r.storage >= 0 or r.form == "state":
            residences[r.request if r.form == "state" else r.storage, r.start, r.form] = r
        else:
            workspace[r.start, r.request] = r
    sizes: list[int] = []
    offsets: list[int] = []
    starts = [0]
    over: list[int] = []  # requests that take an input's place
    for i, step in enumerate(plan.steps):
        again = step.kind == "recompute"
        for s, form, size in _moved(program, step):
            sizes.append(aligned(size))
            there = residences.get((s, i, form))
            offsets.append(_offset(program, step.op, i, sizes[-1], there) if plan.residences else HEAP)
        if again or step.kind == "compute":
            foreign = again and step.op in program.replay_requests
            requests: tuple[Request, ...] = graph.ops[step.op].requests
            if foreign:
                requests = program.replay_requests[step.op]
            for k, request in enumerate(requests):
                s = uses.defines[step.op][request.storage] if request.storage >= 0 else -1
                if any(b == s for _, b in step.reuses):
                    over.append(len(sizes))
                sizes.append(aligned(request.size))
                if not plan.residences or s in handed or (foreign and s < 0):
                    offsets.append(HEAP)
                    continue
                residence = residences.get((s, i, "full")) if s >= 0 else workspace.get((i, k))
                offsets.append(_offset(program, step.op, i, sizes[-1], residence))
        starts.append(len(sizes))
    ends = (o + n for o, n in zip(offsets, sizes, strict=True) if o != HEAP)
    extent = max(ends, default=0)
    a, b, c = (np.array(row, dtype=np.int64) for row in (sizes, offsets, starts))
    taking = np.zeros(len(sizes) if over else 0, dtype=np.int64)
    taking[over] = 1
    return PlannedRequests(a, b, c, extent, bool(plan.residences), taking)


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


def _offset(program: Program, op: int, step: int, size: int, residence: Residence | None) -> int:
    place = f"step {step}"
    if op >= 0:
        place += f": op {program.graph.ops[op].name!r} at {program.graph.place(op)}"
    if residence is None:
        rule = f"a request of {size} bytes without a residence: a plan says where each request of an op goes"
        raise BadInput(rule, place=place)
    if aligned(residence.size) < size:
        rule = f"a residence of {residence.size} bytes is too small for a request of {size}"
        raise BadInput(rule, place=place)
    return residence.offset if residence.pool == "device" else HEAP
