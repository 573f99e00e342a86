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
from itertools import chain

from tightship.errors import BadInput, Unsupported
from tightship.frontends.hlo.buffers import Buffer, Node, PointsTo, Use
from tightship.frontends.hlo.forward import async_start, forwarded
from tightship.frontends.hlo.module import Computation, Module, runs
from tightship.frontends.hlo.phi import meant
from tightship.frontends.hlo.post_order import computations_in_post_order, post_order
from tightship.frontends.hlo.shape import Index, Shape

__all__ = ["points_to"]


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
        if node.shape.is_tuple and node.opcode in ("select", "tuple-select"):
            either = self._phi(node, [o.at for o in node.operands[1:]])
            node.at = [self._new(node, (), node.shape), *either[1:]]
            return
        node.at = self._made(node, lambda: forwarded(node.instruction, node.operands))

    def _made(self, node: Node, given: Callable[[], list[Buffer | None]]) -> list[Buffer]:
        """What an instruction hands on, and a new buffer wherever it hands on nothing."""
        try:
            pairs = list(zip(node.shape.positions, given(), strict=True))
        except (IndexError, ValueError):
            rule = f"{node.opcode} {node.name!r} gives the parts of its operands that it hands on"
            raise BadInput(rule, str(node.shape), f"{self.module.file}:{node.instruction.line}") from None
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
    if user.opcode == "get-tuple-element":
        return not index or (user.is_root and index[0] == user.instruction.tuple_index)
    if user.opcode == "copy":
        return not index or user.is_root
    return user.opcode not in ("tuple", "domain") or user.is_root
