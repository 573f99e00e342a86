"""Ensembles of trees: their nodes are lists of numbers in attributes, which are left in the file as weights are."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
import onnxruntime as ort
from onnx import helper

from support.graphs import made, node, value
from tightship.cli import main
from tightship.frontends.onnx import wire
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.frontends.onnx.runs import run_end

LEARNING = "ai.onnx.ml"


def trees(op, many=400, *, leaves=4, **attributes):
    """Stumps whose two leaves give a class or a target each."""
    rows = np.arange(3 * many)
    inner = rows % 3 == 0
    lists = {
        "nodes_treeids": rows // 3, "nodes_nodeids": rows % 3, "nodes_featureids": np.where(inner, rows % 4, 0),
        "nodes_truenodeids": np.where(inner, 1, 0), "nodes_falsenodeids": np.where(inner, 2, 0),
        "nodes_values": np.sin(rows).astype(np.float32), "nodes_hitrates": np.ones(3 * many, np.float32),
        "nodes_modes": ["BRANCH_LEQ" if x else "LEAF" for x in inner],
    }  # fmt: skip
    ends, kind = rows[~inner], "class" if op == "TreeEnsembleClassifier" else "target"
    lists |= {f"{kind}_treeids": ends // 3, f"{kind}_nodeids": ends % 3}
    lists |= {f"{kind}_ids": ends * 7 % leaves, f"{kind}_weights": np.cos(ends).astype(np.float32)}
    lists = {k: v if isinstance(v, list) else v.tolist() for k, v in lists.items()}
    return node(op, ["x"], ["y"] if kind == "target" else ["y", "p"], domain=LEARNING, **lists, **attributes)


def model_of(asked, rows="n", opset=17):
    outputs = [onnx.ValueInfoProto(name=n) for n in asked.output]
    model = made([asked], [value("x", [rows, 4])], outputs, opset=opset)
    model.opset_import.append(helper.make_opsetid(LEARNING, 3))
    model.ir_version = 8
    return model


KINDS = {
    "classes": ("TreeEnsembleClassifier", {"classlabels_int64s": [0, 1, 2, 3]}, 4),
    "two classes, of one score": ("TreeEnsembleClassifier", {"classlabels_int64s": [3, 5]}, 1),
    "two classes, of two scores": ("TreeEnsembleClassifier", {"classlabels_int64s": [0, 1]}, 2),
    "names": ("TreeEnsembleClassifier", {"classlabels_strings": ["a", "b", "c"], "post_transform": "SOFTMAX"}, 3),
    "targets": ("TreeEnsembleRegressor", {"n_targets": 3}, 3),
    "a target": ("TreeEnsembleRegressor", {"n_targets": 1, "aggregate_function": "MAX"}, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ensembles_have_the_sizes_that_onnxruntime_gives_them(tmp_path, kind):
    op, attributes, leaves = KINDS[kind]
    model = model_of(trees(op, 5, leaves=leaves, **attributes))
    path = tmp_path / "trees.onnx"
    onnx.save(model, str(path))
    feeds = {"x": np.zeros((6, 4), np.float32)}
    ran = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)
    values = {v.name: v for v in lower(read(path), "n=6").graph.values}
    for name, result in zip(model.graph.node[0].output, ran, strict=True):
        kinds = {"O": "string", "i": "int64", "f": "float32"}
        assert values[name].shape == result.shape and values[name].dtype == kinds[result.dtype.kind]


@pytest.mark.parametrize(("opset", "kind"), [(17, "names"), (17, "targets"), (9, "classes")])
def test_lists_of_trees_stay_in_the_file_and_are_written_back(tmp_path, monkeypatch, opset, kind):
    """Forests of 110 MB were refused, as all of it counted as other than weights."""
    op, attributes, leaves = KINDS[kind]
    model = model_of(trees(op, 16_000, leaves=leaves, **attributes), opset=opset)
    path, out = tmp_path / "trees.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    if opset == 17:
        monkeypatch.setattr("tightship.frontends.onnx.load.LARGEST_STRUCTURE", 10_000)
    slim = read(path).proto
    assert wire.held_lists(slim.graph.node[0]) == 12 and slim.ByteSize() < 3000
    assert main(["plan", str(path), "--shape", "n=6", "--optimize", "none", "--write", str(out)]) == 0
    before = {a.name: a for a in model.graph.node[0].attribute}
    assert {a.name: a for a in onnx.load(str(out)).graph.node[0].attribute} == before
    feeds = {"x": np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)}
    one, other = (
        ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]).run(None, feeds) for p in (path, out)
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# --- where lists end ---


LISTS = {
    "floats": (7, np.sin(np.arange(3000)).astype(np.float32).tolist()),
    "numbers of all lengths": (8, [(-1) ** k * (1 << k % 63) + k for k in range(999)]),
    "tags among numbers": (8, [64, 8192, 0x4040, 0, 64] * 300),
    "few texts": (9, [b"LEAF", b"BRANCH_LEQ", b""] * 400),
    "many texts, long ones": (9, [bytes([65 + k % 26]) * (k % 300) for k in range(900)]),
}
"""Numbers of fields, and what they hold."""


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
@pytest.mark.parametrize("kind", LISTS)
def test_a_list_ends_where_its_last_element_does(monkeypatch, kind, block):
    monkeypatch.setattr("tightship.frontends.onnx.runs._BLOCK", block)
    number, values = LISTS[kind]
    whole = helper.make_attribute("nodes_x", values)
    head, tail = onnx.AttributeProto(name="nodes_x"), onnx.AttributeProto(type=whole.type)
    body, begin = whole.SerializeToString(), head.ByteSize()
    assert body.startswith(head.SerializeToString())
    end = run_end(wire.from_bytes(body), begin, len(body), number, wire._past)
    assert body[end:] == tail.SerializeToString()


def test_a_list_in_pieces_stays_in_the_model(tmp_path):
    """As no writer that is known writes them, and protobuf allows it."""
    pieces = [onnx.AttributeProto(ints=[k] * 20_000).SerializeToString() for k in (5, 6)]
    name, type_ = (
        onnx.AttributeProto(**x).SerializeToString() for x in ({"name": "nodes_nodeids"}, {"type": 7})
    )
    body = b"".join([name, pieces[0], type_, pieces[1]])
    data = onnx.NodeProto(op_type="X", domain=LEARNING).SerializeToString() + field(5, body)
    data = model_of(trees("TreeEnsembleRegressor", 1)).SerializeToString() + field(7, field(1, data))
    found = onnx.ModelProto.FromString(wire.slim(wire.from_bytes(data), len(data), 1 << 27))
    assert found == onnx.ModelProto.FromString(data)
    assert list(found.graph.node[1].attribute[0].ints) == [5] * 20_000 + [6] * 20_000


def field(number, contents):
    return wire._varint_of(number << 3 | 2) + wire._varint_of(len(contents)) + contents
