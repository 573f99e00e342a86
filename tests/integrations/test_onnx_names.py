"""Names of nodes in planned ONNX files: onnxruntime loads no graph with two nodes of one name."""

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
from onnx import TensorProto, helper

from support.graphs import made, node, saved, value
from tightship.cli import main
from tightship.frontends.builder import UniqueNames
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.integrations.onnx_write import write_model
from tightship.integrations.onnxruntime import measure
from tightship.plan import Plan, Step


def test_names_are_never_given_twice():
    names = UniqueNames()
    assert [names(n) for n in ("n", "n#2", "n", "n", "n#2")] == ["n", "n#2", "n#3", "n#4", "n#2#2"]
    names = UniqueNames(["n", "n#2"])
    assert names("n") == "n#3"


def twins(name):
    """A chain of nodes, and a branch, in which ``name(k)`` is the k-th node's."""
    then = helper.make_graph(
        [node("Exp", ["b"], ["t"], name=name(0)), node("Neg", ["t"], ["u"], name=name(1))],
        "then",
        [],
        [value("u", [4])],
    )
    other = helper.make_graph([node("Sin", ["b"], ["e"], name=name(2))], "else", [], [value("e", [4])])
    nodes = [node("Relu", ["x"], ["a"], name=name(3)), node("Tanh", ["a"], ["b"], name=name(4))]
    nodes += [node("If", ["c"], ["d"], then_branch=then, else_branch=other, name="n#2")]
    nodes += [node("Sub", ["d", "x"], ["out"], name=name(5))]
    return made(nodes, [value("x", [4]), value("c", [], TensorProto.BOOL)], [value("out", [4])])


def test_a_model_of_equal_names_is_written_so_that_the_runtime_loads_it(tmp_path, capsys):
    equal = saved(tmp_path, twins(lambda k: "n"), "equal.onnx")
    own = saved(tmp_path, twins(lambda k: f"m{k}"), "own.onnx")
    for more in ((), ("--optimize", "none")):
        assert main(["plan", str(equal), "--write", str(tmp_path / "out.onnx"), *more]) == 0
        assert "onnxruntime loads no two nodes of one name: 3 renamed" in capsys.readouterr().out
        feeds = {"x": np.array([-1, 0.5, 2, 3], np.float32), "c": np.array(True)}
        written = measure(tmp_path / "out.onnx", feeds)
        assert np.array_equal(written.outputs[0], measure(own, feeds).outputs[0])
        names = [n.name for n in onnx.load(tmp_path / "out.onnx").graph.node]
        assert names == ["n", "n#3", "n#2", "n#4"]


def test_clones_have_names_of_their_own(tmp_path):
    nodes = [
        node("Exp", ["x"], ["a"], name="e"),
        node("Neg", ["a"], ["b"], name="e__again1"),
        node("Add", ["a", "b"], ["y"]),
    ]
    program = lower(read(saved(tmp_path, made(nodes, [value("x", [64])], [value("y", None)]))))
    a = next(v.storage for v in program.graph.values if v.name == "a")
    steps = (
        Step("compute", op=0),
        Step("compute", op=1),
        Step("free", storages=(a,)),
        Step("recompute", 0, (a,)),
    )
    write_model(program, Plan(program.graph.digest, (*steps, Step("compute", op=2))), tmp_path / "out.onnx")
    feeds = {"x": np.linspace(-1, 1, 64, dtype=np.float32)}
    run = measure(tmp_path / "out.onnx", feeds)
    assert len(set(run.order)) == 4
    assert np.array_equal(run.outputs[0], measure(program.model.path, feeds).outputs[0])
