"""Shapes of a GraphDef's results, as users give them, as a file has noted them, and as TensorFlow knows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tightship.errors import BadInput
from tightship.frontends.tensorflow.load import GraphFile
from tightship.frontends.tensorflow.nodes import FEEDS

__all__ = [
    "SEGMENTS", "fill", "form", "known_shape", "plain", "read_as", "segments_shape", "shapes_given", "split_given",
    "static_value", "with_shapes",
]  # fmt: skip


def shapes_given(text: str | Iterable[str] | Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
    """Shapes of placeholders: ``x=8x32`` (``scalar`` for no dimensions) between commas, or a mapping. Raises
    ``BadInput``."""
    if text is None:
        return {}
    if isinstance(text, Mapping):
        return {str(n): (s,) if isinstance(s, int) else tuple(s) for n, s in text.items()}
    found: dict[str, tuple[int, ...]] = {}
    for entry in (e for part in ([text] if isinstance(text, str) else text) for e in part.split(",")):
        name, equals, sizes = entry.strip().partition("=")
        parts = [] if sizes == "scalar" else sizes.split("x")
        if not name or not equals or not all(p.isascii() and p.isdigit() and len(p) < 16 for p in parts):
            raise BadInput(f"invalid shape {entry!r}; write name=NxMxK", place="--shape")
        if name in found:
            raise BadInput(f"duplicate shape of {name!r}", place="--shape")
        found[name] = tuple(map(int, parts))
    return found


def split_given(
    proto: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """What is given of placeholders, or of nodes that there are not, and what of other results, by ``name:0``: those
    of a function's nodes by ``function/name:0``."""
    kinds = {n.name: n.op for n in proto.node}
    functions = {f.signature.name for f in proto.library.function}
    fed: dict[str, tuple[int, ...]] = {}
    said: dict[str, tuple[int, ...]] = {}
    for text, sizes in shapes.items():
        name, _, port = text.partition(":")
        if kinds.get(name, "Placeholder") in FEEDS and not (name not in kinds and _within(name, functions)):
            fed[text] = sizes
        else:
            said[f"{name}:{port or 0}"] = sizes
    return fed, said


def _within(name: str, functions: Collection[str]) -> str:
    """The function that a name begins with."""
    ends = (k for k, c in enumerate(name) if c == "/")
    return next((name[:k] for k in ends if name[:k] in functions), "")


