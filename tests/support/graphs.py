"""Small ONNX models made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save_model

__all__ = ["FLOAT", "made", "node", "saved", "tensor", "value"]

FLOAT = TensorProto.FLOAT
node = helper.make_node


def value(name: str, shape: Any, dtype: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def tensor(name: str, array: Any) -> Any:
    return numpy_helper.from_array(np.asarray(array), name)


def made(nodes: Any, inputs: Any, outputs: Any, weights: Any = (), *, opset: int = 21, **more: Any) -> Any:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    opsets = [helper.make_opsetid("", opset), *more.pop("opsets", ())]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def saved(folder: Path, model: Any, name: str = "model.onnx") -> Path:
    save_model(model, folder / name)
    return folder / name
