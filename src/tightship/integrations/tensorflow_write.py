"""A plan -> a GraphDef: clones for what is recomputed, pairs of copies for what is swapped, and what makes them wait.

Nodes keep their names, so what is fetched and fed stays the same, and so do the numbers: every node is one of the
graph's own, a copy of one, or a copy of bytes. A session runs whatever is ready. Grappler's own plans are written
as Grappler does, with triggers (G3-G5, G12); of any other plan every node waits for the one before it, or the
session would not keep to the planned order, and to its peak. In loops and functions the nodes of a turn wait for one
another, too. For a node on one side of a Switch only nodes on that side wait.

Sums become accumulators (G6, G7) in the GraphDef before it is planned.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import tensorflow as tf
from google.protobuf import text_format

from tightship.baselines.grappler_nodes import CLONE, TRIGGER, Rewrite, accumulator, crowded_sums, rewritten
from tightship.errors import BadInput, Unsupported
from tightship.files import write_file
from tightship.frontends.tensorflow.functions import acyclic, alive_when, frames_of
from tightship.frontends.tensorflow.lower import lower
from tightship.frontends.tensorflow.nodes import CONTROL, Node, Web, name_of
from tightship.frontends.tensorflow.program import Loop, Program, Turn
from tightship.plan import Plan, Step

__all__ = ["COPIES", "accumulated", "planned_graph", "write_graph"]


def accumulated(program: Program, memory: int) -> Program:
    """The program whose sums are accumulators where its peak is above 80 % of ``memory``; itself, if there is no such
    sum. Names, and what reads them, stay."""
    web = Web(program.nodes)
    sums = crowded_sums(program.graph, web, memory)
    if not sums:
        return program
    proto = _copied(program.file.proto)
    nodes = {n.name: n for n in proto.node}
    at = {n.name: (i, 0) for i, n in enumerate(proto.node)}
    made = {v.name: v for v in program.graph.values}
    place = {n: i for i, n in enumerate(web.order)}
    for name in sums:
        found, value = accumulator(web, name, place), made[name]
        kind = tf.dtypes.as_dtype(value.dtype).as_datatype_enum
        for node in found.added:
            _described(proto.node.add(), node, kind, value.shape, f"{name}/tmp_var")
            i, k = max(at[name_of(i)] for i in node.inputs)
            at[node.name] = i, k + 1  # in the file it stands as soon as it can be run
        target = nodes[name]
        target.Clear()
        _described(target, found.result, kind, value.shape, f"{name}/tmp_var")
    ordered = sorted(proto.node, key=lambda n: at[n.name])
    whole = type(proto)(node=ordered, library=proto.library, versions=proto.versions)
    file = replace(program.file, proto=whole)
    return lower(file, fetch=program.fetch, feed=program.graph.meta["fed"])


def _described(proto: Any, node: Node, kind: int, shape: tuple[int, ...], variable: str) -> None:
    """Fill in a node of an accumulator."""
    proto.name, proto.op, proto.device = node.name, node.kind, node.device
    proto.input.extend(node.inputs)
    proto.attr["dtype" if node.kind == "TemporaryVariable" else "T"].type = kind
    if node.kind == "TemporaryVariable":
        proto.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    if node.kind in ("TemporaryVariable", "DestroyTemporaryVariable"):
        proto.attr["var_name"].s = variable.encode()
    if node.kind in ("Assign", "AssignAdd"):
        proto.attr["use_locking"].b = node.kind == "AssignAdd"
    if node.kind == "Assign":
        proto.attr["validate_shape"].b = False


def _loops(turn: Turn) -> list[Loop]:
    """The loops of Enter and Exit in a turn, and in these."""
    return [x for loop in turn.loops.values() for x in (loop, *_loops(loop.turn))]


COPIES: Final = ("copy", "identity")
"""How bytes are copied out and back: by Grappler's two ops, which TensorFlow has for GPUs only, or by ``Identity`` on
the host's device and back, which runs everywhere."""
_OUT, _IN = "_CopyFromGpuToHost", "_CopyFromHostToGpu"
_HOST = "/device:CPU:0"


