"""A Keras model's file (``.keras``, ``.h5``) -> the frozen GraphDef of its forward pass. None of its code is run.

The file is a zip of a configuration and weights, or, as Keras 2 wrote it, HDF5 with both in it. Before Keras sees it,
it is measured and looked through: how large its members become, where their names lead, which classes the
configuration names (Keras's own, no ``Lambda``), and whether the weights link to other files.
"""

from __future__ import annotations

import io
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from tightship.errors import BadInput, TightshipError, UnknownSize, Unsupported

if TYPE_CHECKING:
    from tightship.frontends.tensorflow.load import GraphFile

__all__ = ["check_archive", "check_hdf5", "read_keras"]

LARGEST_FILE: Final = 2**31 - 1
"""Bytes of all members, unpacked, and of the weights."""
LARGEST_CONFIG: Final = 1 << 26
"""Bytes of a configuration."""
MOST_MEMBERS: Final = 10_000
MOST_RATIO: Final = 200
"""What a member of more than `LARGEST_CONFIG` bytes may grow by when it is unpacked."""
_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_OWN: Final = ("keras", "builtins")
_OTHERS: Final = frozenset({"FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"})
"""Layers of Keras's own that unpickle something, or load it from elsewhere; not all versions of Keras refuse to."""


def read_keras(path: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]]) -> GraphFile:
    """The forward pass of the model in a file that `check_archive` or `check_hdf5` has looked through, weights as
    constants; ``shapes`` gives sizes to inputs that have unknown ones. Raises ``BadInput`` naming what is wrong with
    the file, ``Unsupported`` where Keras is missing, ``UnknownSize`` for inputs without a size."""
    place = os.fspath(path)
    from tightship.frontends.tensorflow.load import (
        GraphFile,
    )  # needs TensorFlow, which looking through does not

    keras, tf = _keras(place)
    try:
        model = keras.models.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # Keras raises whatever its layers raise
        raise BadInput(f"Keras cannot load the model: {_said(error)}", place=place) from error
    given = _specs(tf, model, shapes, place)
    try:
        from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

        call = tf.function(lambda *xs: model(list(xs) if len(xs) > 1 else xs[0], training=False))
        traced = call.get_concrete_function(*given)
        _check_ops(traced.graph.as_graph_def(), place)
        frozen = convert_variables_to_constants_v2(traced, lower_control_flow=False)
        proto = frozen.graph.as_graph_def()
    except TightshipError:
        raise
    except Exception as error:
        raise BadInput(f"TensorFlow cannot make a graph of the model: {_said(error)}", place=place) from error
    fetch = tuple(dict.fromkeys(t.op.name for t in frozen.outputs))
    return GraphFile(Path(place), proto, fetch)


def _check_ops(proto: Any, place: str) -> None:
    """Raise ``Unsupported`` where the forward pass does what a frozen graph cannot: look something up in a table,
    whose contents are no constant, or change a variable."""
    for node in (*proto.node, *(n for f in proto.library.function for n in f.node_def)):
        if node.op.startswith("LookupTable"):
            raise Unsupported(
                f"the table of {node.name!r} in {place}", "a frozen graph has no tables",
                "save the model without the layers that look up text or categories: from what these make on",
            )  # fmt: skip
        if node.op.startswith("Assign") and node.op.endswith("VariableOp"):
            raise Unsupported(
                f"the state that {node.name!r} changes in {place}", "a frozen graph has constants for variables",
                "build the layer with stateful=False, or export a SavedModel",
            )  # fmt: skip


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _keras(place: str) -> tuple[Any, Any]:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import keras
        import tensorflow as tf
    except ImportError as error:
        instead = "pip install 'tightship[tensorflow]'"
        raise Unsupported("reading Keras models", f"{error.name} is not installed", instead) from error
    if keras.backend.backend() != "tensorflow":
        raise Unsupported(
            f"reading {place} with Keras on {keras.backend.backend()}", "graphs are made by TensorFlow",
            "set KERAS_BACKEND=tensorflow",
        )  # fmt: skip
    return keras, tf


def _specs(tf: Any, model: Any, shapes: Mapping[str, tuple[int, ...]], place: str) -> list[Any]:
    """The types of a model's inputs, of known sizes."""
    inputs = {t.name: t for t in model.inputs or ()}
    if not inputs:
        raise BadInput("a model whose inputs have no shapes: build it before it is saved", place=place)
    if unknown := [n for n in shapes if n not in inputs]:
        raise BadInput(f"unknown input {unknown[0]!r}; the model has {', '.join(inputs)}", place="--shape")
    specs, missing = [], {}
    for name, tensor in inputs.items():
        known = tuple(tensor.shape)
        sizes = shapes.get(name, known)
        if len(sizes) != len(known) or any(k not in (None, s) for k, s in zip(known, sizes, strict=True)):
            raise BadInput(f"{name} is {list(known)} in the model, not {list(sizes)}", place="--shape")
        if None in sizes:
            missing[name] = "x".join("N" if s is None else str(s) for s in sizes)
        specs.append(tf.TensorSpec(sizes, tensor.dtype, name=name))
    if missing:
        names, forms = ", ".join(missing), ",".join(f"{name}={form}" for name, form in missing.items())
        raise UnknownSize(f"unknown size of {names}; give --shape {forms}", place=place)
    return specs


# --- what is looked at before Keras is ---


