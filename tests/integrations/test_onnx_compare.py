"""Files planned after onnxruntime's optimization, compared with a session of its defaults."""

from __future__ import annotations

import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.cli import main
from tightship.errors import BadInput
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.integrations import onnx_compare, onnx_sessions
from tightship.integrations.onnx_compare import Sessions, Use, compared, read_feeds, write_best
from tightship.integrations.onnx_feeds import feeds_of
from tightship.integrations.onnx_write import KEY_PLAN, KEY_SESSION, write_model
from tightship.integrations.onnxruntime import (
    AS_IT_IS,
    PLANNED,
    measure,
    optimized,
    portable,
    random_feeds,
    session,
)
from tightship.integrations.own_process import Crashed

RNG = np.random.default_rng(0)


def weights(*shape):
    return RNG.standard_normal(shape).astype(np.float32) / 8


def branches(opset=17):
    """Three branches of convolutions, joined: the order matters, and the runtime fuses and lays out anew; not what
    has 12 channels, in blocks of neither 8 nor 16, which processors differ in."""
    nodes, given, ends = [], [], []
    for k in range(3):
        wide, thin = f"wide{k}", f"thin{k}"
        given += [tensor(wide, weights(64, 16, 3, 3)), tensor(thin, weights(12, 64, 1, 1))]
        nodes.append(node("Conv", ["x", wide], [f"a{k}"], pads=[1, 1, 1, 1]))
    for k in range(3):  # all wide ones first, as exporters like to have it
        nodes += [node("Relu", [f"a{k}"], [f"b{k}"]), node("Conv", [f"b{k}", f"thin{k}"], [f"c{k}"])]
        ends.append(f"c{k}")
    nodes.append(node("Concat", ends, ["y"], axis=1, name="join"))
    model = made(nodes, [value("x", ["n", 16, 32, 32])], [value("y", None)], given, opset=opset)
    model.ir_version = 8
    return model


def assert_written_runs_equal(program, path, tmp_path):
    """What is written with a plan gives the results of the file."""
    write_model(program, api.plan_graph(program.graph).plan, tmp_path / "out.onnx")
    feeds = feeds_of(program)
    ran, before = measure(tmp_path / "out.onnx", feeds), measure(path, feeds)
    assert np.array_equal(ran.outputs[0], before.outputs[0])


