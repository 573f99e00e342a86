"""XLA's greedy rematerialization: at an op over the limit, recompute what gains most for its cost.

Problem: choose ops to recompute so that the peak is within the limit. Measure: seconds of recomputation
per byte gone from where the walk stands (policy ``ours``), or limit / bytes gained (``xla``). Source:
``HloRematerialization`` of OpenXLA. The schedule is walked in order; where it is over the limit, results of ops
that have run are given up and recomputed right before their earliest remaining use, for all remaining uses.
Operands of the recomputed op live up to it; they are not themselves recomputed, unless they are in the group
chosen. ``ours`` walks again as long as that lowers the peak, and in the end gives back what fits after all.
Guarantee: ``ours`` never accepts a step that raises the overall peak, nor one that lifts what has been walked
over the limit; the plan is reproducible; the peak is exact. ``xla`` may raise the peak at an earlier op.
Complexity: ``ours`` keeps candidates in a heap and looks at one again only when it may have become better; a
step costs about sqrt(ops). ``xla`` rescans all earlier ops for every step: quadratic. Known limits: greedy; an
op with calls inside, or a result that several ops write, is never recomputed; no compression; called graphs add
their peak but are not themselves planned.

Policy ``xla`` differs from XLA where a plan leaves no choice: a storage has one copy at a time, so a clone reads
the copy nearest before it where XLA may keep the original beside it; a source that nobody uses any more goes at
once, not at the end; a write to a storage of the caller counts as control successor of the ops that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from tightship.baselines.xla_pick import Queue, Rescan
from tightship.baselines.xla_tracker import Item, Split, Tracker
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.options import option
from tightship.planners.evict.lowering import Run, decide
from tightship.planners.evict.problem import Bits, Decision, EvictionProblem, Progress

__all__ = ["Options", "plan"]

PLANNER = "evict/xla"
"""Its group and its name on the command line."""


@dataclass(frozen=True, slots=True)
class Options:
    """``tries`` and ``walks`` are for policy ``ours``."""

    policy: str = option("ours", "Which steps are taken and kept.", choices=("ours", "xla"))
    block: int = option(
        0, "Largest number of ops to recompute together (0: 8 for ours, 1 for xla, as XLA has it)."
    )
    growth: int = option(4, "Largest number of clones, as a multiple of the ops.")
    tries: int = option(32, "Largest number of steps to try and take back at one op.")
    walks: int = option(4, "Largest number of walks over the schedule.")


def plan(
    frame: EvictionProblem, limit: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """Steps that recompute ops so that the peak is within ``limit`` bytes, the static set included."""
    o = options or Options()
    if o.policy not in ("ours", "xla"):
        raise BadInput(f"unknown policy {o.policy!r}; the policy is 'ours' or 'xla'")
    walk = Walk(frame.graph, frame.order, limit, o)
    walk.run(progress)
    made = decide(frame, limit, runs(walk.tracker))
    return replace(made, evict=_bits(frame, walk.tracker), work=walk.work)


class Walk:
    """Passes over the schedule (R1, R5). ``tracker`` holds the result; ``work`` counts candidates looked at."""

    def __init__(self, graph: Graph, order: Sequence[int], limit: int, options: Options) -> None:
        self.options, self.ours = options, options.policy == "ours"
        charge = [s.size for s in graph.storages]
        self.base, self.limit = graph.static_bytes, limit
        if not self.ours:
            # R3: the caller owns the module's result, and the limit is first reduced by it.
            self.base += sum(charge[s] for s in graph.kept - graph.static)
            for s in graph.kept:
                charge[s] = 0
        self.tracker = Tracker(graph, order, charge, self.base)
        if self.ours:
            self.limit = max(limit, _floor(self.tracker, self.base))
        self.queue: Queue | None = None
        self.rescan = Rescan(self.tracker, options.block or 1, max(0, self.limit - self.base))
        self.left = options.growth * len(order)
        self.extra = 0.0
        self.work = 0

    @property
    def peak(self) -> int:
        """Bytes the schedule needs, as the tracker counts them."""
        return self.tracker.usage.peak()

    def run(self, progress: Progress | None = None) -> None:
        if not self.ours:
            self.walk(progress)
            self.work = self.rescan.work
            return
        before = self.peak
        for _ in range(self.options.walks):
            self.queue = Queue(self.tracker, self.options.block or 8)
            stopped = self.walk(progress)
            self.work += self.queue.work
            if stopped or self.peak <= self.limit or self.peak == before:
                break
            before = self.peak
            self.tracker.rewind()
        self.give_back()

    def walk(self, progress: Progress | None = None) -> bool:
        """Once over the schedule, or until all of it is under the limit; returns whether it was stopped."""
        for count, item in enumerate(self.tracker.items(), 1):
            if self.peak <= self.limit:
                break
            self.visit(item)
            if progress and count % 1024 == 0 and progress(self.peak, self.extra, self.peak <= self.limit):
                return True
        return False

    def visit(self, item: Item) -> None:
        """Let ``item`` run; while it is over the limit, take the best step there is."""
        self.tracker.begin(item)
        self.rescan.begin()
        tries = self.options.tries
        while self.tracker.usage.value(item) > self.limit and self.left > 0:
            group = self.pick(item)
            if group is None:
                break
            if not self.take(group):
                tries -= 1
                if not tries:
                    break
        self.tracker.end()
        if self.queue:
            self.queue.ended(item)

    def pick(self, item: Item) -> list[Item] | None:
        if self.queue:
            return self.queue.pick(item)
        choice = self.rescan.pick()
        return choice[1] if choice else None

    def take(self, group: list[Item]) -> bool:
        """Repeat a group, its last op first, so that each clone is a user of its operands' clones (R8)."""
        t, now = self.tracker, cast(Item, self.tracker.now)
        before = t.usage.value(now), t.usage.peak(), t.usage.most(None, now) if self.ours else 0
        splits: list[Split] = []
        for x in sorted(group, key=lambda i: -i.key):
            if t.wanted(x):
                splits.append(t.split(x))
        if self.queue and not self._better(now, *before):
            for s in reversed(splits):
                t.undo(s)
            self.queue.refused(group[0])
            return False
        self.left -= len(splits)
        for s in splits:
            if not t.settle(s):
                self.extra += t.graph.ops[s.clone.op].time
        if self.queue:
            self.queue.taken(splits)
        return True

    def _better(self, now: Item, here: int, peak: int, past: int) -> bool:
        """R19: lower here, nowhere higher than the peak, and where we have been not above the limit."""
        usage = self.tracker.usage
        if usage.value(now) >= here or usage.peak() > peak:
            return False
        return usage.most(None, now) <= max(self.limit, past)

    def give_back(self) -> None:
        """Dearest first, drop the clones whose results fit in memory until they are needed again."""
        t = self.tracker
        room = max(self.limit, self.peak)
        clones = [i for i in t.items() if i.clone]
        price = {i: t.graph.ops[i.op].time / max(1, sum(b.size for b in i.made)) for i in clones}
        for c in sorted(clones, key=lambda i: (-price[i], i.number)):
            if not c.gone:
                t.merge(c, room)


