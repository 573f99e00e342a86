"""Shapes of HLO values: arrays, tokens and tuples of shapes, with their layouts.

Two shapes are equal when element type, dimensions and layout are; that is what XLA asks before two values may
share bytes. A layout is kept as its text (``1,0:T(8,128)S(5)``): the order of dimensions from minor to major,
tiles, element size in bits (``E``) and memory space (``S``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from tightship.cached import cached_property
from tightship.errors import BadInput

__all__ = ["BITS", "LIMIT", "POINTER", "Index", "Shape"]

POINTER = 8
"""Bytes of one entry of a tuple's table of addresses."""

LIMIT = 2**63 - 1
"""The most bytes a shape may have: sizes are 64-bit signed integers in XLA."""

Index = tuple[int, ...]
"""A position in a shape: () is the shape itself, (1, 0) the first part of its second part."""

BITS: dict[str, int] = {
    "pred": 8,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{"f4e2m1fn": 4, "f8e8m0fnu": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
    **{f"f8{kind}": 8 for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
}
"""Bits of one element, by element type. Types of less than a byte take one, unless the layout packs them."""

_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT = re.compile(r"E\((\d+)\)")


@dataclass(frozen=True)
class Shape:
    """``dtype`` is an element type of ``BITS``, ``token``, ``opaque`` or ``tuple``; ``parts`` are a tuple's.

    ``dynamic`` marks the dimensions written ``<=n``; of a dimension ``?`` the size is -1. ``layout`` is None
    where the text gives none (scalars, and text printed without layouts).
    """

    dtype: str
    dims: tuple[int, ...] = ()
    layout: str | None = None
    parts: tuple[Shape, ...] = ()
    dynamic: tuple[bool, ...] = ()

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    @property
    def memory_space(self) -> int:
        if self.layout is None or "S" not in self.layout:
            return 0
        found = _SPACE.search(self.layout)
        return int(found[1]) if found else 0

    @cached_property
    def elements(self) -> int:
        """Number of elements of an array."""
        count = 1
        for d in self.dims:
            count *= d
        return count

    def part(self, index: Index) -> Shape:
        """The shape at a position."""
        shape = self
        for k in index:
            shape = shape.parts[k]
        return shape

    @cached_property
    def positions(self) -> tuple[tuple[Index, Shape], ...]:
        """Every position with what stands there, a tuple's own before those of its parts."""
        inner = (((k, *i), shape) for k, part in enumerate(self.parts) for i, shape in part.positions)
        return (((), self), *inner)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where in ``positions`` those of each part begin."""
        return tuple(accumulate((len(part.positions) for part in self.parts[:-1]), initial=1))

    def offset(self, index: Index) -> int:
        """Where a position stands in ``positions``."""
        at, shape = 0, self
        for k in index:
            at, shape = at + shape.starts[k], shape.parts[k]
        return at

    @property
    def leaves(self) -> Iterator[tuple[Index, Shape]]:
        """Every position that is no tuple."""
        return ((index, part) for index, part in self.positions if not part.is_tuple)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer of this position alone: an array's elements, a tuple's table of addresses.

        Raises ``BadInput`` for dynamic dimensions, unknown element types, and beyond 63 bits.
        """
        if self.is_tuple:
            return POINTER * len(self.parts)
        if self.dtype in ("token", "opaque"):
            return 0
        bits = BITS.get(self.dtype)
        if bits is None:
            raise BadInput(f"unknown element type {self.dtype!r}: known are {', '.join(sorted(BITS))}")
        if self.dynamic:
            raise BadInput(f"{self} has dynamic dimensions: memory is planned for sizes that are known")
        size = self._array_bytes(bits)
        if size > LIMIT:
            raise BadInput(f"{self} has {size} bytes, more than 63 bits count")
        return size

    def _array_bytes(self, bits: int) -> int:
        packed = _ELEMENT.search(self.layout or "")
        if packed:
            bits = int(packed[1])
            return -(-self.elements * bits // 8)
        return self.elements * -(-bits // 8)

    @cached_property
    def total(self) -> int:
        """Bytes of all arrays of the shape, without tables of addresses."""
        return sum(part.nbytes for _, part in self.leaves)

    def __str__(self) -> str:
        if self.is_tuple:
            return f"({_listed(self.parts)})"
        if self.dtype in ("token", "opaque"):
            return f"{self.dtype}[]"
        marks = self.dynamic or (False,) * len(self.dims)
        dims = ",".join(
            "?" if d < 0 else f"<={d}" if mark else str(d) for d, mark in zip(self.dims, marks, strict=True)
        )
        layout = "" if self.layout is None else f"{{{self.layout}}}"
        return f"{self.dtype}[{dims}]{layout}"


def _listed(parts: tuple[Shape, ...]) -> str:
    """As XLA lists the parts of a tuple: every fifth with its number."""
    shown = [f"/*index={k}*/{part}" if k and k % 5 == 0 else str(part) for k, part in enumerate(parts)]
    return ", ".join(shown)
