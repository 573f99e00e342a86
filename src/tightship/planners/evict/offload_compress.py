"""Storages set aside between two uses, packed or copied out: gaps, and the way from choices to steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from tightship.analysis.packing import Packing
from tightship.graph import Graph
from tightship.plan import Step
from tightship.planners.evict.problem import Decision, Frame
from tightship.simulate import baseline, replay

__all__ = ["Aside", "decided", "fewest", "overlapped", "spans", "steps_with"]


@dataclass(frozen=True, slots=True)
class Aside:
    """``storage`` leaves after position ``last`` of the order and is wanted again at ``next``. Its bytes are freed
    after position ``gone`` and taken again before position ``back``: apart from ``last`` and ``next``, the copy runs
    beside the ops in between. ``packing``: how it is packed; None: it is copied to the host."""

    storage: int
    last: int
    next: int
    gone: int
    back: int
    packing: Packing | None = None


def spans(graph: Graph, order: Sequence[int]) -> list[Aside]:
    """The longest stretch between two uses of each storage that can be set aside, largest storages first."""
    uses = graph.uses
    at: dict[int, list[int]] = {}
    for p, k in enumerate(order):
        for s in dict.fromkeys((*uses.reads[k], *uses.defines[k])):
            at.setdefault(s, []).append(p)
    found = []
    for s, row in at.items():
        if s in graph.static or s in graph.kept or not graph.storages[s].size or len(row) < 2:
            continue
        last, next_ = max(pairwise(row), key=lambda pair: pair[1] - pair[0])
        if next_ - last > 1:
            found.append(Aside(s, last, next_, last, next_))
    return sorted(found, key=lambda a: (-graph.storages[a.storage].size, a.last - a.next, a.storage))


def overlapped(graph: Graph, order: Sequence[int], chosen: Sequence[Aside]) -> list[Aside]:
    """The same copies with their bytes kept for as long as the copy out takes, and taken as early as the copy back
    takes, by the times of ops and machine: then nothing waits, if copies do not queue for long."""
    clock = list(
        accumulate((graph.ops[k].time for k in order), initial=0.0)
    )  # clock[p]: when position p begins
    m, found = graph.machine, []
    free = 0.0  # when the stream out has done what it was given
    outs: dict[int, int] = {}
    for a in sorted(chosen, key=lambda a: a.last):
        free = max(free, clock[a.last + 1]) + m.seconds("offload", graph.storages[a.storage].size)
        outs[a.storage] = min(a.next - 1, max(a.last, int(np.searchsorted(clock, free)) - 1))
    need = clock[-1]  # when the stream back must begin with what comes after
    for a in sorted(chosen, key=lambda a: -a.next):
        need = min(need, clock[a.next]) - m.seconds("fetch", graph.storages[a.storage].size)
        back = min(a.next, max(outs[a.storage] + 1, int(np.searchsorted(clock, need, "right")) - 1))
        found.append(replace(a, gone=outs[a.storage], back=back))
    return found


def steps_with(graph: Graph, order: Sequence[int], chosen: Sequence[Aside]) -> tuple[Step, ...]:
    """The steps that keep everything but ``chosen``, at most one stretch of each storage."""
    return _Writer(graph, order, chosen).run()


class _Writer:
    def __init__(self, graph: Graph, order: Sequence[int], chosen: Sequence[Aside]) -> None:
        self.graph, self.order = graph, order
        self.steps: list[Step] = []
        self.latest = {0: -1, 1: -1}  # the last step of each stream
        self.ready: dict[int, int] = {}  # storage -> the copy that makes it there
        self.leaving: dict[int, list[Aside]] = {}
        self.going: dict[int, list[Aside]] = {}
        self.coming: dict[int, list[Aside]] = {}
        for a in chosen:
            for table, p in ((self.leaving, a.last), (self.going, a.gone), (self.coming, a.back)):
                table.setdefault(p, []).append(a)
        self.wanted = {(a.storage, a.next) for a in chosen if a.packing is None}
        self.out: dict[int, int] = {}

    def emit(self, step: Step) -> int:
        i = len(self.steps)
        self.steps.append(step)
        self.latest[step.stream] = i
        return i

    def run(self) -> tuple[Step, ...]:
        kept = list(baseline(self.graph, self.order))
        position = -1
        for step, following in zip(kept, [*kept[1:], Step("compute")], strict=True):
            if step.kind == "compute":
                position += 1
                self.begin(position)
                waits = self.waits(position)
                self.emit(replace(step, waits=waits))
            else:
                self.emit(step)
            if following.kind == "compute":
                self.end(position)
        return tuple(self.steps)

    def waits(self, position: int) -> tuple[int, ...]:
        reads = self.graph.uses.reads[self.order[position]]
        return tuple(sorted(self.ready.pop(s) for s in reads if (s, position) in self.wanted))

    def begin(self, position: int) -> None:
        for a in self.coming.get(position, ()):
            s = (a.storage,)
            if a.packing is not None:
                self.emit(Step("decompress", storages=s, codec=a.packing.codec))
                self.emit(Step("free", storages=s, form="packed"))
                continue
            self.ready[a.storage] = self.emit(Step("fetch", storages=s, stream=1, waits=(self.latest[0],)))
            self.emit(Step("free", storages=s, form="host", stream=1))

    def end(self, position: int) -> None:
        for a in self.leaving.get(position, ()):
            s, p = (a.storage,), a.packing
            if p is not None:
                self.emit(Step("compress", storages=s, nbytes=p.nbytes, codec=p.codec))
            else:
                self.out[a.storage] = self.emit(
                    Step("offload", storages=s, stream=1, waits=(self.latest[0],))
                )
        for a in self.going.get(position, ()):
            waits = () if a.packing is not None else (self.out[a.storage],)
            self.emit(Step("free", storages=(a.storage,), waits=waits))


def decided(frame: Frame, limit: int, chosen: Sequence[Aside]) -> Decision:
    """What the choice costs."""
    steps = steps_with(frame.graph, frame.order, chosen)
    line, kept = replay(frame.graph, steps), replay(frame.graph, baseline(frame.graph, frame.order))
    extra = max(0.0, line.time - kept.time)
    return Decision(frame.nothing(), line.peak, extra, len(chosen), line.peak <= limit, steps=steps)


def fewest(count: int, tried: Callable[[int], Decision]) -> Decision:
    """The decision of the fewest choices that meets the limit (by doubling and halving), else the lowest peak."""
    best, low, high = tried(0), 0, 1
    while not best.met and low < count:
        high = min(high, count)
        now = tried(high)
        best = now if now.beats(best) else best
        if now.met:
            break
        low, high = high, high * 2
    while best.met and high - low > 1:
        middle = (low + high) // 2
        now = tried(middle)
        low, high = (low, middle) if now.met else (middle, high)
        best = now if now.beats(best) else best
    return best
