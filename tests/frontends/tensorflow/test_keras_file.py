"""Keras models from files: planned as TensorFlow runs them; code in a file, and files that are none, are refused."""

from __future__ import annotations

import importlib.util
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("tensorflow") is None or importlib.util.find_spec("keras") is None:
    pytest.skip(
        "TensorFlow and Keras are not installed (pip install 'tightship[tensorflow]')",
        allow_module_level=True,
    )

import keras
import numpy as np
import tensorflow as tf

from tightship import api, sources
from tightship.errors import BadInput, TightshipError, UnknownSize, Unsupported
from tightship.integrations.tensorflow_write import planned_graph

v1 = tf.compat.v1
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept"
)  # of Keras's own saving


def saved(folder: Path, batch: int | None = 2) -> tuple[Any, Path]:
    keras.utils.set_random_seed(0)
    given = keras.Input((6, 5), batch_size=batch, name="x")
    h = keras.layers.LSTM(8, return_sequences=True)(given)
    made = keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(h))
    model = keras.Model(given, made)
    path = folder / "model.keras"
    model.save(path)
    return model, path


def changed(path: Path, name: str, edit: Any, to: str = "other.keras") -> Path:
    """A copy of an archive with one member edited, or added."""
    made = path.parent / to
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for m in old.namelist():
            new.writestr(m, edit(old.read(m)) if m == name else old.read(m))
        if name not in old.namelist():
            new.writestr(name, edit(b""))
    return made


def test_a_model_is_planned_and_the_written_graph_gives_the_models_results(tmp_path: Path) -> None:
    model, path = saved(tmp_path)
    program = sources.read_keras(path)
    assert any(o.target in ("While", "StatelessWhile") for o in program.graph.ops)
    weights = sum(int(np.prod(w.shape)) * 4 for w in model.weights)
    assert sum(s.size for s in program.graph.storages if s.kind == "constant") >= weights
    proto = planned_graph(program, api.plan(program.graph).plan)
    x = np.random.default_rng(0).random((2, 6, 5), np.float32)
    with tf.Graph().as_default() as g:
        tf.graph_util.import_graph_def(proto, name="")
        with v1.Session(graph=g) as session:
            result = session.run(f"{program.fetch[0]}:0", {"x:0": x})
    np.testing.assert_allclose(result, model(x).numpy(), rtol=1e-5)


def test_sizes_that_the_model_leaves_open_are_asked_for(tmp_path: Path) -> None:
    _, path = saved(tmp_path, batch=None)
    with pytest.raises(UnknownSize, match="--shape x=Nx6x5"):
        sources.read_keras(path)
    small, large = (sources.read_keras(path, f"x={n}x6x5").graph for n in (1, 4))
    assert api.plan(small).plan.peak < api.plan(large).plan.peak
    with pytest.raises(BadInput, match="not"):
        sources.read_keras(path, "x=1x6x4")
    with pytest.raises(BadInput, match="unknown input"):
        sources.read_keras(path, "y=1x6x5")


def test_tables_and_changing_state_are_refused_with_what_to_do(tmp_path: Path) -> None:
    layers = keras.layers
    words = keras.Sequential(
        [keras.Input((4,), batch_size=2, dtype="string"), layers.StringLookup(vocabulary=["a"])]
    )
    kept = keras.Sequential([keras.Input(batch_shape=(2, 4, 6)), layers.LSTM(5, stateful=True)])
    for model, said in ((words, "without the layers that look up"), (kept, "stateful=False")):
        path = tmp_path / "refused.keras"
        model.save(path)
        with pytest.raises(Unsupported, match=said):
            sources.read_keras(path)


def test_sizes_that_follow_from_data_are_not_asked_of_placeholders(tmp_path: Path) -> None:
    given = keras.Input((6,), batch_size=2)
    kinds = keras.layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0])(given)
    path = tmp_path / "counted.keras"
    keras.Model(given, keras.layers.CategoryEncoding(4, output_mode="multi_hot")(kinds)).save(path)
    with pytest.raises(UnknownSize, match=r"give --shape \S+:0=\S+, or say them .*ensure_shape") as found:
        sources.read_keras(path)
    name = str(found.value).split("--shape ")[1].split("=")[0]
    graph = sources.read_keras(path, f"{name}=2x4").graph
    assert next(v.shape for v in graph.values if v.name == name.removesuffix(":0")) == (2, 4)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    given = keras.Input((4,), batch_size=1)
    model = keras.Model(given, keras.layers.Lambda(lambda x: x + 1.0)(given))
    path = tmp_path / "lambda.keras"
    model.save(path)
    with pytest.raises(Unsupported, match="Lambda"):
        sources.read_keras(path)
    _, path = saved(tmp_path)

    def foreign(config: bytes) -> bytes:
        found = json.loads(config)
        found["config"]["layers"][1] |= {"module": "os", "class_name": "system", "config": f"touch {ran}"}
        return json.dumps(found).encode()

    with pytest.raises(Unsupported, match="'os'"):
        sources.read_keras(changed(path, "config.json", foreign))
    assert not ran.exists()


