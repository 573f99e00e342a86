"""What runs of a file that is planned after onnxruntime's optimization is what was planned, to the bit as by default.

The runtime would change such a file once more where it optimizes it again: it folds what it had kept apart for
quantized kernels, lays out the convolutions of what it had folded, and joins casts of float16.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto

from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.integrations.onnx_compare import write_best
from tightship.integrations.onnx_feeds import feeds_of
from tightship.integrations.onnxruntime import measure, optimized

RNG = np.random.default_rng(0)
HALF = TensorProto.FLOAT16


def dequantized(name, *shape):
    """A weight in whole numbers, and the node that makes numbers of it."""
    given = [
        tensor(f"{name}_q", RNG.integers(-99, 99, shape).astype(np.int8)),
        tensor(f"{name}_z", np.int8(0)),
    ]
    scale = tensor(f"{name}_s", np.float32(0.003))
    return node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [name]), [*given, scale]


def norms():
    """Weights in whole numbers that no quantized kernel reads: they are made numbers of in every run."""
    rows, given = zip(
        *(dequantized(n, *s) for n, s in (("w", (32, 32)), ("g", (32,)), ("b", (32,)))), strict=True
    )
    nodes = [*rows, node("MatMul", ["x", "w"], ["m"]), node("LayerNormalization", ["m", "g", "b"], ["n"])]
    nodes += [node("Mul", ["n", "g"], ["o"]), node("Add", ["o", "m"], ["y"])]
    return made(
        nodes, [value("x", [8, 32])], [value("y", [8, 32])], [t for row in given for t in row], opset=17
    )


def layouts():
    """A convolution by such weights: in the runtime's own layout only once they are numbers."""
    rows, given = zip(*(dequantized(n, 16, 16, 3, 3) for n in "uv"), strict=True)
    nodes = [*rows, node("Conv", ["x", "u"], ["c"], pads=[1, 1, 1, 1]), node("Sigmoid", ["c"], ["s"])]
    nodes += [node("Conv", ["s", "v"], ["d"], pads=[1, 1, 1, 1]), node("Add", ["c", "d"], ["y"])]
    shape = [1, 16, 16, 16]
    return made(nodes, [value("x", shape)], [value("y", shape)], [t for row in given for t in row], opset=17)


def half():
    """Convolutions and norms in float16, which the processor computes in float32, between casts."""
    given = [tensor(n, (RNG.standard_normal((16, 16, 3, 3)) / 8).astype(np.float16)) for n in "uvw"]
    nodes, last = [], "x"
    for k, name in enumerate("uvw"):
        nodes.append(node("Conv", [last, name], [f"c{k}"], pads=[1, 1, 1, 1]))
        nodes.append(node("Relu", [f"c{k}"], [f"r{k}"]))
        last = f"r{k}"
    nodes += [node("Concat", ["r0", "r1", last], ["a"], axis=1), node("GlobalAveragePool", ["a"], ["p"])]
    given += [tensor(n, (1 + RNG.standard_normal((1,))).astype(np.float16)) for n in "gb"]
    nodes += [node("Add", ["p", "p"], ["t"]), node("LayerNormalization", ["t", "g", "b"], ["y"])]
    return made(nodes, [value("x", [1, 16, 32, 32], HALF)], [value("y", None, HALF)], given, opset=17)


@pytest.mark.parametrize("model", [norms, layouts, half], ids=lambda f: f.__name__)
def test_a_planned_file_runs_as_planned(tmp_path, model):
    original = lower(read(saved(tmp_path, model())))
    (tmp_path / "work").mkdir()
    program = optimized(original, tmp_path / "work")
    plan = api.plan_graph(program.graph).plan
    answer = write_best(program, plan, original, tmp_path / "out.onnx", must=True)
    assert answer.tried["planned"].difference == 0
    ran = measure(tmp_path / "out.onnx", feeds_of(original), **answer.session)
    assert len(ran.order) == len(program.graph.ops)
    assert 0 <= plan.peak - program.graph.static_bytes - ran.peak <= 64
