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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tightship.errors import BadInput, Unsupported
from tightship.files import write_file
from tightship.frontends.tflite import Model, Operator, Program, Reader, Subgraph, Table
from tightship.graph import aligned
from tightship.plan import Buffer, Plan, Problem
from tightship.planners.packing import Search, pack
from tightship.planners.place.orders import by_size_then_start
from tightship.planners.place.problem import frame
from tightship.units import format_bytes

__all__ = ["METADATA", "Arenas", "arena_problem", "planned_model", "write_model"]

METADATA: Final = "OfflineMemoryAllocation"
_ALIGNMENT: Final = 16  # of tensors in TensorFlow Lite Micro's arena
Key = tuple[int, int]
"""A subgraph's index, and that of one of its tensors."""
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
    place = str(program.model.path)
    if plan.digest != program.graph.digest:
        raise BadInput(f"the plan was made for another graph, of digest {plan.digest[:12]}", place=place)
    if other := sorted({s.kind for s in plan.steps} - {"compute", "free"}):
        raise Unsupported(
            f"a step of kind {other[0]!r} in {place}", "operators of TensorFlow Lite run once each",
            "plan without --budget: the order alone",
        )  # fmt: skip
    order = [s.op for s in plan.steps if s.kind == "compute"]
    lives = _Lives.of(program.model, range(len(order)))
    before = _around(lives, {}, best_fit=not offsets)
    if not offsets:
        planned = _around(_Lives.of(program.model, order), {}, best_fit=True)
        arenas = Arenas(before, planned, False, kept=planned > before)
        return _ordered(program, range(len(order)) if arenas.kept else order, place), arenas
    numbers, planned = _offsets(program.model, _Lives.of(program.model, order))
    if kept := planned > before:
        order = list(range(len(order)))
        numbers, planned = _offsets(program.model, lives)
    if planned >= 2**31:
        raise Unsupported(f"offsets in {place}", "an arena of more than 2 GiB", "write the order alone")
    content = struct.pack(f"<{3 + len(numbers)}i", 0, 0, len(numbers), *numbers)
    return _prefixed(_ordered(program, order, place), content, place), Arenas(before, planned, True, kept)


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


def arena_problem(model: Model, order: Sequence[int]) -> tuple[Problem, list[Key]]:
    """What TensorFlow Lite Micro places for a model whose first subgraph is run in this order, and which tensors the
    first of these are: inputs from the start, results to the end, all others from who makes them to who reads them
    last. Behind them, the room that operators need while they run."""
    lives = _Lives.of(model, order)
    return lives.problem, lives.keys


class _Lives:
    """The steps in which each tensor lies in the arena. An operator that calls subgraphs takes their steps, too, one
    subgraph after the other: the arena is theirs as well."""

    def __init__(self, model: Model) -> None:
        self.model, self.now = model, 0
        self.since: dict[Key, int] = {}
        self.until: dict[Key, int] = {}
        self.scratch: list[Buffer] = []
        self.keys: list[Key] = []
        self.problem = Problem(())

    @classmethod
    def of(cls, model: Model, order: Sequence[int]) -> _Lives:
        lives = cls(model)
        lives.run(0, order)
        lives.keys = [key for key in sorted(lives.since) if lives.size(key)]
        tensors = [
            Buffer(f"{k}.{t}", lives.since[k, t], lives.until[k, t], lives.size((k, t)))
            for k, t in lives.keys
        ]
        lives.problem = Problem((*tensors, *lives.scratch))
        return lives

    def run(self, k: int, order: Sequence[int]) -> None:
        g = self.model.subgraphs[k]
        self.made(k, g.inputs)
        for o in order:
            self.now += 1
            began, operator = self.now, g.operators[o]
            self.made(k, (*operator.outputs, *operator.intermediates))
            for c in operator.calls:
                self.run(c, range(len(self.model.subgraphs[c].operators)))
            self.used(k, (*operator.inputs, *operator.outputs, *operator.intermediates))
            if scratch := _scratch(g, operator):
                size = aligned(scratch, _ALIGNMENT)
                self.scratch.append(Buffer(f"scratch of {k}.{o}, {began}", began, self.now + 1, size))
        self.used(k, g.outputs)

    def made(self, k: int, tensors: Sequence[int]) -> None:
        for t in tensors:
            if t >= 0:
                self.since.setdefault((k, t), self.now)
        self.used(k, tensors)

    def used(self, k: int, tensors: Sequence[int]) -> None:
        self.until.update({(k, t): self.now + 1 for t in tensors if (k, t) in self.since})

    def size(self, key: Key) -> int:
        t = self.model.subgraphs[key[0]].tensors[key[1]]
        return 0 if t.constant or t.variable else aligned(t.nbytes or 0, _ALIGNMENT)


def _scratch(graph: Subgraph, operator: Operator) -> int:
    """The bytes that a kernel of TensorFlow Lite Micro asks of the arena while it runs: a transposed convolution of
    integers adds up its whole result in wider ones. The runtime places them where it finds room."""
    if operator.kind != "TRANSPOSE_CONV":
        return 0
    made = graph.tensors[operator.outputs[0]]
    return math.prod(made.shape) * {"int8": 4, "int16": 8}.get(made.dtype, 0)


def _offsets(model: Model, lives: _Lives) -> tuple[list[int], int]:
    """For each tensor of the model its first byte, -1 where the runtime places it; and the arena. What the runtime
    has to place leaves few offsets worth giving: none are where it does as well alone."""
    others = _in_called(model.subgraphs[1:])
    ours = [n for n, (k, t) in enumerate(lives.keys) if k == 0 and t not in others]
    every = range(len(lives.problem.buffers))
    tried: list[dict[int, int]] = [{}] if others else []
    for chosen in dict.fromkeys(((*ours, *every[len(lives.keys) :]), tuple(every))):
        buffers = tuple(lives.problem.buffers[n] for n in chosen)
        packed = pack(Problem(buffers), search=Search(seconds=5.0)).offsets if buffers else ()
        at = dict(zip(chosen, packed, strict=True))
        tried.append({n: at[n] for n in ours})
    placed = min(tried, key=lambda p: _around(lives, p, best_fit=False))
    numbers = [-1] * sum(len(g.tensors) for g in model.subgraphs)
    for n, offset in placed.items():
        numbers[lives.keys[n][1]] = offset
    return numbers, _around(lives, placed, best_fit=False)


def _around(lives: _Lives, placed: dict[int, int], *, best_fit: bool) -> int:
    """The arena of a runtime that leaves these buffers where they are placed and lays out the others, the largest
    first, each where it fits: LiteRT in the smallest hole, TensorFlow Lite Micro in the first one."""
    buffers = lives.problem.buffers
    if not buffers:
        return 0
    framed = frame(Problem(tuple(replace(b, pinned=placed.get(n)) for n, b in enumerate(buffers))))
    offsets = framed.placer.pack(by_size_then_start(framed.arrays), best_fit=best_fit)[0].tolist()
    return max(x + b.size for x, b in zip(offsets, buffers, strict=True))


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
