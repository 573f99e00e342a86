"""What TensorFlow's kernels share with an input, and need beside their result: as its allocator has it."""

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

from support.tensorflow_models import v1
from tightship import api, sources
from tightship.integrations.tensorflow_write import planned_graph

SMALL = 256
"""Bytes of shapes, counters and rounding, by which plan and allocator may differ."""


PACKED = np.random.default_rng(0).integers(-99, 99, (64, 64)).astype(np.int8)


def turned(x: Any) -> Any:
    """By a kernel that does not write its result over its input."""
    return tf.reverse(x, [0])


BUILDS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: [tf.exp(x[4:12] * 2.0), tf.reduce_sum(x)],
    "rows of rows": lambda x: turned(x[4:20][2:9]),
    "one row": lambda x: turned(x[3:4][0]),
    "rows of an odd width": lambda x: turned(x[:, :63][2:9]),
    "every other row": lambda x: turned(x[::2]),
    "rows backwards": lambda x: turned(x[9:2:-1]),
    "a column": lambda x: turned(x[:, 3]),
    "a new axis": lambda x: turned(x[:, None]),
    "rows and a new axis": lambda x: x[2:14, None] * x[16:28, None],
    "a new axis and rows": lambda x: x[None, 2:14] * x[None, 16:28],
    "rows of rows of one": lambda x: (
        tf.reshape(x, (32, 1, 64))[3:13, 0] * tf.reshape(x, (32, 1, 64))[13:23, 0]
    ),
    "rows of which one is taken": lambda x: x[3, ..., None] * x[4, ..., None],
    "rows, all of the rest and a new axis": lambda x: turned(tf.reshape(x, (8, 4, 64))[2:7, ..., None]),
    "rows and a column and a new axis": lambda x: x[2:14, 3, None] * x[16:28, 3, None],
    "rows and columns": lambda x: x[2:14, None, :32] * x[16:28, None, :32],
    "a slice": lambda x: turned(tf.slice(x, [2, 0], [7, -1])),
    "a row that data says": lambda x: turned(x[tf.cast(x[0, 0], tf.int32)]),
    "split": lambda x: [turned(p) for p in tf.split(x, 4)],
    "split by columns": lambda x: [turned(p) for p in tf.split(x, 4, 1)],
    "split by sizes": lambda x: [turned(p) for p in tf.split(x, [4, 20, 8])],
    "unstacked": lambda x: tf.add_n([turned(p) for p in tf.unstack(x)]),
    "unstacked columns": lambda x: tf.add_n([turned(p) for p in tf.unstack(x, axis=1)]),
    "part of a vector": lambda x: turned(tf.reshape(x, [-1])[256:1024]),
    "part of a vector out of place": lambda x: turned(tf.reshape(x, [-1])[3:1024]),
    "rows in another shape": lambda x: turned(tf.reshape(x[8:16], (16, 32)) @ tf.ones((32, 4))),
    "a mean of groups": lambda x: tf.reduce_mean(tf.reshape(x, (2, 16, 8, 8)), (1, 3)),
    "a mean of inner dimensions": lambda x: tf.reduce_mean(tf.reshape(x, (2, 16, 8, 8)), (1, 2)),
    "a maximum of outer dimensions": lambda x: tf.reduce_max(tf.reshape(x, (2, 16, 8, 8)), (0, 3)),
    "a transposed convolution": lambda x: tf.nn.conv2d_transpose(
        tf.reshape(x, (1, 16, 16, 8)), tf.ones((3, 3, 4, 8)), (1, 32, 32, 4), 2
    ),
    "a transposed convolution without padding": lambda x: tf.nn.conv2d_transpose(
        tf.reshape(x, (1, 16, 16, 8)), tf.ones((5, 5, 2, 8)), (1, 35, 35, 2), 2, "VALID"
    ),
    "weights that are made of packed ones": lambda x: (
        x
        @ (
            tf.cast(tf.reshape(tf.bitwise.right_shift(tf.constant(PACKED), 4), (64, 64)), tf.float32)
            * tf.repeat(tf.constant(PACKED[:64, :1] / 8.0, tf.float32), 64, 1)
        )
    ),
    "numbers drawn from a constant": lambda x: tf.random.stateless_uniform((4, 16), [1, 2]) + x[0, 0],
}


