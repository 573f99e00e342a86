"""Checkpoint modules as people do it by hand: keep what goes from block to block, run each block again.

Problem: the saved set of ``torch.utils.checkpoint`` around every numbered module (``layers.3``), and of its
selective form, which keeps the results of matrix products and convolutions, too. Measure: none, it is a fixed
policy, here to be compared with. Source: Chen et al. 2016; PyTorch's ``checkpoint`` and
``create_selective_checkpoint_contexts``. Guarantee: the first backward op that needs a value of a block runs all of
the block again that is needed (early stop); everything leaves after its last use, which is kinder to the policy than
running it. Complexity: linear. Known limits: needs module paths; what cannot be run again is kept.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tightship.analysis.bounds import replayable
from tightship.analysis.order import backward_start
from tightship.analysis.structure import block_of
from tightship.options import option
from tightship.planners.evict.lowering import Run, decide
from tightship.planners.evict.problem import EVICT, Bits, Decision, EvictionProblem, Progress

__all__ = ["Options", "dropped", "plan"]

PLANNER = "evict/checkpoint"
"""Its group and its name on the command line."""

HEAVY = ("mm.", "bmm.", "convolution", "attention", "einsum", "linear.")
"""Parts of the targets whose results a selective checkpoint keeps."""


@dataclass(frozen=True, slots=True)
class Options:
    """Which blocks, and what of them is kept."""

    depth: int = option(1, "blocks are modules whose path has this many numbers")
    selective: bool = option(False, "keep the results of matrix products and convolutions")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The decision of the policy, whatever the budget; nothing is evicted when keeping everything meets it."""
    o = options or Options()
    kept = problem.cost(problem.nothing(), budget)
    if kept.met:
        return kept
    blocks = _Blocks(problem, o)
    return decide(problem, budget, blocks.runs())


def dropped(problem: EvictionProblem, options: Options) -> Bits:
    """What leaves by the policy, made again where it is wanted rather than block by block."""
    blocks = _Blocks(problem, options)
    gone = [s for row in blocks.evicted.values() for s in row]
    across = (problem.gaps[:, 1] < blocks.boundary) & (problem.gaps[:, 2] >= blocks.boundary)
    bits: Bits = (across & np.isin(problem.gaps[:, 0], gone)).astype(np.uint8) * np.uint8(EVICT)
    return bits


class _Blocks:
    def __init__(self, problem: EvictionProblem, o: Options) -> None:
        self.graph, self.order, self.uses = problem.graph, problem.order, problem.graph.uses
        ops = self.graph.ops
        self.at = {k: i for i, k in enumerate(self.order)}
        self.boundary = backward_start(self.graph, self.order)
        self.block = [block_of(op.module, o.depth) if op.phase == "forward" else "" for op in ops]
        self.selective = o.selective
        self.evicted: dict[str, list[int]] = defaultdict(list)
        for s in range(len(self.graph.storages)):
            if self._leaves(s):
                self.evicted[self.block[self.uses.definer[s]]].append(s)

    def _leaves(self, s: int) -> bool:
        """Whether a storage lives inside of one block's forward, and the backward reads it."""
        graph, uses = self.graph, self.uses
        made = uses.definer[s]
        if s in graph.static or s in graph.kept or not graph.storages[s].size or not self.block[made]:
            return False
        if any(self.at[k] >= self.boundary for k in uses.writers[s]):
            return False
        if self.selective and any(part in graph.ops[made].target for part in HEAVY):
            return False
        early = [k for k in (*uses.readers[s], *uses.writers[s]) if self.at[k] < self.boundary]
        inside = all(self.block[k] == self.block[made] for k in early)
        later = any(self.at[k] >= self.boundary for k in uses.readers[s])
        return inside and later and replayable(graph, s)

    def runs(self) -> list[Run]:
        ready: dict[int, list[str]] = defaultdict(list)
        for name, gone in self.evicted.items():
            first = min(self.at[k] for s in gone for k in self.uses.readers[s] if self.at[k] >= self.boundary)
            ready[first].append(name)
        runs = []
        for i, k in enumerate(self.order):
            for name in sorted(
                ready.get(i, ()), key=lambda n: -self.at[self.uses.definer[self.evicted[n][0]]]
            ):
                runs += self._again(name)
            runs.append(Run(k))
        return runs

    def _again(self, name: str) -> list[Run]:
        """The part of a block that makes what left, in the order in which it ran."""
        uses, graph = self.uses, self.graph
        wanted, ops = set(self.evicted[name]), set()
        stack = list(wanted)
        while stack:
            for w in uses.writers[stack.pop()]:
                if w in ops:
                    continue
                ops.add(w)
                for t in uses.reads[w]:
                    made = uses.definer[t]
                    touched = max(self.at[k] for k in (*uses.readers[t], *uses.writers[t]))
                    dead = t not in graph.static and touched < self.boundary
                    inside = made >= 0 and self.block[made] == name
                    if t not in wanted and inside and dead and t not in graph.kept and replayable(graph, t):
                        wanted.add(t)
                        stack.append(t)
        return [
            Run(k, True, tuple(s for s in uses.defines[k] if s in wanted))
            for k in sorted(ops, key=self.at.__getitem__)
        ]
