"""Gaps that play one role in several layers, side by side: a search can copy one layer's decisions to others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence

from tightship.analysis.structure import block_of
from tightship.graph import Graph

__all__ = ["Family", "families"]

Family = tuple[tuple[int, ...], ...]
"""One row per role, with a gap per layer, -1 where a layer has none."""

_NUMBER = re.compile(r"\d+")
_DEPTHS = (1, 2)
"""Layers are modules whose path has this many numbers (``stages.1`` and ``stages.1.layers.0``)."""
_FEW = 3
"""Without names, classes of as many gaps, and at least this many, are taken for rows of one family."""


def families(
    graph: Graph, gaps: Sequence[tuple[int, int, int]], classes: Sequence[Sequence[int]]
) -> tuple[Family, ...]:
    """Layers whose module paths differ in numbers alone, and the gaps in them that differ in the layer alone.

    ``gaps``: storage, where it begins, where it ends; ``classes`` serve where ops have no module paths. A wrong twin
    costs time, never correctness."""
    found = [f for depth in _DEPTHS for f in _named(graph, gaps, depth) if f]
    if found:
        return tuple(dict.fromkeys(found))
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for row in classes:
        if len(row) >= _FEW:
            by_length[len(row)].append(tuple(row))
    return tuple(tuple(rows) for _, rows in sorted(by_length.items()))


def _named(graph: Graph, gaps: Sequence[tuple[int, int, int]], depth: int) -> list[Family]:
    uses = graph.uses
    tables: dict[str, dict[Hashable, dict[str, int]]] = {}
    layers: dict[str, dict[str, None]] = {}
    nth: dict[int, int] = defaultdict(int)
    alike: dict[Hashable, int] = defaultdict(int)
    for g in sorted(range(len(gaps)), key=lambda g: (gaps[g][1], g)):
        s = gaps[g][0]
        op = graph.ops[uses.definer[s]]
        gap, nth[s] = nth[s], nth[s] + 1
        layer = block_of(op.module, depth)
        if not layer:
            continue
        kind = _NUMBER.sub("#", layer)
        same = (op.module[len(layer) :], op.target, op.phase, uses.defines[uses.definer[s]].index(s), gap)
        alike[layer, same] += 1
        layers.setdefault(kind, {})[layer] = None
        tables.setdefault(kind, {}).setdefault((same, alike[layer, same]), {})[layer] = g
    return [
        tuple(tuple(row.get(layer, -1) for layer in layers[kind]) for row in rows.values() if len(row) > 1)
        for kind, rows in tables.items()
        if len(layers[kind]) > 1
    ]
