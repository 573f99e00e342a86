"""What kernels of TensorFlow's CPU share with an input, and ask for beside their result.

Rows of a tensor, the parts of it along its first dimension, are the tensor's own bytes where each begins at a
multiple of 64 bytes, and keep all of it in memory (``IsDim0SliceAligned`` in tensorflow/core/framework/ops_util.h).
A transposed convolution of one image computes a column for each of its places before it adds them up
(conv_grad_input_ops.h; of several images as many as fit into a cache of 30 MB, which is not counted). A reduction
transposes its input where dimensions that are reduced and kept take more than three turns
(reduction_ops_common.h). A variable that is written in parts is copied by whoever reads it, from then on
(``copy_on_read_mode``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from math import prod
from typing import Any, Final

__all__ = ["ROWS", "is_written_in_parts", "patches_of", "reduction_copies", "rows_of"]

ALIGNMENT: Final = 64
ROWS: Final = {"Slice": 0, "StridedSlice": 0, "Split": 1, "SplitV": 0, "Unpack": 0}
"""By kinds whose results may be rows of an input, which input that is."""
_REDUCTIONS: Final = frozenset("All Any EuclideanNorm Max Mean Min Prod Sum".split())

Shape = Sequence[int]
Constant = Callable[[int], "list[int] | None"]


def rows_of(node: Any, given: Shape, made: Shape, itemsize: int, constant: Constant) -> bool:
    """Whether the result ``made`` of a node of `ROWS` is rows of its input ``given``, without a copy; ``constant``
    says what is known of the whole numbers in an input."""
    if node.op == "StridedSlice":
        strides = constant(3)
        if strides is None or any(n != 1 for n in strides):
            return False
        if prod(made) == prod(given):
            return True  # all of it, maybe of more dimensions
        inner = _taken(node, len(strides), given, made)[1:]
    else:
        inner = tuple(made if node.op == "Unpack" else made[1:])
    if not given or inner != tuple(given[1:]):
        return False
    if node.op == "Unpack" and node.attr["axis"].i not in (0, -len(given)):
        return False
    if inner:
        return prod(inner) * itemsize % ALIGNMENT == 0
    if node.op not in ("Slice", "StridedSlice"):
        return False
    begins = [0] if node.op == "StridedSlice" and node.attr["begin_mask"].i & 1 else constant(1)
    return begins is not None and len(begins) == 1 and begins[0] >= 0 and not begins[0] * itemsize % ALIGNMENT


def _taken(node: Any, written: int, given: Shape, made: Shape) -> tuple[int, ...]:
    """How much a strided slice takes of each dimension of its input, by its result's; ``written`` entries say how,
    of which some make a new dimension, or leave one out."""
    new, shrunk, rest = (node.attr[f"{name}_mask"].i for name in ("new_axis", "shrink_axis", "ellipsis"))
    left = len(given) - sum(1 for k in range(written) if not (new | rest) >> k & 1)
    sizes, found = iter(made), list[int]()
    for k in range(written):
        if rest >> k & 1:
            found += [next(sizes, 1) for _ in range(left)]
            left = 0
        elif new >> k & 1:
            next(sizes, None)
        else:
            found.append(1 if shrunk >> k & 1 else next(sizes, 1))
    return (*found, *sizes)


def reduction_copies(kind: str, given: Shape, axes: Collection[int] | None) -> bool:
    """Whether a node transposes its input before it reduces it along ``axes``."""
    if kind not in _REDUCTIONS or axes is None:
        return False
    reduced = {a % len(given) for a in axes} if given else set()
    groups = [k for k, _ in groupby(a in reduced for a, n in enumerate(given) if n != 1)]
    return len(groups) > 3


def patches_of(kind: str, filters: Shape, images: Shape) -> int:
    """Elements that a transposed convolution of one image, in the order of NHWC, computes before it adds them up."""
    if kind != "Conv2DBackpropInput" or len(filters) != 4 or len(images) != 4 or images[0] != 1:
        return 0
    return prod(images[1:3]) * prod(filters[:3])


def is_written_in_parts(kind: str) -> bool:
    """Whether a kind writes some elements of a variable, of which all reads are copies then."""
    return kind.startswith(("ResourceScatter", "ResourceSparseApply")) or kind == "ResourceStridedSliceAssign"
