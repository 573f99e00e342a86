"""Replay a plan's steps: bytes at every step, time with copy streams, the peak and who makes it up.

This is the reference: plain Python, the definition of what a plan costs. The C++ engine that planners call in
their inner loop is tested equal to it, and so is the core's replay of plans of many steps. Bytes are those of the
device pool, the static set included.

A compute or recompute step needs, beyond what is resident, every storage its op defines (also those a
recomputation does not keep, also a second copy of those still there), the op's workspace, and the random state
it saves or, run again, sets aside; less what results take the place of (``Step.reuses``). `plan` says what each
kind of step means, bytes and time included.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.cached import cached_property
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Rows
from tightship.plan import FORMS, KINDS, Step

__all__ = [
    "SAVE_MOVES",
    "SET_MOVES",
    "Timeline",
    "baseline",
    "extra_bytes",
    "extras",
    "make_steps",
    "replay",
    "step_columns",
    "unplanned",
]

SAVE_MOVES, SET_MOVES = 1, 3
"""Moves of a random op's state: to save it, and, when the op runs again, to set that of now aside, set the saved one
and put the other one back."""

MANY = 4096
"""Steps, or ops, from which on the core replays, and makes steps: the same, in a tenth of the time."""


@dataclass(frozen=True)
class Timeline:
    """What a list of steps of a graph costs.

    ``during[i]`` device bytes in use while step ``i`` runs, ``resident[i]`` bytes left after it. ``spans[i]`` are the
    seconds at which it begins and ends. ``time`` is seconds until the last stream ends, ``compute_time`` those that
    stream 0 works, what copies on other streams take from it included. ``at_peak`` lists what makes up the peak:
    (storage, bytes), storage -1 for what the op at the peak needs while it runs, and saved random states.
    """

    peak: int
    peak_step: int
    time: float
    compute_time: float
    host_peak: int
    graph: Graph = field(repr=False, compare=False)
    steps: tuple[Step, ...] = field(repr=False, compare=False)
    levels: array[int] = field(repr=False)
    """``during`` as an array; ``left`` is ``resident`` as one, ``begins`` and ``ends`` are ``spans``."""
    left: array[int] = field(repr=False)
    begins: array[float] = field(repr=False)
    ends: array[float] = field(repr=False)

    @cached_property
    def during(self) -> tuple[int, ...]:
        return tuple(self.levels)

    @cached_property
    def resident(self) -> tuple[int, ...]:
        return tuple(self.left)

    @cached_property
    def spans(self) -> tuple[tuple[float, float], ...]:
        return tuple(zip(self.begins, self.ends, strict=True))

    @cached_property
    def at_peak(self) -> tuple[tuple[int, int], ...]:
        """Found when it is asked for: it takes another replay."""
        return _at_peak(self.graph, self.steps[: self.peak_step + 1])


def extra_bytes(op: Op) -> int:
    """Workspace of an op plus the most that graphs called inside it need beyond their inputs."""
    return op.workspace + max(map(_need, op.calls), default=0)


def extras(graph: Graph) -> NDArray[np.int64]:
    """`extra_bytes` of every op, found once for each graph."""
    known = graph.__dict__  # where cached properties are kept as well
    if "_extras" not in known:
        found = graph.columns.workspace.copy()
        for k in np.flatnonzero(_core.lengths(graph.ops, "calls")).tolist():
            found[k] = extra_bytes(graph.ops[k])
        known["_extras"] = found
    extra: NDArray[np.int64] = known["_extras"]
    return extra


def _need(graph: Graph) -> int:
    """The most bytes a called graph needs beyond its inputs."""
    return unplanned(graph).peak - graph.static_bytes


def unplanned(graph: Graph) -> Timeline:
    """What the graph costs in its own order with everything kept, found once for each graph."""
    known = graph.__dict__  # where cached properties are kept as well
    if "_unplanned" not in known:
        known["_unplanned"] = replay(graph, baseline(graph))
    line: Timeline = known["_unplanned"]
    return line


def baseline(graph: Graph, order: Sequence[int] | None = None) -> tuple[Step, ...]:
    """The steps that keep everything: each op once in ``order``, every storage freed after its last use."""
    order = range(len(graph.ops)) if order is None else order
    if len(order) >= MANY:
        return _many_steps(graph, order)
    reads, defines, mutates = graph.uses.reads, graph.uses.defines, graph.uses.mutates
    stay = graph.static | graph.kept
    last = [-1] * len(graph.storages)
    for k in order:
        for s in reads[k]:
            last[s] = k
        for s in defines[k]:
            last[s] = k
        for s in mutates[k]:
            last[s] = k
    for s in stay:
        last[s] = -1
    steps = []
    for k in order:
        steps.append(Step("compute", k))
        if dead := tuple([s for row in (reads[k], defines[k]) for s in row if last[s] == k]):
            steps.append(Step("free", -1, dead))
    return tuple(steps)


def _many_steps(graph: Graph, order: Sequence[int]) -> tuple[Step, ...]:
    """`baseline` of many ops: what each touches, by position, first what it reads and then what it defines."""
    facts, ops = graph.uses.facts, np.array(order, dtype=np.int64)
    touched = [_in_order(rows, ops) for rows in (facts.reads, facts.defines)]
    at, storage = (np.concatenate([rows[side] for rows in touched]) for side in (0, 1))
    last = np.full(len(graph.storages), -1, dtype=np.int64)
    np.maximum.at(last, storage, at)
    last[[*graph.static, *graph.kept]] = -1
    dead = np.flatnonzero(last[storage] == at)
    dead = dead[np.argsort(at[dead], kind="stable")]
    starts = np.flatnonzero(np.diff(at[dead], prepend=-1))
    free = at[dead][starts]  # the positions after which something is freed
    where = free + np.arange(1, len(free) + 1)  # and the steps that free it
    count = len(ops) + len(free)
    freed = np.zeros(count, dtype=np.bool_)
    freed[where] = True
    op = np.full(count, -1, dtype=np.int64)
    op[~freed] = ops
    sizes = np.zeros(count, dtype=np.int64)
    sizes[where] = np.diff(starts, append=len(dead))
    rows = np.concatenate([[0], np.cumsum(sizes)]), storage[dead].astype(np.int32)
    kind = np.array(["compute", "free"], dtype=object)[freed.astype(np.intp)].tolist()
    return make_steps(count, kind=kind, op=op, storages=list(_core.tuples(rows)))


def _in_order(rows: Rows, ops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of some ops one after the other: the position of each item's op, and the item."""
    start, item = rows
    count = np.diff(start)[ops]
    at = np.repeat(np.arange(len(ops)), count)
    offset = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
    return at, item[np.repeat(start[ops], count) + offset].astype(np.int64)


