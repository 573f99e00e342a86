"""A computation of HLO that is being rewritten: nodes in a linked schedule, operands and users both ways.

Source: ``HloRematInstructionList`` of OpenXLA. A node's ``position`` is where it stood in the first schedule; one put
in takes the position of the node it was put before, so the earliest of several nodes is found by a scan over few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tightship.hlo.module import Computation, Instruction
from tightship.hlo.shape import Shape

__all__ = ["Body", "Names", "Node", "suffixed"]


class Node:
    """One instruction. ``defined``, ``used`` and ``output`` are numbers of the tracker's buffers."""

    __slots__ = (
        "after", "before", "defined", "denied", "following", "made", "name", "operands", "output", "placed",
        "position", "previous", "shape", "used", "users",
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
        self.position = 0
        self.previous: Node | None = None
        self.following: Node | None = None

    @property
    def opcode(self) -> str:
        return self.made.opcode

    def replace_operand(self, k: int, by: Node) -> None:
        old = self.operands[k]
        self.operands[k] = by
        by.users[self] = None
        if old not in self.operands:
            del old.users[self]


class Names:
    """Names of a module, each once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = set(taken)
        self.last: dict[str, int] = {}

    def new(self, name: str) -> str:
        found, k = name, self.last.get(name, 0)
        while found in self.taken:
            k += 1
            found = f"{name}.{k}"
        self.last[name] = k
        self.taken.add(found)
        return found


def suffixed(name: str, suffix: str = "remat") -> str:
    """``foo`` → ``foo.remat`` → ``foo.remat2`` → ``foo.remat3``."""
    root, dot, number = name.rpartition(f".{suffix}")
    if not dot or (number and not number.isdigit()):
        return f"{name}.{suffix}"
    return f"{root}.{suffix}{int(number or 1) + 1}"


class Body:
    """The nodes of one computation, in their schedule."""

    def __init__(self, computation: Computation, names: Names) -> None:
        self.computation, self.names = computation, names
        self.by_name: dict[str, Node] = {}
        self.first: Node | None = None
        last: Node | None = None
        for k, i in enumerate(computation.instructions):
            node = self.by_name[i.name] = Node(i, i.name, i.shape)
            node.position, node.previous = k, last
            if last is None:
                self.first = node
            else:
                last.following = node
            last = node
        for node in self.by_name.values():
            for name in node.made.operands:
                self._operand(node, self.by_name[name])
            for name in node.made.control_predecessors:
                self.control(self.by_name[name], node)
        self.root = self.by_name[computation.root.name]

    def __iter__(self) -> Iterator[Node]:
        node = self.first
        while node is not None:
            yield node
            node = node.following

    @staticmethod
    def _operand(node: Node, operand: Node) -> None:
        node.operands.append(operand)
        operand.users[node] = None

    @staticmethod
    def control(first: Node, then: Node) -> None:
        first.after[then] = None
        then.before[first] = None

    def clone(self, node: Node) -> Node:
        """Another run of a node, with its operands and its control dependencies, not yet in the schedule."""
        copy = Node(node.made, self.names.new(suffixed(node.name)), node.shape)
        for operand in node.operands:
            self._operand(copy, operand)
        for other in node.before:
            self.control(other, copy)
        for other in node.after:
            self.control(copy, other)
        return copy

    def unary(self, name: str, opcode: str, shape: Shape, operand: Node, **attributes: str) -> Node:
        made = Instruction(name, opcode, shape, attributes=tuple(attributes.items()))
        node = Node(made, self.names.new(name), shape)
        self._operand(node, operand)
        return node

    def insert(self, node: Node, before: Sequence[Node]) -> None:
        """Right before the earliest of ``before``."""
        wanted = set(before)
        at = min(before, key=lambda n: n.position)
        while at.previous is not None and at.previous.position == at.position:
            at = at.previous
        while at not in wanted:
            assert at.following is not None
            at = at.following
        node.previous, node.following, node.position = at.previous, at, at.position
        if at.previous is None:
            self.first = node
        else:
            at.previous.following = node
        at.previous = node

    def drop_dead(self) -> int:
        """Remove what nobody uses and nobody would miss; how many instructions went."""
        gone = 0
        stack = [n for n in self if not n.users]
        while stack:
            node = stack.pop()
            if node.users or node is self.root or not node.made.row.removable or node.before or node.after:
                continue
            if node.made.attribute("custom_call_has_side_effect") == "true":
                continue
            self.unlink(node)
            gone += 1
            for operand in dict.fromkeys(node.operands):
                del operand.users[node]
                if not operand.users:
                    stack.append(operand)
        return gone

    def unlink(self, node: Node) -> None:
        """Take a node out of the schedule."""
        if node.previous is None:
            self.first = node.following
        else:
            node.previous.following = node.following
        if node.following is not None:
            node.following.previous = node.previous

    def written(self) -> Computation:
        """The computation as it is now."""
        return replace(self.computation, instructions=tuple(map(_written, self)))


def _written(node: Node) -> Instruction:
    made = replace(node.made, name=node.name, shape=node.shape, operands=tuple(o.name for o in node.operands))
    controls = ", ".join(f"%{n.name}" for n in node.before)
    if controls or made.has("control-predecessors"):
        rest = tuple(row for row in made.attributes if row[0] != "control-predecessors")
        added = (("control-predecessors", f"{{{controls}}}"),) if controls else ()
        made = replace(made, attributes=(*rest, *added))
    return made
