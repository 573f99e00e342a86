"""Lists and arrays of tensors in TensorFlow's loops, and sizes inside of loops: known, or asked for by name."""

from __future__ import annotations

import importlib.util
import re
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
from tightship.errors import BadInput, UnknownSize
from tightship.integrations.tensorflow_write import planned_graph

STYLES = pytest.mark.parametrize("frames", [True, False], ids=["frames", "functions"])


def graph(build: Callable[[Any], Any], *, frames: bool) -> Any:
    (v1.disable_control_flow_v2 if frames else v1.enable_control_flow_v2)()
    try:
        with tf.Graph().as_default() as g:
            x = v1.placeholder(tf.float32, (32, 64), name="x")
            tf.identity(build(x), name="out")
        return g.as_graph_def(add_shapes=True)
    finally:
        v1.enable_control_flow_v2()


def read(folder: Path, proto: Any, shape: str | None = None) -> Any:
    path = folder / "graph.pb"
    path.write_bytes(proto.SerializeToString())
    return sources.read_graphdef(str(path), shape=shape, fetch="out")


def run(proto: Any) -> Any:
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    x = np.random.default_rng(0).random((32, 64)).astype(np.float32)
    with tf.Graph().as_default() as g:
        tf.graph_util.import_graph_def(proto, name="")
        with v1.Session(graph=g, config=config) as session:
            return session.run("out:0", {"x:0": x})


def assert_runs_as_planned(folder: Path, proto: Any, shape: str | None = None) -> Any:
    source = read(folder, proto, shape)
    planned = planned_graph(source, api.plan(source.graph).plan)
    assert np.array_equal(run(proto), run(planned))
    return source


def mapped(x: Any) -> Any:
    return tf.map_fn(lambda row: tf.exp(row) * 2.0, x)


def folded(x: Any) -> Any:
    return tf.foldl(lambda total, row: tf.sin(total + row), x)


@pytest.mark.parametrize("build", [mapped, folded])
def test_arrays_of_v1_hold_what_is_written_into_them(build: Callable[[Any], Any], tmp_path: Path) -> None:
    """`tf.map_fn` of v1 gives its arrays no shape of an element."""
    proto = graph(build, frames=True)
    assert any(n.op == "TensorArrayV3" and n.attr["element_shape"].shape.unknown_rank for n in proto.node)
    source = assert_runs_as_planned(tmp_path, proto)
    arrays = [s.size for s in source.graph.storages if "TensorArray" in s.name and s.size == 32 * 64 * 4]
    assert len(arrays) >= (2 if build is mapped else 1)


def grown(x: Any) -> Any:
    rows = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    turn = (lambda i, rows: i < 4, lambda i, rows: (i + 1, rows.write(i, tf.tanh(x[i]))))
    return tf.reshape(tf.while_loop(*turn, (0, rows))[1].stack(), (-1, 64))


@STYLES
def test_how_long_a_list_grows_is_asked_for(frames: bool, tmp_path: Path) -> None:
    """It begins with no element, which is not how many it has in the end."""
    proto, shape = graph(grown, frames=frames), ""
    for _ in range(4):
        with pytest.raises(UnknownSize, match="give --shape") as raised:
            read(tmp_path, proto, shape or None)
        asked = re.search(r"give --shape ([^\s,;]+)=N", str(raised.value))
        assert asked is not None
        shape += f"{',' if shape else ''}{asked[1]}=4"
        try:
            source = assert_runs_as_planned(tmp_path, proto, shape)
            break
        except UnknownSize:
            continue
    assert max(s.size for s in source.graph.storages if s.kind != "input") >= 4 * 64 * 4


def distinct(x: Any) -> Any:
    return tf.map_fn(lambda row: tf.reduce_sum(tf.exp(tf.unique(tf.round(row))[0])), x)


def test_sizes_in_functions_are_asked_for_and_may_be_given(tmp_path: Path) -> None:
    proto = graph(distinct, frames=False)
    with pytest.raises(UnknownSize, match=r"give --shape (\S*body\S*/Unique:0)=N, or say") as raised:
        read(tmp_path, proto)
    asked = re.search(r"--shape (\S+)=N", str(raised.value))
    assert asked is not None
    assert_runs_as_planned(tmp_path, proto, f"{asked[1]}=64")
    with pytest.raises(BadInput, match="the function has no such node"):
        read(tmp_path, proto, f"{asked[1]}=64,{asked[1].partition('/')[0]}/no=4")


def sliced(x: Any) -> Any:
    """Each turn takes as many rows as there are columns in half of x: a size that is computed outside of the loop."""
    rows = tf.shape(x)[1] // 8
    turn = lambda i, total, n: (i + 1, total + tf.slice(x, [i * n, 0], [n, 64]), n)  # noqa: E731
    return tf.while_loop(lambda i, *_: i < 4, turn, (0, tf.zeros((8, 64)), rows))[1]


@STYLES
def test_sizes_that_a_loop_only_hands_on_are_known_in_it(frames: bool, tmp_path: Path) -> None:
    assert_runs_as_planned(tmp_path, graph(sliced, frames=frames))


