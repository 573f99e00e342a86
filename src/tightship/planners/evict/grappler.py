"""Grappler's memory optimiser: cheap ops run again for the backward, values live at the peak swapped out and in.

Problem: what TensorFlow's ``MemoryOptimizer`` decides (behaviours G1-G5, G8-G13), on graphs of this project; its
targets, the ops under ``gradients/``, are the backward ops where nothing has such a name. Of a graph read from
TensorFlow's files exactly the nodes that Grappler recomputes are recomputed. Measure: its own: a list
of cheap kinds of op, and a ranking by times. Source: tensorflow/core/grappler/optimizers/memory_optimizer.cc.
Guarantee: none on the peak, which the rewrites may miss; what comes out is legal and costed exactly. Complexity:
linear, with a replay for each round of swapping. Known limits: G15, recompute and swap do not know of each other and
there is no cost model,
which is what the default planner is for; of the two, the better one is taken. Sums (G6, G7) are rewritten before
planning: by the capture of a training step always, of TensorFlow's graphs at the level scheduling alone, because an
accumulator takes what it adds in no fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from tightship.errors import BadInput
from tightship.planners.evict import _grappler as rewrites
from tightship.planners.evict._events import carried_out
from tightship.planners.evict._frame import Decision, Frame
from tightship.planners.evict._grappler_plan import node_runs, rewritten

__all__ = ["LEVELS", "Options", "plan"]

LEVELS = ("none", "manual", "default", "recompute", "swap", "scheduling", "all")


@dataclass(frozen=True, slots=True)
class Options:
    """``level``: none, manual (only what hints say), default and all (recompute what is cheap, or swap), recompute
    or swap alone, scheduling (sums alone, which are rewritten where a graph of TensorFlow's is read). ``scope``: the
    name that targets stand under. ``recompute_hints``: patterns of op names, between commas, that run again whatever
    their kind. ``swap_hints``: OP:INPUT between commas, which input of an op to swap.
    ``rounds``: of swapping, at most."""

    level: str = "all"
    scope: str = "gradients/"
    recompute_hints: str = ""
    swap_hints: str = ""
    rounds: int = 25


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """The best of what the rewrites of the level come to (of a single one, whatever it comes to); keeping everything
    when that is within the limit."""
    o = options or Options()
    if o.level not in LEVELS:
        raise BadInput(f"a level is one of {', '.join(LEVELS)}", o.level, "level")
    best = frame.cost(frame.nothing(), limit)
    if o.level in ("none", "scheduling") or (best.met and o.level != "manual"):
        return best
    for made in _made(frame, limit, o):
        best = made if made.beats(best) or o.level in ("manual", "recompute") else best
    return best


def _made(frame: Frame, limit: int, o: Options) -> list[Decision]:
    hints = tuple(filter(None, (h.strip() for h in o.recompute_hints.split(","))))
    hinted = {k for k, op in enumerate(frame.graph.ops) if any(fnmatchcase(op.name, h) for h in hints)}
    found = []
    if o.level != "swap" and "nodes" in frame.graph.meta:
        found += _on_nodes(frame, limit, o, hints)
    elif o.level != "swap":
        again = rewrites.clones(
            frame, rewrites.targets(frame.graph, o.scope), hinted, heuristic=o.level != "manual"
        )
        if again:
            found.append(carried_out(frame, rewrites.runs(frame, again, o.scope), limit))
    swaps = ",".join(filter(None, (o.swap_hints, *frame.graph.meta.get("swaps", ()))))
    if o.level == "manual" and swaps:
        found.append(rewrites.swapped(frame, limit, rewrites.by_hand(frame, swaps)))
    if o.level in ("swap", "all", "default"):
        found.append(rewrites.swap(frame, limit, o.rounds))
    return found


def _on_nodes(frame: Frame, limit: int, o: Options, hints: tuple[str, ...]) -> list[Decision]:
    """What the recompute rewrite of a TensorFlow graph's nodes comes to."""
    rewrite = rewritten(frame.graph, o.level, o.scope, hints)
    runs = node_runs(frame, rewrite)
    return [carried_out(frame, runs, limit)] if any(run.again for run in runs) else []
