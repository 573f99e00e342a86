"""Results that are no tensors, and strings: planned as onnxruntime has them, to the byte."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
from onnx import TensorProto, helper

from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.errors import BadInput, Infeasible, UnknownSize, Unsupported
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.frontends.onnx.types import STRING
from tightship.integrations.onnx_feeds import feeds_of
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


def check_runs_as_planned(path, tmp_path, sizes="x=64x256", spare=0):
    """The written file gives what the model gives, and takes the planned bytes, or up to ``spare`` less; returns the
    program."""
    program = lower(read(path), sizes)
    plan = api.plan_graph(program.graph).plan
    write_model(program, plan, tmp_path / "out.onnx", PLANNED)
    feeds = feeds_of(program, 1)  # places are 0
    before, after = measure(path, feeds, keep_order=False), measure(tmp_path / "out.onnx", feeds)
    for a, b in zip(before.outputs, after.outputs, strict=True):
        assert type(a) is type(b) and np.size(a) == np.size(b)
        if isinstance(a, list) and a and isinstance(a[0], dict):
            assert a == b
        elif not isinstance(a, list):
            assert np.array_equal(a, b)
        else:
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert 0 <= plan.peak - program.graph.static_bytes - after.peak <= spare
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
    graph = program.graph
    parts = {v.storage for v in graph.values if v.name == "s" or v.name.startswith("s[")}
    assert sum(graph.storages[s].size for s in parts) == copies * 4 * 64 * 256


BETWEEN = {
    "put in and taken out": [
        node("SequenceConstruct", ["a", "b"], ["s0"]),
        node("Neg", ["a"], ["c"]),
        node("SequenceInsert", ["s0", "c", "at"], ["s1"]),
        node("SequenceErase", ["s1", "at"], ["s2"]),
        node("SequenceAt", ["s2", "at"], ["d"]),
        node("ConcatFromSequence", ["s2"], ["e"], axis=0),
        node("ConcatFromSequence", ["s1"], ["f"], axis=1, new_axis=1),
    ],
    "both before and after": [
        node("SequenceConstruct", ["a", "b"], ["s0"]),
        node("SequenceInsert", ["s0", "a"], ["s1"]),
        node("SequenceAt", ["s1", "at"], ["d"]),
        node("ConcatFromSequence", ["s1"], ["e"], axis=0),
        node("ConcatFromSequence", ["s0"], ["f"], axis=0),
    ],
    "handed on": [
        node("SequenceConstruct", ["a", "b"], ["s0"]),
        node("Identity", ["s0"], ["s1"]),
        node("SequenceAt", ["s1", "at"], ["d"]),
        node("ConcatFromSequence", ["s1"], ["e"], axis=0),
        node("Neg", ["e"], ["f"]),
    ],
    "parts": [
        node("SplitToSequence", ["a", "halves"], ["s0"], axis=1),
        node("SequenceAt", ["s0", "at"], ["d"]),
        node("ConcatFromSequence", ["s0"], ["e"], axis=0),
        node("Neg", ["b"], ["f"]),
    ],
    "optional": [
        node("Optional", ["a"], ["o"]),
        node("OptionalGetElement", ["o"], ["p"]),
        node("Exp", ["p"], ["d"]),
        node("Neg", ["d"], ["e"]),
        node("Neg", ["b"], ["f"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN)
def test_sequences_between_nodes_take_what_they_copy(tmp_path, between):
    """A tensor is copied where it goes in and where it is taken out; what two sequences have in common is there once.
    Places come from an input, so that nothing of it can be read as plain tensors."""
    nodes = [node("Exp", ["x"], ["a"]), node("Tanh", ["x"], ["b"]), *BETWEEN[between]]
    inputs = [value("x", ["n", 256]), value("at", [], INT64)]
    if between == "optional":
        inputs.pop()
    path = saved(
        tmp_path,
        model_of(nodes, inputs, [value(n, None) for n in "def"], [tensor("halves", np.array([128, 128]))]),
    )
    program = check_runs_as_planned(path, tmp_path)
    assert bool(program.parts) == (between != "optional")


def test_a_sequence_that_a_loop_makes(tmp_path):
    """It grows by a tensor in every turn, and the last turn needs the most: as measured."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Mul", ["a", "two"], ["v"]),
         node("SequenceInsert", ["s", "v"], ["more"])],
        "body",
        [value("k", [], INT64), value("go", [], TensorProto.BOOL), sequence("s")],
        [value("on", [], TensorProto.BOOL), sequence("more")],
        [tensor("two", np.array(2.0, np.float32))],
    )  # fmt: skip
    nodes = [
        node("Exp", ["x"], ["a"]),
        node("SequenceEmpty", [], ["none"], dtype=FLOAT),
        helper.make_node("Loop", ["turns", "", "none"], ["all"], body=body),
        node("SequenceLength", ["all"], ["many"]),
        node("ConcatFromSequence", ["all"], ["y"], axis=0),
    ]
    outputs = [value("y", None), value("many", [], INT64)]
    path = saved(tmp_path, model_of(nodes, [value("x", ["n", 256])], outputs, [tensor("turns", np.array(5))]))
    program = check_runs_as_planned(path, tmp_path, spare=256)
    assert next(v for v in program.graph.values if v.name == "y").shape == (320, 256)


