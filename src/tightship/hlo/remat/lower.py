"""One computation of HLO as a Graph whose peak is the one XLA's rematerialization counts, up to tables of addresses.

Every instruction that does something is an op; those that only hand addresses on (tuple, get-tuple-element, bitcast)
are none: they are written anew wherever they are needed. Storages are the arrays of results; the caller's
(parameters, the computation's result) have no bytes (R3). A loop writes to the storages of its operand (R4).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tightship.analysis.bounds import lower_bound
from tightship.analysis.packing import packings
from tightship.cached import cached_property
from tightship.graph import Graph, Op, Storage, Value
from tightship.hlo.module import Computation, Instruction, Module
from tightship.hlo.remat.cost import ACCELERATOR, Work, work_of
from tightship.hlo.remat.peak import Buffer, PointsTo, device_bytes, result_bytes, sequential_order
from tightship.hlo.shape import Shape
from tightship.plan import Step

__all__ = ["Lowering", "bound", "bounds", "may_repeat", "repeatable", "without_dead"]

_TYPES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
"""Element types by the names that graphs have for them, as far as codecs know them."""


@dataclass(frozen=True)
class Lowering:
    """Computation ``name`` of ``module`` as a graph. ``callees[name]`` is the peak of each one it runs, ``work``
    what instructions cost; ``libraries``: whether calls of libraries without effects may run again. ``once`` names
    others that do not, besides those whose one run is tied to what others do; None: these may, too."""

    module: Module
    name: str
    callees: Mapping[str, int]
    work: Work
    libraries: bool = True
    once: frozenset[str] | None = None

    @cached_property
    def computation(self) -> Computation:
        return self.module.by_name[self.name]

    @cached_property
    def points(self) -> PointsTo:
        return PointsTo(self.computation)

    @cached_property
    def ops(self) -> tuple[Instruction, ...]:
        """The instructions that are ops, in the graph's order."""
        return tuple(
            i for i in self.computation.instructions if i.row.makes != "addresses" and i.opcode != "parameter"
        )

    @cached_property
    def storage(self) -> Mapping[Buffer, int]:
        """The storage of every array that some instruction makes; a loop's are its operand's."""
        found: dict[Buffer, int] = {}
        n = 0
        for i in self.computation.instructions:
            for index, part in i.shape.leaves:
                buffer = self.points.sets[i.name][index]
                if buffer != (i.name, index) or part.dtype in ("token", "opaque"):
                    continue
                if i.opcode == "while":
                    found[buffer] = found[self.points.sets[i.operands[0]][index]]
                else:
                    found[buffer] = n
                    n += 1
        return found

    def leaves(self, name: str) -> list[int]:
        """Storages of the arrays of an instruction's result."""
        rows = self.points.sets[name]
        shape = self.computation.by_name[name].shape
        buffers = [rows[index] for index, _ in shape.leaves]
        return list(dict.fromkeys(self.storage[b] for b in buffers if b in self.storage))

    @cached_property
    def graph(self) -> Graph:
        out = {self.storage[b] for b in self.points.live_out if b in self.storage}
        storages = self._storages(out)
        given = tuple(s for i in self.computation.parameters for s in self.leaves(i.name))
        number = {i.name: k for k, i in enumerate(self.ops)}
        defined = set(given)
        ops = []
        for i in self.ops:
            ops.append(self._op(i, defined, number))
            defined.update(ops[-1].outputs)
        values, outs = self._values(storages), tuple(sorted(out))
        return Graph(tuple(ops), values, storages, given, outs, self.name, machine=ACCELERATOR)

    @cached_property
    def stuck(self) -> frozenset[int]:
        """Storages that cannot be copied out or packed and come back as another array: a loop continues them, or
        something else than what only hands addresses on reaches them."""
        found: set[int] = set()
        for name, rows in self.points.sets.items():
            i = self.computation.by_name[name]
            whole = i.row.makes != "addresses" and name in self.tied_tuples
            for index, buffer in rows.items():
                s = self.storage.get(buffer)
                if s is None or i.row.makes == "addresses":
                    continue
                if whole or buffer != (name, index) or i.opcode == "while" or len(index) > 1:
                    found.add(s)
        return frozenset(found)

    def waiting(self, allow: Sequence[str], *, lossy: bool = False) -> Mapping[int, int]:
        """The bytes in which storages can wait for their next use, in the ways of ``allow``: exactly, or in bfloat16
        with ``lossy``."""
        free = [s for s in range(len(self.graph.storages)) if s not in self.stuck]
        if "offload" in allow:
            return dict.fromkeys(free, 0)
        if "compress" in allow:
            return {s: p.nbytes for s, p in packings(self.graph, lossy=lossy).items() if s not in self.stuck}
        return {}

    def least(self, allow: Sequence[str], *, lossy: bool = False) -> int:
        """What it needs however it is ordered and recomputed, with what it calls as it is."""
        return int(lower_bound(self.graph, least=self.waiting(allow, lossy=lossy)))

    def _storages(self, out: set[int]) -> tuple[Storage, ...]:
        rows: dict[int, Storage] = {}
        for (name, index), s in self.storage.items():
            if s in rows:
                continue
            i = self.computation.by_name[name]
            size = 0 if s in out or i.opcode == "parameter" else device_bytes(i.shape.part(index))
            label = name + "".join(f"{{{k}}}" for k in index)
            rows[s] = Storage(label, size, "output" if s in out else "activation")
        return tuple(rows[s] for s in range(len(rows)))

    def _values(self, storages: Sequence[Storage]) -> tuple[Value, ...]:
        """One for each storage, of the shape it is made with."""
        parts: dict[int, Shape] = {}
        for (name, index), s in self.storage.items():
            parts.setdefault(s, self.computation.by_name[name].shape.part(index))
        return tuple(_value(s.name, k, parts[k]) for k, s in enumerate(storages))

    def _op(self, i: Instruction, defined: Collection[int], number: Mapping[str, int]) -> Op:
        made = self.leaves(i.name)
        reads = tuple(dict.fromkeys(s for o in i.operands for s in self.leaves(o)))
        changed = self._changed(i) if i.opcode == "while" else [s for s in made if s in defined]
        fixed = self.once is not None and i.name in self.tied
        place = self.module.place(i)
        before = dict.fromkeys((*i.control_predecessors, *self._passing_loops(i, reads)))
        return Op(
            i.name,
            i.opcode,
            inputs=reads,
            outputs=tuple(s for s in made if s not in defined),
            mutates=tuple(s for s in changed if s in reads),
            effect=fixed or not may_repeat(self.module, i, libraries=self.libraries),
            control=tuple(number[c] for c in before if c in number),
            time=self.work.seconds(self.computation, i),
            flops=self.work.flops[self.name].get(i.name, 0),
            workspace=sum(self.callees.get(c, 0) for c in i.called) if i.row.holds else 0,
            module=i.op_name,
            source=str(place) if place else "",
        )

    def _passing_loops(self, i: Instruction, reads: Collection[int]) -> list[str]:
        """Loops whose results an instruction reads and that do not change them: it reads what they were given, and
        runs after them all the same, for it is their results that it names."""
        found, seen, more = list[str](), set[str](), list(i.operands)
        while more:
            name = more.pop()
            source = self.computation.by_name[name]
            if name in seen:
                continue
            seen.add(name)
            if source.row.makes == "addresses":
                more.extend(source.operands)
            elif source.opcode == "while" and not set(reads) & set(self._changed(source)):
                found.append(name)
        return found[::-1]

    def _changed(self, loop: Instruction) -> list[int]:
        """Storages a loop writes: all but the parts that its body hands on as they are."""
        body = self.module.by_name[loop.attribute("body").lstrip("%")]
        found = []
        rows = self.points.sets[loop.name]
        inner = PointsTo(body).sets[body.root.name]
        for index, _ in loop.shape.leaves:
            if rows[index] in self.storage and inner[index] != (body.parameters[0].name, index):
                found.append(self.storage[rows[index]])
        return list(dict.fromkeys(found))

    @cached_property
    def tied(self) -> frozenset[str]:
        """Instructions that run once: those that wait for others, what they write over may be read no more; and those
        whose results are used as whole tuples."""
        waiting = {i.name for i in self.computation.instructions if i.control_predecessors}
        return self.tied_tuples | waiting | (self.once or frozenset())

    def late(self, steps: Sequence[Step]) -> frozenset[str]:
        """Instructions that ``steps`` recompute after something has run that they must run before (R11)."""
        after: dict[int, list[int]] = {}
        for k, op in enumerate(self.graph.ops):
            for c in op.control:
                after.setdefault(c, []).append(k)
        ran: set[int] = set()
        found = set()
        for step in steps:
            if step.kind == "recompute" and any(k in ran for k in after.get(step.op, ())):
                found.add(self.ops[step.op].name)
            elif step.kind == "compute":
                ran.add(step.op)
        return frozenset(found)

    @cached_property
    def tied_tuples(self) -> frozenset[str]:
        """Instructions whose results are used as whole tuples."""
        inside, found = self.computation, set()
        for i in inside.instructions:
            if not i.shape.is_tuple or i.opcode == "tuple":
                continue
            users = (inside.by_name[u] for u in inside.users[i.name])
            if i.root or any(u.opcode != "get-tuple-element" or u.shape.is_tuple for u in users):
                found.add(i.name)
        return frozenset(found)


