"""Instructions whose results are their operands' buffers, wholly or at some positions.

An opcode that is not listed defines every position of its shape, which is what XLA does and is safe for opcodes
nobody has heard of: they share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tightship.frontends.hlo.shape import Index, Shape

if TYPE_CHECKING:
    from tightship.frontends.hlo.points_to import Buffer, Node

__all__ = ["async_start", "forwarded"]


def forwarded(node: Node) -> list[Buffer | None]:
    """For each position the operand's buffer that stands there, or None where the instruction defines one."""
    rule = _RULES.get(node.opcode)
    return rule(node) if rule else [None] * len(node.shape.positions)


def _whole(node: Node) -> list[Buffer | None]:
    return list(node.operands[0].at)


def _copy(node: Node) -> list[Buffer | None]:
    """A shallow copy: the top is new."""
    return [None, *node.operands[0].at[1:]]


def _tuple(node: Node) -> list[Buffer | None]:
    return [None, *(b for operand in node.operands for b in operand.at)]


def _element(node: Node) -> list[Buffer | None]:
    start = node.operands[0].shape.starts[node.instruction.tuple_index]
    return list(node.operands[0].at[start : start + len(node.shape.positions)])


def _picked(node: Node, pick: Callable[[Index, Shape], tuple[int, Index] | None]) -> list[Buffer | None]:
    """By position: (operand, position in it) that stands there."""
    found: list[Buffer | None] = []
    for index, shape in node.shape.positions:
        source = pick(index, shape)
        found.append(None if source is None else node.operands[source[0]].buffer(source[1]))
    return found


def _copy_start(node: Node) -> list[Buffer | None]:
    return _picked(node, lambda index, _: (0, ()) if index == (1,) else None)


def _copy_done(node: Node) -> list[Buffer | None]:
    return _picked(node, lambda index, _: (0, (0,)) if not index else None)


def _send(node: Node) -> list[Buffer | None]:
    return _picked(node, lambda index, _: (0, index[1:]) if index[:1] == (0,) else None)


def _recv_done(node: Node) -> list[Buffer | None]:
    return _picked(node, lambda index, _: (0, index) if index[:1] == (0,) else None)


def _all_gather_start(node: Node) -> list[Buffer | None]:
    several = len(node.operands) > 1

    def pick(index: Index, shape: Shape) -> tuple[int, Index] | None:
        if shape.is_tuple or index[:1] != (0,):
            return None
        return (index[1], ()) if several else (0, ())

    return _picked(node, pick)


def _done_with_second(node: Node) -> list[Buffer | None]:
    """Results stand at position 1 of what the start gave; a tuple around them is new."""
    return _picked(node, lambda index, shape: None if shape.is_tuple else (0, (1, *index)))


def _permute_start(node: Node) -> list[Buffer | None]:
    inplace = node.instruction.has("slice_sizes") or len(node.operands) == 4
    several = not inplace and len(node.operands) > 1

    def pick(index: Index, shape: Shape) -> tuple[int, Index] | None:
        if index[:1] != (0,):
            return None
        if several:
            return (index[1], ()) if len(index) == 2 else None
        return None if shape.is_tuple else (0, index[1:])

    return _picked(node, pick)


def async_start(node: Node, result: list[Buffer]) -> list[Buffer | None]:
    """Operands stand below position 0, results of the wrapped computation below 1; tables and contexts are new."""
    root = dict(zip((i for i, _ in node.shape.parts[1].positions), result, strict=False))
    found: list[Buffer | None] = []
    for index, shape in node.shape.positions:
        if shape.is_tuple or not index or index[0] > 1:
            found.append(None)
        elif index[0] == 0:
            found.append(node.operands[index[1]].buffer(index[2:]))
        else:
            found.append(root.get(index[1:]))
    return found


def _async_update(node: Node) -> list[Buffer | None]:
    return _picked(node, lambda index, shape: None if shape.is_tuple else (0, index))


_RULES: dict[str, Callable[[Node], list[Buffer | None]]] = {
    "tuple": _tuple,
    "get-tuple-element": _element,
    "bitcast": _whole,
    "domain": _whole,
    "opt-barrier": _whole,
    "add-dependency": _whole,
    "all-reduce-done": _whole,
    "copy": _copy,
    "copy-start": _copy_start,
    "copy-done": _copy_done,
    "send": _send,
    "recv-done": _recv_done,
    "all-gather-start": _all_gather_start,
    "all-gather-done": _done_with_second,
    "collective-permute-start": _permute_start,
    "collective-permute-done": _done_with_second,
    "async-update": _async_update,
    "async-done": _done_with_second,
}
