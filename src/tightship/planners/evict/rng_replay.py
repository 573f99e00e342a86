"""Random ops that run again from their saved state, for planners that know pure ops only.

A planner is shown a graph in which such ops are pure; what it decides is then given its saved states: a random op
that is run again saves its state when it first runs and forgets it after the last time. The states, which the
planner has not seen, take ``Op.state`` bytes each (5 KB on the CPU) in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightship.graph import Graph
from tightship.plan import Step

__all__ = ["redrawable", "with_states"]


_WORTH = 2
"""A random op runs again only if it writes more than this many times the bytes of its state."""


def redrawable(graph: Graph) -> Graph:
    """The graph with random ops that have a state, and are worth it, taken for pure ones, which need the state as
    workspace.

    Orders are those of the original: this graph does not know the random chain.
    """
    uses, ops = graph.uses, []
    for k, op in enumerate(graph.ops):
        written = sum(graph.storages[s].size for s in (*uses.defines[k], *uses.mutates[k]))
        if op.state and written > _WORTH * op.state:
            op = replace(op, random=False, state=0, workspace=op.workspace + op.state)
        ops.append(op)
    return graph.with_ops(tuple(ops))


def with_states(graph: Graph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps with the states that the random ops among the recomputed need; the last to need one frees it."""
    last = {s.op: i for i, s in enumerate(steps) if s.kind == "recompute" and graph.ops[s.op].random}
    if not last:
        return tuple(steps)
    out: list[Step] = []
    at: list[int] = []  # what to wait for instead of each step
    for i, step in enumerate(steps):
        at.append(len(out))
        saves = step.kind == "compute" and step.op in last
        out.append(replace(step, saves=saves, waits=tuple(at[w] for w in step.waits)))
        if step.kind == "recompute" and last.get(step.op) == i:
            at[i] = len(out)  # a copy that waits for the op may take the state's bytes
            out.append(Step("free", op=step.op, form="state"))
    return tuple(out)
