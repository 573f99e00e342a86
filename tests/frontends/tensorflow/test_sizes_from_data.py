"""Sizes that follow from data, or from tables and sizes that a graph leaves open. Skipped without TensorFlow."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed (pip install 'tightship[tensorflow]')", allow_module_level=True)

import tensorflow as tf

from tightship import sources
from tightship.errors import BadInput, UnknownSize
from tightship.graph import Graph, aligned


def built(folder: Path, make: Callable[[], Any], **options: Any) -> Graph:
    with tf.Graph().as_default() as g:
        make()
        path = folder / "graph.pb"
        path.write_bytes(g.as_graph_def().SerializeToString())
    found: Graph = sources.read_graphdef(str(path), **options).graph
    return found


def sizes(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {v.name: v.shape for v in graph.values}


def distinct() -> None:
    x = tf.compat.v1.placeholder(tf.int32, [8], "x")
    found, at = tf.unique(x, name="u")
    tf.identity(tf.cast(found, tf.float32, name="c") * 2, "y")
    tf.identity(at, "at")


def test_a_size_that_follows_from_data_is_asked_for_and_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownSize, match=r"unknown size of u:0, .* from data: give --shape u:0=N, or say them"
    ):
        built(tmp_path, distinct)
    for text in ("u:0=5", "u=5"):
        found = sizes(built(tmp_path, distinct, shape=text))
        assert found["u"] == found["c"] == (5,)
        assert found["u:1"] == (8,)


@pytest.mark.parametrize(
    ("shapes", "fault"),
    [
        ("u=5x5", r"u:0 is \(None,\) in the graph, not \[5, 5\]"),
        ("u:1=7,u:0=5", r"u:1 is \(8,\) in the graph, not \[7\]"),
        ("u:2=5", "unknown result 'u:2'; u has 2"),
        ("u:one=5", "unknown result 'u:one'; u has 2"),
        ("v=5", "unknown placeholder 'v'; the graph has x"),
    ],
)
def test_a_size_that_the_graph_has_otherwise_is_refused(shapes: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=fault):
        built(tmp_path, distinct, shape=shapes)


def test_what_is_looked_up_in_a_table_has_the_shape_of_the_keys(tmp_path: Path) -> None:
    class Words(tf.Module):
        def __init__(self) -> None:
            keys, values = tf.constant(["a", "b"]), tf.constant([1, 2], tf.int64)
            init = tf.lookup.KeyValueTensorInitializer(keys, values)
            self.table = tf.lookup.StaticHashTable(init, -1)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.string, "words")])
        def __call__(self, words: Any) -> Any:
            return tf.cast(self.table.lookup(words), tf.float32) * 2

    made = Words()
    tf.saved_model.save(made, str(tmp_path / "saved"))
    program = sources.read_graphdef(str(tmp_path / "saved/saved_model.pb"), shape="serving_default_words=5x3")
    casts = [v for v in program.graph.values if v.name.endswith("Cast")]
    assert [v.shape for v in casts] == [(5, 3)]
    assert program.graph.storages[casts[0].storage].size == aligned(5 * 3 * 4)


def test_how_many_steps_a_list_has_follows_from_a_shape(tmp_path: Path) -> None:
    class Sums(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, None, 4], tf.float32, "x")])
        def __call__(self, x: Any) -> Any:
            steps = tf.shape(x)[0]
            made = tf.TensorArray(tf.float32, steps)

            def turn(k: Any, total: Any, made: Any) -> Any:
                return k + 1, total + x[k], made.write(k, total)

            _, _, made = tf.while_loop(lambda k, *_: k < steps, turn, [0, tf.zeros_like(x[0]), made])
            return made.stack()

    tf.saved_model.save(Sums(), str(tmp_path / "saved"))
    program = sources.read_graphdef(str(tmp_path / "saved/saved_model.pb"), shape="serving_default_x=7x2x4")
    stacked = [v.shape for v in program.graph.values if v.name.endswith("TensorListStack")]
    assert stacked == [(7, 2, 4)]


def test_an_unknown_size_that_a_loop_is_given_is_named_and_not_what_follows_in_the_loop(
    tmp_path: Path,
) -> None:
    @tf.function(input_signature=[tf.TensorSpec([8], tf.int32, "x")])
    def halves(x: Any) -> Any:
        found = tf.unique(x)[0]

        def turn(k: Any, rows: Any) -> Any:
            assert rows.shape.rank == 2
            one, two = tf.split(rows, 2, axis=1)
            return k + 1, tf.concat([two, one], 1)

        return tf.while_loop(lambda k, _: k < 3, turn, [0, tf.stack([found, found], 1)])[1]

    proto = halves.get_concrete_function().graph.as_graph_def()
    path = tmp_path / "graph.pb"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(UnknownSize, match=r"unknown size of Unique:0, .* give --shape Unique:0=N"):
        sources.read_graphdef(str(path))
    found = sizes(sources.read_graphdef(str(path), shape="Unique=5").graph)
    assert found["stack"] == (5, 2)


def test_where_nothing_is_fetched_the_message_says_that_the_rest_can_be_left_out(tmp_path: Path) -> None:
    """A training graph has nodes that restore its variables, of whatever size the file has."""

    def restored() -> None:
        w = tf.compat.v1.get_variable("w", [4, 4], use_resource=False)
        tf.matmul(w, w, name="y")
        tf.compat.v1.train.Saver()

    with pytest.raises(
        UnknownSize, match=r"save/RestoreV2:0; .*; what is not run can be left out: .* --fetch NAME"
    ):
        built(tmp_path, restored)
    assert sizes(built(tmp_path, restored, fetch="y"))["y"] == (4, 4)


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "prod", "sparse"])
@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 4, 4], [2] * 6])
def test_segments_of_constant_ids_are_as_many_as_the_last_id_says(
    kind: str, ids: list[int], tmp_path: Path
) -> None:
    def make() -> None:
        x, of = tf.compat.v1.placeholder(tf.float32, [6, 3], "x"), tf.constant(ids)
        if kind == "sparse":
            made = tf.sparse.segment_sum(x, tf.range(6), of, name="s")
        else:
            made = getattr(tf.math, f"segment_{kind}")(x, of, name="s")
        tf.multiply(made, 2.0, "y")

    found = sizes(built(tmp_path, make))
    assert found["s"] == found["y"] == (ids[-1] + 1, 3)
    assert tuple(tf.math.segment_sum(tf.zeros([6, 3]), ids).shape) == found["s"]


def test_segments_of_ids_that_are_data_are_asked_for(tmp_path: Path) -> None:
    def make() -> None:
        x, of = (tf.compat.v1.placeholder(t, [6], n) for t, n in ((tf.float32, "x"), (tf.int32, "ids")))
        tf.multiply(tf.math.segment_sum(x, of, name="s"), 2.0, "y")

    with pytest.raises(UnknownSize, match="unknown size of s:0"):
        built(tmp_path, make)
    assert sizes(built(tmp_path, make, shape="s:0=4"))["y"] == (4,)
