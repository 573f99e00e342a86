"""A plan's order -> a TensorFlow Lite model, and on request the offsets that TensorFlow Lite Micro reads.

The order is written in place: the entries of a subgraph's list of operators change places, every other byte stays.
An interpreter runs operators in the order of the list.

Offsets are written as metadata ``OfflineMemoryAllocation``: 32-bit numbers, a version (0), the subgraph's index, how
many tensors the model has, and for each of them its first byte in the arena, -1 where the runtime places it
(tflite-micro, docs/memory_management.md). Tensor ``k`` of every subgraph reads number ``k``: where a subgraph that is
called has a tensor there that lies in the arena, the runtime places both. The tables that are new lie before the old
ones, to which a FlatBuffer's offsets, which only lead forward, still lead.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tightship.errors import BadInput, Unsupported
from tightship.files import write_file
from tightship.frontends.tflite import Operator, Program, Reader, Subgraph, Table
from tightship.graph import aligned
from tightship.plan import Buffer, Plan, Problem, Solution
from tightship.planners.packing import Search, pack
from tightship.planners.place.orders import by_size_then_start
from tightship.planners.place.problem import frame
from tightship.units import format_bytes

__all__ = ["METADATA", "Arenas", "arena_problem", "planned_model", "write_model"]

METADATA: Final = "OfflineMemoryAllocation"
_ALIGNMENT: Final = 16  # of tensors in TensorFlow Lite Micro's arena
_SHIFT: Final = 64  # what the old bytes move by is a multiple of it, so that all of them stay aligned


@dataclass(frozen=True)
class Arenas:
    """The bytes of the arena that a runtime lays a model's tensors out in: in the file's order ``before``, and as
    ``planned``, placed by the runtime or, with ``offsets``, ahead. ``kept``: the file's order, which needs less."""

    before: int
    planned: int
    offsets: bool
    kept: bool

    def rows(self) -> dict[str, Any]:
        order = "file" if self.kept else "plan"
        return {"arena_before": self.before, "arena_planned": self.planned, "order": order}

    def lines(self) -> list[str]:
        there = "with the offline plan" if self.offsets else "in the planned order"
        before, planned = format_bytes(self.before), format_bytes(self.planned)
        line = f"arena as the runtime places tensors {before}, {there} {planned}"
        return [f"{line}: written in the file's order" if self.kept else line]


def write_model(
    program: Program, plan: Plan, path: str | os.PathLike[str], *, offsets: bool = False
) -> Arenas:
    """Write the model as planned, complete or not at all. Raises as `planned_model`."""
    data, arenas = planned_model(program, plan, offsets=offsets)
    write_file(Path(path), data)
    return arenas


def planned_model(program: Program, plan: Plan, *, offsets: bool = False) -> tuple[bytes, Arenas]:
    """The bytes of the model with its operators in the plan's order, and what it takes; ``offsets``: with a place for
    each tensor. Without, a runtime places tensors by size, and the file's order stays where it takes less.

    Raises ``BadInput`` for a plan of another graph, ``Unsupported`` for plans that do more than order, and for files
    whose tables do not lie as FlatBuffers are written, or which hold data outside of their tables."""
    place, first = str(program.model.path), program.model.subgraphs[0]
    if plan.digest != program.graph.digest:
        raise BadInput(f"the plan was made for another graph, of digest {plan.digest[:12]}", place=place)
    if other := sorted({s.kind for s in plan.steps} - {"compute", "free"}):
        raise Unsupported(
            f"a step of kind {other[0]!r} in {place}", "operators of TensorFlow Lite run once each",
            "plan without --budget: the order alone",
        )  # fmt: skip
    order = [s.op for s in plan.steps if s.kind == "compute"]
    before = _by_size(arena_problem(first, range(len(order)))[0])
    if not offsets:
        planned = _by_size(arena_problem(first, order)[0])
        arenas = Arenas(before, planned, False, kept=planned > before)
        return _ordered(program, range(len(order)) if arenas.kept else order, place), arenas
    numbers, planned = _offsets(program, order)
    if kept := planned > before:
        order = list(range(len(order)))
        numbers, planned = _offsets(program, order)
    if planned >= 2**31:
        raise Unsupported(f"offsets in {place}", "an arena of more than 2 GiB", "write the order alone")
    content = struct.pack(f"<{3 + len(numbers)}i", 0, 0, len(numbers), *numbers)
    return _prefixed(_ordered(program, order, place), content, place), Arenas(before, planned, True, kept)


