"""The best that any plan can do on a small graph, found by trying everything: orders and recomputations."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from tightship.analysis.order import predecessors
from tightship.graph import Graph, Op
from tightship.simulate import extra_bytes

State = tuple[int, tuple[int, ...]]  # ops that have run, version of each storage (0: not there)


def least_extra(graph: Graph, budget: int, most: int = 400_000) -> float | None:
    """Seconds of recomputation of the best plan within ``budget`` bytes; None if there is none.

    Dijkstra over (which ops ran, which storages are there in which version). Frees are free of charge. Raises
    ``RuntimeError`` when more than ``most`` states would be looked at.
    """
    uses, size = graph.uses, [s.size for s in graph.storages]
    before = [sum(1 << b for b in row) for row in predecessors(graph)]
    every = (1 << len(graph.ops)) - 1
    final = {s: len(uses.writers[s]) for s in graph.kept if s not in graph.static}
    start: State = (0, (0,) * len(size))
    best = {start: 0.0}
    heap: list[tuple[float, State]] = [(0.0, start)]
    while heap:
        cost, state = heapq.heappop(heap)
        if cost > best[state]:
            continue
        ran, there = state
        if ran == every and all(there[s] == v for s, v in final.items()):
            return cost
        for extra, after in _next(graph, state, budget, before, size):
            total = cost + extra
            if total < best.get(after, float("inf")):
                best[after] = total
                heapq.heappush(heap, (total, after))
        if len(best) > most:
            raise RuntimeError("too many states")
    return None


def _next(graph: Graph, state: State, budget: int, before: list[int], size: list[int]):
    ran, there = state
    uses = graph.uses
    live = graph.static_bytes + sum(n for n, v in zip(size, there, strict=True) if v)
    for s, v in enumerate(there):
        if v:
            yield 0.0, (ran, (*there[:s], 0, *there[s + 1 :]))
    for k, op in enumerate(graph.ops):
        again = bool(ran >> k & 1)
        if not again and before[k] & ~ran:
            continue
        skip = set(op.updates) if again else set()
        wrote = set(uses.mutates[k]) - skip
        if again and (not op.pure or wrote & graph.static):
            continue
        # Of the caller's storages only what is written once and for all counts: nothing sees them change here.
        if any(
            s not in graph.static and s not in skip and there[s] != need
            for s, need in zip(uses.reads[k], uses.needs[k], strict=True)
        ):
            continue
        now = list(there)
        for s in wrote - graph.static:
            now[s] += 1
        fresh = [s for s in uses.defines[k] if not there[s]]
        if not again and len(fresh) < len(uses.defines[k]):
            continue
        need = live + sum(size[s] for s in uses.defines[k]) + extra_bytes(op) - budget
        for gone in _taken(graph, k):
            if need > sum(size[a] for a, _ in gone):
                continue
            for pick in range(1 << len(fresh)) if again else [(1 << len(fresh)) - 1]:
                made = now.copy()
                for j, s in enumerate(fresh):
                    made[s] = int(pick >> j & 1)
                if all(made[b] and not there[b] for _, b in gone):
                    for a, _ in gone:
                        made[a] = 0
                    yield (op.time if again else 0.0), (ran | 1 << k, tuple(made))


def _taken(graph: Graph, k: int):
    """Every way in which results of op ``k`` take the places of inputs: sets of pairs, no storage in two."""
    pairs = [p for p in graph.ops[k].overwrites if p[0] not in graph.static and p[1] not in graph.kept]
    for n in range(len(pairs) + 1):
        for some in combinations(pairs, n):
            if all(len({p[side] for p in some}) == n for side in (0, 1)):
                yield some


def least_peak(graph: Graph) -> int:
    """The least peak of all legal orders, nothing recomputed: the best way to every set of ops that may have run."""
    uses, size = graph.uses, [s.size for s in graph.storages]
    before = [sum(1 << b for b in row) for row in predecessors(graph)]
    users = [0] * len(size)
    for k in range(len(graph.ops)):
        for s in (*uses.reads[k], *uses.defines[k]):
            users[s] |= 1 << k
    stay = graph.static | graph.kept

    def held(done: int) -> int:
        """Bytes after the ops ``done``."""
        made = (s for s, d in enumerate(uses.definer) if d >= 0 and done >> d & 1 and s not in graph.static)
        return graph.static_bytes + sum(size[s] for s in made if s in stay or users[s] & ~done)

    peaks = {0: graph.static_bytes}
    for _ in graph.ops:
        then: dict[int, int] = {}
        for done, peak in peaks.items():
            live = held(done)
            for k, op in enumerate(graph.ops):
                if done >> k & 1 or before[k] & ~done:
                    continue
                during = live + sum(size[s] for s in uses.defines[k]) + extra_bytes(op)
                after = done | 1 << k
                then[after] = min(then.get(after, 1 << 62), max(peak, during))
        peaks = then
    (peak,) = peaks.values()
    return peak


def least_peak_of_tree(parents: list[int], sizes: list[int]) -> int:
    """The least peak of a tree of ops, each reading what its children make and making ``sizes`` bytes; ``parents``
    by op, all with larger numbers, the last op the root (Liu 1987: subtrees fall into stretches from a hill to the
    lowest valley after it, and those of all children are run by how far they fall)."""
    stretches: list[list[tuple[int, int]]] = [[] for _ in sizes]  # by op: (hill, valley) since the one before
    for k, size in enumerate(sizes):
        rows = sorted(
            (row for c in range(k) if parents[c] == k for row in stretches[c]),
            key=lambda row: row[0] - row[1],
            reverse=True,
        )
        live, line = 0, []  # bytes while a stretch runs, and after it
        for hill, valley in rows:
            line.append((live + hill, live + valley))
            live += valley
        line.append((live + size, size))
        stretches[k] = _stretches(line)
    return stretches[-1][0][0]


def _stretches(line: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out, base = [], 0
    while line:
        hill = max(range(len(line)), key=lambda j: (line[j][0], j))
        valley = min(range(hill, len(line)), key=lambda j: (line[j][1], -j))
        out.append((line[hill][0] - base, line[valley][1] - base))
        base, line = line[valley][1], line[valley + 1 :]
    return out


# --- with a place for everything ---

OUT = -1
"""The offset of a result that is the caller's from the start: outside the arena."""

