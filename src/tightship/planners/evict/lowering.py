"""From what is decided to steps: ops that run in some order, some of them again, and storages copied away in between.

`lower` is the one lowering of decisions that are not bits for the engine (`EvictionProblem.lower` has those of any);
`decide` says what they cost. Passes over steps: `drop_dead_copies`; for ops that draw random numbers,
`pure_random_ops` before planning and `save_random_states` after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from tightship import _core
from tightship.analysis.packing import Packing
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.plan import Step
from tightship.planners.evict.problem import Decision, EvictionProblem, best_of
from tightship.simulate import Timeline, baseline, replay

__all__ = [
    "Run",
    "Transfer",
    "decide",
    "drop_dead_copies",
    "drop_dead_runs",
    "fewest",
    "longest_transfers",
    "lower",
    "overlap",
    "pure_random_ops",
    "save_random_states",
]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an op; ``again``: a recomputation, after which ``storages`` are there again."""

    op: int
    again: bool = False
    storages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """``storage`` leaves after position ``last`` of the order and is needed again at ``next``. Its bytes are freed
    after position ``freed`` and taken again before position ``restored``: apart from ``last`` and ``next``, the copy
    runs beside the ops in between. ``packing``: how it is compressed; None: it is copied to the host."""

    storage: int
    last: int
    next: int
    freed: int
    restored: int
    packing: Packing | None = None


def lower(
    graph: Graph, order: Sequence[int], runs: Sequence[Run] | None = None, transfers: Sequence[Transfer] = ()
) -> tuple[Step, ...]:
    """The steps of ``runs`` (None: every op once, in ``order``), with at most one transfer of each storage; all else
    stays until its last use."""
    steps = baseline(graph, order) if runs is None else _with_lifetimes(graph, runs)
    return _Transfers(graph, transfers).insert(steps) if transfers else steps


def decide(
    problem: EvictionProblem,
    budget: int,
    runs: Sequence[Run] | None = None,
    transfers: Sequence[Transfer] = (),
) -> Decision:
    """The decision to do what `lower` says, with what it costs; not a valid one where the replay refuses it, or where
    more is copied out at once than the problem allows."""
    graph = problem.graph
    count = sum(run.again for run in runs or ()) + len(transfers)
    kept = problem.kept
    steps = lower(graph, problem.order, runs, transfers)
    try:
        line: Timeline | None = replay(graph, steps)
    except BadInput:
        line = None
    if line is None or (problem.host is not None and line.host_peak > problem.host):
        return Decision(problem.nothing(), kept.peak, 0.0, count, met=False, valid=False)
    extra = max(0.0, line.time - kept.time)
    return Decision(
        problem.nothing(), line.peak, extra, count, line.peak <= budget, steps=steps, host=line.host_peak
    )


def _with_lifetimes(graph: Graph, runs: Sequence[Run]) -> tuple[Step, ...]:
    """Every storage leaves after the last run that touches it before it is restored, or after its last use."""
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
    for run, ending in zip(runs, ends, strict=True):
        steps.append(Step("recompute" if run.again else "compute", op=run.op, storages=run.storages))
        if freed := tuple(s for s in ending if s not in graph.static):
            steps.append(Step("free", storages=freed))
    return tuple(steps)


