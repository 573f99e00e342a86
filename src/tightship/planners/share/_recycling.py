"""Two ways of giving a dead name's buffer to a new one: along one order, and with tokens for any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tightship.analysis.concurrency import touching
from tightship.analysis.order import predecessors, successors
from tightship.graph import Graph

__all__ = ["Buffers", "in_any_order", "in_list_order"]

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
    found, free = Buffers(), list[int]()
    last: dict[int, int] = {}
    for k in range(len(graph.ops)):
        for s in (*graph.uses.reads[k], *graph.uses.defines[k], *graph.uses.mutates[k]):
            last[s] = k
    for k in range(len(graph.ops)):
        for s in graph.uses.defines[k]:
            size, device = graph.storages[s].size, device_of(graph, s)
            at = next((b for b in reversed(free) if found.devices[b] == device), None)
            if s not in shareable or at is None:
                found.new(s, size, device)
            else:
                free.remove(at)
                found.give(at, s, size)
        for s in dict.fromkeys((*graph.uses.reads[k], *graph.uses.defines[k])):
            if s in shareable and last[s] == k:
                free.append(found.of[s])
    return found


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
    """Where the depth-first search stands."""

    def __init__(self, graph: Graph, shareable: frozenset[int], ops: frozenset[int], best_fit: bool) -> None:
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
        if not self.best_fit:
            return min(fitting, key=lambda b: found.shares[b])
        # The smallest that is large enough, else the largest, which grows.
        large = [b for b in fitting if found.sizes[b] >= size]
        return (
            min(large, key=lambda b: found.sizes[b]) if large else max(fitting, key=lambda b: found.sizes[b])
        )
