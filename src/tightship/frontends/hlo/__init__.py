"""HLO modules of XLA (JAX, TensorFlow) as text: reading, writing, aliasing, live ranges, and as a Graph."""

from tightship.frontends.hlo.flatten import flattened
from tightship.frontends.hlo.module import Computation, Instruction, Module, Place
from tightship.frontends.hlo.parse import parse, read
from tightship.frontends.hlo.shape import Index, Shape
from tightship.frontends.hlo.text import to_text

__all__ = [
    "Computation",
    "Index",
    "Instruction",
    "Module",
    "Place",
    "Shape",
    "flattened",
    "parse",
    "read",
    "to_text",
]