def measured(proto: Any, feeds: dict[str, Any], before: str = "") -> tuple[Any, int]:
    """Results, and the most bytes that TensorFlow's allocator had out at once."""
    config = v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default() as g, v1.Session(graph=g, config=config) as session:
        tf.graph_util.import_graph_def(proto, name="")
        if before:  # and once: what initializes a variable is in its bytes until then
            session.run(before)
            session.run("out:0")
        said, trace = v1.RunMetadata(), v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        made = session.run("out:0", feeds, options=trace, run_metadata=said)
    nodes = [n for d in said.step_stats.dev_stats for n in d.node_stats]
    records = [r for n in nodes for m in n.memory for r in m.allocation_records]
    ordered = sorted(records, key=lambda r: (r.alloc_micros, -r.alloc_bytes))
    return made, int(np.cumsum([r.alloc_bytes for r in ordered]).max(initial=0))


def planned(folder: Path, proto: Any) -> tuple[Any, int]:
    """The planned graph, and the bytes it was planned with."""
    path = folder / "graph.pb"
    path.write_bytes(proto.SerializeToString())
    program = sources.read_graphdef(str(path), fetch="out")
    plan = api.plan_graph(program.graph).plan
    return planned_graph(program, plan), plan.peak - program.graph.static_bytes


@pytest.mark.parametrize("name", BUILDS)
def test_planned_bytes_are_those_of_the_allocator(name: str, tmp_path: Path) -> None:
    with tf.Graph().as_default() as graph:
        x = tf.sin(v1.placeholder(tf.float32, (32, 64), name="x"))
        parts = tf.nest.flatten(BUILDS[name](x))
        tf.identity(tf.add_n([tf.reduce_sum(p) for p in parts]), name="out")
    proto, feeds = graph.as_graph_def(add_shapes=True), {"x:0": np.zeros((32, 64), np.float32)}
    made, peak = planned(tmp_path, proto)
    results, most = measured(made, feeds)
    assert results.tobytes() == measured(proto, feeds)[0].tobytes()
    assert most <= peak <= most + SMALL


@pytest.mark.parametrize("parts", [True, False])
def test_a_variable_that_is_written_in_parts_is_copied_where_it_is_read(parts: bool, tmp_path: Path) -> None:
    with tf.Graph().as_default() as graph:
        w = v1.get_variable("w", (64, 64), initializer=v1.ones_initializer(), use_resource=True)
        update = w.scatter_add if parts else (lambda x: w.assign_add(tf.ones((64, 64))))
        rows = tf.IndexedSlices(tf.ones((2, 64)), tf.constant([3, 5]))
        with tf.control_dependencies([update(rows)]):
            tf.reduce_sum(turned(w.read_value()), name="out")
    proto = graph.as_graph_def(add_shapes=True)
    made, peak = planned(tmp_path, proto)
    results, most = measured(made, {}, "w/Assign")
    assert results.tobytes() == measured(proto, {}, "w/Assign")[0].tobytes()
    assert most <= peak <= most + SMALL


def test_views_of_what_is_recomputed_are_made_again(tmp_path: Path) -> None:
    """Rows, and sums over one element, of an activation that is not kept until the end."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (64, 64, 1), name="x")
        early = [tf.exp(x * (k + 1.0)) for k in range(4)]
        late = tf.add_n([tf.reduce_mean(e) for e in early])
        for e in early:
            late = tf.reduce_sum(tf.reduce_sum(e, 2)[2:9] * late) + tf.reduce_sum(tf.tanh(e[5] * late))
        tf.identity(late, name="out")
    path = tmp_path / "graph.pb"
    path.write_bytes(graph.as_graph_def(add_shapes=True).SerializeToString())
    program = sources.read_graphdef(str(path), fetch="out")
    plan = api.plan_graph(program.graph, "70%").plan
    assert plan.count("recompute")
    feeds = {"x:0": np.random.default_rng(0).random((64, 64, 1), np.float32)}
    results, most = measured(planned_graph(program, plan), feeds)
    assert results.tobytes() == measured(graph.as_graph_def(), feeds)[0].tobytes()
    assert most <= plan.peak - program.graph.static_bytes + SMALL
