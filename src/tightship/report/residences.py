"""Every stay of a storage in memory as a row that can be drawn: where it lies, from when to when, what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.report.numbers import band
from tightship.simulate import Timeline

__all__ = ["Stay", "label", "moments", "stays_of"]


@dataclass(frozen=True, slots=True)
class Stay:
    """``size`` bytes at ``offset`` of ``pool`` during steps [start, end); ``kind`` is what they hold, one of
    ``BANDS``."""

    name: str
    kind: str
    start: int
    end: int
    offset: int
    size: int
    pool: str
    form: str
    where: str


def label(graph: Graph, steps: Sequence[Step], step: int) -> str:
    """What a step does, in a few words."""
    s = steps[step]
    if s.op >= 0:
        over = "".join(f", in place of {graph.storages[a].name}" for a, _ in s.reuses)
        return (f"{s.kind} " if s.kind != "compute" else "") + graph.ops[s.op].name + over
    names = ", ".join(graph.storages[x].name for x in s.storages[:3])
    return f"{s.kind} {names}" + (" …" if len(s.storages) > 3 else "")


def moments(line: Timeline) -> list[float]:
    """When bytes are taken and given back: for each step, and for the end, seconds that never go back. Bytes follow
    the order of the steps, whatever the streams: a step that its stream runs early counts from those before it on."""
    return [*accumulate((since for since, _ in line.spans), max), line.time]


def stays_of(graph: Graph, plan: Plan) -> list[Stay]:
    """The residences of a plan, scratch included, in their order."""
    found = []
    for r in plan.residences:
        if r.storage < 0:
            op = plan.steps[r.start].op
            name, kind = f"while {graph.ops[op].name} runs", "workspace"
            where = graph.place(op)
        else:
            made = graph.uses.definer[r.storage]
            name = graph.storages[r.storage].name
            kind = band(graph, r.storage)
            where = graph.place(made) if made >= 0 else ""
        found.append(Stay(name, kind, r.start, r.end, r.offset, r.size, r.pool, r.form, where))
    return found
