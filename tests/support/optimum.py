"""The best that any plan can do on a small graph, found by trying everything: orders and recomputations."""

from __future__ import annotations

import heapq
from itertools import combinations

from tightship.analysis.order import predecessors
from tightship.graph import Graph
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
    pairs = [p for p in graph.ops[k].overwrites if p[0] not in graph.static]
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
