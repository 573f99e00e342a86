"""What TensorFlow's ``Einsum`` needs beside its result: copies of operands and of the product.

Operands are copied whose dimensions are not in the order in which matrices are multiplied: those of the batch, free
ones, contracted ones (the last two the other way round will do). So is the product, where the result has its
dimensions in another order. As the kernel of the CPU has it (tensorflow/core/kernels/linalg/einsum_op_impl.h);
equations with an ellipsis, or with a label twice in one operand, are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tightship.graph import aligned

__all__ = ["einsum_scratch"]

_BATCH, _FREE, _CONTRACT, _REDUCE = range(4)
_SWAPPED = {_BATCH: 0, _CONTRACT: 1, _FREE: 2, _REDUCE: 3}


def einsum_scratch(equation: str, shapes: Sequence[Sequence[int]], itemsize: int) -> int:
    """Bytes that are there at once beside operands and result."""
    left, _, result = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if "." in equation or any(len(set(labels)) < len(labels) for labels in (*operands, result)):
        return 0
    number = {label: k for k, label in enumerate(dict.fromkeys("".join(operands)))}
    sizes = {
        c: n
        for labels, shape in zip(operands, shapes, strict=True)
        for c, n in zip(labels, shape, strict=True)
    }

    def kind(label: str) -> int:
        alone = sum(label in labels for labels in operands) == 1
        return (_FREE if alone else _BATCH) if label in result else (_REDUCE if alone else _CONTRACT)

    def bytes_of(labels: str) -> int:
        return aligned(prod(sizes[c] for c in labels) * itemsize)

    def in_order(labels: str) -> bool:
        keys = [(kind(c), number[c]) for c in labels]
        swapped = [(_SWAPPED[kind(c)], number[c]) for c in labels]
        return keys == sorted(keys) or swapped == sorted(swapped)

    live = most = 0  # copies and sums of operands
    for labels in operands:
        copy = 0 if in_order(labels) else bytes_of(labels)
        kept = "".join(c for c in labels if kind(c) != _REDUCE)
        stays = (
            copy if kept == labels else bytes_of(kept)
        )  # a copy of what is summed goes when the sum is there
        most, live = max(most, live + copy + (stays if kept != labels else 0)), live + stays
    by_number = sorted(result, key=number.__getitem__)
    free = [c for labels in operands for c in by_number if kind(c) == _FREE and c in labels]
    turned = [*(c for c in by_number if kind(c) == _BATCH), *free] != list(result)
    made = bytes_of(result)
    if len(operands) == 1:  # what is live is the product
        return max(most - made, live if turned else live - made, 0)
    return max(most - made, live + (made if turned else 0))
