"""Repeated structure: which ops play the same role in different layers.

Two sources, both heuristics for searches only (a wrong group costs time, never correctness): the module path
with its numbers left out, and color refinement (Weisfeiler and Leman, 1968) of the graph of ops, which needs no
names at all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from tightship.graph import Graph

__all__ = ["block_of", "colors", "layer", "pattern", "role"]

_NUMBER = re.compile(r"\d+")
_NUMBERED = re.compile(r"\.\d+(?=\.|$)")
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def role(graph: Graph, op: int) -> str:
    """Module path without layer numbers, and the op's target; empty when the graph has no module paths."""
    o = graph.ops[op]
    return f"{_NUMBER.sub('#', o.module)}|{o.target}|{o.phase}" if o.module else ""


def layer(graph: Graph, op: int) -> str:
    """The outermost numbered part of the module path (``transformer.h.3``), or empty."""
    m = _LAYER.match(graph.ops[op].module)
    return m.group(1) if m else ""


def block_of(module: str, depth: int) -> str:
    """The module path up to its ``depth``-th number; empty if it has fewer."""
    ends = [m.end() for m in _NUMBERED.finditer(module)]
    return module[: ends[depth - 1]] if len(ends) >= depth > 0 else ""


def colors(graph: Graph, rounds: int = 2) -> tuple[int, ...]:
    """A color per op: equal colors have the same target, sizes, and neighborhood up to ``rounds`` steps."""
    uses = graph.uses
    size = [s.size for s in graph.storages]
    ids: dict[object, int] = {}

    def color(key: object) -> int:
        return ids.setdefault(key, len(ids))

    now = [
        color((o.target, o.phase, tuple(size[s] for s in uses.defines[k]), len(uses.reads[k])))
        for k, o in enumerate(graph.ops)
    ]
    for _ in range(rounds):
        into: dict[int, list[int]] = defaultdict(list)
        for k in range(len(graph.ops)):
            for s in uses.reads[k]:
                d = uses.definer[s]
                if d >= 0:
                    into[d].append(now[k])
        now = [
            color(
                (
                    now[k],
                    tuple(now[uses.definer[s]] if uses.definer[s] >= 0 else -1 for s in uses.reads[k]),
                    tuple(sorted(into[k])),
                )
            )
            for k in range(len(graph.ops))
        ]
    return tuple(now)


def pattern(names: Sequence[str]) -> str:
    """Many names as one (``blocks.*.mlp:gelu``): where they differ in numbers alone, ``*`` in place of those, else
    those like the first and how many more there are."""
    first = names[0]
    if len(names) == 1:
        return first
    alike = [name for name in names if _NUMBER.sub("#", name) == _NUMBER.sub("#", first)]
    if len(alike) < len(names):
        return f"{pattern(alike)} and {len(names) - len(alike)} more"
    rows = [_NUMBER.findall(name) for name in names]
    same = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
    numbers = iter(zip(rows[0], same, strict=True))

    def put(_: re.Match[str]) -> str:
        number, kept = next(numbers)
        return number if kept else "*"

    return _NUMBER.sub(put, first)
