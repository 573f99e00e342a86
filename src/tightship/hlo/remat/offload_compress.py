"""XLA's other ways to rematerialise: pack a result right after it is made, or copy it to the host and back.

Behaviours R12 and R13. Source: ``kCompress`` and ``kHostOffload`` of OpenXLA's ``HloRematerialization``. A result is
copied out only where the work between its last use so far and its next one hides both copies; the copy out begins
right after the instruction, the copy back ends right before the next use, and each is given as much work as it
takes. XLA leaves it to the target what a compact shape is; here it is a bit per element of ``pred``, made by a fusion
instead of a copy. Results that bitcasts or tuples hand on are left alone, as XLA's offload does (its compression does
not look).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from tightship.hlo.module import Computation, Instruction
from tightship.hlo.remat.body import Body, Node
from tightship.hlo.remat.cost import ACCELERATOR, Work
from tightship.hlo.remat.rematerializable import Copies
from tightship.hlo.remat.tracker import Buffer, Tracker
from tightship.hlo.remat.transfers import (
    bits,
    copy_done,
    copy_start,
    on_host,
    pack,
    packed_shape,
    unpack,
)
from tightship.hlo.shape import Index

__all__ = ["SetAside"]


class SetAside:
    """What setting a node's result aside costs, and doing so, in a walk over ``body``; ``record[name]`` says what
    the instructions are for that were added."""

    def __init__(self, inside: Computation, body: Body, tracker: Tracker, work: Work, copies: Copies) -> None:
        self.inside, self.body, self.tracker = inside, body, tracker
        self.work, self.copies = work, copies
        self.record: dict[str, tuple[str, tuple[str, Index]]] = {}

    def cost(self, way: str, node: Node, limit: int, peak: int) -> int | None:
        """``limit`` over the bytes it gives back here, or None where it cannot be; ``peak`` is the computation's."""
        buffer = self._buffer(node)
        if buffer is None:
            return None
        gain = self._packed(node, buffer, peak) if way == "compress" else self._copied(node, buffer)
        return limit // gain if gain > 0 else None

    def do(self, way: str, node: Node) -> int:
        """How many instructions were added."""
        return self._compress(node) if way == "compress" else self._offload(node)

    def _buffer(self, node: Node) -> Buffer | None:
        """The one array that a node defines, if it can be set aside now."""
        t = self.tracker
        if len(node.output) != 1 or node.defined != node.output or node.shape.is_tuple:
            return None
        buffer = t.buffers[node.output[0]]
        if buffer.live_out or not node.placed or node is t.now or not buffer.remaining:
            return None
        if any(use.node is t.now or use.node.opcode in ("bitcast", "tuple") for use in buffer.users):
            return None
        return buffer if any(not use.node.placed for use in buffer.users) else None

    # -- packed ----------------------------------------------------------------------------------------------

    def _packed(self, node: Node, buffer: Buffer, peak: int) -> int:
        if not bits(node.shape):
            return 0
        small = packed_shape(node.shape, "bits").nbytes
        return buffer.size - small if node.shape.nbytes + small < peak else 0

    def _compress(self, node: Node) -> int:
        names, shape, before = self.body.names, node.shape, self.inside.name
        label = names.new(f"{node.name}.remat_compressed")
        small = Node(
            pack(label, node.name, shape, "bits", names, self.copies, before),
            label,
            packed_shape(shape, "bits"),
        )
        label = names.new(f"{node.name}.remat_uncompressed")
        full = Node(unpack(label, small.name, shape, "bits", names, self.copies, before), label, shape)
        self._take_over(node, full)
        self._added(small, node, node, "compress")
        self._added(full, small, node, "decompress")
        small.placed = True
        self.tracker.compressed(node, small, full)
        self._after(small, node)
        self.body.insert(full, list(full.users))
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
            at = at.following
        need = buffer.size / ACCELERATOR.offload + buffer.size / ACCELERATOR.fetch
        return buffer.size if 0.0 < time >= need else 0

    def _offload(self, node: Node) -> int:
        shape, far, names = node.shape, on_host(node.shape), self.body.names
        out = self._node(copy_start(names.new(f"{node.name}.offload"), "", shape, far), node, node, "offload")
        kept = self._node(copy_done(names.new(f"{node.name}.offloaded"), "", far), out, node, "offloaded")
        back = self._node(copy_start(names.new(f"{node.name}.fetch"), "", far, shape), kept, node, "fetch")
        done = self._node(copy_done(names.new(f"{node.name}.fetched"), "", shape), back, node, "fetched")
        first = next(n for n in self.body if not n.placed and n in node.users and n is not out)
        self._after(out, node)
        self.body.insert(done, [first])
        nbytes = self.tracker.buffers[node.output[0]].size
        at = self._passed(out, done, nbytes / ACCELERATOR.offload, lambda n: n.following)
        self._after(kept, at)
        at = self._passed(done, kept, nbytes / ACCELERATOR.fetch, lambda n: n.previous)
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
        node.operands.append(operand)
        operand.users[node] = None
        node.denied = True
        self.record[node.name] = kind, (source.made.name, ())

    def _take_over(self, node: Node, by: Node) -> None:
        """The users of ``node`` to come use ``by`` instead."""
        for user in [u for u in node.users if not u.placed]:
            for k, operand in enumerate(user.operands):
                if operand is node and user is not by and user.name not in self.record:
                    user.replace_operand(k, by)

    def _after(self, node: Node, at: Node) -> None:
        """Put ``node`` into the schedule right after ``at``."""
        assert at.following is not None
        self.body.insert(node, [at.following])

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
