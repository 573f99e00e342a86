"""Whether loops over slices write each element of their results once, and read each of what they cut once (rule
``S1``): read off the module that was written, by other means than those that wrote it.

A loop counts from 0 by 1 up to a number. In its body a part that is written by dynamic-update-slice, or read by
dynamic-slice, begins along one dimension at the counter times its length there, and all parts are together as long as
the whole. What is half written, or a sum that is not complete, is read by nothing but what goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tightship.cached import cached_property
from tightship.errors import VerificationFailed, Violation
from tightship.hlo.module import Computation, Instruction, Module, names_in
from tightship.hlo.shape import Shape

__all__ = ["check_slices"]


def check_slices(whole: Module, made: Module) -> None:
    """Raise ``VerificationFailed`` unless each loop that ``made`` has and ``whole`` has not keeps the rule."""
    loops = (i for i in made.entry.instructions if i.opcode == "while" and i.name not in whole.entry.by_name)
    faults = [
        Violation("S1", -1, (loop.name,), f"{loop.name}: {text}")
        for loop in loops
        for text in _Loop(made, loop).faults()
    ]
    if faults:
        raise VerificationFailed(faults, place=f"{made.name} in slices")


@dataclass(frozen=True)
class _Loop:
    module: Module
    loop: Instruction

    @cached_property
    def body(self) -> Computation:
        return self.module.by_name[names_in(self.loop.attribute("body"))[0]]

    def faults(self) -> Iterator[str]:
        root, body = self.body.root, self.body
        if not self.count or not self.counts:
            yield "it does not count its slices from 0 by 1"
            return
        for k, name in enumerate(root.operands[1:], 1):
            i = body.by_name[name]
            if self.element(name) == k:
                continue
            readers = {u for e in self.elements(k) for u in body.users[e]}
            if readers != {name}:
                yield f"result {k} is read by {', '.join(sorted(readers))} before all slices are written"
            elif i.opcode == "dynamic-update-slice":
                part = body.by_name[i.operands[1]].shape
                if self.element(i.operands[0]) != k or not self.covers(i.shape, part, i.operands[2:]):
                    yield f"the parts of {name} do not lie side by side in the whole"
            elif i.row.combines == "" and i.row.writes_over != "results":
                yield f"result {k} is made by {i.opcode} {name}, which neither writes a part nor adds up"
        for i in body.instructions:
            if i.opcode == "dynamic-slice" and self.element(i.operands[0]) > 0:
                whole = body.by_name[i.operands[0]].shape
                if not self.covers(whole, i.shape, i.operands[1:]):
                    yield f"the parts {i.name} of {i.operands[0]} do not lie side by side in it"

    def covers(self, whole: Shape, part: Shape, starts: tuple[str, ...]) -> bool:
        """Whether the parts of all slices are the whole, each element once."""
        cut = [d for d, (n, m) in enumerate(zip(whole.dims, part.dims, strict=True)) if n != m]
        if len(cut) != 1 or part.dims[cut[0]] * self.count != whole.dims[cut[0]]:
            return False
        rest = all(self.number(s) == 0 for d, s in enumerate(starts) if d != cut[0])
        by = self.body.by_name[starts[cut[0]]]
        if by.opcode != "multiply":
            return False
        a, b = by.operands
        return rest and self.element(a) == 0 and self.number(b) == part.dims[cut[0]]

    @cached_property
    def count(self) -> int:
        """How many slices there are; 0 where the loop ends otherwise."""
        condition = self.module.by_name[names_in(self.loop.attribute("condition"))[0]]
        end = condition.root
        if end.opcode != "compare" or end.attribute("direction") != "LT":
            return 0
        at, most = (condition.by_name[o] for o in end.operands)
        first = at.opcode == "get-tuple-element" and at.tuple_index == 0
        return int(most.payload) if first and most.opcode == "constant" else 0

    @cached_property
    def counts(self) -> bool:
        entry = self.module.entry.by_name
        start = entry[self.loop.operands[0]]
        after = self.body.by_name[self.body.root.operands[0]]
        by_one = after.opcode == "add" and self.element(after.operands[0]) == 0
        zero = start.opcode == "tuple" and entry[start.operands[0]].payload == "0"
        return zero and by_one and self.number(after.operands[1]) == 1

    def element(self, name: str) -> int:
        """Which part of what the loop carries a value is; -1 if none."""
        i = self.body.by_name[name]
        of_parameter = (
            i.opcode == "get-tuple-element" and self.body.by_name[i.operands[0]].opcode == "parameter"
        )
        return i.tuple_index if of_parameter else -1

    def elements(self, k: int) -> Iterator[str]:
        return (i.name for i in self.body.instructions if self.element(i.name) == k)

    def number(self, name: str) -> int:
        """What a constant is; -1 for anything else."""
        i = self.body.by_name[name]
        return int(i.payload) if i.opcode == "constant" and i.payload.isdigit() else -1
