"""The bytes a module needs as XLA's rematerialization counts them: points-to sets, buffers, and peaks (R1-R4, R14).

A buffer is defined by an instruction at a position of its result; tables of addresses of tuples are buffers too.
Instructions that only hand addresses on (tuple, get-tuple-element, bitcast, …) point to buffers of others. Source:
``TuplePointsToAnalysis`` and ``MemoryUsageTracker`` of OpenXLA. It is not the dataflow analysis of the buffer
assignment (``hlo.dataflow``): collectives and what runs asynchronously forward otherwise there. A buffer is charged
when its instruction begins and given back when the last of its users ends; those of parameters and of the
computation's result count nothing, since the caller owns them (R3).

`peak_of` is the peak as every verb counts it, with the module's results, without its parameters, and says who makes
it up. Tables of addresses count, too, which graphs do not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from tightship.cached import cached_property
from tightship.errors import BadInput
from tightship.graph import Graph, Storage, Value
from tightship.hlo.module import Computation, Instruction, Module, declared
from tightship.hlo.shape import Index, Shape
from tightship.plan import Plan
from tightship.simulate import baseline, replay

__all__ = [
    "HOST",
    "Buffer",
    "Interval",
    "Peak",
    "PointsTo",
    "Resident",
    "Use",
    "buffers",
    "bytes_in_use",
    "device_bytes",
    "live_ranges",
    "module_peak",
    "peak_of",
    "peaks",
    "plan_with_results",
    "require_schedule",
    "result_bytes",
    "sequential_order",
    "with_results",
]


HOST = 5
"""XLA's number of the host's memory in a layout."""

Buffer = tuple[str, Index]
"""The instruction that defines it and the position of its result."""


def device_bytes(shape: Shape) -> int:
    """Bytes of a buffer in the device's memory: those in the host's (``S(5)``) count nothing."""
    return 0 if shape.memory_space == HOST else shape.nbytes


def require_schedule(module: Module) -> None:
    """Raises ``BadInput`` when a module has no schedule."""
    if not module.scheduled:
        raise BadInput(f"module {module.name!r} has no schedule; it needs is_scheduled=true")


# -- points-to ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PointsTo:
    """Buffers by instruction and position; positions that more than one buffer may stand at do not occur."""

    computation: Computation

    @cached_property
    def sets(self) -> Mapping[str, Mapping[Index, Buffer]]:
        found: dict[str, Mapping[Index, Buffer]] = {}
        for i in self.computation.instructions:
            given = _forwarded(i, found)
            found[i.name] = {x: given.get(x, (i.name, x)) for x, _ in i.shape.positions}
        return found

    @cached_property
    def places(self) -> Mapping[Buffer, tuple[Buffer, ...]]:
        """Every instruction and position at which a buffer is reached, in the order of the schedule."""
        found: dict[Buffer, list[Buffer]] = {}
        for name, rows in self.sets.items():
            for index, buffer in rows.items():
                found.setdefault(buffer, []).append((name, index))
        return {b: tuple(rows) for b, rows in found.items()}

    @cached_property
    def live_out(self) -> frozenset[Buffer]:
        return frozenset(self.sets[self.computation.root.name].values())


def _forwarded(i: Instruction, sets: Mapping[str, Mapping[Index, Buffer]]) -> dict[Index, Buffer]:
    """The positions of a result that an instruction does not make itself."""
    if not i.operands:
        return {}
    first = sets[i.operands[0]]
    if i.row.is_operand:
        return dict(first)
    match i.opcode:
        case "get-tuple-element":
            return _part(first, (i.tuple_index,))
        case "tuple":
            return {(k, *x): b for k, name in enumerate(i.operands) for x, b in sets[name].items()}
        case "copy":
            return {x: b for x, b in first.items() if x}
        case "copy-start":
            return {(1, *x): b for x, b in first.items()}
        case "copy-done":
            return _part(first, (0,))
        case "async-start":
            return {(0, k, *x): b for k, name in enumerate(i.operands) for x, b in sets[name].items()}
        case "async-done":
            return _part(first, (1,))
        case "send":
            return {(0, *x): b for x, b in first.items()}
        case "recv-done":
            return {(0, *x): b for x, b in _part(first, (0,)).items()}
        case "fusion" | "custom-call":
            return {out: sets[i.operands[k]][at] for k, at, out in declared(i) if k < len(i.operands)}
    return {}


def _part(rows: Mapping[Index, Buffer], at: Index) -> dict[Index, Buffer]:
    n = len(at)
    return {x[n:]: b for x, b in rows.items() if x[:n] == at}


def _unread(module: Module, user: Instruction, operand: str, index: Index) -> bool:
    """Whether ``user`` has ``operand`` but cannot look at the buffer at this position of it."""
    if user.opcode == "get-tuple-element":
        return bool(index)
    if user.opcode == "fusion" and user.attribute("kind") == "kLoop" and not index:
        inner = module.by_name.get(user.attribute("calls").lstrip("%"))
        if inner is not None and inner.parameters:
            p = inner.parameters[user.operands.index(operand)]
            return not inner.users[p.name] and not p.root
    return False


# -- buffers -----------------------------------------------------------------------------------------------------


class Use(NamedTuple):
    """Instruction ``user`` reads a buffer through operand ``operand``; ``part`` is the buffer's place in its
    instruction's tuple, if it is part of one."""

    user: str
    operand: int
    part: int | None


