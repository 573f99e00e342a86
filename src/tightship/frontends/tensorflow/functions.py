"""Functions and loops of a GraphDef, taken apart: calls become the nodes that they call, a frame of a loop one node.

A call (``PartitionedCall``) stands for the nodes of its function, named ``call/node``, and an ``IdentityN`` of the
call's name that hands on the results. ``While`` and ``If`` stay nodes; their functions are graphs of their own. The
nodes between ``Enter`` and ``Exit`` are a frame: one node to whoever is outside, with the turn of the loop inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

from tightship.errors import BadInput, Unsupported
from tightship.frontends.tensorflow.nodes import CONTROL, FEEDS, SWITCHES, in_order, name_of

__all__ = [
    "BRANCHES",
    "LOOPS",
    "Body",
    "Frame",
    "Library",
    "acyclic",
    "alive_when",
    "frames_of",
    "inlined",
    "merged",
]

CALLS: Final = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
LOOPS: Final = frozenset(("While", "StatelessWhile"))
BRANCHES: Final = frozenset("If StatelessIf Case StatelessCase".split())
MOST_NODES: Final = 1_000_000
DEEPEST: Final = 32


@dataclass(frozen=True)
class Body:
    """A function as a graph: ``arguments`` are its placeholders, ``results`` what it returns (``node:port``) of
    which ``types``, and ``effects`` the nodes that run although nothing returned needs them."""

    name: str
    proto: Any
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    effects: tuple[str, ...]
    types: tuple[int, ...]

    def origin(self, text: str) -> str:
        """The node that a result is handed on from."""
        return _origin(text, {n.name: n for n in self.proto.node})


class Library:
    """The functions of a file, each taken apart when it is first asked for. Raises ``BadInput``."""

    def __init__(self, proto: Any, place: str) -> None:
        self.place = place
        self.proto = proto.library
        self.functions = {f.signature.name: f for f in proto.library.function}
        self.versions = proto.versions
        self._bodies: dict[str, Body] = {}
        self._graph: Any = None

    def body(self, name: str) -> Body:
        if name not in self._bodies:
            self._bodies[name] = self._taken_apart(name)
        return self._bodies[name]

    def _taken_apart(self, name: str) -> Body:
        where = f"{self.place}: function {name!r}"
        definition = self.functions.get(name)
        if definition is None:
            raise BadInput("a node calls a function that the file does not have", place=where)
        if definition.signature.attr:
            raise Unsupported(
                where, "a function whose types are parameters has no sizes",
                "write the graph with concrete functions",
            )  # fmt: skip
        try:
            if self._graph is None:
                self._graph = tf.Graph()
                with self._graph.as_default():
                    whole = tf.compat.v1.GraphDef(library=self.proto, versions=self.versions)
                    tf.graph_util.import_graph_def(whole, name="")
            with self._graph.as_default():
                proto, flat = function_def_to_graph_def(definition)
            proto.versions.CopyFrom(self.versions)
            returned = [flat[definition.ret[o.name]] for o in definition.signature.output_arg]
            effects = [definition.control_ret[k] for k in definition.signature.control_output]
        except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, tf.errors.OpError) as error:
            said = " ".join(str(error).split())[:400]
            raise BadInput(f"TensorFlow rejects the function: {said}", place=where) from error
        for node in proto.node:
            if "_class" in node.attr:  # groups may have nodes of other functions
                del node.attr["_class"]
            if node.op == "Placeholder" and "_output_shapes" in node.attr:
                del node.attr["_output_shapes"]
        arguments = tuple(a.name for a in definition.signature.input_arg)
        types = tuple(o.type for o in definition.signature.output_arg)
        return Body(name, proto, arguments, tuple(map(_short, returned)), tuple(effects), types)

    def called(self, node: Any) -> list[str]:
        """The functions that a loop or a branch runs, by name; a loop's condition first."""
        if node.op in LOOPS:
            return [node.attr[k].func.name for k in ("cond", "body")]
        if node.op in ("If", "StatelessIf"):
            return [node.attr[k].func.name for k in ("then_branch", "else_branch")]
        return [f.name for f in node.attr["branches"].list.func] if node.op in BRANCHES else []

    def calls(self, node: Any) -> str:
        """The function that a call stands for, if the node is a call."""
        if node.op in CALLS:
            return str(node.attr["f"].func.name)
        return node.op if node.op in self.functions else ""


