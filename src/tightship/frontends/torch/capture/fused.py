"""A joint graph as a fusing compiler runs it: a small Graph of the tensors that will exist -> what to save.

Views, what is made from no tensor, and pointwise ops that feed nothing but one other kernel take no memory of their
own once they are fused: here they belong to each op that reads them, and are computed there. What is left (matrix
products, reductions, pointwise results that several kernels or one of somebody else's read) are the ops of a `Graph`
over storages, with the boundary between the passes as an op of its own, as in ``joint``. Sizes are exact, but which
tensors exist is a model of Inductor's rules: bytes of a plan are to be corrected by a replay of what it really does.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from tightship.errors import Unsupported
from tightship.frontends.builder import GraphBuilder
from tightship.frontends.torch import compat_compile, compat_inductor, compat_ops
from tightship.frontends.torch.capture.fused_nodes import (
    INDEXED,
    arguments,
    bytes_of,
    is_created,
    is_pointwise,
    is_reduction,
    lies_as,
    lies_otherwise,
    like,
    masks_of,
    place_of,
    tensors_of,
)  # fmt: skip
from tightship.frontends.torch.capture.fused_writing import Writing
from tightship.frontends.torch.compat_inductor import is_view
from tightship.frontends.torch.compiled_collectives import is_collective, is_gather, number_of
from tightship.graph import Graph, Op
from tightship.machine import modeled_time
from tightship.plan import Plan, Step
from tightship.simulate import replay

__all__ = [
    "FusedJoint", "Fusing", "Overwrites", "between_blocks", "fuse", "with_excess", "with_overwrites",
    "with_workspaces",
]  # fmt: skip


Overwrites = tuple[tuple[int, int], ...]
"""``Op.overwrites``."""


@dataclass(frozen=True, eq=False)
class FusedJoint:
    """``graph``, and which fx node's tensor each of its storages is. ``seconds``: of each node, by name. ``may``: by
    op, what its results could at most be written over, as ``Op.overwrites``, however tensors lie: for bounds."""

    graph: Graph
    boundary: int
    nodes: dict[int, str]
    primals: tuple[str, ...]
    seconds: dict[str, float]
    calls: dict[int, Node]
    exists: frozenset[Node]
    late: frozenset[Node]
    may: dict[int, Overwrites]

    def holding(self, limit: int, rest: int) -> FusedJoint:
        """The model with so much taken of ``limit`` bytes, while the boundary runs, that at most ``rest`` beyond the
        inputs stay there."""
        return replace(self, graph=self.graph.holding(self.boundary, limit, rest))

    def is_late(self, node: Node) -> bool:
        """Whether a node is of the backward pass."""
        return node in self.late

    def needed(self, plan: Plan) -> tuple[str, ...]:
        """The nodes that have to cross the boundary: what its backward pass reads before it makes it."""
        uses, steps = self.graph.uses, plan.steps
        at = next(k for k, s in enumerate(steps) if s.kind == "compute" and s.op == self.boundary)
        there: set[int] = set(uses.defines[self.boundary])
        needed: dict[int, None] = {}
        for step in steps[at + 1 :]:
            if step.kind in ("compute", "recompute"):
                needed.update(dict.fromkeys(s for s in uses.reads[step.op] if s not in there))
                there.update(uses.defines[step.op] if step.kind == "compute" else step.storages)
        return tuple(self.nodes[s] for s in sorted(needed) if s in self.nodes)

    def saved(self, plan: Plan) -> tuple[str, ...]:
        """The nodes that may cross the boundary: those, and the inputs."""
        return (*self.primals, *self.needed(plan))

    def ordered(self, plan: Plan, pair: compat_inductor.Pair) -> compat_inductor.Pair:
        """``pair``, which saves what `saved` says, with the backward pass as the plan has it: its order, and a copy
        of an op's nodes for each time that it runs. Raises ``Unsupported`` where the plan computes in the backward
        pass what draws random numbers or must happen once."""
        compat_inductor.realize_as_is(pair.forward, {n.name for n in self.exists if lies_otherwise(n)})
        return compat_inductor.with_backward(pair, _WritingJoint(self, plan, pair).run())

    def with_excess(self, graph: Graph, plan: Plan, passes: Sequence[Sequence[tuple[str, int]]]) -> Graph:
        """``graph``, which is this model's, with the bytes that its ops were short of as their workspace: what the
        passes of ``plan`` really had in use while each tensor was made (``passes``: node and bytes, in order), beyond
        what the model has. The planner then sees what fused code keeps, converts or sums up late."""
        at = next(k for k, s in enumerate(plan.steps) if s.kind == "compute" and s.op == self.boundary)
        parts = range(at), range(at + 1, len(plan.steps))
        return with_excess(graph, plan, self.calls, zip(parts, passes, strict=True))

    def recompute_time(self, pair: compat_inductor.Pair) -> tuple[int, float]:
        """How many kernels run again, and their seconds, modeled."""
        first = {n.name for n in pair.forward.graph.nodes if n.op == "call_function"}
        names = [compat_inductor.origin(n) for n in pair.backward.graph.nodes if n.op == "call_function"]
        again = [name for k, name in enumerate(names) if name in first or name in names[:k]]
        kernels = [self.seconds[name] for name in again if name in self.seconds]
        return len(kernels), sum(kernels)


def with_excess(
    graph: Graph, plan: Plan, calls: Mapping[int, Node],
    passes: Iterable[tuple[range, Sequence[tuple[str, int]]]],
) -> Graph:  # fmt: skip
    """``graph`` with the bytes that its ops were short of as their workspace. ``passes``: steps of ``plan``, and for
    which nodes fused code had memory in them, with the bytes in use then. What was in use for a node that the model
    has fused away counts for the next one that it has."""
    line = replay(graph, plan.steps)
    short: dict[int, int] = {}
    for steps, used in passes:
        levels: dict[str, list[int]] = {
            calls[op].name: [] for k in steps if (op := plan.steps[k].op) in calls and _runs(plan.steps[k])
        }
        between, latest = 0, None
        for name, nbytes in used:
            between = max(between, nbytes)
            if name in levels:
                latest = levels[name]
                latest.append(between)
                between = 0
        if latest:
            latest[-1] = max(latest[-1], between)
        for k in steps:
            op = plan.steps[k].op
            if not _runs(plan.steps[k]) or op not in calls:
                continue
            if rows := levels[calls[op].name]:
                level = rows.pop(0) if len(rows) > 1 else rows[0]
                short[op] = max(short.get(op, 0), level - line.during[k])
    ops = list(graph.ops)
    for k, nbytes in short.items():
        if nbytes > 0:
            ops[k] = replace(ops[k], workspace=ops[k].workspace + nbytes)
    return graph.with_ops(tuple(ops))


def with_workspaces(graph: Graph, calls: Mapping[int, Node], nbytes: Mapping[str, int]) -> Graph:
    """``graph`` whose ops have these workspaces, by node."""
    ops = list(graph.ops)
    for k, node in calls.items():
        ops[k] = replace(ops[k], workspace=max(ops[k].workspace, nbytes.get(node.name, 0)))
    return graph.with_ops(tuple(ops))


def with_overwrites(graph: Graph, may: Mapping[int, Overwrites]) -> Graph:
    """``graph`` whose ops have these ``overwrites``."""
    ops = list(graph.ops)
    for k, overwrites in may.items():
        ops[k] = replace(ops[k], overwrites=overwrites)
    return graph.with_ops(tuple(ops))


def _runs(step: Step) -> bool:
    return step.kind in ("compute", "recompute")


class _WritingJoint:
    """Writes the backward pass of a plan, for the forward pass of ``pair``."""

    def __init__(self, joint: FusedJoint, plan: Plan, pair: compat_inductor.Pair) -> None:
        self.joint, self.plan, self.pair = joint, plan, pair
        self.write = Writing(joint, plan)

    def run(self) -> torch.fx.Graph:
        joint, write, graph, steps = self.joint, self.write, self.joint.graph, self.plan.steps
        (call, *_) = joint.calls.values()
        named = {n.name: n for n in call.graph.nodes}
        for old in [n for n in self.pair.backward.graph.nodes if n.op == "placeholder"]:
            new = write.fx.placeholder(old.name)
            new.meta = dict(old.meta)
            write.there[named[old.name]] = new
        at = next(k for k, s in enumerate(steps) if s.kind == "compute" and s.op == joint.boundary)
        for write.at, step in enumerate(steps[at + 1 :], at + 1):
            if step.kind == "free" and step.form == "full":
                write.gone(named[joint.nodes[s]] for s in step.storages)
            elif step.kind in ("compute", "recompute"):
                op = graph.ops[step.op]
                if step.kind == "recompute" and not op.pure:
                    raise Unsupported(f"computing {op.name} in the backward pass", "it must happen once")
                kept = graph.uses.defines[step.op] if step.kind == "compute" else step.storages
                write.op(joint.calls[step.op], {joint.nodes[s] for s in kept})
                write.gone(named[joint.nodes[s]] for s, _ in step.reuses)
        (old,) = self.pair.backward.graph.find_nodes(op="output")
        (results,) = call.graph.find_nodes(op="output")
        given = torch.utils._pytree.tree_leaves(results.args[0])[self.pair.outputs :]
        out = write.fx.output(tuple(write.read(x) if isinstance(x, Node) else x for x in given))
        out.meta = dict(old.meta)
        return write.fx


def fuse(
    gm: GraphModule, outputs: int, *, name: str = "joint", masks: bool = True, gathers_again: bool = False
) -> FusedJoint:
    """The model of a joint graph whose first ``outputs`` results are the forward pass's. ``masks``: whether what the
    backward pass makes of the forward pass's values, and is smaller than they are, may be saved in their place.
    ``gathers_again``: whether gathers from other ranks may run again, as all ranks have the same plan. Raises
    ``Unsupported`` for higher-order ops and symbolic sizes."""
    return Fusing(gm, outputs, name, masks, gathers_again).run()


@dataclass
class Fusing:
    gm: GraphModule
    outputs: int
    name: str
    keep_masks: bool = False
    gathers_again: bool = False
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    value: dict[Node, int] = field(default_factory=dict)  # of nodes with a storage
    nodes: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ops: dict[int, Node] = field(default_factory=dict)
    may: dict[int, Overwrites] = field(default_factory=dict)  # as `FusedJoint` has it
    overwritten: set[Node] = field(default_factory=set)  # inputs that are others in the backward pass
    masks: set[Node] = field(default_factory=set)  # as `masks_of` has them
    _sent: tuple[int, ...] = ()  # the last collective

    def run(self) -> FusedJoint:
        (output,) = self.gm.graph.find_nodes(op="output")
        self.results = list(torch.utils._pytree.tree_leaves(output.args[0]))
        self.calls = [n for n in self.gm.graph.nodes if n.op == "call_function"]
        self._check()
        self.late = _late(self.gm, self.results[: self.outputs])
        if self.keep_masks:
            self._keep_masks(compat_inductor.after_tangents(self.gm))
        self.overwritten = compat_inductor.overwritten(self.gm)
        self.exists = self._existing()
        primals = self._primals()
        for n in self.calls:
            if n not in self.late:
                self._op(n)
        boundary = self._boundary()
        for n in self.calls:
            if n in self.late:
                self._op(n)
        wanted = [v for x in self.results if isinstance(x, Node) for v in self._leaves(x)]
        graph = self.builder.graph(dict.fromkeys(wanted), self.name)
        graph = _held(graph, boundary, self._forward())
        return FusedJoint(
            graph,
            boundary,
            self.nodes,
            primals,
            self.seconds,
            self.ops,
            frozenset(self.exists),
            frozenset(self.late),
            self.may,
        )

    def _keep_masks(self, after: set[Node]) -> None:
        """Takes `masks_of` into the forward pass. ``after``: what is made of gradients."""
        self.masks, early = masks_of(self.late, after)
        self.late -= early

    def _check(self) -> None:
        for n in self.calls:
            if isinstance(n.target, torch._ops.HigherOrderOperator):
                op = compat_inductor.effect_of(n)
                if isinstance(op, torch._ops.OpOverload):
                    continue
                raise Unsupported(
                    f"{op or n.target} at {place_of(n)} in compiled mode",
                    "it is not an ATen op",
                    'use mode="exact"',
                )
            for t in tensors_of(n):
                if any(isinstance(x, torch.SymInt) for x in (*t.shape, *t.stride())):
                    raise Unsupported(f"a symbolic size at {place_of(n)}", "a budget needs numbers")

    # --- which tensors exist ---

    def _existing(self) -> set[Node]:
        """Of the nodes that could be fused away, those that have a tensor all the same; and all others."""
        handed = {x for x in self.results if isinstance(x, Node)}
        readers: dict[Node, set[Node]] = {}
        exists: set[Node] = set()
        for n in reversed(self.calls):
            users = [u for u in n.users if u.op == "call_function" and u not in self.masks]
            reached: set[Node] = set()
            for u in users:
                reached |= {self._reader(u)} if u in exists else readers.get(u, set())
            readers[n] = reached
            if n.target is operator.getitem or is_view(n) or is_created(n):
                continue
            foreign = any(self._foreign(r) for r in reached)
            across = n not in self.late and any(r in self.late for r in reached)
            drawn = "inductor_random" in str(n.target)  # Inductor writes them out always
            apart = drawn or n in handed or compat_inductor.AS_IT_IS in n.meta
            if not is_pointwise(n) or apart or foreign or len(reached) > 1 or across:
                exists.add(n)
        return exists

    def _reader(self, n: Node) -> Node:
        """The kernel that a node is part of."""
        return n

    def _foreign(self, n: Node) -> bool:
        """Whether nothing is fused into it."""
        return not is_pointwise(n) and not is_reduction(n)

    def _leaves(self, n: Node) -> dict[int, None]:
        """The values that a node is computed from where it is read."""
        found: dict[int, None] = {}
        seen: set[Node] = set()
        stack = [n]
        while stack:
            m = stack.pop()
            if m in seen:
                continue
            seen.add(m)
            if m in self.value:
                found[self.value[m]] = None
            elif m not in self.exists or m.target is operator.getitem:
                stack.extend(reversed(m.all_input_nodes))
        return found

    # --- the graph ---

    def _primals(self) -> tuple[str, ...]:
        names = []
        for n in self.gm.graph.find_nodes(op="placeholder"):
            if compat_compile.is_tangent(n):
                continue
            names += [] if n in self.overwritten else [n.name]
            for t in tensors_of(n):
                self._value(n, t, "input")
                self.builder.inputs.append(self.value[n])
        return tuple(names)

    def _value(self, n: Node, t: torch.Tensor, kind: str = "activation") -> None:
        self.value[n] = self.builder.tensor(
            n.name, bytes_of(t), str(t.dtype).removeprefix("torch."), tuple(t.shape), kind
        )
        self.nodes[self.builder.storage_of(self.value[n])] = n.name

    def _op(self, n: Node) -> None:
        if n not in self.exists:
            return
        reads: dict[int, None] = {}
        for a in n.all_input_nodes:
            reads |= self._leaves(a)
        effect = compat_inductor.runs_once(n) and not compat_inductor.draws(n)
        parts = [u for u in n.users if u.target is operator.getitem]
        if compat_inductor.effect_of(n) is None:
            parts = [] if effect else parts or [n]
        for m in parts:
            for t in tensors_of(m):
                self._value(m, t)
        outs = tuple(self.value[m] for m in parts if m in self.value)
        if not outs and not effect:
            return
        once = any(self.value.get(m) in reads for m in self.overwritten)
        number = number_of(n.target, n.args)
        once = once or (is_collective(n.target) and not (self.gathers_again and is_gather(n.target)))
        flops, seconds = self._cost(n, reads, outs)
        self.seconds[n.name] = seconds
        phase = "backward" if n in self.late else "forward"
        at = self.builder.op(
            Op(
                self.builder.op_name(n.name), str(n.target), tuple(reads), outs, random=compat_inductor.draws(n),
                effect=effect or once, time=seconds, flops=flops, phase=phase, source=place_of(n),
                overwrites=self._overwrites(n), control=self._sent if number is not None else (),
            )
        )  # fmt: skip
        self.may[at] = self._overwrites(n, in_order=False)
        if number is not None:  # in the program's order on all ranks, whatever each plans
            self._sent = (at,)
        self.ops[at] = n

    def _overwrites(self, n: Node, *, in_order: bool = True) -> Overwrites:
        """``Op.overwrites``: fused code writes a pointwise result over what it reads element by element and nothing
        needs any more; ``in_order``: where that lies as the result does."""
        if n not in self.value or not is_pointwise(n) or str(n.target) in INDEXED:
            return ()
        made = self.builder.storage_of(self.value[n])
        alike: dict[int, bool] = {}
        seen: set[tuple[Node, bool]] = set()
        stack = [(a, not in_order or lies_as(a, n)) for a in n.all_input_nodes]
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            m, same = at
            if m in self.value:
                s = self.builder.storage_of(self.value[m])
                ours = m.op == "call_function" and like(m, n)
                alike[s] = alike.get(s, True) and same and ours
            elif m not in self.exists or m.target is operator.getitem:
                same = same and (is_view(m) or is_pointwise(m)) and str(m.target) not in INDEXED
                as_it_is = not in_order or is_view(m)
                stack.extend((a, same and (as_it_is or lies_as(a, m))) for a in m.all_input_nodes)
        return tuple((s, made) for s, same in alike.items() if same)

    def _cost(self, n: Node, reads: dict[int, None], outs: Sequence[int]) -> tuple[int, float]:
        flops = 0
        if not is_pointwise(n) and not is_reduction(n):
            args, kwargs = arguments(n)
            if isinstance(n.target, torch._ops.OpOverload):
                flops = compat_ops.flops_of(n.target, args, kwargs, n.meta.get("val"))
        storages = self.builder.storages
        traffic = sum(storages[self.builder.storage_of(v)].size for v in (*reads, *outs))
        return flops, modeled_time(flops, traffic)

    def _forward(self) -> list[int]:
        return [v for x in self.results[: self.outputs] if isinstance(x, Node) for v in self._leaves(x)]

    def _boundary(self) -> int:
        tangents = [n for n in self.gm.graph.find_nodes(op="placeholder") if compat_compile.is_tangent(n)]
        for n in tangents:
            for t in tensors_of(n):
                self._value(n, t)
        made = tuple(self.value[n] for n in tangents if n in self.value)
        before = tuple(k for k, op in enumerate(self.builder.ops) if op.random or op.effect)
        given = tuple(dict.fromkeys(self._forward()))
        return self.builder.op(
            Op("tangents", "tangents", given, made, effect=True, control=before, phase="backward")
        )


def _held(graph: Graph, boundary: int, forward: Sequence[int]) -> Graph:
    """What the caller gets after the forward pass stays from then on; effects keep to their side of the boundary."""
    held = {graph.uses.definer[graph.values[v].storage] for v in forward}
    ops = list(graph.ops)
    for k, op in enumerate(ops):
        effect = op.effect or k in held
        control = (boundary,) if k > boundary and (op.random or op.effect) else op.control
        ops[k] = replace(op, effect=effect, control=control)
    before = tuple(k for k in range(boundary) if ops[k].random or ops[k].effect)
    ops[boundary] = replace(ops[boundary], control=before)
    return graph.with_ops(tuple(ops))


def _late(gm: GraphModule, forward: Sequence[Any]) -> set[Node]:
    """The nodes of the backward pass: those that depend on tangents, and those traced there that the forward pass
    does not need."""
    needed: set[Node] = set()
    stack = [n for n in forward if isinstance(n, Node)]
    stack += [n for n in gm.graph.nodes if compat_compile.wanted_by_forward(n)]
    while stack:
        n = stack.pop()
        if n not in needed:
            needed.add(n)
            stack.extend(n.all_input_nodes)
    late: set[Node] = set()
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            if compat_compile.is_tangent(n):
                late.add(n)
        elif n.op == "call_function" and (
            any(a in late for a in n.all_input_nodes) or (compat_compile.is_backward(n) and n not in needed)
        ):
            late.add(n)
    return late


def between_blocks(joint: GraphModule, is_late: Callable[[Node], bool]) -> tuple[str, ...]:
    """What a checkpoint around each block would save: the inputs, and what goes from one block of the forward pass to
    another or to what follows. Blocks are the modules in the outermost lists or sequences; nothing where there are
    fewer than two."""
    block = {n: _block(n) for n in joint.graph.nodes if n.op == "call_function" and not is_late(n)}
    if len(set(block.values()) - {""}) < 2:
        return ()
    crossing = [
        n.name for n, at in block.items()
        if isinstance(n.meta.get("val"), torch.Tensor) and n.all_input_nodes
        and any(block.get(u, at) != at for u in n.users)
    ]  # fmt: skip
    return (*(n.name for n in joint.graph.find_nodes(op="placeholder") if not is_late(n)), *crossing)


_NUMBERED: Final = re.compile(r"(\.|\[')\d+('\])?$")


def _block(node: Node) -> str:
    """The path of the outermost module of a list that a node is of."""
    paths = (str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values())
    return next((path for path in paths if _NUMBERED.search(path)), "")