def _value(name: str, storage: int, shape: Shape) -> Value:
    strides = tuple(prod(shape.dims[k + 1 :]) for k in range(len(shape.dims)))
    return Value(name, storage, _TYPES.get(shape.dtype, shape.dtype), shape.dims, strides)


# -- what may run again ----------------------------------------------------------------------------------------

PURE_CALLS = (
    "__cublas$gemm",
    "__cublas$lt$matmul",
    "__cudnn$convForward",
    "__cudnn$convBiasActivationForward",
)
"""Calls of libraries that give the same result for the same operands and touch nothing else."""


def repeatable(module: Module, i: Instruction) -> bool:
    """Whether an instruction may run again (R6); one that nothing is known of may not."""
    if not i.row.repeatable or _has_side_effect(i):
        return False
    if i.opcode == "copy":
        return True
    inside = (inner for name in i.called for inner in module.by_name[name].instructions)
    return all(
        (inner.row.again == "inside" and not _has_side_effect(inner)) or repeatable(module, inner)
        for inner in inside
    )


def _has_side_effect(i: Instruction) -> bool:
    return i.attribute("custom_call_has_side_effect") == "true"


def may_repeat(module: Module, i: Instruction, *, libraries: bool = True) -> bool:
    """Whether an instruction may run again; calls of libraries that have no effects only with ``libraries``."""
    if i.opcode == "custom-call" and not _has_side_effect(i):
        return libraries and i.custom_call_target.startswith(PURE_CALLS)
    return repeatable(module, i)


