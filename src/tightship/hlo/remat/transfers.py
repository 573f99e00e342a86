"""Instructions that set arrays aside and bring them back: copies to the host's memory, and packed forms.

A copy is a copy-start and a copy-done, as XLA's host offload writes it; the array on the host has memory space 5 in
its layout. A packed form is made by a fusion, or a convert, that takes the array apart: of ``pred`` one bit each
instead of a byte, of ``f32`` (if loss is allowed) bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from tightship.errors import BadInput
from tightship.hlo.module import Computation, Instruction
from tightship.hlo.remat.body import Names
from tightship.hlo.remat.rematerializable import Copies
from tightship.hlo.remat.tracker import HOST
from tightship.hlo.shape import Shape

__all__ = ["WAYS", "bits", "copy_done", "copy_start", "on_host", "pack", "packed_shape", "unpack", "ways"]

WAYS = ("recompute", "compress", "offload")

_Op = Callable[..., str]


def ways(allow: str) -> tuple[str, ...]:
    """The ways named between commas. Raises ``BadInput``."""
    found = tuple(dict.fromkeys(filter(None, (w.strip() for w in allow.split(",")))))
    for way in found:
        if way not in WAYS:
            raise BadInput(f"what a module's arrays leave memory by is {', '.join(WAYS)}", way, "allow")
    return found


# -- the host ----------------------------------------------------------------------------------------------------


def on_host(shape: Shape) -> Shape:
    layout = shape.layout
    if layout is None:
        layout = ",".join(map(str, reversed(range(len(shape.dims)))))
    return replace(shape, layout=f"{layout}{'' if ':' in layout else ':'}S({HOST})")


def copy_start(name: str, source: str, shape: Shape, to: Shape) -> Instruction:
    """``shape`` is that of the source; the result has where it goes, where it comes from, and what XLA needs."""
    return Instruction(name, "copy-start", Shape("tuple", parts=(to, shape, Shape("u32"))), (source,))


def copy_done(name: str, start: str, to: Shape) -> Instruction:
    return Instruction(name, "copy-done", to, (start,))


# -- packed forms ------------------------------------------------------------------------------------------------


def bits(shape: Shape) -> bool:
    """Whether an array can be packed to a bit per element."""
    return shape.dtype == "pred" and not shape.dynamic and prod(shape.dims) > 8


def packed_shape(shape: Shape, codec: str) -> Shape:
    if codec == "bf16":
        return replace(shape, dtype="bf16")
    return Shape("u8", (-(-prod(shape.dims) // 8),), "0")


def pack(
    name: str, source: str, shape: Shape, codec: str, names: Names, copies: Copies, before: str
) -> Instruction:
    """The instruction that packs ``source``; computations it calls are added before computation ``before``."""
    to = packed_shape(shape, codec)
    if codec == "bf16":
        return Instruction(name, "convert", to, (source,))
    n, m = prod(shape.dims), to.dims[0]
    body, op = _body(names, shape)
    numbers = op("convert", Shape("u8", (n,), "0"), op("bitcast", Shape("pred", (n,), "0"), body[0].name))
    zero = op("constant", Shape("u8"), payload="0")
    if n % 8:
        rest = f"0_{8 * m - n}"
        numbers = op("pad", Shape("u8", (8 * m,), "0"), numbers, zero, padding=rest)
    rows = Shape("u8", (m, 8), "1,0")
    place = op("iota", rows, iota_dimension="1")
    shifted = op("shift-left", rows, op("bitcast", rows, numbers), place)
    added = copies.add(_sum(names), "sum_of_bits", before)
    op("reduce", to, shifted, zero, dimensions="{1}", to_apply=f"%{added}")
    return _fusion(name, source, to, body, "pack", copies, before)


def unpack(
    name: str, source: str, shape: Shape, codec: str, names: Names, copies: Copies, before: str
) -> Instruction:
    """The instruction that makes an array of ``shape`` again of what `pack` made of it."""
    given = packed_shape(shape, codec)
    if codec == "bf16":
        return Instruction(name, "convert", shape, (source,))
    n, m = prod(shape.dims), given.dims[0]
    body, op = _body(names, given)
    rows = Shape("u8", (m, 8), "1,0")
    place = op("iota", rows, iota_dimension="1")
    right = op("shift-right-logical", rows, op("broadcast", rows, body[0].name, dimensions="{0}"), place)
    ones = op("broadcast", rows, op("constant", Shape("u8"), payload="1"), dimensions="{}")
    flat = op("bitcast", Shape("u8", (8 * m,), "0"), op("and", rows, right, ones))
    if n % 8:
        flat = op("slice", Shape("u8", (n,), "0"), flat, slice=f"{{[0:{n}]}}")
    op("bitcast", shape, op("convert", Shape("pred", (n,), "0"), flat))
    return _fusion(name, source, shape, body, "unpack", copies, before)


def _body(names: Names, given: Shape) -> tuple[list[Instruction], _Op]:
    """The instructions of a computation of one parameter, and what adds one more and returns its name."""
    body = [Instruction(names.new("form.in"), "parameter", given, payload="0")]

    def op(opcode: str, shape: Shape, *operands: str, payload: str = "", **attributes: str) -> str:
        name = names.new(f"form.{opcode}")
        body.append(Instruction(name, opcode, shape, operands, payload, tuple(attributes.items())))
        return name

    return body, op


def _sum(names: Names) -> Computation:
    a, b = (Instruction(names.new("form.in"), "parameter", Shape("u8"), payload=str(k)) for k in range(2))
    root = Instruction(names.new("form.add"), "add", Shape("u8"), (a.name, b.name), root=True)
    return Computation("sum", (a, b, root))


def _fusion(
    name: str, source: str, to: Shape, body: list[Instruction], label: str, copies: Copies, before: str
) -> Instruction:
    rows = (*body[:-1], replace(body[-1], root=True))
    called = copies.add(Computation(label, rows), f"fused_{label}", before)
    return Instruction(name, "fusion", to, (source,), attributes=(("kind", "kLoop"), ("calls", f"%{called}")))
