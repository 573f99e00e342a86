"""ONNX models in slices of rows: onnxruntime gives equal results, the checker accepts them, memory is as planned."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
from onnx import TensorProto, helper, numpy_helper

from tightship import api
from tightship.cli import main
from tightship.errors import Infeasible, Unsupported
from tightship.integrations import onnx_split
from tightship.integrations.onnx_write import write_model
from tightship.integrations.onnxruntime import measure, random_feeds
from tightship.simulate import baseline, replay
from tightship.sources import read_onnx

ROUNDING = 63


def model_of(nodes, weights, *, size=(1, 3, 24, 9), out="y", result=None):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, size)
    y = helper.make_tensor_value_info(out, TensorProto.FLOAT, result)
    held = [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
    graph = helper.make_graph(nodes, "net", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def net(**first):
    """Convolutions, a norm, a residual, pooling, branches joined."""
    draw = np.random.default_rng(0)
    w = {
        "w0": draw.normal(size=(8, 3, 3, 3)), "w1": draw.normal(size=(8, 1, 3, 3)),
        "w2": draw.normal(size=(8, 8, 1, 1)),
        "s": np.ones(8), "b": draw.normal(size=8), "m": draw.normal(size=8), "v": draw.uniform(0.5, 2, 8),
        "c": draw.normal(size=(8, 1, 1)),
    }  # fmt: skip
    n = helper.make_node
    nodes = [
        n("Conv", ["x", "w0"], ["a"], **(first or {"pads": [1, 1, 1, 1]})),
        n("BatchNormalization", ["a", "s", "b", "m", "v"], ["a1"]),
        n("Relu", ["a1"], ["a2"]),
        n("Conv", ["a2", "w1"], ["d"], group=8, pads=[2, 2, 2, 2], dilations=[2, 2]),
        n("Mul", ["d", "c"], ["d1"]),
        n("Conv", ["d1", "w2"], ["e"]),
        n("Add", ["e", "a2"], ["f"]),
        n("MaxPool", ["f"], ["g"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 1]),
        n("AveragePool", ["g"], ["h"], kernel_shape=[2, 3], pads=[1, 1, 0, 1]),
        n("Concat", ["g", "h"], ["i"], axis=1),
        n("HardSigmoid", ["i"], ["y"]),
    ]
    return model_of(nodes, w)


def saved(model, path):
    onnx.save(model, path)
    return path


FIRST = {
    "padded": {"pads": [1, 1, 1, 1]},
    "strided": {"pads": [0, 1, 2, 1], "strides": [2, 1]},
    "same upper": {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    "same lower": {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    "valid": {"auto_pad": "VALID"},
}


@pytest.mark.parametrize("name", FIRST)
def test_each_region_in_each_number_of_slices_gives_equal_results(name, tmp_path):
    program = read_onnx(saved(net(**FIRST[name]), tmp_path / "net.onnx"))
    finder, n = onnx_split.finder(program), len(program.graph.ops)
    found = [r for i in range(n) for j in range(i + 2, n + 1) if (r := finder.region(i, j)) is not None]
    assert max(len(r.ops) for r in found) == n
    feeds = random_feeds(program.model.path, {"x": (1, 3, 24, 9)})
    want = measure(program.model.path, feeds).outputs
    for region in found[:: max(1, len(found) // 8)]:
        for count in {2, 3, region.rows}:
            if count > region.rows:
                continue
            made = onnx_split.split(program, [(region, count)])
            plan = api.plan_graph(made.graph, hand_out=False).plan
            write_model(made, plan, tmp_path / "out.onnx")
            run = measure(tmp_path / "out.onnx", feeds)
            planned = replay(made.graph, plan.steps).peak - made.graph.static_bytes
            assert planned - ROUNDING * len(made.graph.storages) <= run.peak <= planned
            assert all(
                np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(want, run.outputs, strict=True)
            )


def large(tmp_path):
    draw, n = np.random.default_rng(0), helper.make_node
    nodes = [n("Conv", ["x", "w0"], ["a"]), n("Relu", ["a"], ["b"])]
    nodes += [n("MaxPool", ["b"], ["c"], kernel_shape=[5, 5], strides=[4, 4]), n("Tanh", ["c"], ["y"])]
    weights = {"w0": draw.normal(size=(32, 3, 1, 1))}
    return saved(model_of(nodes, weights, size=(1, 3, 64, 64)), tmp_path / "large.onnx")


def test_the_command_line_writes_a_model_in_slices(tmp_path, capsys):
    path, out = large(tmp_path), tmp_path / "out.onnx"
    given = [
        "plan",
        str(path),
        "--budget",
        "static+20%",
        "--allow",
        "recompute,split",
        "--write",
        str(out),
        "--json",
    ]
    assert main(given) == 0
    rows = json.loads(capsys.readouterr().out)
    program = read_onnx(path)
    assert rows["peak_before"] == replay(program.graph, baseline(program.graph)).peak
    assert rows["peak_after"] - rows["static"] <= (rows["peak_before"] - rows["static"]) // 5
    assert any("equal results in onnxruntime" in note for note in rows["notes"])
    feeds = random_feeds(path, {"x": (1, 3, 64, 64)})
    one, other = measure(path, feeds), measure(out, feeds)
    assert np.array_equal(one.outputs[0], other.outputs[0])
    assert other.peak < one.peak // 4
    assert main(["plan", str(path), "--budget", "static+20%"]) == 1
    assert "splitting" in capsys.readouterr().err


def test_slices_without_pytorch_and_without_a_budget(tmp_path):
    """Where onnx alone is installed; without a budget nothing is cut, which the plan says."""
    path = str(large(tmp_path))
    code = "import sys; sys.modules['torch'] = None; from tightship.cli import main; sys.exit(main(sys.argv[1:]))"
    for budget in (["--budget", "static+20%"], []):
        given = ["plan", path, *budget, "--allow", "recompute,split-rounding", "--json"]
        ran = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        rows = json.loads(ran.stdout)
        said = [n for n in rows["notes"] if "without a budget" in n]
        assert bool(rows.get("split")) == bool(budget) == (not said)


def test_a_model_in_slices_says_why_and_what_if(tmp_path, capsys):
    """Beside --write: the page has its slider; the plan says of each slice what its whole would need."""
    path, plan, page = (str(tmp_path / name) for name in ("net.onnx", "plan.json", "page.html"))
    onnx.save(net(), path)
    ways = ["--allow", "recompute,split-rounding", "--seconds", "1", "--json"]
    least = api.plan_graph(read_onnx(path).graph).plan.lower_bound
    files = ["-o", plan, "--what-if", "2", "--report", page, "--write", str(tmp_path / "w.onnx")]
    assert main(["plan", path, "-b", f"{least - 64}B", *ways, *files]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows["what_if"]) == 2 and rows["split"] > 0
    assert "What if?" in (tmp_path / "page.html").read_text()
    storages = rows["meta"]["split"]["storages"]
    for name in storages:
        assert main(["explain", plan, "--why", name, "--json"]) == 0
        answer = {a["way"]: a for a in json.loads(capsys.readouterr().out)["alternatives"]}
        assert answer["split"]["verdict"] == "chosen" and answer["whole"]["verdict"] == "over the budget"
        assert answer["whole"]["peak"] == least


def test_results_that_differ_are_not_taken_where_bits_count(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_split, "_equal", lambda *_: False)
    with pytest.raises(Infeasible, match="onnxruntime gives other bits"):
        api.plan(large(tmp_path), None, "static+20%", allow="split")
    planned = api.plan(large(tmp_path), None, "static+20%", allow="split-rounding")
    assert not any("equal results" in note for note in planned.notes)


def test_equal_results_are_not_claimed_without_onnxruntime(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_split.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Unsupported, match="onnxruntime"):
        api.plan(large(tmp_path), None, "static+20%", allow="split")
