"""Plans for tests of running them: keep everything, recompute all that can be, or evict it by other means."""

from __future__ import annotations

from collections.abc import Sequence

from tightship import simulate
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.planners.evict import compress, offload
from tightship.planners.evict.lowering import longest_transfers, lower, overlap
from tightship.planners.evict.problem import OFFLOAD, EvictionProblem
from tightship.planners.layout import lay_out


def placed(graph: Graph, steps: tuple[Step, ...], budget: int | None = None) -> Plan:
    layout, line = lay_out(graph, steps, seconds=0.2), simulate.replay(graph, steps)
    before = simulate.replay(graph, simulate.baseline(graph))
    return Plan(
        graph.digest, steps, layout.residences, budget, line.peak, before.peak, graph.static_bytes,
        layout.arena, handed=layout.handed, time=line.time, time_before=before.time, planner="test", host=layout.host,
    )  # fmt: skip


def evicted(graph: Graph, how: str) -> tuple[Step, ...]:
    """Steps that compress, or offload, everything that can be while nobody uses it. ``how``: compress; tight, where
    the peak asks for it; overlap, copies beside the ops; searched, as the search has it: out on one stream, back on
    another."""
    means = ("offload",) if how == "searched" else ("recompute",)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))), means=means)
    if how == "searched":
        return problem.steps(((problem.gaps[:, 0] >= 0) * OFFLOAD).astype("uint8"))
    if how == "overlap":
        copies = overlap(graph, problem.order, longest_transfers(graph, problem.order))
        return tuple(lower(graph, problem.order, transfers=copies))
    return tuple({"compress": compress, "tight": offload}[how].plan(problem, 0).steps)


def keep(graph: Graph, budget: int | None = None) -> Plan:
    return placed(graph, simulate.baseline(graph), budget)


def recompute(graph: Graph, budget: int | None = None) -> Plan:
    """Drops what forward and backward both use after its forward uses, and makes it again when needed."""
    stay = graph.static | graph.kept
    candidates = [
        s for s, x in enumerate(graph.storages) if x.size and s not in stay and _gap(graph, s) is not None
    ]
    chosen = _legal(graph, [], candidates)
    assert chosen
    return placed(graph, _steps(graph, chosen), budget)


def _legal(graph: Graph, chosen: list[int], more: list[int]) -> list[int]:
    """``chosen`` and as many of ``more`` as can be made again: all at once, or each half by itself."""
    try:
        simulate.replay(graph, _steps(graph, chosen + more))
        return chosen + more
    except BadInput:
        if len(more) == 1:
            return chosen
    half = len(more) // 2
    return _legal(graph, _legal(graph, chosen, more[:half]), more[half:])


def _gap(graph: Graph, s: int) -> int | None:
    """The first backward op that reads ``s``, if it may be made again for it."""
    readers, definer = graph.uses.readers[s], graph.uses.definer[s]
    op = graph.ops[definer]
    backward = [k for k in readers if graph.ops[k].phase == "backward"]
    if not backward or op.phase != "forward" or not op.pure or set(op.mutates) - set(op.updates):
        return None
    return backward[0]


def _steps(graph: Graph, chosen: list[int]) -> tuple[Step, ...]:
    uses = graph.uses
    again: dict[int, list[int]] = {}
    for s in chosen:
        again.setdefault(_gap(graph, s) or 0, []).append(s)
    sequence: list[Step] = []
    for k in range(len(graph.ops)):
        # Producers in order: one that is made again may read another that is.
        for d in sorted({uses.definer[s] for s in again.get(k, [])}):
            made = tuple(s for s in again[k] if uses.definer[s] == d)
            sequence.append(Step("recompute", op=d, storages=made))
        sequence.append(Step("compute", op=k))
    return with_frees(graph, sequence)


def with_frees(graph: Graph, sequence: Sequence[Step]) -> tuple[Step, ...]:
    """The same runs of ops, everything freed after its last use before it is made again or forgotten."""
    uses = graph.uses
    ends: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for i, step in enumerate(sequence):
        made = step.storages if step.kind == "recompute" else uses.defines[step.op]
        skip = set(graph.ops[step.op].updates) if step.kind == "recompute" else set()
        for s in (*made, *uses.reads[step.op]):
            if s in made and s in last:
                ends.setdefault(last[s], []).append(s)
            if s not in skip:
                last[s] = i
    for s, i in last.items():
        ends.setdefault(i, []).append(s)
    stay = graph.static | graph.kept
    steps: list[Step] = []
    for i, step in enumerate(sequence):
        steps.append(step)
        dead = tuple(s for s in ends.get(i, []) if s not in stay)
        if dead:
            steps.append(Step("free", storages=dead))
    return tuple(steps)
