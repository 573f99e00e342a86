"""Streaming the static set: parameters and optimizer state that leave memory when a step does not need them.

What streams is no longer the caller's in the graph: its bytes lie in a host pool (a file without a name on a
CPU, pinned memory beside a GPU), and a **fetch** op makes the storage from them like any op makes a result,
before its first use. A **store** op writes it back after the optimizer's update. What lies in the pool is a
storage of its own, of no bytes in the device pool, which fetches read and stores write. So everything that
holds for ops holds here: a storage that nothing needs for a while is freed and fetched again, which is
recomputing; one that was updated cannot be fetched before it is stored, nor from contents that are too new;
planners weigh its seconds, the verifier checks it, and its bytes are requests at planned places. The idea:
ZeRO-Offload (Ren et al. 2021), here as part of a plan.

Between steps the caller's tensors are without memory: see `away`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible
from tightship.execute.away import Fetch, FetchPiece, Lent, Store, StorePiece, Streams, Turn
from tightship.execute.split import Choice
from tightship.execute.split_trials import same_in_pieces
from tightship.frontends.torch.collectives import sends_parts
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.frontends.torch.program import Call, Program, Ref, Slot, dtype_of
from tightship.graph import Graph, Op, Request, Storage, Value, aligned
from tightship.plan import Plan
from tightship.planners.ahead import FETCH, STORE
from tightship.planners.default import STREAM
from tightship.planners.order import sink
from tightship.units import format_bytes, format_seconds

__all__ = [
    "Streamed",
    "Streaming",
    "all_streamed",
    "is_about",
    "least_streamed",
    "moving",
    "streaming_advice",
]

_LEAST = 4096
"""Bytes below which a storage stays: moving it takes as long as moving these."""

PIECES: Final = (4, 16, 64)
"""In how many pieces the updates of large parameters run."""

_GAIN = 0.01
"""By so much of the unplanned time a plan is slower before streaming is tried where it is not needed."""


# --- the program ---


@dataclass(frozen=True)
class Streamed:
    """Which storages of a captured program stream, as a change of it."""

    slots: tuple[Slot, ...]
    streams: Streams
    fetches: dict[tuple[str, Any], tuple[Fetch, Store]]
    pieces: int = 1
    """Updates whose tensors all stream run in so many pieces, where their bits allow it."""

    def apply(self, program: Program) -> Program:
        """``program`` with a fetch before the first use of each, and a store after the last write."""
        return _Rewriting(program, self).run()


class _Rewriting:
    def __init__(self, program: Program, streamed: Streamed) -> None:
        self.program, self.graph, self.streamed = program, program.graph, streamed
        values = program.graph.values
        wanted = {(s.role, s.key) for s in streamed.slots}
        self.slots = {values[s.value].storage: s for s in program.slots if (s.role, s.key) in wanted}
        self.storages, self.values = list(program.graph.storages), list(values)
        # what lies in the pool, value and storage, by storage and first row: rows of updates in pieces one by one
        self.files: dict[int, dict[int, tuple[int, int]]] = {}
        self.bases = list(program.bases)
        self.updated: dict[int, int] = {}  # the value that an update works on
        self.cut = {k: n for k in range(len(program.graph.ops)) if (n := self.pieces_of(k)) > 1}
        cut = {s: n for k, n in self.cut.items() for s in program.graph.uses.mutates[k]}
        for s, slot in self.slots.items():
            name = self.storages[s].name
            rows = _rows(values[slot.value].shape[0], cut[s]) if s in cut else [(0, 0)]
            self.files[s] = {a: self.add_file(s, f"[{a}:{b}]" if b else "") for a, b in rows}
            self.updated[s] = slot.value
            if slot.role == "parameter" and program.graph.uses.writers[s]:
                self.updated[s], own = len(self.values), f"{name}.updated"
                like = replace(values[slot.value], name=own, storage=len(self.storages))
                self.add(like, replace(self.storages[s], name=own))
        self.inputs = tuple(v for v in program.graph.inputs if values[v].storage not in self.slots)
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.at: dict[int, int] = {}  # where ops of the program stand now
        self.asked: list[int] = []

    def add(self, value: Value, storage: Storage) -> None:
        self.bases.append(len(self.values))
        self.values.append(value)
        self.storages.append(storage)

    def add_file(self, s: int, rows: str) -> tuple[int, int]:
        made = len(self.values), len(self.storages)
        name = f"{self.storages[s].name}{rows}.away"
        self.add(Value(name, made[1], "uint8", (0,), (1,)), Storage(name, 0, self.storages[s].kind))
        return made

    def run(self) -> Program:
        graph, program, cut = self.graph, self.program, self.cut
        uses = graph.uses
        fetched: set[int] = set()
        for k in sink.plan(
            graph
        ):  # updates at their gradients: what is in a chain with a fetch does not move there
            op = graph.ops[k]
            writes = [s for s in uses.mutates[k] if s in self.slots]
            for s in dict.fromkeys((*uses.reads[k], *writes)):
                if s not in self.slots or k in cut:
                    continue
                base = self.updated[s] if s in writes else self.slots[s].value
                if base not in fetched:
                    fetched.add(base)
                    self.fetch(s, base)
            control = tuple(self.at[c] for c in op.control)
            if k in cut:
                self.in_pieces(k, replace(op, control=control), writes, cut[k])
                continue
            self.at[k] = len(self.ops)
            self.put(self.updating(replace(op, control=control), writes), self.lent(program.calls[k]), k)
            for s in writes:
                self.store(s)
        files = tuple(v for rows in self.files.values() for v, _ in rows.values())
        made = replace(
            graph, ops=tuple(self.ops), values=tuple(self.values), storages=tuple(self.storages),
            inputs=(*self.inputs, *files),
        )  # fmt: skip
        where = self.at
        return replace(
            program, graph=made, calls=tuple(self.calls),
            replays={where[k]: c for k, c in program.replays.items()},
            replay_requests={where[k]: r for k, r in program.replay_requests.items()},
            samples={where[k]: x for k, x in program.samples.items()},
            bases=tuple(self.bases),
            slots=tuple(s for s in program.slots if graph.values[s.value].storage not in self.slots),
            asked=tuple(self.asked) if program.asked else (),
        )  # fmt: skip

    def put(self, op: Op, call: Call, k: int) -> None:
        self.ops.append(op)
        self.calls.append(call)
        self.asked.append(self.program.asked[k] if k >= 0 and self.program.asked else -1)

    def updating(self, op: Op, writes: Sequence[int]) -> Op:
        """The op on what it updates: of parameters, which are read elsewhere, that is a storage of its own."""
        values = {self.slots[s].value: self.updated[s] for s in writes}
        other = {s: self.values[self.updated[s]].storage for s in writes}
        return replace(
            op, inputs=tuple(values.get(v, v) for v in op.inputs),
            mutates=tuple(other.get(s, s) for s in op.mutates),
        )  # fmt: skip

    def fetch(self, s: int, base: int) -> None:
        graph, size = self.graph, self.storages[s].size
        views = [v for v in graph.inputs if graph.values[v].storage == s and v != base]
        if base != self.slots[s].value:
            views = []
        op = Op(
            f"fetch {self.storages[s].name}", FETCH, tuple(v for v, _ in self.files[s].values()), (base, *views),
            time=graph.machine.seconds("fetch", size), requests=(Request(size, 0, 0, -1),), device=self.device,
        )  # fmt: skip
        self.put(op, Call(self.functions(s)[0], (), {}, (base,)), -1)

    def store(self, s: int) -> None:
        base, size = self.updated[s], self.storages[s].size
        ((value, storage),) = self.files[s].values()
        op = Op(
            f"store {self.storages[s].name}", STORE, (base, value), mutates=(storage,), phase="update",
            time=self.graph.machine.seconds("offload", size), device=self.device,
        )  # fmt: skip
        self.put(op, Call(self.functions(s)[1], (Ref(base),), {}, ()), -1)

    # --- an update in pieces ---

    def pieces_of(self, k: int) -> int:
        """In how many pieces an update runs: 1 where it is no update of rows that stream, or its bits do not allow
        it."""
        if self.streamed.pieces < 2:
            return 1
        program, graph = self.program, self.graph
        writes = [s for s in graph.uses.mutates[k] if s in self.slots]
        fn = program.calls[k].fn
        if not writes or not isinstance(fn, Updater) or fn.sparse or not _by_itself(program, k):
            return 1
        values = [graph.values[self.slots[s].value] for s in writes]
        shape = values[0].shape
        alike = all(v.shape == shape and _is_rows(v) for v in values)
        rest = (s for s in graph.uses.mutates[k] if s not in self.slots)
        whole = alike and all(graph.storages[s].size <= graph.alignment for s in rest)
        parameter = any(self.slots[s].role == "parameter" for s in writes)
        if not (whole and parameter) or _pieces_of_requests(graph, k, values[0], 1, 1) is None:
            return 1
        most = graph.storages[writes[0]].size // _LEAST
        count = min(self.streamed.pieces, shape[0], most)
        return (
            count if count > 1 and same_in_pieces(fn, shape, values[0].dtype, _rows(shape[0], count)) else 1
        )

    def in_pieces(self, k: int, op: Op, writes: Sequence[int], count: int) -> None:
        """The update of rows after rows: what of it streams is fetched, updated and stored for each."""
        values, shape = self.graph.values, self.graph.values[self.slots[writes[0]].value].shape
        whole, turn = self.lent(self.program.calls[k]), Turn()
        assert isinstance(whole.fn, Lent)
        aways = {v: a for v, a in whole.fn.lends}
        for a, b in _rows(shape[0], count):
            made: dict[int, int] = {}
            for s in writes:
                made[s] = self.fetch_rows(s, a, b)
            of = {self.slots[s].value: made[s] for s in writes}
            numbers = {self.updated[s]: made[s] for s in writes}
            fn = whole.fn.of_rows((a, b), turn)
            fn.lends = tuple((numbers[v], away) for v, away in aways.items())
            args = tuple(Ref(numbers.get(r.value, r.value)) for r in whole.args)
            requests = _pieces_of_requests(
                self.graph, k, values[self.slots[writes[0]].value], b - a, shape[0]
            )
            assert requests is not None
            share = (b - a) / shape[0]
            self.at[k] = len(self.ops)
            piece = replace(
                op, name=f"{op.name} [{a}:{b}]", inputs=tuple(of.get(v, v) for v in op.inputs),
                mutates=tuple(self.values[made[s]].storage if s in made else s for s in op.mutates),
                time=op.time * share, flops=round(op.flops * share), requests=requests,
                workspace=_most(requests) if op.requests else round(op.workspace * share),
            )  # fmt: skip
            self.put(piece, replace(whole, fn=fn, args=args), k)
            for s in writes:
                self.store_rows(s, made[s], a)

    def fetch_rows(self, s: int, a: int, b: int) -> int:
        """A fetch of rows; returns the value it makes."""
        slot, storage = self.slots[s], self.storages[s]
        like, each = self.graph.values[slot.value], self.row_bytes(s)
        name, size = f"{storage.name}[{a}:{b}]", aligned((b - a) * each, self.graph.alignment)
        made = len(self.values)
        value = replace(like, name=name, storage=len(self.storages), shape=(b - a, *like.shape[1:]))
        self.add(value, replace(storage, name=name, size=size))
        time = self.graph.machine.seconds("fetch", size)
        op = Op(
            f"fetch {name}", FETCH, (self.files[s][a][0],), (made,), phase="update", time=time,
            requests=(Request(size, 0, 0, -1),), device=self.device,
        )  # fmt: skip
        self.put(op, Call(FetchPiece(self.functions(s)[0].away, value, a * each), (), {}, (made,)), -1)
        return made

    def store_rows(self, s: int, made: int, a: int) -> None:
        value, storage = self.files[s][a]
        size = self.storages[self.values[made].storage].size
        op = Op(
            f"store {self.values[made].name}", STORE, (made, value), mutates=(storage,), phase="update",
            time=self.graph.machine.seconds("offload", size), device=self.device,
        )  # fmt: skip
        fn = StorePiece(self.functions(s)[1].away, a * self.row_bytes(s))
        self.put(op, Call(fn, (Ref(made),), {}, ()), -1)

    def row_bytes(self, s: int) -> int:
        value = self.graph.values[self.slots[s].value]
        return math.prod(value.shape[1:]) * dtype_of(value.dtype).itemsize

    @property
    def device(self) -> str:
        return self.graph.ops[0].device

    def functions(self, s: int) -> tuple[Fetch, Store]:
        slot = self.slots[s]
        return self.streamed.fetches[slot.role, slot.key]

    def lent(self, call: Call) -> Call:
        if not isinstance(call.fn, Updater):
            return call
        values, items = self.graph.values, self.streamed.streams.items
        rows, args = [], []
        for ref in call.args:
            s = values[ref.value].storage
            slot = self.slots.get(s)
            if slot is not None:
                rows.append((self.updated[s], items[slot.role, slot.key]))
            args.append(ref if slot is None else Ref(self.updated[s]))
        return replace(call, fn=Lent.of(call.fn, rows), args=tuple(args)) if rows else call


def _rows(rows: int, count: int) -> list[tuple[int, int]]:
    """So many pieces of rows, all but the last of the same size."""
    each = -(-rows // count)
    return [(a, min(a + each, rows)) for a in range(0, rows, each)]


def _is_rows(value: Value) -> bool:
    """Whether its rows lie one after the other."""
    count = 1
    for n, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if n != 1 and stride != count:
            return False
        count *= n
    return len(value.shape) > 0 and value.shape[0] > 1


def _pieces_of_requests(graph: Graph, k: int, like: Value, rows: int, of: int) -> tuple[Request, ...] | None:
    """What an update asks for of ``rows`` rows: of temporaries that are as large as the parameter, as much less; None
    where there are others that are large."""
    whole, made = math.prod(like.shape), []
    for r in graph.ops[k].requests:
        width = next((w for w in (1, 2, 4, 8) if r.size == aligned(whole * w, graph.alignment)), 0)
        if not width and r.size > graph.alignment:
            return None
        nbytes = aligned(whole // of * rows * width, graph.alignment) if width else r.size
        made.append(replace(r, size=nbytes))
    return tuple(made)


def _most(requests: Sequence[Request]) -> int:
    """Bytes of temporaries that are there at one time."""

    def there(at: int) -> int:
        return sum(r.size for r in requests if r.storage < 0 and r.start <= at and (at < r.end or r.end < 0))

    return max((there(r.start) for r in requests), default=0)


# --- which ----------------------------------------------------------------------------------------------------


def _candidates(program: Program) -> list[Slot]:
    """What can stream, in the order in which it does: optimizer state before parameters, which are needed more than
    once in a step; large before small."""
    graph, found = program.graph, []
    by_storage: dict[int, list[Slot]] = {}
    for slot in program.slots:
        by_storage.setdefault(graph.values[slot.value].storage, []).append(slot)
    guarded = {source for guard in program.guards for source in guard.sources}
    kept = graph.kept | {graph.values[v].storage for v in program.results}
    for s, slots in by_storage.items():
        slot, storage = slots[0], graph.storages[s]
        if len(slots) > 1 or slot.role not in ("parameter", "state") or storage.pool != "device":
            continue
        if slot.role == "state" and not slot.key[0]:
            continue
        if storage.size < _LEAST or s in kept or (slot.role, slot.key) in guarded:
            continue
        writers = graph.uses.writers[s]
        if len(writers) > 1 or any(k > writers[0] for k in graph.uses.readers[s] if writers):
            continue  # what is read after an update
        if _spans(graph, slot.value) and all(_by_itself(program, k) for k in writers):
            found.append(slot)

    def first(slot: Slot) -> tuple[bool, int]:
        return slot.role == "parameter", -graph.storages[graph.values[slot.value].storage].size

    return sorted(found, key=first)


def _spans(graph: Graph, value: int) -> bool:
    """Whether the tensor is dense, and all of its storage."""
    v, count = graph.values[value], 1
    for n, stride in sorted(zip(v.shape, v.stride, strict=True), key=lambda row: row[1]):
        if n != 1 and stride != count:
            return False
        count *= n
    return (
        v.offset == 0
        and aligned(count * dtype_of(v.dtype).itemsize, graph.alignment) == graph.storages[v.storage].size
    )


def _by_itself(program: Program, op: int) -> bool:
    """Whether it is an update of one parameter by a class that is known."""
    fn = program.calls[op].fn
    return (
        isinstance(fn, Updater)
        and len(fn.members) == 1
        and fn.exact
        and not (fn.keeps or fn.takes or fn.held)
    )


class Streaming:
    """Plans programs of one step within ``limit`` bytes: with as little streamed as that asks for, and at least what
    is streamed already. ``plan_of`` plans a graph; ``moves``: plans may move storages out of memory or compress them.
    ``hints``: patterns of parameters' names, and whether these, with their state, stream in any case, or never.

    Nothing streams yet when a plan is chosen: `begin` has what the choice says leave memory, with ``streams``.
    """

    def __init__(
        self, plan_of: Callable[[Graph], Plan], limit: int, streams: Streams | None = None, *, moves: bool = False,
        hints: Sequence[tuple[str, bool]] = (),
    ) -> None:  # fmt: skip
        self.plan_of, self.limit, self.streams, self.moves = plan_of, limit, streams, moves
        self.hints = tuple(hints)
        self._bases: list[tuple[Streamed, Program]] = []

    def choose(self, base: Program) -> Choice:
        """The plan of a measured program. Raises ``Infeasible``."""
        slots, had, _ = self._candidates(base)
        refused: Infeasible | None = None
        found = None
        if not had and self._bound(base) <= self.limit:
            try:
                found = Choice(base, self.plan_of(base.graph))
            except Infeasible as no:
                refused = no
            if found is not None and found.plan.time <= found.plan.time_before * (1 + _GAIN):
                return found
        for count, pieces in self._tries(base, slots, had):
            streamed = _stand_in(slots[:count], pieces)
            try:
                program = streamed.apply(base)
                plan = self.plan_of(program.graph)
            except Infeasible as no:
                refused = no
                continue
            if found is not None and plan.time >= found.plan.time:
                return found
            self._bases.append((streamed, base))
            return Choice(program, plan, (streamed,))
        if found is not None:
            return found
        if refused is None:
            return Choice(base, self.plan_of(base.graph))
        raise refused

    def least(self, base: Program) -> int:
        """Bytes that no plan goes below, whatever streams."""
        slots, _, _ = self._candidates(base)
        return self._bound(_stand_in(slots, PIECES[-1]).apply(base))

    def begin(self, choice: Choice) -> Choice:
        """The same with what moves bytes; from now on what it says streams."""
        base = next((b for s, b in self._bases if choice.changes and s is choice.changes[-1]), None)
        if base is None:
            return choice
        last = choice.changes[-1]
        assert isinstance(last, Streamed)
        assert self.streams is not None
        streamed = moving(base, last.slots, last.pieces, self.streams)
        made = streamed.apply(base)
        notes = (*made.notes, *self.notes(choice))
        if shared := self._candidates(base)[2]:
            notes += (
                f"{shared} tensors that could stream stay in memory: somebody else holds views of them",
            )
        return Choice(replace(made, notes=notes), choice.plan, (*choice.changes[:-1], streamed))

    def notes(self, choice: Choice) -> tuple[str, ...]:
        """What streams by a choice, for people."""
        count, size = self.moved(choice)
        if not count:
            return ()
        return (f"streamed: {count} parameters and tensors of optimizer state, {format_bytes(size)}",)

    def moved(self, choice: Choice) -> tuple[int, int]:
        """How many tensors stream by a choice, and their bytes."""
        row = next(((b, s) for s, b in self._bases if choice.changes and s is choice.changes[-1]), None)
        if row is None:
            return 0, 0
        graph, slots = row[0].graph, row[1].slots
        return len(slots), sum(graph.storages[graph.values[s.value].storage].size for s in slots)

    def _candidates(self, base: Program) -> tuple[list[Slot], int, int]:
        """What may stream, how many of it do in any case, and how many do not as others hold views of them."""
        known = {} if self.streams is None else self.streams.items
        had = [s for s in base.slots if (s.role, s.key) in known]
        fresh = [s for s in _candidates(base) if (s.role, s.key) not in known]
        fresh = [s for s in fresh if self._hinted(s) is not False]
        alone = [s for s in fresh if self.streams is None or not self.streams.shares(s)]
        alone.sort(key=lambda s: not self._hinted(s))
        always = len(had) + sum(self._hinted(s) is True for s in alone)
        return [*had, *alone], always, len(fresh) - len(alone)

    def _hinted(self, slot: Slot) -> bool | None:
        """Whether it has to stream, by the last hint about it; None without one."""
        name = slot.key if slot.role == "parameter" else slot.key[0]
        found = [way for pattern, way in self.hints if is_about(pattern, name)]
        return found[-1] if found else None

    def _tries(self, base: Program, slots: Sequence[Slot], had: int) -> Iterator[tuple[int, int]]:
        """How many stream, and in how many pieces updates run: as many as a bound allows, where whole ones were not
        enough."""
        whole = self._bound(_stand_in(slots).apply(base)) <= self.limit
        if whole:
            yield from ((n, 1) for n in self._counts(base, slots, had))
        for pieces in PIECES if slots else ():
            if self._bound(_stand_in(slots, pieces).apply(base)) <= self.limit or pieces == PIECES[-1]:
                yield from ((n, pieces) for n in self._counts(base, slots, had, pieces))
                if pieces != PIECES[-1]:
                    yield len(slots), PIECES[-1]
                return

    def _counts(self, base: Program, slots: Sequence[Slot], had: int, pieces: int = 1) -> Iterator[int]:
        """How many may be enough: from the fewest that a bound allows on. Parts of a step agree on all."""
        low, high = had, len(slots)
        total = high
        if {op.phase for op in base.graph.ops} & {"forward", "update"} != {"forward", "update"}:
            low = total
        while low < high:
            middle = (low + high) // 2
            if self._bound(_stand_in(slots[:middle], pieces).apply(base)) <= self.limit:
                high = middle
            else:
                low = middle + 1
        yield from dict.fromkeys(
            n for n in (low, low + -(-(total - low) // 4), (low + total) // 2, total) if n
        )

    def _bound(self, program: Program) -> int:
        away = dict.fromkeys(range(len(program.graph.storages)), 0) if self.moves else None
        return int(lower_bound(program.graph, least=away))


def moving(base: Program, slots: Sequence[Slot], pieces: int, streams: Streams) -> Streamed:
    """What moves the bytes of these inputs of a measured program, which stream from now on."""
    values = base.graph.values
    streams.add([(s, values[s.value]) for s in slots if (s.role, s.key) not in streams.items])
    items = {(s.role, s.key): streams.items[s.role, s.key] for s in slots}
    return Streamed(tuple(slots), streams, {k: (Fetch(a), Store(a)) for k, a in items.items()}, pieces)


def streaming_advice(base: Program, limit: int, allow: str) -> tuple[str, ...]:
    """What streaming would come to where it was not allowed; nothing where it would not help, or ranks have parts."""
    slots = _candidates(base)
    if not slots or sends_parts(base):
        return ()
    graph = all_streamed(base).graph
    bound = int(lower_bound(graph))
    if bound > limit:
        return ()
    ways = ",".join(filter(None, (allow, STREAM)))
    size = sum(base.graph.storages[base.graph.values[s.value].storage].size for s in slots)
    copies = sum(op.time for op in graph.ops if op.target in (FETCH, STORE))
    return (
        f"streaming (allow={ways}): parameters and optimizer state of {format_bytes(size)} leave memory while "
        f"nothing needs them; no less than {format_bytes(bound)} then, and {format_seconds(copies)} of copies "
        "a step at least",
    )


def all_streamed(program: Program) -> Program:
    """For planning: the program in which all that can stream does, and updates run in pieces."""
    return _stand_in(_candidates(program), PIECES[-1]).apply(program)


def is_about(pattern: str, name: str) -> bool:
    """Whether a hint's pattern, over names of modules as in a shell, is about a parameter of that name."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def least_streamed(program: Program) -> int:
    """Bytes that no plan goes below where all that can stream does."""
    return int(lower_bound(all_streamed(program).graph))


def _stand_in(slots: Sequence[Slot], pieces: int = 1) -> Streamed:
    """For planning: moves nothing."""
    nothing: Any = None
    streams = Streams(nothing, None)
    keys = [(s.role, s.key) for s in slots]
    streams.items = dict.fromkeys(keys, nothing)
    return Streamed(tuple(slots), streams, dict.fromkeys(keys, (Fetch(nothing), Store(nothing))), pieces)
