"""Which logical buffer stands at which position, who defines it and who reads it: points-to sets in XLA's SSA form.

A **logical buffer** is what one instruction defines at one position of its shape. Instructions that forward (tuple
elements, bitcasts, call results …) define none. Where loops and branches join, a *phi* is a buffer of its own; phis
that can only ever be one buffer are that buffer. Computations run sequentially (``while``, ``call``,
``conditional``, ``async-start``) receive the caller's buffers; those applied element by element (``reduce``,
``sort`` …) define their parameters; the inside of fusions has no buffers. An unknown opcode defines every position of
its shape, which is safe: it shares nothing. Buffers are numbered as XLA numbers them: ties follow that order.

Source: XLA, ``HloDataflowAnalysis`` (L1-L3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, TypeVar

from tightship.cached import cached_property
from tightship.errors import BadInput, Unsupported
from tightship.hlo.module import Computation, Instruction, Module, runs
from tightship.hlo.opcodes import Opcode
from tightship.hlo.shape import Index, Shape

__all__ = [
    "Buffer",
    "Node",
    "Operand",
    "PointsTo",
    "Use",
    "async_start",
    "computations_in_post_order",
    "forwarded",
    "meant",
    "points_to",
    "post_order",
]


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
    def row(self) -> Opcode:
        return self.instruction.row

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


def post_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Those of one computation, operands before users, depth first from the instructions nobody uses."""
    named = {n.name: n for n in nodes}
    done: set[Node] = set()
    found: list[Node] = []
    for node in nodes:
        if node.users:
            continue
        stack = [node]
        while stack:
            last = stack[-1]
            if last in done:
                stack.pop()
                continue
            before = [o for o in reversed(last.operands) if o not in done]
            if last.instruction.has("control-predecessors"):
                waits = (named[p] for p in last.instruction.control_predecessors)
                before += [p for p in waits if p not in done]
            if before:
                stack += before
            else:
                done.add(last)
                found.append(last)
                stack.pop()
    return tuple(found)


def computations_in_post_order(module: Module) -> list[Computation]:
    """Those the entry reaches, callees before callers, the entry last; then those nobody calls."""
    found: list[Computation] = []
    seen: set[str] = set()
    called = {n for i in module.instructions for n in i.called}
    for first in (module.entry, *(c for c in module.computations if c.name not in called)):
        if first.name in seen:
            continue
        seen.add(first.name)
        stack = [(first, iter(first.instructions))]
        while stack:
            c, rest = stack[-1]
            i = next((i for i in rest if i.called), None)
            if i is None:
                stack.pop()
                found.append(c)
                continue
            callees = [n for n in i.called if n not in seen]
            for n in callees if i.opcode == "while" else reversed(callees):
                seen.add(n)
                stack.append((module.by_name[n], iter(module.by_name[n].instructions)))
    return found


def meant(phis: Sequence[Buffer]) -> Callable[[Buffer], Buffer]:
    """What stands for each buffer: itself, or the only one it can be. The inputs of the phis that stay are brought
    up to date."""
    same: dict[Buffer, Buffer] = {}

    def real(buffer: Buffer) -> Buffer:
        while buffer in same:
            buffer = same[buffer]
        return buffer

    changed = True
    while changed:
        changed = False
        seen: set[Buffer] = set()
        for phi in phis:
            if phi in same:
                continue
            phi.inputs = [b for b in dict.fromkeys(map(real, phi.inputs)) if b is not phi]
            if len(phi.inputs) == 1:
                same[phi] = phi.inputs[0]
                changed = True
            elif phi not in seen and _one(phi, real, seen, same):
                changed = True
    return real