@dataclass(slots=True)
class Interval:
    """A buffer that ``definer`` makes at ``index`` of its result, and its uses through any alias (R2); ``indirect``
    ones go through more than bitcasts and get-tuple-elements, or come after something has written over the buffer.
    ``size`` is 0 where the caller owns it. ``writers`` write their result over it."""

    definer: str
    index: Index
    shape: Shape
    uses: list[Use]
    live_out: bool
    indirect: bool
    size: int
    writers: tuple[str, ...] = ()


def buffers(module: Module, computation: Computation, points: PointsTo) -> Mapping[Buffer, Interval]:
    """The buffer behind every position that an instruction defines. A loop makes none: its results are the buffers
    of its operand, and users of those are users of these (R4)."""
    found: dict[Buffer, Interval] = {}
    for i in computation.instructions:
        for index, part in i.shape.positions:
            at = i.name, index
            if points.sets[i.name][index] != at:
                continue
            uses, indirect = _uses(module, points, at)
            writers = _writers(points, at)
            out = at in points.live_out
            if i.opcode != "while":
                size = 0 if out or i.opcode == "parameter" else device_bytes(part)
                found[at] = Interval(i.name, index, part, uses, out, indirect or bool(writers), size, writers)
                continue
            known = found[at] = found[points.sets[i.operands[0]][index]]
            known.indirect, known.writers = True, (*known.writers, *writers)
            if out:
                known.live_out, known.size = True, 0
            users = {use.user for use in known.uses}
            for use in uses:
                if use.user not in users:
                    users.add(use.user)
                    known.uses.append(use)
    return found


def _writers(points: PointsTo, buffer: Buffer) -> tuple[str, ...]:
    """What declares that it writes its result over the buffer. The contents are others from there on: a clone of the
    definer does not make those, and a clone of an earlier reader would read them."""
    rows = (points.computation.by_name[name] for name, _ in points.places[buffer] if name != buffer[0])
    return tuple(i.name for i in rows if i.opcode in ("fusion", "custom-call"))


def _uses(module: Module, points: PointsTo, buffer: Buffer) -> tuple[list[Use], bool]:
    inside = points.computation
    part = buffer[1][-1] if len(buffer[1]) == 1 else None
    uses: dict[Use, None] = {}
    indirect = False
    for name, index in points.places[buffer]:
        for user in map(inside.by_name.__getitem__, inside.users[name]):
            if _unread(module, user, name, index):
                continue
            indirect |= name != buffer[0] and not inside.by_name[name].row.passes_on
            uses.update({Use(user.name, k, part): None for k, o in enumerate(user.operands) if o == name})
    return list(uses), indirect


# -- peaks -------------------------------------------------------------------------------------------------------


def result_bytes(module: Module) -> int:
    """Bytes of the module's result, tables of addresses included."""
    return sum(device_bytes(part) for _, part in module.entry.root.shape.positions)


def module_peak(module: Module) -> int:
    """Bytes the module needs beyond its parameters."""
    return peaks(module)[module.entry.name] + result_bytes(module)


def peaks(module: Module) -> Mapping[str, int]:
    """Bytes that each computation run in sequence needs beyond its parameters and its result."""
    found: dict[str, int] = {}
    for name in sequential_order(module):
        found[name] = max(bytes_in_use(module, module.by_name[name], found))
    return found


