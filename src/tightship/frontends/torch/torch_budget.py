"""What PyTorch's own partitioner would save between forward and backward of a captured step.

The captured ops become a joint fx graph (never run) for PyTorch's partitioner, which answers for each
``activation_memory_budget``. In-place ops stand in it as if they made new tensors. For comparison only.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from tightship.errors import Unsupported
from tightship.frontends.torch import compat, compat_compile
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.views import substitute

__all__ = ["BUDGETS", "saved_sets"]

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)


def saved_sets(program: Program, budgets: Iterable[float] = BUDGETS) -> dict[float, frozenset[int]]:
    """For each budget, the storages that are saved for the backward (the caller's among them).

    Raises ``Unsupported`` where the partitioner does not take the graph.
    """
    joint = _Joint(program)
    try:
        found = compat_compile.saved_values(joint.module, tuple(budgets))
        return {b: frozenset(joint.storage[n] for n in saved) for b, saved in found.items()}
    except (RuntimeError, AssertionError, KeyError, ValueError, AttributeError, TypeError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unsupported("torch's activation_memory_budget on this graph", text) from error


class _Joint:
    """The fx graph; ``storage`` says which storage a node's tensor is (a view of)."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.mode = compat.fake_mode()
        self.fx = FxGraph()
        self.node: dict[int, Node] = {}
        self.latest: dict[int, tuple[int, Node]] = {}  # by storage: value that spans it, and its node
        self.storage: dict[Node, int] = {}
        self.late = False
        self.nodes()
        self.module = GraphModule(torch.nn.Module(), self.fx)

    def nodes(self) -> None:
        for j, v in enumerate(self.graph.inputs):
            if v == self.program.bases[self.graph.values[v].storage]:
                self.made(v, self.fx.placeholder(f"primals_{j + 1}"))
        loss = self.program.results[0]
        tangent = self.fx.placeholder("tangents_1")
        tangent.meta["val"] = self.fake(loss)
        for k, call in enumerate(self.program.calls):
            if self.graph.ops[k].phase == "update":
                break
            self.late = self.graph.ops[k].phase != "forward"
            self.call(k, call)
        ends = [loss, *(v for v in self.graph.outputs if v != loss)]
        self.late = True
        results = [self.read(v) for v in ends if self.graph.values[v].storage in self.latest]
        self.fx.output(tuple(results))

    def fake(self, value: int) -> Any:
        v = self.graph.values[value]
        with self.mode:
            return torch.empty_strided(v.shape, v.stride, dtype=getattr(torch, v.dtype), device="cpu")

    def made(self, value: int, node: Node) -> Node:
        """``node`` is now what the value's storage holds."""
        s = self.graph.values[value].storage
        node.meta["val"] = self.fake(value)
        if self.late:
            node.meta["partitioner_tag"] = "must_be_in_backward"
        self.storage[node] = s
        self.latest[s] = value, node
        self.node = {v: n for v, n in self.node.items() if self.graph.values[v].storage != s}
        self.node[value] = node
        return node

    def read(self, value: int) -> Node:
        """The node of a value: a view of what its storage holds now."""
        if value not in self.node:
            v = self.graph.values[value]
            _, base = self.latest[v.storage]
            node = self.fx.call_function(
                torch.ops.aten.as_strided.default, (base, v.shape, v.stride, v.offset)
            )
            node.meta["val"] = self.fake(value)
            if self.late:
                node.meta["partitioner_tag"] = "must_be_in_backward"
            self.storage[node] = v.storage
            self.node[value] = node
        return self.node[value]

    def call(self, k: int, call: Any) -> None:
        args, kwargs = substitute((call.args, dict(call.kwargs)), self.read)
        target = call.fn
        if self.graph.ops[k].random:  # one that the partitioner knows for what it is
            shape = self.graph.values[max(call.results[0], 0)].shape
            first = next((a for a in args if isinstance(a, Node)), None)
            target = torch.ops.aten.rand.default if first is None else torch.ops.aten.rand_like.default
            args, kwargs = ((shape,) if first is None else (first,)), {}
        node = self.fx.call_function(target, args, kwargs)
        if self.late:
            node.meta["partitioner_tag"] = "must_be_in_backward"
        fresh = [(j, v) for j, v in enumerate(call.results) if v >= 0]
        written = set(self.graph.uses.mutates[k]) - {self.graph.values[v].storage for _, v in fresh}
        if len(call.results) == 1 and fresh:
            self.made(fresh[0][1], node)
        else:
            node.meta["val"] = tuple(self.fake(v) if v >= 0 else None for v in call.results)
            for j, v in fresh:
                self.made(v, self.fx.call_function(operator.getitem, (node, j)))
        for s in written:  # what it wrote in place is its own from now on
            if s in self.latest:
                value, _ = self.latest[s]
                if "val" not in node.meta:
                    node.meta["val"] = self.fake(value)
                if len(call.results) > 1:
                    node = self.fx.call_function(operator.getitem, (node, 0))
                self.made(value, node)
