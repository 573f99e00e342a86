"""Codecs: the compressed form of a tensor's bytes, and back to the same bytes, on a CPU or a GPU.

On a CPU numpy works chunk by chunk, with no more than a chunk of scratch outside torch's allocator, and checks every
number: one that the codec cannot give back raises ``BadInput`` and nothing is lost. On a GPU torch's ops ask for no
memory, and bits lie in planes: bit k of byte j is element k·m + j of n, m = ⌈n/8⌉, so that each of the eight passes
reads and writes bytes side by side. Nothing there asks the device for a number, which would make the host wait:
sizes follow from the graph, and `check` looks once. Dropout masks of floats (``mask``), whose number would have to be
found first, are not compressed on a GPU; PyTorch's dropout on CUDA makes masks of booleans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from tightship.errors import BadInput, Unsupported
from tightship.machine import INTEGERS

__all__ = ["ON_DEVICE", "check", "compress", "compress_by_torch", "decompress", "decompress_by_torch"]

CHUNK: Final = 1 << 16
"""Elements looked at a time; a multiple of 8, so that every chunk begins with a byte of bits."""

_CAST: Final = {
    "uint8": torch.uint8, "int8": torch.int8, "uint16": torch.int16, "int16": torch.int16,
    "uint32": torch.int32, "int32": torch.int32, "bf16": torch.bfloat16,
}  # fmt: skip
"""What numbers are cast to: the bits of an unsigned type, for torch has few ops on those."""
_UNSIGNED: Final = {"uint16": (1 << 16) - 1, "uint32": (1 << 32) - 1}
_WORD: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

ON_DEVICE: Final = ("bits", *_CAST)
"""The codecs there are on a GPU."""


def compress(codec: str, full: Any, packed: Any, place: str = "") -> None:
    """Writes the compressed form of ``full`` (one dimension, all of a storage's elements) to ``packed`` (bytes).

    On a CPU raises ``BadInput``, naming ``place``, for numbers that the codec would not give back.
    """
    if full.device.type != "cpu":
        compress_by_torch(codec, full, packed)
    elif codec == "bf16":
        _cast(codec, full, packed).copy_(full)
    elif codec == "bits":
        _to_bits(_words(full), packed.numpy(), 1, "booleans other than 0 or 1", place)
    elif codec == "mask":
        words, target = _words(full), packed.numpy()
        number = words.max(initial=0)
        target[: words.itemsize].view(words.dtype)[0] = number
        fault = "a mask of more than zeros and one other number"
        _to_bits(words, target[words.itemsize :], int(number), fault, place)
    else:
        wide = full.numpy()
        if wide.size:
            _check_range(codec, wide.min(), wide.max(), place)
        target = packed.numpy()[: wide.size * np.dtype(codec).itemsize]
        np.copyto(target.view(codec), wide, casting="unsafe")


def decompress(codec: str, packed: Any, full: Any) -> None:
    """Writes to ``full`` what was compressed."""
    if full.device.type != "cpu":
        decompress_by_torch(codec, packed, full)
    elif codec == "bf16":
        full.copy_(_cast(codec, full, packed))
    elif codec == "bits":
        _from_bits(packed.numpy(), _words(full), 1)
    elif codec == "mask":
        words, source = _words(full), packed.numpy()
        _from_bits(source[words.itemsize :], words, source[: words.itemsize].view(words.dtype)[0])
    else:
        wide = full.numpy()
        np.copyto(wide, packed.numpy()[: wide.size * np.dtype(codec).itemsize].view(codec))


def compress_by_torch(codec: str, full: Any, packed: Any) -> None:
    """`compress` by torch ops that write where they are told: for a GPU, and right on a CPU."""
    if codec != "bits":
        _cast(codec, full, packed).copy_(full)
        return
    for bit, elements, target in _planes(full.view(torch.uint8), packed):
        if bit:
            target.add_(elements, alpha=1 << bit)
        else:
            target.copy_(elements)


def decompress_by_torch(codec: str, packed: Any, full: Any) -> None:
    """The inverse of `compress_by_torch`."""
    if codec == "bits":
        whole = full.view(torch.uint8)
        for bit, elements, source in _planes(whole, packed):
            torch.bitwise_right_shift(source, bit, out=elements)
        whole.bitwise_and_(1)
        return
    full.copy_(_cast(codec, full, packed))
    if codec in _UNSIGNED and full.element_size() > _CAST[codec].itemsize:
        full.bitwise_and_(_UNSIGNED[codec])


def check(codec: str, full: Any, place: str = "") -> None:
    """Raises ``BadInput``, naming ``place``, for numbers on a GPU that the codec would not give back, ``Unsupported``
    for a codec that is not there. Waits for the device, and asks for memory."""
    if codec not in ON_DEVICE:
        raise Unsupported(f"compressing with {codec!r} on a GPU", "it would have to wait for the device")
    if full.numel() and codec != "bf16":
        numbers = full.view(torch.uint8) if codec == "bits" else full
        low, high = torch.aminmax(numbers)
        _check_range(codec, int(low), int(high), place)


def _check_range(codec: str, low: int, high: int, place: str) -> None:
    _, least, most = (1, 0, 1) if codec == "bits" else INTEGERS[codec]
    if low < least or high > most:
        fault = f"numbers from {low} to {high} cannot be compressed as {codec}, which holds {least} to {most}"
        raise BadInput(fault, place=place)


def _cast(codec: str, full: Any, packed: Any) -> Any:
    dtype = _CAST[codec]
    return packed[: full.numel() * dtype.itemsize].view(dtype)


def _planes(whole: Any, packed: Any) -> Iterator[tuple[int, Any, Any]]:
    """(bit, its elements, the bytes it is in)."""
    count = whole.numel()
    width = -(-count // 8)
    for bit in range(8):
        elements = whole[bit * width : min((bit + 1) * width, count)]
        if elements.numel():
            yield bit, elements, packed[: elements.numel()]


def _words(tensor: Any) -> Any:
    """The elements' bits as unsigned integers, whatever they mean."""
    return tensor.view(torch.uint8).numpy().view(_WORD[tensor.element_size()])


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def _to_bits(words: Any, target: Any, number: int, fault: str, place: str) -> None:
    for part in _chunks(words.size):
        chunk = words[part]
        set_ = chunk != 0
        if np.count_nonzero(set_) != np.count_nonzero(chunk == number) and number:
            raise BadInput(f"{fault} cannot be compressed to bits", place=place)
        bits = np.packbits(set_)
        start = part.start // 8
        target[start : start + bits.size] = bits


def _from_bits(source: Any, words: Any, number: Any) -> None:
    for part in _chunks(words.size):
        start, stop = part.start // 8, -(-part.stop // 8)
        chunk = words[part]
        np.multiply(np.unpackbits(source[start:stop], count=chunk.size), number, out=chunk, dtype=words.dtype)
