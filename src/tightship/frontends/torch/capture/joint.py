"""AOTAutograd's joint graph -> Program: forward pass, tangents, backward pass.

The graph is run once more, node by node, on fake tensors of its own, so that everything that capture knows
about ops (what a kernel's results really look like, what it writes, what draws random numbers) holds here
too, and sizes are numbers. The tangents are the results of an op of their own, the **boundary**, which also
overwrites the inputs that AOTAutograd's wrapper writes back to (running statistics): what stands before it
in a plan is the forward pass, what stands after it the backward pass.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.builder import trace_line
from tightship.frontends.torch import compat, compat_compile, compat_inductor
from tightship.frontends.torch.capture.lower import Numbers, finish, live_records
from tightship.frontends.torch.capture.recorder import Recorder
from tightship.frontends.torch.capture.tape import Origin, Record, Tape
from tightship.frontends.torch.program import Program, Ref, flat, substitute

__all__ = ["BUDGETS", "Joint", "Primal", "bring_tangents", "lower_joint", "origin_of", "pinned", "saved_sets"]


@dataclass(frozen=True, slots=True)
class Primal:
    """What is known of an input: its role (parameter, buffer, input) and its name for people."""

    role: str
    name: str


@dataclass(frozen=True)
class Joint:
    """A joint graph's program. A slot's key is the position of its placeholder (or of its constant).

    ``boundary`` is the op that brings the tangents, None in a forward pass alone. ``forward`` and
    ``backward`` hold, for each output of the graph, a ``Ref`` to its value or what it is instead (None, a
    number). ``nodes`` gives the fx node and the position among its results from which each storage that an
    op defines comes. ``copied`` are the storages that the model's own code has copied inputs to.
    """

    program: Program
    boundary: int | None
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    tangents: tuple[int, ...]
    nodes: dict[int, tuple[Node, int]]
    copied: frozenset[int] = frozenset()

    def node_of(self, storage: int) -> Node:
        """The fx node whose tensor spans the storage. Raises ``Unsupported`` where there is none."""
        if storage not in self.nodes:
            name = self.program.graph.storages[storage].name
            raise Unsupported(
                f"saving {name} for the backward pass", "it is a part of another op", "report this"
            )
        return compat_compile.result_node(*self.nodes[storage])


def bring_tangents(*_args: Any) -> None:
    """Stands for what autograd does between the two passes; never called."""


def lower_joint(
    gm: GraphModule, outputs: int | None, primals: Sequence[Primal] = (), *, name: str = "joint"
) -> Joint:
    """The program of a joint graph whose first ``outputs`` results are the forward pass's; None: all are,
    and there is no backward pass.

    Raises ``Unsupported``, with node and source line, for what cannot be planned (higher-order ops,
    data-dependent sizes, sparse tensors, a backward pass that reads what the forward pass overwrites).
    """
    return _Lowering(gm, outputs, primals, name).run()


class _Place:
    """Says where the node being run comes from, in place of an origin tracker."""

    def __init__(self) -> None:
        self.origin = Origin()

    def here(self) -> Origin:
        return self.origin

    forward = backward = here


@dataclass
class _Lowering:
    gm: GraphModule
    outputs: int | None
    primals: Sequence[Primal]
    name: str
    tape: Tape = field(default_factory=Tape)
    env: dict[Node, Any] = field(default_factory=dict)
    made: dict[int, tuple[Node, int]] = field(default_factory=dict)
    copied: set[int] = field(default_factory=set)

    def run(self) -> Joint:
        self.mode, self.place = compat.fake_mode(), _Place()
        self.recorder = Recorder(self.tape, self.mode, self.place)  # type: ignore[arg-type]
        results = self._results()
        count = len(results) if self.outputs is None else self.outputs
        late = self._late(results[:count])
        with compat_compile.outside(), ExitStack() as stack:
            self._inputs()
            stack.enter_context(self.mode)
            stack.enter_context(self.recorder)
            for n in self._nodes(lambda n: n not in late):
                self._node(n)
            forward = [self._ref(x) for x in results[:count]]
            tangents = self._tangents() if self.outputs is not None else None
            with self.recorder.in_phase("backward"):
                for n in self._nodes(lambda n: n in late):
                    self._node(n)
            backward = [self._ref(x) for x in results[count:]]
        self._name_gradients(backward)
        return self._finished(forward, tangents, backward)

    # --- which nodes run when ---

    def _results(self) -> list[Any]:
        (output,) = self.gm.graph.find_nodes(op="output")
        return flat(output.args[0])

    def _nodes(self, which: Callable[[Node], bool]) -> list[Node]:
        return [
            n
            for n in self.gm.graph.nodes
            if n.op in ("call_function", "get_attr", "call_module") and which(n)
        ]

    def _late(self, forward: Sequence[Any]) -> set[Node]:
        """The nodes of the backward pass: those that depend on tangents, and those traced there that the
        forward pass does not need."""
        needed: set[Node] = set()
        stack = [n for n in forward if isinstance(n, Node)]
        stack += [n for n in self.gm.graph.nodes if compat_compile.wanted_by_forward(n)]
        while stack:
            n = stack.pop()
            if n not in needed:
                needed.add(n)
                stack.extend(n.all_input_nodes)
        late: set[Node] = set()
        for n in self.gm.graph.nodes:
            if n.op == "placeholder":
                if compat_compile.is_tangent(n):
                    late.add(n)
            elif n.op != "output" and (
                any(a in late for a in n.all_input_nodes)
                or (compat_compile.is_backward(n) and n not in needed)
            ):
                late.add(n)
        self._check_order(late)
        return late

    def _check_order(self, late: set[Node]) -> None:
        seen_late = False
        for n in self.gm.graph.nodes:
            if n.op == "call_function" and n in late:
                seen_late = True
            elif seen_late and n not in late and compat_compile.mutates(n):
                written = n.args[0]
                if isinstance(written, Node) and any(u in late for u in written.users):
                    raise Unsupported(
                        f"{n.target} at {origin_of(n)}",
                        "the backward pass reads what the forward pass overwrites",
                        "write into a copy",
                    )

    # --- what the caller owns ---

    def _inputs(self) -> None:
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        for k, n in enumerate(placeholders):
            val = n.meta.get("val")
            if not isinstance(val, torch.Tensor):
                self.env[n] = _number(val, n)
                continue
            self.env[n] = fake = self._blank(val, n)
            if not compat_compile.is_tangent(n):
                self.made[self.tape.storage(self.tape.value(fake))] = (n, 0)
                known = self.primals[k] if k < len(self.primals) else Primal("input", n.name)
                self.tape.input(fake, known.role, k, known.name)

    def _blank(self, val: torch.Tensor, n: Node) -> torch.Tensor:
        if val.layout is not torch.strided:
            raise Unsupported(
                f"the {val.layout} input {n.name}", "its bytes are more than one strided storage"
            )
        shape, stride = [_number(x, n) for x in val.shape], [_number(x, n) for x in val.stride()]
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=val.dtype, device=val.device)

    def _tangents(self) -> list[int]:
        nodes = [n for n in self.gm.graph.find_nodes(op="placeholder") if compat_compile.is_tangent(n)]
        values = [
            self.tape.value(self.env[n], n.name) for n in nodes if isinstance(self.env[n], torch.Tensor)
        ]
        for n, v in zip(nodes, values, strict=False):
            self.tape.storages[self.tape.storage(v)].name = n.name
        kept = [r.value for r in map(self._ref, self._results()[: self.outputs]) if isinstance(r, Ref)]
        args = tuple(Ref(v) for v in kept)
        r = Record(bring_tangents, "tangents", args, {}, tuple(values), tuple(dict.fromkeys(kept)))
        r.effect, r.phase = True, "backward"
        r.device = next((self.tape.storages[self.tape.storage(v)].device for v in values), "cpu")
        written = [self.env[n] for n in compat_compile.overwritten_inputs(self.gm)]
        r.writes = tuple(self.tape.storage(self.tape.value(t)) for t in written)
        self.tape.records.append(r)
        return values

    # --- nodes ---

    def _node(self, n: Node) -> None:
        self.place.origin = origin_of(n)
        if n.op == "get_attr":
            self.env[n] = self._constant(n)
            return
        if (op := compat_inductor.effect_of(n)) is not None:
            raise Unsupported(
                f"{op} at {origin_of(n)}", "it runs for its effect, in an order that tokens keep",
                'use mode="compiled", or keep it out of the compiled region',
            )  # fmt: skip
        if n.op != "call_function" or isinstance(n.target, torch._ops.HigherOrderOperator):
            raise Unsupported(
                f"{n.target} at {origin_of(n)}", "it is not an ATen op", "keep it out of the compiled region"
            )
        args = torch.fx.node.map_arg(n.args, self.env.__getitem__)
        kwargs = torch.fx.node.map_arg(n.kwargs, self.env.__getitem__)
        if _is_laid_out_already(n, args) and n not in self._results():
            self.env[n] = args[0]
            return
        run: Any = _INSTEAD.get(n.target, n.target)
        if n.target is torch.ops.aten.native_dropout_backward.default:
            args = (*args[:2], self._dropout_scale(n))
        elif n.target is torch.ops.aten.bernoulli.p:
            _check_drawn(n)
        try:
            out = run(*_plain(args), **_plain(kwargs))
        except TightshipError:
            raise
        except Exception as error:
            raise Unsupported(
                f"{n.target} at {origin_of(n)}", f"it does not run on fake tensors: {error}"
            ) from error
        self.env[n] = out
        # With a layout (`contiguous()`) it is not copied for its own sake.
        if n.target is torch.ops.aten.clone.default and not n.kwargs and self._is_input(args[0]):
            self.copied.add(self.tape.storage(self.tape.value(out)))
        for k, t in enumerate(flat(out)):
            if isinstance(t, torch.Tensor) and isinstance(n.target, torch._ops.OpOverload):
                self.made.setdefault(self.tape.storage(self.tape.value(t, str(origin_of(n)))), (n, k))

    def _is_input(self, t: torch.Tensor) -> bool:
        """Whether this is an input of the graph, or a view of one, but for parameters."""
        node, _ = self.made.get(self.tape.storage(self.tape.value(t)), (None, 0))
        if node is None or node.op != "placeholder":
            return False
        of = self.gm.graph.find_nodes(op="placeholder").index(node)
        return of >= len(self.primals) or self.primals[of].role != "parameter"

    def _dropout_scale(self, n: Node) -> Any:
        """What eager multiplies a gradient behind dropout by: the number its forward pass had."""
        drawn = n.args[1].args[0] if isinstance(n.args[1], Node) and n.args[1].args else None
        if not isinstance(drawn, Node) or drawn.target is not torch.ops.aten.native_dropout.default:
            return n.args[2]
        return _kept_scale(self.env[n.args[0]], drawn.args[1])

    def _constant(self, n: Node) -> Any:
        real: Any = self.gm
        for part in str(n.target).split("."):
            real = getattr(real, part)
        if not isinstance(real, torch.Tensor):
            return real
        if compat.is_fake(real):
            raise Unsupported(f"the constant {n.target}", "its data is not known")
        with compat.without_modes():
            fake = self.mode.from_tensor(real)
        self.tape.constant(fake, real)
        return fake

    def _ref(self, x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        out = self.env[x]
        return Ref(self.tape.value(out, x.name)) if isinstance(out, torch.Tensor) else _number(out, x)

    def _name_gradients(self, backward: Sequence[Any]) -> None:
        for k, r in enumerate(backward):
            if isinstance(r, Ref) and k < len(self.primals):
                s = self.tape.storages[self.tape.storage(r.value)]
                if not s.role and not s.name:
                    s.name = f"{self.primals[k].name}.grad"

    # --- the program ---

    def _finished(self, forward: list[Any], tangents: list[int] | None, backward: list[Any]) -> Joint:
        refs = [r.value for r in forward if isinstance(r, Ref)]
        wanted = [*refs, *(tangents or ()), *(r.value for r in backward if isinstance(r, Ref))]
        program = finish(self.tape, wanted, name=self.name, losses=refs)
        number = dict(zip(wanted, program.results, strict=True))

        def renumbered(rows: list[Any]) -> tuple[Any, ...]:
            return tuple(Ref(number[r.value]) if isinstance(r, Ref) else r for r in rows)

        boundary = None
        if tangents is not None:
            boundary = next(k for k, c in enumerate(program.calls) if c.fn is bring_tangents)
            program = _fenced(program, boundary)
            _check_overwritten(program, boundary)
        storages = Numbers.of(self.tape, live_records(self.tape, wanted), wanted).storage
        nodes = {storages[s]: where for s, where in self.made.items() if s in storages}
        return Joint(
            program, boundary, renumbered(forward), renumbered(backward),
            tuple(number[v] for v in tangents or ()), nodes,
            frozenset(storages[s] for s in self.copied if s in storages),
        )  # fmt: skip


def _fenced(program: Program, boundary: int) -> Program:
    """What the forward pass must have done before the tangents come, and the backward pass must not do
    earlier."""
    graph = program.graph

    def once(k: int) -> bool:
        op = graph.ops[k]
        return op.random or op.effect or bool(graph.uses.mutates[k])

    before = tuple(k for k in range(boundary) if once(k))
    ops = list(graph.ops)
    ops[boundary] = replace(ops[boundary], control=before)
    for k in range(boundary + 1, len(ops)):
        if once(k):
            ops[k] = replace(ops[k], control=(boundary,))
    return replace(program, graph=graph.with_ops(tuple(ops)))


def _check_overwritten(program: Program, boundary: int) -> None:
    graph = program.graph
    written = set(graph.ops[boundary].mutates)
    for k in range(boundary + 1, len(graph.ops)):
        for s in graph.uses.reads[k]:
            if s in written:
                raise Unsupported(
                    f"{graph.ops[k].target} at {graph.place(k)}",
                    f"the backward pass reads {graph.storages[s].name}, which the forward pass overwrites",
                    "write into a copy",
                )


def pinned(joint: Joint, program: Program, *, followed: bool = False) -> Program:
    """``program`` (``joint``'s, perhaps measured) with what is not dropped and made again: what the caller gets after
    the forward pass, because the caller has it; and what is made of inputs that may be others by then. These are
    copies that the model makes of inputs (a queue of keys, before new ones are written to it), and, where other code
    of the model ``followed``, what is made of buffers that eager's backward pass does not read."""
    graph = program.graph
    held = {graph.values[r.value].storage for r in joint.forward if isinstance(r, Ref)} - graph.static
    once = {graph.uses.definer[s] for s in held | joint.copied}
    if followed and joint.boundary is not None:
        late = {s for k in range(joint.boundary + 1, len(graph.ops)) for s in graph.uses.reads[k]}
        buffers = {graph.values[slot.value].storage for slot in program.slots if slot.role == "buffer"} - late
        once |= {k for k in range(joint.boundary) if not buffers.isdisjoint(graph.uses.reads[k])}
    ops = tuple(replace(o, effect=True) if k in once else o for k, o in enumerate(graph.ops))
    return replace(program, graph=graph.with_ops(ops))


def _number(x: Any, n: Node) -> Any:
    """A size as a number; anything that is not a symbol stays as it is."""
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        try:
            kind = int if isinstance(x, torch.SymInt) else bool if isinstance(x, torch.SymBool) else float
            return kind(x)
        except Exception as error:
            raise Unsupported(f"{n.name} at {origin_of(n)}", "its size depends on data") from error
    return x


def origin_of(n: Node) -> Origin:
    """The module and the line that a node of a traced graph is of."""
    stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
    module = str(list(stack.values())[-1][0]) if stack else ""
    # Dynamo calls the compiled module by the name it had in the frame (L['self'], L__self___, the self of L['fn']).
    module = re.sub(r"^(L\['\w+'\]\.?|L__self___|self\.)(__self__\.?)?", "", module)
    return Origin(module, trace_line(str(n.meta.get("stack_trace") or "")))


def _copied(like: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``aten.copy`` without its copy of everything around ``like``: dimensions lie in memory in the order in which
    they do there."""
    del non_blocking
    whole = source if source.shape == like.shape else source.expand(like.shape)
    dims = range(like.dim())
    order = sorted(dims, key=lambda d: -like.stride(d)) if compat.is_dense(like) else [*dims]
    new: torch.Tensor = torch.ops.aten._to_copy.default(
        whole.permute(order), dtype=like.dtype, device=like.device, memory_format=torch.contiguous_format
    )
    return new.permute([order.index(d) for d in dims])


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch norm as eager runs it, on copies of the statistics: it can be recomputed without them."""
    if not training:
        op = torch.ops.aten._native_batch_norm_legit_functional.default
        return op(x, weight, bias, mean, variance, training, momentum, eps)
    new_mean, new_variance = torch.ops.aten.clone.default(mean), torch.ops.aten.clone.default(variance)
    op = torch.ops.aten.native_batch_norm.default
    return (*op(x, weight, bias, new_mean, new_variance, training, momentum, eps), new_mean, new_variance)


def _kept_scale(x: torch.Tensor, p: Any) -> float:
    """What dropout multiplies what it keeps by: 1/(1-p), in eager on the CPU rounded to the tensor's type."""
    if p == 1 or x.device.type != "cpu":
        return 0.0 if p == 1 else 1 / (1 - p)
    with compat.without_modes():
        return float(torch.ones(8, dtype=x.dtype).div_(1 - p)[0])


def _dropout(x: Any, p: float, train: bool | None) -> Any:
    """Dropout as eager runs it: the same draws in the same order, and the same numbers. Its mask is of bytes."""
    if not train or p == 0 or (x.device.type != "cpu" and p != 1):
        return torch.ops.aten.native_dropout.default(x, p, train)
    mask = torch.ops.aten.empty_like.default(x, dtype=torch.bool)
    mask = torch.ops.aten.zero_.default(mask) if p == 1 else torch.ops.aten.bernoulli_.float(mask, 1 - p)
    kept = torch.ops.aten.mul.Tensor(x, mask)
    return (kept if p == 1 else torch.ops.aten.mul_.Scalar(kept, _kept_scale(x, p))), mask


def _bernoulli(x: Any, p: float, generator: Any = None) -> Any:
    """``x.bernoulli_(p)`` in a new tensor, which is drawn in the order of its memory."""
    return torch.ops.aten.bernoulli_.float(torch.ops.aten.empty_like.default(x), p, generator=generator)


def _check_drawn(n: Node) -> None:
    """``x.bernoulli_(p)`` draws in the order of x's memory, ``torch.bernoulli(x, p)`` in that of its elements."""
    if (
        not n.args[0].meta["val"].is_contiguous()
        and n.args[0].target is not torch.ops.aten.empty_like.default
    ):
        raise Unsupported(
            f"{n.target} at {origin_of(n)}",
            "which numbers it draws depends on the memory's order",
            "draw into a new tensor",
        )


def _is_laid_out_already(n: Node, args: Sequence[Any]) -> bool:
    """Whether ``contiguous()`` of a tensor was traced as a copy, which it is in eager: the graph takes what comes
    before it to be in another layout than it is."""
    format = n.kwargs.get("memory_format")
    if n.target is not torch.ops.aten.clone.default or format in (None, torch.preserve_format):
        return False
    traced = n.args[0].meta["val"].is_contiguous(memory_format=format)
    return not traced and args[0].is_contiguous(memory_format=format)


_INSTEAD = {
    # Eager copies where the graph takes what comes before it to be in another layout than it is (the gradient of
    # dropout, contiguous as on CUDA); ``view`` of fake tensors may give a view that there cannot be.
    torch.ops.aten.view.default: torch.Tensor.reshape,
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten._native_batch_norm_legit_functional.default: _batch_norm,
    torch.ops.aten.native_dropout.default: _dropout,
    torch.ops.aten.bernoulli.p: _bernoulli,
}
"""Functional forms that cost more than what eager runs, or differ from it: eager's values, bit by bit."""


def _plain(tree: Any) -> Any:
    """fx keeps immutable lists and dicts; ops want plain ones."""
    if isinstance(tree, tuple):
        return tuple(_plain(x) for x in tree)
    if isinstance(tree, list):
        return [_plain(x) for x in tree]
    if isinstance(tree, dict):
        return {k: _plain(x) for k, x in tree.items()}
    return tree


# --- and back: what PyTorch's own partitioner would save ---------------------------------------------------------
# The captured ops become a joint fx graph (never run) for the partitioner, which answers for each
# ``activation_memory_budget``. In-place ops stand in it as if they made new tensors. For comparison only.

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)


def saved_sets(program: Program, budgets: Iterable[float] = BUDGETS) -> dict[float, frozenset[int]]:
    """For each budget, the storages that are saved for the backward (the caller's among them).

    Raises ``Unsupported`` where the partitioner does not take the graph.
    """
    joint = _Unlowered(program)
    try:
        found = compat_compile.saved_values(joint.module, tuple(budgets))
        return {b: frozenset(joint.storage[n] for n in saved) for b, saved in found.items()}
    except (RuntimeError, AssertionError, KeyError, ValueError, AttributeError, TypeError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unsupported("torch's activation_memory_budget on this graph", text) from error


class _Unlowered:
    """The fx graph; ``storage`` says which storage a node's tensor is (a view of)."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.mode = compat.fake_mode()
        self.fx = FxGraph()
        self.node: dict[int, Node] = {}
        self.nodes_of: dict[int, list[int]] = {}  # by storage: the values that have a node
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
        for v in self.nodes_of.pop(s, ()):
            del self.node[v]
        self._set(value, node)
        return node

    def _set(self, value: int, node: Node) -> None:
        self.node[value] = node
        self.nodes_of.setdefault(self.graph.values[value].storage, []).append(value)

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
            self._set(value, node)
        return self.node[value]

    def call(self, k: int, call: Any) -> None:
        fresh = [(j, v) for j, v in enumerate(call.results) if v >= 0]
        written = set(self.graph.uses.mutates[k]) - {self.graph.values[v].storage for _, v in fresh}
        if not fresh and not written:
            return  # a check of data: nothing of it could be saved
        args, kwargs = substitute((call.args, dict(call.kwargs)), self.read)
        target = getattr(call.fn, "fn", call.fn)  # the op in what runs in its place
        if self.graph.ops[k].random:  # one that the partitioner knows for what it is
            shape = self.graph.values[max(call.results[0], 0)].shape
            first = next((a for a in args if isinstance(a, Node)), None)
            target = torch.ops.aten.rand.default if first is None else torch.ops.aten.rand_like.default
            args, kwargs = ((shape,) if first is None else (first,)), {}
        node = self.fx.call_function(target, args, kwargs)
        if self.late:
            node.meta["partitioner_tag"] = "must_be_in_backward"
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