def with_shapes(file: GraphFile, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A copy of the graph whose placeholders have these shapes, without what was noted for others."""
    proto = type(file.proto).FromString(file.proto.SerializeToString())
    feeds = {n.name: n for n in proto.node if n.op in FEEDS}
    for name, sizes in shapes.items():
        if name not in feeds:
            there = ", ".join(feeds) or "none"
            raise BadInput(f"unknown placeholder {name!r}; the graph has {there}", place="--shape")
        shape = feeds[name].attr["shape"].shape
        known = [d.size for d in shape.dim]
        fits = len(known) == len(sizes) and all(d in (-1, s) for d, s in zip(known, sizes, strict=True))
        if known and not shape.unknown_rank and not fits:
            raise BadInput(f"{name} is {known} in the graph, not {list(sizes)}", place="--shape")
        shape.Clear()
        for size in sizes:
            shape.dim.add().size = size
        shape.SetInParent()
    for node in proto.node:
        if "_output_shapes" in node.attr:
            del node.attr["_output_shapes"]
    return proto


def static_value(tensor: Any, deep: int = 0) -> Any:
    """What a small tensor of sizes holds, where it is known before anything runs: TensorFlow knows shapes, and not
    what is taken out of one and computed with, such as how many steps a sequence has."""
    value, op = tf.get_static_value(tensor), tensor.op
    if op.type == "ShapeN":
        shape = op.inputs[tensor.value_index].shape
        return np.array(shape.as_list()) if shape.is_fully_defined() else None
    if value is not None or op.type not in _COMPUTED or deep > _DEEPEST:
        return value
    if not tensor.dtype.is_integer or (tensor.shape.num_elements() or 0) > _MOST:
        return None
    given = [static_value(x, deep + 1) for x in op.inputs]
    if any(g is None or g.size > _MOST for g in given):
        return None
    try:
        found = _COMPUTED[op.type](op, *given)
        return None if found is None else np.asarray(found).astype(tensor.dtype.as_numpy_dtype)
    except (ValueError, IndexError, TypeError, FloatingPointError):
        return None


SEGMENTS: Final = frozenset(
    {f"Segment{kind}" for kind in ("Sum", "Mean", "Prod", "Min", "Max")}
    | {f"SparseSegment{kind}" for kind in ("Sum", "Mean", "SqrtN")}
)
"""Kinds of nodes that make a row of each segment, up to the last id."""


def segments_shape(op: Any) -> tuple[int, ...] | None:
    """The shape of what one of `SEGMENTS` makes, where its ids are known: they ascend, and end its inputs."""
    ids, shape = static_value(op.inputs[-1]), op.outputs[0].shape
    if ids is None or ids.ndim != 1 or shape.rank is None or not shape[1:].is_fully_defined():
        return None
    return (int(ids[-1]) + 1 if ids.size else 0, *shape.as_list()[1:])


def _taken(op: Any, whole: Any, *bounds: Any) -> Any:
    """A `StridedSlice` of a row of numbers."""
    plain = not any(op.get_attr(f"{kind}_mask") for kind in ("ellipsis", "new_axis"))
    if not plain or any(b.size != 1 for b in bounds) or whole.ndim != 1:
        return None
    first, last, step = (int(b[0]) for b in bounds)
    if op.get_attr("shrink_axis_mask"):
        return whole[first] if -len(whole) <= first < len(whole) else None
    begin = None if op.get_attr("begin_mask") else first
    return whole[begin : None if op.get_attr("end_mask") else last : step]


def _divided(_op: Any, one: Any, other: Any) -> Any:
    return one // other if np.all(other) else None


_MOST: Final = 1024
"""Elements of a tensor whose value is computed."""
_DEEPEST: Final = 32
_COMPUTED: Final[Mapping[str, Callable[..., Any]]] = {
    "StridedSlice": _taken,
    "Identity": lambda _, x: x,
    "Cast": lambda _, x: x,
    "Pack": lambda op, *rows: np.stack(rows, op.get_attr("axis")),
    "ConcatV2": lambda _, *rows: np.concatenate(rows[:-1], int(rows[-1])),
    "AddV2": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Mul": lambda _, a, b: a * b,
    "FloorDiv": _divided,
    "Maximum": lambda _, a, b: np.maximum(a, b),
    "Minimum": lambda _, a, b: np.minimum(a, b),
    "Reshape": lambda _, x, shape: x.reshape(shape),
    "ExpandDims": lambda _, x, axis: np.expand_dims(x, int(axis)),
    "Prod": lambda op, x, axis: np.prod(x, tuple(np.ravel(axis)), keepdims=op.get_attr("keep_dims")),
}
"""Kinds of nodes that compute sizes, by NumPy's way to do the same."""


def form(shape: Any) -> str:
    """How a shape is given, with letters for what is unknown."""
    if shape.rank is None:
        return "NxM"
    return "x".join("N" if d is None else str(d) for d in shape.as_list()) or "scalar"


def known_shape(known: Any, noted: Any) -> tuple[int, ...] | None:
    if known.is_fully_defined():
        return tuple(known.as_list())
    if noted is None or noted.unknown_rank or any(d.size < 0 for d in noted.dim):
        return None
    merged = tuple(int(d.size) for d in noted.dim)
    return merged if known.is_compatible_with(merged) else None


def plain(text: str) -> str:
    """A node's name for a result."""
    return text.replace(":", "/")


def read_as(text: str, shaped: Collection[str], computed: Collection[str]) -> str:
    """An input where results have been given shapes or values."""
    name = text.removesuffix(":0")
    if name in computed:
        return f"{plain(name)}/computed"
    return f"{plain(name)}/shaped" if name in shaped else text


def fill(node: Any, value: Any, dtype: int) -> None:
    """Make a node a constant."""
    node.op = "Const"
    node.attr.clear()
    node.attr["dtype"].type = dtype
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