def write_graph(program: Program, plan: Plan, path: str | os.PathLike[str], copies: str = COPIES[0]) -> None:
    """Write the graph as planned, as bytes, or as text where the path ends in ``.pbtxt``; complete and accepted by
    TensorFlow's importer, or not at all. Raises ``BadInput`` and ``Unsupported``."""
    proto = planned_graph(program, plan, copies)
    try:
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(proto, name="")
    except (ValueError, TypeError, RuntimeError, tf.errors.OpError) as error:
        said = " ".join(str(error).split())[:400]
        raise BadInput(f"TensorFlow rejects the planned graph: {said}", place=os.fspath(path)) from error
    text = os.fspath(path).endswith(".pbtxt")
    write_file(Path(path), text_format.MessageToString(proto).encode() if text else proto.SerializeToString())


def planned_graph(program: Program, plan: Plan, copies: str = COPIES[0]) -> Any:
    """The GraphDef of a plan."""
    if plan.digest != program.graph.digest:
        fault = f"the plan was made for another graph, of digest {plan.digest[:12]}"
        raise BadInput(fault, place=str(program.file.path))
    if copies not in COPIES:
        raise BadInput(f"unknown {copies!r}; choose from {', '.join(COPIES)}", place="--copies")
    options = plan.meta.get("grappler")
    if options is not None and program.turn.loops:
        raise Unsupported(
            f"a plan of Grappler's for {program.file.path}", "its loops of Enter and Exit are one op here",
            "plan with another --planner",
        )  # fmt: skip
    if options is not None and plan.count("recompute") and not plan.count("offload"):
        hints = tuple(filter(None, (h.strip() for h in options["recompute_hints"].split(","))))
        return _applied(program, rewritten(program.graph, options["level"], options["scope"], hints))
    writer = _Writer(program, plan, copies, chained=options is None)
    for i, step in enumerate(plan.steps):
        writer.step(i, step)
    if options is None:
        writer.chain_functions(program.turn)
    return writer.proto


def _copied(proto: Any) -> Any:
    return type(proto).FromString(proto.SerializeToString())


def _applied(program: Program, rewrite: Rewrite) -> Any:
    """The graph with what Grappler's recompute rewrite adds and changes."""
    proto = _copied(program.file.proto)
    nodes = {n.name: n for n in proto.node}
    for name, inputs in rewrite.inputs.items():
        nodes[name].input[:] = inputs
    for added in rewrite.added:
        origin = nodes[rewrite.origin[added.name]] if added.name in rewrite.origin else None
        _add(proto, added, origin)
    return proto


def _add(proto: Any, added: Node, origin: Any = None) -> Any:
    """A new node; a clone has the attributes of its origin."""
    node = proto.node.add(name=added.name, op=added.kind, device=added.device, input=added.inputs)
    if origin is not None:
        for key in origin.attr:
            node.attr[key].CopyFrom(origin.attr[key])
    return node