def bytes_in_use(module: Module, computation: Computation, callees: Mapping[str, int]) -> list[int]:
    """Bytes while each instruction runs; the computations it holds need ``callees``."""
    change = [0] * (len(computation.instructions) + 1)
    for b, begin, end in live_ranges(module, computation):
        change[begin] += b.size
        change[end + 1] -= b.size
    held = (sum(callees[c] for c in i.called) if i.row.holds else 0 for i in computation.instructions)
    return [use + more for use, more in zip(accumulate(change), held, strict=False)]


def live_ranges(module: Module, computation: Computation) -> list[tuple[Interval, int, int]]:
    """Every buffer with the positions of the instruction that defines it and of its last user."""
    at = {i.name: k for k, i in enumerate(computation.instructions)}
    known = {id(b): b for b in buffers(module, computation, PointsTo(computation)).values()}
    return [
        (b, at[b.definer], max((at[use.user] for use in b.uses), default=at[b.definer]))
        for b in known.values()
    ]


def sequential_order(module: Module) -> list[str]:
    """The entry and what it runs in sequence (loops, branches, calls), callees before their callers.

    Raises ``BadInput`` when a computation runs itself.
    """
    done: dict[str, None] = {}
    open_: dict[str, Iterator[str]] = {module.entry.name: _callees(module, module.entry.name)}
    while open_:
        name = next(reversed(open_))
        inner = next((c for c in open_[name] if c not in done), None)
        if inner is None:
            done[name] = None
            del open_[name]
        elif inner in open_:
            raise BadInput(f"computation {inner!r} calls itself, through {name!r}")
        else:
            open_[inner] = _callees(module, inner)
    return list(done)


def _callees(module: Module, name: str) -> Iterator[str]:
    return (c for i in module.by_name[name].instructions if i.row.holds for c in i.called)


@dataclass(frozen=True)
class Resident:
    """The buffer that ``instruction`` of ``computation`` defines at ``index``; ``result``: of the module."""

    computation: str
    instruction: str
    index: Index
    nbytes: int
    result: bool = False


@dataclass(frozen=True)
class Peak:
    """``instruction`` of ``computation`` runs when the most bytes are resident: those of ``residents``."""

    computation: str
    instruction: str
    residents: tuple[Resident, ...]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.residents)


def peak_of(module: Module) -> Peak:
    """Where a scheduled module needs the most bytes, and what they are."""
    entry, root = module.entry, module.entry.root
    made = PointsTo(entry).sets[root.name]
    parts = [(made[index], device_bytes(part)) for index, part in root.shape.positions]
    results = (Resident(entry.name, *buffer, nbytes, True) for buffer, nbytes in parts if nbytes)
    inside = _peak_in(module, entry, peaks(module))
    return replace(inside, residents=(*results, *inside.residents))


def _peak_in(module: Module, c: Computation, least: Mapping[str, int]) -> Peak:
    """The same of one computation, beyond its parameters and its result; what it calls needs ``least``."""
    use = bytes_in_use(module, c, least)
    at = use.index(max(use))
    i = c.instructions[at]
    alive = (b for b, begin, end in live_ranges(module, c) if begin <= at <= end and b.size)
    residents = [Resident(c.name, b.definer, b.index, b.size) for b in alive]
    called = i.called if i.row.holds else ()
    inside = [_peak_in(module, module.by_name[x], least) for x in called if least[x]]
    deepest = max(inside, key=lambda p: p.nbytes, default=Peak(c.name, i.name, ()))
    return replace(deepest, residents=(*residents, *(r for p in inside for r in p.residents)))


def with_results(module: Module, graph: Graph) -> Graph:
    """The graph of a module's entry with the bytes it does not count: results, and tables of addresses."""
    nbytes = module_peak(module) - replay(graph, baseline(graph)).peak
    last = len(graph.storages)
    return replace(
        graph,
        storages=(*graph.storages, Storage("results", nbytes, "output")),
        values=(*graph.values, Value("results", last)),
        inputs=(*graph.inputs, len(graph.values)),
    )


def plan_with_results(module: Module, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """``graph`` and its plan with the same bytes; no bound is claimed of tables of addresses."""
    counted = with_results(module, graph)
    more = counted.storages[-1].size
    made = replace(
        plan,
        digest=counted.digest,
        static=counted.static_bytes,
        peak=plan.peak + more,
        peak_before=plan.peak_before + more,
        budget=None if plan.budget is None else plan.budget + more,
        lower_bound=plan.lower_bound + result_bytes(module),
    )
    return counted, made
