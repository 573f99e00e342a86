"""Lower a plan's peaks near the least memory: what lies idle at one is recomputed for its next use.

Problem: a plan with a lower peak, of one that is there. Measure: bytes in use along its steps. Source: ours.
Decisions about gaps between the first runs of ops say nothing of what recomputations read of one another: tables that
every layer reads lie beside the largest ops of each. At the highest peak, the largest storage that its step does not
touch is freed after its last use before and made again right before the next one, by its op and, where what that
reads is gone, the ops before; what this takes has to be less than the peak everywhere. Guarantee: the same results,
and never more bytes. Complexity: a replay for each storage tried. Known limits: no storage that several ops write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tightship.analysis.bounds import runs_again
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.plan import Step
from tightship.simulate import Timeline, replay

__all__ = ["shaved"]

_TRIES, _LARGEST, _DEPTH = 200, 8, 12
"""Storages tried in all and at each peak, and ops in a row that are run for one."""
_STEPS = 2_000_000
"""Steps replayed for them."""


def shaved(graph: Graph, line: Timeline, deadline: Deadline, once: Collection[int] = ()) -> Timeline:
    """The timeline of steps that take less, or the same one; of steps that compute, recompute and free alone. No
    storage of ``once`` is made again."""
    tries = min(_TRIES, _STEPS // max(1, len(line.steps)))
    plain = all(
        s.kind in ("compute", "recompute", "free") and s.form == "full" and not s.saves for s in line.steps
    )
    while plain and line.peak_step >= 0:
        for s in _idle(graph, line, once)[:_LARGEST]:
            if tries <= 0 or deadline.over:
                return line
            tries -= 1
            if (lower := _without(graph, line, s, once)) is not None:
                line = lower
                break
        else:
            return line
    return line


def _idle(graph: Graph, line: Timeline, once: Collection[int]) -> list[int]:
    """What lies in memory at the peak but is not touched there and can be made again, the largest first."""
    step = line.steps[line.peak_step]
    touched = {*graph.uses.reads[step.op], *graph.uses.defines[step.op], *graph.uses.mutates[step.op]}
    left_out = touched.union(once)
    there = {s: n for s, n in line.at_peak if s >= 0 and n and s not in left_out and _made_again(graph, s)}
    return sorted(there, key=lambda s: -there[s])


def _made_again(graph: Graph, s: int) -> bool:
    uses = graph.uses
    once = s not in graph.static and s not in graph.kept and len(uses.writers[s]) == 1
    return once and runs_again(graph, uses.definer[s], redraw=False) and not uses.mutates[uses.definer[s]]


def _without(graph: Graph, line: Timeline, s: int, once: Collection[int]) -> Timeline | None:
    """The steps without storage ``s`` at the peak, if they need less than the peak where they differ."""
    steps, peak, reads, defines = line.steps, line.peak_step, graph.uses.reads, graph.uses.defines

    def uses(step: Step) -> bool:
        return s in step.storages or (step.op >= 0 and (s in reads[step.op] or s in defines[step.op]))

    last = next((i for i in range(peak - 1, -1, -1) if uses(steps[i])), -1)
    then = next((i for i in range(peak + 1, len(steps)) if uses(steps[i])), -1)
    if last < 0 or then < 0:
        return None
    here, made = steps[then], list[Step]()
    if here.op < 0:  # nothing needs it any more
        left = tuple(x for x in here.storages if x != s)
        after = (replace(here, storages=left),) if left else ()
    elif s in reads[here.op]:
        there, fixed = _there(graph, steps[:then]) - {s}, _written(graph, steps[:then])
        more = _again(graph, s, there, fixed, once, _DEPTH)
        if more is None:
            return None
        made, after = more, (here,)
    else:
        return None
    before = (*steps[: last + 1], Step("free", storages=(s,)), *steps[last + 1 : then], *made, *after)
    found = replay(graph, (*before, *steps[then + 1 :]))
    return found if max(found.levels[last : len(before)]) < line.peak else None


def _there(graph: Graph, steps: Sequence[Step]) -> set[int]:
    """The storages in memory after some steps, the caller's aside."""
    there = set[int]()
    for step in steps:
        if step.op < 0:
            there.difference_update(step.storages)
        else:
            there.difference_update(a for a, _ in step.reuses)
            there.update(graph.uses.defines[step.op] if step.kind == "compute" else step.storages)
    return there


def _written(graph: Graph, steps: Sequence[Step]) -> set[int]:
    """What of the caller's some steps write."""
    return {s for step in steps if step.op >= 0 for s in graph.uses.mutates[step.op] if s in graph.static}


def _again(
    graph: Graph, s: int, there: set[int], written: set[int], once: Collection[int], depth: int
) -> list[Step] | None:
    """Steps that make a storage of what is ``there``, freeing what else they make; None where so many do not."""
    k, found, gone = graph.uses.definer[s], list[Step](), list[int]()
    if not depth or s in once or not _made_again(graph, s) or not written.isdisjoint(graph.uses.reads[k]):
        return None
    for r in graph.uses.reads[k]:
        if r in graph.static:
            continue
        if len(graph.uses.writers[r]) > 1:
            return None
        if r not in there:
            more = _again(graph, r, there, written, once, depth - 1)
            if more is None:
                return None
            found += more
            gone.append(r)
    there.add(s)
    there.difference_update(gone)
    found.append(Step("recompute", k, (s,)))
    return [*found, Step("free", storages=tuple(gone))] if gone else found
