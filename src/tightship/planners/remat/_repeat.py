"""Which instructions of HLO may run again (R6): as XLA has it, and with calls of libraries that have no effects."""

from __future__ import annotations

from tightship.frontends.hlo.module import Instruction, Module
from tightship.frontends.hlo.opcodes import KNOWN, ONCE

__all__ = ["may_repeat", "repeatable"]

PURE_CALLS = (
    "__cublas$gemm",
    "__cublas$lt$matmul",
    "__cudnn$convForward",
    "__cudnn$convBiasActivationForward",
)
"""Calls of libraries that give the same result for the same operands and touch nothing else."""


def repeatable(module: Module, i: Instruction) -> bool:
    """Whether an instruction may run again (R6); one that nothing is known of may not."""
    if i.opcode in ONCE or i.opcode not in KNOWN or i.attribute("custom_call_has_side_effect") == "true":
        return False
    if i.opcode == "copy":
        return True
    return all(repeatable_inside(module, name) for name in i.called)


def repeatable_inside(module: Module, name: str) -> bool:
    inside = module.by_name[name]
    free = {"parameter", "constant", "tuple", "custom-call", "partition-id"}
    return all(
        (i.opcode in free and i.attribute("custom_call_has_side_effect") != "true") or repeatable(module, i)
        for i in inside.instructions
    )


def may_repeat(module: Module, i: Instruction, *, libraries: bool = True) -> bool:
    """Whether an instruction may run again; calls of libraries that have no effects only with ``libraries``."""
    if i.opcode == "custom-call" and i.attribute("custom_call_has_side_effect") != "true":
        return libraries and i.custom_call_target.startswith(PURE_CALLS)
    return repeatable(module, i)
