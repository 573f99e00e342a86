"""Whole buffers shared by name: a dead storage's buffer becomes that of a new one.

Problem: which storages share a buffer, without offsets. Minimized: the sum of the buffers. Source: Caffe2's
memonger (behaviors M1 to M9). Guarantee: along the graph's order, no two that are alive together share; with
``any_order``, in no order that the dependencies allow, which is what parallel executors need. Complexity: linear
in the graph, times the free buffers looked at. Known limits: one buffer per name, so a small storage may hold a large
buffer; ``lifetimes.in_any_order`` gives the same safety to the placement planners, in a smaller arena (M10).

A dead name's buffer goes to a new one along one order, or, with tokens, for any order.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tightship.analysis.concurrency import touching
from tightship.analysis.order import predecessors, successors
from tightship.errors import BadInput
from tightship.graph import Graph, aligned
from tightship.options import option
from tightship.plan import Plan, Residence
from tightship.planners.layout import pack_workspaces, residences, unevicted_plan
from tightship.simulate import baseline

__all__ = ["Buffers", "Options", "in_any_order", "in_list_order", "mapping", "plan", "recycled", "renamed"]

PLANNER = "share/memonger"
"""Its group and its name on the command line."""


TO_HOST = ("CopyGPUToCPU", "EnsureCPUOutput", "CopyToCPU")
"""Ops that run on a device and whose results lie on the host."""


@dataclass
class Buffers:
    """Who shares what: ``of[s]`` is the buffer of storage s, ``sizes`` and ``devices`` are the buffers'."""

    of: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    """How many storages each buffer has."""

    def new(self, storage: int, size: int, device: str) -> None:
        self.of[storage] = len(self.sizes)
        self.sizes.append(size)
        self.devices.append(device)
        self.shares.append(1)

    def give(self, buffer: int, storage: int, size: int) -> None:
        self.of[storage] = buffer
        self.sizes[buffer] = max(self.sizes[buffer], size)
        self.shares[buffer] += 1


def device_of(graph: Graph, storage: int) -> str:
    """Where a storage lies: the op's device, type and number; the host for what is copied there."""
    op = graph.ops[graph.uses.definer[storage]]
    to_host = op.target.rpartition(".")[2] in TO_HOST or graph.storages[storage].pool == "host"
    return "cpu" if to_host else op.device


def in_list_order(graph: Graph, shareable: frozenset[int]) -> Buffers:
    """Linear recycling: an output takes the buffer that was released last, of any size."""
    walk = _Walk(graph, shareable, range(len(graph.ops)), None)
    for k in range(len(graph.ops)):
        walk.visit(k)
    return walk.found


def in_any_order(
    graph: Graph, shareable: frozenset[int], ops: frozenset[int], heads: frozenset[int], best_fit: bool
) -> Buffers:
    """Recycling that holds for every order the dependencies allow.

    Depth first over the ops from the heads, each after all that it waits for. A token is a branch that an op comes
    after: where several ops wait for one, each gets a token of its own, and an op has all tokens of those it waits
    for. Only an op with every token of a buffer's users is after them in every order; no other may take it.
    """
    walk = _Walk(graph, shareable, ops, best_fit)
    for k in walk.roots(heads):
        walk.visit_from(k)
    for s, d in enumerate(graph.uses.definer):  # what was not reached shares nothing
        if d >= 0 and s not in walk.found.of:
            walk.found.new(s, graph.storages[s].size, device_of(graph, s))
    return walk.found