def _origin(text: str, nodes: Mapping[str, Any]) -> str:
    """What a result is handed on from by Identities; a cycle of them is nobody's."""
    for _ in nodes:
        node = nodes[name_of(text)]
        if node.op != "Identity":
            return text
        text = node.input[0]
    return ""


def _short(given: str) -> str:
    """TensorFlow's ``node:0`` as ``node``."""
    return given.removesuffix(":0")


# --- calls ---


def inlined(proto: Any, library: Library) -> Any:
    """The graph without calls; itself where it has none."""
    for _ in range(DEEPEST):
        calls = {n.name: library.calls(n) for n in proto.node if library.calls(n)}
        if not calls:
            return proto
        whole = type(proto)(library=proto.library, versions=proto.versions)
        for node in proto.node:
            _inline(whole, node, library.body(calls[node.name])) if node.name in calls else whole.node.append(
                node
            )
            if len(whole.node) > MOST_NODES:
                raise BadInput(f"more than {MOST_NODES} nodes with its calls inlined", place=library.place)
        proto = whole
    raise BadInput(f"functions call each other more than {DEEPEST} deep", place=library.place)


def _inline(whole: Any, call: Any, body: Body) -> None:
    data = [i for i in call.input if not i.startswith("^")]
    waits = [i for i in call.input if i.startswith("^")]
    if len(data) != len(body.arguments):
        fault = f"{len(data)} inputs for a function of {len(body.arguments)}"
        raise BadInput(fault, place=f"node {call.name!r}")
    given = dict(zip(body.arguments, data, strict=True))

    def renamed(text: str) -> str:
        name = name_of(text)
        if name in given:
            return f"^{name_of(given[name])}" if text.startswith("^") else given[name]
        return f"^{call.name}/{text[1:]}" if text.startswith("^") else f"{call.name}/{text}"

    for inner in body.proto.node:
        if inner.name in given:
            continue
        node = whole.node.add()
        node.CopyFrom(inner)
        node.name = f"{call.name}/{inner.name}"
        node.device = inner.device or call.device
        inside = any(name_of(i) not in given for i in inner.input)
        node.input[:] = [*map(renamed, inner.input), *([] if inside else waits)]
    last = whole.node.add(name=call.name, op="IdentityN" if body.results else "NoOp", device=call.device)
    after = [*waits, *(f"^{name_of(i)}" for i in data), *(renamed(f"^{e}") for e in body.effects)]
    last.input.extend([*map(renamed, body.results), *dict.fromkeys(after)])
    if body.results:
        last.attr["T"].list.type.extend(body.types)  # a call by the function's name has no attribute of them
    if "_output_shapes" in call.attr:
        last.attr["_output_shapes"].CopyFrom(call.attr["_output_shapes"])


# --- equal nodes ---

_ONE_EACH: Final = CONTROL | FEEDS | LOOPS | BRANCHES | {"NoOp"}
_SMALL: Final = 4096
"""Bytes of a constant up to which it is compared with others."""
_READ_AS: Final = "_tightship_read_as"
"""An attribute of a node that nobody reads any more, with the node that is read: in a graph that is written, it would
be a result otherwise."""


def merged(proto: Any, kept: Collection[str]) -> tuple[Any, frozenset[str]]:
    """The graph in which whoever reads a node that does what an earlier one does reads that one, as a session makes
    it before it runs a graph (common subexpressions; not behind loops of frames); and the nodes that nobody reads any
    more, which stay in it. Those that are ``kept``, or that nobody reads, are never among them."""
    nodes = {n.name: n for n in proto.node}
    read = {n.name: [m for m in map(name_of, n.input) if m in nodes] for n in proto.node}
    used = {m for row in read.values() for m in row}
    place = {n: k for k, n in enumerate(nodes)}
    first: dict[tuple[Any, ...], str] = {}
    one: dict[str, str] = {}
    for name in in_order({n: list(dict.fromkeys(row)) for n, row in read.items()}, place.__getitem__):
        node = nodes[name]
        inputs = tuple(_read_from(i, one) for i in node.input)
        if not _comparable(node):
            continue
        attrs = tuple(
            (k, node.attr[k].SerializeToString(deterministic=True))
            for k in sorted(node.attr)
            if k not in ("_output_shapes", _READ_AS)
        )
        same = first.setdefault((node.op, node.device, inputs, attrs), name)
        if same != name and name in used and name not in kept:
            one[name] = same
    before = {n for n, node in nodes.items() if _READ_AS in node.attr and n not in used and n not in kept}
    if not one:
        return proto, frozenset(before)
    whole = type(proto).FromString(proto.SerializeToString())
    for node in whole.node:
        node.input[:] = [_read_from(i, one) for i in node.input]
        if node.name in one:
            node.attr[_READ_AS].s = one[node.name].encode()
    return whole, frozenset(before | one.keys())


