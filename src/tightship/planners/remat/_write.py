"""Steps of a plan as a computation of HLO: each run of an op an instruction, in the order of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightship.frontends.hlo.module import Computation, Instruction, Module
from tightship.plan import Step
from tightship.planners.remat._body import Names, suffixed
from tightship.planners.remat._copies import Copies
from tightship.planners.remat._counted import LAZY, Counted

__all__ = ["Writer", "write"]


class Writer:
    """Names in use in a module, the computations that clones have brought, and each clone's first name."""

    def __init__(self, module: Module) -> None:
        self.names = Names(i.name for i in module.instructions)
        self.copies = Copies(module)
        self.origin: dict[str, str] = {}


class _Run:
    """The computation written so far; ``at[s]`` is the instruction that storage ``s`` was last made by."""

    def __init__(self, counted: Counted, writer: Writer) -> None:
        self.counted, self.writer = counted, writer
        self.inside = counted.computation
        self.out: list[Instruction] = []
        self.at: dict[int, str] = {}
        self.ran: set[str] = set()
        self.latest: dict[str, str] = {}
        self.handed: dict[tuple[str, tuple[str, ...]], str] = {}
        for p in self.inside.parameters:
            self.out.append(p)
            self.latest[p.name] = p.name
            self.at.update(dict.fromkeys(counted.leaves(p.name), p.name))

    def emit(self, i: Instruction, operands: tuple[str, ...], name: str) -> None:
        made = i if name == i.name else self.writer.copies.copied(replace(i, root=False), self.inside.name)
        self.out.append(replace(made, name=name, operands=operands))

    def run(self, i: Instruction, kept: Sequence[int]) -> None:
        operands = tuple(map(self.operand, i.operands))
        name = self.writer.names.new(suffixed(self.latest[i.name])) if i.name in self.ran else i.name
        self.ran.add(i.name)
        self.emit(i, operands, name)
        if name != i.name:
            self.writer.origin[name] = i.name
        self.latest[i.name] = name
        self.at.update(dict.fromkeys(kept, name))

    def operand(self, name: str) -> str:
        """The instruction that now stands for ``name``; what only hands addresses on is written when first needed."""
        i = self.inside.by_name[name]
        if i.opcode not in LAZY:
            leaves = self.counted.leaves(name)
            whole = i.shape.is_tuple or not leaves or i.opcode == "while"
            return self.latest[name] if whole else self.maker(name, leaves[0])
        if i.opcode == "get-tuple-element" and self.parted(i):
            operands: tuple[str, ...] = (self.maker(i.operands[0], self.counted.leaves(name)[0]),)
        else:
            operands = tuple(map(self.operand, i.operands))
        key = name, operands
        if key not in self.handed:
            first = name not in self.ran
            self.handed[key] = name if first else self.writer.names.new(suffixed(name))
            self.ran.add(name)
            self.emit(i, operands, self.handed[key])
        return self.handed[key]

    def parted(self, i: Instruction) -> bool:
        """Whether a get-tuple-element takes an array out of what an op made."""
        source = self.inside.by_name[i.operands[0]]
        return source.opcode not in LAZY and not i.shape.is_tuple and bool(self.counted.leaves(i.name))

    def maker(self, name: str, storage: int) -> str:
        """The run of ``name`` that made ``storage``; one that only passes it on (a loop) ran once."""
        return self.at[storage] if self.makes(name, storage) else self.latest[name]

    def makes(self, name: str, storage: int) -> bool:
        rows = self.counted.points.sets[name].items()
        return any(b == (name, x) and self.counted.storage.get(b) == storage for x, b in rows) and (
            self.inside.by_name[name].opcode != "while"
        )


def write(counted: Counted, steps: Sequence[Step], writer: Writer) -> Computation:
    """The computation that runs as ``steps`` say."""
    run = _Run(counted, writer)
    uses = counted.graph.uses
    for step in steps:
        if step.kind == "compute":
            run.run(counted.ops[step.op], uses.defines[step.op])
        elif step.kind == "recompute":
            run.run(counted.ops[step.op], step.storages)
    root = counted.computation.root
    if root.opcode in LAZY:
        run.operand(root.name)
    return replace(counted.computation, instructions=tuple(run.out))
