"""A computation of HLO while XLA's rematerialization rewrites it: its schedule, and the bytes in use at the walk.

Source: ``HloRematInstructionList``, ``MemoryUsageTracker`` and ``HloDCE`` of OpenXLA; what they count is counted
here (R1-R4, R16). It stands beside the tracker of graphs for two reasons. A clone takes over operands, tuple parts
and bitcasts of what it stands for, so buffers know through which operand they are used; and it may read an original
while a clone of that lives, so a storage may have several copies at a time, which no plan of a graph has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from tightship.baselines.xla_tracker import Place, Usage
from tightship.hlo.module import Computation, Instruction, Module, Names
from tightship.hlo.remat.instructions import suffixed
from tightship.hlo.remat.peak import PointsTo, buffers
from tightship.hlo.shape import Index, Shape

__all__ = ["Body", "Buffer", "Node", "Tracker", "Use", "remove_dead"]


class Node(Place):
    """One instruction. ``defined``, ``used`` and ``output`` are numbers of the tracker's buffers."""

    __slots__ = (
        "after", "before", "defined", "denied", "made", "name", "operands", "output", "placed", "shape", "used",
        "users",
    )  # fmt: skip

    def __init__(self, made: Instruction, name: str, shape: Shape) -> None:
        self.made, self.name, self.shape = made, name, shape
        self.operands: list[Node] = []
        self.users: dict[Node, None] = {}
        self.before: dict[Node, None] = {}
        self.after: dict[Node, None] = {}
        self.defined: list[int] = []
        self.used: list[int] = []
        self.output: list[int] = []
        self.placed = self.denied = False

    @property
    def opcode(self) -> str:
        return self.made.opcode

    def add_operand(self, operand: Node) -> None:
        self.operands.append(operand)
        operand.users[self] = None

    def replace_operand(self, k: int, by: Node) -> None:
        old = self.operands[k]
        self.operands[k] = by
        by.users[self] = None
        if old not in self.operands:
            del old.users[self]


class Body:
    """The nodes of one computation, in their schedule."""

    def __init__(self, computation: Computation, names: Names) -> None:
        self.computation, self.names = computation, names
        nodes = [Node(i, i.name, i.shape) for i in computation.instructions]
        self.schedule = Usage(nodes, np.zeros(len(nodes), dtype=np.int64))
        self.by_name = {node.name: node for node in nodes}
        for node in nodes:
            for name in node.made.operands:
                node.add_operand(self.by_name[name])
            for name in node.made.control_predecessors:
                self.control(self.by_name[name], node)
        self.root = self.by_name[computation.root.name]

    def __iter__(self) -> Iterator[Node]:
        """The nodes in order; others may be put in meanwhile, anywhere."""
        node = self.schedule.first()
        while node is not None:
            yield cast(Node, node)
            node = self.schedule.following(node)

    def following(self, node: Node) -> Node | None:
        return cast(Node | None, self.schedule.following(node))

    def previous(self, node: Node) -> Node | None:
        return cast(Node | None, self.schedule.previous(node))

    @staticmethod
    def control(first: Node, then: Node) -> None:
        first.after[then] = None
        then.before[first] = None

    def clone(self, node: Node) -> Node:
        """Another run of a node, with its operands and its control dependencies, not yet in the schedule."""
        copy = Node(node.made, self.names.new(suffixed(node.name)), node.shape)
        for operand in node.operands:
            copy.add_operand(operand)
        for other in node.before:
            self.control(other, copy)
        for other in node.after:
            self.control(copy, other)
        return copy

    def unary(self, name: str, opcode: str, shape: Shape, operand: Node, **attributes: str) -> Node:
        made = Instruction(name, opcode, shape, attributes=tuple(attributes.items()))
        node = Node(made, self.names.new(name), shape)
        node.add_operand(operand)
        return node

    def insert(self, node: Node, before: Iterable[Node]) -> None:
        """Put a node right before the earliest of ``before``."""
        self.schedule.insert(node, min(before, key=lambda n: n.key), 0)

    def insert_after(self, node: Node, at: Node) -> None:
        following = self.following(at)
        assert following is not None
        self.insert(node, [following])

    def drop_dead(self) -> None:
        """Remove what nobody uses and nobody would miss."""
        stack = [n for n in self if not n.users]
        while stack:
            node = stack.pop()
            if node.users or node is self.root or not node.made.row.removable or node.before or node.after:
                continue
            if node.made.attribute("custom_call_has_side_effect") == "true":
                continue
            self.schedule.remove(node)
            for operand in dict.fromkeys(node.operands):
                del operand.users[node]
                if not operand.users:
                    stack.append(operand)

    def rewrite(self) -> Computation:
        """The computation as it is now."""
        return replace(self.computation, instructions=tuple(map(_instruction, self)))