def _by_size(problem: Problem) -> int:
    """The arena of LiteRT's planner and of TensorFlow Lite Micro's: the largest first, each where it fits."""
    if not problem.buffers:
        return 0
    framed = frame(problem)
    offsets = framed.placer.pack(by_size_then_start(framed.arrays), best_fit=True)[0].tolist()
    return max(x + b.size for x, b in zip(offsets, problem.buffers, strict=True))


def _ordered(program: Program, order: Sequence[int], place: str) -> bytes:
    """The file with the entries of the first subgraph's operators in this order."""
    data, at = bytearray(program.model.data), program.model.subgraphs[0].listed
    tables = [at + 4 * k + struct.unpack_from("<I", data, at + 4 * k)[0] for k in range(len(order))]
    for k, o in enumerate(order):
        slot = at + 4 * k
        if tables[o] <= slot:
            raise Unsupported(
                f"the order of {place}", "its operators lie before the list of them", "convert it anew"
            )
        struct.pack_into("<I", data, slot, tables[o] - slot)
    return bytes(data)


# --- offsets ---


def arena_problem(
    graph: Subgraph, order: Sequence[int], left_out: frozenset[int] = frozenset()
) -> tuple[Problem, list[int]]:
    """What TensorFlow Lite Micro places for a subgraph, run in this order, and which tensors the first of these are:
    inputs from the start, results to the end, all others from who makes them to who reads them last. Behind them,
    the room that operators need while they run."""
    last = max(len(order), 1)
    since: dict[int, int] = dict.fromkeys(graph.inputs, 0)
    until: dict[int, int] = dict.fromkeys(graph.inputs, 1)
    for step, o in enumerate(order):
        operator = graph.operators[o]
        for t in (t for t in (*operator.outputs, *operator.intermediates) if t >= 0):
            since.setdefault(t, step)
            until[t] = max(until.get(t, 0), step + 1)
        for t in (t for t in operator.inputs if t in since):
            until[t] = max(until[t], step + 1)
    for t in (t for t in graph.outputs if t in since):
        until[t] = last
    tensors = [
        t
        for t in sorted(since)
        if t not in left_out
        and graph.tensors[t].nbytes
        and not graph.tensors[t].constant
        and not graph.tensors[t].variable
    ]
    buffers = [
        Buffer(str(t), since[t], until[t], aligned(graph.tensors[t].nbytes or 0, _ALIGNMENT)) for t in tensors
    ]
    for step, o in enumerate(order):
        if scratch := _scratch(graph, graph.operators[o]):
            buffers.append(Buffer(f"scratch of {o}", step, step + 1, aligned(scratch, _ALIGNMENT)))
    return Problem(tuple(buffers)), tensors


def _scratch(graph: Subgraph, operator: Operator) -> int:
    """The bytes that a kernel of TensorFlow Lite Micro asks of the arena while it runs: a transposed convolution of
    integers adds up its whole result in wider ones. The runtime places them where it finds room."""
    if operator.kind != "TRANSPOSE_CONV":
        return 0
    made = graph.tensors[operator.outputs[0]]
    return math.prod(made.shape) * {"int8": 4, "int16": 8}.get(made.dtype, 0)


def _offsets(program: Program, order: Sequence[int]) -> tuple[list[int], int]:
    """For each tensor of the model its first byte, -1 where the runtime places it; and the arena."""
    graph, *called = program.model.subgraphs
    problem, tensors = arena_problem(graph, order, _in_called(called))
    solution = pack(problem, search=Search(seconds=5.0)) if problem.buffers else Solution((), 0)
    numbers = [-1] * sum(len(g.tensors) for g in program.model.subgraphs)
    for t, offset in zip(tensors, solution.offsets, strict=False):  # scratch has no number
        numbers[t] = offset
    return numbers, solution.arena