class _Transfers:
    """Puts transfers between the steps of ops. A position is a number of ops computed."""

    def __init__(self, graph: Graph, transfers: Sequence[Transfer]) -> None:
        self.graph = graph
        self.steps: list[Step] = []
        self.last_compute = -1  # the last step of stream 0
        self.fetched: dict[int, int] = {}  # storage -> the step that fetches it
        self.offloaded: dict[int, int] = {}
        self.leave: dict[int, list[Transfer]] = defaultdict(list)
        self.free: dict[int, list[Transfer]] = defaultdict(list)
        self.restore: dict[int, list[Transfer]] = defaultdict(list)
        for t in transfers:
            self.leave[t.last].append(t)
            self.free[t.freed].append(t)
            self.restore[t.restored].append(t)
        self.awaited = {(t.storage, t.next) for t in transfers if t.packing is None}

    def insert(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        position = -1
        for step, following in zip(steps, [*steps[1:], Step("compute")], strict=True):
            if step.kind == "compute":
                position += 1
                self._before(position)
                reads = self.graph.uses.reads[step.op]
                waits = sorted(self.fetched.pop(s) for s in reads if (s, position) in self.awaited)
                self._emit(replace(step, waits=tuple(waits)))
            else:
                self._emit(step)
            if following.kind == "compute":
                self._after(position)
        return tuple(self.steps)

    def _emit(self, step: Step) -> int:
        self.steps.append(step)
        if step.stream == 0:
            self.last_compute = len(self.steps) - 1
        return len(self.steps) - 1

    def _before(self, position: int) -> None:
        for t in self.restore[position]:
            s = (t.storage,)
            if t.packing is not None:
                self._emit(Step("decompress", storages=s, codec=t.packing.codec))
                self._emit(Step("free", storages=s, form="packed"))
            else:
                self.fetched[t.storage] = self._emit(
                    Step("fetch", storages=s, stream=1, waits=(self.last_compute,))
                )
                self._emit(Step("free", storages=s, form="host", stream=1))

    def _after(self, position: int) -> None:
        for t in self.leave[position]:
            s, p = (t.storage,), t.packing
            if p is not None:
                self._emit(Step("compress", storages=s, nbytes=p.nbytes, codec=p.codec))
            else:
                self.offloaded[t.storage] = self._emit(
                    Step("offload", storages=s, stream=1, waits=(self.last_compute,))
                )
        for t in self.free[position]:
            waits = () if t.packing is not None else (self.offloaded[t.storage],)
            self._emit(Step("free", storages=(t.storage,), waits=waits))


def longest_transfers(graph: Graph, order: Sequence[int]) -> list[Transfer]:
    """The longest stretch between two uses of each storage that can leave memory, largest storages first."""
    uses = graph.uses
    at: dict[int, list[int]] = defaultdict(list)
    for p, k in enumerate(order):
        for s in dict.fromkeys((*uses.reads[k], *uses.defines[k])):
            at[s].append(p)
    found = []
    for s, row in at.items():
        if s in graph.static or s in graph.kept or not graph.storages[s].size or len(row) < 2:
            continue
        last, next_ = max(pairwise(row), key=lambda pair: pair[1] - pair[0])
        if next_ - last > 1:
            found.append(Transfer(s, last, next_, last, next_))
    return sorted(found, key=lambda t: (-graph.storages[t.storage].size, t.last - t.next, t.storage))


def overlap(graph: Graph, order: Sequence[int], transfers: Sequence[Transfer]) -> list[Transfer]:
    """The same copies to the host with their bytes kept for as long as the copy out takes, and taken as early as the
    copy back takes, by the times of ops and machine: then nothing waits, if copies do not queue for long."""
    starts = list(accumulate((graph.ops[k].time for k in order), initial=0.0))  # of each position
    size, machine = [s.size for s in graph.storages], graph.machine
    free, outs = 0.0, {}  # when the stream out has done what it was given
    for t in sorted(transfers, key=lambda t: t.last):
        free = max(free, starts[t.last + 1]) + machine.seconds("offload", size[t.storage])
        outs[t.storage] = min(t.next - 1, max(t.last, int(np.searchsorted(starts, free)) - 1))
    need, found = starts[-1], []  # when the stream back must begin with what comes after
    for t in sorted(transfers, key=lambda t: -t.next):
        need = min(need, starts[t.next]) - machine.seconds("fetch", size[t.storage])
        back = min(t.next, max(outs[t.storage] + 1, int(np.searchsorted(starts, need, "right")) - 1))
        found.append(replace(t, freed=outs[t.storage], restored=back))
    return found


def fewest(count: int, decide_first: Callable[[int], Decision]) -> Decision:
    """The decision of the fewest choices that meets the budget (by doubling and halving), else the lowest peak."""
    best, low, high = decide_first(0), 0, 1
    while not best.met and low < count:
        high = min(high, count)
        now = decide_first(high)
        best = best_of((best, now))
        if now.met:
            break
        low, high = high, high * 2
    while best.met and high - low > 1:
        middle = (low + high) // 2
        now = decide_first(middle)
        low, high = (low, middle) if now.met else (middle, high)
        best = best_of((best, now))
    return best


def drop_dead_copies(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps without copies to the host that are freed before they are fetched.

    A search begins such a copy where it would not be over before the next use, and then keeps the storage. The
    peak on the device stays, on the host it falls, and nothing takes longer.
    """
    if (_core.codes(steps, "kind", ("offload",)) > 0).all():
        return tuple(steps)
    begun: dict[int, int] = {}  # storage -> the step that copies it out
    dead: dict[int, list[int]] = defaultdict(list)  # step -> storages it names in vain
    for i, step in enumerate(steps):
        for s in step.storages:
            if step.kind == "offload":
                begun[s] = i
            elif step.kind == "fetch":
                begun.pop(s, None)
            elif step.kind == "free" and step.form == "host" and s in begun:
                dead[begun.pop(s)].append(s)
                dead[i].append(s)
    if not dead:
        return tuple(steps)
    out: list[Step] = []
    index: list[int] = []  # of each step in ``out``, -1 if it is gone
    for i, step in enumerate(steps):
        left = tuple(s for s in step.storages if i not in dead or s not in dead[i])
        if i in dead and not left:
            index.append(-1)
            continue
        index.append(len(out))
        out.append(replace(step, storages=left, waits=_renumber(step.waits, index)))
    return tuple(out)


def drop_dead_runs(graph: Graph, steps: Sequence[Step], chained: Collection[int] = ()) -> tuple[Step, ...]:
    """The same steps without runs of which nothing is read before the op runs again: that run makes all there is to
    read, and is the first one then. A search that lets a result go until the end has made it in vain where its op
    stands in the order. Ops that others wait for (``chained``, too) keep their place."""
    if any(step.waits for step in steps):  # what copies wait for stays
        return tuple(steps)
    uses = graph.uses
    tied = {c for k, op in enumerate(graph.ops) if op.control for c in (k, *op.control)}.union(chained)
    run_next: dict[int, int] = {}
    read_next: dict[int, int] = {}
    dead: dict[int, int] = {}  # a run in vain -> the next one of its op
    for i in range(len(steps) - 1, -1, -1):
        step, k = steps[i], steps[i].op
        if step.kind not in ("compute", "recompute"):
            if step.kind != "free" or step.form != "full":
                read_next.update((s, i) for s in step.storages)
            continue
        then = run_next.get(k, -1)
        made = step.storages if step.kind == "recompute" else uses.defines[k]
        moves = then >= 0 and k not in tied and not step.reuses and not step.saves and _moves(graph, k)
        if moves and all(read_next.get(s, len(steps)) > then for s in made):
            dead[i] = then
            continue
        run_next[k] = i
        read_next.update((s, i) for s in (*uses.reads[k], *uses.mutates[k]))
    return _without(graph, steps, dead) if dead else tuple(steps)


def _moves(graph: Graph, k: int) -> bool:
    """Whether an op does nothing but make storages, from what is not written to any more: it may run later in every
    order that bounds know of."""
    op, uses = graph.ops[k], graph.uses
    last = all(n == len(uses.writers[s]) for s, n in zip(uses.reads[k], uses.needs[k], strict=True))
    return (
        op.pure
        and not uses.mutates[k]
        and last
        and all(graph.values[v].storage in uses.defines[k] for v in op.outputs)
    )


def _without(graph: Graph, steps: Sequence[Step], dead: Mapping[int, int]) -> tuple[Step, ...]:
    """The steps without some runs and what frees what they made; what was to stay of it stays of the next run."""
    ran: set[int] = set()
    gone: dict[int, int] = {}  # what is not there, though it was -> the run that makes it
    out: list[Step] = []
    for i, step in enumerate(steps):
        made = graph.uses.defines[step.op] if step.op >= 0 else ()
        if i in dead:
            gone.update((s, dead[i]) for s in (step.storages if step.kind == "recompute" else made))
        elif step.kind == "free" and step.form == "full":
            left = tuple(s for s in step.storages if gone.pop(s, None) is None)
            out += [replace(step, storages=left)] if left else []
        elif step.kind == "recompute":
            stays = tuple(s for s in made if s in step.storages or gone.get(s) == i)
            rest = tuple(s for s in made if s not in stays)
            if step.op in ran:
                out.append(replace(step, storages=stays))
            else:
                out.append(replace(step, kind="compute", storages=()))
                out += [Step("free", storages=rest)] if rest else []
        else:
            out.append(step)
        if i not in dead and step.kind in ("compute", "recompute"):
            ran.add(step.op)
            for s in made:
                gone.pop(s, None)
    return tuple(out)


def _renumber(waits: Iterable[int], index: Sequence[int]) -> tuple[int, ...]:
    return tuple(index[w] for w in waits if index[w] >= 0)


_WORTH = 2
"""A random op is recomputed only if it writes more than this many times the bytes of its state (5 KB on the CPU)."""


def pure_random_ops(graph: Graph) -> Graph:
    """The graph with random ops that are worth their saved state taken for pure ones, with the state as workspace;
    the same one where there are none.

    Orders are those of the original: this graph does not know the random chain.
    """
    if not any(op.state for op in graph.ops):
        return graph
    uses, ops = graph.uses, []
    for k, op in enumerate(graph.ops):
        written = sum(graph.storages[s].size for s in (*uses.defines[k], *uses.mutates[k]))
        if op.state and written > _WORTH * op.state:
            op = replace(op, random=False, state=0, workspace=op.workspace + op.state)
        ops.append(op)
    return graph.with_ops(tuple(ops))


def save_random_states(graph: Graph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps with the states that the random ops among the recomputed need: saved when the op first runs,
    forgotten after its last run. A planner that was shown `pure_random_ops` has not seen their bytes in between."""
    again = np.flatnonzero(_core.codes(steps, "kind", ("recompute",)) == 0).tolist()
    last = {steps[i].op: i for i in again if graph.ops[steps[i].op].random}
    if not last:
        return tuple(steps)
    out: list[Step] = []
    index: list[int] = []  # what to wait for instead of each step
    for i, step in enumerate(steps):
        index.append(len(out))
        saves = step.kind == "compute" and step.op in last
        out.append(replace(step, saves=saves, waits=_renumber(step.waits, index)))
        if step.kind == "recompute" and last.get(step.op) == i:
            index[i] = len(out)  # a copy that waits for the op may take the state's bytes
            out.append(Step("free", op=step.op, form="state"))
    return tuple(out)
