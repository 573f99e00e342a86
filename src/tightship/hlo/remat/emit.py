"""Steps of a plan as a computation of HLO: each run of an op an instruction, in the order of the steps.

What is restored of an offloaded or compressed storage is an array of its own, in place of the op's result. A copy
begins at its step; one out is waited for where the plan frees what it reads, one back before the first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightship.hlo.module import Computation, Instruction
from tightship.hlo.remat.instructions import (
    Rewrite,
    copy_done,
    copy_start,
    on_host,
    pack,
    suffixed,
    unpack,
)
from tightship.hlo.remat.lower import Lowering
from tightship.hlo.remat.peak import Buffer
from tightship.hlo.shape import Shape
from tightship.plan import Step

__all__ = ["write"]


class _Run:
    """The computation written so far; ``at[s]`` is the instruction that storage ``s`` was last made by, ``array[s]``
    the one that restored it, if it was offloaded or compressed since."""

    def __init__(self, lowering: Lowering, rewrite: Rewrite) -> None:
        self.lowering, self.rewrite = lowering, rewrite
        self.inside = lowering.computation
        self.out: list[Instruction] = []
        self.at: dict[int, str] = {}
        self.array: dict[int, str] = {}
        self.host: dict[int, str] = {}
        self.packed: dict[int, tuple[str, str]] = {}
        self.waiting: dict[tuple[str, int], Instruction] = {}  # ends of copies that have begun
        self.made: dict[int, Buffer] = {}
        for buffer, s in lowering.storage.items():
            self.made.setdefault(s, buffer)
        self.ran: set[str] = set()
        self.runs: dict[str, list[str]] = {}
        self.latest: dict[str, str] = {}
        self.handed: dict[tuple[str, tuple[str, ...]], str] = {}
        for p in self.inside.parameters:
            self.out.append(p)
            self.latest[p.name] = p.name
            self.at.update(dict.fromkeys(lowering.leaves(p.name), p.name))

    def emit(self, i: Instruction, operands: tuple[str, ...], name: str) -> None:
        made = i if name == i.name else self.rewrite.clone(replace(i, root=False), self.inside.name)
        if before := i.control_predecessors:  # every run of theirs comes first (R11)
            every = ", ".join(f"%{run}" for p in before for run in self.runs.get(p, ()))
            made = made.but(**{"control-predecessors": f"{{{every}}}"})
        self.out.append(replace(made, name=name, operands=operands))
        self.runs.setdefault(i.name, []).append(name)

    def run(self, i: Instruction, kept: Sequence[int]) -> None:
        for before in i.control_predecessors:
            if before not in self.ran and self.inside.by_name[before].row.makes == "addresses":
                self.operand(before)
        operands = tuple(map(self.operand, i.operands))
        name = self.rewrite.names.new(suffixed(self.latest[i.name])) if i.name in self.ran else i.name
        self.ran.add(i.name)
        self.emit(i, operands, name)
        if name != i.name:
            self.rewrite.origin[name] = i.name
        self.latest[i.name] = name
        self.at.update(dict.fromkeys(kept, name))
        for s in kept:
            self.array.pop(s, None)

    def operand(self, name: str) -> str:
        """The instruction that now stands for ``name``; what only hands addresses on is written when first needed."""
        i = self.inside.by_name[name]
        leaves = self.lowering.leaves(name)
        if i.row.makes != "addresses":
            whole = i.shape.is_tuple or not leaves or i.opcode == "while"
            if not whole and leaves[0] in self.array:
                return self.back(leaves[0])
            return self.latest[name] if whole else self.maker(name, leaves[0])
        if i.opcode == "get-tuple-element" and self.parted(i):
            if leaves[0] in self.array:
                return self.back(leaves[0])
            operands: tuple[str, ...] = (self.maker(i.operands[0], leaves[0]),)
        else:
            operands = tuple(map(self.operand, i.operands))
        key = name, operands
        if key not in self.handed:
            first = name not in self.ran
            self.handed[key] = name if first else self.rewrite.names.new(suffixed(name))
            self.ran.add(name)
            self.emit(i, operands, self.handed[key])
        return self.handed[key]

    def parted(self, i: Instruction) -> bool:
        """Whether a get-tuple-element takes an array out of what an op made."""
        source = self.inside.by_name[i.operands[0]]
        return source.row.makes != "addresses" and not i.shape.is_tuple and bool(self.lowering.leaves(i.name))

    def maker(self, name: str, storage: int) -> str:
        """The run of ``name`` that made ``storage``; one that only passes it on (a loop) ran once."""
        return self.at[storage] if self.makes(name, storage) else self.latest[name]

    def makes(self, name: str, storage: int) -> bool:
        rows = self.lowering.points.sets[name].items()
        return any(b == (name, x) and self.lowering.storage.get(b) == storage for x, b in rows) and (
            self.inside.by_name[name].opcode != "while"
        )

    # -- offload and compress --------------------------------------------------------------------------------

    def back(self, s: int) -> str:
        """The array that a storage has come back as, waited for."""
        self.wait("fetch", s)
        return self.array[s]

    def wait(self, kind: str, s: int) -> None:
        if (kind, s) in self.waiting:
            self.out.append(self.waiting.pop((kind, s)))

    def source(self, s: int) -> tuple[str, Shape]:
        """The array that holds a storage now."""
        name, index = self.made[s]
        shape = self.inside.by_name[name].shape.part(index)
        if s in self.array:
            return self.back(s), shape
        if not index:
            return self.at[s], shape
        part = self.rewrite.names.new(f"{name}.part")
        number = (("index", str(index[0])),)
        self.out.append(Instruction(part, "get-tuple-element", shape, (self.at[s],), attributes=number))
        return part, shape

    def new(self, kind: str, s: int) -> str:
        name = self.rewrite.names.new(f"{self.made[s][0]}.{kind}")
        self.rewrite.transfers[name] = kind, self.made[s]
        return name

    def offload(self, s: int) -> None:
        source, shape = self.source(s)
        start, done = self.new("offload", s), self.new("offloaded", s)
        self.out.append(copy_start(start, source, shape, on_host(shape)))
        self.waiting["offload", s] = copy_done(done, start, on_host(shape))
        self.host[s] = done

    def fetch(self, s: int) -> None:
        self.wait("offload", s)
        name, index = self.made[s]
        shape = self.inside.by_name[name].shape.part(index)
        start, done = self.new("fetch", s), self.new("fetched", s)
        self.out.append(copy_start(start, self.host[s], on_host(shape), shape))
        self.waiting["fetch", s] = copy_done(done, start, shape)
        self.array[s] = done

    def compress(self, s: int, codec: str) -> None:
        source, shape = self.source(s)
        name = self.new("compress", s)
        self.out.append(pack(name, source, shape, codec, self.rewrite, self.inside.name))
        self.packed[s] = name, codec

    def decompress(self, s: int) -> None:
        source, codec = self.packed[s]
        name, index = self.made[s]
        shape = self.inside.by_name[name].shape.part(index)
        self.array[s] = self.new("decompress", s)
        self.out.append(unpack(self.array[s], source, shape, codec, self.rewrite, self.inside.name))


def write(lowering: Lowering, steps: Sequence[Step], rewrite: Rewrite) -> Computation:
    """The computation that runs as ``steps`` say."""
    run = _Run(lowering, rewrite)
    uses = lowering.graph.uses
    wanted = _wanted(steps)
    for t, step in enumerate(steps):
        if step.kind == "compute":
            run.run(lowering.ops[step.op], uses.defines[step.op])
        elif step.kind == "recompute":
            run.run(lowering.ops[step.op], step.storages)
        for s in step.storages if step.kind != "recompute" else ():
            if step.kind == "compress" and (t, s) in wanted:
                run.compress(s, step.codec)
            elif step.kind == "offload" and (t, s) in wanted:
                run.offload(s)
            elif step.kind == "free" and step.form == "full":
                run.wait("offload", s)
                run.wait("fetch", s)
            elif step.kind in ("fetch", "decompress"):
                getattr(run, step.kind)(s)
    run.out += run.waiting.values()
    root = lowering.computation.root
    if root.row.makes == "addresses":
        run.operand(root.name)
    return replace(lowering.computation, instructions=tuple(run.out))


def _wanted(steps: Sequence[Step]) -> set[tuple[int, int]]:
    """(step, storage) of what is offloaded or compressed, and restored from there rather than freed."""
    found, wanted = set(), set()
    for t in reversed(range(len(steps))):
        kind = steps[t].kind
        for s in steps[t].storages:
            if kind in ("fetch", "decompress"):
                wanted.add((s, "offload" if kind == "fetch" else "compress"))
            elif (s, kind) in wanted:
                wanted.remove((s, kind))
                found.add((t, s))
    return found
