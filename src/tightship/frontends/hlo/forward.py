"""Instructions whose results are their operands' buffers, wholly or at some positions.

An opcode that is not listed defines every position of its shape, which is what XLA does and is safe for opcodes
nobody has heard of: they share nothing. What a buffer is, is the caller's matter: the rules pass on whatever stands
at the positions of the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from tightship.frontends.hlo.module import Instruction
from tightship.frontends.hlo.shape import Index, Shape

__all__ = ["Operand", "async_start", "forwarded"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Operand(Protocol[T_co]):
    """What an instruction is given: a shape, and what stands at each position, in the order of ``positions``."""

    @property
    def shape(self) -> Shape: ...

    @property
    def at(self) -> Sequence[T_co]: ...


def forwarded(i: Instruction, operands: Sequence[Operand[T]]) -> list[T | None]:
    """For each position what stands there of the operands, or None where the instruction defines a buffer."""
    rule = _RULES.get(i.opcode)
    return rule(i, operands) if rule else [None] * len(i.shape.positions)


Operands = Sequence[Operand[T]]


def _whole(i: Instruction, operands: Operands[T]) -> list[T | None]:
    return list(operands[0].at)


def _copy(i: Instruction, operands: Operands[T]) -> list[T | None]:
    """A shallow copy: the top is new."""
    return [None, *operands[0].at[1:]]


def _tuple(i: Instruction, operands: Operands[T]) -> list[T | None]:
    return [None, *(b for operand in operands for b in operand.at)]


def _element(i: Instruction, operands: Operands[T]) -> list[T | None]:
    start = operands[0].shape.starts[i.tuple_index]
    return list(operands[0].at[start : start + len(i.shape.positions)])


def _picked(
    i: Instruction, operands: Operands[T], pick: Callable[[Index, Shape], tuple[int, Index] | None]
) -> list[T | None]:
    """By position: (operand, position in it) that stands there."""
    found: list[T | None] = []
    for index, shape in i.shape.positions:
        source = pick(index, shape)
        if source is None:
            found.append(None)
        else:
            given = operands[source[0]]
            found.append(given.at[given.shape.offset(source[1])])
    return found


def _copy_start(i: Instruction, operands: Operands[T]) -> list[T | None]:
    return _picked(i, operands, lambda index, _: (0, ()) if index == (1,) else None)


def _copy_done(i: Instruction, operands: Operands[T]) -> list[T | None]:
    return _picked(i, operands, lambda index, _: (0, (0,)) if not index else None)


def _send(i: Instruction, operands: Operands[T]) -> list[T | None]:
    return _picked(i, operands, lambda index, _: (0, index[1:]) if index[:1] == (0,) else None)


def _recv_done(i: Instruction, operands: Operands[T]) -> list[T | None]:
    return _picked(i, operands, lambda index, _: (0, index) if index[:1] == (0,) else None)


def _all_gather_start(i: Instruction, operands: Operands[T]) -> list[T | None]:
    several = len(operands) > 1

    def pick(index: Index, shape: Shape) -> tuple[int, Index] | None:
        if shape.is_tuple or index[:1] != (0,):
            return None
        return (index[1], ()) if several else (0, ())

    return _picked(i, operands, pick)


def _done_with_second(i: Instruction, operands: Operands[T]) -> list[T | None]:
    """Results stand at position 1 of what the start gave; a tuple around them is new."""
    return _picked(i, operands, lambda index, shape: None if shape.is_tuple else (0, (1, *index)))


def _permute_start(i: Instruction, operands: Operands[T]) -> list[T | None]:
    inplace = i.has("slice_sizes") or len(operands) == 4
    several = not inplace and len(operands) > 1

    def pick(index: Index, shape: Shape) -> tuple[int, Index] | None:
        if index[:1] != (0,):
            return None
        if several:
            return (index[1], ()) if len(index) == 2 else None
        return None if shape.is_tuple else (0, index[1:])

    return _picked(i, operands, pick)


def async_start(i: Instruction, operands: Operands[T], result: Sequence[T]) -> list[T | None]:
    """Operands stand below position 0, results of the wrapped computation below 1; tables and contexts are new."""
    root = dict(zip((index for index, _ in i.shape.parts[1].positions), result, strict=False))
    found: list[T | None] = []
    for index, shape in i.shape.positions:
        if shape.is_tuple or not index or index[0] > 1:
            found.append(None)
        elif index[0] == 0:
            given = operands[index[1]]
            found.append(given.at[given.shape.offset(index[2:])])
        else:
            found.append(root.get(index[1:]))
    return found


def _async_update(i: Instruction, operands: Operands[T]) -> list[T | None]:
    return _picked(i, operands, lambda index, shape: None if shape.is_tuple else (0, index))


_RULES: dict[str, Callable[[Instruction, Operands[Any]], list[Any]]] = {
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
