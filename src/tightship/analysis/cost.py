"""What an op costs where it cannot be measured: the roofline of a small machine."""

from __future__ import annotations

from typing import Final

__all__ = ["BANDWIDTH", "FLOPS", "OVERHEAD", "modeled_time"]

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