def test_what_the_optimizer_makes_is_planned_and_runs_as_planned(tmp_path):
    original = lower(read(saved(tmp_path, branches())), "n=1")
    (tmp_path / "work").mkdir()
    program = optimized(original, tmp_path / "work", "n=1")
    graph = program.graph
    assert all(op.target != "Relu" for op in graph.ops)  # they are in the convolutions
    assert any(op.target.startswith("com.microsoft") for op in graph.ops)
    plan = api.plan_graph(graph).plan
    answer = write_best(program, plan, original, tmp_path / "out.onnx", must=True)
    tried = answer.tried["planned"]
    assert tried.difference == 0
    assert tried.file.requested < tried.default.requested
    feeds = feeds_of(original)
    ran = measure(tmp_path / "out.onnx", feeds, level="all")
    assert plan.peak - plan.static - 64 * len(graph.storages) <= ran.peak <= plan.peak - plan.static
    names = [n.name for n in onnx.load(tmp_path / "out.onnx").graph.node]
    assert list(ran.order) == names  # nothing is left to optimize
    default = ort.InferenceSession(str(original.model.path)).run(None, feeds)
    for a, b in zip(default, session(tmp_path / "out.onnx").run(None, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_are_written_over_inputs_of_sizes_that_the_runtime_cannot_infer(tmp_path):
    """It does so where it knows that both have one shape: the written file says so, and runs at other sizes, too."""
    nodes = [node("Shape", ["y"], ["shape"]), node("Mul", ["shape", "once"], ["to"])]
    nodes += [node("Expand", ["one", "to"], ["a"]), node("Softmax", ["a"], ["b"])]
    nodes += [node("Sigmoid", ["b"], ["c"]), node("ReduceSum", ["c"], ["out"])]
    x, y = value("one", [1, 1]), value("y", ["rows", "columns"])
    model = made(nodes, [x, y], [value("out", None)], [tensor("once", np.array([1, 1]))])
    path, out = saved(tmp_path, model), tmp_path / "out.onnx"
    program = lower(read(path), "rows=64,columns=512")
    plan = api.plan_graph(program.graph).plan
    write_model(program, plan, out)
    feeds = random_feeds(path, {"one": (1, 1), "y": (64, 512)})
    ran, before = measure(out, feeds), measure(path, feeds)
    assert ran.peak <= plan.peak - program.graph.static_bytes < before.peak
    assert np.array_equal(ran.outputs[0], before.outputs[0])
    other = random_feeds(path, {"one": (1, 1), "y": (3, 8)})
    assert np.array_equal(measure(out, other).outputs[0], measure(path, other).outputs[0])


@pytest.mark.parametrize("level", ["disabled", "all"])
def test_what_nobody_reads_is_there_to_the_end(tmp_path, level):
    """A Split's second part, and an LSTM's last states, as exporters leave them; also in a loop's turn."""
    sizes = {"w": (2, 96, 16), "r": (2, 96, 24)}
    given = [tensor(n, weights(*s)) for n, s in sizes.items()] + [tensor("n", 3), tensor("true", True)]
    split = {"axis": 1, "num_outputs": 2}
    turn = [node("Split", ["c"], ["d", "left"], **split), node("Concat", ["d", "d"], ["e"], axis=1)]
    turn += [node("Identity", ["again"], ["on"]), node("Tanh", ["e"], ["f"])]
    states = [value("again", [], TensorProto.BOOL), value("c", [11, 96])]
    body = helper.make_graph(
        turn, "turn", [value("i", [], TensorProto.INT64), *states],
        [value("on", [], TensorProto.BOOL), value("f", [11, 96])],
    )  # fmt: skip
    nodes = [
        node("LSTM", ["x", "w", "r"], ["y", "h", "s"], hidden_size=24, direction="bidirectional"),
        node("Reshape", ["y", "shape"], ["a"]),
        node("Split", ["a"], ["b", "unread"], **split),
        node("Concat", ["b", "b"], ["c0"], axis=1),
        node("Loop", ["n", "true", "c0"], ["z"], body=body),
        node("Relu", ["z"], ["out"]),
    ]
    given.append(tensor("shape", np.array([11, 96])))
    model = made(nodes, [value("x", [11, 2, 16])], [value("out", None)], given, opset=18)
    original = lower(read(saved(tmp_path, model)))
    (tmp_path / "work").mkdir()
    program = original if level == "disabled" else optimized(original, tmp_path / "work", None, level)
    plan = api.plan_graph(program.graph).plan
    write_model(program, plan, tmp_path / "out.onnx")
    ran = measure(tmp_path / "out.onnx", feeds_of(original), level=level)
    planned = plan.peak - program.graph.static_bytes
    assert ran.peak <= planned


@pytest.mark.parametrize("parts", [np.array(3), np.array([3, 1, 4])])
def test_sequences_that_only_hand_parts_on_are_slices(tmp_path, parts):
    """As torch's exporter writes ``torch.split`` where it does not optimize; in a branch, too."""
    indices = [tensor(f"i{k}", np.array(k)) for k in range(3)]

    def split(given, to):
        nodes = [node("SplitToSequence", [given, "parts"], [f"{to}/s"], axis=-1)]
        nodes += [node("SequenceAt", [f"{to}/s", f"i{k}"], [f"{to}/{k}"]) for k in (2, 0, 1)]
        return [*nodes, node("Concat", [f"{to}/{k}" for k in (2, 1, 0)], [to], axis=-1)]

    def branch(name, kind):
        inner = [*indices, tensor("parts", parts)]
        nodes = [*split("a", f"{name}/b"), node(kind, [f"{name}/b"], [name])]
        return helper.make_graph(nodes, name, [], [value(name, None)], inner)

    nodes = [
        *split("x", "a"),
        node("ReduceSum", ["a"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["p"], to=9),
    ]
    nodes.append(node("If", ["p"], ["y"], then_branch=branch("t", "Exp"), else_branch=branch("e", "Neg")))
    given = [*indices, tensor("parts", parts)]
    path = saved(tmp_path, made(nodes, [value("x", [4, 8])], [value("y", None)], given, opset=18))
    program = lower(read(path))
    assert any("9 tensors" in note for note in program.notes)
    assert_written_runs_equal(program, path, tmp_path)


@pytest.mark.parametrize("stacked", [0, 1])
def test_sequences_of_known_tensors_are_these_tensors(tmp_path, stacked):
    """As exporters write lists: made, added to, taken from and joined; in a branch, too."""

    def joined(given, to):
        nodes = [node("Tanh", [given], [f"{to}/t"]), node("SequenceEmpty", [], [f"{to}/e"], dtype=1)]
        nodes += [node("SequenceInsert", [f"{to}/e", given], [f"{to}/1"])]
        nodes += [node("SequenceInsert", [f"{to}/1", f"{to}/t", "first"], [f"{to}/2"])]
        nodes += [node("SequenceConstruct", [given, f"{to}/t", given], [f"{to}/c"])]
        nodes += [node("SequenceErase", [f"{to}/c", "last"], [f"{to}/3"])]
        nodes += [node("SequenceAt", [f"{to}/3", "last"], [f"{to}/a"])]
        nodes += [
            node("SequenceLength", [f"{to}/2"], [f"{to}/n"]),
            node("Cast", [f"{to}/n"], [f"{to}/f"], to=1),
        ]
        nodes += [node("ConcatFromSequence", [f"{to}/2"], [f"{to}/j"], axis=-1, new_axis=stacked)]
        nodes += [
            node("ReduceSum", [f"{to}/j"], [f"{to}/r"], keepdims=0),
            node("Mul", [f"{to}/r", f"{to}/f"], [f"{to}/m"]),
        ]
        return [*nodes, node("Add", [f"{to}/a", f"{to}/m"], [to])]

    places = [tensor("first", np.array(0)), tensor("last", np.array(-1))]

    def branch(name, kind):
        nodes = [*joined("a", f"{name}/b"), node(kind, [f"{name}/b"], [name])]
        return helper.make_graph(nodes, name, [], [value(name, None)], places)

    nodes = [
        *joined("x", "a"),
        node("ReduceSum", ["a"], ["sum"], keepdims=0),
        node("Cast", ["sum"], ["p"], to=9),
    ]
    nodes.append(node("If", ["p"], ["y"], then_branch=branch("t", "Exp"), else_branch=branch("e", "Neg")))
    path = saved(tmp_path, made(nodes, [value("x", [4, 8])], [value("y", None)], places, opset=18))
    program = lower(read(path))
    assert any("9 nodes" in note for note in program.notes)
    assert_written_runs_equal(program, path, tmp_path)


def test_nodes_before_what_they_read_are_put_in_order(tmp_path):
    """As converters to float16 leave them, which onnxruntime runs."""
    turn = [node("Tanh", ["c"], ["e"]), node("Mul", ["c", "e"], ["d"]), node("Identity", ["t"], ["on"])]
    states = [value("t", [], TensorProto.BOOL), value("c", [4, 8])]
    body = helper.make_graph(
        turn, "turn", [value("i", [], TensorProto.INT64), *states],
        [value("on", [], TensorProto.BOOL), value("d", [4, 8])],
    )  # fmt: skip
    nodes = [node("Loop", ["n", "true", "cast"], ["z"], body=body), node("Cast", ["z"], ["y"], to=10)]
    nodes.append(node("Cast", ["x"], ["cast"], to=1))
    given = [tensor("n", 3), tensor("true", True)]
    x, y = value("x", [4, 8], TensorProto.FLOAT16), value("y", [4, 8], TensorProto.FLOAT16)
    path = tmp_path / "model.onnx"
    path.write_bytes(made(nodes, [x], [y], given, opset=18).SerializeToString())
    program = lower(read(path))
    assert any("in order" in note for note in program.notes)
    assert_written_runs_equal(program, path, tmp_path)


@pytest.mark.parametrize("level", ["all", "extended", "basic", "none"])
def test_what_several_read_of_quantized_values_is_dequantized_once(tmp_path, level):
    """onnxruntime doubles such a node whenever it loads a file, and merges the two again where it optimizes."""
    scale, zero = tensor("s", np.float32(0.05)), tensor("z", np.uint8(128))
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("Exp", ["d"], ["e"]), node("Erf", ["d"], ["f"]), node("Mul", ["e", "f"], ["g"]),
        node("Sin", ["g"], ["y"]),
    ]  # fmt: skip
    path = saved(
        tmp_path, made(nodes, [value("x", [64, 64])], [value("y", [64, 64])], [scale, zero], opset=17)
    )
    options = ["--budget", "100%", "--optimize", level, "--write", str(tmp_path / "out.onnx")]
    assert main(["plan", str(path), *options]) == 0
    kept = {e.key: e.value for e in onnx.load(str(tmp_path / "out.onnx")).metadata_props}
    plan, given = json.loads(kept[KEY_PLAN]), json.loads(kept[KEY_SESSION])
    assert given["fuse_quantized"] == (level in ("basic", "none"))  # the rest is fused when it is loaded
    if given["fuse_quantized"]:
        return
    program = lower(read(tmp_path / "out.onnx"))
    ran = measure(tmp_path / "out.onnx", feeds_of(program), **given)
    assert len(ran.order) == len(program.graph.ops)
    assert ran.peak == plan["peak"] - program.graph.static_bytes


def test_sparse_weights_are_planned_as_they_are(tmp_path, capsys):
    """The runtime's optimizer writes them as onnx's checker does not allow."""
    model = made([node("MatMul", ["x", "w"], ["y"])], [value("x", [4, 8])], [value("y", [4, 8])])
    values = helper.make_tensor("w", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    places = helper.make_tensor("places", TensorProto.INT64, [3], [1, 10, 40])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [8, 8]))
    status, rows = plan_of(capsys, saved(tmp_path, model), "--write", tmp_path / "out.onnx")
    assert status == 0 and rows["runtime"]["failure"] is None
    assert any("sparse weights" in note for note in rows["notes"])
    assert rows["runtime"]["tried"]["planned"]["difference"] == 0


@pytest.mark.parametrize("level", ["basic", "extended", "all"])
def test_levels_say_where_the_file_runs(tmp_path, level):
    original = lower(read(saved(tmp_path, branches())), "n=1")
    (tmp_path / "work").mkdir()
    program = optimized(original, tmp_path / "work", "n=1", level)
    word, said = portable(program.model)
    assert word in {"basic": {"any"}, "extended": {"onnxruntime"}, "all": {"onnxruntime", "processor"}}[level]
    assert any(level in note and said in note for note in program.notes)


def test_models_of_old_opsets_are_optimized_as_they_are(tmp_path):
    model = branches(9)
    model.ir_version = 3
    model.graph.input.extend(value(t.name, t.dims) for t in model.graph.initializer)
    original = lower(read(saved(tmp_path, model)), "n=2")
    (tmp_path / "work").mkdir()
    program = optimized(original, tmp_path / "work", "n=2")
    assert [i.name for i in program.model.proto.graph.input] == ["x"]
    answer = write_best(program, api.plan_graph(program.graph).plan, original, tmp_path / "out.onnx")
    assert answer.tried["planned"].difference == 0


def test_weights_beside_the_model_are_beside_the_written_one(tmp_path):
    onnx.save_model(
        branches(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=16
    )
    original = lower(read(tmp_path / "m.onnx"), "n=1")
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    program = optimized(original, tmp_path / "work", "n=1")
    answer = write_best(program, api.plan_graph(program.graph).plan, original, tmp_path / "out" / "o.onnx")
    assert not answer.failure and answer.tried["planned"].difference == 0


def use(time=1.0, requested=64, arena=64, holds=64):
    return Use(time, requested, arena, holds)


def test_what_is_worse_is_written_as_it_was(tmp_path, monkeypatch):
    """Slower, larger or of other results, in either way: the model's own file; a budget is met all the same."""
    original = lower(read(saved(tmp_path, branches())), "n=1")
    plan = api.plan_graph(original.graph).plan
    out = tmp_path / "out.onnx"
    worse = [
        Sessions(use(), use(1.2), 1.2, 0.0),
        Sessions(use(), use(arena=128), 1.0, 0.0),
        Sessions(use(), use(), 1.0, 1e-3),
    ]
    for found in worse:
        assert not found.better
        monkeypatch.setattr(onnx_compare, "compared", lambda *_, found=found: found)
        answer = write_best(original, plan, original, out)
        assert answer.file == "as it was" and list(answer.tried) == ["planned", "block", "reuse"]
        assert out.read_bytes() == original.model.path.read_bytes()
        assert "written as it was" in list(answer.lines())[-1]
        assert write_best(original, plan, original, out, must=True).file == "planned"
        assert onnx.load(out).metadata_props
    second = iter([worse[1], Sessions(use(), use(), 1.0, 0.0)])
    monkeypatch.setattr(onnx_compare, "compared", lambda *_: next(second))
    assert write_best(original, plan, original, out).file == "block"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_random_indices_are_of_the_smallest_table(tmp_path, rows):
    """BERT's table of token types has two rows."""
    nodes = [node("Gather", ["table", "i"], ["a"]), node("Neg", ["a"], ["y"])]
    inputs = [value("i", [64], TensorProto.INT64)]
    model = made(nodes, inputs, [value("y", None)], [tensor("table", weights(rows, 8))])
    original = lower(read(saved(tmp_path, model)))
    answer = write_best(original, api.plan_graph(original.graph).plan, original, tmp_path / "out.onnx")
    assert not answer.failure and answer.tried["planned"].difference == 0


def test_what_the_runtime_cannot_run_is_said(tmp_path):
    """Random indices do not do for a part of a table; inputs that do can be given."""
    nodes = [
        node("Sub", ["i", "five"], ["j"]),
        node("Gather", ["table", "j"], ["a"]),
        node("Neg", ["a"], ["y"]),
    ]
    inputs = [value("i", [64], TensorProto.INT64)]
    given = [tensor("table", weights(1, 8)), tensor("five", np.array(5, np.int64))]
    original = lower(read(saved(tmp_path, made(nodes, inputs, [value("y", None)], given))))
    plan, out = api.plan_graph(original.graph).plan, tmp_path / "out.onnx"
    answer = write_best(original, plan, original, out)
    assert "--inputs" in answer.failure and not answer.tried and out.exists()
    unknown = made([node("OfNobody", ["x"], ["y"], domain="com.nobody")], [value("x", [4])], [value("y", [4])],
                   opsets=[helper.make_opsetid("com.nobody", 1)])  # fmt: skip
    foreign = lower(read(saved(tmp_path, unknown, "foreign.onnx")))
    failure = write_best(foreign, api.plan_graph(foreign.graph).plan, foreign, tmp_path / "f.onnx").failure
    assert "does not load it" in failure and "--inputs" not in failure
    np.savez(tmp_path / "in.npz", i=np.full(64, 5))
    answer = write_best(original, plan, original, out, read_feeds(tmp_path / "in.npz"))
    assert not answer.failure and answer.tried["planned"].difference == 0
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"not an \.npz"):
        read_feeds(tmp_path / "bad.npz")


@pytest.mark.parametrize("level", [[], ["--optimize", "none"]])
def test_a_model_that_crashes_the_runtime_is_planned_all_the_same(tmp_path, capsys, monkeypatch, level):
    """Its optimizer does so on recurrent nets in half precision: the process was gone, without a word."""

    def crashed(*args, **kwargs):
        raise Crashed("SIGSEGV")

    monkeypatch.setattr(onnx_sessions, "own_process", crashed)
    path, out = saved(tmp_path, branches()), tmp_path / "out.onnx"
    assert main(["plan", str(path), "--shape", "n=1", "--write", str(out), *level, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "crashed (SIGSEGV)" in rows["runtime"]["failure"] and rows["runtime"]["file"] == "planned"
    assert [note for note in rows["notes"] if "crashed (SIGSEGV) optimizing it" in note] or level
    assert onnx.load(out).metadata_props
    with pytest.raises(BadInput, match="crashed"):
        optimized(lower(read(path), "n=1"), tmp_path, "n=1")


def test_a_session_runs_a_file_as_its_metadata_say(tmp_path):
    plain = saved(tmp_path, branches(), "plain.onnx")
    assert session(plain).get_session_options().execution_order == ort.ExecutionOrder.DEFAULT
    original = lower(read(plain), "n=1")
    write_best(original, api.plan_graph(original.graph).plan, original, tmp_path / "out.onnx", must=True)
    options = session(tmp_path / "out.onnx").get_session_options()
    assert options.execution_order == ort.ExecutionOrder.PRIORITY_BASED and not options.enable_mem_reuse
    assert not options.enable_mem_pattern
    model = onnx.load(tmp_path / "out.onnx")
    assert json.loads(next(e.value for e in model.metadata_props if e.key == KEY_SESSION)) == dict(PLANNED)
    for entry in model.metadata_props:
        if entry.key == KEY_SESSION:
            entry.value = '{"level": "of nobody"}'
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(BadInput, match="is not what"):
        session(tmp_path / "bad.onnx")
    with pytest.raises(BadInput, match="onnxruntime does not load it"):
        session(saved(tmp_path, made([node("Nonsense", ["x"], ["y"])], [value("x", [1])], [value("y", [1])])))


def test_the_comparison_sees_results_that_differ(tmp_path):
    one = saved(tmp_path, branches(), "one.onnx")
    model = onnx.load(one)
    data = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    data[0] += 1
    model.graph.initializer[0].CopyFrom(tensor("wide0", data))
    feeds = feeds_of(lower(read(one), "n=1"))
    found = compared(one, saved(tmp_path, model, "two.onnx"), AS_IT_IS, feeds, 0.1)
    assert 0 < found.difference < np.inf and not found.better
    assert compared(one, one, AS_IT_IS, feeds, 0.1).difference == 0


def test_scratch_inside_of_a_node_is_in_the_arena_and_named(tmp_path):
    """A transposed convolution multiplies into scratch 4 times its result, and adds it up."""
    w, nodes = tensor("w", weights(64, 8, 4, 4)), [node("Neg", ["x"], ["a"], name="first")]
    nodes += [node("ConvTranspose", ["a", "w"], ["y"], name="up", strides=[2, 2], pads=[1, 1, 1, 1])]
    path = saved(tmp_path, made(nodes, [value("x", [1, 64, 64, 64])], [value("y", None)], [w]))
    feeds = feeds_of(lower(read(path)))
    found = compared(path, path, PLANNED, feeds, 0.1)
    scratch = 8 * 16 * 64 * 64 * 4
    assert found.file.at == "up"
    assert (
        scratch <= found.file.scratch <= 2 * scratch
    )  # the arena's pieces are larger than what is asked for
    assert found.file.requested < scratch < found.file.arena
    said = "\n".join(onnx_compare.Answer("planned", PLANNED, "any", {"planned": found}).lines())
    assert "the arena's peak is inside of 'up'" in said


# --- the command line ---


def plan_of(capsys, *given):
    status = main(["plan", *map(str, given), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_command_line_says_how_the_file_compares(tmp_path, capsys):
    source, out = saved(tmp_path, branches()), tmp_path / "out.onnx"
    status, rows = plan_of(capsys, source, "--shape", "n=1", "--write", out)
    assert status == 0
    runtime = rows["runtime"]
    assert runtime["name"] == f"onnxruntime {ort.__version__}" and runtime["failure"] is None
    assert runtime["file"] in ("planned", "block", "reuse", "as it was")
    first = runtime["tried"]["planned"]
    assert first["difference"] == 0 and first["file"]["requested"] < first["default"]["requested"]
    best = runtime["tried"].get(runtime["file"])
    assert best is None or not (best["slower"] or best["larger"])
    assert any("optimization (all)" in note for note in rows["notes"])
    status, rows = plan_of(capsys, source, "--shape", "n=1", "--write", out, "--optimize", "none")
    assert status == 0 and not any("optimization" in note for note in rows["notes"])
    assert main(["plan", str(source), "--shape", "n=1", "--write", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"onnxruntime {ort.__version__}, default session of the model:" in text


def test_options_of_writing_belong_to_writing(tmp_path, capsys):
    source = saved(tmp_path, branches())
    for option in (("--optimize", "all"), ("--inputs", "x.npz")):
        status, rows = plan_of(capsys, source, "--shape", "n=1", *option)
        assert status == 2 and "--write" in rows["error"]["message"]


def test_what_cannot_be_optimized_is_planned_as_it_is(tmp_path, capsys):
    """An op of a domain that the runtime does not have, in a branch's place: the file is written all the same."""
    body = [node("Foo", ["x"], ["a"], domain="my.own"), node("Neg", ["a"], ["y"])]
    opsets = [helper.make_opsetid("my.own", 1)]
    model = made(body, [value("x", [4])], [value("y", [4])], opsets=opsets)
    model.graph.value_info.append(value("a", [4]))
    status, rows = plan_of(capsys, saved(tmp_path, model), "--write", tmp_path / "out.onnx")
    assert status == 0
    assert any("planned as it is" in note for note in rows["notes"])
    assert rows["runtime"]["failure"] and any(
        e.key == KEY_PLAN for e in onnx.load(tmp_path / "out.onnx").metadata_props
    )


@pytest.mark.parametrize("better", [True, False])
def test_data_beside_the_model_stays_what_it_is(tmp_path, better, monkeypatch):
    """Exporters name it after the model; the optimized weights lie beside the file, after its own name."""
    onnx.save_model(
        branches(), tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=16
    )
    before = (tmp_path / "m.onnx.data").read_bytes()
    (tmp_path / "out.onnx.data").write_bytes(b"another's")
    if not better:
        monkeypatch.setattr(Sessions, "better", property(lambda self: False))
    for level in ("all", "extended", "all"):
        command = ["plan", str(tmp_path / "m.onnx"), "--shape", "n=1", "--optimize", level]
        assert main([*command, "--write", str(tmp_path / "out.onnx")]) == 0
        names = {"out.onnx", "m.onnx", "m.onnx.data", "out.onnx.data"}
        made = {p.name for p in tmp_path.iterdir()} - names
        assert bool(made) == better
    assert len(made) <= 2  # one of each kind
    assert (tmp_path / "m.onnx.data").read_bytes() == before
    assert (tmp_path / "out.onnx.data").read_bytes() == b"another's"
    feeds = random_feeds(tmp_path / "m.onnx", {"x": (1, 16, 32, 32)})
    ran, expected = session(tmp_path / "out.onnx").run(None, feeds), measure(tmp_path / "m.onnx", feeds)
    assert np.allclose(ran[0], expected.outputs[0], atol=1e-5)


def test_the_model_is_gone_before_its_session_takes_memory(tmp_path, monkeypatch):
    from tightship.integrations import onnxruntime as module

    class Props(list):
        """As what protobuf hands out, it keeps the whole model."""

    read_from = []

    def reads(path, *, convert):
        props = Props(read(path, convert=convert).proto.metadata_props)
        read_from.append(weakref.ref(props))
        return SimpleNamespace(proto=SimpleNamespace(metadata_props=props))

    monkeypatch.setattr(module, "read", reads)
    monkeypatch.setattr(module, "started", lambda *_args, **_options: read_from[0]() is None)
    assert session(saved(tmp_path, branches()))
