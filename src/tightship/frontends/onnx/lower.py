"""A model whose types are known -> a Graph.

Weights are constants of the caller, in the file or beside it; so are its inputs. Results of the model are buffers
of their own, as they are where the caller hands them in: nothing is viewed or overwritten into them. A graph inside
a node (If, Loop, Scan) is called by the op, and what it takes from outside is the op's input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tightship.errors import BadInput
from tightship.frontends.builder import GraphBuilder, trace_line
from tightship.frontends.onnx.infer import Scope, infer
from tightship.frontends.onnx.lists import kept
from tightship.frontends.onnx.load import Model
from tightship.frontends.onnx.nested import bodies as graphs_in
from tightship.frontends.onnx.nested import label
from tightship.frontends.onnx.types import (
    IN_PLACE,
    STRING,
    Shapes,
    TensorType,
    flops_of,
    is_random,
    may_overwrite,
    nbytes_of,
    viewed,
)
from tightship.graph import Graph, Op
from tightship.machine import modeled_time
from tightship.simulate import baseline, replay

__all__ = ["HALF", "Program", "lower"]

_COUNTERS: Final = 3 * 64
"""Bytes of a Loop's number of the turn, and of its conditions."""
_ANCESTORS: Final = 20_000
"""Nodes of a graph up to which it is known which of them come before which in every order."""


HALF: Final = (
    "float16: what onnxruntime's CPU has no kernel for it computes in float32 between casts, whose bytes are "
    "known of its optimized graph alone (--write without --optimize none)"
)

STRINGS: Final = (
    f"strings: {STRING} bytes for each, as in onnxruntime's arena; characters beyond 15 are elsewhere"
)


@dataclass(frozen=True)
class Program:
    """A model and its graph: ``nodes[o]`` is the node, by position in the file, that op ``o`` runs. Values have
    the names they have in the model. ``notes`` say what a user should know of how the model was read. ``level``: how
    far onnxruntime has optimized another model to make it, if it has. ``parts``: the values that are tensors in a
    sequence, which have no name of their own in the model."""

    model: Model
    graph: Graph
    nodes: tuple[int, ...]
    notes: tuple[str, ...] = ()
    level: str = "none"
    parts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Settings:
    views: bool
    in_place: str


def lower(
    model: Model,
    shapes: Shapes | str | Mapping[str, Any] | None = None,
    *,
    views: bool = True,
    in_place: str = IN_PLACE[0],
) -> Program:
    """The graph of a model for the sizes in ``shapes`` (as `Shapes.of` reads them).

    ``views`` false: the runtime copies where others make a view. ``in_place``: which results the runtime writes
    over an input that nobody else needs (``onnxruntime``, ``elementwise``, ``none``). Costs are modeled from
    FLOPs and bytes. ``Graph.meta`` names, as [result, input], what may be written in place of an input only in
    some orders. Raises ``UnknownSize`` naming every dimension without a size, ``BadInput``, ``Unsupported``.
    """
    if in_place not in IN_PLACE:
        raise BadInput(f"unknown in_place {in_place!r}; choose from {', '.join(IN_PLACE)}")
    given = shapes if isinstance(shapes, Shapes) else Shapes.of(shapes)
    scope = infer(model, given)
    low = _Lowering(scope, str(model.path), _Settings(views, in_place))
    low.run()
    name = model.path.stem or "model"
    meta = {"source": "onnx", "views": views, "in_place": in_place, "in_place_candidates": low.could}
    graph = low.builder.graph((*low.outputs(), *low.unread()), name, meta)
    half = any(v.dtype == "float16" for o in graph.ops for v in map(graph.values.__getitem__, o.outputs))
    notes = [HALF] if half and in_place == IN_PLACE[0] else []
    notes += [STRINGS] if any(v.dtype == "string" for v in graph.values) else []
    parts = frozenset(v for row in low.items_of.values() for v in row)
    return Program(model, graph, tuple(low.nodes), (*model.notes, *scope.notes, *notes), parts=parts)


@dataclass
class _Body:
    """A graph inside a node: the graph, the outside values it needs, and the bytes of what it is given."""

    graph: Graph
    taken: list[str]
    flops: int
    given: tuple[int, ...]