def check_archive(path: str | os.PathLike[str]) -> None:
    """Raise ``BadInput`` for a file that is no Keras model or grows beyond bounds, ``Unsupported`` for code in it."""
    place = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadInput("not a regular file", place=place)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(members, place)
            _check_code(_content(archive, _CONFIG, LARGEST_CONFIG), place)
            if any(m.filename == _WEIGHTS for m in members):
                _check_weights(_content(archive, _WEIGHTS, LARGEST_FILE), place)
    except OSError as error:
        raise BadInput(f"cannot read {place!r}: {error.strerror or error}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        RecursionError,
    ) as error:
        raise BadInput(
            f"not a Keras model (a zip of config.json and weights): {error}", place=place
        ) from error


def _check_members(members: list[zipfile.ZipInfo], place: str) -> None:
    names = [m.filename for m in members]
    if len(names) > MOST_MEMBERS or len(set(names)) != len(names):
        raise BadInput(
            f"{len(names)} members; the limit is {MOST_MEMBERS}, and each has its own name", place=place
        )
    if _CONFIG not in names:
        raise BadInput("not a Keras model: it has no config.json", place=place)
    for m in members:
        if m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadInput(
                f"member {m.filename!r} is packed by method {m.compress_type}, which Keras never does",
                place=place,
            )
        parts = PurePosixPath(m.filename.replace("\\", "/"))
        if (
            parts.is_absolute()
            or ".." in parts.parts
            or stat.S_ISLNK(m.external_attr >> 16)
            or ":" in m.filename
        ):
            raise BadInput(f"member {m.filename!r} leads out of the file", place=place)
        if m.file_size > LARGEST_CONFIG and m.file_size > MOST_RATIO * max(m.compress_size, 1):
            raise BadInput(
                f"member {m.filename!r} grows from {m.compress_size} to {m.file_size} bytes", place=place
            )
    if (total := sum(m.file_size for m in members)) > LARGEST_FILE:
        raise BadInput(f"{total} bytes unpacked; the limit is {LARGEST_FILE}", place=place)


def _content(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A member, which may be longer than it says."""
    with archive.open(name) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise BadInput(f"member {name!r} has more than {limit} bytes", place=str(archive.filename))
    return data


def _check_code(config: bytes, place: str) -> None:
    """Raise ``Unsupported`` where the configuration names anything but Keras's own classes."""
    for found in _objects(json.loads(config)):
        name, module = found.get("class_name"), found.get("module")
        if name in ("Lambda", "__lambda__"):
            what, instead = f"a Lambda layer in {place}", "write it as a layer of Keras's own"
            raise Unsupported(what, "it is code, and code in files is not run", instead)
        if isinstance(name, str) and name in _OTHERS:
            what = f"a {name} in {place}"
            raise Unsupported(
                what, "it holds or loads another library's model, which is code", "export a graph.pb"
            )
        own = isinstance(module, str) and module.split(".")[0] in _OWN
        own |= module is None and found.get("registered_name") is None  # what is no class, such as tensors
        if name is not None and not own:
            what = f"class {name!r}{'' if module is None else f' of module {module!r}'} in {place}"
            raise Unsupported(
                what, "code that is not Keras's is not imported for a file", "export a graph.pb"
            )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def check_hdf5(path: str | os.PathLike[str]) -> None:
    """`check_archive` of a file of HDF5, whose configuration is an attribute, and which Keras reads without its
    optimizer's."""
    place = os.fspath(path)
    h5py = _h5py()
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise BadInput("not a regular file", place=place)
        if about.st_size > LARGEST_FILE:
            raise BadInput(f"{about.st_size} bytes; the limit is {LARGEST_FILE}", place=place)
        with h5py.File(path, "r") as file:
            _check_datasets(h5py, file, place)
            config = file.attrs.get("model_config")
        if config is None:
            fault = "no model_config: the file has weights alone; save the whole model (model.save)"
            raise BadInput(fault, place=place)
        data = config if isinstance(config, bytes) else str(config).encode()
        if len(data) > LARGEST_CONFIG:
            raise BadInput(f"model_config has more than {LARGEST_CONFIG} bytes", place=place)
        _check_code(data, place)
    except OSError as error:
        said = error.strerror or _said(error)
        raise BadInput(f"not a Keras model in HDF5: {said}", place=place) from error
    except (ValueError, RuntimeError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"not a Keras model in HDF5: {_said(error)}", place=place) from error


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        instead = "pip install 'tightship[tensorflow]'"
        raise Unsupported("reading Keras models", "h5py is not installed", instead) from error
    return h5py


def _check_weights(data: bytes, place: str) -> None:
    """Raise ``BadInput`` where weights link to other files or are larger than the limit."""
    h5py = _h5py()
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            _check_datasets(h5py, file, place)
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise BadInput(f"the weights are not HDF5: {_said(error)}", place=place) from error


def _check_datasets(h5py: Any, file: Any, place: str) -> None:
    """As `_check_weights`, of an open file."""
    total, names = 0, list[str]()

    def look(name: str, link: Any) -> str | None:
        return None if isinstance(link, h5py.HardLink) else str(name)  # what is not None ends the visit

    if (linked := file.visititems_links(look)) is not None:
        raise BadInput(f"weights {linked!r} are a link", place=place)
    file.visit(names.append)
    for name in names:
        item = file[name]
        if isinstance(item, h5py.Dataset):
            total += int(item.nbytes)
            if item.external or item.is_virtual:
                raise BadInput(f"weights {name!r} lie in another file", place=place)
    if total > LARGEST_FILE:
        raise BadInput(f"weights of {total} bytes; the limit is {LARGEST_FILE}", place=place)
