"""Random valid plans of a graph: a plain lowering and placement that share no code with planners."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tightship.analysis.packing import Packing, packings
from tightship.graph import Graph, aligned
from tightship.plan import Plan, Residence, Step
from tightship.simulate import baseline, extra_bytes, replay

__all__ = ["costs", "random_order", "random_plan", "random_steps"]


def costs(graph: Graph, steps: Sequence[Step]) -> dict[str, Any]:
    """What a plan says its steps cost, before and after, as fields of a `Plan`."""
    line, before = replay(graph, steps), replay(graph, baseline(graph))
    return {
        "peak": line.peak, "peak_before": before.peak, "static": graph.static_bytes,
        "time": line.time, "time_before": before.time,
    }  # fmt: skip


def random_order(graph: Graph, seed: int) -> tuple[int, ...]:
    """A legal order of the ops: values, hazards per storage, control edges, the random chain and that of effects are
    kept."""
    rng, uses = random.Random(seed), graph.uses
    before: list[set[int]] = [set(op.control) for op in graph.ops]
    write: dict[int, int] = {}
    reads: dict[int, set[int]] = {}
    last_random = last_effect = -1
    for k, op in enumerate(graph.ops):
        before[k] |= {uses.maker[v] for v in op.inputs} - {-1}
        writes = {*uses.mutates[k], *uses.defines[k]}
        for s in {*uses.reads[k], *writes}:
            if s in write:
                before[k].add(write[s])
            if s in writes:
                before[k] |= reads.pop(s, set())
                write[s] = k
            else:
                reads.setdefault(s, set()).add(k)
        if op.random:
            before[k] |= {last_random} - {-1}
            last_random = k
        if op.effect:
            before[k] |= {last_effect} - {-1}
            last_effect = k
    after: list[list[int]] = [[] for _ in graph.ops]
    for k, many in enumerate(before):
        for b in many:
            after[b].append(k)
    count = [len(b) for b in before]
    ready = [(rng.random(), k) for k, c in enumerate(count) if not c]
    heapq.heapify(ready)
    order = []
    while ready:
        k = heapq.heappop(ready)[1]
        order.append(k)
        for a in after[k]:
            count[a] -= 1
            if not count[a]:
                heapq.heappush(ready, (rng.random(), a))
    return tuple(order)


def _ranks(graph: Graph) -> list[int]:
    """How deep the recomputation of each storage in its last version can go; -1: it cannot be recomputed.

    A storage can be if the ops that write it can run again, write nothing else but updates, and read only
    what is never written later: then its inputs are there, or can be made, whenever it is wanted.
    """
    uses, final = graph.uses, [len(w) for w in graph.uses.writers]
    rank = [0 if s in graph.static else -1 for s in range(len(graph.storages))]
    for k in range(len(graph.ops)):
        for s in (*uses.defines[k], *uses.mutates[k]):
            if s not in graph.static and uses.writers[s][-1] == k:
                rank[s] = _rank(graph, s, rank, final)
    return rank


def _rank(graph: Graph, s: int, rank: Sequence[int], final: Sequence[int]) -> int:
    uses, deepest = graph.uses, 0
    for k in uses.writers[s]:
        op = graph.ops[k]
        again = op.pure or (op.state and not op.effect)
        if not again or s in op.updates or set(uses.mutates[k]) - {s, *op.updates}:
            return -1
        for r, need in zip(uses.reads[k], uses.needs[k], strict=True):
            if r == s or r in op.updates:
                continue
            if need != final[r]:
                return -1
            deepest = max(deepest, rank[r] if rank[r] >= 0 else 0)
    return deepest + 1


class _Lowering:
    """Ops in an order, with random evictions; frees and copies keep to what the plan's rules ask for."""

    def __init__(
        self, graph: Graph, rng: random.Random, order: Sequence[int], rate: float, streams: bool
    ) -> None:
        self.graph, self.uses, self.rng = graph, graph.uses, rng
        self.order, self.rate, self.streams = order, rate, streams
        self.steps: list[Step] = []
        self.ranks = _ranks(graph)
        self.packings = packings(graph)
        self.version = [0] * len(graph.storages)
        self.full: set[int] = set()  # beyond the static set
        self.away: dict[int, str] = {}  # evicted: "drop", "host" or "packed"
        self.left = [0] * len(graph.storages)
        for k in order:
            for s in {*self.uses.reads[k], *self.uses.defines[k]}:
                self.left[s] += 1
        self.parked: set[int] = set()  # done with, but dropped storages are made of them
        self.made_by: dict[int, int] = {}  # fetched storage -> step to wait for
        self.tail = {0: -1, 1: -1}

    def emit(self, kind: str, stream: int = 0, waits: Sequence[int] = (), **fields: Any) -> int:
        side = 1 if stream and self.streams else 0
        i = len(self.steps)
        if side:
            waits = [*waits, *([self.tail[0]] if self.tail[0] >= 0 else [])]
        needed = tuple(sorted({w for w in waits if self.steps[w].stream != side}))
        self.steps.append(Step(kind, stream=side, waits=needed, **fields))
        self.tail[side] = i
        return i

    def run(self) -> tuple[Step, ...]:
        for k in self.order:
            touched = {*self.uses.reads[k]}
            lent = self.bring(self.uses.reads[k])
            self.emit("compute", op=k, waits=self.waits(touched))
            for s in self.uses.defines[k]:
                self.full.add(s)
            for s in (*self.uses.defines[k], *self.uses.mutates[k]):
                self.version[s] += 1
            for s in {*self.uses.reads[k], *self.uses.defines[k]}:
                self.left[s] -= 1
            self.release([*self.uses.reads[k], *self.uses.defines[k], *lent])
            self.evict()
        self.bring(sorted(self.graph.kept))
        self.release(sorted(self.full))
        return tuple(self.saved())

    def saved(self) -> list[Step]:
        """The steps with the states of random ops that run again: saved at first, freed after the last time."""
        last = {
            s.op: i for i, s in enumerate(self.steps) if s.kind == "recompute" and self.graph.ops[s.op].random
        }
        at: list[int] = []
        out: list[Step] = []
        for i, step in enumerate(self.steps):
            at.append(len(out))
            first = step.kind == "compute" and step.op in last
            out.append(replace(step, waits=tuple(at[w] for w in step.waits), saves=first))
            if step.kind == "recompute" and last.get(step.op) == i:
                at[i] = len(out)  # who waits for the op may take the state's bytes
                out.append(Step("free", op=step.op, form="state"))
        return out

    def waits(self, storages: set[int]) -> list[int]:
        return [self.made_by[s] for s in storages if s in self.made_by]

    def bring(self, wanted: Sequence[int]) -> list[int]:
        """Make storages full again, and say which had gone."""
        gone = [s for s in wanted if s not in self.full and s not in self.graph.static]
        lent = list(gone)
        for s in gone:
            how = self.away.pop(s, "drop")
            if s in self.full:
                continue  # came along with one before it
            if how == "drop":
                lent += self.again(s)
            else:
                kind = "fetch" if how == "host" else "decompress"
                at = self.emit(kind, 1, storages=(s,))
                self.made_by[s] = at
                self.full.add(s)
                self.emit("free", storages=(s,), form=how, waits=[at])
        return lent

    def again(self, s: int) -> list[int]:
        lent: list[int] = []
        for k in self.uses.writers[s]:
            reads = self.sources(s, k)
            lent += self.bring(reads)
            made = (s,) if s in self.uses.defines[k] else ()
            self.emit("recompute", op=k, storages=made, waits=self.waits({*reads, s}))
            self.full.add(s)
        return lent

    def sources(self, s: int, k: int) -> list[int]:
        skip = {s, *self.graph.ops[k].updates, *self.graph.static}
        return [r for r in self.uses.reads[k] if r not in skip]

    def feasible(self, s: int, seen: dict[int, bool]) -> bool:
        """Whether ``s`` can be recomputed from what is there, away, or can itself be recomputed."""
        if s not in seen:
            seen[s] = self.ranks[s] > 0 and all(
                r in self.full or r in self.away or self.feasible(r, seen)
                for k in self.uses.writers[s]
                for r in self.sources(s, k)
            )
        return seen[s]

    def release(self, candidates: Sequence[int]) -> None:
        """Free what no op to come and no dropped storage needs."""
        stay = self.graph.static | self.graph.kept
        idle = {
            s for s in {*candidates, *self.parked} if s in self.full and s not in stay and not self.left[s]
        }
        self.parked = idle & self.needed() if idle else idle
        self.free(sorted(idle - self.parked))

    def needed(self) -> set[int]:
        """What dropped storages are made of, by way of others too."""
        todo, seen = [s for s, how in self.away.items() if how == "drop"], set()
        while todo:
            s = todo.pop()
            for k in self.uses.writers[s]:
                new = set(self.sources(s, k)) - seen
                seen |= new
                todo += new
        return seen

    def free(self, storages: Sequence[int]) -> None:
        if storages:
            self.emit("free", storages=tuple(storages), waits=self.waits(set(storages)))
            self.full -= set(storages)
            for s in storages:
                self.made_by.pop(s, None)

    def evict(self) -> None:
        if not self.rate:
            return
        for s in sorted(self.full):
            if self.rng.random() >= self.rate or not (self.left[s] or s in self.graph.kept):
                continue
            final = self.version[s] == len(self.uses.writers[s])
            how = self.rng.choice(("drop", "host", "packed"))
            if how == "packed" and not (final and s in self.packings):
                continue
            if how == "drop":
                self.full.remove(s)
                can = final and self.ranks[s] <= 8 and self.feasible(s, {})
                self.full.add(s)
                if not can:
                    continue
                self.free([s])
            else:
                kind = "offload" if how == "host" else "compress"
                p = self.packings[s] if how == "packed" else Packing("", 0)
                at = self.emit(kind, 1, storages=(s,), nbytes=p.nbytes, codec=p.codec)
                self.full.remove(s)
                self.made_by.pop(s, None)
                self.emit("free", storages=(s,), waits=[at])
            self.away[s] = how


