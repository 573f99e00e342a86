"""Plans of fused code as fx graphs: a copy of an op's nodes for each time that it runs, in the plan's order."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node

from tightship.cached import cached_property
from tightship.errors import Unsupported
from tightship.frontends.torch import compat_inductor
from tightship.frontends.torch.capture.fused_nodes import (
    bytes_of,
    is_pointwise,
    is_reduction,
    lies_otherwise,
    tensors_of,
)  # fmt: skip
from tightship.frontends.torch.compat_inductor import is_view
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.simulate import Timeline, replay

__all__ = ["Fused", "Writing"]

_SHORT = 0.9
"""From which part of its peak on a plan is short of bytes."""


class Fused(Protocol):
    """A model of fused code: ``exists`` has the nodes whose tensors do, ``nodes`` which one's each storage is."""

    @property
    def nodes(self) -> Mapping[int, str]: ...

    @property
    def graph(self) -> Graph: ...

    @property
    def exists(self) -> frozenset[Node]: ...


@dataclass
class Writing:
    """What a plan of ``model`` has made by its step ``at``, as an fx graph."""

    model: Fused
    plan: Plan
    fx: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    there: dict[Node, Node] = field(default_factory=dict)  # a node's tensor, as it is now
    of: dict[Node, Node] = field(default_factory=dict)  # whose copy a tensor is
    made: dict[tuple[Any, ...], Node] = field(default_factory=dict)  # what is fused into its readers
    segment: int = 0  # grows with every kernel that nothing is fused into
    at: int = 0  # the step that is written

    @cached_property
    def _line(self) -> Timeline:
        return replay(self.model.graph, self.plan.steps)

    @cached_property
    def _ends(self) -> dict[str, list[int]]:
        """The steps after which the tensor of a node, by name, is there no more, or is another one."""
        found: dict[str, list[int]] = {}
        for k, step in enumerate(self.plan.steps):
            gone = (*(step.storages if step.kind == "free" else ()), *(s for s, _ in step.reuses))
            for s in gone:
                if s in self.model.nodes:
                    found.setdefault(self.model.nodes[s], []).append(k)
        return found

    def gone(self, nodes: Iterable[Node]) -> None:
        """The nodes' tensors are there no more: what comes after them is not computed before."""
        for node in nodes:
            old = self.there.pop(node, None)
            if old is not None:
                self._early(old)
            self.segment += 1

    def _early(self, ends: Node) -> None:
        """What is there, was computed from a tensor that ends, and is smaller, is a tensor by now where the plan is
        short of bytes: computed where it is read, it would keep the larger one until then."""
        stack: list[Node] = list(ends.users)
        seen = set[Node]()
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if compat_inductor.EXISTS in n.meta:
                there = self.of[n] in self.there and self.there[self.of[n]] is n
                if there and self._short_of(n, _nbytes(ends) - _nbytes(n)):
                    n.meta[compat_inductor.EARLY] = True
            elif is_pointwise(n) or is_view(n):
                stack.extend(n.users)

    def _short_of(self, n: Node, nbytes: int) -> bool:
        """Whether so many bytes more would bring the plan near its peak while a tensor is there from now on."""
        if nbytes <= 0:
            return False
        ends = self._ends.get(self.of[n].name, ())
        until = next((k for k in ends if k > self.at), len(self.plan.steps) - 1)
        return max(self._line.during[self.at : until + 1]) + nbytes > _SHORT * self._line.peak

    def op(self, node: Node, kept: set[str]) -> None:
        if not is_pointwise(node) and not is_reduction(node):
            self.segment += 1
        new = self.copied(node)
        parts = [u for u in node.users if u.target is operator.getitem]
        for part in parts or [node]:
            if part.name in kept or not parts:
                self.there[part] = self.copied(part, {node: new}) if part is not node else new

    def copied(self, node: Node, given: dict[Node, Node] | None = None) -> Node:
        resolve = self.read if given is None else lambda a: given.get(a) or self.read(a)
        new = self.fx.node_copy(node, resolve)
        new.meta = {**node.meta, compat_inductor.ORIGIN: node.name, compat_inductor.SEGMENT: self.segment}
        if node in self.model.exists and lies_otherwise(node):
            new.meta[compat_inductor.AS_IT_IS] = True
        if node in self.model.exists and is_pointwise(node):
            new.meta[compat_inductor.EXISTS] = True
            self.of[new] = node
        return new

    def read(self, node: Node) -> Node:
        """The node's tensor where it is read: one that is there, or computed there from such. Each node on the way is
        looked at once, without recursion: what is fused may be long, and much of it read several times."""
        at: dict[Node, Node] = {}
        stack = [node]
        while stack:
            n = stack[-1]
            if n in self.there:
                at[n] = self.there[n]
            elif n not in at:
                self._can_compute(n)
                missing = [a for a in n.all_input_nodes if a not in at]
                if missing:
                    stack.extend(reversed(missing))
                    continue
                key = (self.segment, n, *(at[a] for a in n.all_input_nodes))
                if key not in self.made:
                    self.made[key] = self.copied(n, at)
                at[n] = self.made[key]
            stack.pop()
        return at[node]

    def _can_compute(self, node: Node) -> None:
        if node.op == "placeholder":
            raise Unsupported(f"reading {node.name} in the backward pass", "it is not saved")
        if node in self.model.exists and node.target is not operator.getitem:
            raise Unsupported(f"reading {node.name} in the backward pass", "the plan has it nowhere then")


def _nbytes(node: Node) -> int:
    return sum(bytes_of(t) for t in tensors_of(node))
