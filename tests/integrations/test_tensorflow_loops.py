"""Loops, branches and calls in TensorFlow's graphs: planned, and run as planned with the same results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed (pip install 'tightship[tensorflow]')", allow_module_level=True)

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from support.tensorflow_models import v1
from tightship import api, sources
from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.integrations.tensorflow_write import planned_graph


def graph(build: Callable[[Any, Any], Any], *, frames: bool = False) -> Any:
    """The GraphDef of what ``build`` makes of a matrix and a predicate; ``frames``: as Enter and Exit."""
    (v1.disable_control_flow_v2 if frames else v1.enable_control_flow_v2)()
    try:
        with tf.Graph().as_default() as g:
            x = v1.placeholder(tf.float32, (64, 64), name="x")
            p = v1.placeholder(tf.bool, (), name="p")
            tf.identity(tf.reduce_sum(build(x, p), 1), name="out")
        return g.as_graph_def(add_shapes=True)
    finally:
        v1.enable_control_flow_v2()


def lowered(build: Callable[[Any, Any], Any]) -> Any:
    """The GraphDef as freezing leaves it: a Case is switches of as many results as it has branches."""
    x, p = tf.TensorSpec((64, 64), tf.float32, "x"), tf.TensorSpec((), tf.bool, "p")

    def whole(x: Any, p: Any) -> Any:
        return tf.identity(tf.reduce_sum(build(x, p), 1), name="out")

    frozen = convert_variables_to_constants_v2(tf.function(whole).get_concrete_function(x, p))
    return frozen.graph.as_graph_def(add_shapes=True)


def branch(x: Any, p: Any) -> Any:
    y = tf.cond(p, lambda: tf.tanh(x @ x) + 1.0, lambda: tf.sigmoid(x) * 2.0)
    return tf.tanh(y) @ x


def nested(x: Any, p: Any) -> Any:
    def turn(i: Any, a: Any) -> Any:
        inner = tf.while_loop(lambda j, b: j < 3, lambda j, b: (j + 1, tf.tanh(b @ x)), [0, a])[1]
        return i + 1, tf.cond(p, lambda: inner + 1.0, lambda: tf.sin(a) * a)

    return tf.while_loop(lambda i, a: i < 5, turn, [0, x * 2.0])[1] @ x + tf.cos(x)


def called(x: Any, p: Any) -> Any:
    inner = tf.function(lambda a: (tf.tanh(a @ a), a * 2.0))
    outer = tf.function(lambda a: tf.add(*inner(a)) + inner(a + 1.0)[1])
    return tf.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, outer(a)), [0, tf.cond(p, lambda: outer(x), lambda: x)]
    )[1]


def cases(x: Any, p: Any) -> Any:
    which = tf.cast(p, tf.int32) * 2
    y = tf.switch_case(which, [lambda: x + 1.0, lambda: tf.exp(x) @ x, lambda: tf.tanh(x @ x) * x])
    return tf.sin(y) @ x


def lists(x: Any, p: Any) -> Any:
    array = tf.TensorArray(tf.float32, 8).unstack(tf.reshape(x, (8, 8, 64)))
    made = tf.TensorArray(tf.float32, 8)
    _, made = tf.while_loop(
        lambda i, t: i < 8, lambda i, t: (i + 1, t.write(i, tf.tanh(array.read(i)))), [0, made]
    )
    return tf.reshape(made.stack(), (64, 64)) + 0.0 * x


SCALARS = 256
"""Bytes of counters and predicates, which may live longer in another order; all else is as much or less."""

MODELS = {
    "branch": lambda: graph(branch),
    "branch of Switch and Merge": lambda: graph(branch, frames=True),
    "nested": lambda: graph(nested),
    "nested frames": lambda: graph(nested, frames=True),
    "calls": lambda: graph(called),
    "lists": lambda: graph(lists),
    "cases of _SwitchN": lambda: lowered(cases),
}


def read(folder: Path, proto: Any, fetch: str = "out") -> Any:
    path = folder / "graph.pb"
    path.write_bytes(proto.SerializeToString())
    return sources.read_graphdef(str(path), fetch=fetch)


def run(proto: Any, fetch: str = "out", side: bool = True) -> tuple[Any, int]:
    """The result, and the most bytes that TensorFlow's allocator had out at once."""
    rng, feeds = np.random.default_rng(0), {}
    for n in proto.node:
        if n.op == "Placeholder" and n.name in ("x", "p"):
            sizes = [d.size for d in n.attr["shape"].shape.dim]
            feeds[f"{n.name}:0"] = side if n.name == "p" else rng.random(sizes, np.float32)
    config = v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default() as g:
        tf.graph_util.import_graph_def(proto, name="")
        with v1.Session(graph=g, config=config) as session:
            said = v1.RunMetadata()
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            result = session.run(f"{fetch}:0", feeds, options=options, run_metadata=said)
    records = [
        r
        for d in said.step_stats.dev_stats
        for n in d.node_stats
        for m in n.memory
        for r in m.allocation_records
    ]
    held = np.cumsum([r.alloc_bytes for r in sorted(records, key=lambda r: (r.alloc_micros, -r.alloc_bytes))])
    return result, int(held.max(initial=0))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_session_runs_the_planned_graph_to_the_same_bits_in_no_more_bytes(
    name: str, tmp_path: Path
) -> None:
    proto = MODELS[name]()
    source = read(tmp_path, proto)
    planned = planned_graph(source, api.plan(source.graph).plan)
    for side in (True, False):
        (before, most), (after, fewer) = run(proto, side=side), run(planned, side=side)
        assert np.array_equal(before, after)
        assert fewer <= most + SCALARS