def _comparable(node: Any) -> bool:
    """Whether an equal node makes the same, and nothing but that."""
    known = op_def_registry.get(node.op)
    if known is None or known.is_stateful or node.op in _ONE_EACH:
        return False
    if any(a.is_ref for a in (*known.input_arg, *known.output_arg)):
        return False
    return node.op != "Const" or node.attr["value"].ByteSize() <= _SMALL


def _read_from(text: str, one: Mapping[str, str]) -> str:
    """An input where equal nodes are one."""
    name = name_of(text)
    return text if name not in one else text.replace(name, one[name], 1)


# --- frames ---


@dataclass(frozen=True)
class Frame:
    """A loop of Enter and Exit: its nodes, those of loops inside it, too, by the roles they have.

    ``carried``: by Merge, (the Enter that gives the first value, the NextIteration that gives the next one)."""

    name: str
    parent: str
    members: tuple[str, ...]
    enters: tuple[str, ...]
    exits: tuple[str, ...]
    carried: Mapping[str, tuple[str, str]]


_ENTERS, _EXITS = frozenset(("Enter", "RefEnter")), frozenset(("Exit", "RefExit"))
_NEXT, _MERGES = frozenset(("NextIteration", "RefNextIteration")), frozenset(("Merge", "RefMerge"))


def frames_of(proto: Any, place: str) -> dict[str, Frame]:
    """The frames of a graph, by name, outer ones first. Raises ``BadInput`` where inputs of a node are of different
    frames, or a loop is not made as TensorFlow makes them."""
    kinds = {n.name: n.op for n in proto.node}
    if not any(op in _ENTERS for op in kinds.values()):
        loop = next((n for n in proto.node if n.op in _EXITS | _NEXT), None)
        if loop is not None:
            raise BadInput(f"{loop.op} without Enter", place=f"{place}: node {loop.name!r}")
        return {}
    at = _frame_of_each(proto, place)
    inside: dict[str, list[Any]] = {}
    parent: dict[str, str] = {}
    for node in proto.node:
        if at[node.name]:
            inside.setdefault(at[node.name], []).append(node)
        if node.op in _ENTERS:
            frame = at[node.name]
            parent[frame] = frame.rpartition("\n")[0]
    found = {}
    for name in sorted(inside, key=lambda f: f.count("\n")):
        nodes = inside[name]
        carried = {}
        for node in nodes:
            if node.op not in _MERGES:
                continue
            given = [name_of(i) for i in node.input if not i.startswith("^")]
            back = [i for i in given if kinds[i] in _NEXT]
            if back:
                start = [i for i in given if kinds[i] in _ENTERS]
                if len(given) != 2 or len(back) != 1 or len(start) != 1:
                    raise BadInput(
                        "a loop's Merge has one Enter and one NextIteration",
                        place=f"{place}: node {node.name!r}",
                    )
                carried[node.name] = (start[0], back[0])
        found[name] = Frame(
            name, parent.get(name, ""),
            tuple(n.name for n in nodes),
            tuple(n.name for n in nodes if n.op in _ENTERS),
            tuple(n.name for n in nodes if n.op in _EXITS),
            carried,
        )  # fmt: skip
    return found


