"""A Module as HLO text, the way XLA writes it: reading it again gives an equal module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tightship.frontends.hlo.module import Computation, Instruction, Module
from tightship.frontends.hlo.shape import Shape

__all__ = ["to_text"]


def to_text(module: Module) -> str:
    """The text of a module, computations and instructions in the module's order."""
    header = f"HloModule {module.name}{_attributes(module.attributes)}"
    tables = ["\n".join([title, *rows]) + "\n" for title, rows in module.tables]
    head = "\n".join([header, "", *tables]) + ("\n" if tables else "")
    return "\n".join([head, *("\n".join(_computation(c)) for c in module.computations)])


def _attributes(attributes: tuple[tuple[str, str], ...]) -> str:
    return "".join(f", {key}={text}" for key, text in attributes)


def _computation(c: Computation) -> Iterator[str]:
    signature = ""
    if c.signature:
        parameters = ", ".join(f"{p.name}: {_bare(p.shape)}" for p in c.parameters)
        signature = f" ({parameters}) -> {_bare(c.root.shape)}"
    yield f"{'ENTRY ' if c.entry else ''}%{c.name}{signature} {{"
    for i in c.instructions:
        yield f"  {instruction_text(i)}"
    yield f"}}{_attributes(c.attributes)}"
    yield ""


def instruction_text(i: Instruction) -> str:
    """One instruction, without indentation."""
    inside = i.payload or _operands(i.operands)
    root = "ROOT " if i.root else ""
    return f"{root}%{i.name} = {i.shape} {i.opcode}({inside}){_attributes(i.attributes)}"


def _operands(names: tuple[str, ...]) -> str:
    return ", ".join(f"/*index={k}*/%{n}" if k and k % 5 == 0 else f"%{n}" for k, n in enumerate(names))


def _bare(shape: Shape) -> Shape:
    """The shape without layouts, as signatures show it."""
    if shape.is_tuple:
        return replace(shape, parts=tuple(_bare(p) for p in shape.parts))
    return replace(shape, layout=None)
