"""Regions of a graph that may be computed patch by patch, and which of them to take for a limit of bytes.

An op with a `Window` makes each row (index of dimension 2: rows of images, steps of sequences) of its result from a
few rows of what it reads. A region is a run of such ops between two points at which little is in memory: everything
made inside is needed inside alone but for one result, whose rows are computed slice by slice. Neighboring slices need
some rows twice (the halo), which are computed twice.

Problem: regions and numbers of slices with the fewest operations more whose bytes are within a limit. Measure: bytes
of storages, with a part of what an op takes for itself; operations. Source: patch-based inference of MCUNetV2
(Lin et al., NeurIPS 2021) and the fusion graph of msf-CNN (Huang and Baccelli, 2025), of which this is the shortest
path. Guarantee: the best of regions between the points that are looked at, in the graph's order of ops. Known limits:
slices along one dimension; rows of the halo are computed again and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tightship.cached import cached_property
from tightship.graph import Graph

__all__ = ["DIM", "Finder", "Patches", "Region", "Rows", "Take", "Window", "bounds_of", "made_rows"]

DIM = 2
"""The dimension that is cut."""

_COUNTS = (2, 3, 4, 6, 7, 8, 12, 14, 16, 28, 32, 56)
"""Slices that are tried; and as many as there are rows."""
_MOST = 1.0
"""A region is not cut into slices that take more operations beyond those of the whole than so many times these."""
_STEP = 90
"""The next choice needs so many hundredths of the bytes, beside the static set, at most."""
_NEAR = 2
"""Slices at each border that are reckoned by themselves."""
_POINTS = 64
"""Points between which regions are looked for, those with the fewest bytes."""

Rows = tuple[int, int]
"""From one row up to another, half-open."""


def bounds_of(units: int, slices: int) -> list[Rows]:
    """Where slices begin and end, in units; they differ by one unit at most."""
    ends = [units * i // slices for i in range(slices + 1)]
    return list(pairwise(ends))


@dataclass(frozen=True)
class Take:
    """What one slice of an op is computed from: rows ``start`` up to ``stop`` of what it reads, with ``before`` and
    ``after`` rows of padding; the first ``skip`` rows of what comes out, and those beyond what is wanted, are not
    the slice's. ``made``: how many come out."""

    start: int
    stop: int
    before: int
    after: int
    skip: int
    made: int


