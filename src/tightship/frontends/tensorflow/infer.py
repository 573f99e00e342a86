"""Types and sizes of every result of a GraphDef, by TensorFlow's own shape functions; nothing is run.

TensorFlow's importer checks the graph and infers shapes; what it does not know is taken from the attribute
``_output_shapes``, where the graph was written with it. What nobody knows is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tightship.errors import BadInput, UnknownSize
from tightship.frontends.builder import bounded
from tightship.frontends.tensorflow.load import GraphFile
from tightship.frontends.tensorflow.nodes import FEEDS

__all__ = ["Made", "Types", "infer", "shapes_given", "variable_bytes"]

_STRING = 24  # bytes of an element of a string tensor, whose text lies elsewhere


@dataclass(frozen=True, slots=True)
class Made:
    """One result of a node: element type, shape, bytes. ``handle``: it is a variable's handle; ``ref``: a variable's
    own bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    handle: bool = False
    ref: bool = False


@dataclass(frozen=True)
class Types:
    """By name of a node: its ``results``, whether it is ``stateful`` (not of what it gets alone), and which of its
    inputs it takes as references (``refs``)."""

    results: Mapping[str, tuple[Made, ...]]
    stateful: frozenset[str]
    refs: Mapping[str, tuple[int, ...]]


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


def infer(file: GraphFile, shapes: Mapping[str, tuple[int, ...]]) -> Types:
    """The types of a file's graph for these shapes of its placeholders. Raises ``UnknownSize`` naming every result
    without a size that something reads, ``BadInput`` for what TensorFlow does not accept."""
    place = str(file.path)
    proto = _with_shapes(file, shapes) if shapes else file.proto
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(proto, name="")
        ops = {n.name: graph.get_operation_by_name(n.name) for n in proto.node}
    except (ValueError, TypeError, KeyError, RuntimeError, tf.errors.OpError) as error:
        said = " ".join(str(error).split())[:400]
        raise BadInput(f"TensorFlow rejects the graph: {said}", place=place) from error
    results: dict[str, tuple[Made, ...]] = {}
    unknown: list[str] = []
    for node in proto.node:
        noted = list(node.attr["_output_shapes"].list.shape) if "_output_shapes" in node.attr else []
        row = []
        for k, tensor in enumerate(ops[node.name].outputs):
            shape = _shape(tensor.shape, noted[k] if k < len(noted) else None)
            if shape is None:
                unknown.append(node.name if node.op in FEEDS else f"{node.name}:{k}")
                shape = ()
            row.append(_made(tensor.dtype, shape, f"{place}: node {node.name!r}"))
        results[node.name] = tuple(row)
    if unknown:
        names = ", ".join(unknown[:6]) + (f" and {len(unknown) - 6} more" if len(unknown) > 6 else "")
        raise UnknownSize(f"unknown size of {names}; give placeholders' with --shape NAME=NxM", place=place)
    stateful = frozenset(n for n, op in ops.items() if op.op_def.is_stateful)
    refs = {n: tuple(i for i, t in enumerate(op._input_types) if t._is_ref_dtype) for n, op in ops.items()}
    return Types(results, stateful, {n: r for n, r in refs.items() if r})


def _with_shapes(file: GraphFile, shapes: Mapping[str, tuple[int, ...]]) -> Any:
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


def _shape(known: Any, noted: Any) -> tuple[int, ...] | None:
    if known.is_fully_defined():
        return tuple(known.as_list())
    if noted is None or noted.unknown_rank or any(d.size < 0 for d in noted.dim):
        return None
    merged = tuple(int(d.size) for d in noted.dim)
    return merged if known.is_compatible_with(merged) else None


def _made(dtype: Any, shape: tuple[int, ...], place: str) -> Made:
    base = dtype.base_dtype
    if base == tf.resource:
        return Made("resource", (), 0, handle=True)
    if base == tf.variant:
        raise UnknownSize("elements of type variant have no fixed size in bytes", place=place)
    nbytes = bounded(math.prod(shape) * (_STRING if base == tf.string else base.size), place)
    return Made(base.name, shape, nbytes, ref=dtype._is_ref_dtype)


def variable_bytes(node: Any, place: str) -> int:
    """Bytes of the variable that a node (``VarHandleOp``) is the handle of. Raises ``UnknownSize``."""
    shape = tf.TensorShape(node.attr["shape"].shape)
    if not shape.is_fully_defined():
        raise UnknownSize(f"unknown size of a variable of shape {shape}", place=place)
    return int(shape.num_elements()) * int(tf.dtypes.as_dtype(node.attr["dtype"].type).size)