def _instruction(node: Node) -> Instruction:
    made = replace(node.made, name=node.name, shape=node.shape, operands=tuple(o.name for o in node.operands))
    controls = ", ".join(f"%{n.name}" for n in node.before)
    if controls or made.has("control-predecessors"):
        rest = tuple(row for row in made.attributes if row[0] != "control-predecessors")
        added = (("control-predecessors", f"{{{controls}}}"),) if controls else ()
        made = replace(made, attributes=(*rest, *added))
    return made


# -- bytes in use ------------------------------------------------------------------------------------------------


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
    index: Index
    users: list[Use]
    size: int
    live_out: bool = False
    indirect: bool = False
    writers: tuple[Node, ...] = ()
    remaining: int = 0

    def __post_init__(self) -> None:
        self.remaining = len({use.node for use in self.users})


class Tracker:
    """Walk a body with ``begin`` and ``end``; ``now`` is the node between the two, ``use`` the bytes in use."""

    def __init__(self, module: Module, body: Body) -> None:
        self.body = body
        self.use = 0
        self.now: Node | None = None
        self.buffers: list[Buffer] = []
        points = PointsTo(body.computation)
        known = buffers(module, body.computation, points)
        number: dict[int, int] = {}
        for b in known.values():
            if id(b) in number:  # a loop's
                continue
            node = body.by_name[b.definer]
            users = [Use(body.by_name[use.user], use.operand, use.part) for use in b.uses]
            writers = tuple(map(body.by_name.__getitem__, b.writers))
            made = Buffer(node, b.index, users, b.size, b.live_out, b.indirect, writers)
            k = number[id(b)] = self._add(made)
            node.defined.append(k)
            for use in users:
                if k not in use.node.used:
                    use.node.used.append(k)
        for name, rows in points.sets.items():
            body.by_name[name].output.extend(dict.fromkeys(number[id(known[b])] for b in rows.values()))

    def _add(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

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

    def made(self, node: Node) -> int:
        return sum(self.buffers[k].size for k in node.defined)

    def live(self, k: int) -> bool:
        buffer = self.buffers[k]
        return buffer.node.placed and buffer.remaining > 0

    def released(self, node: Node) -> int | None:
        """Bytes of the node's results that are live; None where it may not be rematerialized now (R7, R11)."""
        if any(n.placed for n in node.after):
            return None
        if any(node.key <= writer.key for k in node.used for writer in self.buffers[k].writers):
            return None
        total, busy = 0, self.now.used if self.now else ()
        for k in node.defined:
            buffer = self.buffers[k]
            if buffer.indirect or buffer.live_out or len(buffer.index) > 1 or k in busy:
                return None
            total += buffer.size if self.live(k) else 0
        return total

    def revived(self, node: Node, block: Sequence[Node]) -> int:
        """Bytes of operands that are dead, but for those that ``block`` makes anew (R7, R8)."""
        rows = (self.buffers[k] for k in node.used if not self.live(k))
        return sum(b.size for b in rows if b.node not in block)

    def uses(self, node: Node) -> list[Use]:
        return [use for k in node.defined for use in self.buffers[k].users]

    # -- a node has been rematerialized ----------------------------------------------------------------------

    def cloned(self, node: Node, clone: Node, handed: Sequence[Node]) -> None:
        """Count with ``clone`` made for all users of ``node`` to come; ``handed`` hand its result on."""
        clone.used = list(node.used)
        for k in node.used:
            buffer = self.buffers[k]
            if not buffer.remaining:
                self.use += buffer.size
            buffer.remaining += 1
            buffer.users += [use._replace(node=clone) for use in buffer.users if use.node is node]
        for k in node.defined:
            self._split(k, clone, handed)
        for other in handed:
            self._hand_on(other)

    def _split(self, k: int, clone: Node, handed: Sequence[Node]) -> None:
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
        new = self._add(Buffer(clone, old.index, later, old.size))
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
        later = self._detach(k, small)
        self.use -= self.buffers[k].size
        self.buffers[k].remaining = 0
        a = self._define(small, small.shape.nbytes, [Use(full, 0, None)])
        self.use += self.buffers[a].size
        b = self._define(full, self.buffers[k].size, later)
        small.used, small.output, full.used, full.output = [k], [a], [a], [b]
        self._rename(k, b)

    def offloaded(self, node: Node, out: Node, kept: Node, back: Node, done: Node) -> None:
        """Count with the result of ``node`` copied out from ``out`` to ``kept``, and back from ``back`` to ``done``,
        which its users to come use. What is on the host is not counted; each copy is, as XLA does it, as one more
        array."""
        k = node.output[0]
        later = self._detach(k, out)
        self.buffers[k].remaining = 1
        sizes = self.buffers[k].size, Shape("u32").nbytes
        out.output = [self._define(out, nbytes, [Use(kept, 0, None)]) for nbytes in sizes]
        back.output = [self._define(back, nbytes, [Use(done, 0, None)]) for nbytes in sizes]
        done.output = [self._define(done, sizes[0], later)]
        out.used, kept.used, done.used = [k], list(out.output), list(back.output)
        self._rename(k, done.output[0])
        now = self.now
        for new in (out, kept, back, done):
            if new.placed:
                self.begin(new)
                self.end()
        self.now = now

    def _detach(self, k: int, by: Node) -> list[Use]:
        """Leave buffer ``k`` its users that have run, and ``by``; returns those to come."""
        buffer = self.buffers[k]
        later = [use for use in buffer.users if not use.node.placed]
        buffer.users = [use for use in buffer.users if use.node.placed] + [Use(by, 0, None)]
        return later

    def _define(self, node: Node, nbytes: int, users: list[Use]) -> int:
        k = self._add(Buffer(node, (), users, nbytes))
        node.defined.append(k)
        return k

    def _rename(self, old: int, new: int) -> None:
        for use in self.buffers[new].users:
            use.node.used = [new if x == old else x for x in use.node.used]


# -- dead code (R15) ---------------------------------------------------------------------------------------------


def remove_dead(body: Body, inside: dict[str, Computation]) -> None:
    """Remove what is dead from ``body``, and results of fusions that nobody reads; ``inside`` has the computations
    that fusions call, changed ones too."""
    body.drop_dead()
    while any([_narrow(body, node, inside) for node in list(body) if node.opcode == "fusion"]):
        body.drop_dead()


def _narrow(body: Body, node: Node, inside: dict[str, Computation]) -> bool:
    """Let a fusion give only what is read of it; whether that changed anything."""
    name = node.made.attribute("calls").lstrip("%")
    called = inside.get(name)
    if called is None or called.root.opcode != "tuple" or node is body.root or not node.users:
        return False
    if any(u.opcode != "get-tuple-element" or u is body.root for u in node.users):
        return False
    kept = sorted({u.made.tuple_index for u in node.users})
    if len(kept) == len(node.shape.parts) or node.made.has("output_to_operand_aliasing"):
        return False
    inside[name], used = _narrowed(called, kept)
    left = [node.operands[k] for k in used]
    for operand in dict.fromkeys(node.operands):
        if operand not in left:
            del operand.users[node]
    node.operands = left
    if len(kept) > 1:
        node.shape = Shape("tuple", parts=tuple(node.shape.parts[k] for k in kept))
        for user in node.users:
            user.made = user.made.but(index=kept.index(user.made.tuple_index))
    else:
        _untuple(body, node, node.shape.parts[kept[0]])
    return True


def _untuple(body: Body, node: Node, shape: Shape) -> None:
    """The fusion itself takes the place of the get-tuple-elements of its only result."""
    node.shape = shape
    for part in list(node.users):
        del node.users[part]
        for user in list(part.users):
            for k, operand in enumerate(user.operands):
                if operand is part:
                    user.operands[k] = node
            node.users[user] = None
        part.users.clear()
        part.operands.clear()
        body.schedule.remove(part)


def _narrowed(called: Computation, kept: list[int]) -> tuple[Computation, list[int]]:
    """A fused computation that gives only the results ``kept``, and the parameters it still reads."""
    results = [called.root.operands[k] for k in kept]
    need = set(results)
    for i in reversed(called.instructions):
        if i.name in need:
            need.update(i.operands)
    live = [i for i in called.instructions if i.name in need and i is not called.root]
    used = sorted(i.parameter_number for i in live if i.opcode == "parameter")
    rows = []
    for i in live:
        payload = str(used.index(i.parameter_number)) if i.opcode == "parameter" else i.payload
        rows.append(replace(i, payload=payload, root=len(kept) == 1 and i.name == results[0]))
    if len(kept) > 1:
        shape = Shape("tuple", parts=tuple(called.root.shape.parts[k] for k in kept))
        rows.append(replace(called.root, shape=shape, operands=tuple(results)))
    return replace(called, instructions=tuple(rows)), used