def random_steps(
    graph: Graph, seed: int, *, rate: float = 0.15, streams: bool = True, reorder: bool = True
) -> tuple[Step, ...]:
    """Valid steps: a legal order (the graph's own without ``reorder``), in which after each op each resident
    storage still in use leaves with probability ``rate``, dropped, copied out or packed. With ``streams``
    copies run on a stream of their own."""
    rng = random.Random(seed)
    order = random_order(graph, rng.randrange(1 << 30)) if reorder else tuple(range(len(graph.ops)))
    return _Lowering(graph, rng, order, rate, streams).run()


def _stays(graph: Graph, steps: Sequence[Step], rng: random.Random) -> list[Residence]:
    """The residences that steps imply, unplaced; what an op asks for in parts or whole, by chance."""
    begun: dict[tuple[int, str], Residence] = {}
    saved: dict[int, Residence] = {}
    out: list[Residence] = []
    for i, step in enumerate(steps):
        if step.form == "state":
            out.append(replace(saved.pop(step.op), end=i))
        elif step.kind == "free":
            ended = [begun.pop((s, step.form)) for s in step.storages]
            out += [replace(r, end=i) for r in ended]
        elif step.op >= 0:
            if step.saves or (step.kind == "recompute" and graph.ops[step.op].state):
                state = Residence(-1, i, i + 1, graph.ops[step.op].state, form="state", request=step.op)
                saved[step.op], out = (state, out) if step.saves else (saved[step.op], [*out, state])
            op, made = graph.ops[step.op], graph.uses.defines[step.op]
            fine = bool(op.requests) and rng.random() < 0.7
            starts = {r.storage: r.start for r in op.requests} if fine else {}
            for j, s in enumerate(made):
                r = Residence(s, i, i + 1, graph.storages[s].size, first=starts.get(j, -1))
                if step.kind == "compute" or s in step.storages:
                    begun[s, "full"] = r
                else:
                    out.append(r)
            rows = [(j, r) for j, r in enumerate(op.requests) if r.storage < 0] if fine else []
            out += [Residence(-1, i, i + 1, r.size, request=j, first=r.start, last=r.end) for j, r in rows]
            block = extra_bytes(op) - (op.workspace if fine else 0)
            if block:
                out.append(Residence(-1, i, i + 1, block))
        else:
            form = {"offload": "host", "compress": "packed"}.get(step.kind, "full")
            for s in step.storages:
                size = step.nbytes if form == "packed" else graph.storages[s].size
                begun[s, form] = Residence(
                    s, i, i + 1, size, pool="host" if form == "host" else "device", form=form
                )
    return [r for r in (*out, *(replace(r, end=len(steps)) for r in begun.values())) if r.size]


