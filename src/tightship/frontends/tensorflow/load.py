"""A file -> TensorFlow's own GraphDef message: bounded, checked, never executed.

Read are a GraphDef as bytes (``.pb``) or as text (``.pbtxt``), a MetaGraphDef (``.meta``), and the first graph of a
``saved_model.pb``. What is not weights is measured on the wire before anything is parsed, because an empty node takes
two bytes in a file and many more in memory.

On the wire, the fields of a message are found without parsing what is in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from google.protobuf.message import DecodeError
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from tightship.errors import BadInput
from tightship.files import read_bytes
from tightship.frontends.tensorflow.nodes import name_of

__all__ = [
    "LARGEST_FILE",
    "LARGEST_STRUCTURE",
    "LARGEST_TEXT",
    "MOST_NODES",
    "GraphFile",
    "fields",
    "read",
    "varint",
]


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of the fields of the message at ``data[at:end]``, by their headers alone."""
    while at < end:
        key, at = varint(data, at, end)
        kind = key & 7
        if kind == 0:
            stop = varint(data, at, end)[1]
        elif kind == 2:
            size, at = varint(data, at, end)
            stop = at + size
        elif kind in (1, 5):
            stop = at + (8 if kind == 1 else 4)
        else:
            raise ValueError(f"byte {at} begins no field")
        if stop > end:
            raise ValueError(f"it ends before the field that begins at byte {at} does")
        yield key >> 3, at, stop
        at = stop


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"the number before byte {at} is too long")


LARGEST_FILE: Final = 2**31 - 1
"""Bytes a protobuf file may have."""
LARGEST_STRUCTURE: Final = 1 << 26
"""Bytes of a file that may be other than the contents of constants."""
LARGEST_TEXT: Final = 1 << 26
"""Bytes of a file of text."""
MOST_NODES: Final = 1_000_000

_LEAST: Final = 64  # bytes that a field takes in memory, however short it is in the file
_TO_TENSOR, _CONTENT = (1, 5, 2, 8), 4  # field numbers: node, attr, value, tensor; and the tensor's contents


@dataclass(frozen=True)
class GraphFile:
    """A graph as it was read from ``path``; ``fetch``: what a MetaGraph says is run (its ``train_op``, or
    the results of its signature ``serving_default``)."""

    path: Path
    proto: Any
    fetch: tuple[str, ...] = ()


def read(path: str | os.PathLike[str]) -> GraphFile:
    """Read a file. Raises ``BadInput`` naming it for whatever is wrong with it."""
    place = os.fspath(path)
    limit = LARGEST_TEXT if place.endswith(".pbtxt") else LARGEST_FILE
    proto, fetch = _parsed(read_bytes(path, limit), place)
    _check(proto, place)
    return GraphFile(Path(place), proto, fetch)


def _parsed(data: bytes, place: str) -> tuple[Any, tuple[str, ...]]:
    """The GraphDef in a file, and what is fetched of it."""
    fault = "not a TensorFlow graph (a protobuf message of type GraphDef)"
    try:
        if place.endswith(".pbtxt"):
            return text_format.Parse(data.decode(), graph_pb2.GraphDef()), ()
        if place.endswith(".meta"):
            fault = fault.replace("GraphDef", "MetaGraphDef")
            _measure(data, place, (2,))
            return _of_meta(meta_graph_pb2.MetaGraphDef.FromString(data))
        if next(fields(data, 0, len(data)), (0, 0, 0))[0] == 1 and data[0] & 7 == 0:  # a SavedModel's version
            fault = fault.replace("GraphDef", "SavedModel")
            _measure(data, place, (2, 2))
            saved = saved_model_pb2.SavedModel.FromString(data)
            if not saved.meta_graphs:
                raise BadInput(f"{fault}: it has no graph", place=place)
            return _of_meta(saved.meta_graphs[0])
        _measure(data, place, ())
        return graph_pb2.GraphDef.FromString(data), ()
    except (DecodeError, RecursionError, UnicodeError, ValueError, text_format.ParseError) as error:
        said = " ".join(str(error).split())
        raise BadInput(f"{fault}: {said}", place=place) from error


def _of_meta(meta: Any) -> tuple[Any, tuple[str, ...]]:
    if "train_op" in meta.collection_def:
        names = list(meta.collection_def["train_op"].node_list.value)
    else:  # not what saves and restores: the results of what is served
        served = meta.signature_def.get("serving_default")
        names = [] if served is None else [served.outputs[k].name for k in sorted(served.outputs)]
    return meta.graph_def, tuple(dict.fromkeys(map(name_of, names)))


def _measure(data: bytes, place: str, path: tuple[int, ...]) -> None:
    """Raise ``BadInput`` where more than `LARGEST_STRUCTURE` bytes are no weights; ``path`` leads to the GraphDef."""
    total = 0

    def walk(start: int, end: int, path: tuple[int, ...], heavy: bool) -> None:
        nonlocal total
        total += _LEAST
        for number, at, stop in fields(data, start, end):
            if path and number == path[0]:
                walk(at, stop, path[1:], heavy)
            elif not path and heavy and number == _CONTENT:
                total += _LEAST
            else:
                total += max(stop - at, _LEAST)
            if total > LARGEST_STRUCTURE:
                fault = f"more than {LARGEST_STRUCTURE} bytes that are not the contents of constants"
                raise BadInput(fault, place=place)

    walk(0, len(data), (*path, *_TO_TENSOR), heavy=True)


def _check(proto: Any, place: str) -> None:
    if not proto.node:
        raise BadInput("graph without nodes", place=place)
    if len(proto.node) > MOST_NODES:
        raise BadInput(f"{len(proto.node)} nodes; the limit is {MOST_NODES}", place=place)
    seen = set()
    for node in proto.node:
        if not node.name or not node.op:
            raise BadInput(f"node without a name or an op: {node.name!r}, {node.op!r}", place=place)
        if node.name in seen:
            raise BadInput(f"duplicate node name {node.name!r}", place=place)
        seen.add(node.name)
    for node in proto.node:
        for given in node.input:
            if name_of(given) not in seen:
                raise BadInput(f"unknown input {given!r}", place=f"{place}: node {node.name!r}")
            if not _INPUT.fullmatch(given):  # TensorFlow ends the process at a number that is too large
                fault = f"invalid input {given!r}; write NAME, NAME:PORT or ^NAME"
                raise BadInput(fault, place=f"{place}: node {node.name!r}")


_INPUT: Final = re.compile(r"\^?[^:^]+|[^:^]+:\d{1,5}", re.ASCII)
