"""Machine: what copies and codecs cost here, in bytes per second.

A graph carries the machine its times are for: measured figures come from `execute`, the defaults model a
laptop. Seconds of a transfer are ``latency + bytes / rate``, bytes those of the full form. A transfer on a stream of
its own takes ``begin + bytes * beside`` seconds from the ops as well: who runs them begins it, and on a CPU it shares
cores and memory with them. Modeled, engines copy, and that is nothing.

What an op costs where it cannot be measured: the roofline of a small machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tightship.errors import BadInput

__all__ = [
    "BANDWIDTH",
    "CODECS",
    "FLOPS",
    "INTEGERS",
    "LOSSY",
    "MODELED",
    "OVERHEAD",
    "Machine",
    "modeled_time",
]


FLOPS: Final = 5e10
"""Floating-point operations per second that are assumed: a laptop core or two in single precision."""
BANDWIDTH: Final = 1e10
"""Bytes per second that a kernel is assumed to read and write."""
OVERHEAD: Final = 5e-6
"""Seconds added to every op."""


def modeled_time(
    flops: int,
    traffic: int,
    *,
    rate: float = FLOPS,
    bandwidth: float = BANDWIDTH,
    overhead: float = OVERHEAD,
) -> float:
    """Seconds of an op with so many floating-point operations and so many bytes read and written: the longer of
    the two (Williams et al. 2009), plus ``overhead``."""
    return max(flops / rate, traffic / bandwidth) + overhead


INTEGERS: Final = {
    "uint8": (8, 0, (1 << 8) - 1),
    "int8": (8, -(1 << 7), (1 << 7) - 1),
    "int16": (16, -(1 << 15), (1 << 15) - 1),
    "uint16": (16, 0, (1 << 16) - 1),
    "int32": (32, -(1 << 31), (1 << 31) - 1),
    "uint32": (32, 0, (1 << 32) - 1),
}
"""Codecs of integers within a known range: bits of each, and the least and greatest that they hold. Narrow before
wide: planners take the first that fits."""

CODECS = ("bits", "mask", *INTEGERS, "bf16")
"""How bytes are packed. ``bits``: booleans, one bit each. ``mask``: zeros and one other number (a dropout mask),
one bit each and the number. ``INTEGERS``: integers in fewer bits. ``bf16``: single precision rounded to bfloat16."""

LOSSY = ("bf16",)
"""Codecs that do not give back the bits they were given: used only on request."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``offload`` and ``fetch``: bytes per second to and from the host pool; ``latency``: seconds that each copy
    of a storage takes besides; ``begin`` and ``beside``: seconds that stream 0 loses for each copy of a storage and
    for each byte copied beside it; ``pack`` and ``unpack``: bytes per second of each of ``CODECS``, in their order;
    ``state``: seconds to save or to set the random state. ``measured``: here, rather than modeled."""

    offload: float = 1.6e10
    fetch: float = 1.6e10
    latency: float = 2e-5
    pack: tuple[float, ...] = (4e9,) * len(CODECS)
    unpack: tuple[float, ...] = (4e9,) * len(CODECS)
    state: float = 2e-5
    measured: bool = False
    begin: float = 0.0
    beside: float = 0.0

    def __post_init__(self) -> None:
        for rates in (self.pack, self.unpack):
            if len(rates) != len(CODECS):
                rule = f"{len(rates)} rates for {len(CODECS)} codecs: {', '.join(CODECS)}"
                raise BadInput(rule, place="Machine")

    def lost(self, nbytes: int) -> float:
        """Seconds of stream 0 for the copy of one storage of ``nbytes`` on another stream."""
        return self.begin + nbytes * self.beside

    def seconds(self, kind: str, nbytes: int, codec: str = "") -> float:
        """Of one storage of ``nbytes`` in a step of ``kind`` offload, fetch, compress or decompress. A codec not
        named takes as long as the slowest."""
        if kind in ("offload", "fetch"):
            return self.latency + nbytes / (self.offload if kind == "offload" else self.fetch)
        rates = self.pack if kind == "compress" else self.unpack
        return nbytes / (rates[CODECS.index(codec)] if codec in CODECS else min(rates))


MODELED = Machine()