@dataclass(frozen=True)
class Window:
    """Rows of an operand that a row of the result needs: ``kernel`` of them, ``dilation`` apart, from ``stride``
    times the row less ``before``. ``after``: rows of padding behind the last. ``even``: an op pads both ends alike or
    none. ``length``: rows of the operand, ``made`` those of the result."""

    length: int
    made: int
    kernel: int = 1
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    even: bool = True

    @property
    def pointwise(self) -> bool:
        return (self.kernel, self.stride, self.before, self.after) == (1, 1, 0, 0)

    @property
    def extent(self) -> int:
        """Rows from the first that a row of the result needs to the last."""
        return (self.kernel - 1) * self.dilation + 1

    def take(self, wanted: Rows) -> Take:
        """What rows ``wanted`` of the result are computed from."""
        a, b = wanted
        start, stop = a * self.stride - self.before, (b - 1) * self.stride - self.before + self.extent
        before, after = max(0, -start), max(0, stop - self.length)
        skip, start, stop = 0, max(0, start), min(stop, self.length)
        if (before or after) and self.even:  # padded at both ends, whichever is meant
            if a * self.stride < self.before:
                skip, start = a, 0
            else:
                first = max(0, a - -(-self.before // self.stride))
                skip, start = a - first, first * self.stride
            before = after = self.before
        made = (stop - start + before + after - self.extent) // self.stride + 1
        return Take(start, stop, before, after, skip, made)


@dataclass(frozen=True, eq=False)
class Region:
    """Ops from ``first`` up to ``stop``, computed slice by slice of the ``rows`` of what they make together, the
    storage ``end``. ``windows``: by op, and by the storages that it reads in slices."""

    first: int
    stop: int
    end: int
    rows: int
    windows: Mapping[int, Mapping[int, Window]]

    @property
    def ops(self) -> range:
        return range(self.first, self.stop)


@dataclass(frozen=True)
class Patches:
    """Which regions are computed in how many slices, in order; what that needs by this reckoning, and the
    operations that it takes beyond those of the whole."""

    slices: tuple[tuple[Region, int], ...]
    peak: int
    extra: int


def made_rows(graph: Graph, k: int, wanted: Mapping[int, Rows]) -> Rows | None:
    """The rows of what an op makes or writes of which some are wanted; None without any."""
    rows = [wanted[s] for s in (*graph.uses.defines[k], *graph.uses.mutates[k]) if s in wanted]
    return (min(a for a, _ in rows), max(b for _, b in rows)) if rows else None


OpWindows = Callable[[int], "Mapping[int, Window] | None"]
"""The windows of an op by the storages that it reads in rows, of which one may be the one that it writes in place;
None where it cannot be computed in rows."""


def _typical(parts: list[Rows]) -> list[tuple[Rows, int]]:
    """Some slices, and how many there are like each: near the borders, and one between, the largest."""
    inner = parts[_NEAR:-_NEAR]
    if not inner:
        return [(part, 1) for part in parts]
    largest = max(inner, key=lambda part: part[1] - part[0])
    return [*((part, 1) for part in (*parts[:_NEAR], *parts[-_NEAR:])), (largest, len(inner))]


class Finder:
    """What regions there are in a graph, in its order of ops. ``joins``: slices stay until they are joined, rather
    than that each is written into its place."""

    def __init__(self, graph: Graph, windows: OpWindows, *, joins: bool = False) -> None:
        self.graph, self._windows, self.joins = graph, windows, joins
        self.size = [s.size for s in graph.storages]
        self.last = [-1] * len(graph.storages)
        self.first = [len(graph.ops)] * len(graph.storages)
        for k in range(len(graph.ops)):
            for s in (*graph.uses.reads[k], *graph.uses.defines[k]):
                self.last[s] = k
                self.first[s] = min(self.first[s], k)
        for s in graph.static:
            self.first[s] = -1
        for s in graph.kept:
            self.last[s] = len(graph.ops)
        self._banned: set[tuple[int, int, int]] = set()
        self._costs: dict[tuple[int, int], list[tuple[int, int, Region, int]]] = {}

    @cached_property
    def windows(self) -> list[Mapping[int, Window] | None]:
        return [self._windows(k) for k in range(len(self.graph.ops))]

    @cached_property
    def moving(self) -> list[int]:
        """Storages that come and go, in order."""
        static = self.graph.static
        return [s for s in range(len(self.size)) if s not in static and self.size[s]]

    @cached_property
    def needs(self) -> list[int]:
        """Bytes while each op runs as a whole."""
        rows = [self.graph.static_bytes + op.workspace for op in self.graph.ops]
        for s in self.moving:
            for k in range(self.first[s], min(self.last[s], len(rows) - 1) + 1):
                rows[k] += self.size[s]
        return rows

    @cached_property
    def between(self) -> list[int]:
        """Bytes of what is in memory before each op, and in the end."""
        rows = [0] * (len(self.graph.ops) + 1)
        for s in self.moving:
            for t in range(self.first[s] + 1, min(self.last[s], len(rows) - 1) + 1):
                rows[t] += self.size[s]
        return rows

    @cached_property
    def points(self) -> list[int]:
        """Where regions may begin and end: before ops, where no more is in memory than before or behind."""
        b, n = self.between, len(self.graph.ops)
        runs = [t for t in range(n + 1) if t == 0 or b[t] != b[t - 1]]
        around = [-1, *(b[t] for t in runs), -1]
        near = zip(around, around[1:], around[2:], strict=False)
        found = [t for t, (before, here, after) in zip(runs, near, strict=True) if not before < here > after]
        kept = sorted((t for t in found if 0 < t < n), key=lambda t: b[t])[:_POINTS]
        return sorted({0, n, *kept})

    def region(self, first: int, stop: int) -> Region | None:
        """The region of these ops; None where they are none."""
        graph, uses = self.graph, self.graph.uses
        made = [s for k in range(first, stop) for s in uses.defines[k] if self.size[s]]
        ends = [s for s in made if self.last[s] >= stop]
        if len(ends) != 1 or any(s in graph.kept and s != ends[0] for s in made):
            return None
        rows, inside = dict[int, Mapping[int, Window]](), set(made)
        for k in range(first, stop):
            windows = self.windows[k]
            if windows is None or any(s not in inside for s in uses.mutates[k]):
                return None
            if any(s in inside and s not in windows for s in uses.reads[k]):
                return None
            rows[k] = windows
        end, maker = ends[0], next(k for k in range(first, stop) if ends[0] in uses.defines[k])
        height = next(iter(rows[maker].values())).made if rows[maker] else 0
        return Region(first, stop, end, height, rows) if height > 1 and stop - first > 1 else None

    def wanted(self, region: Region, rows: Rows) -> dict[int, Rows]:
        """The rows of each storage that are needed for rows of what a region makes."""
        found = {region.end: rows}
        while True:  # what is written in place may be read before, in more rows
            before = dict(found)
            self._widen(region, found)
            if found == before:
                return found

    def _widen(self, region: Region, found: dict[int, Rows]) -> None:
        """Adds the rows that ops of a region need, from the last to the first."""
        for k in reversed(region.ops):
            wanted = made_rows(self.graph, k, found)
            if wanted is None:
                continue
            for s, window in region.windows[k].items():
                take = window.take(wanted)
                old = found.get(s, (take.start, take.stop))
                found[s] = min(old[0], take.start), max(old[1], take.stop)

    def cost(self, region: Region, count: int) -> tuple[int, int]:
        """Bytes that a region needs in so many slices, and its operations more than in one."""
        graph, uses = self.graph, self.graph.uses
        outside = self.graph.static_bytes + sum(
            self.size[s] for s in self.moving
            if self.first[s] < region.first and self.last[s] >= region.first
        ) + self.size[region.end]  # fmt: skip
        peak, operations = self.size[region.end] if self.joins else 0, 0
        made_in = {s: k for k in region.ops for s in uses.defines[k] if self.size[s]}
        lasts: dict[int, list[int]] = {}
        for s in made_in:
            end = region.stop - 1 if s == region.end else self.last[s]
            lasts.setdefault(end, []).append(s)
        for part, times in _typical(bounds_of(region.rows, count)):
            wanted, live, held = self.wanted(region, part), 0, dict[int, int]()
            for k in region.ops:
                rows = made_rows(graph, k, wanted)
                if rows is None:
                    continue
                window = next(iter(region.windows[k].values()))
                made = window.take(rows).made
                for s in uses.defines[k]:
                    if s in wanted:
                        held[s] = self.size[s] * made // window.made
                        live += held[s]
                scratch = graph.ops[k].workspace * made // window.made
                peak = max(peak, live + scratch)
                operations += times * (graph.ops[k].flops * made // window.made)
                for s in lasts.get(k, ()):
                    live -= held.pop(s, 0)
        return outside + peak, operations - sum(graph.ops[k].flops for k in region.ops)

    def _options(self, first: int, stop: int) -> list[tuple[int, int, Region, int]]:
        """Bytes, operations more, region and slices, for numbers of slices of which none is worse in both."""
        key = first, stop
        if key not in self._costs:
            region, rows = self.region(first, stop), list[tuple[int, int, Region, int]]()
            if region is not None and max(self.needs[k] for k in region.ops) > 0:
                whole = max(self.needs[k] for k in region.ops)
                for count in sorted({n for n in (*_COUNTS, region.rows) if n <= region.rows}):
                    peak, extra = self.cost(region, count)
                    if extra > _MOST * sum(self.graph.ops[k].flops for k in region.ops):
                        break
                    if peak < min([whole, *(row[0] for row in rows)]):
                        rows.append((peak, extra, region, count))
            self._costs[key] = rows
        return self._costs[key]

    def best(self, limit: int) -> Patches | None:
        """The fewest operations more within a limit of bytes; None where no regions keep it."""
        n, points = len(self.graph.ops), self.points
        least: dict[int, tuple[int, int, tuple[tuple[Region, int], ...], int]] = {0: (0, 0, (), 0)}
        for j, t in enumerate(points):
            if t == 0:
                continue
            found = []
            for i in range(j - 1, -1, -1):
                start = points[i]
                if start not in least:
                    continue
                extra, parts, chosen, peak = least[start]
                whole = max(self.needs[start:t])
                if whole <= limit and i == j - 1:
                    found.append((extra, parts, chosen, max(peak, whole)))
                    continue
                if whole <= limit:  # in between nothing has to be cut
                    continue
                options = self._options(start, t)
                fits = [row for row in options if row[0] <= limit and (start, t, row[3]) not in self._banned]
                if fits:
                    nbytes, more, region, count = min(fits, key=lambda row: (row[1], row[0]))
                    taken = (*chosen, (region, count))
                    found.append((extra + more, parts + 1, taken, max(peak, nbytes)))
            if found:
                least[t] = min(found, key=lambda row: (row[0], row[1], row[3]))
        if n not in least:
            return None
        extra, _, chosen, peak = least[n]
        return Patches(chosen, peak, extra) if chosen else None

    def limits(self, limit: int) -> Iterator[Patches]:
        """Choices from the one for a limit down to the least that there is, each of fewer bytes."""
        found = self.best(limit)
        while found is not None:
            yield found
            found = self.best(self.below(found))

    def below(self, choice: Patches) -> int:
        """The limit for the next choice of fewer bytes."""
        static = self.graph.static_bytes
        return static + (choice.peak - static) * _STEP // 100 - 1

    def ban(self, slices: Iterable[tuple[Region, int]]) -> None:
        """These regions are not taken in so many slices."""
        self._banned |= {(region.first, region.stop, count) for region, count in slices}

    def least(self) -> Patches | None:
        """The choice of the fewest bytes that is found."""
        last: Patches | None = None
        for choice in self.limits(max(self.needs, default=0) - 1):
            last = choice
        return last
