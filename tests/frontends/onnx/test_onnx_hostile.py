"""ONNX files that are broken, too large, or mean harm: a clear error, no crash, bounded memory."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

pytest.importorskip("onnx")
from onnx import TensorProto, helper

from support.graphs import made, node, saved, tensor, value
from tightship.errors import BadInput, TightshipError, Unsupported
from tightship.frontends.onnx import load
from tightship.frontends.onnx.lower import lower


def model(**more):
    weights = [tensor("w", np.ones((8, 8), np.float32)), tensor("s", np.array([4, 16], dtype=np.int64))]
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Reshape", ["a", "s"], ["b"]),
        node("Split", ["b"], ["c", "d"], axis=1, num_outputs=2),
        node("Conv", ["i", "k"], ["e"], strides=[2, 2]),
        node("Add", ["c", "d"], ["out"]),
    ]
    weights.append(tensor("k", np.ones((2, 3, 3, 3), np.float32)))
    ends = [value("x", ["n", 8]), value("i", [1, 3, 9, 9])], [value("out", None), value("e", None)]
    return made(nodes, *ends, weights, **more)


def test_every_truncation_is_said(tmp_path):
    data = model().SerializeToString()
    path = tmp_path / "cut.onnx"
    for n in range(0, len(data), 7):
        path.write_bytes(data[:n])
        with pytest.raises(TightshipError):
            lower(load.read(path), "n=8")


def test_random_damage_never_crashes(tmp_path):
    data = model().SerializeToString()
    path, rng = tmp_path / "damaged.onnx", random.Random(0)
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        path.write_bytes(bad)
        try:
            lower(load.read(path), "n=8")
        except TightshipError as error:
            assert str(path) in str(error) or "--shape" in str(error)


@pytest.mark.parametrize("data", [b"", b"\x00" * 64, b"\xff" * 64, b"not a model", b"{}", os.urandom(4096)])
def test_garbage(tmp_path, data):
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(BadInput, match="ModelProto"):
        load.read(tmp_path / "m.onnx")


def test_no_file_a_folder_and_a_device(tmp_path):
    for path in (tmp_path / "none.onnx", tmp_path, "/dev/zero"):
        with pytest.raises(BadInput):
            load.read(path)


def test_structure_is_measured_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "LARGEST_STRUCTURE", 10_000)
    graph = b"\x0a\x00" * 10_000  # empty nodes: two bytes here, a hundred in memory
    size = len(graph)
    head = b"\x3a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    (tmp_path / "m.onnx").write_bytes(head + graph)
    with pytest.raises(BadInput, match="not weights"):
        load.read(tmp_path / "m.onnx")
    (tmp_path / "m.onnx").write_bytes(head + graph.replace(b"\x0a", b"\x2a"))  # empty weights
    with pytest.raises(BadInput, match="not weights"):
        load.read(tmp_path / "m.onnx")
    big = tensor("w", np.ones(100_000, np.float32))
    fine = made([node("Add", ["x", "w"], ["y"])], [value("x", [1])], [value("y", None)], [big])
    assert lower(load.read(saved(tmp_path, fine))).graph.static_bytes == 400_000 + 64


def test_functions_that_grow_without_end(tmp_path):
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my", 1)]
    functions = [helper.make_function("my", "F0", ["a"], ["b"], [node("Relu", ["a"], ["b"])], opsets)]
    for k in range(1, 40):
        inside = [node(f"F{k - 1}", ["a"], ["t"], domain="my"), node(f"F{k - 1}", ["t"], ["b"], domain="my")]
        functions.append(helper.make_function("my", f"F{k}", ["a"], ["b"], inside, opsets))
    call = [node("F39", ["x"], ["y"], domain="my")]
    ends = [value("x", [1])], [value("y", None)]
    with pytest.raises(BadInput, match="nodes once its functions"):
        load.read(saved(tmp_path, made(call, *ends, functions=functions, opsets=opsets[1:])))
    ring = [helper.make_function("my", "F39", ["a"], ["b"], [node("F39", ["a"], ["b"], domain="my")], opsets)]
    with pytest.raises(BadInput, match="calls itself"):
        load.read(saved(tmp_path, made(call, *ends, functions=ring, opsets=opsets[1:])))


def test_functions_whose_text_grows_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "LARGEST_STRUCTURE", 200_000)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my", 1)]
    long = node("Relu", ["a"], ["b"], doc_string="x" * 50_000)
    function = helper.make_function("my", "F", ["a"], ["b"], [long], opsets)
    calls = [node("F", [f"x{k}"], [f"x{k + 1}"], domain="my") for k in range(5)]
    ends = [value("x0", [1])], [value("x5", None)]
    with pytest.raises(
        BadInput, match=r"nodes of \d+ bytes once its functions are inlined; the limit is 200000"
    ):
        load.read(saved(tmp_path, made(calls, *ends, functions=[function], opsets=opsets[1:])))


def nested(depth, both):
    leaf = helper.make_graph([node("Identity", ["x"], ["y"])], "g", [], [value("y", None)])
    inner = leaf
    for _ in range(depth):
        choice = node("If", ["c"], ["y"], then_branch=inner, else_branch=inner if both else leaf)
        inner = helper.make_graph([choice], "g", [], [value("y", None)])
    return made(inner.node, [value("x", [1]), value("c", [], TensorProto.BOOL)], [value("y", None)])


def test_graphs_nested_far(tmp_path):
    assert len(lower(load.read(saved(tmp_path, nested(25, False)))).graph.ops) == 1
    assert len(lower(load.read(saved(tmp_path, nested(10, True)))).graph.ops) == 1


@pytest.mark.parametrize("dims", [[2**62, 2**62], [-1, 4], [2**40, 2**40]])
def test_sizes_beyond_all_bounds(tmp_path, dims):
    big = model()
    big.graph.input[0].type.tensor_type.shape.dim[0].dim_value = dims[0]
    big.graph.input[0].type.tensor_type.shape.dim[1].dim_value = dims[1]
    with pytest.raises(BadInput):
        lower(load.read(saved(tmp_path, big)))
    wide = made(
        [node("Expand", ["x", "s"], ["y"]), node("Relu", ["y"], ["z"])], [value("x", [1])], [value("z", None)]
    )
    wide.graph.initializer.append(tensor("s", np.array(dims, dtype=np.int64)))
    with pytest.raises(BadInput):
        lower(load.read(saved(tmp_path, wide)))


def test_a_tensor_has_the_bytes_its_shape_says(tmp_path):
    bad = model()
    bad.graph.initializer[0].dims[0] = 1 << 40
    with pytest.raises(BadInput, match="tensor 'w'"):
        lower(load.read(saved(tmp_path, bad)), "n=8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.graph.node[0].input.__setitem__(1, "nothing"), "unknown value"),
        (lambda m: m.graph.node[4].output.__setitem__(0, "a"), "duplicate value"),
        (lambda m: m.graph.output[0].__setattr__("name", "nothing"), "no node computes the output"),
        (lambda m: m.graph.node[0].__setattr__("op_type", "Nonsense"), "not in opset 21"),
        (lambda m: m.graph.node[0].__setattr__("domain", "com.nobody"), "unknown domain"),
        (lambda m: m.graph.node.insert(0, m.graph.node[4]), "duplicate value"),
        (
            lambda m: m.graph.node[0].input.__setitem__(1, m.graph.node[4].output[0]),
            "nodes are in no cycle",
        ),
        (lambda m: m.opset_import[0].__setattr__("version", 10_000), "knows opsets up to"),
    ],
)
def test_what_makes_no_sense_is_said_with_its_place(tmp_path, change, said):
    bad = model()
    change(bad)
    with pytest.raises(BadInput) as error:
        lower(load.read(saved(tmp_path, bad)), "n=8")
    assert said in str(error.value) and str(error.value).count("model.onnx") == 1


# --- external data ---


def outside(location, *, offset=None, length=None):
    big = TensorProto(name="w", data_type=1, dims=[1 << 28, 4], data_location=TensorProto.EXTERNAL)
    for key, entry in (("location", location), ("offset", offset), ("length", length)):
        if entry is not None:
            big.external_data.add(key=key, value=entry)
    return made([node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 1 << 28])], [value("y", None)], [big])


def test_weights_beyond_two_gigabytes_stay_on_disk(tmp_path):
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(4 << 30)  # no bytes are written, and none is read
    graph = lower(load.read(saved(tmp_path, outside("weights.bin", length=str(4 << 30))))).graph
    assert graph.static_bytes == (4 << 30) + (1 << 30)


@pytest.mark.parametrize("location", ["/etc/passwd", "../weights.bin", "a/../../weights.bin", "", "a\0b"])
def test_external_data_outside_of_the_folder_is_not_followed(tmp_path, location):
    (tmp_path / "in").mkdir()
    with pytest.raises(BadInput, match="model's folder"):
        load.read(saved(tmp_path / "in", outside(location)))


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_bytes(b"x" * 64)
    os.symlink(tmp_path / "secret", tmp_path / "in" / "weights.bin")
    with pytest.raises(BadInput, match="links are followed"):
        load.read(saved(tmp_path / "in", outside("weights.bin")))


def test_a_path_that_leads_out_by_a_linked_folder_is_not_followed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out" / "deep").mkdir(parents=True)
    os.symlink(tmp_path / "out" / "deep", tmp_path / "in" / "sub")
    with pytest.raises(BadInput, match="links are followed"):
        load.read(saved(tmp_path / "in", outside("sub/../weights.bin")))


def test_external_data_that_lies_in_the_folder_whatever_the_way_there_is_read(tmp_path):
    """As in onnxruntime: through a folder and back."""
    small = TensorProto(name="w", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    small.external_data.add(key="location", value="sub/../weights.bin")
    model = made([node("Mul", ["x", "w"], ["y"])], [value("x", [4])], [value("y", None)], [small])
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    graph = lower(load.read(saved(tmp_path, model))).graph  # an alignment of 64 bytes
    assert next(s.size for s in graph.storages if s.name == "w") == 64


@pytest.mark.parametrize(("offset", "length"), [("-1", None), ("x", None), ("9" * 30, None), (None, "17")])
def test_external_ranges_that_are_none(tmp_path, offset, length):
    with pytest.raises(BadInput):
        lower(load.read(saved(tmp_path, outside("weights.bin", offset=offset, length=length))))


def test_external_data_that_is_missing_is_named(tmp_path):
    small = TensorProto(name="w", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    small.external_data.add(key="location", value="gone.bin")
    lost = made([node("Mul", ["x", "w"], ["y"])], [value("x", [4])], [value("y", None)], [small])
    with pytest.raises(
        BadInput, match=r"tensor 'w': cannot read external data at '.*gone\.bin': No such file"
    ):
        lower(load.read(saved(tmp_path, lost)))


def test_external_data_of_attributes_is_looked_at_too(tmp_path):
    away = TensorProto(name="k", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    away.external_data.add(key="location", value="../k")
    then = helper.make_graph([node("Constant", [], ["k"], value=away)], "g", [], [value("k", None)])
    nodes = [node("If", ["c"], ["y"], then_branch=then, else_branch=then)]
    with pytest.raises(BadInput, match="model's folder"):
        load.read(saved(tmp_path, made(nodes, [value("c", [], 9)], [value("y", None)])))


def test_sequences_are_bounded(tmp_path):
    """A short file may make many tensors of one, and a user may ask for any number."""
    many = [node("SplitToSequence", ["x"], ["s0"])]
    many += [node("Identity", [f"s{k}"], [f"s{k + 1}"]) for k in range(40)]
    many.append(node("SequenceLength", ["s40"], ["y"]))
    path = saved(tmp_path, made(many, [value("x", ["n", 1])], [value("y", [], TensorProto.INT64)]))
    for rows in ("n=65536", "n=65537", f"n={1 << 40}"):
        with pytest.raises(Unsupported, match=r"result of .*at most 65536 tensors, all together 1048576"):
            lower(load.read(path), rows)
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    given = helper.make_value_info("q", kind)
    model = made([node("SequenceLength", ["q"], ["y"])], [given], [value("y", [], TensorProto.INT64)])
    with pytest.raises(Unsupported, match=r"input 'q' .*at most 65536 tensors"):
        lower(load.read(saved(tmp_path, model)), "q=1000000000000")
