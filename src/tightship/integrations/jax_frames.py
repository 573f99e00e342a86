"""The graph that is planned for a level: a program's own, or that of a pair of bodies and what comes between."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tightship.frontends.builder import GraphBuilder
from tightship.frontends.jax_ops import Ops
from tightship.frontends.jaxpr import bytes_of
from tightship.graph import Graph, Op, aligned
from tightship.integrations.jax_pairs import Pair, crossing_bytes
from tightship.integrations.jax_policies import Steps, steps_of_policy
from tightship.simulate import baseline, replay

__all__ = ["Frame", "Share", "frame_of", "policy_steps"]

Share = float | str
"""A part of what loops may hand on, or the policy that says what they do."""


@dataclass(frozen=True)
class Frame:
    """The graph that is planned for a level, in ``beyond`` bytes; ``op_of``: ops of the level by the graph's (None:
    none). ``one``: XLA has both bodies of a pair in one computation, as those of shard maps, and would merge what
    the second makes again with the first time."""

    graph: Graph
    op_of: tuple[int | None, ...]
    beyond: float
    rest: int | None = None
    one: bool = False


def frame_of(ops: Ops, pair: Pair | None, share: Share, beyond: float, least: int = 0) -> Frame:
    """The graph of a level. Of a pair: the first body, then an op that needs all but what may be handed on, then the
    second body, for which all that it reads of the first is kept, or made again. ``least``: bytes that are handed on
    anyhow, with what comes between."""
    if pair is None:
        return Frame(ops.graph, tuple(range(len(ops.graph.ops))), beyond)
    body, begins, own = ops.program, pair.begins, pair.arrives
    most = crossing_bytes(body, pair.cut, begins)
    all_of_it = isinstance(share, str) or any(e.once for e in body.equations)
    saved = most if all_of_it else int(most * float(share))
    if beyond == math.inf:
        # More than either body can take, and little more: plans come as near as to a part of it.
        whole = replay(ops.graph, baseline(ops.graph)).peak - ops.graph.static_bytes
        beyond = saved + body.nbytes(begins) + whole + 2 * body.nbytes(own)
    saved += sum(aligned(bytes_of(body.avals[v])) for v in own)  # what comes between is there, too
    saved = max(saved, least)
    room = max(0, int(beyond) - saved)
    b, home = GraphBuilder(), {}
    op_of: list[int | None] = []

    def add(op: Op, of: int | None = None) -> int:
        op_of.append(of)
        return b.op(op)

    for v in (*body.constants, *body.inputs):
        kind = "activation" if v in begins or v in own else "parameter"
        home[v] = b.tensor(f"{kind}.{v}", bytes_of(body.avals[v]), kind=kind)
    b.inputs = [home[v] for v in (*body.constants, *body.inputs) if v not in begins and v not in own]
    add(Op("begins", "begins", (), tuple(home[v] for v in sorted(begins)), effect=True))
    rest = None
    kept = [v for v in body.outputs[: len(pair.keeps)] if isinstance(v, int)]

    def middle() -> int:
        add(Op("ends", "ends", tuple(dict.fromkeys(home[v] for v in kept)), effect=True))
        made = tuple(home[v] for v in sorted(own))
        return add(Op("rest", "rest", (), made, workspace=room, effect=True))

    for k, (row, results, op) in enumerate(zip(ops.members, ops.results, ops.graph.ops, strict=True)):
        if rest is None and row[-1] >= pair.cut:
            rest = middle()
        for v in results:
            home[v] = b.tensor(f"made.{v}", bytes_of(body.avals[v]))
        reads = tuple(home[v] for v in ops.reads(row))
        phase = "forward" if rest is None else "backward"
        add(replace(op, inputs=reads, outputs=tuple(home[v] for v in results), phase=phase), k)
    rest = middle() if rest is None else rest
    given = set(b.inputs)
    ends = [home[v] for v in body.outputs[len(pair.keeps) :] if isinstance(v, int)]
    graph = b.graph([v for v in dict.fromkeys(ends) if v not in given], "pair")
    return Frame(graph, tuple(op_of), beyond, rest, pair.first.name == "shard_map")


def policy_steps(ops: Ops, frame: Frame, policy: str) -> Steps:
    equations = ops.program.equations
    made = [None if of is None else equations[ops.members[of][-1]].made for of in frame.op_of]
    return steps_of_policy(frame.graph, _backward_of(frame), made, policy, loops=frame.rest is not None)


def _backward_of(frame: Frame) -> int:
    """Where the backward pass of a level begins."""
    phases = [op.phase for op in frame.graph.ops]
    if frame.rest is not None:
        return frame.rest
    return phases.index("backward") if "backward" in phases else len(phases)
