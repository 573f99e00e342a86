"""Codecs: the packed form of a tensor's bytes, and back to the same bytes.

Each works chunk by chunk, so that it needs no more than a chunk (64 KiB) of scratch, outside torch's allocator.
Packing checks every number it packs: one that the codec cannot give back raises ``BadInput`` and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from tightship.errors import BadInput

__all__ = ["compress", "decompress"]

CHUNK: Final = 1 << 16
"""Elements looked at a time; a multiple of 8, so that every chunk begins with a byte of bits."""

_WORD: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def compress(codec: str, full: Any, packed: Any, place: str = "") -> None:
    """Writes the packed form of ``full`` (one dimension, all of a storage's elements) to ``packed`` (bytes).

    Raises ``BadInput``, naming ``place``, for numbers outside what the codec takes.
    """
    if codec == "bf16":
        packed[: 2 * full.numel()].view(torch.bfloat16).copy_(full)
        return
    target = packed.numpy()
    if codec == "bits":
        _to_bits(_words(full), target, 1, place, "booleans are 0 or 1")
    elif codec == "mask":
        words = _words(full)
        number = words.max(initial=0)
        target[: words.itemsize].view(words.dtype)[0] = number
        _to_bits(
            words, target[words.itemsize :], int(number), place, "a mask holds zeros and one other number"
        )
    else:
        _narrow(full.numpy(), target, np.dtype(codec), place)


def decompress(codec: str, packed: Any, full: Any) -> None:
    """Writes to ``full`` what was packed."""
    if codec == "bf16":
        full.copy_(packed[: 2 * full.numel()].view(torch.bfloat16))
        return
    source = packed.numpy()
    if codec == "bits":
        _from_bits(source, _words(full), 1)
    elif codec == "mask":
        words = _words(full)
        _from_bits(source[words.itemsize :], words, source[: words.itemsize].view(words.dtype)[0])
    else:
        wide = full.numpy()
        np.copyto(wide, source[: wide.size * np.dtype(codec).itemsize].view(codec))


def _words(tensor: Any) -> Any:
    """The elements' bits as unsigned integers, whatever they mean."""
    word = _WORD[tensor.element_size()]
    return tensor.view(torch.uint8).numpy().view(word)


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def _to_bits(words: Any, target: Any, number: int, place: str, rule: str) -> None:
    for part in _chunks(words.size):
        chunk = words[part]
        there = chunk != 0
        if np.count_nonzero(there) != np.count_nonzero(chunk == number) and number:
            raise BadInput(rule, "others among them", place)
        bits = np.packbits(there)
        start = part.start // 8
        target[start : start + bits.size] = bits


def _from_bits(source: Any, words: Any, number: Any) -> None:
    for part in _chunks(words.size):
        start, stop = part.start // 8, -(-part.stop // 8)
        chunk = words[part]
        np.multiply(np.unpackbits(source[start:stop], count=chunk.size), number, out=chunk, dtype=words.dtype)


def _narrow(wide: Any, target: Any, kind: Any, place: str) -> None:
    range_ = np.iinfo(kind)
    if wide.size and not (range_.min <= wide.min() and wide.max() <= range_.max):
        rule = f"what is packed as {kind} lies from {range_.min} to {range_.max}"
        raise BadInput(rule, f"numbers from {wide.min()} to {wide.max()}", place)
    np.copyto(target[: wide.size * kind.itemsize].view(kind), wide, casting="unsafe")