def test_sequences_and_optionals_as_inputs(tmp_path):
    """A sequence of tensors of several sizes, which are given by place."""
    nodes = [
        node("OptionalGetElement", ["o"], ["w"]),
        node("Exp", ["w"], ["a"]),
        node("SequenceInsert", ["q", "a"], ["s"]),
        node("SequenceAt", ["s", "last"], ["b"]),
        node("Neg", ["b"], ["y"]),
        node("ConcatFromSequence", ["s"], ["z"], axis=0),
    ]
    given = [sequence("q"), sequence("o", "optional")]
    model = model_of(nodes, given, [value("y", None), value("z", None)], [tensor("last", np.array(-1))])
    path = saved(tmp_path, model)
    asked = r"q \(the number of tensors in input 'q'\), o .*give --shape q=N,o=NxM"
    with pytest.raises(UnknownSize, match=asked):
        lower(read(path))
    with pytest.raises(UnknownSize, match=r"q\[1\] \(the whole shape of tensor 1 of input 'q'\)"):
        lower(read(path), "q=2,q[0]=8x256,o=4x256")
    with pytest.raises(BadInput, match=r"the number of tensors in 'q' is 1 .*not|'q\[1\]'"):
        lower(read(path), "q=1,q[0]=8x256,q[1]=16x256,o=4x256")
    program = check_runs_as_planned(path, tmp_path, "q[0]=8x256,q[1]=16x256,o=4x256")
    assert next(v for v in program.graph.values if v.name == "z").shape == (28, 256)
    assert program.graph.static_bytes == 28 * 1024 + 64


def test_a_map_over_a_sequence_is_the_loop_that_it_stands_for(tmp_path):
    body = helper.make_graph([node("Neg", ["e"], ["f"])], "body", [value("e", None)], [value("f", None)])
    nodes = [helper.make_node("SequenceMap", ["q"], ["s"], body=body)]
    path = saved(tmp_path, model_of(nodes, [sequence("q")], [sequence("s")]))
    spare = 4 * 64 * 256 + 512  # what the last turn puts in is counted from its beginning
    program = check_runs_as_planned(path, tmp_path, "q[0]=64x256,q[1]=64x256,q[2]=64x256", spare)
    assert [op.target for op in program.graph.ops][-1] == "Loop"


def test_sequences_with_a_budget_are_made_once(tmp_path):
    """What shares tensors with others is not run again; the file runs within the budget all the same."""
    nodes = [node("Exp", ["x"], ["a"]), node("Tanh", ["x"], ["b"]), *BETWEEN["put in and taken out"][:-1]]
    nodes += [node("Neg", ["a"], ["f"]), node("Neg", ["b"], ["g"])]
    inputs = [value("x", ["n", 256]), value("at", [], INT64)]
    path = saved(tmp_path, model_of(nodes, inputs, [value(n, None) for n in "defg"]))
    graph = lower(read(path), "n=64").graph
    for share in ("95%", "90%", "85%"):
        try:
            plan = api.plan_graph(graph, budget=share).plan
        except Infeasible:
            continue
        again = {graph.ops[s.op].target for s in plan.steps if s.kind == "recompute"}
        assert not again & {"SequenceConstruct", "SequenceInsert", "SequenceErase"}
        write_model(lower(read(path), "n=64"), plan, tmp_path / "out.onnx", PLANNED)


def test_a_branch_without_a_sequence_asks_how_many_tensors_the_other_has(tmp_path):
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
    whole = helper.make_value_info("o", helper.make_optional_type_proto(kind))
    made_, none = ([node("SequenceConstruct", ["x", "x"], ["s"]), node("Optional", ["s"], ["o"])],
                   [helper.make_node("Optional", [], ["o"], type=kind)])  # fmt: skip
    branches = {
        f"{name}_branch": helper.make_graph(nodes, name, [], [whole])
        for name, nodes in (("then", made_), ("else", none))
    }
    nodes = [helper.make_node("If", ["go"], ["all"], **branches)]
    result = helper.make_value_info("all", whole.type)
    model = model_of(nodes, [value("x", [4, 8]), value("go", [], TensorProto.BOOL)], [result])
    path = saved(tmp_path, model)
    with pytest.raises(UnknownSize, match=r"give --shape all=N"):
        lower(read(path))
    graph = lower(read(path), "all=2,all[0]=4x8,all[1]=4x8").graph
    assert [v.shape for v in graph.values if v.name == "all[1]"] == [(4, 8)]


FAULTY = {
    "place 2 of a sequence of 2": [
        node("SequenceConstruct", ["x", "x"], ["s0"]), node("SequenceInsert", ["s0", "x", "at"], ["s1"]),
        node("SequenceErase", ["s1", "two"], ["s2"]), node("SequenceAt", ["s2", "two"], ["y"]),
    ],
    "parts of 5 elements of 4": [
        node("SplitToSequence", ["x", "parts"], ["s"]), node("SequenceAt", ["s", "at"], ["y"]),
    ],
    "'x' is a tensor, where the op reads a sequence": [node("SequenceAt", ["x", "at"], ["y"])],
    "the element of an optional that has none": [
        helper.make_node("Optional", [], ["o"], type=helper.make_tensor_type_proto(FLOAT, [2])),
        node("OptionalGetElement", ["o"], ["y"]),
    ],
    "input 's', a sequence,": [node("SequenceConstruct", ["x", "x"], ["s"]), node("Relu", ["s"], ["y"])],
    "erasing one of 2 tensors of several sizes": [
        node("SequenceConstruct", ["x", "two"], ["s0"]), node("SequenceErase", ["s0", "at"], ["s"]),
        node("ConcatFromSequence", ["s"], ["y"], axis=0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTY)
def test_sequences_that_make_no_sense_are_refused(tmp_path, fault):
    inputs = [value("x", [4, 8]), value("at", [], INT64)]
    given = [tensor("two", np.array(2)), tensor("parts", np.array([2, 3]))]
    path = saved(tmp_path, model_of(FAULTY[fault], inputs, [value("y", None)], given))
    with pytest.raises((BadInput, Unsupported), match=re.escape(fault)):
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