class _Walk:
    """Where a walk over the ops stands; ``best_fit`` None: in the graph's order, in which there are no tokens."""

    def __init__(
        self, graph: Graph, shareable: frozenset[int], ops: Container[int], best_fit: bool | None
    ) -> None:
        self.graph, self.shareable, self.ops, self.best_fit = graph, shareable, ops, best_fit
        waits = predecessors(graph)
        self.after = successors(waits)
        self.waiting = [len(w) for w in waits]
        self.tokens = [0] * len(waits)  # bit sets
        self.made = 0  # tokens so far
        self.users_left = [bits.bit_count() for bits in touching(graph)]
        self.required: list[int] = []  # per buffer, the tokens of all its users
        self.free: list[int] = []
        self.found = Buffers()

    def roots(self, heads: frozenset[int]) -> Sequence[int]:
        """Ops that wait for none and read a head, or nothing."""
        reads = self.graph.uses.reads
        return [
            k
            for k, n in enumerate(self.waiting)
            if not n and (not heads or not reads[k] or heads.intersection(reads[k]))
        ]

    def token(self) -> int:
        self.made += 1
        return 1 << (self.made - 1)

    def visit_from(self, root: int) -> None:
        self.tokens[root] |= self.token()
        stack = [root]
        while stack:
            k = stack.pop()
            self.visit(k)
            branches = len(self.after[k]) > 1
            ready = []
            for a in self.after[k]:
                self.tokens[a] |= self.tokens[k] | (self.token() if branches else 0)
                self.waiting[a] -= 1
                if not self.waiting[a]:
                    ready.append(a)
            stack.extend(reversed(ready))

    def visit(self, k: int) -> None:
        uses, storages = self.graph.uses, self.graph.storages
        for s in uses.defines[k]:
            size, device = storages[s].size, device_of(self.graph, s)
            at = self.candidate(k, size, device) if s in self.shareable and k in self.ops else None
            if at is None:
                self.found.new(s, size, device)
                self.required.append(0)
            else:
                self.free.remove(at)
                self.found.give(at, s, size)
        for s in dict.fromkeys((*uses.reads[k], *uses.defines[k])):
            self.users_left[s] -= 1
            if s in self.found.of:
                buffer = self.found.of[s]
                self.required[buffer] |= self.tokens[k]
                if s in self.shareable and not self.users_left[s]:
                    self.free.append(buffer)

    def candidate(self, k: int, size: int, device: str) -> int | None:
        found = self.found
        fitting = [
            b
            for b in reversed(self.free)  # the one freed last, of equals
            if found.devices[b] == device and self.required[b] & ~self.tokens[k] == 0
        ]
        if not fitting:
            return None
        if self.best_fit is None:
            return fitting[0]
        if not self.best_fit:
            return min(fitting, key=lambda b: found.shares[b])
        # The smallest that is large enough, else the largest, which grows.
        large = [b for b in fitting if found.sizes[b] >= size]
        return (
            min(large, key=lambda b: found.sizes[b]) if large else max(fitting, key=lambda b: found.sizes[b])
        )


PREFIX, SUFFIX = "__m", "_shared"
"""Of the names of shared buffers, with a number between; a graph that has them was recycled before."""


@dataclass(frozen=True, slots=True)
class Options:
    """What Caffe2's memonger lets its user choose. Names go by commas."""

    any_order: bool = option(
        False, "safe for every order that the dependencies allow, not for the graph's alone"
    )
    sizes: bool = option(True, "fit by size, not by how often a buffer is shared (with any_order)")
    heads: str = option("", "names from which ops are searched (none given: all that the caller owns)")
    ops: str = option("", "names of ops whose results may take buffers (none given: all)")
    share: str = option("", "names that may be shared (none given: all)")
    never: str = option("", "names that are never recycled")
    scope: str = option("", "only names that begin so")


def plan(graph: Graph, options: Options | None = None) -> Plan:
    """A verified plan of the graph's order in which each storage lies in its buffer, buffers side by side, and what
    ops need while they run beyond them all. ``meta["memonger"]`` has the mapping of names."""
    o = options or Options()
    began = time.perf_counter()
    found, note = recycled(graph, o)
    placed, arena = _placed(graph, found, o.any_order)
    alone = sum(graph.storages[s].size for s in found.of)
    facts = {
        "mapping": _names(graph, found),
        "order": "any" if o.any_order else "linear",
        "buffers": len(found.sizes),
        "saved": alone - sum(found.sizes),
    }
    note = note or f"{facts['saved']} bytes saved by sharing buffers"
    steps = baseline(graph)
    return unevicted_plan(graph, steps, placed, "memonger", began=began, facts=facts, note=note, arena=arena)