def _one(
    phi: Buffer, real: Callable[[Buffer], Buffer], seen: set[Buffer], same: dict[Buffer, Buffer]
) -> bool:
    """Whether the phis reachable from ``phi`` join no more than one real buffer; they are it, then."""
    work, closure, only = [phi], {phi}, None
    while work:
        todo = work.pop()
        if not todo.phi:
            if only is not None and only is not todo:
                return False
            only = todo
            continue
        seen.add(todo)
        for b in map(real, todo.inputs):
            if b not in closure:
                closure.add(b)
                work.append(b)
    if only is None:
        return False
    same.update((b, only) for b in closure if b.phi)
    return True


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Operand(Protocol[T_co]):
    """What an instruction is given: a shape, and what stands at each position, in the order of ``positions``."""

    @property
    def shape(self) -> Shape: ...

    @property
    def at(self) -> Sequence[T_co]: ...


def forwarded(i: Instruction, operands: Sequence[Operand[T]]) -> list[T | None]:
    """For each position what stands there of the operands, or None where the instruction defines a buffer."""
    match i.row.forwards:
        case "whole":
            return list(operands[0].at)
        case "parts":  # a shallow copy: the top is new
            return [None, *operands[0].at[1:]]
        case "operands":
            return [None, *(b for operand in operands for b in operand.at)]
        case "element":
            start = operands[0].shape.starts[i.tuple_index]
            return list(operands[0].at[start : start + len(i.shape.positions)])
    pick = _PICKS.get(i.row.forwards)
    found: list[T | None] = [None] * len(i.shape.positions)
    for k, (index, shape) in enumerate(i.shape.positions if pick else ()):
        source = pick(i, len(operands), index, shape) if pick else None
        if source is not None:
            given = operands[source[0]]
            found[k] = given.at[given.shape.offset(source[1])]
    return found


_Source = tuple[int, Index] | None
"""(operand, position in it) that stands at a position of a result."""


def _all_gather_start(i: Instruction, count: int, at: Index, shape: Shape) -> _Source:
    if shape.is_tuple or at[:1] != (0,):
        return None
    return (at[1], ()) if count > 1 else (0, ())


def _permute_start(i: Instruction, count: int, at: Index, shape: Shape) -> _Source:
    if at[:1] != (0,):
        return None
    if count > 1 and count != 4 and not i.has("slice_sizes"):  # several, none of them written in place
        return (at[1], ()) if len(at) == 2 else None
    return None if shape.is_tuple else (0, at[1:])


_PICKS: dict[str, Callable[[Instruction, int, Index, Shape], _Source]] = {
    "copy-start": lambda i, count, at, shape: (0, ()) if at == (1,) else None,
    "copy-done": lambda i, count, at, shape: None if at else (0, (0,)),
    "send": lambda i, count, at, shape: (0, at[1:]) if at[:1] == (0,) else None,
    "recv-done": lambda i, count, at, shape: (0, at) if at[:1] == (0,) else None,
    "leaves": lambda i, count, at, shape: None if shape.is_tuple else (0, at),
    "second": lambda i, count, at, shape: None if shape.is_tuple else (0, (1, *at)),
    "all-gather-start": _all_gather_start,
    "permute-start": _permute_start,
}
"""How operands are forwarded, by ``Opcode.forwards``: what stands at a position, given the number of operands. Tables
around results that a start made (*second*) are new."""


def async_start(i: Instruction, operands: Sequence[Operand[T]], result: Sequence[T]) -> list[T | None]:
    """Operands stand below position 0, results of the wrapped computation below 1; tables and contexts are new."""
    root = dict(zip((index for index, _ in i.shape.parts[1].positions), result, strict=False))
    found: list[T | None] = []
    for index, shape in i.shape.positions:
        if shape.is_tuple or not index or index[0] > 1:
            found.append(None)
        elif index[0] == 0:
            given = operands[index[1]]
            found.append(given.at[given.shape.offset(index[2:])])
        else:
            found.append(root.get(index[1:]))
    return found


def points_to(module: Module) -> PointsTo:
    """Raises ``Unsupported`` when a computation is run from several places (``flattened`` gives each a copy of its
    own), ``BadInput`` for shapes without a size."""
    return _Analysis(module).run()


