"""Contents of small tensors: those in a file, and those that nodes compute from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from tightship.errors import BadInput, Unsupported
from tightship.frontends.onnx.load import external
from tightship.frontends.onnx.types import TensorType, nbytes_of
from tightship.frontends.onnx.wire import held

__all__ = ["FOR_SHAPES", "MOST", "constant_tensor", "constant_type", "constant_value", "evaluated"]

MOST: Final = 4096
"""Elements of a value that is computed here, at most."""

FOR_SHAPES: Final = frozenset(
    "Abs Add And ArgMax ArgMin Cast CastLike Ceil Clip Concat ConstantOfShape CumSum Div Equal Expand Flatten Floor "
    "Gather GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg NonZero Not "
    "OneHot Or Pow Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round ScatterElements ScatterND Sign Slice "
    "Split Sqrt Squeeze Sub Sum Tile Transpose Trilu Unsqueeze Where Xor".split()
)
"""What shapes are computed with. Each gives few elements from few, and none reads a file."""


def constant_tensor(node: Any, where: str) -> Any:
    """The value of a Constant node as a tensor."""
    a = node.attribute[0]
    if a.name == "value" and a.HasField("t"):
        return a.t
    if a.name in ("value_int", "value_ints"):
        return onnx.numpy_helper.from_array(
            np.array(a.i if a.name == "value_int" else list(a.ints), dtype=np.int64)
        )
    if a.name in ("value_float", "value_floats"):
        data = a.f if a.name == "value_float" else list(a.floats)
        return onnx.numpy_helper.from_array(np.array(data, dtype=np.float32))
    if a.name in ("value_string", "value_strings"):
        words = [a.s] if a.name == "value_string" else list(a.strings)
        dims = [] if a.name == "value_string" else [len(words)]
        return onnx.helper.make_tensor("", onnx.TensorProto.STRING, dims, words)
    raise Unsupported(f"{where}: the value {a.name!r} of a Constant", "only dense tensors have known sizes")


def constant_type(tensor: Any, place: str) -> TensorType:
    """Type of an initializer; raises ``BadInput`` if its bytes are not as many as its shape says."""
    where = f"{place}: tensor {tensor.name!r}"
    if any(d < 0 for d in tensor.dims):
        raise BadInput(f"negative dimension {min(tensor.dims)}", place=where)
    found = TensorType(tensor.data_type, tuple(int(d) for d in tensor.dims))
    size = nbytes_of(found, where)
    about = external(tensor)
    if "length" in about and int(about["length"]) != size:
        raise BadInput(f"{about['length']} bytes of external data for a tensor of {size} bytes", place=where)
    inline = held(tensor)
    if not about and (tensor.HasField("raw_data") or (inline is not None and inline.raw)):
        given = len(tensor.raw_data) if inline is None else inline.size
        if given != size:
            raise BadInput(f"{given} bytes of data for a tensor of {size} bytes", place=where)
    return found


def constant_value(tensor: Any, folder: Path, place: str) -> np.ndarray | None:
    """The contents of a small tensor of numbers; None for others."""
    known = constant_type(tensor, place)
    if known.count > MOST or held(tensor) is not None:
        return None
    where = f"{place}: tensor {tensor.name!r}"
    about = external(tensor)
    if about:
        copy = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        copy.raw_data = _read(
            folder / about["location"], int(about.get("offset", 0)), nbytes_of(known, where), where
        )
        tensor = copy
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadInput(
            f"contents that do not fit the tensor's type and shape: {error}", place=where
        ) from error


def _read(path: Path, offset: int, size: int, place: str) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot read external data at {str(path)!r}: {said}", place=place) from error
    if len(data) != size:
        raise BadInput(f"{len(data)} bytes of external data for a tensor of {size} bytes", place=place)
    return data


def evaluated(
    node: Any, inputs: Mapping[str, np.ndarray], types: Sequence[TensorType], opsets: Mapping[str, int]
) -> list[np.ndarray] | None:
    """Results of a node whose inputs are all known and small, in order; None if they stay unknown. ``types`` are
    those of the results."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in FOR_SHAPES:
        return None
    if node.op_type not in ("NonZero", "Range") and not all(t.known and t.count <= MOST for t in types):
        return None
    if node.op_type == "Range" and not _few(*(inputs[n] for n in node.input)):
        return None
    from onnx.reference import ReferenceEvaluator  # half as long to import as the rest of onnx

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = ReferenceEvaluator(_graph_of(node), opsets=dict(opsets)).run(None, dict(inputs))
    except Exception:  # whatever the reference cannot do stays unknown, and is asked of the user by name
        return None
    arrays = [np.asarray(x) for x in found]
    return arrays if all(x.size <= MOST * 8 for x in arrays) else None


def _graph_of(node: Any) -> Any:
    """A graph of one node: of a node alone the reference takes the newest version, whatever the opset."""
    given, made = (
        [onnx.ValueInfoProto(name=n) for n in dict.fromkeys(names) if n]
        for names in (node.input, node.output)
    )
    return onnx.helper.make_graph([node], "node", given, made)


def _few(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> bool:
    if not all(x.size == 1 for x in (start, limit, delta)) or not float(delta.reshape(())):
        return False
    count = (float(limit.reshape(())) - float(start.reshape(()))) / float(delta.reshape(()))
    return count <= MOST
