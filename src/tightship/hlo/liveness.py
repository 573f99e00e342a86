"""When each logical buffer is alive: the schedule of all sequential computations flattened into one line of time.

Computations run by ``call``, ``conditional`` and ``async-start`` stand before their callers, a loop's condition
before its body before the loop. A buffer is alive from its definition to its last use, both included; where
members of one alias set follow one another, the earlier ends where the later begins. Source: XLA,
``HloLiveRange``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tightship.errors import BadInput
from tightship.hlo.alias import AliasSet, alias_sets
from tightship.hlo.dataflow import Buffer, Node, PointsTo, points_to
from tightship.hlo.module import Computation, Module, runs

__all__ = ["LiveRanges", "Range", "live_ranges"]


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

    @cached_property
    def time(self) -> Mapping[Node, int]:
        """When each instruction runs."""
        return {node: k for k, node in enumerate(self.schedule)}


def live_ranges(module: Module) -> LiveRanges:
    """Aliasing and liveness of a scheduled module. Raises ``BadInput`` if it is not scheduled."""
    if not module.scheduled:
        rule = "live ranges need a schedule: is_scheduled=true in the module's header (--order makes one)"
        raise BadInput(rule, place=module.file or f"module {module.name!r}")
    points = points_to(module)
    sets = alias_sets(points)
    schedule, spans, contexts = _flatten(points)
    time = {node: k for k, node in enumerate(schedule)}
    ranges = _ranges(points, schedule, spans, time, contexts)
    _normalise(sets, ranges)
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


def _normalise(sets: Sequence[AliasSet], ranges: dict[Buffer, Range]) -> None:
    for group in sets:
        known = [(ranges[b].start, ranges[b].end, b.id, b) for b in group.buffers if b in ranges]
        if len(known) < 2:
            continue
        ordered = [ranges[b] for *_, b in sorted(known, key=lambda k: k[:3])]
        for first, second in pairwise(ordered):
            second.end = max(first.end, second.end)
            first.end = min(first.end, second.start)
