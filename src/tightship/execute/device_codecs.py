"""Codecs where bytes lie on a GPU: torch ops that write where they are told and ask for no memory of their own.

Bits are packed by planes, not by neighbours: bit k of byte j is element k·m + j of n, m = ⌈n/8⌉. So each of the eight
passes reads and writes bytes side by side. Nothing here asks the device for a number, which would make the host
wait: what a codec takes follows from the graph, and `check` looks once. Dropout masks of floats (``mask``), whose
number would have to be found first, are not packed here; PyTorch's dropout on CUDA makes masks of booleans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported

__all__ = ["PACKED", "check", "compress", "decompress"]

PACKED: Final = ("bits", "uint8", "int8", "uint16", "int16", "uint32", "int32", "bf16")
"""The codecs there are."""

_AS: Final = {
    "uint8": torch.uint8, "int8": torch.int8, "uint16": torch.int16, "int16": torch.int16,
    "uint32": torch.int32, "int32": torch.int32, "bf16": torch.bfloat16,
}  # fmt: skip
"""What numbers are cast to: the bits of an unsigned type, for torch has few ops on those."""
_UNSIGNED: Final = {"uint16": (1 << 16) - 1, "uint32": (1 << 32) - 1}
_RANGES: Final = {
    c: (0, (1 << n) - 1) if c[0] == "u" else (-(1 << n - 1), (1 << n - 1) - 1)
    for c in PACKED
    if "int" in c
    for n in (int(c.lstrip("uint")),)
}


def compress(codec: str, full: Any, packed: Any) -> None:
    """Writes the packed form of ``full`` (one dimension, all of a storage's elements) to ``packed`` (bytes)."""
    if codec == "bits":
        for bit, elements, bytes_ in _planes(full.view(torch.uint8), packed):
            if bit:
                bytes_.add_(elements, alpha=1 << bit)
            else:
                bytes_.copy_(elements)
        return
    _cast(codec, full, packed).copy_(full)


def decompress(codec: str, packed: Any, full: Any) -> None:
    """Writes to ``full`` what was packed."""
    if codec == "bits":
        whole = full.view(torch.uint8)
        for bit, elements, bytes_ in _planes(whole, packed):
            torch.bitwise_right_shift(bytes_, bit, out=elements)
        whole.bitwise_and_(1)
        return
    full.copy_(_cast(codec, full, packed))
    if codec in _UNSIGNED and full.element_size() > _AS[codec].itemsize:
        full.bitwise_and_(_UNSIGNED[codec])


def check(codec: str, full: Any, place: str = "") -> None:
    """Raises ``BadInput``, naming ``place``, for numbers that the codec would not give back, ``Unsupported`` for a
    codec that is not here. Waits for the device, and asks for memory."""
    if codec not in PACKED:
        raise Unsupported(f"packing with {codec!r} on a GPU", "it would have to wait for the device")
    if not full.numel() or codec == "bf16":
        return
    numbers = full.view(torch.uint8) if codec == "bits" else full
    low, high = (int(x) for x in torch.aminmax(numbers))
    least, most = _RANGES.get(codec, (0, 1))
    if low < least or high > most:
        rule = f"what is packed as {codec} lies from {least} to {most}"
        raise BadInput(rule, f"numbers from {low} to {high}", place)


def _cast(codec: str, full: Any, packed: Any) -> Any:
    dtype = _AS[codec]
    return packed[: full.numel() * dtype.itemsize].view(dtype)


def _planes(whole: Any, packed: Any) -> Iterator[tuple[int, Any, Any]]:
    """(bit, its elements, the bytes it is in)."""
    count = whole.numel()
    width = -(-count // 8)
    for bit in range(8):
        elements = whole[bit * width : min((bit + 1) * width, count)]
        if elements.numel():
            yield bit, elements, packed[: elements.numel()]
