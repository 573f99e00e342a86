"""Which instructions of HLO may run again (R6): as XLA has it, and with calls of libraries that have no effects."""

from __future__ import annotations

from tightship.frontends.hlo.module import Instruction, Module

__all__ = ["may_repeat", "repeatable"]

_NEVER = frozenset(
    {"call", "conditional", "constant", "custom-call", "parameter", "while", "tuple", "opt-barrier"}
    | {"infeed", "outfeed", "send", "send-done", "recv", "recv-done", "rng", "rng-get-and-update-state"}
    | {
        "all-reduce",
        "all-gather",
        "all-to-all",
        "reduce-scatter",
        "collective-permute",
        "collective-broadcast",
    }
    | {f"{kind}-{end}" for kind in ("async", "copy", "all-reduce", "all-gather") for end in ("start", "done")}
    | {"async-update", "collective-permute-start", "collective-permute-done", "after-all", "partition-id"}
)
"""Opcodes that are never repeated (R6): calls, what has effects, and what belongs to the caller."""

PURE_CALLS = (
    "__cublas$gemm",
    "__cublas$lt$matmul",
    "__cudnn$convForward",
    "__cudnn$convBiasActivationForward",
)
"""Calls of libraries that give the same result for the same operands and touch nothing else."""


def repeatable(module: Module, i: Instruction) -> bool:
    """Whether an instruction may run again (R6)."""
    if i.opcode in _NEVER or i.attribute("custom_call_has_side_effect") == "true":
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
