"""What is known of kinds of TensorFlow ops: whose they are, which share bytes, which write variables, their FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

__all__ = ["FEEDS", "HANDLES", "VARIABLES", "caller_kind", "flops_of", "forwarded", "reads_handle"]

FEEDS: Final = frozenset("Placeholder PlaceholderV2 PlaceholderWithDefault".split())
VARIABLES: Final = frozenset("Variable VariableV2".split())
HANDLES: Final = frozenset("VarHandleOp VarHandlesOp".split())

_FORWARD: Final = frozenset(
    "Identity IdentityN RefIdentity Snapshot StopGradient PreventGradient CheckNumerics EnsureShape Reshape Squeeze "
    "ExpandDims Bitcast Switch RefSwitch ReadVariableOp DestroyTemporaryVariable".split()
)
"""Kinds whose results are their inputs' bytes."""
_READS_HANDLE: Final = frozenset(
    "ReadVariableOp VarIsInitializedOp VariableShape ResourceGather ResourceGatherNd Identity IdentityN Switch "
    "StopGradient DestroyResourceOp ResourceStridedSlice".split()
)

Shape = tuple[int, ...]


def caller_kind(kind: str, fed: bool) -> str:
    """What a node's result is where it belongs to the caller (input, constant, parameter), else nothing."""
    if fed or kind in FEEDS:
        return "input"
    if kind == "Const":
        return "constant"
    return "parameter" if kind in VARIABLES or kind in HANDLES else ""


def forwarded(kind: str, port: int, inputs: int) -> int | None:
    """The index of the input whose bytes result ``port`` of a node with so many ``inputs`` is, if it is one."""
    if kind not in _FORWARD or not inputs:
        return None
    return port if kind == "IdentityN" and port < inputs else 0


def reads_handle(kind: str) -> bool:
    """Whether a kind that takes a variable's handle only reads the variable; what is not known writes it."""
    return kind in _READS_HANDLE


def flops_of(kind: str, given: Sequence[Shape], made: Sequence[Shape], *, transposed: bool = False) -> int:
    """Floating-point operations of a node with inputs and results of these shapes: products exactly, everything else
    one for each element of the larger side. ``transposed``: of the first factor of a product."""
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3") and len(given[0]) >= 2:
        return 2 * math.prod(made[0]) * given[0][-2 if transposed else -1]
    if kind == "Conv2D" and len(given) > 1 and len(given[1]) == 4:
        return 2 * math.prod(made[0]) * math.prod(given[1][:3])
    if kind == "DepthwiseConv2dNative" and len(given) > 1 and len(given[1]) == 4:
        return 2 * math.prod(made[0]) * math.prod(given[1][:2])
    if kind == "Conv2DBackpropInput" and len(given) > 2 and len(given[1]) == 4:
        return 2 * math.prod(given[2]) * math.prod(given[1][:3])
    if kind == "Conv2DBackpropFilter" and len(given) > 2 and len(made[0]) == 4:
        return 2 * math.prod(given[2]) * math.prod(made[0][:3])
    return max(sum(map(math.prod, given)), sum(map(math.prod, made)), 0)
