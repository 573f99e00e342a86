"""XLA's own rematerialization of a scheduled module: at an instruction over the limit, recompute what gains most.

Problem: recompute instructions so that the module's peak is within the limit. Measure: limit / bytes gained, time is
not looked at (R18 is a limit of it). Source: ``HloRematerialization`` of OpenXLA, by default as its GPU pipeline runs
it (recompute only, blocks of one instruction); `xla_pick.Rescan` chooses here and for graphs (``evict/xla``). The
peak is XLA's: results of the module throughout, its parameters not, called computations on top of what lives at the
call (R3, R14). Guarantee: the module computes what it computed;
control dependencies are kept (R11); it ends. Complexity: quadratic (R17). Known limits: greedy, may raise the
peak at an earlier instruction (R19); kept as it is, to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from tightship.baselines.xla_body import Body, Buffer, Node, Tracker, remove_dead
from tightship.baselines.xla_pick import Rescan
from tightship.cached import cached_property
from tightship.hlo.module import Computation, Instruction, Module
from tightship.hlo.remat.cost import ACCELERATOR, Work, work_of
from tightship.hlo.remat.instructions import (
    Rewrite,
    can_pack_bits,
    copy_done,
    copy_start,
    on_host,
    pack,
    packed_shape,
    unpack,
    ways,
)
from tightship.hlo.remat.lower import repeatable
from tightship.hlo.remat.peak import peaks, require_schedule, result_bytes
from tightship.hlo.shape import Index
from tightship.options import option

__all__ = ["Options", "Result", "plan"]

PLANNER = "remat/xla"
"""Its group and its name on the command line."""


@dataclass(frozen=True, slots=True)
class Options:
    """Defaults are those of XLA's GPU pipeline."""

    block: int = option(1, "Largest number of neighboring instructions to recompute together.")
    effort: int = option(1, "Candidates of more than one instruction, at most, as a multiple of single ones.")
    allow: str = option("recompute", "Ways out of memory, between commas: recompute, compress, offload.")


@dataclass(frozen=True)
class Result:
    """A module that was made to need less: peaks in bytes as XLA counts them, instructions ``recomputed`` in the
    order they were chosen, and how many more the module has (R15). ``origin`` has the first name of each clone,
    ``transfers`` what instructions offload, compress or restore arrays (offload, offloaded, fetch, fetched,
    compress, decompress), and the instruction and position that first made the array."""

    module: Module
    limit: int
    peak_before: int
    peak_after: int
    recomputed: tuple[str, ...]
    added: int
    origin: Mapping[str, str]
    transfers: Mapping[str, tuple[str, tuple[str, Index]]] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.peak_after <= self.limit

    def count(self, kind: str) -> int:
        """How many instructions offload, compress or restore arrays in one way."""
        return sum(what == kind for what, _ in self.transfers.values())

    def flops(self, work: Work, names: Iterable[str]) -> int:
        """Those of the computations ``names``, each run once, by the ``work`` of the module that it was."""
        return sum(
            work.flops[name].get(self.origin.get(i.name, i.name), 0)
            for name in names
            for i in self.module.by_name[name].instructions
        )


def plan(module: Module, limit: int, options: Options | None = None) -> Result:
    """The module with instructions recomputed so that its peak is at most ``limit`` bytes, or as XLA leaves it.

    Raises ``BadInput`` when the module has no schedule.
    """
    require_schedule(module)
    run = _Run(module, options or Options())
    before, entry = run.peak[module.entry.name], module.entry.name
    out = result_bytes(module)
    run.computation(entry, max(0, limit - out))
    rewrite, made = run.rewrite, run.rewrite.written(run.done)
    # What is copied out is counted twice while it is walked; the module written says what there is.
    after = peaks(made)[entry] if rewrite.transfers else run.peak[entry]
    chosen = tuple(run.chosen)
    return Result(
        made, limit, before + out, after + out, chosen, run.added, rewrite.origin, rewrite.transfers
    )


class _Run:
    """One pass over a module. Computations are done at most once each (R14)."""

    def __init__(self, module: Module, options: Options) -> None:
        self.module, self.options = module, options
        self.peak: dict[str, int] = dict(peaks(module))
        self.rewrite = Rewrite(module)
        self.done: dict[str, Computation] = {}
        self.may: dict[str, bool] = {}
        self.chosen: list[str] = []
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
        remove_dead(walk.body, self.rewrite.inside)
        self.done[name] = walk.body.rewrite()

    def callees(self, node: Node) -> int:
        return sum(self.peak[name] for name in node.made.called) if node.made.row.holds else 0


