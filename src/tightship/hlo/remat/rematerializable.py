"""Computations that a rewritten module has more: copies of what repeated instructions call, each written before the
computation that needs it.

Which instructions of HLO may run again (R6): as XLA has it, and with calls of libraries that have no effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tightship.hlo.module import Computation, Instruction, Module
from tightship.hlo.remat.body import Names, suffixed

__all__ = ["Copies", "may_repeat", "repeatable"]


PURE_CALLS = (
    "__cublas$gemm",
    "__cublas$lt$matmul",
    "__cudnn$convForward",
    "__cudnn$convBiasActivationForward",
)
"""Calls of libraries that give the same result for the same operands and touch nothing else."""


def repeatable(module: Module, i: Instruction) -> bool:
    """Whether an instruction may run again (R6); one that nothing is known of may not."""
    if not i.row.repeatable or i.attribute("custom_call_has_side_effect") == "true":
        return False
    if i.opcode == "copy":
        return True
    return all(repeatable_inside(module, name) for name in i.called)


def repeatable_inside(module: Module, name: str) -> bool:
    inside = module.by_name[name]
    return all(
        (i.row.again == "inside" and i.attribute("custom_call_has_side_effect") != "true")
        or repeatable(module, i)
        for i in inside.instructions
    )


def may_repeat(module: Module, i: Instruction, *, libraries: bool = True) -> bool:
    """Whether an instruction may run again; calls of libraries that have no effects only with ``libraries``."""
    if i.opcode == "custom-call" and i.attribute("custom_call_has_side_effect") != "true":
        return libraries and i.custom_call_target.startswith(PURE_CALLS)
    return repeatable(module, i)


class Copies:
    """``inside`` has every computation by name as it is now, those that were added, too."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.names = Names(c.name for c in module.computations)
        self.inside: dict[str, Computation] = dict(module.by_name)
        self.before: dict[str, list[str]] = {}  # added computations by the one they stand before

    def copied(self, made: Instruction, before: str) -> Instruction:
        """The same instruction with copies of its own of the computations it calls, written before ``before``."""
        rows = []
        for key, text in made.attributes:
            name = text.lstrip("%")
            if key in ("calls", "to_apply") and name in self.inside:
                text = f"%{self.add(self.inside[name], suffixed(name, 'clone'), before)}"
            rows.append((key, text))
        return replace(made, attributes=tuple(rows))

    def add(self, computation: Computation, name: str, before: str) -> str:
        """Put a computation before another one, under ``name`` or one like it, which is returned."""
        new = self.names.new(name)
        self.inside[new] = replace(computation, name=new, entry=False)
        self.before.setdefault(before, []).append(new)
        return new

    def written(self, changed: Mapping[str, Computation]) -> Module:
        """The module with ``changed`` computations in place of those of their names."""
        rows = []
        for c in self.module.computations:
            rows += [self.inside[name] for name in self.before.get(c.name, ())]
            rows.append(changed.get(c.name, self.inside[c.name]))
        return replace(self.module, computations=tuple(rows))