def shared(x: Any, p: Any) -> Any:
    """Equal nodes, nodes of constants alone, and kernels that write over either input, or over none."""
    w = tf.constant(np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64))
    scale = tf.math.rsqrt(tf.reduce_sum(w * w, 0) + 0.1)
    h = x @ w
    y = (tf.nn.relu(h) * scale + 1.0) @ w
    z = tf.nn.relu(h) - tf.where(p, tf.exp(y), y)
    parts = [tf.nn.softmax(z), 2.0 * tf.tile(h, (1, 1)), tf.transpose(tf.sigmoid(h))]
    return tf.add_n(parts) @ (w[:, :] + 0.0)


def test_planned_bytes_are_those_of_tensorflows_allocator(tmp_path: Path) -> None:
    proto = graph(shared)
    source = read(tmp_path, proto)
    made = api.plan(source.graph).plan
    planned = planned_graph(source, made)
    (before, _), (after, measured) = run(proto), run(planned)
    assert np.array_equal(before, after)
    assert measured == made.peak - made.static < made.peak_before - made.static


def test_loops_that_run_all_there_is_take_fewer_bytes_in_tensorflows_allocator(tmp_path: Path) -> None:
    proto = graph(nested, frames=True)
    source = read(tmp_path, proto)
    assert [len(o.calls) for o in source.graph.ops if o.target == "Frame"] == [1]
    planned = planned_graph(source, api.plan(source.graph).plan)
    assert run(planned)[1] < run(proto)[1]