class _Writer:
    def __init__(self, program: Program, plan: Plan, copies: str, *, chained: bool) -> None:
        self.graph, self.copies, self.chained = program.graph, copies, chained
        self.plan = plan
        self.proto = _copied(program.file.proto)
        frames = frames_of(program.file.proto, str(program.file.path))
        self.alive = alive_when(acyclic(program.file.proto, frames.values()))
        self.loops = dict(program.turn.loops)
        self.exits = {
            f"{n}:{k}" if k else n: e for n, loop in self.loops.items() for k, e in enumerate(loop.exits)
        }
        self.nodes = {n.name: n for n in self.proto.node}
        self.stay = [0] * len(self.graph.storages)  # how often a storage has come back
        self.ref = {
            v: (self.exits.get(value.name, value.name), 0) for v, value in enumerate(self.graph.values)
        }  # where its bytes are, of a stay
        self.maker = {v: k for k, op in enumerate(self.graph.ops) for v in op.outputs}
        self.pairs: dict[int, str] = {}  # storage -> its copy outside
        self.going: dict[int, str] = {}  # the same, of those whose bytes inside are not free yet
        self.leaving: list[str] = []  # copies that the next node waits for
        self.ran: list[tuple[str, frozenset[tuple[str, int]]]] = []  # nodes so far, and when they are run

    def step(self, i: int, step: Step) -> None:
        if step.kind == "compute":
            self.compute(self.graph.ops[step.op].name, step.op)
        elif step.kind == "recompute":
            self.again(step.op, step.storages)
        elif step.kind in ("offload", "fetch"):
            for s in step.storages:
                self.out(i, s) if step.kind == "offload" else self.back(i, s)
        elif step.kind == "free" and step.form == "full":
            self.leaving += [self.going.pop(s) for s in step.storages if s in self.going]
        elif step.kind != "free":
            raise Unsupported(
                f"a step of kind {step.kind!r} in a GraphDef", "TensorFlow has no op for it",
                "plan with recompute and offload",
            )  # fmt: skip

    def compute(self, name: str, op: int) -> None:
        if name in self.loops:
            self.loop(name, op)
            return
        node = self.nodes[name]
        data = [i for i in node.input if not i.startswith("^")]
        waits = [i for i in node.input if i.startswith("^")]
        waits += self.waits(name, chained=self.chained)
        node.input[:] = [*self.read(op, data), *dict.fromkeys(waits)]
        self.ran.append((name, self.alive[name]))

    def loop(self, name: str, op: int) -> None:
        """A loop of Enter and Exit begins after what was before it, and whoever is next waits for its Exits."""
        loop = self.loops[name]
        enters = [self.nodes[e] for e in loop.enters]
        data = [i for e in enters for i in e.input if not i.startswith("^")]
        waits = self.waits(loop.enters[0], chained=self.chained)
        read = iter(self.read(op, data))
        for e in enters:
            given = [i if i.startswith("^") else next(read) for i in e.input]
            e.input[:] = [*(i for i in given if not i.startswith("^")),
                          *dict.fromkeys([*(i for i in given if i.startswith("^")), *waits])]  # fmt: skip
        if self.chained:
            self.chain_turn(loop.turn)
        self.ran += [(e, self.alive[e]) for e in loop.exits]

    def waits(self, name: str, *, chained: bool) -> list[str]:
        """What a node waits for besides its own inputs: copies that leave, and the node before it that runs whenever
        it does."""
        alive = self.alive.get(name, frozenset())
        leaving, self.leaving = self.leaving, []
        found = [n for n in leaving if self.alive.get(n, frozenset()) <= alive]
        return [f"^{n}" for n in (*found, *(self.before(name) if chained else ()))]

    def before(self, name: str) -> list[str]:
        alive = self.alive.get(name, frozenset())
        return next(([n] for n, when in reversed(self.ran) if when <= alive), [])

    def chain_turn(self, turn: Turn) -> None:
        """The nodes of a turn wait for one another in its order; control nodes run as they are ready."""
        ran: list[tuple[str, frozenset[tuple[str, int]]]] = []
        for name in turn.order:
            inner: Loop | None = turn.loops.get(name)
            heads = inner.enters if inner else (name,)
            if not inner and self.nodes[name].op in CONTROL:
                continue
            for head in heads:
                before = next((n for n, when in reversed(ran) if when <= self.alive[head]), None)
                wait = f"^{before}"
                if before is not None and wait not in self.nodes[head].input:
                    self.nodes[head].input.append(wait)
            if inner:
                self.chain_turn(inner.turn)
            ran += [(e, self.alive[e]) for e in (inner.exits if inner else heads)]

    def chain_functions(self, turn: Turn) -> None:
        """The nodes of functions wait for one another in the order of the first that calls them."""
        turns, found = [turn, *(loop.turn for loop in _loops(turn))], dict[str, Turn]()
        while turns:
            for name, inner in turns.pop().functions.items():
                if name not in found:
                    found[name] = inner
                    turns += [inner, *(loop.turn for loop in _loops(inner))]
        for function in self.proto.library.function:
            nodes = {n.name: n for n in function.node_def}
            if function.signature.name not in found or any(n.op in CONTROL for n in nodes.values()):
                continue
            order = [n for n in found[function.signature.name].order if n in nodes]
            for one, two in itertools.pairwise(order):
                if f"^{one}" not in nodes[two].input:
                    nodes[two].input.append(f"^{one}")

    def read(self, op: int, data: list[str]) -> list[str]:
        """The inputs with the names under which their bytes are there now; constants inside loops are last."""
        return [
            given if self.stay[self.graph.values[v].storage] == 0 else self.current(v)
            for given, v in zip(data, self.graph.ops[op].inputs[: len(data)], strict=True)
        ]

    def current(self, v: int) -> str:
        """Where a value's bytes are; a view of what came back is made again."""
        s = self.graph.values[v].storage
        name, stay = self.ref[v]
        if stay == self.stay[s]:
            return name
        op = self.maker[v]
        if all(self.graph.values[i].storage != s for i in self.graph.ops[op].inputs):  # it is no view
            raise BadInput(f"{self.graph.values[v].name!r} is read but not fetched", place="plan")
        self.clone(op)
        return self.ref[v][0]

    def again(self, op: int, storages: tuple[int, ...]) -> None:
        for s in storages:
            self.stay[s] += 1
        name, origin = self.fresh(TRIGGER, op), self.graph.ops[op].name
        waits = self.waits(origin, chained=True)
        self.nodes[name] = _add(
            self.proto, Node(name, "NoOp", tuple(waits), self.nodes[self.graph.ops[op].name].device)
        )
        clone = self.clone(op, f"^{name}", storages)
        self.alive[clone] = self.alive[origin]
        self.ran.append((clone, self.alive[origin]))

    def clone(self, op: int, trigger: str = "", storages: tuple[int, ...] = ()) -> str:
        """A copy of an op's node; its results are the bytes of ``storages`` from now on, those of a view anyway."""
        origin, name = self.nodes[self.graph.ops[op].name], self.fresh(CLONE, op)
        count = sum(not i.startswith("^") for i in origin.input)
        named = [self.graph.values[v].name for v in self.graph.ops[op].inputs[:count]]
        data = [self.exits.get(n, n) for n in named]
        waits = [i for i in origin.input if i.startswith("^")] if not self.chained else []
        inputs = (*self.read(op, data), *dict.fromkeys(waits), *([trigger] if trigger else []))
        self.nodes[name] = _add(self.proto, Node(name, origin.op, inputs, origin.device), origin)
        for port, v in enumerate(self.graph.ops[op].outputs):
            at = f"{name}:{port}" if port else name
            if not trigger or self.graph.values[v].storage in storages:
                self.ref[v] = at, self.stay[self.graph.values[v].storage]
        return name

    def fresh(self, prefix: str, op: int) -> str:
        """``Recomputed/x``, and ``Recomputed_2/x`` for the second time."""
        name, n = prefix + self.graph.ops[op].name, 1
        while name in self.nodes:
            n += 1
            name = f"{prefix[:-1]}_{n}/{self.graph.ops[op].name}"
        return name

    # --- copies ---

    def out(self, i: int, s: int) -> None:
        """The copy out, named after who reads the copy back first; none where nobody does."""
        found = self.consumer(i, s)
        if found is None:
            return
        v = self.defined(s)
        reads, (consumer, index) = self.current(v), found
        name = f"swap_out_{consumer.name}_{index}"
        self.pairs[s] = self.going[s] = self.copy(name, reads, v, consumer, outward=True)

    def back(self, i: int, s: int) -> None:
        found = self.consumer(i, s)
        if found is None or s not in self.pairs:
            return
        v, (consumer, index) = self.defined(s), found
        name = self.copy(f"swap_in_{consumer.name}_{index}", self.pairs[s], v, consumer, outward=False)
        self.stay[s] += 1
        self.ref[v] = name, self.stay[s]

    def copy(self, name: str, reads: str, v: int, consumer: Any, *, outward: bool) -> str:
        """A node that copies, with the consumer's device and group."""
        if name in self.nodes:
            raise BadInput(f"input {name!r} is swapped twice", place="plan")  # G13
        waits = () if outward else tuple(f"^{n}" for n in self.before(consumer.name))
        self.alive[name] = self.alive[consumer.name]
        device = _HOST if outward and self.copies == "identity" else consumer.device
        kind = "Identity" if self.copies == "identity" else _OUT if outward else _IN
        node = self.nodes[name] = _add(self.proto, Node(name, kind, (reads, *waits), device))
        node.attr["T"].type = tf.dtypes.as_dtype(self.graph.values[v].dtype).as_datatype_enum
        if self.copies == "copy":
            group = f"loc@{name.removeprefix('swap_out_').removeprefix('swap_in_')}".encode()
            node.attr["_class"].list.s.append(group)
            if group not in consumer.attr["_class"].list.s:
                consumer.attr["_class"].list.s.append(group)
        return name

    def defined(self, s: int) -> int:
        """The value that a storage is made as."""
        made = self.graph.ops[self.graph.uses.definer[s]].outputs
        return next(v for v in made if self.graph.values[v].storage == s)

    def consumer(self, i: int, s: int) -> tuple[Any, int] | None:
        """The node, and which of its inputs, that first reads a storage once it is back; none: it is not read."""
        back = False
        for step in self.plan.steps[i:]:
            back = back or (step.kind == "fetch" and s in step.storages)
            if back and step.kind in ("compute", "recompute"):
                op = self.graph.ops[step.op]
                for index, v in enumerate(op.inputs):
                    if self.graph.values[v].storage == s:
                        loop = self.loops.get(op.name)
                        return self.nodes[loop.enters[0] if loop else op.name], index
        return None
