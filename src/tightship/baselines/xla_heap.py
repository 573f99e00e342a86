"""XLA's heap: two orders, each buffer into the smallest free chunk that fits; the smaller heap wins.

Problem: offsets for buffers with known live ranges. Minimized: the arena. Source: XLA's
``GlobalDecreasingSizeBestFitHeap`` under ``ChooseBestHeapAlgorithm``, with its tie-breaks: *spatial* takes the
largest first, then the longest-lived, then the lowest id; *temporal* the longest-lived first, to the last end of
those colocated, then the largest, then the lowest id; among equal heaps the spatial one. The smallest chunk that
fits, after alignment, and the lowest of equals. ``offsets`` gives XLA's own to the byte when it is given its
buffers and live ranges. Guarantee: none. Complexity: O(n log n) set operations in practice. Known limits: greedy;
pinned buffers, which XLA does not have here, are placed first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tightship import _core
from tightship.errors import BadInput
from tightship.plan import Problem, Solution
from tightship.planners.place import orders
from tightship.planners.place.problem import Ints, frame

__all__ = ["GREEDY", "Options", "offsets", "plan"]

PLANNER = "place/xla-heap"
"""Its group and its name on the command line."""

GREEDY: tuple[tuple[orders.Order, bool], ...] = ((orders.xla_spatial, True), (orders.xla_temporal, True))


@dataclass(frozen=True, slots=True)
class Options:
    """No choices."""


def plan(problem: Problem, options: Options | None = None) -> Solution:
    f = frame(problem)
    packings = [f.placer.pack(order(f.arrays), best_fit=best_fit) for order, best_fit in GREEDY]
    return f.solution(min(packings, key=lambda p: p[1])[0], "xla-heap")


def offsets(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    group: npt.ArrayLike | None = None,
    alignment: int = 1,
) -> tuple[Ints, int, str]:
    """Offsets, arena (bytes) and the order that won, ``spatial`` or ``temporal``.

    One entry per buffer, in the order of ids, alive in [lower, upper). Buffers with the same number in ``group`` are
    colocated: they share an offset, each takes the bytes of the largest of them, in its own live range. XLA knows
    such a set by the member that is allocated first, and counts this one's life in the spatial order.
    """
    lo, up, z = (np.ascontiguousarray(x, dtype=np.int64) for x in (lower, upper, size))
    count = len(z)
    own = np.arange(count) if group is None else np.asarray(group)
    if any(c.shape != (count,) for c in (lo, up, z, own)):
        lengths = ", ".join(str(len(c)) for c in (lo, up, z, own))
        raise BadInput(f"lower, upper, size and group have different lengths: {lengths}")
    if (lo >= up).any() or (z < 0).any() or alignment < 1:
        raise BadInput(f"an empty live range, a negative size or alignment {alignment} below 1")
    if not count:
        return np.empty(0, dtype=np.int64), 0, "spatial"
    by_birth = np.lexsort((np.arange(count), lo))
    _, first, of = np.unique(own[by_birth], return_index=True, return_inverse=True)
    sets, head = np.empty(count, dtype=np.int64), by_birth[first]
    sets[by_birth] = of
    most, last = np.zeros(len(head), dtype=np.int64), np.full(len(head), np.iinfo(np.int64).min)
    np.maximum.at(most, sets, z)
    np.maximum.at(last, sets, up)
    unit = np.full(len(head), alignment, dtype=np.int64)
    found = []
    for name, keys in (
        ("spatial", (head, lo[head] - up[head], -most)),
        ("temporal", (head, -most, lo[head] - last)),
    ):
        at, arena = _core.pack_sets(lo, up, sets, most, unit, np.lexsort(keys).astype(np.int64))
        found.append((int(arena), np.asarray(at)[sets], name))
    arena, at, name = min(found, key=lambda f: f[0])
    return at, arena, name
