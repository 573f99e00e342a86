"""XLA's own rematerialisation of a scheduled module: at an instruction over the limit, recompute what gains most.

Problem: repeat instructions so that the module's peak is within the limit. Measure: limit / bytes gained, time is
not looked at (R18 is a limit of it). Source: ``HloRematerialization`` of OpenXLA, recompute only, as its GPU
pipeline runs it (blocks of one instruction). The peak is XLA's: results of the module throughout, its parameters not,
called computations on top of what lives at the call (R3, R14). Guarantee: the module computes what it computed;
control dependencies are kept (R11); it ends. Complexity: quadratic (R17). Known limits: greedy, may raise the
peak at an earlier instruction (R19); kept as it is, to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tightship.errors import BadInput
from tightship.hlo.module import Computation, Module
from tightship.hlo.remat.body import Body, Names, Node
from tightship.hlo.remat.cost import Work, work_of
from tightship.hlo.remat.dce import clean
from tightship.hlo.remat.offload_compress import SetAside
from tightship.hlo.remat.peak import peaks, result_bytes
from tightship.hlo.remat.rematerializable import Copies, repeatable
from tightship.hlo.remat.tracker import Tracker
from tightship.hlo.remat.transfers import ways
from tightship.hlo.shape import Index

__all__ = ["Options", "Remade", "plan"]

PLANNER = "remat/xla"
"""Its group and its name on the command line."""


@dataclass(frozen=True, slots=True)
class Options:
    """``block``: neighbours recomputed together at most (1 in XLA's GPU pipeline). ``effort``: candidates of more
    than one instruction looked at, at most, as a multiple of single ones looked at. ``allow``: how arrays may leave
    memory, between commas: recompute, compress, offload (R13; the first alone in XLA's GPU pipeline)."""

    block: int = 1
    effort: int = 1
    allow: str = "recompute"


@dataclass(frozen=True)
class Remade:
    """A module that was made to need less: peaks in bytes as XLA counts them, instructions ``recomputed`` in the
    order they were chosen, and how many more the module has (R15). ``origin`` has the first name of each clone,
    ``aside`` what instructions do that set arrays aside or bring them back (offload, offloaded, fetch, fetched,
    compress, decompress), and the instruction and position that first made the array."""

    module: Module
    limit: int
    peak_before: int
    peak_after: int
    recomputed: tuple[str, ...]
    added: int
    origin: Mapping[str, str]
    aside: Mapping[str, tuple[str, tuple[str, Index]]] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.peak_after <= self.limit

    def count(self, kind: str) -> int:
        """How many instructions set arrays aside in one way, or bring them back."""
        return sum(what == kind for what, _ in self.aside.values())

    def flops(self, work: Work, names: Iterable[str]) -> int:
        """Those of the computations ``names``, each run once, by the ``work`` of the module that it was."""
        return sum(
            work.flops[name].get(self.origin.get(i.name, i.name), 0)
            for name in names
            for i in self.module.by_name[name].instructions
        )


def plan(module: Module, limit: int, options: Options | None = None) -> Remade:
    """The module with instructions repeated so that its peak is at most ``limit`` bytes, or as XLA leaves it.

    Raises ``BadInput`` when the module has no schedule.
    """
    if not module.scheduled:
        raise BadInput("a module has a schedule (is_scheduled=true) to be rematerialised", module.name)
    run = _Run(module, options or Options())
    before, entry = run.peak[module.entry.name], module.entry.name
    out = result_bytes(module)
    run.computation(entry, max(0, limit - out))
    made = run.copies.written(run.done)
    # What is copied out is counted twice while it is walked; the module written says what there is.
    after = peaks(made)[entry] if run.aside else run.peak[entry]
    chosen = tuple(run.chosen)
    return Remade(made, limit, before + out, after + out, chosen, run.added, run.origin, run.aside)


class _Run:
    """One pass over a module. Computations are done at most once each (R14)."""

    def __init__(self, module: Module, options: Options) -> None:
        self.module, self.options = module, options
        self.peak: dict[str, int] = dict(peaks(module))
        self.names = Names(i.name for i in module.instructions)
        self.copies = Copies(module)
        self.done: dict[str, Computation] = {}
        self.may: dict[str, bool] = {}
        self.chosen: list[str] = []
        self.origin: dict[str, str] = {}
        self.aside: dict[str, tuple[str, tuple[str, Index]]] = {}
        self.allow = ways(options.allow)
        self.work = work_of(module)
        self.added = 0

    def can(self, node: Node) -> bool:
        if node.denied:
            return False
        first = node.made.name  # a clone may run again if its original may
        if first not in self.may:
            copies = node.opcode == "copy" and node.shape.layout == node.operands[0].shape.layout
            self.may[first] = repeatable(self.module, node.made) and not copies
        return self.may[first]

    def computation(self, name: str, limit: int) -> None:
        if self.peak[name] <= limit:
            return
        walk = _Walk(self, self.module.by_name[name], limit)
        self.peak[name] = walk.run()
        self.aside |= walk.aside.record
        clean(walk.body, self.copies.inside)
        self.done[name] = walk.body.written()

    def callees(self, node: Node) -> int:
        return sum(self.peak[name] for name in node.made.called) if node.made.row.holds else 0


class _Walk:
    """The walk over one computation (R5)."""

    def __init__(self, run: _Run, computation: Computation, limit: int) -> None:
        self.run_, self.limit, self.inside = run, limit, computation
        self.body = Body(computation, run.names)
        self.tracker = Tracker(run.module, computation, self.body)
        self.moves: set[Node] = set()
        self.aside = SetAside(computation, self.body, self.tracker, run.work, run.copies)
        self.before = run.peak[computation.name]

    def run(self) -> int:
        t, peak = self.tracker, 0
        for node in self.body:
            callees = self.run_.callees(node)
            t.begin(node)
            if t.made(node) + callees > 0:
                self._reduce(callees)
            if callees and t.use + callees > self.limit:
                for name in node.made.called:
                    if name not in self.run_.done:
                        self.run_.computation(name, max(0, self.limit - t.use))
                callees = self.run_.callees(node)
            peak = max(peak, t.use + callees)
            t.end()
        return peak

    def _reduce(self, callees: int) -> None:
        """Recompute until under the limit, or nothing more gains anything; larger blocks when single ones do not."""
        low = high = 1
        looked, looked_further = 0, 0
        while self.tracker.use + callees > self.limit:
            block, way, effort = self._pick(low, high)
            if low == 1:
                looked += effort
            else:
                looked_further += effort
            if block and way != "recompute":
                self.run_.added += self.aside.do(way, block[0])
                low = high = 1
            elif block:
                self.run_.chosen += [n.name for n in block]
                for node in reversed(block):
                    if any(not use.node.placed for use in self.tracker.uses(node)):
                        self._repeat(node)
                low = high = 1
            else:
                low, high = high + 1, 2 * high
            if high > self.run_.options.block or looked_further > self.run_.options.effort * looked:
                break

    def _pick(self, low: int, high: int) -> tuple[list[Node], str, int]:
        """The cheapest run of ``low`` to ``high`` neighbours that have run (R5-R9), what to do with it (R13), and how
        many were looked at."""
        best: list[Node] = []
        least, effort, best_way = float("inf"), 0, "recompute"
        others = [way for way in ("compress", "offload") if way in self.run_.allow and low == 1]
        start = self.body.first
        while start is not None and start.placed and start is not self.tracker.now:
            block: list[Node] = []
            node: Node | None = start
            for way in others if self.run_.can(start) else ():
                effort += 1
                cost = self.aside.cost(way, start, self.limit, self.before)
                if cost is not None and cost < least:
                    best, least, best_way = [start], cost, way
            if "recompute" not in self.run_.allow:
                node = None
            while node is not None and node.placed and node is not self.tracker.now and len(block) < high:
                if not self.run_.can(node):
                    break
                block.append(node)
                if len(block) >= low:
                    effort += 1
                    cost = self._cost(block)
                    if cost is not None and cost < least:
                        best, least, best_way = list(block), cost, "recompute"
                node = node.following
            start = start.following
        return best, best_way, effort

    def _cost(self, block: list[Node]) -> int | None:
        if any(n.placed for node in block for n in node.after):
            return None
        gain = self.tracker.gain(block)
        if gain <= 0:
            return None
        if not any(user.placed for node in block for user in node.users):
            return 0
        return self.limit // gain

    def _repeat(self, node: Node) -> None:
        """Clone a node for its users to come, right before the first of them (R10)."""
        clone = self.body.clone(node)
        self.run_.origin[clone.name] = node.made.name
        if node.made.called:
            clone.made = self.run_.copies.copied(node.made, self.inside.name)
        handed: list[Node] = []
        parts: dict[int, Node] = {}
        for use in self.tracker.uses(node):
            if not use.node.placed:
                self._redirect(use.node, use.operand, use.part, clone, handed, parts)
        self.tracker.cloned(node, clone, handed)
        before = self._places(clone, handed)
        for new in (clone, *handed):
            self.body.insert(new, before)
        if self._forgotten(node):
            clone.denied = node in self.moves
            self.moves.add(clone)
            self.run_.added -= 1
        self.run_.added += 1 + len(handed)
        for new in handed:
            new.denied = True

    def _redirect(
        self, user: Node, k: int, part: int | None, clone: Node, handed: list[Node], parts: dict[int, Node]
    ) -> None:
        """Let operand ``k`` of ``user`` be the clone, or what hands the same on from it."""
        old, new = user.operands[k], clone
        if old is clone:
            return
        if part is not None and clone.shape != old.shape:
            if part not in parts:
                parts[part] = self.body.unary(
                    "gte.remat", "get-tuple-element", clone.shape.parts[part], clone, index=str(part)
                )
                handed.append(parts[part])
            new = parts[part]
        if new.shape != old.shape:
            new = self.body.unary("bitcast.remat", "bitcast", old.shape, new)
            handed.append(new)
        user.replace_operand(k, new)

    def _places(self, clone: Node, handed: list[Node]) -> list[Node]:
        """Nodes that must come after the clone (R10, R11): its users, those to come of its operands, which would live
        longer otherwise, and its control successors."""
        new = set(handed)
        found = [u for n in (clone, *handed) for u in n.users if u not in new]
        found += [u for o in clone.operands for u in o.users if u is not clone and not u.placed]
        return found + list(clone.after)

    def _forgotten(self, node: Node) -> bool:
        seen, todo = {id(node)}, [node]
        while todo:
            for u in todo.pop().users:
                if not u.made.row.passes_on:
                    return False
                if id(u) not in seen:
                    seen.add(id(u))
                    todo.append(u)
        return True