# -- dead code (R15) --------------------------------------------------------------------------------------------


def without_dead(module: Module, keep: Collection[str] = ()) -> Module:
    """``module`` without the instructions that nobody uses and nobody would miss, but for those named in ``keep``."""
    live = {name: _live(module.by_name[name], keep) for name in sequential_order(module)}
    return replace(module, computations=tuple(live.get(c.name, c) for c in module.computations))


def _live(c: Computation, keep: Collection[str]) -> Computation:
    used = {c.root.name, *keep}
    for i in c.instructions:
        if i.control_predecessors:
            used.update((i.name, *i.control_predecessors))
    kept = []
    for i in reversed(c.instructions):
        if i.name in used or not i.row.removable or _has_side_effect(i):
            used.update(i.operands)
            kept.append(i)
    return replace(c, instructions=tuple(reversed(kept)))


# -- lower bounds -----------------------------------------------------------------------------------------------


def bound(module: Module, allow: Sequence[str] = ("recompute",), *, lossy: bool = False) -> int:
    """Bytes that the module needs however it is ordered and recomputed, called computations at their least, where
    arrays may wait in the ways of ``allow`` (recompute, compress, offload)."""
    return bounds(module, allow, lossy=lossy)[module.entry.name] + result_bytes(module)


def bounds(
    module: Module, allow: Sequence[str] = ("recompute",), *, lossy: bool = False
) -> Mapping[str, int]:
    """The same of each computation that is run in sequence, beyond its parameters and its result. What is dead needs
    nothing: a rewritten module may be without it (R15)."""
    module = without_dead(module)
    work = work_of(module)
    least: dict[str, int] = {}
    for name in sequential_order(module):
        least[name] = Lowering(module, name, least, work).least(allow, lossy=lossy)
    return least