@pytest.mark.parametrize("frames", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "Bidirectional"])
def test_frozen_recurrent_layers_of_keras(kind: str, frames: bool, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras", reason="keras is not installed")
    layer = getattr(keras.layers, kind)(
        *([keras.layers.LSTM(8, return_sequences=True)] if kind == "Bidirectional" else [8])
    )
    model = keras.Sequential([keras.Input((6, 5), batch_size=2), layer])
    made = tf.function(lambda x: model(x)).get_concrete_function(tf.TensorSpec((2, 6, 5), name="x"))
    proto = convert_variables_to_constants_v2(made, lower_control_flow=frames).graph.as_graph_def()
    source = read(tmp_path, proto, "Identity")
    loops = [o for o in source.graph.ops if o.target == ("Frame" if frames else "While")]
    assert len(loops) == (2 if kind == "Bidirectional" else 1) and all(o.calls for o in loops)
    planned = planned_graph(source, api.plan(source.graph).plan)
    (before, most), (after, fewer) = run(proto, "Identity"), run(planned, "Identity")
    assert np.array_equal(before, after) and fewer <= most + SCALARS


def test_a_loop_holds_what_it_carries_and_what_a_turn_needs(tmp_path: Path) -> None:
    def loop(x: Any, p: Any) -> Any:
        return tf.while_loop(
            lambda i, a, b: i < 4, lambda i, a, b: (i + 1, tf.tanh(a @ b), b), [0, x + 1.0, x]
        )[1]

    made = read(tmp_path, graph(loop)).graph
    op = next(o for o in made.ops if o.target == "While" or o.target == "StatelessWhile")
    matrix = 64 * 64 * 4
    assert matrix <= op.workspace < matrix + 256  # what the turn before made; the second value only stays
    shared = {made.values[v].storage for v in op.outputs} & {made.values[v].storage for v in op.inputs}
    assert matrix in {made.storages[s].size for s in shared}


def test_a_loop_that_is_trained_through(tmp_path: Path) -> None:
    with tf.Graph().as_default() as g:
        x = v1.placeholder(tf.float32, (64, 64), name="x")
        y = tf.while_loop(
            lambda i, a: i < 4, lambda i, a: (i + 1, tf.tanh(a @ x)), [0, x], maximum_iterations=4
        )[1]
        tf.identity(tf.gradients(tf.reduce_sum(y * y), x)[0], name="out")
    proto = g.as_graph_def(add_shapes=True)
    source = read(tmp_path, proto)
    forward = next(o for o in source.graph.ops if o.name == "while")
    held = [source.graph.storages[source.graph.values[v].storage].size for v in forward.outputs]
    assert held.count(4 * 64 * 64 * 4) >= 1  # what four turns leave for the gradients
    planned = planned_graph(source, api.plan(source.graph).plan)
    assert np.array_equal(run(proto)[0], run(planned)[0])


def frozen(build: Callable[[Any], Any], *, frames: bool = False) -> Any:
    """The GraphDef of the gradient of what ``build`` makes of a matrix ``x``, as freezing leaves it."""

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(build(x) ** 2)
        return tf.identity(tape.gradient(loss, x), name="out")

    made = tf.function(gradient).get_concrete_function(tf.TensorSpec((64, 64), tf.float32, "x"))
    made = convert_variables_to_constants_v2(made, lower_control_flow=frames)
    return made.graph.as_graph_def(add_shapes=True)


def turned(x: Any, most: int | None) -> Any:
    return tf.while_loop(
        lambda k, v: k < 4, lambda k, v: (k + 1, tf.tanh(v @ v)), (0, x), maximum_iterations=most
    )[1]


@pytest.mark.parametrize("frames", [False, True])
def test_gradients_of_frozen_loops_and_branches(frames: bool, tmp_path: Path) -> None:
    """Lists hand on the shapes of their elements, and optionals what they hold."""
    for build in (
        lambda x: turned(x, 4),
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x @ x), lambda: tf.exp(x)),
        *([] if frames else [lambda x: tf.scan(lambda a, v: tf.tanh(a * v), x)]),
    ):
        proto = frozen(build, frames=frames)
        source = read(tmp_path, proto)
        planned = planned_graph(source, api.plan(source.graph).plan)
        assert np.array_equal(run(proto)[0], run(planned)[0])


@pytest.mark.parametrize("frames", [False, True])
def test_a_list_of_unknown_length_is_refused_with_what_helps(frames: bool, tmp_path: Path) -> None:
    with pytest.raises(UnknownSize, match="maximum_iterations"):
        read(tmp_path, frozen(lambda x: turned(x, None), frames=frames))