class _Walk:
    """The walk over one computation (R5)."""

    def __init__(self, run: _Run, computation: Computation, limit: int) -> None:
        self.run_, self.limit, self.inside = run, limit, computation
        self.body = Body(computation, run.rewrite.names)
        self.tracker = Tracker(run.module, self.body)
        self.moves: set[Node] = set()
        self.transfers = Transfers(computation, self.body, self.tracker, run.work, run.rewrite)
        self.before = run.peak[computation.name]
        self.rescan = Rescan(self, run.options.block, limit, run.options.effort, run.allow)

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
        """Rematerialize until under the limit, or nothing more gains anything."""
        self.rescan.begin()
        while self.tracker.use + callees > self.limit and (choice := self.rescan.pick()):
            self.take(*choice)

    def take(self, way: str, block: Sequence[Node]) -> None:
        if way != "recompute":
            self.run_.added += self.transfers.insert(way, block[0])
            return
        self.run_.chosen += [n.name for n in block]
        for node in reversed(block):
            if any(not use.node.placed for use in self.tracker.uses(node)):
                self._recompute(node)

    # -- what the rescan asks (`xla_pick.Candidates`) ----------------------------------------------------------

    def ran(self) -> list[Node]:
        return list(takewhile(lambda node: node is not self.tracker.now, self.body))

    def candidate(self, node: Node) -> bool:
        return self.run_.can(node)

    def released(self, node: Node) -> int | None:
        return self.tracker.released(node)

    def revived(self, node: Node, block: Sequence[Node]) -> int:
        return self.tracker.revived(node, block)

    def unused(self, node: Node) -> bool:
        return not any(user.placed for user in node.users)

    def offered(self, way: str, node: Node) -> int:
        return self.transfers.gain(way, node, self.before)

    # -- recomputing -------------------------------------------------------------------------------------------

    def _recompute(self, node: Node) -> None:
        """Clone a node for its users to come, right before the first of them (R10)."""
        clone = self.body.clone(node)
        self.run_.rewrite.origin[clone.name] = node.made.name
        if node.made.called:
            clone.made = self.run_.rewrite.clone(node.made, self.inside.name)
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


