"""GraphDefs as files: what becomes of them, and what is refused. Skipped without TensorFlow."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed (pip install 'tightship[tensorflow]')", allow_module_level=True)

import tensorflow as tf
from google.protobuf import text_format

from support.strategies import random_order
from support.tensorflow_models import GPU, MODELS, cnn, mlp, v1
from tightship import api, sources
from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.tensorflow import load
from tightship.frontends.tensorflow.nodes import name_of
from tightship.graph import Graph, aligned
from tightship.simulate import baseline, replay
from tightship.verify import verify


def saved(folder: Path, proto: Any, name: str = "graph.pb") -> str:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return str(path)


def graph_of(folder: Path, proto: Any, **options: Any) -> Graph:
    found: Graph = sources.read_graphdef(saved(folder, proto), **options).graph
    return found


def built(make: Any) -> Any:
    with tf.Graph().as_default() as g:
        make()
        return g.as_graph_def()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_training_graphs_become_graphs_that_every_system_plans(name: str, tmp_path: Path) -> None:
    proto, fetch = MODELS[name]()
    graph = graph_of(tmp_path, proto, fetch=fetch)
    assert {op.phase for op in graph.ops} == {"forward", "backward", "update"}
    assert replay(graph, baseline(graph)).peak > graph.static_bytes > 0
    for system in ("memonger", "aitemplate", "grappler"):
        made = api.plan_named(graph, system)
        assert verify(graph, made.plan) == []


@pytest.mark.parametrize("name", ["cnn", "mlp", "transformer"])
def test_every_legal_order_of_the_graph_is_one_of_the_nodes(name: str, tmp_path: Path) -> None:
    proto, fetch = MODELS[name]()
    graph = graph_of(tmp_path, proto, fetch=fetch)
    nodes = {n.name: n for n in proto.node}
    for seed in range(5):
        place = {graph.ops[k].name: i for i, k in enumerate(random_order(graph, seed))}
        for op in graph.ops:
            read = (name_of(i) for i in nodes[op.name].input)
            assert all(place[m] < place[op.name] for m in read if m in place)


def test_bytes_and_flops_of_a_small_graph(tmp_path: Path) -> None:
    def make() -> None:
        x = v1.placeholder(tf.float32, (8, 16), name="x")
        w = tf.constant([[1.0] * 32] * 16, name="w")
        y = tf.matmul(x, w, name="y")
        tf.reshape(y, (32, 8), name="z")

    graph = graph_of(tmp_path, built(make))
    assert graph.static_bytes == 8 * 16 * 4 + 16 * 32 * 4 + 64
    by_name = {op.name: op for op in graph.ops}
    assert by_name["y"].flops == 2 * 8 * 32 * 16 and by_name["z"].flops == 0
    assert [s.size for k, s in enumerate(graph.storages) if k not in graph.static] == [8 * 32 * 4]
    assert [graph.values[v].name for v in graph.outputs] == ["z"]


def test_variables_of_both_kinds_are_the_callers_and_updates_stand_last(tmp_path: Path) -> None:
    sizes = []
    for resources in (True, False):
        proto, fetch = mlp(resources)
        graph = graph_of(tmp_path, proto, fetch=fetch)
        sizes.append((graph.static_bytes, replay(graph, baseline(graph)).peak))
        phases = [op.phase for op in graph.ops]
        assert phases.index("update") > max(k for k, p in enumerate(phases) if p == "backward")
        weights = [
            s.size for k, s in enumerate(graph.storages) if k in graph.static and s.kind == "parameter"
        ]
        assert sorted(weights) == [128] * 4 + [4096] * 4
    assert sizes[0] == sizes[1]


def test_a_variable_that_is_written_before_the_last_use_of_a_read_is_copied(tmp_path: Path) -> None:
    def make(order: bool) -> None:
        w = v1.get_variable("w", (64, 64), use_resource=True)
        read = w.read_value()
        with tf.control_dependencies([w.assign_add(read * 2.0)] if order else []):
            tf.identity(read + 1.0, name="after")

    made = []
    for order in (True, False):
        graph = graph_of(tmp_path, built(lambda order=order: make(order)), fetch="after")
        reads = [k for k, op in enumerate(graph.ops) if op.target == "ReadVariableOp"]
        made.append(sum(bool(graph.uses.defines[k]) for k in reads))
    assert made == [1, 0]


def test_what_batch_norms_set_aside_on_gpus_has_no_bytes(tmp_path: Path) -> None:
    """The sixth result, for which TensorFlow has no shape, is empty on CPUs: as every frozen graph of TF 1 has it."""
    ones = np.ones(8, np.float32)

    def make() -> None:
        x = v1.placeholder(tf.float32, (2, 16, 16, 8), name="x")
        norm = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=ones, offset=ones, mean=ones, variance=ones, is_training=False, name="norm"
        )
        tf.nn.relu(norm[0], name="y")

    graph = graph_of(tmp_path, built(make))
    assert any(op.target == "FusedBatchNormV3" for op in graph.ops)
    assert max(s.size for s in graph.storages) == 2 * 16 * 16 * 8 * 4


def test_shapes_of_placeholders_are_given_and_never_guessed(tmp_path: Path) -> None:
    def make() -> None:
        x = v1.placeholder(tf.float32, (None, 16), name="x")
        tf.nn.relu(x, name="y")

    proto = built(make)
    with pytest.raises(UnknownSize, match=r"unknown size of x; give --shape x=Nx16$"):
        graph_of(tmp_path, proto)
    graph = graph_of(tmp_path, proto, shape="x=4x16")
    assert graph.storages[graph.values[graph.outputs[0]].storage].size == 256
    assert graph_of(tmp_path, proto, shape={"x": (4, 16)}).digest == graph.digest
    for wrong in ("x=4x8", "x=4", "z=4x16", "x=ax2", "x"):
        with pytest.raises(BadInput):
            graph_of(tmp_path, proto, shape=wrong)


def test_what_is_not_fetched_is_left_out_and_what_is_fed_is_the_callers(tmp_path: Path) -> None:
    proto, fetch = cnn()
    whole, part = graph_of(tmp_path, proto), graph_of(tmp_path, proto, fetch=",".join(fetch))
    assert len(part.ops) < len(whole.ops)
    assert any("Initializer" in op.name for op in whole.ops)
    assert not any("Initializer" in op.name for op in part.ops)
    fed = graph_of(tmp_path, proto, fetch=fetch, feed="Relu")
    assert "Relu" in {fed.values[v].name for v in fed.inputs}
    assert "Relu" not in {op.name for op in api.plan_named(fed, "grappler", level="recompute").graph.ops}
    with pytest.raises(BadInput, match="--fetch"):
        graph_of(tmp_path, proto, fetch="nobody")


def test_text_meta_and_saved_models_are_read(tmp_path: Path) -> None:
    proto, fetch = cnn()
    graph = graph_of(tmp_path, proto)
    text = tmp_path / "g.pbtxt"
    text.write_text(text_format.MessageToString(proto))
    assert sources.read_graphdef(str(text)).graph.digest == graph.digest
    with tf.Graph().as_default() as g:
        tf.import_graph_def(proto, name="")
        meta = v1.train.export_meta_graph(graph=g, graph_def=proto)
    meta.collection_def["train_op"].node_list.value.extend(fetch)
    assert sources.read_graphdef(saved(tmp_path, meta, "g.meta")).fetch == fetch
    whole = load.saved_model_pb2.SavedModel(saved_model_schema_version=1)
    whole.meta_graphs.add().CopyFrom(meta)
    assert len(sources.read_graphdef(saved(tmp_path, whole, "saved_model.pb")).graph.ops) < len(graph.ops)


def test_what_a_saved_model_serves_is_fetched(tmp_path: Path) -> None:
    """Not what saves and restores its variables, whose sizes nobody knows."""
    module = tf.Module()
    module.w = tf.Variable(tf.ones((8, 8)))
    given = tf.TensorSpec((4, 8), tf.float32, "x")
    served = tf.function(lambda x: {"y": tf.tanh(x @ module.w)}).get_concrete_function(given)
    tf.saved_model.save(module, str(tmp_path), signatures=served)
    source = sources.read_graphdef(str(tmp_path / "saved_model.pb"))
    assert source.fetch == ("StatefulPartitionedCall",)
    assert any(op.target == "Tanh" for op in source.graph.ops)
    assert not any("Restore" in op.target for op in source.graph.ops)


def test_a_saved_model_whose_loops_read_variables_is_planned_for_a_size_that_it_leaves_open(
    tmp_path: Path,
) -> None:
    """As Keras saves recurrent layers, one behind another: a loop's body reads variables outside of it and elements
    of a list, and is called by functions; a second function is of a size that nobody gives. By its folder."""

    class Layers(tf.Module):
        def __init__(self) -> None:
            self.w = [tf.Variable(tf.eye(8) * 0.5) for _ in range(2)]

        def turn(self, x: Any, w: Any) -> Any:
            rows = tf.TensorArray(tf.float32, x.shape[0], element_shape=(None, 8)).unstack(x)
            made = tf.TensorArray(tf.float32, x.shape[0], element_shape=(None, 8))

            def body(i: Any, h: Any, made: Any) -> Any:
                h = tf.tanh(rows.read(i) @ w + h @ w)
                return i + 1, h, made.write(i, h)

            begins = (0, tf.zeros((tf.shape(x)[1], 8)), made)
            shapes = (tf.TensorShape(()), tf.TensorShape((None, 8)), None)
            return tf.while_loop(
                lambda i, *_: i < x.shape[0], body, begins,
                shape_invariants=(*shapes[:2], tf.TensorShape(None)), maximum_iterations=x.shape[0],
            )[2].stack()  # fmt: skip

        @tf.function(input_signature=[tf.TensorSpec((5, None, 8), tf.float32, "x")])
        def serve(self, x: Any) -> Any:
            for w in self.w:
                x = self.turn(x, w)
            return {"y": x}

        @tf.function(input_signature=[tf.TensorSpec((5, None, 8), tf.float32, "z")])
        def other(self, z: Any) -> Any:
            return {"y": self.turn(z, self.w[0])}

    module = Layers()
    served = {"serving_default": module.serve, "other": module.other}
    tf.saved_model.save(module, str(tmp_path), signatures=served)
    name = "serving_default_x"
    with pytest.raises(UnknownSize, match=name):
        sources.load_source(str(tmp_path))
    graph = sources.load_source(str(tmp_path), {"shape": f"{name}=5x3x8"}).graph
    assert sum(op.target == "While" for op in graph.ops) == 2
    (made,) = {s.size for s in graph.storages if s.kind == "activation" and s.size >= 5 * 3 * 8 * 4}
    assert made == aligned(5 * 3 * 8 * 4)
    assert verify(graph, api.plan(graph).plan) == []


def test_a_loop_of_another_signature_does_not_ask_for_sizes(tmp_path: Path) -> None:
    """As Keras exports stateful recurrent layers: it begins with a variable, and reads a list of elements of a size
    that is open there."""
    module = tf.Module()
    module.s = tf.Variable(tf.ones((3, 8)))

    def turn(x: Any) -> Any:
        rows = tf.TensorArray(tf.float32, 5, element_shape=(None, 8)).unstack(x)
        shapes = (tf.TensorShape(()), tf.TensorShape((3, 8)))
        h = tf.while_loop(
            lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(rows.read(i) @ tf.eye(8) + h)), (0, module.s),
            shape_invariants=shapes, maximum_iterations=5,
        )[1]  # fmt: skip
        module.s.assign(h)
        return {"y": h}

    served = {
        key: tf.function(turn).get_concrete_function(tf.TensorSpec((5, None, 8), tf.float32, name))
        for key, name in (("serving_default", "x"), ("other", "z"))
    }
    tf.saved_model.save(module, str(tmp_path), signatures=served)
    graph = sources.load_source(str(tmp_path), {"shape": "serving_default_x=5x3x8"}).graph
    assert sum(op.target in ("While", "StatelessWhile") for op in graph.ops) == 1


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "wrong.pb"
    for data in (b"", b"\xff" * 50, b"\x0a\x7f", b"\x08\x01", b"not a graph"):
        path.write_bytes(data)
        with pytest.raises(BadInput):
            sources.read_graphdef(str(path))
    for name in ("missing.pb", "."):
        with pytest.raises(BadInput):
            sources.read_graphdef(str(tmp_path / name))
    (tmp_path / "t.pbtxt").write_text("node { name: 'a' op: 'NoSuchOp' }")
    with pytest.raises(BadInput, match="NoSuchOp"):
        sources.read_graphdef(str(tmp_path / "t.pbtxt"))
    (tmp_path / "t.pbtxt").write_text("node { name: 'a' op: 'NoOp' input: '^b' }")
    with pytest.raises(BadInput, match="unknown input"):
        sources.read_graphdef(str(tmp_path / "t.pbtxt"))
    (tmp_path / "t.pbtxt").write_text("node { name: 'a' op: 'NoOp' } node { name: 'a' op: 'NoOp' }")
    with pytest.raises(BadInput, match="duplicate node name"):
        sources.read_graphdef(str(tmp_path / "t.pbtxt"))
    monkeypatch.setattr(load, "LARGEST_STRUCTURE", 1000)
    path.write_bytes(b"\x0a\x00" * 100)
    with pytest.raises(BadInput, match="more than 1000 bytes"):
        sources.read_graphdef(str(path))


@pytest.mark.parametrize("port", ["7", "99999", "2147483648", "-1", "x", "1:2"])
def test_a_port_that_there_is_not_is_refused_before_tensorflow_sees_it(port: str, tmp_path: Path) -> None:
    proto, _ = mlp()
    node = next(n for n in proto.node if n.op == "MatMul")
    node.input[0] += f":{port}"
    with pytest.raises(BadInput):
        graph_of(tmp_path, proto)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_graphs_are_read_or_refused_but_never_crash(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    proto, _ = mlp()
    node = rng.choice(proto.node)
    what = rng.randrange(5)
    if what == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(proto.node).name
    elif what == 1 and node.attr:
        del node.attr[rng.choice(sorted(node.attr))]
    elif what == 2:
        node.op = rng.choice(proto.node).op
    elif what == 3:
        for key in node.attr:
            for d in node.attr[key].shape.dim:
                d.size = rng.choice([-2, -1, 0, 1 << 31, 1 << 62])
    else:
        node.name = rng.choice(["", "a b", "^x", "x:0"])
    try:
        graph = graph_of(tmp_path, proto)
    except (BadInput, Unsupported):
        return
    assert verify(graph, api.plan_named(graph, "memonger").plan) == []


def test_contents_of_constants_are_not_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = built(lambda: tf.constant(b"x" * 1, name="c") is None or tf.zeros((4,)))
    node = proto.node.add(name="big", op="Const")
    node.attr["dtype"].type = 1
    node.attr["value"].tensor.dtype = 1
    node.attr["value"].tensor.tensor_shape.dim.add().size = 100_000
    node.attr["value"].tensor.tensor_content = bytes(400_000)
    monkeypatch.setattr(load, "LARGEST_STRUCTURE", 20_000)
    assert graph_of(tmp_path, proto).static_bytes >= 400_000


def test_devices_are_kept(tmp_path: Path) -> None:
    def make() -> None:
        with tf.device(GPU):
            x = tf.nn.relu(v1.placeholder(tf.float32, (8, 8), name="x"))
        with tf.device("/cpu:0"):
            tf.nn.relu(tf.identity(x))

    devices = [op.device for op in graph_of(tmp_path, built(make)).ops]
    assert devices == ["cuda:0", "cpu", "cpu"]
