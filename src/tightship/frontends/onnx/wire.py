"""A model's file without its weights, and the weights back in: protobuf messages by their headers alone.

What a file holds besides weights is small, and is all that planning needs. `slim` walks the file field by field, as
onnx.proto describes it, and leaves out the contents of large dense tensors, and the long lists in which ensembles of
trees have their nodes, noting where in the file they are; `fattened` is the way back, in pieces, so that gigabytes
are copied by range and never held. On the way every message is counted, because an empty one takes two bytes in a
file and many more in memory.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import onnx

from tightship.frontends.onnx.runs import LISTS, run_end

__all__ = [
    "KEEP",
    "Held",
    "Read",
    "TooLarge",
    "fattened",
    "from_bytes",
    "from_file",
    "held",
    "held_lists",
    "slim",
]

KEEP: Final = (1 << 15, 1 << 10)
"""Bytes of a tensor's contents up to which they are kept: what shapes are computed from is smaller. The second is
tried where too much would be kept by the first."""

_MESSAGE, _FIELD = 64, 16  # bytes counted at least, of a message and of any other field
_DEPTH: Final = 100  # of messages within one another, as protobuf has it
_WINDOW: Final = 1 << 15  # bytes read at once in passing
_BLOCK: Final = 1 << 20  # a message of up to so many bytes is read at once
_MARK: Final = f"tightship.{secrets.token_hex(8)}"  # drawn anew in every process: no file can hold it
_CONTENTS: Final = frozenset(
    onnx.TensorProto.DESCRIPTOR.fields_by_name[name].number
    for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
)
_RAW: Final = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
_EXTERNAL: Final = onnx.TensorProto.EXTERNAL_DATA_FIELD_NUMBER
_NAME: Final = onnx.AttributeProto.NAME_FIELD_NUMBER
_DOC: Final = onnx.AttributeProto.DOC_STRING_FIELD_NUMBER
_TREES: Final = (b"nodes_", b"class_", b"target_", b"leaf_")
"""How the attributes begin that are the nodes and leaves of trees: sizes of results do not depend on them."""
_AS_THEY_ARE: Final = 0
"""In place of a field's number: a run of fields with their headers."""

Read = Callable[[int, int], bytes]
"""(offset, size) -> that many bytes, or fewer at the end."""


def from_file(handle: int) -> Read:
    """Reads from an open file, little by little what is asked for little by little."""
    at, window = 0, b""

    def read(offset: int, size: int) -> bytes:
        nonlocal at, window
        if not at <= offset <= offset + size <= at + len(window):
            if size > _WINDOW // 2:
                return os.pread(handle, size, offset)
            at, window = offset, os.pread(handle, _WINDOW, offset)
        return window[offset - at : offset - at + size]

    return read


def from_bytes(data: bytes, at: int = 0) -> Read:
    """Reads from memory that holds what begins at byte ``at``."""
    return lambda offset, size: data[offset - at : offset - at + size]


class TooLarge(Exception):
    """More than was allowed is not weights; the argument is how much was counted by then."""


@dataclass(frozen=True, slots=True)
class Held:
    """Contents of a tensor or an attribute that were left in the file: where they are, and in which field."""

    offset: int
    size: int
    field: int

    @property
    def raw(self) -> bool:
        """Whether these are the elements' bytes as they are in memory."""
        return self.field == _RAW


def held(tensor: Any) -> Held | None:
    """Where the contents of a tensor of a slim model are; None if they are in the message, or beside the file."""
    found = [e.value for e in tensor.external_data if e.key == _MARK]
    return Held(*map(int, found[-1].split(":"))) if found else None


def held_lists(node: Any) -> int:
    """How many lists of a node of a slim model are in its file alone."""
    return sum(a.doc_string.startswith(_MARK) for a in node.attribute)


def slim(read: Read, size: int, limit: int) -> bytes:
    """The model of ``size`` bytes that ``read`` reads, without the contents of its large tensors.

    Raises ``ValueError`` where there is no message, `TooLarge` when more than ``limit`` bytes are not weights.
    """
    for keep in KEEP:
        try:
            return _Slim(keep, limit).message(read, 0, size, onnx.ModelProto.DESCRIPTOR)
        except TooLarge:
            if keep == KEEP[-1]:
                raise
    raise AssertionError