Placed = tuple[int, tuple[int, ...], tuple[int, ...]]  # ops that have run; by storage: version, offset


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes, and the least seconds of recomputation of all plans within so many."""

    nbytes: int
    extra: float


def optimum(graph: Graph, *, place: bool = False, hand_out: bool = False, most: int = 100_000) -> list[Point]:
    """All plans that none beats in both bytes and seconds, from the fastest to the smallest.

    ``place``: bytes are the static set, the arena in which every copy has an offset, and what is handed out; an op's
    requests are one block then. Labels of (seconds, bytes) per state, in order of seconds. Raises ``RuntimeError``
    when more than ``most`` labels would be looked at, or ten times as many are waiting to be.
    """
    table = _Table(graph, place, hand_out)
    n = len(graph.storages)
    start: Placed = (0, (0,) * n, (0,) * n)
    heap: list[tuple[float, int, Placed]] = [(0.0, table.floor, start)]
    least: dict[Placed, int] = {}
    found: list[Point] = []
    while heap:
        extra, nbytes, state = heapq.heappop(heap)
        if nbytes >= least.get(state, 1 << 62) or (found and nbytes >= found[-1].nbytes):
            continue
        least[state] = nbytes
        if len(least) > most or len(heap) > 10 * most:
            raise RuntimeError("too many states")
        if table.done(state):
            found.append(Point(nbytes, extra))
            continue
        for more, need, after in table.next(state):
            bytes_then = max(nbytes, need)
            if bytes_then < least.get(after, 1 << 62) and not (found and bytes_then >= found[-1].nbytes):
                heapq.heappush(heap, (extra + more, bytes_then, after))
    return found


class _Table:
    def __init__(self, graph: Graph, place: bool, hand_out: bool) -> None:
        self.graph, self.place, self.hand_out = graph, place, hand_out
        self.uses, self.size = graph.uses, [s.size for s in graph.storages]
        self.before = [sum(1 << b for b in row) for row in predecessors(graph)]
        self.every = (1 << len(graph.ops)) - 1
        self.kept = sorted(s for s in graph.kept if s not in graph.static)
        self.final = {s: len(self.uses.writers[s]) for s in self.kept}
        self.handed = sum(self.size[s] for s in self.kept) if place and hand_out else 0
        self.floor = graph.static_bytes + self.handed
        # Pushed down as far as it goes, a copy lies on a stack of others.
        sums = {0}
        for n in (
            *(n for s, n in enumerate(self.size) if n and s not in graph.static),
            *map(extra_bytes, graph.ops),
        ):
            sums |= {x + n for x in sums}
        self.offsets = sorted(sums)

    def done(self, state: Placed) -> bool:
        ran, there, at = state
        out = not self.handed or all(at[s] == OUT or not self.size[s] for s in self.kept)
        return ran == self.every and out and all(there[s] == v for s, v in self.final.items())

    def live(self, state: Placed) -> list[tuple[int, int]]:
        """Stretches of the arena that are taken."""
        _, there, at = state
        rows = zip(self.size, there, at, strict=True)
        return [
            (x, x + n)
            for s, (n, v, x) in enumerate(rows)
            if n and v and x != OUT and s not in self.graph.static
        ]

    def next(self, state: Placed) -> Iterator[tuple[float, int, Placed]]:
        ran, there, at = state
        for s, v in enumerate(there):
            if v and s not in self.graph.static and at[s] != OUT:
                yield 0.0, 0, (ran, _put(there, s, 0), _put(at, s, 0))
        for k, op in enumerate(self.graph.ops):
            again = bool(ran >> k & 1)
            if not again and self.before[k] & ~ran:
                continue
            yield from self.run(state, k, op, again)

    def run(self, state: Placed, k: int, op: Op, again: bool) -> Iterator[tuple[float, int, Placed]]:
        ran, there, at = state
        uses, static = self.uses, self.graph.static
        skip = set(op.updates) if again else set()
        wrote = set(uses.mutates[k]) - skip
        if again and (not op.pure or wrote & static):
            return
        for s, need in zip(uses.reads[k], uses.needs[k], strict=True):
            if s not in skip and there[s] != need:
                return
        fresh = [s for s in uses.defines[k] if not there[s]]
        if not again and len(fresh) < len(uses.defines[k]):
            return
        now = list(there)
        for s in wrote:
            now[s] += 1
        seconds = op.time if again else 0.0
        for gone in _taken(self.graph, k):
            if any(at[a] == OUT for a, _ in gone):
                continue
            for pick in range(1 << len(fresh)) if again else [(1 << len(fresh)) - 1]:
                stay = [s for j, s in enumerate(fresh) if pick >> j & 1]
                if any(b not in stay for _, b in gone):
                    continue
                made = now.copy()
                for s in stay:
                    made[s] = 1
                for a, _ in gone:
                    made[a] = 0
                for need_, where in self.lay(state, k, gone, stay):
                    yield seconds, need_, (ran | 1 << k, tuple(made), where)

    def lay(
        self, state: Placed, k: int, gone: Sequence[tuple[int, int]], stay: Sequence[int]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Bytes needed while the op runs, and where everything lies after it, in every way there is."""
        _, there, at = state
        made, static = self.uses.defines[k], self.graph.static
        extra = extra_bytes(self.graph.ops[k])
        if not self.place:
            live = sum(
                n for s, (n, v) in enumerate(zip(self.size, there, strict=True)) if v and s not in static
            )
            during = live + sum(self.size[s] for s in made) + extra - sum(self.size[a] for a, _ in gone)
            yield self.floor + during, at
            return
        took = {b: at[a] for a, b in gone}
        where = list(at)
        for a, _ in gone:
            where[a] = 0
        for b, x in took.items():
            where[b] = x
        blocks = [s for s in stay if s not in took and self.size[s]]
        passing = [self.size[s] for s in made if s not in stay and self.size[s]] + ([extra] if extra else [])
        yield from self._lay(self.live(state), blocks, passing, where)

    def _lay(
        self, taken: list[tuple[int, int]], blocks: Sequence[int], passing: Sequence[int], where: list[int]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        if not blocks:
            yield self.floor + self._top(taken, passing), tuple(where)
            return
        s = blocks[0]
        if self.hand_out and s in self.final:
            yield from self._lay(taken, blocks[1:], passing, [*where[:s], OUT, *where[s + 1 :]])
        for x in _holes(self.offsets, taken, self.size[s]):
            after = [*taken, (x, x + self.size[s])]
            yield from self._lay(after, blocks[1:], passing, [*where[:s], x, *where[s + 1 :]])

    def _top(self, taken: list[tuple[int, int]], passing: Sequence[int]) -> int:
        if not passing:
            return max((b for _, b in taken), default=0)
        n, tops = (
            passing[0],
            [0, *(b for _, b in taken)],
        )  # what is gone at once lies on something that is there
        return min(self._top([*taken, (x, x + n)], passing[1:]) for x in _holes(tops, taken, n))


def _holes(offsets: Sequence[int], taken: Sequence[tuple[int, int]], n: int) -> Iterator[int]:
    for x in offsets:
        if all(x + n <= a or b <= x for a, b in taken):
            yield x


def _put(row: tuple[int, ...], s: int, x: int) -> tuple[int, ...]:
    return (*row[:s], x, *row[s + 1 :])