@dataclass
class _Lowering:
    scope: Scope
    place: str
    settings: _Settings
    inner: bool = False
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    nodes: list[int] = field(default_factory=list)
    value_of: dict[str, int] = field(default_factory=dict)
    items_of: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of sequences, the tensors in them
    constants: set[str] = field(default_factory=set)
    taken: dict[str, None] = field(default_factory=dict)  # names of the graphs around this one
    adopted: dict[str, TensorType] = field(default_factory=dict)  # constants of graphs inside this one
    op_of: dict[int, int] = field(default_factory=dict)  # by node
    could: list[list[str]] = field(default_factory=list)

    # --- the graph ---

    def run(self) -> None:
        proto = self.scope.proto
        self.results = dict.fromkeys(o.name for o in proto.output)
        self.readers = _readers(proto)
        weights = {t.name for t in proto.initializer} | {t.values.name for t in proto.sparse_initializer}
        self.constants = weights | {n for node in proto.node if _is_constant(node) for n in node.output}
        for i in proto.input:
            if i.name not in weights:
                self._own(i.name, "input")
        self.before: list[int] = []  # bits of the ops that come before an op in every order
        self.holders: dict[int, list[str]] = {}  # names of the values in a storage
        self.maker: dict[str, int] = {}
        self.renamed: set[str] = set()  # sequences that are others
        for k, node in enumerate(proto.node):
            if not _is_constant(node):
                self._op(k, node)
        for name in self.results:
            self._value(name)

    def outputs(self) -> tuple[int, ...]:
        return self._values(o.name for o in self.scope.proto.output)

    def unread(self) -> tuple[int, ...]:
        """Results that nobody reads, and sequences of two names: onnxruntime frees a value after its last reader, and
        these at the end."""
        if self.settings.in_place != "onnxruntime":
            return ()
        return self._values(
            n
            for node in self.scope.proto.node
            for n in node.output
            if n in self.maker and n not in self.results and (n not in self.readers or n in self.renamed)
        )

    # --- values ---

    def _type(self, name: str) -> TensorType:
        found = self.adopted.get(name) or self.scope.type(name)
        assert found is not None, name
        return found

    def _size(self, name: str) -> int:
        return nbytes_of(self._type(name), f"{self.place}: value {name!r}")

    def _add(self, name: str, storage: int) -> int:
        t = self._type(name)
        self.value_of[name] = self.builder.value(name, storage, t.name, t.sizes)
        return self.value_of[name]

    def _own(self, name: str, kind: str) -> int:
        """A value of the caller."""
        t = self._type(name)
        value = self._add(name, self.builder.storage(name, 0 if t.is_list else self._size(name), kind))
        self.builder.inputs.append(value)
        if t.is_list:
            self._add_items(name, None, kind)
            self.builder.inputs += self.items_of[name]
        return value

    def _add_items(self, name: str, shared: Sequence[int | None] | None, kind: str) -> None:
        """The tensors in a sequence: those of ``shared`` storages, others with bytes of their own."""
        found = []
        for k, t in enumerate(self._type(name).items or ()):
            text, storage = f"{name}[{k}]", None if shared is None else shared[k]
            if storage is None:
                size = nbytes_of(t, f"{self.place}: tensor {k} of {name!r}")
                size = 0 if self.inner and name in self.results else size  # as of any result: the caller's
                storage = self.builder.storage(text, size, kind)
            found.append(self.builder.value(text, storage, t.name, t.sizes))
        self.items_of[name] = tuple(found)

    def _value(self, name: str) -> int:
        """The value of a name; constants and what comes from outside enter the graph when they are met."""
        if name in self.value_of:
            return self.value_of[name]
        if name in self.constants:
            # A body's constants are counted with those of the model.
            if self.inner:
                self.taken[name] = None
            return self._own(name, "constant")
        if self.scope.parent is None:
            raise BadInput(f"unknown value {name!r}", place=self.place)
        self.taken[name] = None
        return self._own(name, "input")

    def _values(self, names: Iterable[str]) -> tuple[int, ...]:
        """The values of names, of a sequence also those of the tensors in it."""
        found = dict[int, None]()
        for name in names:
            found |= dict.fromkeys((self._value(name), *self.items_of.get(name, ())))
        return tuple(found)

    # --- ops ---

    def _op(self, k: int, node: Any) -> None:
        where = f"{self.place}: node {label(node, k)!r}"
        bodies = [self._body(inner, label(node, k)) for inner in self.scope.bodies.get(k, {}).values()]
        given = [n for n in node.input if n]
        taken = [n for b in bodies for n in b.taken]
        if len(bodies) < len(
            inside := list(graphs_in(node))
        ):  # a branch never runs, but what it reads must be there
            taken += [n for g in inside for n in _outer(g) if self.scope.type(n) is not None]
        inputs = self._values((*given, *taken))
        position = self.op_of[k] = len(self.builder.ops)
        self.before.append(self._ancestors([*given, *taken], position))
        outputs: list[int] = []
        written: tuple[int, ...] = ()
        for j, name in enumerate(n for n in node.output if n):
            kind = "output" if name in self.results else "activation"
            if self._type(name).is_list:
                outputs += self._sequence(node, name, kind)
                self.maker[name] = position
                continue
            shared = self._shared(node, name, position) if j == 0 and not bodies else None
            if shared is None:
                size = 0 if self.inner and name in self.results else self._size(name)  # R3: the caller's
                storage = self.builder.storage(name, size, kind)
            else:
                storage, overwritten = shared
                written = (storage,) if overwritten else ()
            outputs.append(self._add(name, storage))
            self.holders.setdefault(storage, []).append(name)
            self.maker[name] = position
        flops, workspace = self._cost(node, bodies, where)
        made = sum(self._size(n) for n in node.output if n)
        traffic = (
            0 if viewed(node) is not None and self.settings.views else made + sum(map(self._size, given))
        )
        module, source = _origin(node)
        self.builder.op(
            Op(
                self.builder.op_name(label(node, k)),
                f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type,
                inputs,
                tuple(outputs),
                mutates=written,
                random=is_random(node, [self.scope.value(n) if n else None for n in node.input]),
                effect=any(self._type(n).is_list for n in node.output if n),  # what is shared is made once
                time=modeled_time(flops, traffic),
                flops=flops,
                workspace=workspace,
                module=module,
                source=source,
                calls=tuple(b.graph for b in bodies),
            )
        )
        self.nodes.append(k)

    def _sequence(self, node: Any, name: str, kind: str) -> list[int]:
        """The values of a sequence that a node makes, with what it shares with the one that the node reads."""
        types = [self.scope.type(n) if n else None for n in node.input]
        copied = name in self.results and viewed(node) is not None  # into a buffer of the caller's
        places = None if copied else kept(node, types, self.scope.value)
        read = self.items_of.get(node.input[0], ()) if node.input else ()
        shared = None
        if places is not None and viewed(node) is not None:
            self.renamed.add(name)
        if places is not None:
            shared = [None if k is None else self.builder.storage_of(read[k]) for k in places]
        value = self._add(name, self.builder.storage(name, 0, kind))
        self._add_items(name, shared, kind)
        return [value, *self.items_of[name]]

    def _ancestors(self, names: Iterable[str], position: int) -> int:
        if position >= _ANCESTORS:
            return 0
        bits = 0
        for n in names:
            o = self.maker.get(n)
            if o is not None and o < _ANCESTORS:
                bits |= self.before[o] | 1 << o
        return bits

    def _shared(self, node: Any, name: str, position: int) -> tuple[int, bool] | None:
        """The storage a result shares with an input, and whether it overwrites it."""
        if name in self.results:
            return None
        size = self._size(name)
        source = viewed(node) if self.settings.views else None
        if source is not None and self._size(node.input[source]) == size:
            return self.builder.storage_of(self._value(node.input[source])), False
        for i in may_overwrite(node, self.settings.in_place):
            given = node.input[i]
            if given and self._size(given) == size and list(node.input).count(given) == 1:
                storage = self.builder.storage_of(self._value(given))
                if self._free(storage, position):
                    return storage, True
                self.could.append([name, given])
        return None

    def _free(self, storage: int, position: int) -> bool:
        """Whether op ``position`` is the last to need a storage, in every order."""
        holders = self.holders.get(storage)
        if holders is None or any(n in self.results for n in holders):
            return False  # the caller's
        before = self.before[position]
        readers = {self.op_of.get(k, -1) for n in holders for k in self.readers.get(n, ())} - {position}
        return all(r >= 0 and before >> r & 1 for r in readers)  # -1: comes later in the file

    def _cost(self, node: Any, bodies: list[_Body], where: str) -> tuple[int, int]:
        """FLOPs and bytes of scratch of a node."""
        if not bodies:
            types = [self.scope.type(n) if n else None for n in node.input]
            return flops_of(node, types, [self.scope.type(n) for n in node.output if n]), 0
        if node.op_type == "If":
            return max(b.flops for b in bodies), 0
        if node.op_type == "Loop":
            return self._loop_cost(node, bodies[0])
        return self._scan_cost(node, bodies[0])

    def _loop_cost(self, node: Any, body: _Body) -> tuple[int, int]:
        count = self.scope.value(node.input[0]) if node.input[0] else None
        trips = int(count.reshape(())) if count is not None and count.size == 1 else 1
        states = max(0, len(node.input) - 2)
        # Tensors of sequences are handed on as they are.
        carried = sum(
            max(self._size(n), own) for n, own in zip(node.input[2:], body.given[2:], strict=False)
            if n and not self._type(n).is_list
        )  # fmt: skip
        slices = sum(self._size(n) for n in node.output[states:] if n)
        inner = _needs(body.graph)
        # While a turn runs there is what the turn before it made, and single turns' slices; in the end, when turns
        # have no needs of their own any more, the slices are joined.
        return max(trips, 1) * body.flops, max(carried, slices - inner) + _COUNTERS

    def _scan_cost(self, node: Any, body: _Body) -> tuple[int, int]:
        given = {a.name: a for a in node.attribute}
        scans = int(given["num_scan_inputs"].i) if "num_scan_inputs" in given else 0
        states = len(node.input) - scans
        carried = sum(self._size(n) for n in node.input[:states] if n)
        axes = list(given["scan_input_axes"].ints) if "scan_input_axes" in given else [0] * scans
        sizes = self._type(node.input[states]).sizes
        length = sizes[axes[0]]
        # Along another dimension than the first the runtime scans a transposed copy, and joins results in one.
        copies = sum(self._size(n) for n, a in zip(node.input[states:], axes, strict=False) if a)
        turned = list(given["scan_output_axes"].ints) if "scan_output_axes" in given else []
        joined = sum(self._size(n) for n, a in zip(node.output[states:], turned, strict=False) if n and a)
        # What is carried is read from one buffer and written into another; the first turn reads what is given, the
        # last one writes the result.
        held = min(max(length - 1, 0), 2) * carried
        return length * body.flops, copies + max(held, joined - _needs(body.graph))

    def _body(self, scope: Scope, owner: str) -> _Body:
        low = _Lowering(scope, self.place, self.settings, inner=True)
        low.run()
        outside = [self._adopted(n, low, owner) if n in low.constants else n for n in low.taken]
        name = scope.proto.name or "body"
        graph = low.builder.graph((*low.outputs(), *low.unread()), name)
        given = tuple(low._size(i.name) for i in scope.proto.input)
        return _Body(graph, outside, sum(o.flops for o in graph.ops), given)

    def _adopted(self, name: str, low: _Lowering, owner: str) -> str:
        """A constant of a graph inside this one becomes one of this graph: it is there all the time, too."""
        own = f"{owner}/{name}"
        if own not in self.adopted:
            self.adopted[own] = low._type(name)
            self.constants.add(own)
        return own


