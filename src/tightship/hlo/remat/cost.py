"""Work of an instruction of HLO, from its shapes: floating-point operations, bytes moved, seconds.

FLOPs follow XLA's ``HloCostAnalysis``: two per multiply-add of a dot or convolution, one per element of anything
element-wise, one per element read of a reduction. Transcendental functions count like others. Seconds are the
larger of FLOPs / throughput and bytes / bandwidth of a made-up but typical accelerator: only ratios matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from tightship.hlo.module import Computation, Instruction, Module
from tightship.hlo.shape import LIMIT, Shape
from tightship.machine import CODECS, Machine, modeled_time

__all__ = ["ACCELERATOR", "Work", "work_of"]

ACCELERATOR: Final = Machine(latency=0.0, pack=(7e11,) * len(CODECS), unpack=(7e11,) * len(CODECS))
"""What copies to the host and packing cost there: a PCIe link, and packing as fast as memory is read and written."""

_FLOPS: Final = 20e12
_BANDWIDTH: Final = 1.5e12
"""FLOPs and bytes per second of the accelerator that times are modeled for."""


@dataclass(frozen=True)
class Work:
    """Work of every instruction of a module, by name of computation and instruction."""

    module: Module
    flops: Mapping[str, Mapping[str, int]]

    def seconds(self, computation: Computation, i: Instruction) -> float:
        if i.row.makes != "results":
            return 0.0
        if i.opcode == "while":
            inside = (self.module.by_name[name] for name in i.called)
            return i.trips * sum(self.seconds(c, inner) for c in inside for inner in c.instructions)
        moved = i.shape.total + sum(computation.by_name[o].shape.total for o in i.operands)
        if i.opcode == "dynamic-slice":  # a part is read, or written over, where it lies
            moved = 2 * i.shape.total
        elif i.opcode == "dynamic-update-slice":
            moved = 2 * computation.by_name[i.operands[1]].shape.total
        flops = self.flops[computation.name][i.name]
        return modeled_time(flops, moved, rate=_FLOPS, bandwidth=_BANDWIDTH, overhead=0.0)


def work_of(module: Module) -> Work:
    found: dict[str, dict[str, int]] = {}

    def of(name: str) -> int:
        if name not in found:
            found[name] = {}
            inside = module.by_name[name]
            for i in inside.instructions:
                found[name][i.name] = _flops(module, inside, i, of)
        return sum(found[name].values())

    for c in module.computations:
        of(c.name)
    return Work(module, found)


def _flops(module: Module, inside: Computation, i: Instruction, of: Callable[[str], int]) -> int:
    shapes = [inside.by_name[o].shape for o in i.operands]
    match i.row.flops:
        case "none":
            return 0
        case "callees":
            return min(i.trips * sum(map(of, i.called)), LIMIT)
        case "dot":
            return 2 * i.shape.elements * _contracted(i, shapes[0])
        case "convolution":
            return _convolution(i, shapes[1])
        case "custom":
            return _custom(i, shapes)
        case "operands":
            return sum(s.elements for s in shapes[: max(1, len(shapes) // 2)])
    return sum(part.elements for _, part in i.shape.leaves)


def _contracted(i: Instruction, left: Shape) -> int:
    dims = [int(d) for d in re.findall(r"\d+", i.attribute("lhs_contracting_dims"))]
    return prod(left.dims[d] for d in dims if d < len(left.dims))


def _convolution(i: Instruction, kernel: Shape, out: Shape | None = None) -> int:
    """Each element of the result is a sum over the kernel's elements per output feature."""
    found = re.search(r"_([0-9a-z]+)->", i.attribute("dim_labels"))
    at = found[1].find("o") if found else -1
    features = kernel.dims[at] if 0 <= at < len(kernel.dims) else 1
    return 2 * (out or i.shape).elements * (kernel.elements // max(1, features))


def _custom(i: Instruction, shapes: list[Shape]) -> int:
    target = i.custom_call_target
    out = i.shape.parts[0] if i.shape.is_tuple and i.shape.parts else i.shape
    if "gemm" in target or "matmul" in target:
        return 2 * out.elements * _gemm_depth(i, shapes)
    if "conv" in target and len(shapes) > 1:
        if "BackwardFilter" in target:  # (input, gradient of the output) -> gradient of the kernel
            return _convolution(i, out, shapes[1])
        return _convolution(i, shapes[1], shapes[0] if "BackwardInput" in target else out)
    return out.elements


def _gemm_depth(i: Instruction, shapes: list[Shape]) -> int:
    """The contracted size, from the backend's configuration (JSON)."""
    try:
        config = json.loads(i.attribute("backend_config") or "{}")
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        return prod(shapes[0].dims[int(d)] for d in numbers["lhs_contracting_dimensions"])
    except (ValueError, KeyError, IndexError, TypeError):
        return max((shapes[0].dims or (1,))[-1:])
