"""External data beside a written model: all of it is there with the model, or none."""

import numpy as np
import pytest

pytest.importorskip("onnx")
import onnx

from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.errors import BadInput
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.integrations.onnx_write import write_model


@pytest.fixture
def program(tmp_path):
    """A model with two files of weights, of which one is in a folder of its own."""
    rng = np.random.default_rng(0)
    weights = [tensor(n, rng.standard_normal((8, 8)).astype(np.float32)) for n in ("a", "b")]
    nodes = [node("MatMul", ["x", "a"], ["h"]), node("MatMul", ["h", "b"], ["y"])]
    model = made(nodes, [value("x", [4, 8])], [value("y", None)], weights)
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    for w, at in zip(model.graph.initializer, ("a.bin", "more/b.bin"), strict=True):
        (folder / at).write_bytes(w.raw_data)
        w.ClearField("raw_data")
        w.data_location = onnx.TensorProto.EXTERNAL
        w.external_data.add(key="location", value=at)
    return lower(read(saved(folder, model)))


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_data_comes_with_the_model(program, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    made_there = write_model(program, api.plan_graph(program.graph).plan, out / "out.onnx")
    assert made_there == [out / "a.bin", out / "more/b.bin"]
    assert files(out) == ["a.bin", "more/b.bin", "out.onnx"]


def test_where_one_file_is_another_none_is_copied(program, tmp_path):
    out = tmp_path / "out"
    (out / "more").mkdir(parents=True)
    (out / "more/b.bin").write_bytes(b"another")
    with pytest.raises(BadInput, match=r"external data would replace another file, '.*b\.bin'"):
        write_model(program, api.plan_graph(program.graph).plan, out / "out.onnx")
    assert files(out) == ["more/b.bin"] and (out / "more/b.bin").read_bytes() == b"another"


@pytest.mark.parametrize("end", [KeyboardInterrupt, onnx.checker.ValidationError])
def test_where_no_model_is_written_no_data_is_left(end, program, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()

    def ends(path):
        assert files(out)[1:] == ["a.bin", "more/b.bin"]
        raise end("the end")

    monkeypatch.setattr(onnx.checker, "check_model", ends)
    with pytest.raises((KeyboardInterrupt, BadInput), match="the end"):
        write_model(program, api.plan_graph(program.graph).plan, out / "out.onnx")
    assert files(out) == []
