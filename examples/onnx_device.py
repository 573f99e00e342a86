"""An ONNX model for a small device: the order of its nodes with the least peak, and the arena it needs.

    python examples/onnx_device.py        # a second, on the CPU; needs onnx, and onnxruntime to run it

A network of branches is written as model.onnx into the current folder, planned, and written as planned.onnx.
"""

import sys

import numpy as np

import tightship
from tightship.cli import main as command

try:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
except ImportError:
    sys.exit("this example needs onnx: pip install 'tightship[onnx]'")


def branches(count: int = 4, channels: int = 16) -> onnx.ModelProto:
    """Branches that widen and narrow again, all begun before any is finished."""
    rng = np.random.default_rng(0)
    nodes, weights, narrow = [], [], []
    for k in range(count):
        for name, shape in (
            (f"a{k}", (8 * channels, channels, 1, 1)),
            (f"b{k}", (channels, 8 * channels, 1, 1)),
        ):
            weights.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    nodes += [helper.make_node("Conv", ["x", f"a{k}"], [f"wide{k}"]) for k in range(count)]
    nodes += [helper.make_node("Relu", [f"wide{k}"], [f"relu{k}"]) for k in range(count)]
    for k in range(count):
        nodes.append(helper.make_node("Conv", [f"relu{k}", f"b{k}"], [f"narrow{k}"]))
        narrow.append(f"narrow{k}")
    nodes.append(helper.make_node("Concat", narrow, ["y"], axis=1))
    shape = ["batch", channels, 32, 32]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None))]
    graph = helper.make_graph(nodes, "branches", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def main() -> None:
    onnx.save(branches(), "model.onnx")
    plan = tightship.plan("model.onnx", "batch=1")
    print(plan)
    assert plan.peak < plan.peak_before
    assert command(["plan", "model.onnx", "--shape", "batch=1", "--write", "planned.onnx"]) == 0

    try:
        import onnxruntime
    except ImportError:
        sys.exit("not run: onnxruntime is not installed")
    from tightship.integrations.onnxruntime import session

    x = np.random.default_rng(1).normal(size=(1, 16, 32, 32)).astype(np.float32)
    before = onnxruntime.InferenceSession("model.onnx").run(None, {"x": x})[0]
    after = session("planned.onnx").run(None, {"x": x})[0]
    assert np.array_equal(before, after)
    print("onnxruntime: the same results to the bit")


if __name__ == "__main__":
    main()