def _frame_of_each(proto: Any, place: str) -> dict[str, str]:
    """By node the path of frames it is in (names, outermost first, by line); an Exit is in the one it leaves."""
    nodes = {n.name: n for n in proto.node}
    readers: dict[str, list[str]] = {n: [] for n in nodes}
    for node in proto.node:
        for given in node.input:
            readers[name_of(given)].append(node.name)
    at: dict[str, str] = {}
    stack = [n.name for n in proto.node if not n.input]
    for name in stack:
        at[name] = ""
    while stack:
        name = stack.pop()
        seen = at[name].rpartition("\n")[0] if nodes[name].op in _EXITS else at[name]
        for reader in readers[name]:
            node = nodes[reader]
            here = seen
            if node.op in _ENTERS:
                here = f"{seen}\n{node.attr['frame_name'].s.decode(errors='replace')}"
                if here.count("\n") > DEEPEST:
                    raise BadInput(f"loops more than {DEEPEST} deep", place=f"{place}: node {reader!r}")
            if reader not in at:
                at[reader] = here
                stack.append(reader)
            elif at[reader] != here:
                raise BadInput("inputs of different frames of loops", place=f"{place}: node {reader!r}")
    for name in nodes:
        at.setdefault(name, "")  # on a cycle that nothing leads to: found when it is ordered
        if nodes[name].op in _EXITS and not at[name]:
            raise BadInput("Exit outside of a loop", place=f"{place}: node {name!r}")
    return at


def acyclic(proto: Any, frames: Iterable[Frame]) -> Any:
    """The graph with the first turn of its loops alone: no Merge waits for a NextIteration, and each Enter is an
    ``Identity``, as what it hands on has a shape that TensorFlow takes from neither."""
    frames = list(frames)
    cut = {merge: back for f in frames for merge, (_, back) in f.carried.items()}
    if not frames:
        return proto
    whole = type(proto).FromString(proto.SerializeToString())
    for node in whole.node:
        if node.name in cut:
            node.input[:] = [i for i in node.input if name_of(i) != cut[node.name] or i.startswith("^")]
            node.attr["N"].i = 1
        elif node.op in _ENTERS:
            node.op = "Identity" if node.op == "Enter" else "RefIdentity"
            for key in [k for k in node.attr if k not in ("T", "_output_shapes")]:
                del node.attr[key]
    handed_on = _handed_on(proto, frames)
    for node in whole.node:
        node.input[:] = [handed_on.get(i, i) for i in node.input]
    return whole


def _handed_on(proto: Any, frames: Iterable[Frame]) -> dict[str, str]:
    """The Enter that is read instead of a Switch's sides, where the loop only hands on what they have: sizes, mostly,
    whose value TensorFlow does not know behind a Switch."""
    nodes = {n.name: n for n in proto.node}
    found: dict[str, str] = {}
    for frame in frames:
        switches = {n: nodes[n] for n in frame.members if nodes[n].op in SWITCHES}
        for merge, (enter, back) in frame.carried.items():
            name = name_of(_origin(nodes[back].input[0], nodes))
            if name in switches and name_of(switches[name].input[0]) == merge:
                found |= {side: enter for side in (name, f"{name}:1")}
    return found


def alive_when(proto: Any) -> dict[str, frozenset[tuple[str, int]]]:
    """By node of an acyclic graph: the sides of Switches, (predicate, side), on which alone it is run. Behind a
    Merge it is run on either side."""
    nodes = {n.name: n for n in proto.node}
    found: dict[str, frozenset[tuple[str, int]]] = {}
    for name in _topological(nodes):
        node, given = nodes[name], []
        for text in node.input:
            source = name_of(text)
            sides = found.get(source, frozenset())
            if nodes[source].op in SWITCHES and not text.startswith("^"):
                sides |= {(nodes[source].input[1], int(text.partition(":")[2] or 0))}
            given.append((sides, text.startswith("^")))
        if node.op in _MERGES:
            data = [s for s, control in given if not control]
            found[name] = frozenset.intersection(*data) if len(data) > 1 else frozenset().union(*data)
        else:
            found[name] = frozenset().union(*(s for s, _ in given)) if given else frozenset()
        if node.op in _EXITS:  # it runs once the loop's condition fails, which it does
            found[name] = frozenset(s for s in found[name] if nodes[name_of(s[0])].op != "LoopCond")
    return found


def _topological(nodes: Mapping[str, Any]) -> Iterator[str]:
    place = {n: k for k, n in enumerate(nodes)}
    read = {n: list(dict.fromkeys(map(name_of, node.input))) for n, node in nodes.items()}
    yield from in_order(read, place.__getitem__)