def test_a_list_of_rows_of_several_lengths_has_the_bytes_of_all(tmp_path: Path) -> None:
    def parts(x: Any) -> Any:
        rows = tf.TensorArray(tf.float32, 3, infer_shape=False).split(tf.exp(x), [4, 20, 8])
        return tf.ensure_shape(rows.read(1), (20, 64)) * 2.0

    proto = graph(parts, frames=False)
    with pytest.raises(UnknownSize, match=r"give --shape \S*TensorListGetItem:0=N"):
        read(tmp_path, proto)
    source = assert_runs_as_planned(tmp_path, proto, "TensorArrayV2Read/TensorListGetItem:0=20x64")
    (size,) = [s.size for s in source.graph.storages if "TensorListSplit" in s.name]
    assert 0 <= size - 32 * 64 * 4 <= 64


def test_values_of_unknown_bytes_are_refused_with_what_helps(tmp_path: Path) -> None:
    def ragged(x: Any) -> Any:
        rows = tf.RaggedTensor.from_row_splits(x, [0, 4, 24, 32])
        return tf.map_fn(lambda row: tf.reduce_sum(row, 0), rows, fn_output_signature=tf.float32)

    with pytest.raises(UnknownSize, match=r"what RaggedTensorToVariant makes.*to_tensor"):
        read(tmp_path, graph(ragged, frames=False))


OPEN = (tf.TensorShape([]), tf.TensorShape([None, 64]))


def appended(x: Any, condition: Callable[..., Any], **options: Any) -> Any:
    turn = lambda i, rows: (i + 2, tf.concat([rows, tf.tanh(x[:4]), rows[:1] * 2.0], 0))  # noqa: E731
    return tf.while_loop(condition, turn, (0, tf.exp(x)), shape_invariants=OPEN, **options)[1]


def below(limit: Any) -> Callable[..., Any]:
    return lambda i, _: tf.logical_and(i < 9, i < limit)


@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (lambda x: appended(x, lambda i, _: i < 9), 57),
        (lambda x: appended(x, below(tf.shape(x)[0] // 8)), 42),
        (lambda x: appended(x, lambda i, _: True, maximum_iterations=3), 47),
        (lambda x: appended(x, lambda i, _: i < 1), 37),
    ],
    ids=["a limit", "two limits", "a maximum", "one turn"],
)
def test_what_a_loop_carries_may_grow(build: Callable[[Any], Any], rows: int, tmp_path: Path) -> None:
    """By as much in every turn: a turn needs what the last one does."""
    proto = graph(build, frames=False)
    source = assert_runs_as_planned(tmp_path, proto)
    assert run(proto).shape == (rows, 64)
    assert next(v.shape for v in source.graph.values if v.name == "out") == (rows, 64)
    before = rows - 5
    plan = api.plan(source.graph).plan
    assert plan.peak - source.graph.static_bytes >= (rows + before) * 64 * 4


@pytest.mark.parametrize(
    "build",
    [
        lambda x: appended(x, lambda i, rows: tf.reduce_sum(rows) < 9.0),
        lambda x: tf.while_loop(lambda i, _: i < 5, lambda i, r: (i + 1, tf.concat([r, r], 0)), (0, x),
                                shape_invariants=OPEN)[1],
    ],
    ids=["by data", "doubled"],
)  # fmt: skip
def test_what_grows_otherwise_is_refused_with_what_helps(build: Callable[[Any], Any], tmp_path: Path) -> None:
    said = r"shape \[32, 64\] and then \[(37, 64\]; give .*=Nx64, or|64, 64\];) carry .*maximum_iterations"
    with pytest.raises(UnknownSize, match=said):
        read(tmp_path, graph(build, frames=False))


def test_sizes_behind_assertions_are_known(tmp_path: Path) -> None:
    """TensorFlow computes none of what waits for an assertion (`tf.image.ssim`)."""

    def alike(x: Any) -> Any:
        y = tf.reshape(x, (1, 32, 32, 2))
        return tf.image.ssim(y, y * 0.9, 1.0, filter_size=5)

    assert_runs_as_planned(tmp_path, graph(alike, frames=False))


def test_calls_by_a_functions_name_are_inlined(tmp_path: Path) -> None:
    """They have no attribute of what they return."""
    build = lambda x: tf.nn.ctc_loss([[1, 2], [3, 4]], tf.reshape(x, (16, 2, 64)), [2, 2], [16, 16])  # noqa: E731
    proto = graph(build, frames=False)
    nodes = (*proto.node, *(n for f in proto.library.function for n in f.node_def))
    assert {n.op for n in nodes} & {f.signature.name for f in proto.library.function}
    assert_runs_as_planned(tmp_path, proto)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: tf.maximum(x, -np.inf),
        lambda x: tf.where(tf.equal(x, np.nan), 0.0, x) + 0.5,
        lambda x: tf.strings.join([tf.as_string(x[0]), tf.constant("kg")]),
    ],
    ids=["infinity", "nan", "text"],
)
def test_constants_that_are_no_whole_numbers(build: Callable[[Any], Any], tmp_path: Path) -> None:
    assert_runs_as_planned(tmp_path, graph(build, frames=False))
