"""The bytes in use while one computation of HLO runs in its order (R1-R4), kept true while it is rewritten (R16).

Source: ``MemoryUsageTracker`` of OpenXLA's ``HloRematerialization``; what it counts is counted here. A buffer is
charged when its instruction begins and given back when the last of its users ends. Buffers of parameters and
of the computation's result count nothing: the caller owns them (R3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightship.hlo.module import Computation, Module
from tightship.hlo.remat.body import Body, Node
from tightship.hlo.remat.points_to import PointsTo, unread
from tightship.hlo.shape import Index, Shape

__all__ = ["Buffer", "Tracker", "Use", "device_bytes"]

HOST = 5
"""XLA's number of the host's memory in a layout."""


def device_bytes(shape: Shape) -> int:
    """Bytes of a buffer in the device's memory: those in the host's (``S(5)``) count nothing."""
    return 0 if shape.memory_space == HOST else shape.nbytes


class Use(NamedTuple):
    """``node`` reads a buffer through operand ``operand``; ``part`` is the buffer's place in its instruction's tuple,
    if it is part of one."""

    node: Node
    operand: int
    part: int | None


@dataclass(slots=True)
class Buffer:
    """One buffer; ``remaining`` of its users have not ended yet."""

    node: Node
    shape: Shape
    index: Index
    users: list[Use]
    live_out: bool = False
    indirect: bool = False
    remaining: int = 0
    size: int = 0

    def __post_init__(self) -> None:
        self.remaining = len({use.node for use in self.users})
        owned = self.live_out or self.node.opcode == "parameter"
        self.size = 0 if owned else device_bytes(self.shape)


class Tracker:
    """Walk a body with ``begin`` and ``end``; ``now`` is the node between the two, ``use`` the bytes in use."""

    def __init__(self, module: Module, computation: Computation, body: Body) -> None:
        self.body = body
        self.use = 0
        self.now: Node | None = None
        self.buffers: list[Buffer] = []
        points = PointsTo(computation)
        number: dict[tuple[str, Index], int] = {}
        for i in computation.instructions:
            node = body.by_name[i.name]
            for index in points.defined(i.name):
                users, indirect = self._users(module, points, (i.name, index))
                if i.opcode == "while":
                    number[i.name, index] = self._continued(node, number, points, index, users)
                    continue
                shape, out = i.shape.part(index), (i.name, index) in points.live_out
                k = number[i.name, index] = self._add(Buffer(node, shape, index, users, out, indirect))
                node.defined.append(k)
                for use in users:
                    if k not in use.node.used:
                        use.node.used.append(k)
            found = dict.fromkeys(number[b] for b in points.sets[i.name].values())
            node.output.extend(found)

    def _add(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def _users(self, module: Module, points: PointsTo, buffer: tuple[str, Index]) -> tuple[list[Use], bool]:
        """Who reads a buffer through any alias of it, and whether one does so through more than hand-ons."""
        by_name, inside = self.body.by_name, points.computation
        part = buffer[1][-1] if len(buffer[1]) == 1 else None
        users: dict[Use, None] = {}
        indirect = False
        for name, index in points.places[buffer]:
            alias = by_name[name]
            for user in alias.users:
                if unread(module, inside.by_name[user.name], name, index):
                    continue
                if name != buffer[0] and not alias.made.row.passes_on:
                    indirect = True
                users.update({Use(user, k, part): None for k, o in enumerate(user.operands) if o is alias})
        return list(users), indirect

    def _continued(
        self,
        node: Node,
        number: dict[tuple[str, Index], int],
        points: PointsTo,
        index: Index,
        users: list[Use],
    ) -> int:
        """A loop makes no buffer: its result is its operand's (R4)."""
        k = number[points.sets[node.operands[0].name][index]]
        buffer = self.buffers[k]
        buffer.indirect = True
        if (node.name, index) in points.live_out:
            buffer.live_out, buffer.size = True, 0
        known = {use.node for use in buffer.users}
        for use in users:
            if use.node not in known:
                known.add(use.node)
                buffer.remaining += 1
                use.node.used.append(k)
                buffer.users.append(use)
        return k

    # -- the walk (R1) ---------------------------------------------------------------------------------------

    def begin(self, node: Node) -> None:
        self.now, node.placed = node, True
        self.use += self.made(node)

    def end(self) -> None:
        assert self.now is not None
        for k in self.now.used:
            buffer = self.buffers[k]
            buffer.remaining -= 1
            if not buffer.remaining:
                self.use -= buffer.size
        self.use -= sum(self.buffers[k].size for k in self.now.defined if not self.buffers[k].remaining)
        self.now = None

    # -- questions -------------------------------------------------------------------------------------------

    def made(self, node: Node) -> int:
        return sum(self.buffers[k].size for k in node.defined)

    def live(self, k: int) -> bool:
        buffer = self.buffers[k]
        return buffer.node.placed and buffer.remaining > 0

    def gain(self, nodes: Sequence[Node]) -> int:
        """Bytes given back here and now when ``nodes`` are run again later instead (R7, R8)."""
        total, inside = 0, set()
        busy = self.now.used if self.now else ()
        for node in nodes:
            for k in node.defined:
                buffer = self.buffers[k]
                if buffer.indirect or buffer.live_out or len(buffer.index) > 1 or k in busy:
                    return 0
                if self.live(k):
                    total += buffer.size
            for k in node.used:
                if not self.live(k) and self.buffers[k].node not in inside:
                    total -= self.buffers[k].size
            inside.add(node)
        return total

    def uses(self, node: Node) -> list[Use]:
        return [use for k in node.defined for use in self.buffers[k].users]

    # -- a node has been cloned ------------------------------------------------------------------------------

    def cloned(self, node: Node, clone: Node, indirect: Iterable[Node]) -> None:
        """Count with ``clone`` made for all users of ``node`` to come; ``indirect`` hand its result on."""
        clone.used = list(node.used)
        for k in node.used:
            buffer = self.buffers[k]
            if not buffer.remaining:
                self.use += buffer.size
            buffer.remaining += 1
            buffer.users += [use._replace(node=clone) for use in buffer.users if use.node is node]
        handed = list(indirect)
        for k in node.defined:
            self._split(k, clone, set(handed))
        for other in handed:
            self._hand_on(other)

    def _split(self, k: int, clone: Node, handed: set[Node]) -> None:
        """The users of buffer ``k`` to come belong to a new buffer, that of the clone."""
        old = self.buffers[k]
        later = []
        for use in old.users:
            if use.node.placed:
                continue
            if not use.node.made.row.passes_on or use.node in handed:
                later.append(use)
            else:  # replaced by another, so it is dead
                use.node.output, use.node.used = [], []
        old.users = [use for use in old.users if use.node.placed]
        old.remaining = 0
        self.use -= old.size
        new = self._add(Buffer(clone, old.shape, old.index, later))
        clone.defined.append(new)
        clone.output.append(new)
        for use in later:
            use.node.used = [new if x == k else x for x in use.node.used]
            use.node.output = [new if x == k else x for x in use.node.output]

    def _hand_on(self, node: Node) -> None:
        source = node.operands[0]
        if node.opcode == "bitcast":
            rows = source.output if source.made.row.passes_on else source.defined
            node.used, node.output = list(rows), list(rows)
        else:
            at = (node.made.tuple_index,)
            node.output += [k for k in source.defined if self.buffers[k].index == at]
            node.used += [k for k in source.defined if not self.buffers[k].index]
        for k in node.used:
            self.buffers[k].remaining += 1
            self.buffers[k].users.append(Use(node, 0, None))

    def compressed(self, node: Node, small: Node, full: Node) -> None:
        """Count with the result of ``node`` packed to ``small``, and unpacked to ``full`` for its users to come."""
        k = node.output[0]
        later = self._apart(k, small)
        self.use -= self.buffers[k].size
        self.buffers[k].remaining = 0
        a = self._made(small, small.shape, [Use(full, 0, None)])
        self.use += self.buffers[a].size
        b = self._made(full, full.shape, later)
        small.used, small.output, full.used, full.output = [k], [a], [a], [b]
        self._renamed(k, b)

    def offloaded(self, node: Node, out: Node, kept: Node, back: Node, done: Node) -> None:
        """Count with the result of ``node`` copied out from ``out`` to ``kept``, and back from ``back`` to ``done``,
        which its users to come use. What is on the host is not counted; each copy is, as XLA does it, as one more
        array."""
        k = node.output[0]
        later = self._apart(k, out)
        self.buffers[k].remaining = 1
        context = Shape("u32")
        out.output = [self._made(out, part, [Use(kept, 0, None)]) for part in (node.shape, context)]
        back.output = [self._made(back, part, [Use(done, 0, None)]) for part in (node.shape, context)]
        done.output = [self._made(done, done.shape, later)]
        out.used, kept.used, done.used = [k], list(out.output), list(back.output)
        self._renamed(k, done.output[0])
        now = self.now
        for new in (out, kept, back, done):
            if new.placed:
                self.begin(new)
                self.end()
        self.now = now

    def _apart(self, k: int, by: Node) -> list[Use]:
        """Leave buffer ``k`` its users that have run, and ``by``; returns those to come."""
        buffer = self.buffers[k]
        later = [use for use in buffer.users if not use.node.placed]
        buffer.users = [use for use in buffer.users if use.node.placed] + [Use(by, 0, None)]
        return later

    def _made(self, node: Node, shape: Shape, users: list[Use]) -> int:
        k = self._add(Buffer(node, shape, (), users))
        node.defined.append(k)
        return k

    def _renamed(self, old: int, new: int) -> None:
        for use in self.buffers[new].users:
            use.node.used = [new if x == old else x for x in use.node.used]

    def faults(self) -> list[str]:
        """What is wrong with the books (R16): nothing, ever."""
        found = []
        for node in self.body:
            for rows, what in ((node.defined, "defined"), (node.used, "used")):
                if len(set(rows)) != len(rows):
                    found.append(f"{node.name}: buffers {what} are not unique")
        for k, buffer in enumerate(self.buffers):
            open_users = {u.node for u in buffer.users if not u.node.placed or u.node is self.now}
            if buffer.remaining != len(open_users):
                found.append(
                    f"{buffer.node.name}: {buffer.remaining} users to come, counted {len(open_users)}"
                )
            found += [f"{u.node.name} uses {buffer.node.name}" for u in buffer.users if k not in u.node.used]
            if k not in buffer.node.defined:
                found.append(f"{buffer.node.name} does not define its buffer")
        return found