def _needs(graph: Graph) -> int:
    """Bytes that a graph inside a node makes at most, beyond what it is given."""
    return max(0, replay(graph, baseline(graph)).peak - graph.static_bytes)


def _is_constant(node: Any) -> bool:
    return node.op_type == "Constant" and node.domain in ("", "ai.onnx")


def _readers(proto: Any) -> dict[str, list[int]]:
    """The nodes that read a name, themselves or in a graph inside them."""
    found: dict[str, list[int]] = {}
    for k, node in enumerate(proto.node):
        for name in dict.fromkeys(_names(node)):
            found.setdefault(name, []).append(k)
    return found


def _names(node: Any) -> Iterator[str]:
    yield from (n for n in node.input if n)
    for graph in graphs_in(node):
        for inner in graph.node:
            yield from _names(inner)
        yield from (o.name for o in graph.output)


def _outer(graph: Any) -> list[str]:
    """What a graph inside a node reads and does not make itself."""
    own = {x.name for x in (*graph.input, *graph.initializer)} | {n for x in graph.node for n in x.output}
    own |= {t.values.name for t in graph.sparse_initializer}
    read = [n for x in graph.node for n in (*x.input, *(m for g in graphs_in(x) for m in _outer(g)))]
    return [n for n in dict.fromkeys((*read, *(o.name for o in graph.output))) if n and n not in own]


def _origin(node: Any) -> tuple[str, str]:
    """Module path and source line, as torch's exporters leave them."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    parts = [
        p.strip().strip("'\"") for p in notes.get("pkg.torch.onnx.name_scopes", "").strip("[]").split(",")
    ]
    module = parts[-2] if len(parts) > 1 else ""
    if not module and node.name.startswith("/"):
        module = ".".join(node.name.split("/")[1:-1])
    return module, trace_line(notes.get("pkg.torch.onnx.stack_trace", ""))