@dataclass
class _Slim:
    keep: int
    limit: int
    counted: int = 0

    def message(
        self,
        read: Read,
        at: int,
        end: int,
        kind: Any,
        depth: int = 0,
        *,
        loaded: bool = False,
        whole: bool = False,
    ) -> bytes:
        """The message of a kind between ``at`` and ``end``, slim, or ``whole`` (onnx's checker looks into sparse
        tensors); ``loaded``: it is read from memory already."""
        if depth > _DEPTH:
            raise ValueError(f"messages are nested more than {_DEPTH} deep")
        if not loaded and end - at <= _BLOCK:
            read, loaded = from_bytes(_all(read, at, end), at), True
        self._count(_MESSAGE)
        parts: list[bytes] = []
        inside, emptied = _inside(kind), kind.name == "TensorProto" and not whole
        whole = whole or kind.name == "SparseTensorProto"
        if kind.name == "AttributeProto" and end - at > self.keep and _of_trees(read, at, end):
            made = self._without_list(read, at, end)
            if made is not None:
                return made
        copied = at  # everything before it has been dealt with
        for number, begin, start, stop in _fields(read, at, end):
            child = inside.get(number) if start > begin else None
            if child is not None:
                made = self.message(read, start, stop, child, depth + 1, loaded=loaded, whole=whole)
                if len(made) == stop - start:
                    continue
                new = _varint_of(number << 3 | 2) + _varint_of(len(made)) + made
            elif emptied and number in _CONTENTS and stop - start > self.keep:
                entry = onnx.StringStringEntryProto(key=_MARK, value=f"{start}:{stop - start}:{number}")
                text = entry.SerializeToString()
                new = _varint_of(_EXTERNAL << 3 | 2) + _varint_of(len(text)) + text
                self._count(len(new))
            else:
                self._count(max(stop - start, _FIELD))
                continue
            if begin > copied:
                parts.append(_all(read, copied, begin))
            parts.append(new)
            copied = stop
        if end > copied:
            parts.append(_all(read, copied, end))
        return b"".join(parts)

    def _without_list(self, read: Read, at: int, end: int) -> bytes | None:
        """An attribute without its list, whose place in the file stands where a text would; None for one in several
        pieces."""
        parts: list[bytes] = []
        text = b""
        while at < end:
            number, begin, start, stop = next(_fields(read, at, end))
            if number in LISTS:
                if text:
                    return None
                stop = run_end(read, begin, end, number, _past)
                text = f"{_MARK}{begin}:{stop - begin}:{_AS_THEY_ARE}".encode()
            elif number != _DOC:
                self._count(max(stop - start, _FIELD))
                parts.append(_all(read, begin, stop))
            at = stop
        self._count(len(text))
        return b"".join([*parts, _varint_of(_DOC << 3 | 2), _varint_of(len(text)), text])

    def _count(self, size: int) -> None:
        self.counted += size
        if self.counted > self.limit:
            raise TooLarge(self.counted)


def _of_trees(read: Read, at: int, end: int) -> bool:
    """Whether the attribute between ``at`` and ``end`` is a list of trees' nodes or leaves."""
    number, _, start, stop = next(_fields(read, at, end))
    if number != _NAME or stop - start > _MESSAGE or not read(start, stop - start).startswith(_TREES):
        return False
    return stop < end and next(_fields(read, stop, end))[0] in LISTS


def _past(read: Read, at: int, end: int) -> tuple[int, int]:
    """Number of the field that begins at a byte, and where it ends."""
    number, _, _, stop = next(_fields(read, at, end))
    return number, stop


def _all(read: Read, at: int, end: int) -> bytes:
    data = read(at, end - at)
    if len(data) != end - at:
        raise ValueError(f"it ends before byte {end}")
    return data


_KNOWN: dict[str, dict[int, Any]] = {}


def _inside(kind: Any) -> dict[int, Any]:
    """Messages that a message of a kind can hold, by field number."""
    if kind.full_name not in _KNOWN:
        fields = kind.fields_by_number.items()
        _KNOWN[kind.full_name] = {n: f.message_type for n, f in fields if f.message_type is not None}
    return _KNOWN[kind.full_name]


def _fields(read: Read, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, where it begins, where its contents begin, where they end) of the fields of the message between ``at``
    and ``end``; contents that are not of a length of their own begin where the field does."""
    while at < end:
        head = read(at, min(20, end - at))
        key, past = _varint(head, 0, at)
        kind, start = key & 7, at
        if kind == 2:
            size, past = _varint(head, past, at)
            start = at + past
            stop = start + size
        elif kind == 0:
            stop = at + _varint(head, past, at)[1]
        elif kind in (1, 5):
            stop = at + past + (8 if kind == 1 else 4)
        else:
            raise ValueError(f"byte {at} begins no field")
        if stop > end:
            raise ValueError(f"it ends before the field that begins at byte {at} does")
        yield key >> 3, at, start, stop
        at = stop


def _varint(data: bytes, i: int, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if i >= len(data):
            raise ValueError(f"it ends within a number of the field that begins at byte {at}")
        byte = data[i]
        i += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, i
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of the field that begins at byte {at} is too long")


def _varint_of(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


# --- and back ---


def fattened(model: Any) -> list[bytes | Held]:
    """The bytes of a slim model, with the places in its file where the contents of its large tensors are."""
    return _fat(model.SerializeToString(), onnx.ModelProto.DESCRIPTOR)


def _fat(data: bytes, kind: Any) -> list[bytes | Held]:
    mark = _MARK.encode()
    if mark not in data:
        return [data]
    pieces: list[bytes | Held] = []
    inside, copied = _inside(kind), 0

    for number, begin, start, stop in _fields(from_bytes(data), 0, len(data)):
        child = inside.get(number) if start > begin else None
        if kind.name == "AttributeProto" and number == _DOC and data.startswith(mark, start):
            where = Held(*map(int, data[start + len(mark) : stop].decode().split(":")))
            pieces += [data[copied:begin], where]
            copied = stop
        if child is None or data.find(mark, start, stop) < 0:
            continue
        pieces.append(data[copied:begin])
        copied = stop
        if kind.name == "TensorProto" and number == _EXTERNAL:
            entry = onnx.StringStringEntryProto.FromString(data[start:stop])
            where = Held(*map(int, entry.value.split(":")))
            pieces += [_varint_of(where.field << 3 | 2) + _varint_of(where.size), where]
            continue
        inner = _fat(data[start:stop], child)
        size = sum(len(p) if isinstance(p, bytes) else p.size for p in inner)
        pieces += [_varint_of(number << 3 | 2) + _varint_of(size), *inner]
    pieces.append(data[copied:])
    return pieces