def test_arrays_of_v1_in_frames(tmp_path: Path) -> None:
    def mapped(x: Any, p: Any) -> Any:
        array = tf.TensorArray(tf.float32, 64, element_shape=(64,)).unstack(x)
        made = tf.TensorArray(tf.float32, 64, element_shape=(64,))
        turn = (lambda i, t: i < 64, lambda i, t: (i + 1, t.write(i, tf.tanh(array.read(i)))))
        return v1.while_loop(*turn, [0, made])[1].stack() + x

    proto = graph(mapped, frames=True)
    source = read(tmp_path, proto)
    arrays = [s.size for s in source.graph.storages if "TensorArray" in s.name and s.size == 64 * 64 * 4]
    assert len(arrays) >= 2
    planned = planned_graph(source, api.plan(source.graph).plan)
    assert np.array_equal(run(proto)[0], run(planned)[0])


def test_grappler_does_not_write_loops_of_frames(tmp_path: Path) -> None:
    source = read(tmp_path, graph(nested, frames=True))
    made = api.plan_named(source.graph, "grappler", level="recompute").plan
    with pytest.raises(Unsupported, match="one op here"):
        planned_graph(source, made)


def test_what_is_wrong_with_loops_and_functions_is_said(tmp_path: Path) -> None:
    growing = tf.function(lambda x: tf.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, tf.concat([a, a], 0)), [0, x],
        shape_invariants=[tf.TensorShape(()), tf.TensorShape((None, 4))],
    )[1])  # fmt: skip
    proto = growing.get_concrete_function(tf.TensorSpec((2, 4), name="x")).graph.as_graph_def()
    with pytest.raises(UnknownSize, match=r"then \[4, 4\]|unknown size"):
        read(tmp_path, proto, "while")
    proto = graph(called)
    for function in list(proto.library.function):
        if "while_body" in function.signature.name:
            proto.library.function.remove(function)
    with pytest.raises(BadInput):
        read(tmp_path, proto)
    proto = v1.GraphDef()
    proto.node.add(name="a", op="Const")
    proto.node.add(name="b", op="Exit", input=["a"])
    with pytest.raises(BadInput, match="without Enter"):
        read(tmp_path, proto, "b")


def test_functions_that_call_themselves_are_refused(tmp_path: Path) -> None:
    proto = graph(called)
    function = next(
        f
        for f in proto.library.function
        for n in f.node_def
        if n.op == "StatefulPartitionedCall" or n.op == "PartitionedCall"
    )
    node = next(n for n in function.node_def if n.op in ("StatefulPartitionedCall", "PartitionedCall"))
    node.attr["f"].func.name = function.signature.name
    with pytest.raises(BadInput):
        read(tmp_path, proto)


def test_how_often_a_loop_turns_is_said_by_what_a_result_ends_as(tmp_path: Path) -> None:
    """A loop whose end follows from data, and that appends a column in every turn: ten times here."""

    def appended(x: Any, p: Any) -> Any:
        return tf.while_loop(
            lambda v: tf.reduce_max(v[:, -1]) < 10.0,
            lambda v: (tf.concat([v, v[:, -1:] + 1.0], 1),),
            [x], shape_invariants=[tf.TensorShape((64, None))],
        )[0]  # fmt: skip

    proto = graph(appended)
    with pytest.raises(UnknownSize, match=r"--shape while:2=64xN"):
        read(tmp_path, proto)
    path = str(tmp_path / "graph.pb")
    source = sources.read_graphdef(path, fetch="out", shape="while:2=64x74")
    op = next(o for o in source.graph.ops if o.target in ("While", "StatelessWhile"))
    assert 64 * 74 * 4 in {source.graph.storages[source.graph.values[v].storage].size for v in op.outputs}
    assert op.workspace >= 64 * 73 * 4  # what the last turn is given
    planned = planned_graph(source, api.plan(source.graph).plan)
    assert np.array_equal(run(proto)[0], run(planned)[0])
    with pytest.raises(BadInput, match="never leads to"):
        sources.read_graphdef(path, fetch="out", shape="while:2=63x74")
