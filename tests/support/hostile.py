"""Files that nobody wrote: valid ones changed by their structure (JSON, protobuf, CSV, HLO's text) and as bytes."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.hlo_small import CHAIN, HEADER, LOOP
from support.strategies import random_graph, random_plan
from tightship import serde
from tightship.report.viewers import snapshot

__all__ = ["FORMATS", "changed", "hostile"]

NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**32,
    2**53 + 1,
    2**59,
    2**62,
    2**63 - 1,
    2**63,
    2**70,
    -(2**63),
    1e308,
    5e-324,
    0.5,
)
TEXTS = ("", "\u202eevil\u2066", "\x00", "a" * 5000, "</script>", "../../x", "NaN", "\ud7ff", "[bold]")
ODD = (*NUMBERS, *TEXTS, None, True, [], {}, [[[]]], [0], {"a": 1})


def hostile(kind: str, seed: int, changes: int) -> tuple[str, bytes]:
    """A name and the bytes of a file of the kind, with so many changes made to a valid one."""
    ending, make, _ = FORMATS[kind]
    return f"{kind}{ending}", changed(kind, make(seed % 7), seed, changes)


def changed(kind: str, data: bytes, seed: int, changes: int) -> bytes:
    """So many changes made to a file of the kind; of one that is not known, as JSON."""
    change = FORMATS[kind][2] if kind in FORMATS else _json
    for k in range(changes):
        rng = random.Random(f"{kind} {seed} {k}")
        data = _bytes(data, rng) if rng.random() < 0.15 else change(data, rng)
    return data


# --- JSON ---


def _json(data: bytes, rng: random.Random) -> bytes:
    try:
        return json.dumps(_changed(json.loads(data), rng)).encode()
    except (ValueError, RecursionError):  # too deep for what changes it, too
        return _bytes(data, rng)


def _changed(doc: Any, rng: random.Random) -> Any:
    """One spot of a tree of lists and dictionaries: gone, twice, of another place, or with another value."""
    spots: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        rows = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in rows:
            spots.append((node, key))
            visit(inner)

    visit(doc)
    if not spots:
        return rng.choice(ODD)
    node, key = rng.choice(spots)
    way = rng.randrange(6)
    if way == 0:
        del node[key]
    elif way == 1 and isinstance(node, list):
        node.insert(key, node[key])
    elif way == 2:
        node[key] = copy.deepcopy(rng.choice(spots)[0])
    elif way == 3 and isinstance(node[key], (int, float)):
        node[key] += rng.choice((-1, 1, 64))
    elif way == 4 and isinstance(node[key], list):
        node[key] = rng.choice(([], node[key][::-1], node[key] * 2, [node[key]]))
    elif rng.random() < 0.2:
        node[key] = rng.choice(ODD)
    else:  # of the same type, so that it is read further
        same = [x for x in ODD if type(x) is type(node[key])]
        node[key] = rng.choice(same or ODD)
    return doc


def _pickle(data: bytes, rng: random.Random) -> bytes:
    try:
        doc = pickle.loads(data)
    except Exception:
        return _bytes(data, rng)
    return pickle.dumps(_changed(doc, rng), protocol=rng.choice((2, 4)))


def _zip(data: bytes, rng: random.Random) -> bytes:
    """One member: gone, twice, of another name, or with other contents."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # whatever zipfile raises of what is none
        return _bytes(data, rng)
    if not members:
        return _bytes(data, rng)
    k, way = rng.randrange(len(members)), rng.randrange(6)
    name, inner = members[k]
    if way == 0:
        del members[k]
    elif way == 1:
        members.append(members[k])
    elif way == 2:
        members[k] = rng.choice(("../../x", "/etc/x", "config.json/", "\u202e", "a" * 300)), inner
    else:
        members[k] = name, _json(inner, rng) if name.endswith(".json") else _bytes(inner, rng)
    return _zipped(members, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def _zipped(members: list[tuple[str, bytes]], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", how) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, inner in members:
            archive.writestr(name, inner)
    return out.getvalue()


def _words(data: bytes, rng: random.Random) -> bytes:
    """Offsets and numbers of a FlatBuffer, which are words of two, four or eight bytes at their own multiples."""
    size = rng.choice((2, 4, 4, 4, 8))
    if len(data) < 16:
        return _bytes(data, rng)
    at = rng.randrange(len(data) // size) * size
    old = int.from_bytes(data[at : at + size], "little")
    far = rng.randrange(len(data) // size) * size
    new = rng.choice(
        (0, 1, old + 1, old - 1, old + 4, old - 4, 1 << 8 * size - 1, -1, 1 << 31, len(data), far - at,
         int.from_bytes(data[far : far + size], "little"))
    )  # fmt: skip
    return data[:at] + (new % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


# --- protobuf, whatever the message ---


def varint(n: int) -> bytes:
    out = b""
    while True:
        n, low = n >> 7, n & 127
        out += bytes([low | (128 if n else 0)])
        if not n:
            return out


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    n = shift = 0
    while True:
        byte = data[at]
        n |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if not byte & 128:
            return n, at


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def _fields(data: bytes) -> list[tuple[int, int, bytes]] | None:
    """Number, wire type and payload of each field; None for what is no message."""
    at, out = 0, []
    try:
        while at < len(data):
            tag, at = _read_varint(data, at)
            start = at
            if tag & 7 == 0:
                at = _read_varint(data, at)[1]
            elif tag & 7 == 2:
                size, start = _read_varint(data, at)
                at = start + size
            elif tag & 7 in (1, 5):
                at += 8 if tag & 7 == 1 else 4
            else:
                return None
            if at > len(data) or not tag >> 3:
                return None
            out.append((tag >> 3, tag & 7, data[start:at]))
    except IndexError:
        return None
    return out


def _protobuf(data: bytes, rng: random.Random) -> bytes:
    """One field somewhere in the message: gone, twice, of another number, or with another payload."""
    rows = _fields(data)
    if not rows:
        return _bytes(data, rng)
    k = rng.randrange(len(rows))
    number, kind, payload = rows[k]
    way = rng.randrange(8)
    if kind == 2 and way < 5 and payload:
        payload = _protobuf(payload, rng)
    elif way == 5:
        rows.insert(rng.randrange(len(rows)), rows[k])
    elif way == 6:
        del rows[k]
        return _message(rows)
    elif kind == 0:
        payload = varint(int(rng.choice([n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64])))
    elif kind == 2:
        payload = rng.choice((b"", b"\xff\xfe", b"\x00" * 100, *(t.encode() for t in TEXTS), data[:5000]))
    else:
        number = rng.randrange(1, 40)
    rows[k] = (number, kind, payload)
    return _message(rows)


def _message(rows: list[tuple[int, int, bytes]]) -> bytes:
    out = b""
    for number, kind, payload in rows:
        out += varint(number << 3 | kind) + (varint(len(payload)) if kind == 2 else b"") + payload
    return out


# --- text ---

_WORDS = (
    "-1",
    "0",
    "99999999999999999999",
    "1e400",
    "nan",
    "}",
    "{",
    "(",
    ")",
    "f32[",
    "f32[-1]",
    "while",
    "%",
    "\x00",
)
_WORDS += (
    "f32[9999999999,9999999999]",
    "tuple",
    "get-tuple-element",
    ",",
    ",,",
    "\u202e",
    "ENTRY",
    "to_apply=%main",
)


def _text(data: bytes, rng: random.Random) -> bytes:
    lines = data.decode("utf-8", "replace").split("\n")
    k = rng.randrange(len(lines))
    way = rng.randrange(5)
    if way == 0:
        del lines[k]
    elif way == 1:
        lines.insert(rng.randrange(len(lines)), lines[k])
    elif way == 2:
        j = rng.randrange(len(lines))
        lines[j], lines[k] = lines[k], lines[j]
    else:
        sep = rng.choice((" ", ",", "(", "=", "."))
        parts = lines[k].split(sep)
        parts[rng.randrange(len(parts))] = rng.choice((*_WORDS, *parts))
        lines[k] = sep.join(parts)
    return "\n".join(lines).encode()


def _bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return bytes([rng.randrange(256)])
    at, way = rng.randrange(len(data)), rng.randrange(4)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if way == 2:
        return data[:at] + data[at + rng.randrange(1, 20) :]
    return data[:at] + rng.choice((b"\xff\xfe", b"[" * 3000, b'{"a":' * 3000, b"\x00")) + data[at:]


# --- valid files ---


def _graph(seed: int) -> bytes:
    return serde.dumps_graph(random_graph(seed, 3 + seed))


def _plan(seed: int) -> bytes:
    graph = random_graph(seed, 3 + seed)
    return serde.dumps_plan(random_plan(graph, seed), graph)


def _csv(seed: int) -> bytes:
    rng = random.Random(seed)
    rows = ["id,lower,upper,size,offset"]
    for k in range(8):
        low = rng.randrange(20)
        rows.append(f"b{k},{low},{low + rng.randrange(1, 9)},{rng.randrange(1, 99)},{1000 * k}")
    return "\n".join(rows).encode()


def _hlo(seed: int) -> bytes:
    return (HEADER + (CHAIN if seed % 2 else LOOP)).encode()


def _onnx(seed: int) -> bytes:
    import numpy as np
    from onnx import helper

    from support.graphs import made, tensor, value

    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["r"])]
    nodes += [helper.make_node("Reshape", ["r", "shape"], ["s"]), helper.make_node("Add", ["s", "s"], ["y"])]
    weights = [tensor("w", np.ones((4, 4), np.float32)), tensor("shape", np.array([2, 2 + 2 * (seed % 2)]))]
    x, y = value("x", [2, 4]), value("y", [2, 4])
    model: bytes = made(nodes, [x], [y], weights).SerializeToString()
    return model


def _graphdef(seed: int) -> bytes:
    def attr(name: str, value: bytes) -> bytes:
        return field(5, field(1, name) + field(2, value))

    float_ = attr("dtype", field(6, 1)), attr("T", field(6, 1))
    shape = attr("shape", field(7, b"".join(field(2, field(1, n)) for n in (4, 4))))
    out = field(1, field(1, "x") + field(2, "Placeholder") + float_[0] + shape)
    last = "x"
    for k in range(2 + seed % 3):
        inputs = field(3, last) + field(3, "x")
        out += field(1, field(1, f"m{k}") + field(2, "MatMul") + inputs + float_[1])
        out += field(1, field(1, f"r{k}") + field(2, "Relu") + field(3, f"m{k}") + float_[1])
        last = f"r{k}"
    return out


DATA = Path(__file__).parent.parent / "data"


def _tflite(seed: int) -> bytes:
    models = sorted((DATA / "tflite").glob("*.tflite"))
    return models[seed % len(models)].read_bytes()


def _keras(seed: int) -> bytes:
    """An archive as Keras writes it; the weights are no HDF5 file that anybody could read."""
    dense = {"module": "keras.layers", "class_name": "Dense", "config": {"name": "d", "units": 2 + seed}}
    start = {
        "module": "keras.layers",
        "class_name": "InputLayer",
        "config": {"batch_shape": [2, 4], "name": "x"},
    }
    config = {
        "module": "keras",
        "class_name": "Sequential",
        "config": {"name": "m", "layers": [start, dense]},
    }
    rows = [("metadata.json", {"keras_version": "3.9.0"}), ("config.json", config)]
    weights = ("model.weights.h5", b"\x89HDF\r\n\x1a\n" + bytes(200))
    return _zipped([*((name, json.dumps(x).encode()) for name, x in rows), weights])


def _snapshot(seed: int) -> bytes:
    graph = random_graph(seed, 3 + seed)
    return pickle.dumps(snapshot(graph, random_plan(graph, seed)), protocol=4)


def _measurements(seed: int) -> bytes:
    rows = {f"op{k}": [0.25 * k, 64 * k, [[64, -1, 0, 1]], [0], 0.0] for k in range(1 + seed)}
    return json.dumps({"machine": "m", "entries": rows}).encode()


Change = Callable[[bytes, random.Random], bytes]
FORMATS: dict[str, tuple[str, Callable[[int], bytes], Change]] = {
    "graph": (".json", _graph, _json),
    "plan": (".json", _plan, _json),
    "problem": (".csv", _csv, _text),
    "module": (".txt", _hlo, _text),
    "model": (".onnx", _onnx, _protobuf),
    "graphdef": (".pb", _graphdef, _protobuf),
    "lite": (".tflite", _tflite, _words),
    "keras": (".keras", _keras, _zip),
    "snapshot": (".pickle", _snapshot, _pickle),
    "measurements": (".json", _measurements, _json),
}
"""By kind: how its files end, how a valid one is made, and how one is changed by its structure."""
