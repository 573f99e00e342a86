"""Results that are no tensors, and strings: planned as onnxruntime has them, to the byte."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
from onnx import TensorProto, helper

from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.errors import UnknownSize, Unsupported
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.frontends.onnx.types import STRING
from tightship.integrations.onnx_compare import feeds_of
from tightship.integrations.onnx_write import write_model
from tightship.integrations.onnxruntime import PLANNED, measure

FLOAT, INT64, TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
LEARNING = "ai.onnx.ml"


def model_of(nodes, inputs, outputs, given=()):
    model = made(nodes, inputs, outputs, given, opset=20)
    model.opset_import.append(helper.make_opsetid(LEARNING, 3))
    model.ir_version = 9
    return model


def sequence(name, kind="sequence"):
    inner = helper.make_tensor_type_proto(FLOAT, None)
    whole = helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, []))
    types = {"sequence": inner, "maps": whole}
    if kind == "optional":
        return helper.make_value_info(name, helper.make_optional_type_proto(inner))
    return helper.make_value_info(name, helper.make_sequence_type_proto(types[kind]))


def check_runs_as_planned(path, tmp_path):
    """The written file gives what the model gives, and takes the planned bytes; returns the program."""
    program = lower(read(path), "x=64x256")
    plan = api.plan_graph(program.graph).plan
    write_model(program, plan, tmp_path / "out.onnx", PLANNED)
    feeds = feeds_of(program)
    before, after = measure(path, feeds, keep_order=False), measure(tmp_path / "out.onnx", feeds)
    for a, b in zip(before.outputs, after.outputs, strict=True):
        assert type(a) is type(b) and len(a) == len(b)
        if isinstance(a, list) and a and isinstance(a[0], dict):
            assert a == b
        else:
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert after.peak == plan.peak - program.graph.static_bytes
    return program


ENDS = {
    "made of tensors": ([node("SequenceConstruct", ["a", "b"], ["s"])], "sequence", 2),
    "made one by one": (
        [node("SequenceEmpty", [], ["e"], dtype=FLOAT), node("SequenceInsert", ["e", "b"], ["i"]),
         node("SequenceInsert", ["i", "a", "first"], ["s"])],
        "sequence", 2,
    ),
    "parts": ([node("SplitToSequence", ["a"], ["s"], axis=0)], "sequence", 1),
    "squeezed parts": ([node("SplitToSequence", ["a"], ["s"], axis=1, keepdims=0)], "sequence", 1),
    "optional": ([node("Optional", ["a"], ["s"])], "optional", 1),
    "maps": ([node("ZipMap", ["a"], ["s"], domain=LEARNING, classlabels_int64s=range(256))], "maps", 0),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_results_that_are_no_tensors_take_what_they_copy(tmp_path, end):
    nodes, kind, copies = ENDS[end]
    nodes = [node("Exp", ["x"], ["a"]), node("Tanh", ["x"], ["b"]), *nodes, node("Add", ["a", "b"], ["y"])]
    given = [tensor("first", np.array(0))]
    outputs = [sequence("s", kind), value("y", ["n", 256])]
    path = saved(tmp_path, model_of(nodes, [value("x", ["n", 256])], outputs, given))
    program = check_runs_as_planned(path, tmp_path)
    found = next(v for v in program.graph.values if v.name == "s")
    assert program.graph.storages[found.storage].size == copies * 4 * 64 * 256


def test_a_sequence_that_is_read_as_well_is_refused(tmp_path):
    nodes = [
        node("Exp", ["x"], ["a"]),
        node("SplitToSequence", ["a"], ["s"]),
        node("SequenceLength", ["s"], ["y"]),
    ]
    path = saved(tmp_path, model_of(nodes, [value("x", [4, 8])], [sequence("s"), value("y", [], INT64)]))
    with pytest.raises(Unsupported, match="s, a sequence"):
        lower(read(path))


def test_strings_take_what_onnxruntime_takes_for_them(tmp_path):
    """From an input of strings to a result of strings, with views and numbers between."""
    words = [onnx.helper.make_tensor("tail", TEXT, [1], ["a tail of more than 15 letters"])]
    nodes = [
        node("StringConcat", ["x", "tail"], ["long"]),
        node("Reshape", ["long", "flat"], ["row"]),
        node("LabelEncoder", ["row"], ["k"], domain=LEARNING, keys_strings=["0", "1"], values_int64s=[5, 6]),
        node("LabelEncoder", ["k"], ["back"], domain=LEARNING, keys_int64s=[5], values_strings=["five"]),
        node("Constant", [], ["colon"], value_string=":"),
        node("StringConcat", ["back", "colon"], ["z"]),
        node("Cast", ["k"], ["y"], to=FLOAT),
    ]
    x, z = value("x", [None, None], TEXT), value("z", None, TEXT)
    path = saved(tmp_path, model_of(nodes, [x], [z, value("y", None)], [*words, tensor("flat", [-1])]))
    program = check_runs_as_planned(path, tmp_path)
    long = next(v for v in program.graph.values if v.name == "long")
    assert program.graph.storages[long.storage].size == 64 * 256 * STRING
    assert any("strings: 32 bytes for each" in note for note in program.notes)


def test_sizes_that_follow_from_what_strings_say_are_asked_for(tmp_path):
    """A StringNormalizer drops words; what comes after it has no type either, until that is known."""
    vectors = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0}
    vectors |= {"ngram_counts": [0], "ngram_indexes": [0, 1], "pool_strings": ["0", "1"]}
    cut = {"mark": 0, "mincharnum": 1, "pad_value": "#", "tokenexp": "[0-9]"}
    nodes = [
        node("StringNormalizer", ["x"], ["kept"], stopwords=["2"]),
        node("Tokenizer", ["kept"], ["words"], domain="com.microsoft", **cut),
        node("TfIdfVectorizer", ["words"], ["y"], **vectors),
    ]
    model = model_of(nodes, [value("x", ["n"], TEXT)], [value("y", None)])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path = saved(tmp_path, model)
    for given, asked in (("n=4", r"kept\[0\]=N"), ("n=4,kept[0]=3", r"words\[1\]=N")):
        with pytest.raises(UnknownSize, match=asked):
            lower(read(path), given)
    program = lower(read(path), "n=4,kept[0]=3,words[1]=5")
    assert next(v for v in program.graph.values if v.name == "y").shape == (3, 2)


@pytest.mark.parametrize("shape", [["n"], [1, "n"]])
@pytest.mark.parametrize("given", [{}, {"case_change_action": "LOWER"}, {"stopwords": []}])
def test_words_of_which_none_are_dropped_are_as_many_as_before(tmp_path, shape, given):
    """As scikit-learn's vectorizers are exported: the size of what is inside was asked for."""
    attributes = {k: v for k, v in given.items() if v}
    nodes = [node("StringNormalizer", ["x"], ["kept"], **attributes), node("Identity", ["kept"], ["y"])]
    if "stopwords" in given:
        nodes[0].attribute.append(
            onnx.helper.make_attribute("stopwords", [], attr_type=onnx.AttributeProto.STRINGS)
        )
    program = lower(
        read(saved(tmp_path, model_of(nodes, [value("x", shape, TEXT)], [value("y", None, TEXT)]))), "n=4"
    )
    assert next(v for v in program.graph.values if v.name == "kept").shape == (*shape[:-1], 4)