def _floor(tracker: Tracker, base: int) -> int:
    """The peak no schedule can beat: what one op reads, makes and needs. Below it there is nothing to win."""
    size, uses, static = tracker.size, tracker.uses, tracker.graph.static
    load = (
        tracker.extra[k] + sum(size[s] for s in (*uses.reads[k], *uses.defines[k]) if s not in static)
        for k in range(len(uses.reads))
    )
    return base + max(load, default=0)


def runs(tracker: Tracker) -> list[Run]:
    """A tracker's schedule."""
    ran = bytearray(len(tracker.graph.ops))
    found = []
    for item in tracker.items():
        again = bool(ran[item.op])
        found.append(Run(item.op, again, tuple(b.storage for b in item.made) if again else ()))
        ran[item.op] = 1
    return found


def _bits(frame: EvictionProblem, tracker: Tracker) -> Bits:
    """The gaps that clones bridge, for searches that start from here."""
    where: dict[int, list[int]] = {}
    p = len(frame.order)
    for item in reversed(list(tracker.items())):
        if not item.clone:
            p -= 1
            continue
        for b in item.made:
            where.setdefault(b.storage, []).append(p)
    bits = frame.nothing()
    for g, (s, start, end) in enumerate(frame.gaps.tolist()):
        bits[g] = s in where and any(start < p <= end for p in where[s])
    return bits
