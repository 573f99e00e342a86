"""HLO modules of XLA (JAX, TensorFlow) as text: reading, writing, aliasing, live ranges, and as a Graph."""

from tightship.hlo.module import Computation, Instruction, Module, Place, flattened
from tightship.hlo.shape import Index, Shape
from tightship.hlo.text import parse, read, to_text

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
