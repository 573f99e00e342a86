"""Graph: ops, values and storages of one program, free of any framework.

The order of ``Graph.ops`` is one legal execution order and is what gives mutation its meaning: an op that
reads a storage sees the writes of the ops before it in that order. Everything here is frozen; planners refer
to ops, values and storages by index.

A **storage** is a run of bytes that several **values** may share (views, tuple elements, in-place results). A
value whose storage is one of its op's input storages is an alias; it is a write only if the op *mutates* that
storage. Storages of ``Graph.inputs`` belong to the caller (the static set): always resident, never freed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.cached import cached_property
from tightship.errors import BadInput
from tightship.machine import MODELED, Machine

__all__ = ["Columns", "Graph", "Op", "Request", "Rows", "Storage", "Uses", "Value", "distinct"]

ALIGNMENT = 64
"""Bytes every size and offset is rounded up to (what PyTorch's CPU allocator aligns to)."""

CUDA_ALIGNMENT = 512
"""The same on CUDA devices, as torch's own allocator there (cudaMalloc: 256). The compiled allocators take both."""


DEEPEST = 32
"""Graphs lie in one another, called by ops, no deeper."""

MOST_CALLED = 1 << 20
"""Graphs that a graph may have inside of it, each counted as often as it is called."""

_MOST_EVENTS = 1 << 30
"""Of one op."""

MOST_BYTES = 1 << 59
"""Bytes that a graph may speak of in all: sums of a few such numbers fit into 64 bits, which searches count with."""


def alignment_of(device: str) -> int:
    """What sizes on a device (``cpu``, ``cuda:0``) are multiples of; offsets, which are sums of them, too."""
    return CUDA_ALIGNMENT if device.startswith("cuda") else ALIGNMENT


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that live and die together.

    ``kind`` says what they hold, for people: parameter, buffer, state (of the optimizer), input, constant,
    activation, gradient, output. ``size`` is bytes as the allocator counts them (already aligned).
    """

    name: str
    size: int
    kind: str = "activation"
    pool: str = "device"


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: a view of ``storage`` with ``shape`` and ``stride`` (elements) from ``offset`` (elements)."""

    name: str
    storage: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request an op makes of the allocator while it runs.

    ``storage`` is the index into the storages the op defines (in ``Uses.defines`` order) that this request
    becomes, or -1 for a temporary. ``start`` and ``end`` are event numbers inside the op (half-open); a
    request that outlives the op has ``end == -1``.
    """

    size: int
    storage: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    ``mutates``  storages written in place (a later reader sees the new contents).
    ``updates``  the part of ``mutates`` that a recomputation leaves alone: running statistics, which the op can
                 compute its results without touching.
    ``random``   draws from the random state; random ops keep their order (an explicit chain).
    ``state``    bytes of the random state which, saved before the op runs, lets it draw the same again; 0: not.
    ``effect``   anything else that must happen exactly once (collectives, host side effects).
    ``control``  ops that must run earlier although no value says so.
    ``overwrites`` pairs (storage read, storage defined): the op gives the same results when the second lies exactly
                 where the first lies, if nothing needs the first afterwards. Both have the same size, and no value
                 of the second is there before the op.
    ``workspace`` bytes the op needs beyond its results while it runs: the maximum over the op's own run of
                 (bytes it has requested and not yet freed) minus the bytes of its results.
    ``requests`` the measured sequence of allocator requests, when known.
    ``time`` seconds, ``flops`` floating-point operations. ``phase``: forward, backward or update.
    ``calls``    graphs the op runs inside itself (loops, branches); their peak is added while it runs.
    """

    name: str
    target: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    mutates: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    random: bool = False
    effect: bool = False
    control: tuple[int, ...] = ()
    time: float = 0.0
    flops: int = 0
    workspace: int = 0
    requests: tuple[Request, ...] = ()
    phase: str = "forward"
    device: str = "cpu"
    module: str = ""
    source: str = ""
    calls: tuple[Graph, ...] = ()
    state: int = 0
    overwrites: tuple[tuple[int, int], ...] = ()

    @property
    def pure(self) -> bool:
        """Whether running the op again gives the same results and changes nothing else but them."""
        return not (self.random or self.effect)


Rows = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Rows of integers: where each starts, and where the last ends; the integers one after the other."""


def distinct(numbers: NDArray[Any]) -> NDArray[Any]:
    """Numbers, or rows of numbers, in order and each once. `numpy.unique` does so too, and imports `numpy.ma` first,
    which takes longer than most of what short commands do."""
    flat = numbers.ndim == 1
    ordered = np.sort(numbers) if flat else numbers[np.lexsort(numbers.T[::-1])]
    other = ordered[1:] != ordered[:-1]
    return ordered[
        np.concatenate((np.ones(min(1, len(ordered)), np.bool_), other if flat else other.any(axis=1)))
    ]


@dataclass(frozen=True, slots=True)
class Columns:
    """A graph's ops, values and storages as arrays, one for each attribute: nothing is derived. ``home`` has the
    storage of each value, ``caller`` and ``results`` are `Graph.inputs` and `Graph.outputs`; pairs in ``overwrites``
    stand one number after the other; those of op ``o`` among all requests begin at ``requests[o]``."""

    inputs: Rows
    outputs: Rows
    mutates: Rows
    updates: Rows
    control: Rows
    overwrites: Rows
    home: NDArray[np.int32]
    size: NDArray[np.int64]
    random: NDArray[np.uint8]
    effect: NDArray[np.uint8]
    workspace: NDArray[np.int64]
    state: NDArray[np.int64]
    time: NDArray[np.float64]
    caller: NDArray[np.int32]
    results: NDArray[np.int32]
    requests: NDArray[np.int64]
    request_size: NDArray[np.int64]
    request_storage: NDArray[np.int64]
    request_start: NDArray[np.int64]
    request_end: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Uses:
    """Facts derived from a graph, as tuples indexed by op, by storage or (``maker``) by value; ``facts`` has the same
    as arrays, for work on all of them. Tuples are made when they are asked for.

    ``reads[o]``    storages op ``o`` reads (each once, in first-use order; includes those it mutates).
    ``defines[o]``  storages that come into being at op ``o``.
    ``mutates[o]``  storages op ``o`` writes in place.
    ``needs[o]``    version of each of ``reads[o]`` the op must see: the number of writes before it.
    ``definer[s]``  op that defines storage ``s``; -1 when the caller owns it.
    ``maker[v]``    op that value ``v`` is a result of, be it a view of what was there before; -1 for the caller's.
    ``writers[s]``  ops that write ``s`` (definer first), ``readers[s]`` ops that read it, both ascending.
    """

    facts: _core.Facts = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uses) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash((self.definer, self.maker))

    @property
    def _rows(self) -> tuple[tuple[object, ...], ...]:
        made = (self.reads, self.defines, self.mutates, self.needs, self.definer, self.maker)
        return (*made, self.writers, self.readers)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        return _core.tuples(self.facts.reads)

    @cached_property
    def defines(self) -> tuple[tuple[int, ...], ...]:
        return _core.tuples(self.facts.defines)

    @cached_property
    def mutates(self) -> tuple[tuple[int, ...], ...]:
        return _core.tuples(self.facts.mutates)

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        return _core.tuples(self.facts.needs)

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        return _core.tuples(self.facts.writers)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        return _core.tuples(self.facts.readers)

    @cached_property
    def definer(self) -> tuple[int, ...]:
        return tuple(self.facts.definer.tolist())

    @cached_property
    def maker(self) -> tuple[int, ...]:
        return tuple(self.facts.maker.tolist())


_DIGESTED = ("target", "inputs", "outputs", "mutates", "updates", "random", "effect", "control")
"""What the digest says of every op."""


@dataclass(frozen=True)
class Graph:
    """A program: ``ops`` in a legal order over ``values`` over ``storages``. ``machine`` says what copies and codecs
    cost where the ops' times are from.

    Raises ``BadInput`` on construction when an index is out of range, a value is used before it is defined, a
    value is defined twice, a size is negative or sizes add up to more than `MOST_BYTES`, a time is negative or not
    finite, a value's shape and stride have different lengths, or called graphs lie more than `DEEPEST` deep in one
    another or are more than `MOST_CALLED`.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    name: str = "graph"
    meta: dict[str, Any] = field(default_factory=dict)
    machine: Machine = MODELED

    def __post_init__(self) -> None:
        _check(self)

    def __getstate__(self) -> dict[str, Any]:
        """What was found out about the graph is found again where it is needed."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def columns(self) -> Columns:
        return _columns(self)

    @cached_property
    def uses(self) -> Uses:
        return _uses(self)

    @cached_property
    def static(self) -> frozenset[int]:
        """Storages the caller owns."""
        return frozenset(self.values[v].storage for v in self.inputs)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Storages that must be there when the graph ends."""
        return frozenset(self.values[v].storage for v in self.outputs)

    @cached_property
    def static_bytes(self) -> int:
        return sum(self.storages[s].size for s in self.static)

    @cached_property
    def alignment(self) -> int:
        """What sizes in the device pool are multiples of."""
        return max((alignment_of(o.device) for o in self.ops), default=ALIGNMENT)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the structure (ops, aliasing, sizes, flags); measured times and workspaces stay out."""
        h = hashlib.sha256()
        h.update(_core.text(self.storages, "s", ("size", "pool"), ",", ";", False))
        of_value = ("storage", "dtype", "shape", "stride", "offset")
        h.update(_core.text(self.values, "v", of_value, ",", ";", False))
        more = _core.lengths(self.ops, "calls") | self.columns.state | np.diff(self.columns.overwrites[0])
        begin = 0
        for end in (
            *np.flatnonzero(more).tolist(),
            len(self.ops),
        ):  # what calls nothing and so on: many at once
            h.update(_core.text(self.ops[begin:end], "o(", _DIGESTED, ", ", ")();", True))
            begin = end + 1
            for o in self.ops[end:begin]:
                parts = tuple(getattr(o, name) for name in _DIGESTED)
                again = f"r{o.state}" if o.state else ""
                over = f"w{o.overwrites}" if o.overwrites else ""
                h.update(f"o{parts}{tuple(g.digest for g in o.calls)}{again}{over};".encode())
        h.update(f"i{self.inputs}o{self.outputs}".encode())
        return h.hexdigest()

    @cached_property
    def nesting(self) -> tuple[int, int]:
        """How deep graphs lie in this one, and how many they are, each counted as often as it is called."""
        deep = count = 0
        for k in np.flatnonzero(_core.lengths(self.ops, "calls")).tolist():
            for inner in self.ops[k].calls:
                below, inside = inner.nesting
                deep, count = max(deep, 1 + below), count + 1 + inside
        return deep, count

    def place(self, op: int) -> str:
        """Where an op comes from, for messages: ``module.path · file:line``."""
        o = self.ops[op]
        return " · ".join(x for x in (o.module, o.source) if x) or o.name

    def holding(self, op: int, limit: int, rest: int) -> Graph:
        """The same graph whose ``op`` takes so much of ``limit`` bytes that, beside what it makes, at most ``rest``
        bytes beyond the static set can be in use while it runs."""
        made = sum(self.storages[s].size for s in self.uses.defines[op])
        taken = limit - self.static_bytes - rest - made
        if taken <= 0:
            return self
        ops = list(self.ops)
        ops[op] = replace(ops[op], workspace=ops[op].workspace + taken)
        return self.with_ops(tuple(ops))

    def with_ops(self, ops: tuple[Op, ...]) -> Graph:
        """The same graph with other measurements on its ops (times, workspaces, requests)."""
        return replace(self, ops=ops)


_Judged = tuple[bool, str, object, str]
"""Whether a rule holds, what it says, of which value, and where."""


def _check(g: Graph) -> None:
    for holds, rule, value, place in _rules(g):
        if not holds:
            raise BadInput(rule, value, place)


def _rules(g: Graph) -> Iterator[_Judged]:
    """Every rule of every part, one after the other: a rule may rest on those before it."""
    total = 0
    for s in g.storages:
        total += s.size
        place = f"storage {s.name!r}"
        yield s.size >= 0, "a storage's size is not negative", s.size, place
        yield total <= MOST_BYTES, "the sizes of all storages add up to at most 2^59 bytes", s.size, place
    for v in g.values:
        place, known = f"value {v.name!r}", 0 <= v.storage < len(g.storages)
        yield known, "a value's storage is an index of Graph.storages", v.storage, place
        strides = not v.stride or len(v.stride) == len(v.shape)
        yield strides, "a value has a stride for each dimension", (v.shape, v.stride), place
    defined, held = bytearray(len(g.values)), bytearray(len(g.storages))
    for i in g.inputs:
        yield 0 <= i < len(g.values), "a graph input is an index of Graph.values", i, "Graph.inputs"
        defined[i] = held[g.values[i].storage] = 1
    seconds = 0.0
    for k, o in enumerate(g.ops):
        seconds += o.time
        yield from _rules_of_op(g, k, defined, held, seconds)
    deep, called = g.nesting
    place = f"graph {g.name!r}"
    yield deep <= DEEPEST, f"graphs lie at most {DEEPEST} deep in one another", deep, place
    yield called <= MOST_CALLED, f"at most {MOST_CALLED} graphs are called inside of a graph", called, place
    for i in g.outputs:
        there = 0 <= i < len(g.values) and bool(defined[i])
        yield there, "a graph output is a defined value", i, "Graph.outputs"


def _rules_of_op(g: Graph, k: int, defined: bytearray, held: bytearray, seconds: float) -> Iterator[_Judged]:
    """``defined`` and ``held``: which values and storages there are, the op's own at the end; ``seconds``: those of
    all ops so far."""
    o = g.ops[k]
    place = f"op {o.name!r}"
    for i in o.inputs:
        yield 0 <= i < len(g.values), "an op's input is an index of Graph.values", i, place
        yield bool(defined[i]), "a value is defined before it is used", g.values[i].name, place
    for i in o.outputs:
        yield 0 <= i < len(g.values), "an op's output is an index of Graph.values", i, place
        yield not defined[i], "a value is defined once", g.values[i].name, place
        defined[i] = 1
    for s in o.mutates:
        yield 0 <= s < len(g.storages), "a mutated storage is an index of Graph.storages", s, place
    times = o.time >= 0 and seconds < inf
    yield times, "an op's time is not negative, and times have a finite sum", o.time, place
    yield 0 <= o.workspace <= MOST_BYTES, "an op's workspace is from 0 to 2^59 bytes", o.workspace, place
    for r in o.requests:
        yield 0 <= r.size <= MOST_BYTES, "a request is for 0 to 2^59 bytes", r.size, place
        events = -1 <= r.start <= _MOST_EVENTS and -1 <= r.end <= _MOST_EVENTS
        yield events, "events of a request are counted from 0 to 2^30, or -1", (r.start, r.end), place
    yield o.state <= MOST_BYTES, "an op's random state has at most 2^59 bytes", o.state, place
    state = o.state == 0 or (o.state > 0 and o.random)
    yield state, "a random op has a state of so many bytes, no other op has one", o.state, place
    yield set(o.updates) <= set(o.mutates), "Op.updates is part of Op.mutates", o.updates, place
    if o.overwrites:
        read, results = ({g.values[v].storage for v in row} for row in (o.inputs, o.outputs))
        for a, b in o.overwrites:
            free = a in read - results and b in results - read and a not in o.mutates and b not in o.mutates
            rule = "what an op may overwrite is read and not written, and a result of it takes the place"
            yield free, rule, (a, b), place
            sizes = g.storages[a].size, g.storages[b].size
            yield sizes[0] == sizes[1], "what takes a storage's place has its size", sizes, place
            yield not held[b], "what takes a storage's place is not there before", (a, b), place
    for i in o.outputs:
        held[g.values[i].storage] = 1
    for c in o.control:
        yield 0 <= c < k, "a control predecessor stands earlier in the graph's order", c, place


def _columns(g: Graph) -> Columns:
    counts = _core.lengths(g.ops, "requests")
    requests = np.zeros(len(g.ops) + 1, dtype=np.int64)
    np.cumsum(counts, out=requests[1:])
    asked = tuple([r for k in np.flatnonzero(counts).tolist() for r in g.ops[k].requests])
    return Columns(
        inputs=_core.rows(g.ops, "inputs"),
        outputs=_core.rows(g.ops, "outputs"),
        mutates=_core.rows(g.ops, "mutates"),
        updates=_core.rows(g.ops, "updates"),
        control=_core.rows(g.ops, "control"),
        overwrites=_core.rows(g.ops, "overwrites"),
        home=_core.integers(g.values, "storage").astype(np.int32),
        size=_core.integers(g.storages, "size"),
        random=_core.flags(g.ops, "random"),
        effect=_core.flags(g.ops, "effect"),
        workspace=_core.integers(g.ops, "workspace"),
        state=_core.integers(g.ops, "state"),
        time=_core.numbers(g.ops, "time"),
        caller=np.array(g.inputs, dtype=np.int32),
        results=np.array(g.outputs, dtype=np.int32),
        requests=requests,
        request_size=_core.integers(asked, "size"),
        request_storage=_core.integers(asked, "storage"),
        request_start=_core.integers(asked, "start"),
        request_end=_core.integers(asked, "end"),
    )


def _uses(g: Graph) -> Uses:
    c = g.columns
    caller = np.zeros(len(g.storages), dtype=np.uint8)
    caller[c.home[c.caller]] = 1
    facts = _core.Facts(c.inputs, c.outputs, c.mutates, c.control, c.home, c.size, caller, c.random, c.effect)
    op, storage = facts.undefined
    if op >= 0:
        place = f"op {g.ops[op].name!r}"
        raise BadInput("a storage is defined before it is used", g.storages[storage].name, place)
    return Uses(facts)


def walk(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """The graph and every graph called inside it, outermost first, each with a path for messages."""
    yield graph.name, graph
    for o in graph.ops:
        for c in o.calls:
            for path, inner in walk(c):
                yield f"{graph.name}/{o.name}/{path}", inner