class Transfers:
    """XLA's other ways (R12, R13; ``kCompress``, ``kHostOffload``): pack a result right after it is made, or copy it
    to the host and back; ``Rewrite.transfers`` says what the instructions are for that were added.

    A result is copied out only where the work between its last use so far and its next one hides both copies; the
    copy out begins right after the instruction, the copy back ends right before the next use, and each is given as
    much work as it takes. XLA leaves it to the target what a compact shape is; here it is a bit per element of
    ``pred``, made by a fusion instead of a copy. Results that bitcasts or tuples hand on are left alone, as XLA's
    offload does (its compression does not look)."""

    def __init__(
        self, inside: Computation, body: Body, tracker: Tracker, work: Work, rewrite: Rewrite
    ) -> None:
        self.inside, self.body, self.tracker = inside, body, tracker
        self.work, self.rewrite = work, rewrite

    def gain(self, way: str, node: Node, peak: int) -> int:
        """Bytes that it gives back here, 0 where it cannot be; ``peak`` is the computation's."""
        buffer = self._buffer(node)
        if buffer is None:
            return 0
        return self._packed(node, buffer, peak) if way == "compress" else self._copied(node, buffer)

    def insert(self, way: str, node: Node) -> int:
        """Put the instructions in; how many were added."""
        return self._compress(node) if way == "compress" else self._offload(node)

    def _buffer(self, node: Node) -> Buffer | None:
        """The one array that a node defines, if it can be offloaded or compressed now."""
        t = self.tracker
        if len(node.output) != 1 or node.defined != node.output or node.shape.is_tuple:
            return None
        buffer = t.buffers[node.output[0]]
        if buffer.live_out or buffer.indirect or not node.placed or node is t.now or not buffer.remaining:
            return None
        if any(use.node is t.now or use.node.opcode in ("bitcast", "tuple") for use in buffer.users):
            return None
        return buffer if any(not use.node.placed for use in buffer.users) else None

    # -- packed ----------------------------------------------------------------------------------------------

    def _packed(self, node: Node, buffer: Buffer, peak: int) -> int:
        if not can_pack_bits(node.shape):
            return 0
        small = packed_shape(node.shape, "bits").nbytes
        return buffer.size - small if node.shape.nbytes + small < peak else 0

    def _compress(self, node: Node) -> int:
        names, shape, before = self.body.names, node.shape, self.inside.name
        label = names.new(f"{node.name}.remat_compressed")
        small = Node(
            pack(label, node.name, shape, "bits", self.rewrite, before),
            label,
            packed_shape(shape, "bits"),
        )
        label = names.new(f"{node.name}.remat_uncompressed")
        full = Node(unpack(label, small.name, shape, "bits", self.rewrite, before), label, shape)
        self._take_over(node, full)
        self._added(small, node, node, "compress")
        self._added(full, small, node, "decompress")
        small.placed = True
        self.tracker.compressed(node, small, full)
        self.body.insert_after(small, node)
        self.body.insert(full, full.users)
        return 2

    # -- on the host -----------------------------------------------------------------------------------------

    @cached_property
    def seconds(self) -> Callable[[Node], float]:
        known = {i.name: self.work.seconds(self.inside, i) for i in self.inside.instructions}
        return lambda node: known.get(node.made.name, 0.0)

    def _copied(self, node: Node, buffer: Buffer) -> int:
        placed = {use.node for use in buffer.users if use.node.placed}
        at: Node | None = node
        time = 0.0
        while at is not None:
            if at in placed:
                time = 0.0
            elif any(use.node is at for use in buffer.users):
                break
            time += self.seconds(at)
            at = self.body.following(at)
        need = buffer.size / ACCELERATOR.offload + buffer.size / ACCELERATOR.fetch
        return buffer.size if 0.0 < time >= need else 0

    def _offload(self, node: Node) -> int:
        shape, far, names = node.shape, on_host(node.shape), self.body.names
        out = self._node(copy_start(names.new(f"{node.name}.offload"), "", shape, far), node, node, "offload")
        kept = self._node(copy_done(names.new(f"{node.name}.offloaded"), "", far), out, node, "offloaded")
        back = self._node(copy_start(names.new(f"{node.name}.fetch"), "", far, shape), kept, node, "fetch")
        done = self._node(copy_done(names.new(f"{node.name}.fetched"), "", shape), back, node, "fetched")
        first = next(n for n in self.body if not n.placed and n in node.users and n is not out)
        self.body.insert_after(out, node)
        self.body.insert(done, [first])
        nbytes = self.tracker.buffers[node.output[0]].size
        at = self._passed(out, done, nbytes / ACCELERATOR.offload, self.body.following)
        self.body.insert_after(kept, at)
        at = self._passed(done, kept, nbytes / ACCELERATOR.fetch, self.body.previous)
        self.body.insert(back, [at])
        new = {out, kept, back, done}
        for n in self.body:
            if n is self.tracker.now:
                break
            n.placed |= n in new
        self._take_over(node, done)
        self.tracker.offloaded(node, out, kept, back, done)
        return 4

    def _node(self, made: Instruction, operand: Node, source: Node, kind: str) -> Node:
        node = Node(made, made.name, made.shape)
        self._added(node, operand, source, kind)
        return node

    def _added(self, node: Node, operand: Node, source: Node, kind: str) -> None:
        node.add_operand(operand)
        node.denied = True
        self.rewrite.transfers[node.name] = kind, (source.made.name, ())

    def _take_over(self, node: Node, by: Node) -> None:
        """The users of ``node`` to come use ``by`` instead."""
        for user in [u for u in node.users if not u.placed]:
            for k, operand in enumerate(user.operands):
                if operand is node and user is not by and user.name not in self.rewrite.transfers:
                    user.replace_operand(k, by)

    def _passed(
        self, start: Node, end: Node, seconds: float, following: Callable[[Node], Node | None]
    ) -> Node:
        """The first node from ``start`` on, towards ``end``, at which that much work has passed."""
        at, passed = start, 0.0
        while passed < seconds:
            then = following(at)
            if then is end or then is None:
                break
            at = then
            passed += self.seconds(at)
        return at
