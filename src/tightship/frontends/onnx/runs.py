"""Long lists in protobuf messages, element by element: where they end.

Files of onnx write a list of numbers as one field for each. An ensemble of a thousand trees has some ten million; to
look at each by itself takes minutes, in blocks seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np
import onnx

__all__ = ["LISTS", "run_end"]

_FLOATS: Final = onnx.AttributeProto.FLOATS_FIELD_NUMBER
_INTS: Final = onnx.AttributeProto.INTS_FIELD_NUMBER
_STRINGS: Final = onnx.AttributeProto.STRINGS_FIELD_NUMBER
LISTS: Final = frozenset({_FLOATS, _INTS, _STRINGS})
"""Fields of an attribute that are lists."""

_BLOCK: Final = 1 << 22  # bytes looked at at once
_WORDS: Final = 64  # different texts of a list that are looked for at once
_LONGEST: Final = 10  # bytes of a number


_Read = Callable[[int, int], bytes]


def run_end(
    read: _Read, begin: int, end: int, number: int, past: Callable[[_Read, int, int], tuple[int, int]]
) -> int:
    """Where the fields of a ``number`` end that stand one behind another from byte ``begin`` on, in a message up to
    ``end``. ``past(read, at, end)`` is the number of the field at a byte, and where that ends."""
    known: dict[int, Callable[[bytes], int]] = {_FLOATS: _floats, _INTS: _ints, _STRINGS: _Texts()}
    look = known[number]
    at = begin
    while at < end:
        at += look(read(at, min(_BLOCK, end - at)))
        if at < end:  # packed ones, long texts, what a block has cut in two, or another field
            there, stop = past(read, at, end)
            if there != number:
                break
            at = stop
    return at


def _floats(data: bytes) -> int:
    tags = np.frombuffer(data, np.uint8, len(data) // 5 * 5)[::5] == (_FLOATS << 3 | 5)
    return 5 * (len(tags) if tags.all() else int(tags.argmin()))


def _ints(data: bytes) -> int:
    """Tags of one byte and numbers take turns, each up to a byte below 128."""
    every = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(every < 128)
    tags, numbers = last[: len(last) // 2 * 2 : 2], last[1::2]
    good = (every[tags] == _INTS << 3) & (numbers - tags <= _LONGEST)
    good[:1] &= tags[:1] == 0
    good[1:] &= tags[1:] == numbers[:-1] + 1
    many = len(good) if good.all() else int(good.argmin())
    return int(numbers[many - 1]) + 1 if many else 0


class _Texts:
    """Lists of texts that are mostly the same few."""

    def __init__(self) -> None:
        self.words: list[bytes] = []
        self.pattern = re.compile(b"")

    def __call__(self, data: bytes) -> int:
        at = 0
        while (word := _word(data, at)) and (word in self.words or len(self.words) < _WORDS):
            if word not in self.words:
                self.words.append(word)
                self.pattern = re.compile(b"(?:" + b"|".join(map(re.escape, self.words)) + b")*+", re.DOTALL)
            match = self.pattern.match(data, at)
            assert match is not None
            at = match.end()
        return at


def _word(data: bytes, at: int) -> bytes:
    """The field of a short text that begins at a byte; empty for none."""
    head = data[at : at + 2]
    if len(head) < 2 or head[0] != _TEXT or head[1] > 127:
        return b""
    word = data[at : at + 2 + head[1]]
    return word if len(word) == 2 + head[1] else b""


_TEXT: Final = _STRINGS << 3 | 2
