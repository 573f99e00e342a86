"""Random inputs that a model may run on, in the order in which to try them.

Whole numbers may be indices of a table of few rows, or choose a branch of an If: those that a graph compares an input
with (a sample rate with 16,000) are tried, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from tightship.frontends.onnx.constants import constant_value
from tightship.frontends.onnx.load import Model, read
from tightship.frontends.onnx.lower import Program
from tightship.frontends.onnx.nested import bodies
from tightship.integrations.onnxruntime import random_feeds

__all__ = ["Draw", "draws", "feeds_of"]

_BELOW: Final = (4, 2, 1)
"""Bounds of whole numbers, tried in turn."""
_COMPARING: Final = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))
_HANDING_ON: Final = frozenset(("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
_MOST: Final = 4
"""Constants of an input that are tried."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Whole numbers ``below`` one, but those of inputs that the model compares with constants: ``chosen``."""

    below: int = _BELOW[0]
    chosen: tuple[tuple[str, int], ...] = ()

    def feeds(self, program: Program) -> dict[str, Any]:
        """Inputs of the sizes that ``program`` was planned for."""
        graph = program.graph
        sizes = {
            graph.values[v].name: graph.values[v].shape for v in graph.inputs
            if graph.storages[graph.values[v].storage].kind == "input"
        }  # fmt: skip
        feeds = random_feeds(program.model.path, sizes, below=self.below)
        for name, number in self.chosen:
            feeds[name] = np.full_like(feeds[name], number)
        return feeds


def feeds_of(program: Program, below: int = _BELOW[0]) -> dict[str, Any]:
    """Random inputs of the sizes that a model was planned for, with whole numbers ``below`` one."""
    return Draw(below).feeds(program)


def draws(program: Program) -> list[Draw]:
    """What to try in turn until the model runs."""
    found = [Draw(n) for n in _BELOW]
    numbers = _compared(read(program.model.path, convert=False))
    for k in range(max(map(len, numbers.values()), default=0)):
        found.append(Draw(chosen=tuple((name, row[min(k, len(row) - 1)]) for name, row in numbers.items())))
    return found


def _compared(model: Model) -> dict[str, list[int]]:
    """Of each input of whole numbers what the model compares it with."""
    graph = model.proto.graph
    whole = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    weights = {t.name for t in graph.initializer}
    origin = {
        i.name: i.name for i in graph.input if i.name not in weights and i.type.tensor_type.elem_type in whole
    }
    constants = {t.name: t for t in graph.initializer}
    found: dict[str, list[int]] = {}
    for node in _nodes(graph):
        if node.op_type == "Constant":
            constants.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        elif node.op_type in _HANDING_ON and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        elif node.op_type in _HANDING_ON and node.input[0] in constants:
            constants[node.output[0]] = constants[node.input[0]]
        elif node.op_type in _COMPARING:
            for one, other in (node.input, reversed(node.input)):
                if one in origin and other in constants:
                    row = found.setdefault(origin[one], [])
                    row += [n for n in _numbers(constants[other], model) if n not in row and len(row) < _MOST]
    return found


def _numbers(tensor: Any, model: Model) -> Iterator[int]:
    """The whole number that a constant is, if it is one."""
    found = constant_value(tensor, model.path.parent, str(model.path))
    if found is not None and found.size == 1 and found.dtype.kind in "iuf":
        number = float(found.reshape(-1)[0])
        if number.is_integer() and abs(number) < 1 << 31:
            yield int(number)


def _nodes(graph: Any) -> Iterator[Any]:
    """A graph's nodes, and those of the graphs inside them, which may read what is outside."""
    for node in graph.node:
        yield node
        for inner in bodies(node):
            yield from _nodes(inner)
