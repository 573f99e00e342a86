"""Along which dimensions an instruction may be computed in slices, and how the results of its slices combine: the
rules that the table of opcodes names (``cut``). An opcode without one is never split.

A `Cut` of an instruction says along which dimension each operand is cut, or that every slice has it `WHOLE`, and the
dimension along which the slices' results lie side by side; or that they add up to the result (`SUM`). A slice has an
equal part of each dimension that is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from tightship.hlo.module import Instruction, Module
from tightship.hlo.shape import Shape

__all__ = ["CARRIED", "SUM", "WHOLE", "Cut", "cuts", "lengths", "numbers", "part_of"]

WHOLE: Final = -1
"""Of an operand: every slice has all of it."""
CARRIED: Final = -2
"""Of an operand: the first slice has it, each later one what the slice before it made."""
SUM: Final = -3
"""Of a result: what the slices make adds up to it."""


@dataclass(frozen=True)
class Cut:
    """``operands``: the dimension along which each is cut, `WHOLE` or `CARRIED`; ``result``: that of the result, or
    `SUM`, where ``combine`` is the opcode that adds up, and nothing if the slices write over what is carried.
    ``rounds``: whether adding up slices may round otherwise than the whole."""

    operands: tuple[int, ...]
    result: int
    combine: str = ""
    rounds: bool = False


_Rule = Callable[[Module, Instruction, Sequence[Shape]], Iterator[Cut]]
"""From an instruction and the shapes of its operands."""


def cuts(module: Module, i: Instruction, shapes: Sequence[Shape]) -> tuple[Cut, ...]:
    """The ways in which an instruction may be cut; ``shapes`` are those of its operands."""
    rule = _RULES.get(i.row.cut)
    tied = i.control_predecessors or i.has("sharding") or i.row.effect
    if rule is None or tied or any(s.is_tuple or s.dynamic for s in (i.shape, *shapes)):
        return ()
    found = rule(module, i, shapes)
    return tuple(dict.fromkeys(c for c in found if _length(i, shapes, c) > 1))


def _length(i: Instruction, shapes: Sequence[Shape], cut: Cut) -> int:
    """The least of the lengths that are cut; 0 if none is."""
    return min(lengths(i, shapes, cut), default=0)


def lengths(i: Instruction, shapes: Sequence[Shape], cut: Cut) -> list[int]:
    """The lengths of the dimensions that are cut."""
    rows = [s.dims[d] for s, d in zip(shapes, cut.operands, strict=True) if d >= 0]
    return [*rows, *([i.shape.dims[cut.result]] if cut.result >= 0 else [])]


def part_of(shape: Shape, dim: int, count: int) -> Shape:
    """The shape of one of ``count`` parts along a dimension."""
    if dim < 0:
        return shape
    return replace(shape, dims=tuple(n // count if d == dim else n for d, n in enumerate(shape.dims)))


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of ``{0,2}``."""
    return tuple(map(int, re.findall(r"-?\d+", text)))


def _listed(i: Instruction, key: str) -> tuple[int, ...]:
    return numbers(i.attribute(key))


# -- rules ---------------------------------------------------------------------------------------------------------


