"""What onnxruntime knows of ops that are not onnx's: the types of their results.

The runtime's optimizer makes such ops (``com.microsoft``, ``com.microsoft.nchwc``), and exporters write some. Their
schemas are in the runtime alone, so it is asked: a model of that one node, with inputs of the known types, is loaded.
Only ops of trees, vectors and scalers (``ai.onnx.ml``) are run, on zeros: nothing says how large their results are,
which depends on their inputs' sizes alone.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx

from tightship.frontends.onnx.types import TensorType

__all__ = ["LEARNING", "results"]

LEARNING: Final = "ai.onnx.ml"
"""The domain of classical machine learning."""

_MOST: Final = 1 << 28
"""Bytes of weights that are made up for a node, at most."""
_INVALID: Final = "This is an invalid model. Type Error:"
"""How onnxruntime begins what is wrong with the inputs of an op that it knows."""
_KEPT: Final = 64
"""Elements of known contents that a node is given as constants, at most: what shapes are computed from is smaller."""


def results(
    node: Any, types: Mapping[str, TensorType], values: Mapping[str, np.ndarray], opsets: Mapping[str, int]
) -> list[TensorType] | str | None:
    """Types of a node's results, in the order of its outputs, or what onnxruntime says against it; None where it is
    not installed, does not know the op, or cannot say."""
    given = [n for n in node.input if n]
    if any(not types[n].known for n in given):
        return None
    if node.domain == LEARNING and given and (made := _of_trees(node, types[given[0]])) is not None:
        return made
    if importlib.util.find_spec("onnxruntime") is None or any(a.HasField("g") for a in node.attribute):
        return None
    plain = onnx.NodeProto(op_type=node.op_type, domain=node.domain, name="node")
    plain.attribute.extend(node.attribute)
    names = {n: f"i{k}" for k, n in enumerate(dict.fromkeys(given))}
    plain.input.extend(names.get(n, "") for n in node.input)
    plain.output.extend(f"o{k}" if n else "" for k, n in enumerate(node.output))
    fixed = {n: values[n] for n in names if n in values and values[n].size <= _KEPT}
    # Tensors, since numpy alone does not know the types of 4 and 8 bits.
    contents = tuple(onnx.numpy_helper.from_array(v, names[n]).SerializeToString() for n, v in fixed.items())
    shapes = tuple((names[n], types[n].dtype, types[n].sizes) for n in names)
    versions = tuple(sorted({"": opsets.get("", 0) or 13, node.domain: opsets.get(node.domain, 1)}.items()))
    found = _asked(plain.SerializeToString(deterministic=True), shapes, contents, versions)
    return list(found) if isinstance(found, tuple) else found


def _of_trees(node: Any, given: TensorType) -> list[TensorType] | None:
    """Types of the results of an ensemble of trees, which its lists of nodes may be too long to be asked with."""
    about = {a.name: a for a in node.attribute}
    rows = given.sizes[0] if len(given.sizes) == 2 else 1
    if node.op_type == "TreeEnsembleClassifier":
        words, numbers = (about.get(f"classlabels_{kind}") for kind in ("strings", "int64s"))
        if words is not None and words.strings:
            kind, labels = onnx.TensorProto.STRING, len(words.strings)
        else:
            kind, labels = onnx.TensorProto.INT64, 0 if numbers is None else len(numbers.ints)
        scores = TensorType(onnx.TensorProto.FLOAT, (rows, labels))
        return [TensorType(kind, (rows,)), scores] if labels else None
    if node.op_type in ("TreeEnsembleRegressor", "TreeEnsemble"):
        targets = int(about["n_targets"].i) if "n_targets" in about else 1
        kind = given.dtype if node.op_type == "TreeEnsemble" else onnx.TensorProto.FLOAT
        return [TensorType(kind, (rows, targets))]
    return None


@functools.lru_cache(maxsize=4096)
def _asked(
    text: bytes,
    shapes: tuple[tuple[str, int, tuple[int, ...]], ...],
    contents: tuple[bytes, ...],
    opsets: tuple[tuple[str, int], ...],
) -> tuple[TensorType, ...] | str | None:
    node, said = onnx.NodeProto.FromString(text), None
    for weights in (False, True):  # some kernels take weights as constants only
        try:
            tensors = map(onnx.TensorProto.FromString, contents)
            fixed = {t.name: onnx.numpy_helper.to_array(t) for t in tensors}
            if weights:
                if sum(math.prod(s) for _, _, s in shapes) > _MOST // 8:
                    return said
                fixed |= {n: _zeros(t, s) for n, t, s in shapes[1:] if n not in fixed}
            return _of_session(node, [x for x in shapes if x[0] not in fixed], fixed, opsets)
        except Exception as error:
            # What the runtime does not know stays unknown, and is asked of the user by name.
            words = " ".join(str(error).split())
            said = words.split(_INVALID)[1].strip() if _INVALID in words else None
    return said


def _of_session(
    node: Any,
    inputs: list[tuple[str, int, tuple[int, ...]]],
    fixed: dict[str, np.ndarray],
    opsets: tuple[tuple[str, int], ...],
) -> tuple[TensorType, ...] | None:
    import onnxruntime

    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node],
            "node",
            [onnx.helper.make_tensor_value_info(n, t, s) for n, t, s in inputs],
            [onnx.ValueInfoProto(name=n) for n in node.output if n],
            [onnx.numpy_helper.from_array(v, n) for n, v in fixed.items()],
        ),
        opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opsets],
        ir_version=8,
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    made = [_type(o.type, o.shape) for o in session.get_outputs()]
    if node.domain == LEARNING and sum(math.prod(s) for _, _, s in inputs) <= _MOST // 8:
        ran = session.run(None, {n: _zeros(t, s) for n, t, s in inputs})
        made = [t and TensorType(t.dtype, np.shape(x)) for t, x in zip(made, ran, strict=True)]
    found = iter([t or TensorType(0) for t in made])
    return tuple(next(found) if n else TensorType(0) for n in node.output)


def _zeros(dtype: int, shape: tuple[int, ...]) -> np.ndarray:
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    return np.full(shape, "", kind) if dtype == onnx.TensorProto.STRING else np.zeros(shape, kind)


def _type(text: str, shape: Any) -> TensorType | None:
    """A type as onnxruntime names it."""
    names = {"float": "FLOAT", "double": "DOUBLE"}
    inner = text.removeprefix("tensor(").removesuffix(")")
    dtype = onnx.TensorProto.DataType.items()
    number = dict(dtype).get(names.get(inner, inner.upper()))
    if number is None:
        return None
    dims = tuple(d if isinstance(d, int) and d >= 0 else "" for d in shape)
    return TensorType(number, dims)