def test_archives_that_are_none_grow_or_lead_away_are_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    nothing = tmp_path / "nothing.keras"
    for data in (b"", b"PK\x03\x04", path.read_bytes()[:900], b"not a zip"):
        nothing.write_bytes(data)
        with pytest.raises(BadInput):
            sources.read_keras(nothing)
    with pytest.raises(BadInput, match="cannot read"):
        sources.read_keras(tmp_path / "missing.keras")
    for name in ("../up.txt", "/etc/up", "a/../../up", "..\\up"):
        with pytest.raises(BadInput, match="leads out"):
            sources.read_keras(changed(path, name, lambda old: b"x"))
    with pytest.raises(BadInput, match="grows from"):
        sources.read_keras(changed(path, "assets/bomb", lambda old: bytes(1 << 27)))
    for edit in (
        lambda c: b"{",
        lambda c: b"[" * 100_000,
        lambda c: b"3",
        lambda c: b"{}",
        lambda c: b"\xff",
    ):
        with pytest.raises(TightshipError):
            sources.read_keras(changed(path, "config.json", edit))


def test_weights_that_link_elsewhere_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    _, path = saved(tmp_path)

    def linked(data: bytes) -> bytes:
        held = io.BytesIO(data)
        with h5py.File(held, "r+") as file:
            file["away"] = h5py.ExternalLink("/etc/passwd", "x")
        return held.getvalue()

    with pytest.raises(BadInput, match="link"):
        sources.read_keras(changed(path, "model.weights.h5", linked))
    with pytest.raises(BadInput, match="HDF5"):
        sources.read_keras(changed(path, "model.weights.h5", lambda data: b"no weights"))


# --- HDF5, as Keras 2 wrote it ---

h5py = pytest.importorskip("h5py", reason="h5py is not installed")


def in_hdf5(folder: Path, edit: Any = None) -> Path:
    """A model of two inputs; ``edit`` changes its configuration."""
    keras.utils.set_random_seed(0)
    image, about = (
        keras.Input((8, 8, 3), batch_size=2, name="image"),
        keras.Input((4,), batch_size=2, name="about"),
    )
    h = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, activation="relu")(image))
    h = keras.layers.Concatenate()([keras.layers.GlobalAveragePooling2D()(h), keras.layers.Dense(4)(about)])
    path = folder / "model.h5"
    keras.Model([image, about], keras.layers.Dense(2)(h)).save(path)
    if edit is not None:
        with h5py.File(path, "r+") as file:
            edit(file)
    return path


def test_models_in_hdf5_are_planned_as_they_run(tmp_path: Path) -> None:
    path = in_hdf5(tmp_path)
    program = sources.read_model(path)
    plan = api.plan_graph(program.graph).plan
    model, rng = keras.models.load_model(path, compile=False), np.random.default_rng(0)
    x, about = rng.normal(size=(2, 8, 8, 3)).astype("f"), rng.normal(size=(2, 4)).astype("f")
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        tf.graph_util.import_graph_def(planned_graph(program, plan), name="")
        made = session.run(f"{program.fetch[0]}:0", {"image:0": x, "about:0": about})
    assert np.allclose(made, model([x, about], training=False).numpy(), atol=1e-6)


def replaced(old: str, new: str) -> Any:
    """An edit of a configuration."""

    def edit(file: Any) -> None:
        file.attrs["model_config"] = file.attrs["model_config"].replace(old, new)

    return edit


def without_config(file: Any) -> None:
    del file.attrs["model_config"]


def linked(file: Any) -> None:
    file["away"] = h5py.ExternalLink("/etc/passwd", "x")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (replaced('"GlobalAveragePooling2D"', '"Lambda"'), "a Lambda layer in .*not run"),
        (replaced('"GlobalAveragePooling2D"', '"TorchModuleWrapper"'), "TorchModuleWrapper in .*is code"),
        (
            replaced('"class_name": "Conv2D"', '"module": "os.path", "class_name": "Conv2D"'),
            "of module 'os.path' in",
        ),
        (replaced("{", "["), "not a Keras model in HDF5: JSONDecodeError"),
        (without_config, "no model_config: the file has weights alone"),
        (linked, "weights 'away' are a link"),
    ],
)
def test_code_and_links_in_hdf5_are_refused(edit: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((BadInput, Unsupported), match=said):
        sources.read_model(in_hdf5(tmp_path, edit))


def test_what_is_no_hdf5_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    path.write_bytes(b"\x18\0\0\0what others read")
    with pytest.raises(BadInput, match="not a Keras model in HDF5: "):
        sources.read_model(path)