def _first_fit(rows: Sequence[Residence]) -> list[Residence]:
    """Each at the lowest offset that is free for its whole life."""
    life = lambda r: ((r.start, max(r.first, 0)), (r.end - 1, r.last) if r.last >= 0 else (r.end, 0))  # noqa: E731
    done: list[Residence] = []
    for r in rows:
        at = 0
        if r.pool != "out":
            (low, high), beside = life(r), [o for o in done if o.pool == r.pool]
            beside = [o for o in beside if life(o)[0] < high and low < life(o)[1]]
            for o in sorted(beside, key=lambda o: o.offset):
                if o.offset < at + r.size and at < o.offset + o.size:
                    at = aligned(o.offset + o.size)
        done.append(replace(r, offset=at))
    return done


def random_plan(graph: Graph, seed: int, steps: tuple[Step, ...] | None = None, **knobs: Any) -> Plan:
    """A valid, placed plan; ``steps`` or knobs as for `random_steps`."""
    rng = random.Random(seed)
    steps = random_steps(graph, seed, **knobs) if steps is None else steps
    rows = _stays(graph, steps, rng)
    if rng.random() < 0.5:
        leaves = graph.kept if rng.random() < 0.5 else frozenset()
        rows = [replace(r, pool="out") if r.storage in leaves and r.end == len(steps) else r for r in rows]
    rng.shuffle(rows)
    placed = tuple(_first_fit(rows))
    line, before = replay(graph, steps), replay(graph, baseline(graph))
    arena = max((r.offset + r.size for r in placed if r.pool == "device"), default=0)
    host = max((r.offset + r.size for r in placed if r.pool == "host"), default=0)
    handed = sum(r.size for r in placed if r.pool == "out")
    return Plan(
        digest=graph.digest, steps=steps, residences=placed, peak=line.peak, peak_before=before.peak,
        static=graph.static_bytes, arena=arena, handed=handed, time=line.time, time_before=before.time,
        planner="random", host=host, budget=rng.choice((None, max(line.peak, graph.static_bytes + arena + handed))),
    )  # fmt: skip