def _each(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """Each element from the same element of the operands; those without dimensions are for all."""
    if any(s.dims not in ((), i.shape.dims) for s in shapes):
        return
    for d in range(len(i.shape.dims)):
        yield Cut(tuple(d if s.dims else WHOLE for s in shapes), d)


def _broadcast(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    at = _listed(i, "dimensions")
    for d in range(len(i.shape.dims)):
        if d not in at:
            yield Cut((WHOLE,), d)
        elif shapes[0].dims[at.index(d)] == i.shape.dims[d]:
            yield Cut((at.index(d),), d)


def _iota(_: Module, i: Instruction, __: Sequence[Shape]) -> Iterator[Cut]:
    """What counts along the cut has an offset for each slice (`split` writes it)."""
    yield from (Cut((), d) for d in range(len(i.shape.dims)))


def _reshape(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """Dimensions before which there are as many elements: equal parts of one are equal parts of the other."""
    given, made = shapes[0].dims, i.shape.dims
    for e, n in enumerate(given):
        for d, m in enumerate(made):
            if n > 1 and m > 1 and prod(given[:e]) == prod(made[:d]):
                yield Cut((e,), d)


def _transpose(_: Module, i: Instruction, __: Sequence[Shape]) -> Iterator[Cut]:
    yield from (Cut((e,), d) for d, e in enumerate(_listed(i, "dimensions")))


def _others(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """Along any dimension but those it names."""
    named = _listed(i, "dimensions")
    for d in range(len(i.shape.dims)):
        if d not in named:
            yield Cut((d,) * len(shapes), d)


def _full(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """Of a part, along a dimension of which it takes all; numbers that say where it begins are for all."""
    for d, n in enumerate(i.shape.dims):
        if shapes[0].dims[d] == n and (i.opcode != "slice" or f"[0:{n}]" in _limits(i)[d]):
            yield Cut((d, *[WHOLE] * (len(shapes) - 1)), d)


def _limits(i: Instruction) -> list[str]:
    return re.findall(r"\[[^\]]*\]", i.attribute("slice"))


def _update(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    for d, n in enumerate(i.shape.dims):
        if shapes[1].dims[d] == n:
            yield Cut((d, d, *[WHOLE] * (len(shapes) - 2)), d)


def _pad(_: Module, i: Instruction, __: Sequence[Shape]) -> Iterator[Cut]:
    for d, row in enumerate(i.attribute("padding").split("x")):
        if not any(map(int, row.split("_"))):
            yield Cut((d, WHOLE), d)


def _reduce(module: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """Along a dimension that stays; along one that is reduced, where parts combine as elements do."""
    if len(shapes) != 2:
        return
    gone = _listed(i, "dimensions")
    kept = [d for d in range(len(shapes[0].dims)) if d not in gone]
    yield from (Cut((e, WHOLE), d) for d, e in enumerate(kept))
    body = module.by_name[i.called[0]]
    how = body.root.row.combines if len(body.instructions) == 3 else ""
    if how == "exactly" or (how and _is_zero(module, i.operands[1])):
        rounds = how == "rounding" and _rounds(i)
        yield from (Cut((e, WHOLE), SUM, body.root.opcode, rounds) for e in gone)


def _rounds(i: Instruction) -> bool:
    """Whether sums of its type depend on their order."""
    return not i.shape.dtype.startswith(("s", "u", "pred"))


def _is_zero(module: Module, name: str) -> bool:
    i = next((i for i in module.instructions if i.name == name), None)
    return i is not None and i.opcode == "constant" and i.payload in ("0", "-0")


def _dot(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """The result's dimensions: the batch's, then those of each operand that are neither batch nor contracted."""
    batch = _listed(i, "lhs_batch_dims"), _listed(i, "rhs_batch_dims")
    contracted = _listed(i, "lhs_contracting_dims"), _listed(i, "rhs_contracting_dims")
    if len(shapes) != 2:
        return
    at = len(batch[0])
    yield from (Cut(pair, d) for d, pair in enumerate(zip(*batch, strict=True)))
    for side in range(2):
        for e in range(len(shapes[side].dims)):
            if e not in batch[side] and e not in contracted[side]:
                yield Cut((e, WHOLE) if side == 0 else (WHOLE, e), at)
                at += 1
    yield from (Cut(pair, SUM, "add", _rounds(i)) for pair in zip(*contracted, strict=True))


def _convolution(_: Module, i: Instruction, __: Sequence[Shape]) -> Iterator[Cut]:
    found = re.fullmatch(r"(\w+)_(\w+)->(\w+)", i.attribute("dim_labels"))
    if found is None or i.attribute("batch_group_count", "1") != "1":
        return
    given, kernel, made = found.groups()
    yield Cut((given.index("b"), WHOLE), made.index("b"))
    if i.attribute("feature_group_count", "1") == "1":
        yield Cut((WHOLE, kernel.index("o")), made.index("f"))
        yield Cut((given.index("f"), kernel.index("i")), SUM, "add", _rounds(i))


def _gather(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """Along the dimensions of the indices, and those of the operand of which each slice that is taken has all."""
    offset, vector = _listed(i, "offset_dims"), int(i.attribute("index_vector_dim"))
    own = _listed(i, "operand_batching_dims")
    theirs = _listed(i, "start_indices_batching_dims")
    batch = [d for d in range(len(i.shape.dims)) if d not in offset]
    along = [j for j in range(len(shapes[1].dims)) if j != vector]
    for d, j in zip(batch, along, strict=True):
        yield Cut((own[theirs.index(j)] if j in theirs else WHOLE, j), d)
    sizes = _listed(i, "slice_sizes")
    left_out = {*own, *_listed(i, "collapsed_slice_dims")}
    window = [e for e in range(len(shapes[0].dims)) if e not in left_out]
    for d, e in zip(offset, window, strict=True):
        if sizes[e] == shapes[0].dims[e]:
            yield Cut((e, WHOLE), d)


def _scatter(_: Module, i: Instruction, shapes: Sequence[Shape]) -> Iterator[Cut]:
    """Along batch dimensions and whole windows; along others of the indices, one slice's updates after another's."""
    if len(shapes) != 3:
        return
    window, vector = _listed(i, "update_window_dims"), int(i.attribute("index_vector_dim"))
    own = _listed(i, "input_batching_dims")
    theirs = _listed(i, "scatter_indices_batching_dims")
    rows = [d for d in range(len(shapes[2].dims)) if d not in window]
    along = [j for j in range(len(shapes[1].dims)) if j != vector]
    for u, j in zip(rows, along, strict=True):
        if j in theirs:
            yield Cut((own[theirs.index(j)], j, u), own[theirs.index(j)])
        else:
            yield Cut((CARRIED, j, u), SUM)
    left_out = {*own, *_listed(i, "inserted_window_dims")}
    inside = [e for e in range(len(shapes[0].dims)) if e not in left_out]
    for u, e in zip(window, inside, strict=True):
        if shapes[2].dims[u] == shapes[0].dims[e]:
            yield Cut((e, WHOLE, u), e)


_RULES: Final[Mapping[str, _Rule]] = {
    "each": _each, "broadcast": _broadcast, "iota": _iota, "reshape": _reshape, "transpose": _transpose,
    "others": _others, "full": _full, "update": _update, "pad": _pad, "reduce": _reduce, "dot": _dot,
    "convolution": _convolution, "gather": _gather, "scatter": _scatter,
}  # fmt: skip
