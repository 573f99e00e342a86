"""Protobuf on the wire: where the fields of a message begin and end, without parsing what is in them."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["fields", "varint"]


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