def make_steps(count: int, **columns: Any) -> tuple[Step, ...]:
    """Many steps from columns: integers, lists, or one value for all; what is left out is as `Step` has it."""
    known = {f.name: f.default for f in fields(Step)} | columns
    return _core.records(Step, count, known)


def step_columns(graph: Graph, steps: tuple[Step, ...]) -> dict[str, Any] | None:
    """Steps as the core takes them, with the seconds of copies and codecs; None where something is out of range."""
    try:
        found: dict[str, Any] = {
            "kind": _core.codes(steps, "kind", KINDS),
            "form": _core.codes(steps, "form", FORMS),
            "saves": _core.flags(steps, "saves"),
            **{name: _core.integers(steps, name) for name in ("op", "nbytes", "stream")},
            **{name: _core.rows(steps, name) for name in ("storages", "waits", "reuses")},
            "seconds": np.zeros(len(steps)),
            "lost": np.zeros(len(steps)),
        }
        machine, size = graph.machine, graph.columns.size
        kind = found["kind"]
        for i in np.flatnonzero((kind > KINDS.index("recompute")) & (kind < KINDS.index("free"))).tolist():
            step = steps[i]
            for s in step.storages:
                found["seconds"][i] += machine.seconds(step.kind, int(size[s]), step.codec)
                found["lost"][i] += machine.lost(int(size[s]))
    except (TypeError, OverflowError, IndexError):
        return None
    return None if (kind >= len(KINDS)).any() else found