class _Analysis:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.nodes: dict[str, tuple[Node, ...]] = {}
        self.named: dict[str, dict[str, Node]] = {}
        self.callers: dict[str, Node] = {}
        self.made: list[Buffer] = []
        self.phis: list[Buffer] = []

    def run(self) -> PointsTo:
        order = computations_in_post_order(self.module)
        self._number(order)
        sequential, embedded = self._contexts(order)
        for c in embedded:
            for node in self.nodes[c.name]:
                self._visit(node)
        self._computation(self.module.entry)
        self._resolve()
        ordered = {c.name: post_order(self.nodes[c.name]) for c in order}
        numbered = self._ids(ordered)
        self._positions(numbered)
        self._find_uses(numbered)
        return PointsTo(
            self.module,
            tuple(numbered),
            self.nodes,
            ordered,
            self.callers,
            tuple(sequential),
            tuple(embedded),
        )

    def _number(self, order: Sequence[Computation]) -> None:
        count = 0
        for c in order:
            mine: dict[str, Node] = {}
            for i in c.instructions:
                try:
                    for _, part in i.shape.positions:
                        _ = part.nbytes
                except BadInput as error:
                    place = f"{self.module.file}:{i.line}, {i.name!r} in {c.name!r}"
                    raise BadInput(error.rule, place=place) from None
                node = Node(count, c, i, tuple(mine[o] for o in i.operands))
                for operand in dict.fromkeys(node.operands):
                    operand.users.append(node)
                mine[i.name] = node
                count += 1
            self.named[c.name] = mine
            self.nodes[c.name] = tuple(mine.values())

    def _contexts(self, order: Sequence[Computation]) -> tuple[list[Computation], list[Computation]]:
        """Which computations run sequentially, and which element by element; fusions and dead ones are neither."""
        sequential, embedded, fused = {self.module.entry.name}, set[str](), set[str]()
        reached = {self.module.entry.name}
        for c in reversed(order):
            for node in self.nodes[c.name]:
                i = node.instruction
                if not i.called or c.name not in reached:
                    continue
                reached.update(i.called)
                inner = runs(i) if c.name in sequential else ()
                for callee in i.called:
                    if callee in inner:
                        self._called_once(node, callee)
                        sequential.add(callee)
                    elif i.opcode == "fusion":
                        fused.add(callee)
                    else:
                        embedded.add(callee)
        return (
            [c for c in order if c.name in sequential],
            [c for c in order if c.name in embedded - sequential - fused],
        )

    def _called_once(self, node: Node, callee: str) -> None:
        if self.callers.setdefault(callee, node) is not node:
            raise Unsupported(
                f"computation {callee!r} run from both {self.callers[callee].name!r} and {node.name!r}",
                "a buffer inside it would be several",
                "flattened(module) gives each call a copy of its own, as XLA does before it schedules",
            )

    # --- what stands where -------------------------------------------------------------------------------

    def _new(self, node: Node, index: Index, shape: Shape, phi: bool = False) -> Buffer:
        buffer = Buffer(-1, node, index, shape, phi)
        (self.phis if phi else self.made).append(buffer)
        return buffer

    def _phi(self, node: Node, inputs: Sequence[Sequence[Buffer]]) -> list[Buffer]:
        """A buffer of its own at each position, which may be any of the inputs'."""
        found = []
        for k, (index, shape) in enumerate(node.shape.positions):
            buffer = self._new(node, index, shape, phi=True)
            buffer.inputs = [i[k] for i in inputs]
            found.append(buffer)
        return found

    def _computation(self, c: Computation, arguments: Sequence[list[Buffer]] | None = None) -> list[Buffer]:
        """What the root of a sequential computation points to, given what its parameters do."""
        for node in self.nodes[c.name]:
            if node.opcode == "parameter" and arguments is not None:
                node.at = arguments[node.instruction.parameter_number]
            elif runs(node.instruction):
                node.at = self._calls(node)
            else:
                self._visit(node)
        return self.named[c.name][c.root.name].at

    def _calls(self, node: Node) -> list[Buffer]:
        i = node.instruction
        callees = [self.module.by_name[n] for n in runs(i)]
        if i.opcode == "while":
            condition, body = callees
            init = node.operands[0].at
            heads = [self._parameter(c) for c in (body, condition)]
            looped = [self._phi(head, [init]) for head in heads]
            root = self._computation(body, [looped[0]])
            self._computation(condition, [looped[1]])
            for head in looped:
                for buffer, back in zip(head, root, strict=True):
                    buffer.inputs = [*buffer.inputs, back]
            return self._phi(node, [root, init])
        if i.opcode == "conditional":
            ends = [
                self._computation(c, [operand.at])
                for c, operand in zip(callees, node.operands[1:], strict=False)
            ]
            return self._phi(node, ends) if len(ends) > 1 else list(ends[0])
        result = self._computation(callees[0], [operand.at for operand in node.operands])
        if i.opcode == "call":
            return list(result)
        return self._made(node, lambda: async_start(i, node.operands, result))

    def _parameter(self, c: Computation) -> Node:
        return self.named[c.name][c.parameters[0].name]

    def _visit(self, node: Node) -> None:
        """What an instruction that runs no computation points to, from its operands."""
        if node.shape.is_tuple and node.row.forwards == "either":
            either = self._phi(node, [o.at for o in node.operands[1:]])
            node.at = [self._new(node, (), node.shape), *either[1:]]
            return
        node.at = self._made(node, lambda: forwarded(node.instruction, node.operands))

    def _made(self, node: Node, given: Callable[[], list[Buffer | None]]) -> list[Buffer]:
        """What an instruction hands on, and a new buffer wherever it hands on nothing."""
        try:
            pairs = list(zip(node.shape.positions, given(), strict=True))
        except (IndexError, ValueError):
            fault = (
                f"{node.opcode} {node.name!r} of shape {node.shape} does not have the parts of its operands"
            )
            raise BadInput(fault, place=f"{self.module.file}:{node.instruction.line}") from None
        return [self._new(node, index, part) if b is None else b for (index, part), b in pairs]

    def _resolve(self) -> None:
        real = meant(self.phis)
        self.phis = [p for p in self.phis if real(p) is p]
        for nodes in self.nodes.values():
            for node in nodes:
                node.at = [real(b) for b in node.at]

    # --- ids, positions, uses ------------------------------------------------------------------------------

    def _ids(self, ordered: Mapping[str, Sequence[Node]]) -> list[Buffer]:
        """XLA's numbering: as defined in post order, then the phis."""
        rank = {node: k for k, node in enumerate(chain.from_iterable(ordered.values()))}

        def key(b: Buffer) -> tuple[int, int]:
            return rank[b.node], b.node.shape.offset(b.index) if b.index else 0

        numbered = [*sorted(self.made, key=key), *sorted(self.phis, key=key)]
        for k, buffer in enumerate(numbered):
            buffer.id = k
        return numbered

    def _positions(self, numbered: Sequence[Buffer]) -> None:
        for buffer in numbered:
            buffer.positions.append((buffer.node, buffer.index))
        for nodes in self.nodes.values():
            for node in nodes:
                for buffer, (index, _) in zip(node.at, node.shape.positions, strict=False):
                    if buffer.node is not node or buffer.index != index:
                        buffer.positions.append((node, index))

    def _find_uses(self, numbered: Sequence[Buffer]) -> None:
        for buffer in numbered:
            for node, index in buffer.positions:
                for user in node.users:
                    if not _uses(user, index):
                        continue
                    for k, operand in enumerate(user.operands):
                        if operand is node:
                            buffer.uses.append(Use(user, k, index))


def _uses(user: Node, index: Index) -> bool:
    """Whether an instruction uses what stands at a position of its operand, rather than handing it on. What the
    root of a computation hands on counts as used."""
    reads = user.row.reads
    if reads == "all" or (reads == "table" and not index):
        return True
    return user.is_root and (user.opcode != "get-tuple-element" or index[0] == user.instruction.tuple_index)
