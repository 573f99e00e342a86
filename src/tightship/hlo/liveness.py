"""When each logical buffer is alive: in a schedule, and in any order that is allowed.

In a schedule all sequential computations are flattened into one line of time: those run by ``call``, ``conditional``
and ``async-start`` stand before their callers, a loop's condition before its body before the loop. A buffer is alive
from its definition to its last use, both included; where members of one alias set follow one another, the earlier
ends where the later begins. Source: XLA, ``HloLiveRange``.

An *order* is what operands and control predecessors say, and any number of chains (instructions that run one after
another): none is the partial order of a program, one for each stream lets streams run side by side, one for each
computation is a schedule. Source: XLA, ``HloOrdering`` and ``BufferLiveness`` (L5-L7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

from tightship.cached import cached_property
from tightship.errors import BadInput
from tightship.hlo.alias import AliasSet, Sharing, alias_sets
from tightship.hlo.dataflow import Buffer, Node, PointsTo, points_to
from tightship.hlo.module import Computation, Module, runs

__all__ = ["LiveRanges", "Order", "Range", "joined", "live_ranges", "may_interfere", "over", "total"]


@dataclass(slots=True)
class Range:
    """Alive from ``start`` to ``end``, both included; ``last`` is where it was last used or seen."""

    start: int
    end: int
    last: tuple[Node, tuple[int, ...]]


@dataclass(frozen=True)
class LiveRanges:
    """``schedule``: all instructions in the order they run; ``spans``: [start, end) of each computation;
    ``ranges``: of every buffer of a sequential computation."""

    points: PointsTo
    sets: tuple[AliasSet, ...]
    schedule: tuple[Node, ...]
    spans: Mapping[str, tuple[int, int]]
    ranges: Mapping[Buffer, Range]

    @property
    def end(self) -> int:
        return len(self.schedule)

    def alive(self, buffers: Iterable[Buffer], gap: int = 0) -> list[tuple[int, int]]:
        """When some of the buffers is alive: [first, last], both included."""
        return joined(((r.start, r.end) for b in buffers if (r := self.ranges.get(b))), gap)

    def between(self, group: AliasSet) -> list[tuple[int, int]]:
        """When the place of an alias set is taken after an instruction: [start, end)."""
        return [(start, end) for start, end in self.alive(group.buffers) if end > start]

    @cached_property
    def time(self) -> Mapping[Node, int]:
        """When each instruction runs."""
        return {node: k for k, node in enumerate(self.schedule)}


def joined(spans: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Spans of time in order, those that overlap, touch or are at most ``gap`` apart made one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def live_ranges(module: Module) -> LiveRanges:
    """Aliasing and liveness of a scheduled module. Raises ``BadInput`` if it is not scheduled."""
    if not module.scheduled:
        fault = (
            "the module is not scheduled (no is_scheduled=true in its header); assign --order schedules it"
        )
        raise BadInput(fault, place=module.file or f"module {module.name!r}")
    points = points_to(module)
    sets = alias_sets(points)
    schedule, spans, contexts = _flatten(points)
    time = {node: k for k, node in enumerate(schedule)}
    ranges = _ranges(points, schedule, spans, time, contexts)
    _normalize(sets, ranges)
    return LiveRanges(points, sets, tuple(schedule), spans, ranges)


def _flatten(points: PointsTo) -> tuple[list[Node], dict[str, tuple[int, int]], dict[str, Node]]:
    schedule: list[Node] = []
    spans: dict[str, tuple[int, int]] = {}
    contexts: dict[str, Node] = {}

    def visit(c: Computation, context: Node | None) -> None:
        if c.name in spans:
            return
        if context is not None:
            contexts[c.name] = context
        start = len(schedule)
        spans[c.name] = (start, start)
        for node in points.nodes[c.name]:
            inner = node if node.opcode == "async-start" else context
            for callee in runs(node.instruction):
                visit(points.module.by_name[callee], inner)
            schedule.append(node)
        spans[c.name] = (start, len(schedule))

    visit(points.module.entry, None)
    return schedule, spans, contexts


def _ranges(
    points: PointsTo,
    schedule: Sequence[Node],
    spans: Mapping[str, tuple[int, int]],
    time: Mapping[Node, int],
    contexts: Mapping[str, Node],
) -> dict[Buffer, Range]:
    module = points.module
    aliased = {(number, index) for number, index, _ in module.aliases.values()}
    roots = {name: points.root(module.by_name[name]) for name in spans}
    ranges: dict[Buffer, Range] = {}
    for buffer in points.buffers:
        node = buffer.node
        name = node.computation.name
        if node not in time:
            continue
        start = spans[name][0] if node.opcode == "parameter" else time[node]
        end = spans[name][1] if node is roots[name] else time[node]
        if name in contexts:
            start, end = _asynchronous(contexts[name], time, spans, start, end)
        last = (node, buffer.index)
        for at, index in buffer.positions[1:]:
            if at not in time:
                continue
            moment = spans[at.computation.name][1] if at is roots[at.computation.name] else time[at]
            if moment > end:
                end, last = moment, (at, index)
        entry = node.opcode == "parameter" and node.computation is module.entry
        if entry and (node.instruction.parameter_number, buffer.index) not in aliased:
            end = len(schedule)
        else:
            end = max(end, _last_use(points, buffer, time))
        ranges[buffer] = Range(start, end, last)
    return ranges


def _last_use(points: PointsTo, buffer: Buffer, time: Mapping[Node, int]) -> int:
    last = -1
    for use in buffer.uses:
        node = use.node
        if node.opcode == "call":
            continue  # what it runs says when
        if node.opcode == "while":
            body = node.instruction.attribute("body").lstrip("%")
            node = next(n for n in points.nodes[body] if n.opcode == "parameter")
        last = max(last, time.get(node, -1))
    return last


def _asynchronous(
    caller: Node, time: Mapping[Node, int], spans: Mapping[str, tuple[int, int]], start: int, end: int
) -> tuple[int, int]:
    """What runs asynchronously is alive until it is waited for."""
    done, seen = caller, {caller}
    while (
        after := next((u for u in done.users if u.opcode.startswith("async-")), None)
    ) and after not in seen:
        done = after
        seen.add(after)
    return start, max(end, time.get(done, end))


def _normalize(sets: Sequence[AliasSet], ranges: dict[Buffer, Range]) -> None:
    for group in sets:
        known = [(ranges[b].start, ranges[b].end, b.id, b) for b in group.buffers if b in ranges]
        if len(known) < 2:
            continue
        ordered = [ranges[b] for *_, b in sorted(known, key=lambda k: k[:3])]
        for first, second in pairwise(ordered):
            second.end = max(first.end, second.end)
            first.end = min(first.end, second.start)


def over(live: LiveRanges, old: Buffer, new: Buffer, sharing: Sharing) -> bool:
    """Whether the result ``new`` may be written over ``old``, which ends where it begins."""
    user = new.node
    if old is new or user.opcode == "copy":
        return False
    where = [live.ranges[old].last, (old.node, old.index)]
    return any(n in user.operands and sharing.allowed(n, i, user, new.index) for n, i in where)


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
        for node in TopologicalSorter(waits).static_order():  # the text's order may say less than the chains
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
