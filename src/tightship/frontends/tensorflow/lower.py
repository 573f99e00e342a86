"""A GraphDef whose types are known -> a Graph.

Placeholders, constants and variables are the caller's. A variable's handle *is* the variable: reading it makes no
bytes, unless somebody writes the variable before the last use of what was read, as TensorFlow copies then. Ops that
write variables stand as late as dependencies allow. Results that kernels write over an input lie where it lies
(`nodes.written_over`), equal nodes are one, and constants' nodes are folded, as in a session.

A loop or a branch is one op, with what it runs as graphs that it calls. A loop hands its results on as the next
turn's inputs: one set of them is counted beside what a turn needs. What a loop only hands on is its input's bytes,
and constants inside it are there all the time. Costs are those of one turn, as how many there are is not known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import tensorflow as tf

from tightship.errors import BadInput
from tightship.frontends.builder import GraphBuilder
from tightship.frontends.tensorflow.condensed import condensed, loop_node, merge_of, renamed
from tightship.frontends.tensorflow.einsum import einsum_scratch
from tightship.frontends.tensorflow.functions import LOOPS, Frame, Library, frames_of, inlined, merged
from tightship.frontends.tensorflow.infer import Called, Made, Types, infer, variable_bytes
from tightship.frontends.tensorflow.kernels import (
    ROWS,
    is_written_in_parts,
    patches_of,
    reduction_copies,
    rows_of,
)
from tightship.frontends.tensorflow.load import GraphFile
from tightship.frontends.tensorflow.nodes import (
    CONTROL,
    FEEDS,
    HANDLES,
    Node,
    Web,
    caller_kind,
    flops_of,
    forwarded,
    in_order,
    name_of,
    reads_handle,
    to_rows,
    whole,
    written_over,
)
from tightship.frontends.tensorflow.program import Loop, Program, Turn
from tightship.frontends.tensorflow.shapes import shapes_given
from tightship.graph import Graph, Op, aligned
from tightship.machine import modeled_time

__all__ = ["lower", "names"]


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

    Raises ``UnknownSize`` for results without a size, ``BadInput``, ``Unsupported``."""
    place = str(file.path)
    library = Library(file.proto, place)
    file = replace(file, proto=inlined(file.proto, library))
    wanted, fed = names(fetch) or file.fetch, names(feed)
    known = {n.name for n in file.proto.node}
    for what, given in (("--fetch", wanted), ("--feed", fed)):
        if unknown := [n for n in given if n not in known]:
            raise BadInput(f"unknown node {unknown[0]!r}", place=what)
    proto, unread = merged(file.proto, {*wanted, *fed})
    file = replace(file, proto=proto)
    frames = frames_of(file.proto, place)
    needed = _needed(file.proto, wanted, fed) - unread
    types = infer(file, shapes_given(shapes), library, frames, needed, whole=not wanted)
    low = _Lowering.of(place, file.proto, frames, types, frozenset(fed))
    nodes = tuple(low.web.nodes.values())
    low.folded = low.foldable({*wanted, *fed})
    low.run(tuple(low.alias.get(n, (n, 0))[0] for n in wanted), needed)
    meta = {"source": "tensorflow", "nodes": to_rows(nodes), "fed": list(fed), "fetch": list(wanted)}
    meta["swaps"] = [hint for n in file.proto.node for hint in _swaps(n) if n.name in low.op_of]
    graph = low.builder.graph(low.outputs, file.path.stem or "graph", meta)
    return Program(file, graph, nodes, wanted, low.turn())


def _needed(proto: Any, wanted: tuple[str, ...], fed: tuple[str, ...]) -> set[str]:
    """The nodes that what is fetched needs; without that all but placeholders that nobody reads."""
    read = {n.name: [name_of(i) for i in n.input] for n in proto.node}
    if not wanted:
        used = {m for row in read.values() for m in row}
        return {n.name for n in proto.node if n.name in used or n.op not in FEEDS}
    found, stack = set(wanted), list(wanted)
    while stack:
        n = stack.pop()
        for m in () if n in fed else read[n]:
            if m not in found:
                found.add(m)
                stack.append(m)
    return found


