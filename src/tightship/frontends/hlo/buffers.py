"""The buffers of a module, and what is known of them: who defines each, where it stands, who reads it.

A **logical buffer** is what one instruction defines at one position of its shape. Where loops and branches join, a
*phi* is a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tightship.frontends.hlo.module import Computation, Instruction, Module
from tightship.frontends.hlo.shape import Index, Shape

__all__ = ["Buffer", "Node", "PointsTo", "Use"]


@dataclass(eq=False, slots=True)
class Node:
    """An instruction in its computation. ``at`` has, for each position of its shape, the buffer there."""

    number: int
    computation: Computation
    instruction: Instruction
    operands: tuple[Node, ...] = ()
    users: list[Node] = field(default_factory=list)
    at: list[Buffer] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.instruction.name

    @property
    def opcode(self) -> str:
        return self.instruction.opcode

    @property
    def op_name(self) -> str:
        return self.instruction.op_name

    @property
    def shape(self) -> Shape:
        return self.instruction.shape

    @property
    def is_root(self) -> bool:
        return self.computation.root is self.instruction

    def buffer(self, index: Index = ()) -> Buffer:
        return self.at[self.shape.offset(index)]

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True, slots=True)
class Use:
    """``node`` reads the buffer as operand ``operand``, at position ``index`` of it."""

    node: Node
    operand: int
    index: Index


@dataclass(eq=False, slots=True)
class Buffer:
    """A logical buffer: defined by ``node`` at ``index``; ``positions`` are all that alias it, its own first.
    ``inputs``: what a phi may be."""

    id: int
    node: Node
    index: Index
    shape: Shape
    phi: bool = False
    inputs: Sequence[Buffer] = ()
    positions: list[tuple[Node, Index]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    def __str__(self) -> str:
        """As XLA writes it: the name, and the position when the shape is a tuple."""
        where = "{" + ",".join(map(str, self.index)) + "}" if self.node.shape.is_tuple else ""
        return f"{self.node.name}{where}"

    __repr__ = __str__


@dataclass(frozen=True)
class PointsTo:
    """``buffers`` by id; ``nodes`` by computation, in the order of the text, ``post_order`` in that in which XLA
    numbers them; ``callers`` of each computation that runs sequentially; ``embedded``: computations applied element
    by element."""

    module: Module
    buffers: tuple[Buffer, ...]
    nodes: Mapping[str, tuple[Node, ...]]
    post_order: Mapping[str, tuple[Node, ...]]
    callers: Mapping[str, Node]
    sequential: tuple[Computation, ...]
    embedded: tuple[Computation, ...]

    def sources(self, node: Node, index: Index = ()) -> frozenset[Buffer]:
        """L2: the buffers that may be meant at a position, phis resolved; several: it is ambiguous."""
        found: set[Buffer] = set()
        work = [node.buffer(index)]
        while work:
            buffer = work.pop()
            if buffer not in found:
                found.add(buffer)
                work += buffer.inputs
        return frozenset(b for b in found if not b.phi)

    @cached_property
    def _roots(self) -> Mapping[str, Node]:
        return {name: next(n for n in nodes if n.is_root) for name, nodes in self.nodes.items()}

    def root(self, computation: Computation) -> Node:
        return self._roots[computation.name]

    @cached_property
    def live_out(self) -> frozenset[Buffer]:
        """L4: what the entry's result points to, at any position."""
        return frozenset(self.root(self.module.entry).at)
