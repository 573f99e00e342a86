"""How long steps take, streams side by side, by the rules that `plan` states.

Wrong steps take no time here: what is wrong with them is found elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from tightship.graph import Graph
from tightship.plan import Step

__all__ = ["agree", "elapsed"]

_COPIES = ("offload", "fetch", "compress", "decompress")
_CLOSE = 1e-9
"""Two ways of adding up the same seconds differ by less than this share of them."""


def agree(stated: float, found: float) -> bool:
    """Whether two sums of the same seconds are the same, but for rounding; what is no number agrees with nothing."""
    return stated == found or abs(stated - found) <= _CLOSE * max(abs(stated), abs(found)) < inf


def elapsed(graph: Graph, steps: Sequence[Step]) -> float:
    """Seconds until the last stream ends."""
    ended: list[float] = []
    clock = {0: 0.0}
    for i, step in enumerate(steps):
        took, lost = _seconds(graph, step)
        begins = [clock.get(step.stream, 0.0), *(ended[w] for w in step.waits if 0 <= w < i)]
        beside = step.kind in _COPIES and step.stream != 0
        if beside:  # stream 0 begins the copy, and loses time to it
            begins.append(clock[0])
        ended.append(max(begins) + took)
        clock[step.stream] = ended[-1]
        if beside:
            clock[0] += lost
    return max(clock.values())


def _seconds(graph: Graph, step: Step) -> tuple[float, float]:
    """What a step takes on its stream, and what its copies take from stream 0 if that is another one."""
    machine = graph.machine
    if step.kind in ("compute", "recompute"):
        if not 0 <= step.op < len(graph.ops):
            return 0.0, 0.0
        op = graph.ops[step.op]
        moves = 1 if step.saves else 0  # to set a state aside, set another and put the first back is three
        if step.kind == "recompute" and op.random:
            moves += 3
        return op.time + moves * machine.state, 0.0
    took = lost = 0.0
    if step.kind in _COPIES:
        for s in step.storages:
            if 0 <= s < len(graph.storages):
                size = graph.storages[s].size
                took += machine.seconds(step.kind, size, step.codec)
                lost += machine.lost(size)
    return took, lost
