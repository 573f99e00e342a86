"""What onnx leaves to the runtime: which results share bytes with an input, what draws random numbers, what ops cost.

The tables of views and of results written over an input are those of onnxruntime's CPU kernels (1.31), found by
asking them: a node of each op was run alone, and did or did not request memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from tightship.frontends.onnx.types import TensorType

__all__ = ["IN_PLACE", "flops_of", "is_random", "may_overwrite", "viewed"]

_VIEWS: Final = frozenset("Identity Reshape Squeeze Unsqueeze Flatten".split())

_OVERWRITES: Final = frozenset(
    "Tanh Sigmoid Relu LeakyRelu Elu Selu Celu HardSigmoid Softplus Softsign ThresholdedRelu Softmax LogSoftmax Clip "
    "Shrink Trilu Cast ScatterElements".split()
)
"""Ops that write over their first input."""

_ELEMENTWISE: Final = frozenset(
    "Abs Neg Floor Ceil Round Reciprocal Sqrt Exp Log Erf Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh "
    "Gelu Sign HardSwish Mish Not BitwiseNot Add Sub Mul Div Pow Min Max Sum Mean PRelu Mod And Or Xor Where "
    "BatchNormalization".split()
)
"""Ops that could as well: each element of the result needs the same element of an input, and no other of it."""

IN_PLACE: Final = ("onnxruntime", "elementwise", "none")

_RANDOM: Final = frozenset(
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split()
)


def _standard(node: Any) -> bool:
    return node.domain in ("", "ai.onnx")


def viewed(node: Any) -> int | None:
    """The input whose bytes the first result is a view of; None for none."""
    return 0 if _standard(node) and node.op_type in _VIEWS and node.input else None


def may_overwrite(node: Any, policy: str) -> tuple[int, ...]:
    """Inputs that the first result may be written over, when nobody else needs them and the bytes are as many.

    ``policy``: what onnxruntime does, what an element-wise op allows, or none.
    """
    if policy == "none" or not _standard(node):
        return ()
    if node.op_type in _OVERWRITES:
        return (0,)
    if policy == "elementwise" and node.op_type in _ELEMENTWISE:
        return (0,) if node.op_type == "BatchNormalization" else tuple(range(len(node.input)))
    return ()


def is_random(node: Any, inputs: Sequence[Any]) -> bool:
    """Whether a node draws random numbers; ``inputs``: known contents of its inputs, or None."""
    if not _standard(node):
        return False
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = inputs[2]
        return training is None or bool(training.any())
    return node.op_type in _RANDOM


def flops_of(node: Any, inputs: Sequence[TensorType | None], outputs: Sequence[TensorType | None]) -> int:
    """Floating-point operations, a multiplication and an addition counted as two."""
    made = sum(t.count for t in outputs if t is not None and t.known)
    shapes = [t.sizes if t is not None and t.known else () for t in inputs]
    number = {a.name: a for a in node.attribute}
    op = node.op_type
    if op in ("Conv", "ConvInteger", "QLinearConv"):
        kernel = shapes[3 if op == "QLinearConv" and len(shapes) > 3 else 1] if len(shapes) > 1 else ()
        return 2 * made * math.prod(kernel[1:])
    if op == "ConvTranspose" and len(shapes) > 1:
        return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if op in ("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul"):
        return 2 * made * (shapes[0][-1] if shapes and shapes[0] else 1)
    if op == "Gemm" and shapes and len(shapes[0]) == 2:
        return 2 * made * shapes[0][0 if "transA" in number and number["transA"].i else 1]
    if op == "Einsum":
        return 2 * _einsum(number["equation"].s.decode() if "equation" in number else "", shapes) or made
    if op in ("LSTM", "GRU", "RNN") and len(shapes) > 2 and len(shapes[0]) == 3:
        return 2 * math.prod(shapes[0][:2]) * (math.prod(shapes[1]) + math.prod(shapes[2]))
    if op == "Attention" and len(shapes) > 1 and shapes[0] and shapes[1]:
        keys = shapes[1][-2]
        return 4 * math.prod(shapes[0]) * keys
    if op in ("MaxPool", "AveragePool", "LpPool"):
        return made * math.prod(number["kernel_shape"].ints if "kernel_shape" in number else ())
    return max(made, math.prod(shapes[0]) if shapes else 0)


def _einsum(equation: str, shapes: Sequence[tuple[int, ...]]) -> int:
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.replace(" ", "").split("->")[0].split(","), shapes, strict=False):
        letters = list(term) if "..." not in term else []
        if len(letters) != len(shape):
            return 0
        sizes.update(zip(letters, shape, strict=True))
    return math.prod(sizes.values())