def _in_called(called: Sequence[Subgraph]) -> frozenset[int]:
    """The numbers of tensors that subgraphs which are called have in the arena."""
    return frozenset(k for g in called for k, t in enumerate(g.tensors) if not t.constant and not t.variable)


def _prefixed(data: bytes, content: bytes, place: str) -> bytes:
    """The file with a new root before it, whose lists of buffers and metadata have one entry more."""
    root = Reader(data, place).table(0)
    if any(b.field(1) or b.field(2) for b in root.tables(4)) or root.field(8):
        raise Unsupported(f"offsets in {place}", "its weights lie behind its tables", "write the order alone")
    buffers = [t.start for t in root.tables(4)]
    metadata = [t for t in root.tables(6) if t.text(0) != METADATA]
    return _Prefix(data, root, buffers, [t.start for t in metadata]).joined(content)


class _Prefix:
    """New tables, then the old bytes. Positions of old tables are known once the size of the new ones is."""

    def __init__(self, data: bytes, root: Table, buffers: Sequence[int], metadata: Sequence[int]) -> None:
        self.data, self.root, self.buffers, self.metadata = data, root, buffers, metadata

    def joined(self, content: bytes) -> bytes:
        fields = {
            0: self.root.field(0),
            **{k: self.root.field(k) for k in (1, 2, 3, 5, 7) if self.root.field(k)},
        }
        directory = 8
        table = aligned(directory + 4 + 2 * 8, 4)
        slots = {k: table + 4 + 4 * i for i, k in enumerate(sorted({*fields, 4, 6}))}
        buffers = table + 4 + 4 * len(slots)
        metadata = buffers + 4 + 4 * (len(self.buffers) + 1)
        entry_directory = metadata + 4 + 4 * (len(self.metadata) + 1)  # of the metadata: name, buffer
        entry = aligned(entry_directory + 8, 4)
        name = entry + 12
        held_directory = aligned(name + 4 + len(METADATA) + 1, 4)  # of the buffer: data
        held = aligned(held_directory + 6, 4)
        bytes_at = aligned(held + 8 + 4, _ALIGNMENT) - 4  # the data themselves are aligned
        shift = aligned(bytes_at + 4 + len(content), _SHIFT)
        out = bytearray(shift)

        def put(form: str, at: int, *values: int) -> None:
            struct.pack_into(form, out, at, *values)

        put("<I", 0, table)
        out[4:8] = b"TFL3"
        last = max(slots)
        put("<HH", directory, 4 + 2 * (last + 1), 4 + 4 * len(slots))
        for k, slot in slots.items():
            put("<H", directory + 4 + 2 * k, slot - table)
        put("<i", table, table - directory)
        for k, old in fields.items():
            if k == 0:
                put("<I", slots[0], self.root.number(0, "<I"))
            else:
                put("<I", slots[k], shift + old + self.root.reader.number("<I", old) - slots[k])
        put("<I", slots[4], buffers - slots[4])
        put("<I", slots[6], metadata - slots[6])
        for at, old_tables, new in ((buffers, self.buffers, held), (metadata, self.metadata, entry)):
            put("<I", at, len(old_tables) + 1)
            for k, target in enumerate([*(shift + t for t in old_tables), new]):
                put("<I", at + 4 + 4 * k, target - (at + 4 + 4 * k))
        put("<HHHH", entry_directory, 8, 12, 4, 8)
        put("<iII", entry, entry - entry_directory, name - (entry + 4), len(self.buffers))
        put("<I", name, len(METADATA))
        out[name + 4 : name + 4 + len(METADATA)] = METADATA.encode()
        put("<HHH", held_directory, 6, 8, 4)
        put("<iI", held, held - held_directory, bytes_at - (held + 4))
        put("<I", bytes_at, len(content))
        out[bytes_at + 4 : bytes_at + 4 + len(content)] = content
        return bytes(out) + self.data
