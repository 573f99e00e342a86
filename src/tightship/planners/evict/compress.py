"""Compress everything that can be without loss while nobody uses it: masks to bits, indices to narrow integers.

Problem: lower the peak without running any op again. Measure: bytes; the seconds of the codecs are a few per cent
of what made the values. Source: Gist (Jain et al., ISCA 2018), its lossless part; which storages, see
``analysis.packing``. Guarantee: the same bits; never copies out or recomputes. Complexity: one replay per halving.
Known limits: largest savings first, not where the peak is; one stretch per storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightship.analysis.packing import packings
from tightship.options import option
from tightship.planners.evict.lowering import decide, fewest, longest_transfers
from tightship.planners.evict.problem import Decision, EvictionProblem, Progress

__all__ = ["Options", "plan"]


@dataclass(frozen=True, slots=True)
class Options:
    """What codecs may do."""

    lossy: bool = option(False, "codecs may round single precision to bfloat16")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """Compress as many storages as the budget asks for, those that save most first."""
    o = options or Options()
    graph, uses = problem.graph, problem.graph.uses
    known = packings(graph, lossy=o.lossy)
    at = {k: p for p, k in enumerate(problem.order)}
    choices = [
        replace(t, packing=known[t.storage])
        for t in longest_transfers(graph, problem.order)
        if t.storage in known and all(at[w] <= t.last for w in uses.writers[t.storage])
    ]
    choices.sort(key=lambda t: known[t.storage].nbytes - graph.storages[t.storage].size)
    return fewest(len(choices), lambda n: decide(problem, budget, transfers=choices[:n]))
