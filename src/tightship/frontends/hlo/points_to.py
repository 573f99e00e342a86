"""Which logical buffer stands at which position: points-to sets of a module, in XLA's SSA form.

A **logical buffer** is what one instruction defines at one position of its shape. Instructions that forward
(tuple elements, bitcasts, call results …) define none. Where loops and branches join, a *phi* is a buffer of its
own; phis that can only ever be one buffer are that buffer. Computations run sequentially (``while``, ``call``,
``conditional``, ``async-start``) receive the caller's buffers; those applied element by element (``reduce``,
``sort`` …) define their parameters; the inside of fusions has no buffers.

Source: XLA, ``HloDataflowAnalysis``. L1-L3 of the systems this project brings together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tightship.errors import BadInput, Unsupported
from tightship.frontends.hlo.forward import async_start, forwarded
from tightship.frontends.hlo.module import Computation, Instruction, Module, names_in
from tightship.frontends.hlo.post_order import computations_in_post_order, post_order
from tightship.frontends.hlo.shape import Index, Shape

__all__ = ["Buffer", "Node", "PointsTo", "Use", "points_to"]

SEQUENTIAL = {"while": ("condition", "body"), "call": ("to_apply",), "async-start": ("calls",)}


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
    def shape(self) -> Shape:
        return self.instruction.shape

    @property
    def is_root(self) -> bool:
        return self.computation.root is self.instruction

    def buffer(self, index: Index = ()) -> Buffer:
        return self.at[self.offset(index)]

    def offset(self, index: Index) -> int:
        """Where a position stands in the order of ``Shape.positions``."""
        at, shape = 0, self.shape
        for k in index:
            at, shape = at + shape.starts[k], shape.parts[k]
        return at

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
    """A logical buffer: defined by ``node`` at ``index``; ``positions`` are all that alias it, its own first."""

    id: int
    node: Node
    index: Index
    shape: Shape
    phi: bool = False
    inputs: list[Buffer] = field(default_factory=list)
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
    """``buffers`` by id; ``nodes`` by computation, in the order of the text; ``callers`` of each computation
    that runs sequentially; ``embedded``: computations applied element by element. ``notes`` say what had to be
    assumed."""

    module: Module
    buffers: tuple[Buffer, ...]
    nodes: Mapping[str, tuple[Node, ...]]
    callers: Mapping[str, Node]
    sequential: tuple[Computation, ...]
    embedded: tuple[Computation, ...]
    notes: tuple[str, ...] = ()

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


def points_to(module: Module) -> PointsTo:
    """Raises ``Unsupported`` when a computation is run from several places (XLA clones those before it
    schedules), ``BadInput`` for shapes without a size."""
    return _Analysis(module).run()


def branches(i: Instruction) -> tuple[str, ...]:
    """The computations of a conditional, in the order of its operands after the first."""
    listed = i.attribute("branch_computations")
    if listed:
        return names_in(listed)
    return (*names_in(i.attribute("true_computation")), *names_in(i.attribute("false_computation")))


def runs(i: Instruction) -> tuple[str, ...]:
    """Computations an instruction runs one after another with its own operands (not element by element)."""
    if i.opcode == "conditional":
        return branches(i)
    return tuple(n for key in SEQUENTIAL.get(i.opcode, ()) for n in names_in(i.attribute(key)))


class _Analysis:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.nodes: dict[str, tuple[Node, ...]] = {}
        self.named: dict[str, dict[str, Node]] = {}
        self.callers: dict[str, Node] = {}
        self.made: list[Buffer] = []
        self.phis: list[Buffer] = []
        self.notes: dict[str, None] = {}

    def run(self) -> PointsTo:
        order = computations_in_post_order(self.module)
        self._number(order)
        sequential, embedded = self._contexts(order)
        for c in embedded:
            for node in self.nodes[c.name]:
                self._visit(node)
        self._computation(self.module.entry)
        self._optimise()
        numbered = self._ids(order)
        self._positions(numbered)
        self._find_uses(numbered)
        return PointsTo(
            self.module,
            tuple(numbered),
            self.nodes,
            self.callers,
            tuple(sequential),
            tuple(embedded),
            tuple(self.notes),
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
                    raise BadInput(error.rule, error.value, place) from None
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
                "give each call a copy of its own, as XLA does before it schedules",
            )

    # --- what stands where -------------------------------------------------------------------------------

    def _new(self, node: Node, index: Index, shape: Shape, phi: bool = False) -> Buffer:
        buffer = Buffer(-1, node, index, shape, phi)
        (self.phis if phi else self.made).append(buffer)
        return buffer

    def _define(self, node: Node) -> list[Buffer]:
        return [self._new(node, index, shape) for index, shape in node.shape.positions]

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
                    buffer.inputs.append(back)
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
        return self._async_start(node, result)

    def _parameter(self, c: Computation) -> Node:
        return self.named[c.name][c.parameters[0].name]

    def _visit(self, node: Node) -> None:
        """What an instruction that runs no computation points to, from its operands."""
        if node.shape.is_tuple and node.opcode in ("select", "tuple-select"):
            either = self._phi(node, [o.at for o in node.operands[1:]])
            node.at = [self._new(node, (), node.shape), *either[1:]]
            return
        node.at = self._made(node, lambda: forwarded(node))

    def _made(self, node: Node, given: Callable[[], list[Buffer | None]]) -> list[Buffer]:
        """What an instruction hands on, and a new buffer wherever it hands on nothing."""
        try:
            pairs = list(zip(node.shape.positions, given(), strict=True))
        except (IndexError, ValueError):
            rule = f"{node.opcode} {node.name!r} gives the parts of its operands that it hands on"
            raise BadInput(rule, str(node.shape), f"{self.module.file}:{node.instruction.line}") from None
        return [self._new(node, index, part) if b is None else b for (index, part), b in pairs]

    def _async_start(self, node: Node, result: list[Buffer]) -> list[Buffer]:
        return self._made(node, lambda: async_start(node, result))

    # --- phis that are only one buffer -------------------------------------------------------------------

    def _optimise(self) -> None:
        same: dict[Buffer, Buffer] = {}

        def real(buffer: Buffer) -> Buffer:
            while buffer in same:
                buffer = same[buffer]
            return buffer

        changed = True
        while changed:
            changed = False
            seen: set[Buffer] = set()
            for phi in self.phis:
                if phi in same:
                    continue
                phi.inputs = [b for b in dict.fromkeys(map(real, phi.inputs)) if b is not phi]
                if len(phi.inputs) == 1:
                    same[phi] = phi.inputs[0]
                    changed = True
                elif phi not in seen and _close(phi, real, seen, same):
                    changed = True
        self.phis = [p for p in self.phis if p not in same]
        for nodes in self.nodes.values():
            for node in nodes:
                node.at = [real(b) for b in node.at]

    # --- ids, positions, uses ------------------------------------------------------------------------------

    def _ids(self, order: Sequence[Computation]) -> list[Buffer]:
        """XLA's numbering: as defined in post order, then the phis."""
        rank: dict[Node, int] = {}
        for c in order:
            for i in post_order(c):
                rank[self.named[c.name][i]] = len(rank)
        offset = {b: b.node.offset(b.index) for b in (*self.made, *self.phis)}
        made = sorted(self.made, key=lambda b: (rank[b.node], offset[b]))
        phis = sorted(self.phis, key=lambda b: (rank[b.node], offset[b]))
        numbered = [*made, *phis]
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
    if user.opcode == "get-tuple-element":
        return not index or (user.is_root and index[0] == user.instruction.tuple_index)
    if user.opcode == "copy":
        return not index or user.is_root
    return user.opcode not in ("tuple", "domain") or user.is_root


def _close(phi: Buffer, real: object, seen: set[Buffer], same: dict[Buffer, Buffer]) -> bool:
    """Whether the phis reachable from ``phi`` join no more than one real buffer; they are it, then."""
    assert callable(real)
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
    for b in closure:
        if b.phi:
            same[b] = only
    return True
