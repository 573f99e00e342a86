"""A GraphDef whose types are known -> a Graph.

Placeholders, constants and variables are the caller's. A variable's handle *is* the variable: reading it makes no
bytes, unless somebody writes the variable before the last use of what was read, as TensorFlow copies then. Ops that
write variables stand as late as dependencies allow. Kernels that write their result over an input are not known of
a graph: each result has bytes of its own, so peaks are from above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tightship.errors import BadInput, Unsupported
from tightship.frontends.builder import GraphBuilder
from tightship.frontends.tensorflow.infer import Made, Types, infer, shapes_given, variable_bytes
from tightship.frontends.tensorflow.load import GraphFile
from tightship.frontends.tensorflow.nodes import (
    Node,
    Web,
    caller_kind,
    flops_of,
    forwarded,
    in_order,
    name_of,
    reads_handle,
    to_rows,
)
from tightship.graph import Graph, Op, aligned
from tightship.machine import modeled_time

__all__ = ["Program", "lower", "names"]

_LOOPS = frozenset("Enter RefEnter Exit RefExit NextIteration RefNextIteration LoopCond".split())


@dataclass(frozen=True)
class Program:
    """A file and its graph. An op's name is its node's; a value's is ``node:port``. ``fetch``: the nodes that are
    run, none: all."""

    file: GraphFile
    graph: Graph
    nodes: tuple[Node, ...]
    fetch: tuple[str, ...] = ()


def names(text: str | Iterable[str] | None) -> tuple[str, ...]:
    """Names between commas, or one by one."""
    parts = text.split(",") if isinstance(text, str) else [p for t in text or () for p in str(t).split(",")]
    return tuple(dict.fromkeys(name_of(p.strip()) for p in parts if p.strip()))


def lower(
    file: GraphFile,
    shapes: str | Iterable[str] | Mapping[str, Any] | None = None,
    *,
    fetch: str | Iterable[str] | None = None,
    feed: str | Iterable[str] | None = None,
) -> Program:
    """The graph of a file: all of it, or what ``fetch`` needs (a MetaGraph's ``train_op`` unless given). ``feed``:
    nodes besides placeholders whose results the caller gives; they are never run again (G2).

    Raises ``UnknownSize`` for results without a size, ``BadInput``, and ``Unsupported`` for loops."""
    nodes = tuple(
        Node(n.name, n.op, tuple(n.input), n.device, "_recompute_hint" in n.attr) for n in file.proto.node
    )
    wanted, fed = names(fetch) or file.fetch, names(feed)
    known = {n.name for n in nodes}
    for what, given in (("--fetch", wanted), ("--feed", fed)):
        if unknown := [n for n in given if n not in known]:
            raise BadInput(f"unknown node {unknown[0]!r}", place=what)
    loop = next((n for n in nodes if n.kind in _LOOPS), None)
    if loop is not None:
        raise Unsupported(
            f"node {loop.name!r} of {file.path}, a {loop.kind},", "loops have no order of their nodes",
            "unroll the loop",
        )  # fmt: skip
    types = infer(file, shapes_given(shapes))
    low = _Lowering(str(file.path), Web(nodes), types, frozenset(fed), {n.name: n for n in file.proto.node})
    low.run(wanted)
    meta = {"source": "tensorflow", "nodes": to_rows(nodes), "fed": list(fed), "fetch": list(wanted)}
    meta["swaps"] = [hint for n in file.proto.node for hint in _swaps(n) if n.name in low.op_of]
    return Program(file, low.builder.graph(low.outputs, file.path.stem or "graph", meta), nodes, wanted)


@dataclass
class _Lowering:
    place: str
    web: Web
    types: Types
    fed: frozenset[str]
    proto: Mapping[str, Any]
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    outputs: list[int] = field(default_factory=list)
    value_of: dict[tuple[str, int], int] = field(default_factory=dict)
    op_of: dict[str, int] = field(default_factory=dict)
    first: dict[int, str] = field(default_factory=dict)  # by storage, the node that made it

    def run(self, wanted: tuple[str, ...]) -> None:
        needed = self._needed(wanted)
        self.order = self._order(needed)
        self.at = {n: i for i, n in enumerate(self.order)}
        self.results = set(wanted) or {n for n in needed if not self._data_readers(n)}
        self.copied = self._copied()
        for n in self.order:
            self._own(n) if self._caller(n) else self._op(n)

    def _caller(self, n: str) -> str:
        return caller_kind(self.web.nodes[n].kind, n in self.fed)

    def _needed(self, wanted: tuple[str, ...]) -> set[str]:
        found, stack = set(wanted or self.web.order), list(wanted)
        while stack:
            n = stack.pop()
            for m in () if n in self.fed else self.web.read[n]:
                if m not in found:
                    found.add(m)
                    stack.append(m)
        return found

    def _order(self, needed: set[str]) -> list[str]:
        """The file's order where it is legal; what writes variables later."""
        count = len(self.web.nodes)
        key = {n: k + (count if self._updates(n) else 0) for k, n in enumerate(self.web.nodes)}
        read = {n: [m for m in self.web.read[n] if m in needed and n not in self.fed] for n in needed}
        return in_order(read, key.__getitem__)

    # --- variables ---

    def _data(self, n: str) -> list[tuple[str, int]]:
        """(node, port) of each input that has data."""
        found = []
        for given in self.web.nodes[n].inputs:
            if not given.startswith("^"):
                name, _, port = given.partition(":")
                if port and not port.isdigit():
                    raise BadInput(
                        f"invalid input {given!r}; write NAME or NAME:PORT", place=f"{self.place}: node {n!r}"
                    )
                found.append((name, int(port or 0)))
        return found

    def _data_readers(self, n: str) -> list[str]:
        return [m for m in self.web.readers[n] if any(name == n for name, _ in self._data(m))]

    def _made(self, name: str, port: int, reader: str) -> Made:
        row = self.types.results[name]
        if port >= len(row):
            fault = f"unknown result {name}:{port}; the node has {len(row)}"
            raise BadInput(fault, place=f"{self.place}: node {reader!r}")
        return row[port]

    def _writes(self, n: str) -> list[int]:
        """Indices of the inputs whose variable a node writes."""
        if n in self.fed:
            return []
        kind, given = self.web.nodes[n].kind, self._data(n)
        handles = [i for i, (m, p) in enumerate(given) if self._made(m, p, n).handle]
        return [*self.types.refs.get(n, ()), *([] if reads_handle(kind) else handles)]

    def _updates(self, n: str) -> bool:
        """Whether a node writes a variable of the caller's, and not one that the graph makes for a while."""
        given = self._data(n)
        return any(self._variable(given[i][0]) for i in self._writes(n))

    def _variable(self, n: str) -> bool:
        """Whether a handle or a reference leads back to a variable of the caller's."""
        while not self._caller(n):
            given = self._data(n)
            if not given:
                return False  # TemporaryVariable
            n = given[0][0]
        return True

    def _copied(self) -> frozenset[str]:
        """Nodes that read a variable which somebody writes before the last use of what was read."""
        root: dict[str, str] = {}  # the variable that a node's first result is the bytes of
        last: dict[str, int] = {}  # the last use of those bytes, through all that forwards them
        written: dict[str, list[int]] = {}
        for n in self.order:
            given = self._data(n)
            if self._caller(n):
                root[n] = n
            elif (
                given and forwarded(self.web.nodes[n].kind, 0, len(given)) is not None and given[0][0] in root
            ):
                root[n] = root[given[0][0]]
            for i in [] if self._caller(n) else self._writes(n):
                written.setdefault(root.get(given[i][0], ""), []).append(self.at[n])
        for n in reversed(self.order):
            ends = [
                last.get(m, self.at[m]) if m in root else self.at[m]
                for m in self._data_readers(n)
                if m in self.at
            ]
            last[n] = max(ends, default=self.at[n])
        return frozenset(
            n for n, v in root.items()
            if n != v and any(self.at[n] < w < last[n] for w in written.get(v, ()))
        )  # fmt: skip

    # --- values and ops ---

    def _value(self, name: str, port: int, made: Made, storage: int) -> int:
        self.first.setdefault(storage, name)
        value = self.builder.value(f"{name}:{port}" if port else name, storage, made.dtype, made.shape)
        self.value_of[name, port] = value
        return value

    def _own(self, n: str) -> None:
        for port, made in enumerate(self.types.results[n]):
            place = f"{self.place}: node {n!r}"
            size = variable_bytes(self.proto[n], place) if made.handle else made.nbytes
            value = self._value(n, port, made, self.builder.storage(n, size, self._caller(n)))
            self.builder.inputs.append(value)
            if n in self.results and not made.handle and self._caller(n) != "parameter":
                self.outputs.append(value)

    def _op(self, n: str) -> None:
        node, given = self.web.nodes[n], self._data(n)
        ins = [self.value_of[m, p] for m, p in given]
        writes = [self.builder.storage_of(ins[i]) for i in self._writes(n)]
        outs, made_bytes = [], 0
        for port, made in enumerate(self.types.results[n]):
            shared = self._shared(n, port, made, given, ins)
            if shared is None:
                kind = "output" if n in self.results else "activation"
                kind = "gradient" if kind == "activation" and _backward(n) else kind
                shared = self.builder.storage(f"{n}:{port}" if port else n, made.nbytes, kind)
                made_bytes += made.nbytes
            outs.append(self._value(n, port, made, shared))
        if n in self.results:
            callers = set(map(self.builder.storage_of, self.builder.inputs))
            self.outputs += [v for v in outs if self.builder.storage_of(v) not in callers]
        values, storages = self.builder.values, self.builder.storages
        shapes = [values[v].shape for v in ins]
        flops = 0
        if made_bytes or writes:
            attrs = self.proto[n].attr  # a map that what is asked for is put into
            turned = any(k in attrs and attrs[k].b for k in ("transpose_a", "adj_x"))
            flops = flops_of(node.kind, shapes, [values[v].shape for v in outs], transposed=turned)
        traffic = made_bytes + sum(storages[values[v].storage].size for v in ins) if flops else 0
        # Who reads a view waits for the node that makes it, although the bytes are there before.
        read = zip(given, ins, strict=True)
        views = [m for (m, _), v in read if self.first[self.builder.storage_of(v)] != m]
        waits = [name_of(i) for i in node.inputs if i.startswith("^")] + views
        control = {self.op_of[m] for m in waits if m in self.op_of}
        random = "Random" in node.kind and not node.kind.startswith("Stateless")
        harmless = bool(writes) or random or reads_handle(node.kind) or n not in self.types.stateful
        self.op_of[n] = self.builder.op(
            Op(
                n, node.kind, tuple(ins), tuple(outs),
                mutates=tuple(dict.fromkeys(writes)),
                random=random,
                effect=not harmless,
                control=tuple(sorted(control)),
                time=modeled_time(flops, traffic) if flops else 0.0,
                flops=flops,
                phase="update" if writes and self._updates(n) else "backward" if _backward(n) else "forward",
                device=_device(node.device),
                module=n.rpartition("/")[0],
            )
        )  # fmt: skip

    def _shared(
        self, n: str, port: int, made: Made, given: list[tuple[str, int]], ins: list[int]
    ) -> int | None:
        """The storage a result lies in, if it is one that is there already."""
        kind = self.web.nodes[n].kind
        if made.ref and (refs := self.types.refs.get(n)):
            return self.builder.storage_of(ins[refs[0]])
        source = forwarded(kind, port, len(ins))
        if source is None or n in self.copied:
            return None
        here, there = self.web.nodes[n].device, self.web.nodes[given[source][0]].device
        moved = bool(here and there) and _device(here) != _device(there)
        storage = self.builder.storage_of(ins[source])
        if made.handle or (self.builder.storages[storage].size == aligned(made.nbytes) and not moved):
            return storage
        return None


def _swaps(node: Any) -> list[str]:
    """The inputs that a node says are to be swapped (G11), as ``OP:INPUT``."""
    if "_swap_to_host" not in node.attr:
        return []
    said = node.attr["_swap_to_host"]
    return [f"{node.name}:{i}" for i in (said.list.i if said.HasField("list") else [said.i])]


def _backward(name: str) -> bool:
    return name.startswith("gradients/") or "/gradients/" in name


def _device(text: str) -> str:
    """``/job:worker/device:GPU:0`` -> ``cuda:0``; no device: ``cpu``."""
    parts = text.lower().replace("device:", "").split("/")
    last = next((p for p in reversed(parts) if p.startswith(("gpu:", "cpu:", "tpu:"))), "cpu")
    return last.replace("gpu:", "cuda:") if last.startswith(("gpu", "tpu")) else "cpu"
