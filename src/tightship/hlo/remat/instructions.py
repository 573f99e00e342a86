"""What a rewritten module has more: names, clones of computations, copies to the host's memory, and packed arrays.

A copy is a copy-start and a copy-done, as XLA's host offload writes it; the array on the host has memory space 5 in
its layout. A packed array is made by a fusion, or a convert, that takes the array apart: of ``pred`` one bit each
instead of a byte, of ``f32`` (if loss is allowed) bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from tightship.errors import BadInput, Unsupported
from tightship.hlo.module import Computation, Instruction, Module, Names
from tightship.hlo.remat.peak import HOST, Buffer
from tightship.hlo.shape import Shape
from tightship.planners.default import EXACT, ROUNDING

__all__ = [
    "WAYS", "Rewrite", "can_pack_bits", "copy_done", "copy_start", "on_host", "pack", "packed_shape", "suffixed",
    "unpack", "ways",
]  # fmt: skip

WAYS = ("recompute", "compress", "offload")

_Op = Callable[..., str]


def ways(allow: str) -> tuple[str, ...]:
    """The ways named between commas. Raises ``BadInput``, and ``Unsupported`` for slices, which are cut before."""
    found = tuple(dict.fromkeys(filter(None, (w.strip() for w in allow.split(",")))))
    for way in found:
        if way in (EXACT, ROUNDING):
            raise Unsupported(
                f"allow={way} for a module of HLO", "a planner of modules plans what is there, in slices or not",
                "leave it out, or use tightship plan or frontier, which split a module before it is planned",
            )  # fmt: skip
        if way not in WAYS:
            raise BadInput(f"unknown way {way!r} in allow; a way is one of {', '.join(WAYS)}")
    return found


# -- names and computations --------------------------------------------------------------------------------------


def suffixed(name: str, suffix: str = "remat") -> str:
    """``foo`` → ``foo.remat`` → ``foo.remat2`` → ``foo.remat3``."""
    root, dot, number = name.rpartition(f".{suffix}")
    if not dot or (number and not number.isdigit()):
        return f"{name}.{suffix}"
    return f"{root}.{suffix}{int(number or 1) + 1}"


class Rewrite:
    """A module that is rewritten: ``inside`` has each computation by name as it is now, added ones too; ``origin``
    each clone's first name, ``transfers`` what instructions offload, compress or restore."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.names = Names(i.name for i in module.instructions)
        self.computations = Names(c.name for c in module.computations)
        self.origin: dict[str, str] = {}
        self.transfers: dict[str, tuple[str, Buffer]] = {}
        self.inside: dict[str, Computation] = dict(module.by_name)
        self.before: dict[str, list[str]] = {}  # added computations by the one they stand before

    def clone(self, made: Instruction, before: str) -> Instruction:
        """The same instruction with copies of its own of the computations it calls, written before ``before``."""
        rows = []
        for key, text in made.attributes:
            name = text.lstrip("%")
            if key in ("calls", "to_apply") and name in self.inside:
                text = f"%{self.add(self.inside[name], suffixed(name, 'clone'), before)}"
            rows.append((key, text))
        return replace(made, attributes=tuple(rows))

    def add(self, computation: Computation, name: str, before: str) -> str:
        """Put a computation before another one, under ``name`` or one like it, which is returned."""
        new = self.computations.new(name)
        self.inside[new] = replace(computation, name=new, entry=False)
        self.before.setdefault(before, []).append(new)
        return new

    def written(self, changed: Mapping[str, Computation]) -> Module:
        """The module with ``changed`` computations in place of those of their names."""
        rows = []
        for c in self.module.computations:
            rows += [self.inside[name] for name in self.before.get(c.name, ())]
            rows.append(changed.get(c.name, self.inside[c.name]))
        return replace(self.module, computations=tuple(rows))


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


# -- packed arrays -----------------------------------------------------------------------------------------------


def can_pack_bits(shape: Shape) -> bool:
    """Whether an array can be packed to a bit per element."""
    return shape.dtype == "pred" and not shape.dynamic and prod(shape.dims) > 8


def packed_shape(shape: Shape, codec: str) -> Shape:
    if codec == "bf16":
        return replace(shape, dtype="bf16")
    return Shape("u8", (-(-prod(shape.dims) // 8),), "0")


def pack(name: str, source: str, shape: Shape, codec: str, rewrite: Rewrite, before: str) -> Instruction:
    """The instruction that packs ``source``; computations it calls are added before computation ``before``."""
    to = packed_shape(shape, codec)
    if codec == "bf16":
        return Instruction(name, "convert", to, (source,))
    n, m = prod(shape.dims), to.dims[0]
    body, op = _body(rewrite.names, shape)
    numbers = op("convert", Shape("u8", (n,), "0"), op("bitcast", Shape("pred", (n,), "0"), body[0].name))
    zero = op("constant", Shape("u8"), payload="0")
    if n % 8:
        rest = f"0_{8 * m - n}"
        numbers = op("pad", Shape("u8", (8 * m,), "0"), numbers, zero, padding=rest)
    rows = Shape("u8", (m, 8), "1,0")
    place = op("iota", rows, iota_dimension="1")
    shifted = op("shift-left", rows, op("bitcast", rows, numbers), place)
    added = rewrite.add(_sum(rewrite.names), "sum_of_bits", before)
    op("reduce", to, shifted, zero, dimensions="{1}", to_apply=f"%{added}")
    return _fusion(name, source, to, body, "pack", rewrite, before)


def unpack(name: str, source: str, shape: Shape, codec: str, rewrite: Rewrite, before: str) -> Instruction:
    """The instruction that makes an array of ``shape`` again of what `pack` made of it."""
    given = packed_shape(shape, codec)
    if codec == "bf16":
        return Instruction(name, "convert", shape, (source,))
    n, m = prod(shape.dims), given.dims[0]
    body, op = _body(rewrite.names, given)
    rows = Shape("u8", (m, 8), "1,0")
    place = op("iota", rows, iota_dimension="1")
    right = op("shift-right-logical", rows, op("broadcast", rows, body[0].name, dimensions="{0}"), place)
    ones = op("broadcast", rows, op("constant", Shape("u8"), payload="1"), dimensions="{}")
    flat = op("bitcast", Shape("u8", (8 * m,), "0"), op("and", rows, right, ones))
    if n % 8:
        flat = op("slice", Shape("u8", (n,), "0"), flat, slice=f"{{[0:{n}]}}")
    op("bitcast", shape, op("convert", Shape("pred", (n,), "0"), flat))
    return _fusion(name, source, shape, body, "unpack", rewrite, before)


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
    name: str, source: str, to: Shape, body: list[Instruction], label: str, rewrite: Rewrite, before: str
) -> Instruction:
    rows = (*body[:-1], replace(body[-1], root=True))
    called = rewrite.add(Computation(label, rows), f"fused_{label}", before)
    return Instruction(name, "fusion", to, (source,), attributes=(("kind", "kLoop"), ("calls", f"%{called}")))
