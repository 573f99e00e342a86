"""Steps from a list of runs: which op when, and what each run brings back; lives follow from the uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.plan import Step
from tightship.planners.evict.problem import Decision, Frame
from tightship.simulate import baseline, replay

__all__ = ["Run", "carried_out", "lowered"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an op; ``again``: a recomputation, after which ``storages`` are there again."""

    op: int
    again: bool = False
    storages: tuple[int, ...] = ()


def lowered(graph: Graph, runs: Sequence[Run]) -> tuple[Step, ...]:
    """The steps of ``runs``; every storage leaves after the last run that touches it before it is brought back,
    or after its last use."""
    uses = graph.uses
    last: dict[int, int] = {}
    ends: list[list[int]] = [[] for _ in runs]
    for i, run in enumerate(runs):
        for s in run.storages if run.again else ():
            if s in last:
                ends[last.pop(s)].append(s)
        skip = graph.ops[run.op].updates if run.again else ()
        for s in (*uses.reads[run.op], *(run.storages if run.again else uses.defines[run.op])):
            if s not in skip:
                last[s] = i
    for s, i in last.items():
        if s not in graph.kept:
            ends[i].append(s)
    steps = []
    for run, gone in zip(runs, ends, strict=True):
        steps.append(Step("recompute" if run.again else "compute", op=run.op, storages=run.storages))
        leave = tuple(s for s in gone if s not in graph.static)
        if leave:
            steps.append(Step("free", storages=leave))
    return tuple(steps)


def carried_out(frame: Frame, runs: Sequence[Run], limit: int) -> Decision:
    """The decision to do exactly this, with what it costs; one that is not valid where the replay refuses it."""
    steps = lowered(frame.graph, runs)
    again = [run for run in runs if run.again]
    kept = replay(frame.graph, baseline(frame.graph, frame.order))
    plain = kept.time
    try:
        line = replay(frame.graph, steps)
    except BadInput:
        return Decision(frame.nothing(), kept.peak, 0.0, len(again), met=False, valid=False)
    return Decision(
        frame.nothing(), line.peak, line.time - plain, len(again), line.peak <= limit, steps=steps
    )
