"""ONNX models made by hand: sizes, aliases, graphs inside nodes, costs."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
import onnx
from onnx import TensorProto, helper

from support.graphs import FLOAT, made, node, saved, tensor, value
from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.machine import modeled_time
from tightship.simulate import baseline, extra_bytes, replay


def graph_of(folder, model, shape=None, **options):
    return lower(read(saved(folder, model)), shape, **options).graph


def storage_of(graph, name):
    return next(v.storage for v in graph.values if v.name == name)


def shape_of(graph, name):
    return next(v.shape for v in graph.values if v.name == name)


def peak(graph):
    return replay(graph, baseline(graph)).peak - graph.static_bytes


# --- sizes ---


def two_inputs(opset=21):
    x, y = value("x", ["batch", "seq", 8]), value("y", ["batch", None, 8])
    nodes = [node("Concat", ["x", "y"], ["z"], axis=1), node("Relu", ["z"], ["out"])]
    return made(nodes, [x, y], [value("out", None)], opset=opset)


def test_every_unknown_dimension_is_named(tmp_path):
    with pytest.raises(UnknownSize) as error:
        graph_of(tmp_path, two_inputs(), "batch=2")
    said = "unknown size of seq (axis 1 of input 'x'), y[1] (axis 1 of input 'y'); give --shape seq=N,y[1]=N"
    assert said in str(error.value)


def test_a_value_without_a_shape_is_asked_for_whole(tmp_path):
    model = made([node("Relu", ["x"], ["y"])], [value("x", None)], [value("y", None)])
    with pytest.raises(UnknownSize, match=r"x \(the whole shape of input 'x'\); give --shape x=NxM"):
        graph_of(tmp_path, model)
    assert peak(graph_of(tmp_path, model, "x=4x8")) == 128


def test_sizes_are_given_by_dimension_by_axis_and_by_value(tmp_path):
    for shape in (
        "batch=2,seq=3,y[1]=5",
        ["batch=2", "seq=3,y[1]=5"],
        {"x": (2, 3, 8), "y": [2, 5, 8]},
        "x=2x3x8,y=2x5x8",
    ):
        graph = graph_of(tmp_path, two_inputs(), shape)
        assert graph.storages[storage_of(graph, "z")].size == 2 * 8 * 8 * 4


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("batch=2,seq=3,y[1]=5,depth=1", "unknown dimension 'depth'"),
        ("batch=2,batch=3", "duplicate dimension"),
        ("batch", "name=N"),
        ("batch=-1", "name=N"),
        ("x=2x3x9,y=2x5x8", "x[2] is 8"),
        ("x=2x3,y=2x5x8", "which has 3"),
        ("x=2x3x8,y=4x5x8", "is 2"),
        ("batch=99999999999999999999,seq=1,y[1]=1", "2^63-1"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused(tmp_path, shape, said):
    with pytest.raises(BadInput, match=r".") as error:
        graph_of(tmp_path, two_inputs(), shape)
    assert said in str(error.value)


def test_shapes_are_computed_from_shapes(tmp_path):
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["b"]),
        node("Mul", ["b", "two"], ["b2"]),
        node("Unsqueeze", ["b2", "axes"], ["b3"]),
        node("Concat", ["b3", "rest"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["y"]),
        node("ConstantOfShape", ["target"], ["c"]),
        node("Add", ["y", "c"], ["out"]),
    ]
    numbers = {"zero": np.array(0), "two": np.array(2), "axes": np.array([0]), "rest": np.array([-1])}
    weights = [tensor(n, np.asarray(a, dtype=np.int64)) for n, a in numbers.items()]
    model = made(nodes, [value("x", ["n", 6])], [value("out", None)], weights)
    with pytest.raises(BadInput):  # of a shape with -1 nothing can be made
        graph_of(tmp_path, model, "n=4")
    model.graph.initializer[3].CopyFrom(tensor("rest", np.array([3], dtype=np.int64)))
    graph = graph_of(tmp_path, model, "n=4")
    assert next(v.shape for v in graph.values if v.name == "out") == (8, 3)


def test_what_depends_on_data_is_asked_for_by_name(tmp_path):
    nodes = [node("NonZero", ["x"], ["where"]), node("Cast", ["where"], ["out"], to=FLOAT)]
    model = made(nodes, [value("x", [4, 4])], [value("out", None)])
    with pytest.raises(UnknownSize, match=r"where\[1\]"):
        graph_of(tmp_path, model)
    graph = graph_of(tmp_path, model, "where[1]=16")
    assert graph.storages[storage_of(graph, "out")].size == 2 * 16 * 4


@pytest.mark.parametrize("opset", range(13, onnx.defs.onnx_opset_version() + 1))
def test_opsets(tmp_path, opset):
    graph = graph_of(tmp_path, two_inputs(opset), "batch=2,seq=3,y[1]=5")
    assert peak(graph) == 2 * 8 * 8 * 4 * 2


@pytest.mark.parametrize("opset", [7, 9, 12])
def test_older_opsets_are_converted_and_it_is_said(tmp_path, opset):
    model = two_inputs(opset)
    program = lower(read(saved(tmp_path, model)), "batch=2,seq=3,y[1]=5")
    assert peak(program.graph) == 2 * 8 * 8 * 4 * 2
    assert program.notes == (f"opset {opset} converted to 13 by onnx.version_converter",)
    assert program.model.opsets == {"": 13}


def test_weights_stay_in_the_file_when_a_model_is_converted(tmp_path):
    """Also a tensor that is no initializer; and weights of the first file format stay what no caller replaces."""
    w, k = (np.arange(256.0 * 256).astype(np.float32).reshape(256, 256) + n for n in range(2))
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Constant", [], ["k"], value=onnx.numpy_helper.from_array(k, "k")),
        node("Add", ["a", "k"], ["b"]),
        node("Dropout", ["b"], ["out"], ratio=0.5),
    ]
    x, weight = value("x", [256, 256]), value("w", [256, 256])
    model = made(nodes, [x, weight], [value("out", None)], [onnx.numpy_helper.from_array(w, "w")], opset=9)
    model.ir_version = 3
    program = lower(read(saved(tmp_path, model)))
    assert [i.name for i in program.model.proto.graph.input] == ["x"]
    assert program.model.proto.ByteSize() < 4096
    graph = program.graph
    assert graph.static_bytes == 3 * 256 * 256 * 4 + 64  # Dropout's ratio has become a tensor
    assert peak(graph) == 2 * 256 * 256 * 4  # w's product and the sum, over which nothing is written


def test_what_cannot_be_converted_says_why(tmp_path):
    model = made([node("Cast", ["x"], ["y"], to="FLOAT")], [value("x", [2])], [value("y", None)], opset=5)
    with pytest.raises(
        Unsupported, match=r"opset 5 of .*cannot convert it to 13.*No Adapter.* Cast; instead, export"
    ):
        graph_of(tmp_path, model)


X = np.random.default_rng(0).standard_normal((1, 2, 5, 7)).astype(np.float32)
OLD = [
    *(
        (node("Upsample", ["x"], ["y"], mode=m, scales=[1.0, 1.0, 1.7, 2.3]), 7)
        for m in ("nearest", "linear")
    ),
    *((node("Upsample", ["x", "more"], ["y"], mode=m), 9) for m in ("nearest", "linear")),
    *((node("Resize", ["x", k], ["y"], mode=m), 10) for m in ("nearest", "linear") for k in ("more", "less")),
    (node("Softmax", ["x"], ["y"], axis=1), 11),
    (node("LogSoftmax", ["x"], ["y"]), 7),
    (node("ReduceSum", ["x"], ["y"], axes=[1, -1], keepdims=0), 11),
    (node("Pad", ["x"], ["y"], pads=[0, 0, 1, 1, 0, 0, 2, 2], value=3.0), 9),
    (node("Clip", ["x"], ["y"], min=-0.5, max=0.5), 9),
]


@pytest.mark.parametrize(("old", "opset"), OLD)
def test_converted_models_give_the_same_numbers(tmp_path, old, opset):
    """Also where onnx's converter alone does not."""
    ort = pytest.importorskip("onnxruntime")
    scales = [
        tensor(n, np.array(k, np.float32))
        for n, k in (("more", [1, 1, 1.7, 2.3]), ("less", [1, 1, 0.6, 0.5]))
    ]
    model = made([old], [value("x", X.shape)], [value("y", None)], scales, opset=opset)
    model.ir_version = 6
    before = saved(tmp_path, model)
    after = saved(tmp_path, read(before).proto, "after.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    a, b = (ort.InferenceSession(str(p), options).run(None, {"x": X})[0] for p in (before, after))
    np.testing.assert_array_equal(a, b)


def test_what_the_converter_would_change_unseen_is_refused(tmp_path):
    for old, opset in ((node("Hardmax", ["x"], ["y"]), 11), (node("Resize", ["x", "s"], ["y"]), 10)):
        model = made([old], [value("x", X.shape), value("s", [4])], [value("y", None)], opset=opset)
        with pytest.raises(Unsupported, match=r"Hardmax meant|factors that it does not know"):
            graph_of(tmp_path, model)


@pytest.mark.parametrize("opset", [7, 9, 11])
def test_masks_of_old_dropouts_are_dropped_or_refused(tmp_path, opset):
    """The converter makes another mask of them, which the runtime does not load for its type or fills otherwise."""
    nodes = [node("Dropout", ["x"], ["y", "mask"]), node("Neg", ["y"], ["z"])]
    given, mask = [value("x", [2, 3])], value("mask", [2, 3], FLOAT if opset < 10 else TensorProto.BOOL)
    unread = made(nodes, given, [value("z", None)], opset=opset)
    unread.graph.value_info.append(mask)
    found = read(saved(tmp_path, unread)).proto.graph
    assert [list(n.output) for n in found.node if n.op_type != "Constant"] == [["y"], ["z"]]
    assert not found.value_info
    with pytest.raises(Unsupported, match="mask of Dropout 'mask' meant another thing before opset 12"):
        graph_of(tmp_path, made(nodes, given, [value("z", None), mask], opset=opset))


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("imported", ["", "ai.onnx"])
@pytest.mark.parametrize("used", ["", "ai.onnx"])
def test_the_domain_of_onnx_has_two_names(tmp_path, opset, imported, used):
    nodes = [node("Softmax", ["x"], ["y"], axis=0, domain=used)]
    model = made(nodes, [value("x", [2, 3])], [value("y", [2, 3])], opset=opset)
    model.opset_import[0].domain = imported
    program = lower(read(saved(tmp_path, model)))
    onnx.checker.check_model(program.model.proto)
    assert program.model.opsets == {"": max(opset, 13)}


def test_functions_of_other_opsets_are_named(tmp_path):
    """onnx's inliner leaves them where they are without a word."""
    old = helper.make_function(
        "own", "L", ["a"], ["c"], [node("Softmax", ["a"], ["c"])], [helper.make_opsetid("", 11)]
    )
    model = made([node("L", ["x"], ["y"], domain="own")], [value("x", [2, 3])], [value("y", None)])
    model.opset_import.add(domain="own", version=1)
    model.functions.append(old)
    with pytest.raises(
        Unsupported, match=r"function 'L' of opset 11 in a model of opset \d+.*convert_version"
    ):
        graph_of(tmp_path, model)


def test_functions_of_other_opsets_with_the_same_ops_are_inlined(tmp_path):
    """As scikit-learn's KNNImputer is exported; Softmax is the same from opset 13 on, ReduceMean is not."""
    kept, other = [node("Softmax", ["a"], ["c"])], [node("ReduceMean", ["a"], ["c"], axes=[0])]
    model = made([node("L", ["x"], ["y"], domain="own")], [value("x", [2, 3])], [value("y", None)])
    model.opset_import.add(domain="own", version=1)
    model.functions.append(
        helper.make_function("own", "L", ["a"], ["c"], kept, [helper.make_opsetid("", 13)])
    )
    assert [op.target for op in graph_of(tmp_path, model).ops] == ["Softmax"]
    del model.functions[0].node[:]
    model.functions[0].node.extend(other)
    with pytest.raises(Unsupported, match=r"function 'L' of opset 13 in a model of opset"):
        graph_of(tmp_path, model)


def test_nameless_dimensions_are_those_of_their_axis(tmp_path):
    """Exporters write -1 or '?' for whatever they do not know: two of them are not one."""
    x = helper.make_tensor_value_info("x", FLOAT, [-1, 3, "?", "?"])
    model = made([node("Neg", ["x"], ["y"])], [x], [value("y", None)])
    with pytest.raises(
        UnknownSize, match=r"unknown size of x\[0\].*, x\[2\].*, x\[3\] \(axis 3 of input 'x'\); give"
    ):
        graph_of(tmp_path, model)
    graph = graph_of(tmp_path, model, "x=2x3x4x16")
    assert graph.storages[storage_of(graph, "y")].size == 2 * 3 * 4 * 16 * 4


@pytest.mark.parametrize(
    ("follows", "size"),
    [
        ("past + seq", 7),
        ("2*past", 8),
        ("(past - 1)//2 + seq", 4),
        ("Max(1, seq)", 3),
        ("past * (seq + 1) / 2", 8),
    ],
)
def test_dimensions_that_follow_from_others_are_not_asked_for(tmp_path, follows, size):
    """Names as optimum and torch write them."""
    inputs = [value("x", ["past", 16]), value("y", ["seq", 16]), value("mask", [follows, 16])]
    ends = [value("a", [follows, 16]), value("b", None), value("c", None)]
    model = made([node("Neg", [a], [b]) for a, b in ("xb", "yc", ("mask", "a"))], inputs, ends)
    with pytest.raises(UnknownSize, match=r"give --shape past=N,seq=N$"):
        graph_of(tmp_path, model)
    for shape in ("past=4,seq=3", {"past": 4, "seq": 3, follows: size}):
        graph = graph_of(tmp_path, model, shape)
        assert graph.storages[storage_of(graph, "a")].size == size * 16 * 4
    graph = graph_of(tmp_path, model, f"past=4,seq=3,mask={size + 1}x16")
    assert graph.storages[storage_of(graph, "a")].size == (size + 1) * 16 * 4


def test_a_dimension_that_follows_from_others_is_none_below_nothing(tmp_path):
    model = made([node("Neg", ["x"], ["y"])], [value("x", ["a", "a - 3"])], [value("y", None)])
    with pytest.raises(BadInput, match=r"dimension 'a - 3' is -1"):
        graph_of(tmp_path, model, "a=2")


def test_sizes_are_asked_for_before_types_that_the_runtime_knows(tmp_path):
    """What onnxruntime's own ops make is known once the sizes of the inputs are."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    nodes = [node("FusedMatMul", ["x", "x"], ["y"], domain="com.microsoft", transB=1)]
    model = made(nodes, [value("x", ["n", 8])], [value("y", None)], opsets=opsets)
    with pytest.raises(UnknownSize, match=r"unknown size of n .*; give --shape n=N$"):
        graph_of(tmp_path, model)


def test_only_sizes_of_inputs_are_asked_for_where_they_may_suffice(tmp_path):
    nodes = [node("NonZero", ["x"], ["where"]), node("Neg", ["where"], ["out"])]
    model = made(nodes, [value("x", ["batch", 8])], [value("out", None, TensorProto.INT64)])
    with pytest.raises(UnknownSize, match=r"unknown size of batch \(.*\); give --shape batch=N$"):
        graph_of(tmp_path, model)
    with pytest.raises(
        UnknownSize, match=r"where\[1\] \(axis 1 of 'where', a result of NonZero 'NonZero_0'\); give"
    ):
        graph_of(tmp_path, model, "batch=2")


def two_shapes(condition=()):
    """y is a product with 3 rows, which fit, or with 5, which do not."""

    def product(k):
        w = tensor(f"w{k}", np.zeros((k, 4), np.float32))
        inner = [node("MatMul", ["z", f"w{k}"], [f"r{k}"]), node("Neg", [f"r{k}"], [f"n{k}"])]
        return helper.make_graph(inner, f"of{k}", [], [value(f"n{k}", None)], [w])

    choice = node("If", ["c"], ["y"], then_branch=product(5), else_branch=product(3))
    inputs = [value("x", [2, 3]), *([] if condition else [value("c", [], TensorProto.BOOL)])]
    return made([node("Neg", ["x"], ["z"]), choice], inputs, [value("y", None)], condition)


def test_a_branch_that_cannot_run_at_these_sizes_is_not_counted(tmp_path):
    program = lower(read(saved(tmp_path, two_shapes())))
    op = program.graph.ops[-1]
    assert [g.name for g in op.calls] == ["of3"]
    (note,) = program.notes
    assert note.startswith("If 'If_1': then_branch cannot run at these sizes and is not counted: node")
    known = [helper.make_tensor("c", TensorProto.BOOL, [], [False])]
    assert lower(read(saved(tmp_path, two_shapes(known)))).notes == ()
    taken = [helper.make_tensor("c", TensorProto.BOOL, [], [True])]
    with pytest.raises(BadInput, match="inconsistent inputs"):
        graph_of(tmp_path, two_shapes(taken))


def test_types_without_a_size_are_named(tmp_path):
    maps = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(FLOAT, []))
    )
    with pytest.raises(Unsupported, match=r"'x', a map, .*zipmap=False.*cut off the nodes around it"):
        graph_of(tmp_path, made([], [helper.make_value_info("x", maps)], []))
    whole = helper.make_sequence_type_proto(maps)
    with pytest.raises(Unsupported, match=r"'x', a map"):
        graph_of(tmp_path, made([], [helper.make_value_info("x", whole)], []))


def test_ops_that_are_functions_of_others_have_sizes(tmp_path):
    """onnx has no inference of their own for these, which exporters write for masks."""
    for op in ("GreaterOrEqual", "LessOrEqual"):
        model = made([node(op, ["x", "y"], ["m"])], [value("x", ["n", 8]), value("y", [1])], [], opset=14)
        model.graph.output.append(onnx.ValueInfoProto(name="m"))
        assert shape_of(graph_of(tmp_path, model, "n=3"), "m") == (3, 8)


@pytest.mark.parametrize(
    ("op", "attributes", "made_of"),
    [
        ("ArrayFeatureExtractor", {}, (5, 2)),
        ("Scaler", {"offset": [0.0], "scale": [2.0]}, (5, 4)),
        ("Normalizer", {"norm": "L2"}, (5, 4)),
        ("LinearRegressor", {"coefficients": [0.5] * 12, "targets": 3}, (5, 3)),
    ],
)
def test_ops_of_classical_learning_have_sizes(tmp_path, op, attributes, made_of):
    pytest.importorskip("onnxruntime")
    names = ["x", "at"] if op == "ArrayFeatureExtractor" else ["x"]
    asked = node(op, names, ["y"], domain="ai.onnx.ml", **attributes)
    model = made([asked], [value("x", ["n", 4])], [value("y", None)], [tensor("at", np.array([0, 2]))])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    assert shape_of(graph_of(tmp_path, model, "n=5"), "y") == made_of


def test_elements_below_a_byte_are_packed(tmp_path):
    weights = [
        helper.make_tensor("w", TensorProto.INT4, [300], bytes(150), raw=True),
        tensor("s", np.float32(1)),
    ]
    nodes = [node("DequantizeLinear", ["w", "s"], ["d"]), node("Add", ["d", "x"], ["out"])]
    graph = graph_of(tmp_path, made(nodes, [value("x", [300])], [value("out", None)], weights))
    assert graph.storages[storage_of(graph, "w")].size == 192
    assert graph.storages[storage_of(graph, "w")].kind == "constant"


# --- who shares bytes ---


def chain():
    nodes = [
        node("Transpose", ["x"], ["a"]),
        node("Reshape", ["a", "shape"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("Add", ["c", "c"], ["d"]),
        node("Sigmoid", ["d"], ["out"]),
    ]
    return made(
        nodes,
        [value("x", [16, 64])],
        [value("out", None)],
        [tensor("shape", np.array([1024], dtype=np.int64))],
    )


def test_A02_views_and_results_in_place_have_their_base_s_bytes(tmp_path):  # noqa: N802
    graph = graph_of(tmp_path, chain())
    a, b, c, d, out = (storage_of(graph, n) for n in ("a", "b", "c", "d", "out"))
    assert a == b == c and len({a, d, out}) == 3  # a result of the model is the caller's buffer
    assert [o.mutates for o in graph.ops] == [(), (), (a,), (), ()]
    assert peak(graph) == 2 * 4096


def test_a_runtime_that_copies(tmp_path):
    graph = graph_of(tmp_path, chain(), views=False, in_place="none")
    assert len({storage_of(graph, n) for n in ("a", "b", "c", "d", "out")}) == 5
    graph = graph_of(tmp_path, chain(), in_place="elementwise")
    assert storage_of(graph, "c") != storage_of(graph, "d")  # read twice


def test_nothing_is_overwritten_that_a_later_node_may_read(tmp_path):
    nodes = [
        node("Transpose", ["x"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("Tanh", ["a"], ["c"]),
        node("Add", ["b", "c"], ["out"]),
    ]
    graph = graph_of(tmp_path, made(nodes, [value("x", [8, 8])], [value("out", None)]))
    assert all(not o.mutates for o in graph.ops)
    assert graph.meta["in_place_candidates"] == [["b", "a"], ["c", "a"]]
    nodes[2] = node("Add", ["b", "a"], ["c"])  # reads a after b, in every order
    nodes[3] = node("Relu", ["c"], ["d"])
    nodes.insert(1, node("Softmax", ["a"], ["e"]))
    nodes.append(node("Add", ["d", "e"], ["out"]))
    graph = graph_of(tmp_path, made(nodes, [value("x", [8, 8])], [value("out", None)]))
    assert [graph.ops[k].target for k, o in enumerate(graph.ops) if o.mutates] == ["Relu"]


def test_weights_are_constants_of_the_caller(tmp_path):
    nodes = [
        node("Constant", [], ["k"], value=tensor("", np.ones(64, np.float32))),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    nodes += [node("Add", ["y", "k"], ["out"])]
    weights = [tensor("w", np.ones((8, 64), np.float32)), tensor("unused", np.ones(4096, np.float32))]
    graph = graph_of(tmp_path, made(nodes, [value("x", [4, 8])], [value("out", None)], weights))
    kinds = {graph.storages[s].name: graph.storages[s].kind for s in graph.static}
    assert kinds == {"x": "input", "w": "constant", "k": "constant"}
    assert graph.static_bytes == 4 * 8 * 4 + 8 * 64 * 4 + 256
    matmul = graph.ops[0]
    assert matmul.flops == 2 * 4 * 64 * 8
    assert matmul.time == modeled_time(matmul.flops, 4 * 8 * 4 + 8 * 64 * 4 + 4 * 64 * 4)


def test_random_ops_keep_their_order(tmp_path):
    nodes = [node("RandomNormalLike", ["x"], ["a"]), node("Dropout", ["a", "ratio", "yes"], ["b"])]
    weights = [tensor("ratio", np.float32(0.5)), tensor("yes", np.array(True))]
    graph = graph_of(
        tmp_path,
        made([*nodes, node("Add", ["a", "b"], ["out"])], [value("x", [8])], [value("out", None)], weights),
    )
    assert [o.random for o in graph.ops] == [True, True, False]


# --- graphs inside nodes ---


def branches():
    then = helper.make_graph(
        [node("MatMul", ["x", "x"], ["t1"]), node("Exp", ["t1"], ["t2"]), node("Add", ["t2", "x"], ["t"])],
        "then", [], [value("t", None)],
    )  # fmt: skip
    other = helper.make_graph(
        [node("Add", ["x", "k"], ["e"])],
        "else",
        [],
        [value("e", None)],
        [tensor("k", np.ones((32, 32), np.float32))],
    )
    nodes = [
        node("Transpose", ["input"], ["x"]),
        node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        node("Tanh", ["y"], ["out"]),
    ]
    return made(nodes, [value("input", [32, 32]), value("c", [], TensorProto.BOOL)], [value("out", None)])


def test_R14_branches_have_peaks_of_their_own(tmp_path):  # noqa: N802
    graph = graph_of(tmp_path, branches())
    called = graph.ops[1]
    unit = 32 * 32 * 4
    assert [g.name for g in called.calls] == ["then", "else"]
    assert {graph.values[v].name for v in called.inputs} == {
        "c",
        "x",
        "If_1/k",
    }  # what they take from outside
    # t1 and t2 live together; the branch's result is the caller's (R3) and counted at the call.
    assert extra_bytes(called) == 2 * unit
    assert peak(graph) == unit + unit + 2 * unit
    assert graph.storages[storage_of(graph, "If_1/k")].kind == "constant"


def loop(trips=None):
    body = helper.make_graph(
        [
            node("MatMul", ["h", "w"], ["p"]), node("Tanh", ["p"], ["n"]),
            node("Identity", ["cond"], ["go"]), node("Identity", ["n"], ["each"]),
        ],
        "body", [value("i", [], 7), value("cond", [], 9), value("h", [16, 16])],
        [value("go", None, 9), value("n", None), value("each", None)],
    )  # fmt: skip
    weights = [tensor("w", np.ones((16, 16), np.float32)), tensor("yes", np.array(True))]
    weights += [tensor("m", np.array(trips, dtype=np.int64))] if trips is not None else []
    nodes = [node("Loop", ["m", "yes", "x"], ["last", "all"], body=body)]
    inputs = [value("x", [16, 16])] + ([] if trips is not None else [value("m", [], 7)])
    return made(nodes, inputs, [value("last", None), value("all", None)], weights)


def test_R14_loops_count_what_a_turn_needs(tmp_path):  # noqa: N802
    with pytest.raises(UnknownSize, match=r"all\[0\]"):
        graph_of(tmp_path, loop())
    graph = graph_of(tmp_path, loop(5))
    unit = 16 * 16 * 4
    assert graph.storages[storage_of(graph, "all")].size == 5 * unit
    # beside the results: the turns' slices when they are joined, which is more than what turns need for themselves
    assert extra_bytes(graph.ops[0]) == 5 * unit + 3 * 64
    assert graph.ops[0].flops >= 5 * 2 * 16**3


def test_what_draws_random_numbers_in_a_branch_is_not_run_again(tmp_path):
    """It would draw others: as of RandomNormalLike itself."""
    branches = [
        helper.make_graph([node(kind, ["x"], [f"of {kind}"])], kind, [], [value(f"of {kind}", None)])
        for kind in ("RandomNormalLike", "Relu")
    ]
    nodes = [
        node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        node("Relu", ["y"], ["z"]),
    ]
    graph = graph_of(tmp_path, made(nodes, [value("x", [16]), value("c", [], 9)], [value("z", None)]))
    assert graph.ops[0].random and not graph.ops[0].pure and graph.ops[1].pure


def counted(start, limit, step, trips=None, told=True):
    """A Loop that goes on while a counter is below the size of ``x`` (or ``limit``), as tf2onnx has it."""
    body = helper.make_graph(
        [
            node("Add", ["n", "step"], ["more"]), node("Less", ["more", "bound"], ["go"]),
            node("Gather", ["x", "n"], ["row"], axis=0), node("Identity", ["row"], ["each"]),
        ],
        "body", [value("i", [], 7), value("cond", [], 9), value("n", [], 7)],
        [value("go", None, 9), value("more", None, 7), value("each", None)],
    )  # fmt: skip
    numbers = {"start": start, "step": step, "zero": 0, **({"m": trips} if trips is not None else {})}
    weights = [tensor(name, np.array(x, dtype=np.int64)) for name, x in numbers.items()]
    nodes = [node("Shape", ["x"], ["sizes"]), node("Gather", ["sizes", "zero"], ["length"])]
    if limit is not None:
        weights.append(tensor("limit", np.array(limit, dtype=np.int64)))
    nodes.append(node("Min", ["length", "limit"] if limit is not None else ["length"], ["bound"]))
    weights.append(tensor("yes", np.array(told)))
    nodes.append(node("Loop", ["m" if trips is not None else "", "yes", "start"], ["last", "all"], body=body))
    return made(nodes, [value("x", ["time", 4])], [value("last", None, 7), value("all", None)], weights)


@pytest.mark.parametrize(
    ("start", "limit", "step", "trips", "told"),
    [
        (0, None, 1, None, True),
        (0, None, 2, None, True),
        (0, 5, 1, None, True),
        (3, None, 1, None, True),
        (0, None, 1, 4, True),
        (0, None, 1, 99, True),
        (5, 1, 1, None, True),
        (0, None, 1, None, False),
        (0, None, 1, 0, True),
    ],
)
def test_turns_of_a_loop_with_a_condition_are_counted_from_sizes(tmp_path, start, limit, step, trips, told):
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = counted(start, limit, step, trips, told)
    graph = graph_of(tmp_path, model, {"time": 8})
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    _, rows = session.run(None, {"x": np.ones((8, 4), np.float32)})
    assert next(v.shape for v in graph.values if v.name == "all") == rows.shape


def with_condition(trips, *, computed, told=True, goes_on=True):
    """A Loop with a trip count whose body says itself, by a constant, that it goes on, as spox and torch have it."""
    said = node(
        "Constant", [], ["said"], value=helper.make_tensor("", TensorProto.BOOL, [], [goes_on != computed])
    )
    last = node("Not" if computed else "Identity", ["said"], ["go"])
    body = helper.make_graph(
        [said, last, node("Tanh", ["h"], ["n"]), node("Identity", ["h"], ["each"])],
        "body", [value("i", [], 7), value("cond", [], 9), value("h", [4, 4])],
        [value("go", None, 9), value("n", None), value("each", None)],
    )  # fmt: skip
    weights = [tensor("m", np.array(trips, dtype=np.int64)), tensor("told", np.array(told))]
    nodes = [node("Loop", ["m", "told", "x"], ["last", "all"], body=body)]
    return made(nodes, [value("x", [4, 4])], [value("last", None), value("all", None)], weights)


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(
    ("trips", "told", "goes_on"), [(3, True, True), (3, True, False), (3, False, True), (0, True, False)]
)
def test_turns_of_a_loop_whose_body_says_by_a_constant_that_it_goes_on(
    tmp_path, trips, told, goes_on, computed
):
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = with_condition(trips, computed=computed, told=told, goes_on=goes_on)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    _, rows = session.run(None, {"x": np.ones((4, 4), np.float32)})
    assert next(v.shape for v in graph_of(tmp_path, model).values if v.name == "all") == rows.shape


def test_turns_of_a_loop_that_goes_on_in_each_are_as_many_as_it_says(tmp_path):
    graph = graph_of(tmp_path, with_condition(100_000, computed=False))
    assert shape_of(graph, "all") == (100_000, 4, 4)


@pytest.mark.parametrize("step", [0, 1])
def test_turns_that_data_decides_or_that_do_not_end_are_asked_for(tmp_path, step):
    model = counted(0, None, step)
    if step:
        model.graph.node[-2].input[:] = ["data"]
        model.graph.input.append(value("data", [], 7))
    with pytest.raises(UnknownSize, match=r"all\[0\]"):
        graph_of(tmp_path, model, {"time": 8})
    graph = graph_of(tmp_path, model, {"time": 8, "all[0]": 6})
    assert next(v.shape for v in graph.values if v.name == "all") == (6, 4)


def test_what_a_loop_carries_may_turn_out_to_be_of_one_size_when_sizes_are_given(tmp_path):
    """tf2onnx makes such loops of recurrent layers: the zeros to begin with have a computed size."""
    body = helper.make_graph(
        [node("Tanh", ["x"], ["n"]), node("Identity", ["cond"], ["go"])],
        "body", [value("i", [], 7), value("cond", [], 9), value("h", None)],
        [value("go", None, 9), value("n", None)],
    )  # fmt: skip
    weights = [tensor("yes", np.array(True)), tensor("m", np.array(3, dtype=np.int64))]
    weights += [tensor("one", np.array([1], dtype=np.int64))]
    nodes = [
        node("Shape", ["x"], ["size"]), node("Mul", ["size", "one"], ["same"]),
        node("ConstantOfShape", ["same"], ["zeros"]), node("Loop", ["m", "yes", "zeros"], ["last"], body=body),
    ]  # fmt: skip
    model = made(nodes, [value("x", ["batch", 4])], [value("last", None)], weights)
    with pytest.raises(UnknownSize, match="give --shape batch=N"):
        graph_of(tmp_path, model)
    graph = graph_of(tmp_path, model, {"batch": 2})
    assert next(v.shape for v in graph.values if v.name == "last") == (2, 4)
    other = made(
        nodes,
        [value("x", [2, 4])],
        [value("last", None)],
        [*weights[:2], tensor("one", np.array([2], dtype=np.int64))],
    )
    graph = graph_of(tmp_path, other)  # of another size in the first turn only
    assert next(v.shape for v in graph.values if v.name == "last") == (2, 4)


def test_scans(tmp_path):
    body = helper.make_graph(
        [node("Add", ["s", "v"], ["s2"]), node("Mul", ["s2", "v"], ["p"])],
        "body", [value("s", [4]), value("v", [4])], [value("s2", None), value("p", None)],
    )  # fmt: skip
    model = made(
        [node("Scan", ["s0", "x"], ["last", "all"], body=body, num_scan_inputs=1)],
        [value("s0", [4]), value("x", [9, 4])],
        [value("last", None), value("all", None)],
    )
    graph = graph_of(tmp_path, model)
    assert next(v.shape for v in graph.values if v.name == "all") == (9, 4)


def test_functions_are_inlined(tmp_path):
    inside = [node("Add", ["a", "a"], ["t"]), node("Relu", ["t"], ["b"])]
    twice = helper.make_function("my", "Twice", ["a"], ["b"], inside, [helper.make_opsetid("", 21)])
    nodes = [node("Add", ["x", "w"], ["x2"]), node("Twice", ["x2"], ["y"], domain="my")]
    nodes.append(node("Twice", ["y"], ["out"], domain="my"))
    weights, more = [tensor("w", np.ones(1024, np.float32))], [helper.make_opsetid("my", 1)]
    ends = [value("x", [1024])], [value("out", None)]
    model = made(nodes, *ends, weights, functions=[twice], opsets=more)
    found = read(saved(tmp_path, model))
    assert found.inlined == 1
    assert found.proto.graph.initializer[0].raw_data == model.graph.initializer[0].raw_data
    assert [o.target for o in lower(found).graph.ops] == ["Add", "Add", "Relu", "Add", "Relu"]


# --- ops of onnxruntime's own ---

MS = "com.microsoft"
WEIGHT = np.ones((16, 8, 3, 3), np.float32)


def own(op, inputs, weights=(), domain=MS, outputs=("y",), **attributes):
    nodes = [node("Neg", ["x"], ["a"]), node(op, inputs, outputs, domain=domain, **attributes)]
    nodes.append(node("Neg", [outputs[0]], ["z"]))
    opsets = [helper.make_opsetid(domain, 1)]
    return made(nodes, [value("x", ["n", 8, 16, 16])], [value("z", None)], weights, opset=17, opsets=opsets)


def test_inputs_that_the_runtime_does_not_take_are_said(tmp_path):
    """As its own quantizer adds a bias of 32 bits: the runtime knows the op, and does not load the model."""
    scale, zero = tensor("scale", np.float32(1)), tensor("zero", np.uint8(0))
    add = node("QLinearAdd", ["x", "scale", "zero"] * 2 + ["scale", "zero"], ["y"], domain=MS)
    x = value("x", [4], TensorProto.INT32)
    model = made([add], [x], [value("y", None)], [scale, zero], opsets=[helper.make_opsetid(MS, 1)])
    with pytest.raises(BadInput, match=r"does not take these inputs: Type 'tensor\(int32\)' of input"):
        graph_of(tmp_path, model)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (own("QuickGelu", ["a"]), 2 * 8 * 16 * 16),
        (own("FusedMatMul", ["a", "a"], transB=1), 2 * 8 * 16 * 16),
        (own("FusedConv", ["a", "w"], [tensor("w", WEIGHT)], activation="Relu"), 2 * 16 * 14 * 14),
        (own("MaxPool", ["a"], domain=f"{MS}.nchwc", kernel_shape=[2, 2], strides=[2, 2]), 2 * 8 * 8 * 8),
    ],
)
def test_onnxruntime_says_what_its_own_ops_make(tmp_path, model, count):
    pytest.importorskip("onnxruntime")
    graph = graph_of(tmp_path, model, "n=2")
    assert graph.storages[storage_of(graph, "y")].size == 4 * count


def test_weights_of_few_bits_are_known_to_onnxruntime(tmp_path):
    """As onnxruntime's quantizer writes weights of 4 bits into files of old opsets."""
    pytest.importorskip("onnxruntime")
    ins = ["w", "scale", "zero"]
    nodes = [node("DequantizeLinear", ins, ["y"], domain=MS), node("Mul", ["x", "y"], ["z"])]
    four = helper.make_tensor("w", TensorProto.INT4, [6], [1, 2, 3, -4, 5, 6])
    weights = [four, tensor("scale", np.float32(0.5)), helper.make_tensor("zero", TensorProto.INT4, [], [0])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    graph = graph_of(tmp_path, made(nodes, [value("x", [6])], [value("z", None)], weights, opsets=opsets))
    assert next(v for v in graph.values if v.name == "y").shape == (6,)


def test_inputs_too_small_for_a_window_are_said_to_be(tmp_path):
    model = made(
        [node("Conv", ["x", "w"], ["y"])],
        [value("x", ["n", 8, "h", 16])],
        [value("y", None)],
        [tensor("w", WEIGHT)],
    )
    with pytest.raises(BadInput, match=r"'y' would have -1 elements along axis 2: .* too small .*--shape"):
        graph_of(tmp_path, model, "n=1,h=1")


def test_without_onnxruntime_its_ops_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tightship.frontends.onnx.contrib.results", lambda *_: None)
    with pytest.raises(UnknownSize, match="unknown type of the value 'y'"):
        graph_of(tmp_path, own("FusedMatMul", ["a", "a"], transB=1), "n=2")
    monkeypatch.undo()
    with pytest.raises(UnknownSize, match=r"unknown type of the value 'y'; .*model's value_info"):
        graph_of(tmp_path, own("OfNobody", ["a"]), "n=2")
    declared = own("OfNobody", ["a"])
    declared.graph.value_info.append(value("y", ["n", 32]))
    graph = graph_of(tmp_path, declared, "n=2")
    assert graph.storages[storage_of(graph, "y")].size == 256


def test_a_convolution_of_the_runtimes_writes_over_what_it_adds(tmp_path):
    runtime = pytest.importorskip("tightship.integrations.onnxruntime")
    w = tensor("w", np.ones((8, 8, 3, 3), np.float32))
    model = own("FusedConv", ["x", "w", "", "a"], [w], activation="Relu", pads=[1, 1, 1, 1])
    path = saved(tmp_path, model)
    program = lower(read(path), "n=2")
    assert storage_of(program.graph, "y") == storage_of(program.graph, "a")
    ran = runtime.measure(path, {"x": np.ones((2, 8, 16, 16), np.float32)}, level="disabled")
    assert ran.peak == peak(program.graph)
