"""Orders in which greedy placement takes buffers. Each is a permutation; ties go by lower, then by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tightship import _core
from tightship.planners.place.problem import Arrays, Ints

__all__ = [
    "SKIES",
    "Order",
    "by_area",
    "by_breadth",
    "by_conflicts",
    "by_length",
    "by_size",
    "by_size_then_conflicts",
    "by_size_then_start",
    "by_start",
    "given",
    "peak_first",
    "skyline",
    "xla_spatial",
    "xla_temporal",
]

_AT_ONCE = 100_000
"""Entries that are sorted by all keys in one call."""

Order = Callable[[Arrays], Ints]


def _sorted(*keys: npt.NDArray[Any]) -> Ints:
    if len(keys[0]) <= _AT_ONCE:
        return np.lexsort(keys[::-1]).astype(np.int64)
    order = np.arange(len(keys[0]), dtype=np.int64)
    for key in keys[::-1]:  # key by key, so that Ctrl-C need not wait for all
        order = order[np.argsort(key[order], kind="stable")]
    return order


def given(a: Arrays) -> Ints:
    return np.arange(a.count, dtype=np.int64)


def by_size(a: Arrays) -> Ints:
    """Largest first, longest first among equals."""
    return _sorted(-a.size, a.lower - a.upper, a.lower)


def by_size_then_start(a: Arrays) -> Ints:
    """Largest first, earliest first among equals (networks have many equals)."""
    return _sorted(-a.size, a.lower)


def by_start(a: Arrays) -> Ints:
    """As they come alive, largest first among equals."""
    return _sorted(a.lower, -a.size)


def by_length(a: Arrays) -> Ints:
    """Longest-lived first, largest first among equals."""
    return _sorted(a.lower - a.upper, -a.size, a.lower)


def conflicts(a: Arrays) -> Ints:
    """For every buffer, how many are alive at the same time as it (itself included)."""
    begun = np.searchsorted(np.sort(a.lower), a.upper)
    ended = np.searchsorted(np.sort(a.upper), a.lower, side="right")
    return (begun - ended).astype(np.int64)


def by_conflicts(a: Arrays) -> Ints:
    """Most conflicts first, largest first among equals."""
    return _sorted(-conflicts(a), -a.size, a.lower)


def by_size_then_conflicts(a: Arrays) -> Ints:
    """Largest first, most conflicts among equals, then the last given."""
    return _sorted(-a.size, -conflicts(a), -given(a))


def by_area(a: Arrays) -> Ints:
    """Largest product of size and conflicts first: large buffers that are in many others' way."""
    return _sorted(-_area(a), a.lower)


def by_breadth(a: Arrays) -> Ints:
    """Those alive at the broadest time first (breadth: bytes alive), largest first among them; and so on."""
    return _sorted(_breadth_rank(a), -a.size, a.lower)


def peak_first(a: Arrays, stack: str, rest: str) -> Ints:
    """Those alive at the broadest time first, stacked by one key, then the others by another.

    Keys: ``size`` and ``area`` (largest first), ``length`` (longest), ``start`` (earliest), ``end`` (latest).
    """
    keys = {
        "size": -a.size,
        "area": -_area(a),
        "length": a.lower - a.upper,
        "start": a.lower,
        "end": -a.upper,
    }
    at_peak = _breadth_rank(a) == 0
    return _sorted(~at_peak, np.where(at_peak, keys[stack], keys[rest]), a.lower)


def xla_spatial(a: Arrays) -> Ints:
    """Largest first, then longest-lived, then as given."""
    return _sorted(-a.size, a.lower - a.upper)


def xla_temporal(a: Arrays) -> Ints:
    """Longest-lived first, then largest, then as given."""
    return _sorted(a.lower - a.upper, -a.size)


SKIES = ("longest", "largest", "snug")


def skyline(a: Arrays, rule: str) -> Ints:
    """The order in which a skyline is built; ``rule``: whom its lowest stretch takes, one of ``SKIES``."""
    placer = _core.Placer(a.lower, a.upper, a.size, a.alignment, a.pinned)
    return np.asarray(placer.skyline(SKIES.index(rule)))


def _area(a: Arrays) -> npt.NDArray[np.float64]:
    return a.size.astype(np.float64) * conflicts(a)


def _breadth_rank(a: Arrays) -> Ints:
    """For every buffer, the rank of the broadest time it is alive at: 0 for those alive at the peak."""
    if not a.count:
        return given(a)
    times = np.unique(a.lower)  # the bytes alive grow at no other time
    first, last = np.searchsorted(times, a.lower), np.searchsorted(times, a.upper)
    change = np.zeros(len(times) + 1, dtype=np.int64)
    np.add.at(change, first, a.size)
    np.add.at(change, last, -a.size)
    rank = np.empty(len(times), dtype=np.int64)
    rank[np.argsort(-np.cumsum(change)[:-1], kind="stable")] = np.arange(len(times))
    return _range_min(rank, first, last)


def _range_min(values: Ints, first: Ints, last: Ints) -> Ints:
    """min(values[first:last]) for every pair, from minima over ranges of powers of two."""
    level = np.frexp((last - first).astype(np.float64))[1] - 1
    result = np.empty(len(first), dtype=np.int64)
    row = values
    for k in range(int(level.max(initial=0)) + 1):
        at = level == k
        result[at] = np.minimum(row[first[at]], row[last[at] - (1 << k)])
        row = np.minimum(row[: -(1 << k)], row[1 << k :])
    return result
