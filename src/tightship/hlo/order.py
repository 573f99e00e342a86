"""Who runs before whom in every execution that is allowed, and which buffers may then be alive at once.

An order is what operands and control predecessors say, and any number of *chains* (instructions that run one after
another): none at all is the partial order of a program, one for each stream lets streams run side by side, and one
for each computation is a schedule. Source: XLA, ``HloOrdering`` and ``BufferLiveness``. L5-L7 of the systems this
project brings together: liveness keeps nothing for any buffer, it asks points-to sets and the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tightship.hlo.dataflow import Buffer, Node, PointsTo
from tightship.hlo.in_place import Sharing

__all__ = ["Order", "may_interfere", "total"]


class Order:
    """``chains`` are names of instructions, each within one computation."""

    def __init__(self, points: PointsTo, chains: Sequence[Sequence[str]] = ()) -> None:
        self.points = points
        self._bit: dict[Node, int] = {}
        self._earlier: dict[Node, int] = {}
        for c in points.sequential:
            nodes = points.nodes[c.name]
            self._close(nodes, [chain for chain in chains if chain and chain[0] in c.by_name])

    def before(self, a: Node, b: Node) -> bool:
        """Whether ``a`` has ended before ``b`` begins, in every execution. Those in one branch of a call are as far
        as those that call them; of two within one caller, in different computations of it, nothing is known."""
        a, b = self._meet(a, b)
        return a is not b and a.computation is b.computation and bool(self._earlier[b] >> self._bit[a] & 1)

    def _close(self, nodes: Sequence[Node], chains: Sequence[Sequence[str]]) -> None:
        named = {n.name: n for n in nodes}
        waits: dict[Node, list[Node]] = {
            n: [*n.operands, *(named[p] for p in n.instruction.control_predecessors)] for n in nodes
        }
        for chain in chains:
            for first, second in pairwise(chain):
                waits[named[second]].append(named[first])
        for k, node in enumerate(nodes):
            self._bit[node] = k
        for node in _sorted(nodes, waits):
            earlier = 0
            for w in waits[node]:
                earlier |= self._earlier[w] | 1 << self._bit[w]
            self._earlier[node] = earlier

    def _meet(self, a: Node, b: Node) -> tuple[Node, Node]:
        """The two instructions of one computation that run ``a`` and ``b``, or are them."""
        above = {n.computation.name: n for n in self._callers(b)}
        for n in self._callers(a):
            if n.computation.name in above:
                return n, above[n.computation.name]
        return a, b

    def _callers(self, node: Node) -> Iterator[Node]:
        yield node
        while (caller := self.points.callers.get(node.computation.name)) is not None:
            yield caller
            node = caller


def _sorted(nodes: Sequence[Node], waits: dict[Node, list[Node]]) -> list[Node]:
    """After all they wait for; the order of the text may say less than the chains."""
    done: dict[Node, None] = {}
    for first in nodes:
        stack = [(first, False)]
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if ready:
                done[node] = None
            else:
                stack.append((node, True))
                stack += [(w, False) for w in waits[node] if w not in done]
    return list(done)


def total(points: PointsTo) -> Order:
    """The order of the text: one chain for each computation."""
    return Order(points, [[i.name for i in c.instructions] for c in points.sequential])


def may_interfere(order: Order, sharing: Sharing, a: Buffer, b: Buffer) -> bool:
    """Whether the bytes of two buffers may be needed at the same time in some execution: unless one is dead before
    the other is defined, or is last used by what may write the other over it."""
    return not (_dead_before(order, sharing, a, b) or _dead_before(order, sharing, b, a))


def _dead_before(order: Order, sharing: Sharing, old: Buffer, new: Buffer) -> bool:
    entry = order.points.module.entry
    if old in order.points.live_out or (old.node.opcode == "parameter" and old.node.computation is entry):
        return False
    users = {u.node for u in old.uses} | {n for n, _ in old.positions}
    return all(_ended(order, sharing, old, user, new) for user in users)


def _ended(order: Order, sharing: Sharing, old: Buffer, user: Node, new: Buffer) -> bool:
    if user is new.node and user is not old.node:
        over = old.node in user.operands and user.opcode != "copy"
        return over and sharing.allowed(old.node, old.index, user, new.index)
    return order.before(user, new.node)
