"""What the verifier has to know about a graph, derived from its ops and values alone.

This repeats on purpose what ``Graph.uses`` and ``simulate`` say: a mistake there must not pass as right here.

The `Ledger` collects violations: all kinds of them, but of each kind only as many as a person reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tightship.errors import Violation
from tightship.graph import Graph, Op, alignment_of

__all__ = ["PER_CODE", "Facts", "Ledger", "extra_of", "facts_of", "unplanned_need"]


PER_CODE = 20
"""Violations kept of one code: a flood of one kind must not hide another."""


class Ledger:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._counts: Counter[str] = Counter()

    def add(self, code: str, step: int, subjects: tuple[str, ...], message: str) -> None:
        self._counts[code] += 1
        if self._counts[code] <= PER_CODE:
            self.violations.append(Violation(code, step, subjects, message))


@dataclass(frozen=True)
class Facts:
    """``sees[o]`` maps each storage op ``o`` reads to the number of writes it must have behind it; ``makes``
    and ``writes`` are the storages an op brings into being and those it writes in place; ``views[o]`` are the
    values op ``o`` reads that another op made as views, without making or writing their storage, each with that op;
    ``maker[s]`` is -1 for the caller's storages; ``final[s]`` counts all writes; ``extra[o]`` is what op ``o``
    needs while it runs beyond its results. Offsets, and sizes as they are placed, are multiples of ``alignment``."""

    sees: list[dict[int, int]]
    makes: list[list[int]]
    writes: list[list[int]]
    views: list[dict[int, int]]
    maker: list[int]
    final: list[int]
    extra: list[int]
    static: frozenset[int]
    kept: frozenset[int]
    static_bytes: int
    alignment: int


def facts_of(graph: Graph, inner: dict[int, int] | None = None) -> Facts:
    """``inner`` remembers the needs of called graphs by identity, as one graph may be called many times."""
    inner = {} if inner is None else inner
    count = len(graph.storages)
    static = frozenset(graph.values[v].storage for v in graph.inputs)
    final, maker = [0] * count, [-1] * count
    known = set(static)
    viewer: dict[int, int] = {}  # value -> the op it is a view by
    views: list[dict[int, int]] = []
    sees: list[dict[int, int]] = []
    makes: list[list[int]] = []
    writes: list[list[int]] = []
    home = [v.storage for v in graph.values]
    for o, op in enumerate(graph.ops):
        touched = dict.fromkeys([home[v] for v in op.outputs])
        new = [s for s in touched if s not in known]
        used = dict.fromkeys([*[home[v] for v in op.inputs], *op.mutates])
        views.append({v: viewer[v] for v in op.inputs if v in viewer})
        sees.append({s: final[s] for s in used if s not in new})
        makes.append(new)
        writes.append([s for s in dict.fromkeys(op.mutates) if s not in new])
        for s in new:
            maker[s] = o
        own = {*new, *writes[-1]}
        for v in op.outputs:
            if home[v] not in own:
                viewer[v] = o
        known.update(new)
        for s in (*new, *writes[-1]):
            final[s] += 1
    kept = frozenset(graph.values[v].storage for v in graph.outputs)
    extra = [extra_of(op, inner) for op in graph.ops]
    alignment = max((alignment_of(op.device) for op in graph.ops), default=alignment_of("cpu"))
    bytes_ = sum(graph.storages[s].size for s in static)
    return Facts(sees, makes, writes, views, maker, final, extra, static, kept, bytes_, alignment)


def unplanned_need(graph: Graph, facts: Facts) -> int:
    """The most bytes a graph uses beyond its inputs: in its own order, freeing after last use."""
    size = [s.size for s in graph.storages]
    last = [-1] * len(size)
    for o in range(len(graph.ops)):
        for s in (*facts.sees[o], *facts.makes[o]):
            last[s] = o
    stay = facts.static | facts.kept
    live = peak = 0
    for o in range(len(graph.ops)):
        for s in facts.makes[o]:
            live += size[s]
        peak = max(peak, live + facts.extra[o])
        for s in (*facts.sees[o], *facts.makes[o]):  # no storage is in both
            if last[s] == o and s not in stay:
                live -= size[s]
    return peak


def _need(graph: Graph, inner: dict[int, int]) -> int:
    if id(graph) not in inner:
        inner[id(graph)] = unplanned_need(graph, facts_of(graph, inner))
    return inner[id(graph)]


def extra_of(op: Op, inner: dict[int, int]) -> int:
    """What an op needs while it runs beyond its results; ``inner`` as for `facts_of`."""
    return op.workspace + max((_need(g, inner) for g in op.calls), default=0)


def place_of(op: Op) -> str:
    return f"{op.name} ({op.source})" if op.source else op.name
