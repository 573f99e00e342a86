"""A whole step as a fusing compiler runs it: the model of a graph that computes gradients and updates by itself.

There is no boundary between two passes: a plan is an order of the whole graph, and what writes the same parameter and
its state is one op of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from tightship.frontends.torch import compat_compile, compat_inductor
from tightship.frontends.torch.capture.fused import Fusing, Overwrites, with_excess
from tightship.frontends.torch.capture.fused_nodes import (
    is_created,
    is_pointwise,
    is_reduction,
    place_of,
    tensors_of,
)
from tightship.frontends.torch.capture.fused_writing import Writing
from tightship.frontends.torch.compat_inductor import is_view
from tightship.graph import Graph, Op
from tightship.machine import modeled_time
from tightship.plan import Plan

__all__ = ["FusedStep", "fuse_step"]


@dataclass(frozen=True, eq=False)
class FusedStep:
    """A graph that computes gradients and updates by itself, as a fusing compiler runs it: ``graph``, and the nodes
    of each of its ops. What writes the same parameter and its state is one op. ``may`` as in `FusedJoint`."""

    gm: GraphModule
    graph: Graph
    nodes: dict[int, str]
    seconds: dict[str, float]
    calls: dict[int, Node]
    exists: frozenset[Node]
    together: dict[Node, list[Node]]
    outputs: int
    late: frozenset[Node]
    may: dict[int, Overwrites]

    def is_late(self, node: Node) -> bool:
        """Whether a node is of the backward pass or of the update."""
        return node in self.late

    def saving(self, saved: Collection[str]) -> GraphModule:
        """The graph that keeps the nodes of these names for the backward pass, and what draws random numbers, and
        computes whatever else it reads of the forward pass again, once, each node right before its first use."""
        return _Saving(self, frozenset(saved)).run()

    def ordered(self, plan: Plan) -> GraphModule:
        """The graph as the plan has it: its order, and a copy of an op's nodes for each time that it runs."""
        fx = _WritingStep(self, plan).run()
        fx.lint()
        made = GraphModule(self.gm, fx)
        made.meta = dict(self.gm.meta)
        return made

    def with_excess(self, graph: Graph, plan: Plan, passes: Sequence[Sequence[tuple[str, int]]]) -> Graph:
        """As `FusedJoint.with_excess`, of the one pass that there is."""
        (used,) = passes
        return with_excess(graph, plan, self.calls, [(range(len(plan.steps)), used)])

    def recompute_time(self, gm: GraphModule) -> tuple[int, float]:
        """How many kernels of ``gm`` run again, and their seconds, modeled."""
        names = [compat_inductor.origin(n) for n in gm.graph.nodes if n.op == "call_function"]
        seen: set[str] = set()
        again = [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        kernels = [self.seconds[name] for name in again if name in self.seconds]
        return len(kernels), sum(kernels)


def fuse_step(gm: GraphModule, outputs: int, *, name: str = "step", masks: bool = False) -> FusedStep:
    """The model of a graph that writes to its inputs at its end. ``outputs``: how many of its results come of the
    forward pass; ``masks`` as in `fuse`: nothing but the plan says when a step makes one, which Inductor follows in a
    lean graph alone. Raises as `fuse`."""
    return _FusingStep(gm, outputs, name, masks, gathers_again=True).whole()


class _FusingStep(Fusing):
    def whole(self) -> FusedStep:
        (output,) = self.gm.graph.find_nodes(op="output")
        self.results = list(torch.utils._pytree.tree_leaves(output.args[0]))
        self.calls = [n for n in self.gm.graph.nodes if n.op == "call_function"]
        self._check()
        self.together = _written_together(self.calls)
        self.last = {c: group[-1] for group in self.together.values() for c in group}
        needed = _ancestors([x for x in self.results[: self.outputs] if isinstance(x, Node)])
        self.late = {n for n in self.calls if n not in needed}
        if self.keep_masks:
            self._keep_masks(_of_gradients(self.calls, self.late))
        self.exists = self._existing()
        self._primals()
        for n in self.calls:
            if n not in self.last:
                self._op(n)
            elif self.last[n] is n:
                self._writes(n)
        wanted = [v for x in self.results if isinstance(x, Node) for v in self._leaves(x)]
        graph = self.builder.graph(dict.fromkeys(wanted), self.name)
        return FusedStep(
            self.gm, graph, self.nodes, self.seconds, self.ops, frozenset(self.exists), self.together,
            self.outputs, frozenset(self._after_forward()), self.may,
        )  # fmt: skip

    def _after_forward(self) -> set[Node]:
        """The nodes of the backward pass and the update. Running statistics, which no result needs, are of the
        forward pass."""
        found: set[Node] = set()
        for n in self.calls:
            of_forward = n.meta.get("nn_module_stack") and not any(a in found for a in n.all_input_nodes)
            if n in self.late and not of_forward:
                found.add(n)
        return found

    def _reader(self, n: Node) -> Node:
        return self.last.get(n, n)

    def _foreign(self, n: Node) -> bool:
        return n not in self.last and super()._foreign(n)

    def _writes(self, last: Node) -> None:
        """What writes a parameter and its state: one kernel, which reads each before it writes it."""
        reads: dict[int, None] = {}
        mutated = []
        for n in self.together[last]:
            for a in n.all_input_nodes:
                reads |= self._leaves(a)
            mutated.append(self.builder.storage_of(self.value[n.args[0]]))  # type: ignore[index]
        storages = self.builder.storages
        traffic = sum(storages[self.builder.storage_of(v)].size for v in reads)
        traffic += sum(storages[s].size for s in mutated)
        at = self.builder.op(
            Op(
                self.builder.op_name(last.name), "update", tuple(reads), (), mutates=tuple(mutated),
                time=modeled_time(0, traffic), phase="update", source=place_of(last),
            )
        )  # fmt: skip
        self.ops[at] = last


def _of_gradients(calls: Sequence[Node], late: set[Node]) -> set[Node]:
    """The nodes of the backward pass and the update that products or sums in there are among, or lead to. No node
    says where a loss's gradient begins; until then it is elementwise of the forward pass's values."""
    found: set[Node] = set()
    for n in calls:
        elementwise = is_pointwise(n) or is_view(n) or is_created(n)
        if n in late and (not elementwise or any(a in found for a in n.all_input_nodes)):
            found.add(n)
    return found


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack.extend(n.all_input_nodes)
    return found


def _written_together(calls: Sequence[Node]) -> dict[Node, list[Node]]:
    """Writes that share what they compute elementwise, and nothing else reads: by the last of each such set. What is
    one number (a norm, a step's count) does not make one of two."""
    written = [n for n in calls if compat_compile.mutates(n)]
    home: dict[Node, Node] = {n: n for n in written}

    def root(n: Node) -> Node:
        while home[n] is not n:
            n = home[n]
        return n

    reached: dict[Node, set[Node]] = {}
    for n in reversed(calls):
        if n in home:
            reached[n] = {n}
            continue
        fusible = is_pointwise(n) or is_view(n)
        if not fusible or not n.users or any(u not in reached for u in n.users):
            continue
        found = {w for u in n.users for w in reached[u]}
        if all(t.numel() > 1 for t in tensors_of(n)):
            first, *rest = found
            for w in rest:
                home[root(w)] = root(first)
        if len({root(w) for w in found}) == 1:
            reached[n] = found
    groups: dict[Node, list[Node]] = {}
    for n in written:
        groups.setdefault(root(n), []).append(n)
    return {group[-1]: group for group in groups.values()}


class _WritingStep:
    """Writes a plan of a whole step as an fx graph."""

    def __init__(self, step: FusedStep, plan: Plan) -> None:
        self.step, self.plan = step, plan
        self.write = Writing(step, plan)

    def run(self) -> torch.fx.Graph:
        step, write, graph = self.step, self.write, self.step.graph
        named = {n.name: n for n in step.gm.graph.nodes}
        for old in step.gm.graph.find_nodes(op="placeholder"):
            new = write.fx.placeholder(old.name)
            new.meta = dict(old.meta)
            write.there[old] = new
        for write.at, s in enumerate(self.plan.steps):
            if s.kind == "free" and s.form == "full":
                write.gone(named[step.nodes[k]] for k in s.storages)
            elif s.kind in ("compute", "recompute"):
                node = step.calls[s.op]
                if node in step.together:
                    self.written(step.together[node])
                    continue
                kept = graph.uses.defines[s.op] if s.kind == "compute" else s.storages
                write.op(node, {step.nodes[k] for k in kept})
                write.gone(named[step.nodes[k]] for k, _ in s.reuses)
        (old,) = step.gm.graph.find_nodes(op="output")
        write.segment += 1
        write.fx.output(torch.fx.map_arg(old.args[0], write.read)).meta = dict(old.meta)
        return write.fx

    def written(self, group: Sequence[Node]) -> None:
        """All is read before anything is written."""
        self.write.segment += 1
        for n in group:
            for a in n.all_input_nodes:
                self.write.read(a)
        for n in group:
            self.write.copied(n)


class _Saving:
    """Writes a step's graph in its own order with what it saves of the forward pass."""

    def __init__(self, step: FusedStep, saved: frozenset[str]) -> None:
        self.step, self.saved = step, saved
        self.fx = torch.fx.Graph()
        self.there: dict[Node, Node] = {}
        self.again: dict[Node, Node] = {}
        self.segment = 0

    def run(self) -> GraphModule:
        late = self.step.late
        first = self.forward()
        for n in first:
            self.there[n] = self.copied(n, self.there.__getitem__)
        for n in (n for n in self.step.gm.graph.nodes if n in late):
            for a in n.all_input_nodes:
                self.make(a)
            self.there[n] = self.copied(n, self.read)
        (old,) = self.step.gm.graph.find_nodes(op="output")
        end = self.fx.output(torch.fx.map_arg(old.args[0], self.there.__getitem__))
        end.meta = dict(old.meta)
        for n in _updates_early(self.fx, {self.there[n] for n in late}):
            end.prepend(n)
        self.fx.lint()
        made = GraphModule(self.step.gm, self.fx)
        made.meta = dict(self.step.gm.meta)
        return made

    def forward(self) -> list[Node]:
        """The nodes of the forward pass: what stands in the backward pass, such as masks, as soon as it can be
        computed."""
        late, when = self.step.late, dict[Node, int]()
        begun, given = False, len(self.step.gm.graph.find_nodes(op="placeholder"))
        for k, n in enumerate(self.step.gm.graph.nodes):
            begun = begun or n in late
            if n not in late and n.op != "output":
                when[n] = max((when[a] for a in n.all_input_nodes), default=given) if begun else k
        return sorted(when, key=lambda n: when[n])

    def copied(self, node: Node, read: Callable[[Node], Node]) -> Node:
        if node.op == "call_function" and not is_pointwise(node) and not is_reduction(node):
            self.segment += not is_view(node) and node.target is not operator.getitem
        new = self.fx.node_copy(node, read)
        new.meta = {**node.meta, compat_inductor.ORIGIN: node.name}
        if node.op == "call_function":
            new.meta[compat_inductor.SEGMENT] = self.segment
        return new

    def kept(self, node: Node) -> bool:
        """Whether the backward pass reads what there is."""
        once = compat_inductor.runs_once(node)
        if node.target is operator.getitem:
            once = once or compat_inductor.runs_once(node.args[0])  # type: ignore[arg-type]
        return once or node in self.step.late or node.op != "call_function" or node.name in self.saved

    def read(self, node: Node) -> Node:
        return self.there[node] if self.kept(node) else self.again[node]

    def make(self, node: Node) -> None:
        """Sees to it that a node can be read in the backward pass. As deep as the forward pass: no recursion."""
        stack = [node]
        while stack:
            n = stack[-1]
            if self.kept(n) or n in self.again:
                stack.pop()
            elif missing := [a for a in n.all_input_nodes if not self.kept(a) and a not in self.again]:
                stack.extend(missing)
            else:
                self.again[n] = self.copied(n, self.read)
                stack.pop()


def _updates_early(fx: torch.fx.Graph, late: Collection[Node]) -> list[Node]:
    """The nodes of a graph, but its results, in its order, with the updates not at the end: what leads elementwise to
    writes alone comes as soon as everything is there, and a write when nothing reads any more what it writes over."""
    nodes = [n for n in fx.nodes if n.op != "output"]
    update: set[Node] = set()
    for n in reversed(nodes):
        elementwise = is_pointwise(n) or is_view(n)
        if n in late and (
            compat_compile.mutates(n) or (elementwise and n.users and update.issuperset(n.users))
        ):
            update.add(n)
    when: dict[Node, int] = {}  # the last node, no update, that each comes after
    for k, n in enumerate(nodes):
        before = {*n.all_input_nodes, *(_readers(n.args[0]) if compat_compile.mutates(n) else ())} - {n}  # type: ignore[arg-type]
        when[n] = max((when.get(a, k) for a in before), default=0) if n in update else k
    return sorted(nodes, key=lambda n: (when[n], n in update))


def _readers(node: Node) -> set[Node]:
    """What reads a node's memory, through views of it as well."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        users = set(stack.pop().users) - found
        found |= users
        stack.extend(u for u in users if is_view(u))
    return found