class _Machine:
    """The state a replay goes through: which forms are resident, in which version, and stream clocks."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.uses, self.machine = graph, graph.uses, graph.machine
        n = len(graph.storages)
        self.size = [s.size for s in graph.storages]
        self.full = [False] * n
        self.version = [0] * n
        self.packed = [0] * n
        self.host = [False] * n
        self.copied: dict[tuple[int, str], int] = {}  # version of what a packed or host form holds
        for s in graph.static:
            self.full[s] = True
        self.live = graph.static_bytes
        self.host_live = self.host_peak = 0
        self.clock: dict[int, float] = {0: 0.0}
        self.begins, self.ends = array("d"), array("d")
        self.compute_time = 0.0
        self.ran = [False] * len(graph.ops)
        self.saved: set[int] = set()  # ops whose random state is resident

    def fail(self, rule: str, value: object, i: int) -> NoReturn:
        raise BadInput(rule, value, f"step {i} of the plan for {self.graph.name!r}")

    def name(self, s: int) -> str:
        return self.graph.storages[s].name

    def step(self, i: int, step: Step) -> int:
        """Apply one step; returns the bytes in use while it runs."""
        kind, storages = step.kind, step.storages
        if storages and not (min(storages) >= 0 and max(storages) < len(self.full)):
            self.fail("a step's storages are indices of Graph.storages", storages, i)
        if step.waits and not (min(step.waits) >= 0 and max(step.waits) < i):
            self.fail("a step waits for earlier steps", step.waits, i)
        runs = kind in ("compute", "recompute")
        if step.op >= len(self.ran) or (step.op < 0 and runs):
            self.fail("a step's op is an index of Graph.ops", step.op, i)
        if runs:
            return self.run(i, step)
        if kind == "free":
            return self.free(i, step)
        if kind in ("offload", "fetch", "compress", "decompress"):
            return self.move(i, step)
        self.fail("a step's kind is one of plan.KINDS", kind, i)

    def run(self, i: int, step: Step) -> int:
        """Run the op of a compute or recompute step; returns the bytes in use while it runs."""
        k = step.op
        again, op, made = step.kind == "recompute", self.graph.ops[k], self.uses.defines[k]
        if again is not self.ran[k]:
            self.fail("an op is computed once, and recomputed only after that", op.name, i)
        if again and (op.effect or (op.random and k not in self.saved)):
            self.fail(
                "an op with effects, or whose random state is not saved, is never recomputed", op.name, i
            )
        if step.saves and (again or not op.state):
            self.fail("a state is saved when a random op that has one is computed", op.name, i)
        self.ran[k] = True
        skip = op.updates if again else ()
        self.read(i, k, op, skip)
        for s in self.uses.mutates[k]:
            if s not in skip:
                self.version[s] += 1
        state = op.state if step.saves or again else 0
        if step.reuses:
            self.overwrite(i, step)
        during = self.live + extra_bytes(op) + state
        for s in made:
            during += self.size[s]
        if step.saves:
            self.saved.add(k)
            self.live += op.state
        for s in step.storages if again else made:
            if self.full[s] or s not in made:
                self.fail("a recomputation restores what is not resident", self.name(s), i)
            self.full[s], self.version[s] = True, 1
            self.live += self.size[s]
        seconds = op.time
        if op.random:
            seconds += self.machine.state * (SAVE_MOVES * int(step.saves) + SET_MOVES * int(again))
        self.compute_time += seconds
        self.advance(step, seconds)
        return during

    def read(self, i: int, k: int, op: Op, skip: tuple[int, ...]) -> None:
        """What an op reads is there, as it was when the op first ran."""
        full, version, ran, maker = self.full, self.version, self.ran, self.uses.maker
        for s, need in zip(self.uses.reads[k], self.uses.needs[k], strict=True):
            if full[s] and version[s] == need:
                continue
            if s in skip:
                continue
            if not full[s]:
                self.fail("an op's inputs are resident when it runs", f"{op.name} reads {self.name(s)}", i)
            self.fail("an op sees the contents it saw at first", f"{op.name} reads {self.name(s)}", i)
        for v in op.inputs:
            if maker[v] >= 0 and not ran[maker[v]]:  # a view: what makes or writes storages is in versions
                read = f"{op.name} reads {self.graph.values[v].name}"
                self.fail("a value is read after the op it is a result of", read, i)

    def overwrite(self, i: int, step: Step) -> None:
        """End the stays whose places results take."""
        op = self.graph.ops[step.op]
        kept = step.storages if step.kind == "recompute" else self.uses.defines[step.op]
        taken: set[int] = set()
        for pair in step.reuses:
            a, b = pair
            if pair not in op.overwrites or b not in kept or b in taken:
                self.fail("a result takes the place of an input that its op may overwrite", pair, i)
            if a in self.graph.static or not self.full[a] or self.full[b]:
                rule = "the place that is taken is that of a storage that is there and not the caller's"
                self.fail(rule, f"{op.name} reads {self.name(a)}", i)
            taken.add(b)
            self.full[a] = False
            self.live -= self.size[a]

    def move(self, i: int, step: Step) -> int:
        """Offload, fetch, compress, decompress: one form made from another."""
        seconds = lost = 0.0
        for s in step.storages:
            size = self.size[s]
            seconds += self.machine.seconds(step.kind, size, step.codec)
            lost += self.machine.lost(size)
            there = {"offload": self.full[s], "compress": self.full[s], "fetch": self.host[s]}
            if not there.get(step.kind, bool(self.packed[s])):
                self.fail(f"{step.kind} needs the form it copies from", self.name(s), i)
            form = "host" if step.kind in ("offload", "fetch") else "packed"
            if step.kind in ("offload", "compress"):
                self.copied[s, form] = self.version[s]
            else:
                self.version[s] = self.copied[s, form]
            if step.kind == "offload":
                if self.host[s]:
                    self.fail("a host form is made once", self.name(s), i)
                self.host[s] = True
                self.host_live += size
                self.host_peak = max(self.host_peak, self.host_live)
            elif step.kind == "compress":
                if self.packed[s] or step.nbytes < 1:
                    self.fail("a packed form is made once, of at least one byte", self.name(s), i)
                self.packed[s] = step.nbytes
                self.live += step.nbytes
            else:
                if self.full[s]:
                    self.fail(f"{step.kind} restores what is not resident", self.name(s), i)
                self.full[s] = True
                self.live += size
        if step.stream == 0:
            self.compute_time += seconds
            self.advance(step, seconds)
        else:
            self.clock[step.stream] = max(self.clock.get(step.stream, 0.0), self.clock.get(0, 0.0))
            self.advance(step, seconds)
            self.compute_time += lost
            self.clock[0] = self.clock.get(0, 0.0) + lost
        return self.live

    def free(self, i: int, step: Step) -> int:
        before = self.live
        if step.form == "state":
            if step.op not in self.saved or step.storages:
                self.fail("only what is resident is freed", f"the random state of op {step.op}", i)
            self.saved.remove(step.op)
            self.live -= self.graph.ops[step.op].state
        for s in step.storages:
            if step.form == "full" and s in self.graph.static:
                self.fail("the caller's storages are not freed", self.name(s), i)
            if step.form == "full" and self.full[s]:
                self.full[s] = False
                self.live -= self.size[s]
            elif step.form == "host" and self.host[s]:
                self.host[s] = False
                self.host_live -= self.size[s]
            elif step.form == "packed" and self.packed[s]:
                self.live -= self.packed[s]
                self.packed[s] = 0
            else:
                self.fail("only what is resident is freed", f"{self.name(s)} ({step.form})", i)
        self.advance(step, 0.0)
        return before

    def advance(self, step: Step, seconds: float) -> None:
        start = self.clock.get(step.stream, 0.0)
        if step.waits:
            start = max(start, *(self.ends[w] for w in step.waits))
        self.clock[step.stream] = end = start + seconds
        self.begins.append(start)
        self.ends.append(end)

    def residents(self) -> list[tuple[int, int]]:
        rows = [(s, self.size[s]) for s, f in enumerate(self.full) if f]
        return rows + [(s, b) for s, b in enumerate(self.packed) if b]


def replay(graph: Graph, steps: Sequence[Step]) -> Timeline:
    """Run ``steps`` on paper, on the graph's machine.

    Raises ``BadInput`` naming the step where the steps break a rule (``verify`` collects all violations).
    """
    if len(steps) >= MANY and (found := _by_the_core(graph, tuple(steps))) is not None:
        return found
    m = _Machine(graph)
    during, resident = array("q"), array("q")
    peak, peak_step = m.live, -1
    for i, step in enumerate(steps):
        now = m.step(i, step)
        if now > peak:
            peak, peak_step = now, i
        during.append(now)
        resident.append(m.live)
    return Timeline(
        peak,
        peak_step,
        max(m.clock.values(), default=0.0),
        m.compute_time,
        m.host_peak,
        graph,
        tuple(steps),
        during,
        resident,
        m.begins,
        m.ends,
    )


def _by_the_core(graph: Graph, steps: tuple[Step, ...]) -> Timeline | None:
    """The same for many steps; None where they break a rule."""
    columns, c = step_columns(graph, steps), graph.columns
    if columns is None:
        return None
    found = graph.uses.facts.timeline(
        extras(graph), c.state, c.time, graph.machine.state, c.updates, c.overwrites, columns
    )
    if found is None:
        return None
    peak, peak_step, time, compute_time, host_peak, *lines = found
    levels, left, begins, ends = (
        array(code, line.tobytes()) for code, line in zip("qqdd", lines, strict=True)
    )
    return Timeline(peak, peak_step, time, compute_time, host_peak, graph, steps, levels, left, begins, ends)


def _at_peak(graph: Graph, steps: Sequence[Step]) -> tuple[tuple[int, int], ...]:
    """Who is in memory while the last of ``steps`` runs (a second replay: the peak is known only at the end)."""
    m = _Machine(graph)
    now = m.live
    for i, step in enumerate(steps):
        now = m.step(i, step)
    rows = m.residents()
    rest = now - sum(b for _, b in rows)
    return tuple(rows + ([(-1, rest)] if rest else []))