def recycled(graph: Graph, options: Options | None = None) -> tuple[Buffers, str]:
    """The buffer of every storage outside the static set, and why nothing is shared, where that is so."""
    o = options or Options()
    if any(s.name.startswith(PREFIX) and s.name.endswith(SUFFIX) for s in graph.storages):
        return _alone(graph), "the graph was recycled before: its names are shared ones; it is left as it is"
    inner = [op.name for op in graph.ops if op.calls]
    if inner and not o.any_order:
        why = f"op {inner[0]!r} runs graphs of its own, which do not run in list order: the graph is left as it is"
        return _alone(graph), why
    shareable = _shareable(graph, o)
    if not o.any_order:
        return in_list_order(graph, shareable), ""
    chosen = _named(o.ops, [op.name for op in graph.ops], "op")
    ops = frozenset(k for k, op in enumerate(graph.ops) if not o.ops or op.name in chosen)
    names = _named(o.heads, [s.name for s in graph.storages], "storage")
    heads = frozenset(s for s in range(len(graph.storages)) if graph.storages[s].name in names)
    return in_any_order(graph, shareable, ops, heads, o.sizes), ""


def mapping(graph: Graph, options: Options | None = None) -> dict[str, str]:
    """The shared name of every name that shares its buffer with another."""
    return _names(graph, recycled(graph, options)[0])


def renamed(graph: Graph, names: dict[str, str]) -> Graph:
    """The graph with shared names, also in graphs that its ops run, where a name of the outer graph is meant.

    ``meta["memonger"]`` of every such graph has the mapping that holds in it, so that references still resolve."""

    def rename(g: Graph, names: dict[str, str]) -> Graph:
        mine = {s.name: names[s.name] for s in g.storages if s.name in names}
        storages = tuple(replace(s, name=mine.get(s.name, s.name)) for s in g.storages)
        ops = []
        for op in g.ops:
            inner = []
            for called in op.calls:
                local = {called.storages[called.values[v].storage].name for v in called.inputs}
                inner.append(rename(called, {old: new for old, new in names.items() if old in local}))
            ops.append(replace(op, calls=tuple(inner)) if op.calls else op)
        return replace(g, storages=storages, ops=tuple(ops), meta=g.meta | {"memonger": mine})

    return rename(graph, names)


def _shareable(graph: Graph, o: Options) -> frozenset[int]:
    every = [s.name for s in graph.storages]
    share, never = _named(o.share, every, "storage"), _named(o.never, every, "storage")
    return frozenset(
        s
        for s, storage in enumerate(graph.storages)
        if storage.size
        and s not in graph.static | graph.kept
        and (not share or storage.name in share)
        and storage.name not in never
        and storage.name.startswith(o.scope)
    )


def _named(text: str, known: list[str], what: str) -> frozenset[str]:
    names = frozenset(name for name in (n.strip() for n in text.split(",")) if name)
    if unknown := sorted(names - set(known)):
        raise BadInput(f"unknown {what} {unknown[0]!r}", place="memonger")
    return names


def _alone(graph: Graph) -> Buffers:
    found = Buffers()
    for s, d in enumerate(graph.uses.definer):
        if d >= 0:
            found.new(s, graph.storages[s].size, graph.ops[d].device)
    return found


def _names(graph: Graph, found: Buffers) -> dict[str, str]:
    number: dict[int, int] = {}
    names = {}
    for s, buffer in sorted(found.of.items()):
        if found.shares[buffer] > 1:
            shared = number.setdefault(buffer, len(number))
            names[graph.storages[s].name] = f"{PREFIX}{shared}{SUFFIX}"
    return names


def _placed(graph: Graph, found: Buffers, any_order: bool) -> tuple[Iterator[Residence], int]:
    """Buffers one after the other; what ops need while they run above, side by side where they may run together."""
    starts = [0, *accumulate(aligned(size, graph.alignment) for size in found.sizes)]
    rows = list(residences(graph, baseline(graph)))
    workspaces = pack_workspaces(rows, graph.alignment)
    above: dict[int, int] = {}  # where the workspace of a step begins
    base = top = starts[-1]
    for step, needed in workspaces.items():
        above[step] = base
        top = max(top, base + needed.size)
        base += needed.size if any_order else 0

    def offset(r: Residence) -> int:
        if r.storage >= 0:
            return starts[found.of[r.storage]]
        return above[r.start] + workspaces[r.start].offsets[r]

    return (replace(r, offset=offset(r)) for r in rows), top
