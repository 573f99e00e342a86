"""Repeated structure: which ops play the same role in different layers.

Two sources, both heuristics for searches only (a wrong group costs time, never correctness): the module path
with its numbers left out, and color refinement (Weisfeiler and Leman, 1968) of the graph of ops, which needs no
names at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tightship.analysis.order import once
from tightship.graph import Graph

__all__ = ["ModuleSums", "block_of", "colors", "layer", "of_any_layer", "pattern", "role", "without_numbers"]

_NUMBER = re.compile(r"\d+")
_NUMBERED = re.compile(r"\.\d+(?=\.|$)")
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def role(graph: Graph, op: int) -> str:
    """Module path without layer numbers, and the op's target; empty when the graph has no module paths."""
    o = graph.ops[op]
    return f"{without_numbers(o.module)}|{o.target}|{o.phase}" if o.module else ""


@lru_cache(maxsize=1 << 16)
def without_numbers(module: str) -> str:
    """A module path with ``#`` in place of each number."""
    return _NUMBER.sub("#", module)


def of_any_layer(module: str) -> str:
    """A module path with ``*`` in place of its first number: modules of a list have one name (``layers.*.mlp``)."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module, count=1)


class ModuleSums:
    """Amounts of modules in ``columns`` columns, each module with all that is inside it; the whole is the empty
    path."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._sums: dict[str, list[float]] = {}

    def add(self, module: str, column: int, amount: float) -> None:
        """Adds to a module and to those that it is in. Paths are as in ``named_modules``."""
        parts = module.split(".") if module else []
        for k in range(len(parts) + 1):
            self._sums.setdefault(".".join(parts[:k]), [0] * self._columns)[column] += amount

    def __iter__(self) -> Iterator[tuple[str, list[float]]]:
        """Each module after the one that it is in; numbers as numbers, whatever their length."""
        return iter(sorted(self._sums.items(), key=lambda item: _path(item[0])))


def _path(module: str) -> list[tuple[bool, int, str]]:
    return (
        [(not p.isdecimal(), len(p) if p.isdecimal() else 0, p) for p in module.split(".")] if module else []
    )


def layer(graph: Graph, op: int) -> str:
    """The outermost numbered part of the module path (``transformer.h.3``), or empty."""
    return _layer(graph.ops[op].module)


@lru_cache(maxsize=1 << 16)
def _layer(module: str) -> str:
    m = _LAYER.match(module)
    return m.group(1) if m else ""


@lru_cache(maxsize=1 << 16)
def block_of(module: str, depth: int) -> str:
    """The module path up to its ``depth``-th number; empty if it has fewer."""
    ends = [m.end() for m in _NUMBERED.finditer(module)]
    return module[: ends[depth - 1]] if len(ends) >= depth > 0 else ""


def colors(graph: Graph, rounds: int = 2) -> tuple[int, ...]:
    """A color per op: equal colors have the same target, sizes, and neighborhood up to ``rounds`` steps.

    Neighborhoods are compared by 64-bit hashes."""
    found: tuple[int, ...] = once(graph, f"_colors_{rounds}", lambda g: _colors(g, rounds))
    return found


def _colors(graph: Graph, rounds: int) -> tuple[int, ...]:
    facts = graph.uses.facts
    ids: dict[object, int] = {}
    start, read = facts.reads
    bounds, made_by = facts.defines
    sizes, ends = graph.columns.size[made_by].tolist(), bounds.tolist()
    kinds = (
        ids.setdefault((o.target, o.phase, r, *sizes[a:b]), len(ids))
        for o, r, a, b in zip(graph.ops, np.diff(start).tolist(), ends, ends[1:], strict=False)
    )
    now = _hash(np.fromiter(kinds, np.uint64, len(graph.ops)))
    reader = np.repeat(np.arange(len(now)), np.diff(start))
    place = _hash((np.arange(len(read)) - start[reader]).astype(np.uint64))
    definer = facts.definer[read]
    for _ in range(rounds):
        source = np.where(definer >= 0, now[definer], np.uint64(0))
        inputs, users = np.zeros_like(now), np.zeros_like(now)
        np.add.at(inputs, reader, _hash(source ^ place))
        made = definer >= 0
        np.add.at(users, definer[made], _hash(now[reader[made]]))
        now = _hash(now ^ _hash(inputs ^ _hash(users)))
    _, color = np.unique(now, return_inverse=True)
    return tuple(color.tolist())


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood, 2014): equal numbers stay equal, others look random."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


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