@dataclass
class _Lowering:
    place: str
    web: Web
    types: Types
    fed: frozenset[str]
    proto: Mapping[str, Any]
    frames: Mapping[str, Frame]
    loops: Mapping[str, Frame]  # by the name of a node that is a loop of Enter and Exit
    alias: Mapping[str, tuple[str, int]]  # by Exit, the loop's node and which of its results
    whole: Any
    inner: bool = False
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    outputs: list[int] = field(default_factory=list)
    value_of: dict[tuple[str, int], int] = field(default_factory=dict)
    op_of: dict[str, int] = field(default_factory=dict)
    first: dict[int, str] = field(default_factory=dict)  # by storage, the node that made it
    turned: dict[str, Loop] = field(default_factory=dict)
    functions: dict[str, Turn] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()
    sparse: set[str] = field(default_factory=set)  # variables that are written in parts

    @classmethod
    def of(
        cls,
        place: str,
        proto: Any,
        frames: Mapping[str, Frame],
        types: Types,
        fed: frozenset[str],
        *,
        within: str = "",
        inner: bool = False,
    ) -> _Lowering:
        """The lowering of the nodes that are in no loop, or of a turn of the one that is called ``within``."""
        loops, alias, here = condensed(proto, frames, within)
        own = frames.get(within)
        starts = {*own.enters, *own.carried} if own else set()
        nodes = []
        results = dict(types.results)
        stateful = set(types.stateful)
        for name, frame in loops.items():
            results[name] = tuple(types.results[e][0] for e in frame.exits)
            stateful |= {name} & {name for m in frame.members if m in types.stateful}
        done: set[str] = set()
        at = {m: name for name, frame in loops.items() for m in (*frame.members, *frame.exits)}
        entries = {n.name: n for n in proto.node}
        for n in proto.node:
            if n.name in at:
                name = at[n.name]
                if name not in done:
                    done.add(name)
                    nodes.append(loop_node(name, loops[name], entries, alias))
            elif n.name in here:
                inputs = () if n.name in starts else tuple(renamed(i, alias) for i in n.input)
                nodes.append(Node(n.name, n.op, inputs, n.device, "_recompute_hint" in n.attr))
        known = {**entries, **{name: entries[f.enters[0]] for name, f in loops.items()}}
        types = replace(types, results=results, stateful=frozenset(stateful))
        return cls(place, Web(nodes), types, fed | starts, known, frames, loops, alias, proto, inner)

    def run(self, wanted: tuple[str, ...], only: set[str] | None = None) -> None:
        needed = self._needed(wanted)
        if only is not None:
            needed = {n for n in needed if n in only or n in self.loops}
        self.order = self._order(needed)
        self.at = {n: i for i, n in enumerate(self.order)}
        self.results = set(wanted) or {n for n in needed if not self._data_readers(n)}
        self.sparse = {
            self._root(given[i][0])
            for n in self.order
            if is_written_in_parts(self.web.nodes[n].kind) and (given := self._data(n))
            for i in self._writes(n)
        }
        self.copied = self._copied()
        for n in self.order:
            self._own(n) if self._caller(n) else self._op(n)

    def turn(self) -> Turn:
        return Turn(tuple(n for n in self.order if n in self.op_of), self.turned, self.functions)

    def _caller(self, n: str) -> str:
        return "constant" if n in self.folded else caller_kind(self.web.nodes[n].kind, n in self.fed)

    def foldable(self, kept: Collection[str]) -> frozenset[str]:
        """Nodes of constants alone, which a session works out once, before it runs. What would be much larger than
        the constants (zeros of a shape) stays an op, or it would be there all the time, and with it what it is made
        of: a session works out none of what an op reads that runs."""
        found: set[str] = set()
        large: set[str] = set()
        for n in in_order(self.web.read, {n: k for k, n in enumerate(self.web.nodes)}.__getitem__):
            node, row = self.web.nodes[n], self.types.results[n]
            plain = node.kind not in CONTROL and n not in self.types.stateful and n not in self.types.called
            plain = (
                plain and "Random" not in node.kind
            )  # not even the stateless ones, whose seeds are constants
            given = sum(self._made(m, p, n).nbytes for m, p in self._data(n))
            most = min(_FOLDED, max(_SMALL, 4 * given))
            small = all(m.nbytes <= most and m.items is None and not m.handle for m in row)
            read = [m for m in self.web.read[n] if self._caller(m) != "constant"]
            known = all(m in found or m in large for m in read)
            if plain and known and row and self.web.read[n] and n not in kept:
                found.add(n) if small and not large.intersection(read) else large.add(n)
        work = sorted(large)
        while work:
            for m in self.web.read[work.pop()]:
                if m in found:
                    found.remove(m)
                    work.append(m)
        return frozenset(found)

    def _needed(self, wanted: tuple[str, ...]) -> set[str]:
        found, stack = set(wanted or self.web.order), list(wanted)
        while stack:
            n = stack.pop()
            for m in () if n in self.fed or n in self.folded else self.web.read[n]:
                if m not in found:
                    found.add(m)
                    stack.append(m)
        inside = {n for n in found if (r := self.web.readers[n]) and all(m in self.folded for m in r)}
        return found - (inside - set(wanted))

    def _order(self, needed: set[str]) -> list[str]:
        """The file's order where it is legal; what writes variables later."""
        count = len(self.web.nodes)
        key = {n: k + (count if self._updates(n) else 0) for k, n in enumerate(self.web.nodes)}
        given = self.fed | self.folded
        read = {n: [m for m in self.web.read[n] if m in needed and n not in given] for n in needed}
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
        return bool(self._caller(self._root(n)))  # not a TemporaryVariable

    def _root(self, n: str) -> str:
        """The node that a handle or a reference comes from."""
        while not self._caller(n) and (given := self._data(n)):
            n = given[0][0]
        return n

    def _copied(self) -> frozenset[str]:
        """Nodes that read a variable which somebody writes before the last use of what was read."""
        root: dict[str, str] = {}  # the variable that a node's first result is the bytes of
        last: dict[str, int] = {}  # the last use of those bytes, through all that forwards them
        written: dict[str, list[int]] = {}
        for n in self.order:
            given = self._data(n)
            if self._caller(n):
                root[n] = n
            elif (source := self._source(n, 0)) is not None and given[source][0] in root:
                root[n] = root[given[source][0]]
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
            ours = made.handle and self.web.nodes[n].kind in HANDLES
            size = variable_bytes(self.proto[n], place) if ours else made.nbytes
            value = self._value(n, port, made, self.builder.storage(n, size, self._caller(n)))
            self.builder.inputs.append(value)
            if n in self.results and not made.handle and self._caller(n) != "parameter":
                self.outputs.append(value)

    def _op(self, n: str) -> None:
        node, given = self.web.nodes[n], self._data(n)
        ins = [self.value_of[m, p] for m, p in given]
        inside = self._inside(n, given)
        extra = [self._constant(name, size) for name, size in inside.constants]
        writes = [self.builder.storage_of(ins[i]) for i in self._writes(n)]
        outs, made_bytes = [], 0
        for port, made in enumerate(self.types.results[n]):
            if port in inside.kept:
                shared: int | None = self.builder.storage_of(ins[inside.kept[port]])
            else:
                shared = self._shared(n, port, made, given, ins)
            if shared is None:
                kind = "output" if n in self.results else "activation"
                kind = "gradient" if kind == "activation" and _backward(n) else kind
                given_out = self.inner and n in self.results  # counted where the op that runs this gives it
                size = 0 if given_out else made.nbytes
                shared = self.builder.storage(f"{n}:{port}" if port else n, size, kind)
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
            flops = inside.flops if inside.graphs else flops
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
                n, node.kind, (*ins, *extra), tuple(outs),
                mutates=tuple(dict.fromkeys(writes)),
                random=random,
                effect=not harmless or n in self.loops,  # a loop of many nodes is not copied
                control=tuple(sorted(control)),
                time=modeled_time(flops, traffic) if flops else 0.0,
                flops=flops,
                workspace=inside.carried + (self._scratch(n, ins) if outs else 0),
                calls=inside.graphs,
                phase="update" if writes and self._updates(n) else "backward" if _backward(n) else "forward",
                device=_device(node.device),
                module=n.rpartition("/")[0],
                overwrites=() if writes else self._overwrites(n, ins, outs),
            )
        )  # fmt: skip

    def _scratch(self, n: str, ins: Sequence[int]) -> int:
        """Bytes that a kernel asks for beside its results, as far as is known."""
        made, kind = self.types.results[n][0], self.web.nodes[n].kind
        if (
            len(ins) == 2
            and made.nbytes
            and reduction_copies(kind, self.builder.values[ins[0]].shape, self._numbers(n, 1))
        ):
            return aligned(self._made(*self._data(n)[0], n).nbytes)
        shapes = [self.builder.values[v].shape for v in ins]
        if (
            kind == "Conv2DBackpropInput"
            and self.proto[n].attr["data_format"].s in (b"", b"NHWC")
            and made.nbytes
        ):
            return aligned(patches_of(kind, *shapes[1:3]) * (made.nbytes // math.prod(made.shape)))
        if kind != "Einsum" or not made.nbytes:
            return 0
        equation, width = self.proto[n].attr["equation"].s.decode(), made.nbytes // math.prod(made.shape)
        return einsum_scratch(equation, shapes, width)

    def _numbers(self, n: str, i: int) -> list[int] | None:
        """The whole numbers that an input of a node is, where it is a constant."""
        given = self._data(n)
        node = self.proto.get(given[i][0]) if i < len(given) else None
        if node is None or node.op != "Const":
            return None
        if math.prod(d.size for d in node.attr["value"].tensor.tensor_shape.dim) > _AXES:
            return None
        numbers = tf.make_ndarray(node.attr["value"].tensor)
        return [int(x) for x in numbers.reshape(-1)] if numbers.dtype.kind in "iu" else None

    # --- what runs inside an op ---

    @property
    def callers(self) -> set[int]:
        return set(map(self.builder.storage_of, self.builder.inputs))

    def _constant(self, name: str, size: int) -> int:
        value = self.builder.tensor(name, size, kind="constant")
        self.builder.inputs.append(value)
        return value

    def _inside(self, n: str, given: list[tuple[str, int]]) -> _Inside:
        if n in self.loops:
            return self._frame(n, given)
        if n not in self.types.called:
            return _Inside()
        called, loop = self.types.called[n], self.web.nodes[n].kind in LOOPS
        low = [self._function(c) for c in called]
        for c, inner in zip(called, low, strict=True):
            self.functions.setdefault(c.body.name, inner.turn())
        kept = _kept(called[-1], low[-1]) if loop else {}
        rows = [self._made(m, p, n).nbytes for m, p in given]
        if loop:  # of what grows the last turn's, as its functions are given it
            own = (called[-1].types.results[a][0].nbytes for a in called[-1].body.arguments)
            rows = [max(pair) for pair in zip(rows, own, strict=True)]
        carried = sum(b for k, b in enumerate(rows) if k not in kept) if loop else 0
        return _Inside.of(n, low, carried, kept, every=loop)

    def _function(self, called: Called) -> _Lowering:
        body = called.body
        arguments = frozenset(body.arguments)
        low = _Lowering.of(self.place, called.proto, called.frames, called.types, arguments, inner=True)
        ends = tuple(dict.fromkeys([*map(name_of, body.results), *body.effects]))
        low.run(tuple(dict.fromkeys(low.alias.get(n, (n, 0))[0] for n in ends)))
        return low

    def _frame(self, n: str, given: list[tuple[str, int]]) -> _Inside:
        """A loop of Enter and Exit. Its results are where a turn reads what the turn before it made."""
        frame = self.loops[n]
        low = _Lowering.of(
            self.place, self.whole, self.frames, self.types, frozenset(), within=frame.name, inner=False
        )
        backs = tuple(back for _, back in frame.carried.values())
        conditions = tuple(m for m in low.web.nodes if low.web.nodes[m].kind == "LoopCond")
        low.run((*backs, *conditions))
        self.turned[n] = Loop(frame.enters, frame.exits, low.turn())
        kept, inputs = {}, {e: k for k, e in enumerate(frame.enters)}
        given_by = {}  # by Exit, the Merge whose value leaves
        carried = 0
        for merge, (enter, back) in frame.carried.items():
            own = low.builder.storage_of(low.value_of[merge, 0])
            stays = low.builder.storage_of(low.value_of[back, 0]) == own
            items = self.types.results[merge][0].items is not None
            exits = [k for k, e in enumerate(frame.exits) if merge_of(self.proto, e) == merge]
            for k in exits:
                given_by[k] = merge
                if stays and not items and self.types.results[enter][0].nbytes:
                    kept[k] = inputs[enter]
            if not exits and not stays:
                carried += self.types.results[merge][0].nbytes
        return _Inside.of(n, [low], carried, kept, every=True)

    def _shared(
        self, n: str, port: int, made: Made, given: list[tuple[str, int]], ins: list[int]
    ) -> int | None:
        """The storage a result lies in, if it is one that is there already."""
        kind = self.web.nodes[n].kind
        if made.ref and (refs := self.types.refs.get(n)):
            return self.builder.storage_of(ins[refs[0]])
        source = self._source(n, port)
        if (
            made.items is not None
            and kind in _LIST_WRITES
            and self.builder.storage_of(ins[0]) in self.callers
        ):
            return self.builder.storage_of(ins[0])  # a loop's list: it is counted among the loop's results
        if source is None or n in self.copied:
            return None
        here, there = self.web.nodes[n].device, self.web.nodes[given[source][0]].device
        moved = bool(here and there) and _device(here) != _device(there)
        storage, theirs = self.builder.storage_of(ins[source]), self._made(*given[source], n)
        whole = self.builder.storages[storage].size == aligned(made.nbytes)
        held = made.items is None and theirs.items is None and not theirs.handle
        part = held and (kind in ROWS or made.nbytes == theirs.nbytes)  # the same rows by another name
        return storage if made.handle or ((whole or part) and not moved) else None

    def _source(self, n: str, port: int) -> int | None:
        """The input whose bytes a result is."""
        kind, given = self.web.nodes[n].kind, self._data(n)
        if kind == "ReadVariableOp" and self.sparse and self._root(n) in self.sparse:
            return None
        source = forwarded(kind, port, len(given))
        if source is not None or not given:
            return source
        if (rows := ROWS.get(kind)) is not None and rows < len(given):
            mine, theirs = self.types.results[n][port], self._made(*given[rows], n)
            size = theirs.nbytes // (math.prod(theirs.shape) or 1)
            if size and rows_of(self.proto[n], theirs.shape, mine.shape, size, lambda i: self._numbers(n, i)):
                return rows
        if (source := whole(kind, port)) is None:
            return None
        mine, theirs = self.types.results[n][port], self._made(*given[source], n)
        same = mine.dtype == theirs.dtype and math.prod(mine.shape) == math.prod(theirs.shape)
        return source if same and mine.items is None and theirs.items is None else None

    def _overwrites(self, n: str, ins: list[int], outs: list[int]) -> tuple[tuple[int, int], ...]:
        """Storages that a kernel writes a result over, where nothing else needs them, with that result's."""
        kind, values = self.web.nodes[n].kind, self.builder.values
        callers, read = self.callers, [values[v].storage for v in ins]
        found = []
        for port, v in enumerate(outs):
            made, b = values[v], values[v].storage
            for i in written_over(kind, port, len(ins)):
                given, a = values[ins[i]], read[i]
                size = self.builder.storages[a].size
                same = given.dtype == made.dtype and math.prod(given.shape) == math.prod(made.shape)
                apart = read.count(a) == 1 and a not in callers and b not in read
                if same and apart and size and size == self.builder.storages[b].size:
                    found.append((a, b))
        return tuple(found)


_SMALL, _FOLDED = 4096, 10 << 20
"""Bytes up to which a result of constants is always one itself, and beyond which TensorFlow never makes it one."""
_AXES: Final = 254
"""Dimensions that a tensor may have."""
_LIST_WRITES: Final = frozenset("TensorListSetItem TensorListPushBack TensorListPopBack".split())


@dataclass(frozen=True)
class _Inside:
    """What an op runs inside: graphs; constants in them (name, bytes); bytes of what a loop carries from turn to
    turn; by result, the input that it is; operations."""

    graphs: tuple[Graph, ...] = ()
    constants: tuple[tuple[str, int], ...] = ()
    carried: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)
    flops: int = 0

    @classmethod
    def of(
        cls, n: str, low: list[_Lowering], carried: int, kept: Mapping[int, int], *, every: bool
    ) -> _Inside:
        """``every``: all of the graphs run, not one of them."""
        graphs = tuple(x.builder.graph(x.outputs, f"{n}/{k}") for k, x in enumerate(low))
        constants = tuple(
            (f"{n}/{s.name}", s.size)
            for x in low
            for s in x.builder.storages
            if s.kind == "constant" and s.size
        )
        flops = [sum(o.flops for o in g.ops) for g in graphs]
        return cls(graphs, constants, carried, kept, sum(flops) if every else max(flops, default=0))


def _kept(body: Called, low: _Lowering) -> dict[int, int]:
    """The results of a loop that are what it was given: its function returns an argument."""
    found = {}
    for k, (argument, text) in enumerate(zip(body.body.arguments, body.body.results, strict=False)):
        name, _, port = text.partition(":")
        name, number = low.alias.get(name, (name, int(port or 0)))
        given, value = low.value_of.get((argument, 0)), low.value_of.get((name, number))
        if given is None or value is None or body.types.results[argument][0].items is not None:
            continue
        if low.builder.storage_of(given) == low.builder.storage_of(value):
            found[k] = k
    return found


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
