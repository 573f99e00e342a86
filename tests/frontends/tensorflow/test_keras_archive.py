"""Archives that no Keras wrote are refused, by what is wrong with them, also where there is no TensorFlow."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from support.hostile import hostile
from tightship import sources
from tightship.errors import BadInput, TightshipError, Unsupported
from tightship.frontends.tensorflow.keras_file import check_archive


def archive(folder: Path, how: int) -> Path:
    path = folder / "model.keras"
    with zipfile.ZipFile(path, "w", how) as made:
        made.writestr(
            "config.json", json.dumps({"class_name": "Dense", "module": "keras.layers", "more": [0] * 999})
        )
    return path


def test_an_archive_is_looked_through_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    path.write_bytes(b"PK, and nothing more")
    with pytest.raises(BadInput, match="not a Keras model"):
        sources.read_keras(path)
    check_archive(archive(tmp_path, zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize(
    "found",
    [
        {"module": None, "class_name": "Net", "registered_name": "Net"},  # a subclass of Model in a script
        {"module": None, "class_name": "Layer", "registered_name": "mine>Layer"},
        {"module": "net", "class_name": "Net", "registered_name": "Net"},
        {"class_name": "Net", "registered_name": "Net"},
        {"module": 7, "class_name": "Net"},
    ],
)
def test_classes_of_others_are_named_before_keras_looks_for_them(tmp_path: Path, found: object) -> None:
    path = tmp_path / "model.keras"
    tensors = {"class_name": "__keras_tensor__", "config": {}}
    for inner, refused in ((found, True), (tensors, False)):
        with zipfile.ZipFile(path, "w") as made:
            functional = {"module": "keras.src.models.functional", "class_name": "Functional"}
            functional |= {"registered_name": "Functional", "config": {"layers": [inner]}}
            made.writestr("config.json", json.dumps(functional))
        if refused:
            with pytest.raises(Unsupported, match=r"class '(Net|Layer)'.*export a graph"):
                check_archive(path)
        else:
            check_archive(path)


def test_a_stream_that_cannot_be_unpacked_is_damage(tmp_path: Path) -> None:
    path = archive(tmp_path, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.index(b"config.json") + len(b"config.json")
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(bytes(data))
    with pytest.raises(BadInput, match="decompress"):
        check_archive(path)


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_are_packed_as_keras_packs_them(tmp_path: Path, how: int) -> None:
    with pytest.raises(BadInput, match=f"method {how}"):
        check_archive(archive(tmp_path, how))


def test_no_changed_archive_raises_anything_else(tmp_path: Path) -> None:
    path, ended = tmp_path / "model.keras", set()
    for seed in range(300):
        path.write_bytes(hostile("keras", seed, 1 + seed % 3)[1])
        try:
            check_archive(path)
            ended.add("")
        except TightshipError as error:
            ended.add(type(error).__name__)
    assert {"BadInput", "Unsupported"} <= ended
