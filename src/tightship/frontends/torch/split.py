"""Chains of ops computed in slices, so that their large intermediates never exist as a whole.

`chains` finds them: around a large storage, all ops that touch it, and the storages of like size that these make or
read, as long as `split_rules` says how each op is cut. `split` records the program anew with these ops in slices. Of
storages within the chain each slice has a part of its own; what others read is written into its place of the whole;
what all slices add to is added up in the order of the slices. Slices are ops like others: they are measured, planned
and recomputed one by one.

A storage is cut along the dimension that is outermost in memory, so that a part of it is laid out as the whole is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, prod
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.lower import finish
from tightship.frontends.torch.capture.recorder import Recorder
from tightship.frontends.torch.capture.tape import Origin, Record, Tape, TapeStorage, TapeValue, Tracker
from tightship.frontends.torch.program import Call, Program, Ref, Slot, dtype_of, flat, refs_in, substitute
from tightship.frontends.torch.split_rules import SUM, Axis, added_wide, axes
from tightship.graph import Value, aligned, alignment_of

__all__ = ["Chain", "bounds_of", "chains", "narrowed", "split"]

aten = torch.ops.aten

_SEEDS = 64
"""Storages around which a chain is looked for, the largest first."""
_SIMILAR, _SMALL = 2, 256
"""A chain takes in storages of at least such a part of the one it is found around; chains are looked for around
storages of at least such a part of the largest."""


@dataclass(frozen=True, eq=False)
class Chain:
    """``ops`` are cut as their `Axis` says, ``storages`` exist in parts alone; ``units``: how many slices there can
    be at most."""

    seed: int
    ops: Mapping[int, Axis]
    storages: frozenset[int]
    units: int

    def adds(self, program: Program) -> bool:
        """Whether slices add up to something that is needed, which rounds otherwise than in one piece."""
        return any(
            v >= 0 and axis.results.get(n) == SUM
            for k, axis in self.ops.items()
            for n, v in enumerate(program.calls[k].results)
        )

    def pattern(self, program: Program) -> tuple[Any, ...]:
        """The same for chains of the same ops in the same sizes: those of repeated layers."""
        graph = program.graph
        return (
            graph.storages[self.seed].size,
            self.units,
            tuple(graph.ops[k].target for k in sorted(self.ops)),
        )


def bounds_of(units: int, slices: int) -> list[tuple[int, int]]:
    """Where slices begin and end, in units; they differ by one unit at most."""
    ends = [units * i // slices for i in range(slices + 1)]
    return list(pairwise(ends))


def narrowed(length: int, units: int, part: tuple[int, int]) -> tuple[int, int]:
    """Start and length of a part along a dimension of that length."""
    each = length // units
    return part[0] * each, (part[1] - part[0]) * each


# --- finding chains -------------------------------------------------------------------------------------------


def chains(program: Program) -> tuple[Chain, ...]:
    """The chains of a program, those of the largest storages first; they share no op."""
    finder = _Finder(program)
    graph, found, taken = program.graph, list[Chain](), set[int]()
    sizes = sorted(
        (s for s in range(len(graph.storages)) if finder.may_be_cut(s)), key=lambda s: -graph.storages[s].size
    )
    tried = 0
    for seed in sizes:
        if tried == _SEEDS or graph.storages[seed].size * _SMALL < graph.storages[sizes[0]].size:
            break
        if seed in taken:
            continue
        tried += 1
        chain = finder.around(seed)
        if chain is not None and not any(k in other.ops for other in found for k in chain.ops):
            found.append(chain)
            taken |= chain.storages
    return tuple(found)


class _Finder:
    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.touching: list[dict[int, None]] = [{} for _ in self.graph.storages]
        for k, op in enumerate(self.graph.ops):
            for v in (*op.inputs, *op.outputs):
                self.touching[self.graph.values[v].storage][k] = None
            for s in op.mutates:
                self.touching[s][k] = None
        self._axes: dict[int, list[Axis]] = {}
        self._dims: dict[int, int | None] = {}

    def may_be_cut(self, s: int) -> bool:
        """Whether nobody but ops needs it, and its base is whole, so that parts of it are laid out alike."""
        storage, graph = self.graph.storages[s], self.graph
        if s in graph.static or s in graph.kept or storage.pool != "device" or not storage.size:
            return False
        return self.dim(self.program.bases[s]) is not None

    def dim(self, v: int) -> int | None:
        """The dimension of a value along which it is cut where its storage is: the outermost in memory."""
        if v not in self._dims:
            value = self.graph.values[v]
            self._dims[v] = _outermost(value, self.graph.values[self.program.bases[value.storage]])
        return self._dims[v]

    def axes(self, k: int) -> list[Axis]:
        """How an op may be cut, as far as it goes."""
        if k not in self._axes:
            self._axes[k] = list(self._possible(k))
        return self._axes[k]

    def _possible(self, k: int) -> Iterator[Axis]:
        op, call, values = self.graph.ops[k], self.program.calls[k], self.graph.values
        if op.random or op.effect or op.updates or op.phase == "update" or k in self.program.replays:
            return
        if self.program.samples.get(k) or any(
            list(refs_in(x)) for x in (*call.args, *call.kwargs.values()) if not isinstance(x, Ref)
        ):
            return
        if any(isinstance(x, Ref) for x in call.kwargs.values()):
            return
        shapes = [torch.Size(values[x.value].shape) if isinstance(x, Ref) else x for x in call.args]
        made = [tuple(values[v].shape) if v >= 0 else None for v in call.results]
        if op.mutates and made and made[0] is None:
            made = []
        needed = {n for n, v in enumerate(call.results) if v >= 0}
        for axis in axes(call.fn, shapes, made):
            written = not op.mutates or 0 in axis.args
            if written and needed <= axis.results.keys() and self._lengths(k, axis) is not None:
                yield axis

    def _lengths(self, k: int, axis: Axis) -> set[int] | None:
        """The lengths of what is cut; None where there is nothing to cut."""
        call, values = self.program.calls[k], self.graph.values
        found = {
            values[call.args[p].value].shape[d] for p, d in axis.args.items() if isinstance(call.args[p], Ref)
        }
        found |= {
            values[v].shape[axis.results[n]]
            for n, v in enumerate(call.results)
            if v >= 0 and axis.results[n] != SUM
        }
        return found if found and min(found) > 1 else None

    def choose(self, k: int, cut: set[int]) -> Axis | None:
        """A way in which an op may be cut along what is cut of its storages."""
        call, values = self.program.calls[k], self.graph.values
        for axis in self.axes(k):
            rows = [(x.value, axis.args.get(p)) for p, x in enumerate(call.args) if isinstance(x, Ref)]
            rows += [(v, axis.results[n]) for n, v in enumerate(call.results) if v >= 0]
            if all(values[v].storage not in cut or d == self.dim(v) for v, d in rows):
                return axis
        return None

    def parts(self, k: int, axis: Axis) -> Iterator[int]:
        """The values of an op of which each slice has a part."""
        call = self.program.calls[k]
        for p, d in axis.args.items():
            if isinstance(call.args[p], Ref) and d == self.dim(call.args[p].value):
                yield call.args[p].value
        for n, v in enumerate(call.results):
            if v >= 0 and axis.results[n] != SUM and axis.results[n] == self.dim(v):
                yield v

    def around(self, seed: int) -> Chain | None:
        """The chain around a storage; None without one."""
        blocked: set[int] = set()
        while True:
            cut, ops, blame = self._grown(seed, blocked)
            if not blame:
                break
            if seed in blame:
                return None
            blocked |= blame
        self._take_rows(cut, ops, blocked)
        lengths = {n for k, axis in ops.items() for n in self._lengths(k, axis) or ()}
        units = gcd(*lengths)
        return (
            Chain(seed, dict(sorted(ops.items())), frozenset(cut), units)
            if units > 1 and len(ops) > 1
            else None
        )

    def _grown(self, seed: int, blocked: set[int]) -> tuple[set[int], dict[int, Axis], set[int]]:
        """What is cut with ``seed``, the ops that are then; and, where one of them cannot be, what it touches."""
        cut, ops, least = {seed}, dict[int, Axis](), self.graph.storages[seed].size // _SIMILAR
        work = list(self.touching[seed])
        while work:
            k = work.pop()
            axis = self.choose(k, cut)
            if axis is None:
                blame = {s for s in cut if k in self.touching[s]}
                return cut, ops, blame - {seed} or {seed}
            ops[k] = axis
            for v in self.parts(k, axis):
                s = self.graph.values[v].storage
                large = self.graph.storages[s].size >= least
                if s not in cut and s not in blocked and large and self.may_be_cut(s):
                    cut.add(s)
                    work += self.touching[s]
        return cut, ops, set()

    def _take_rows(self, cut: set[int], ops: dict[int, Axis], blocked: set[int]) -> None:
        """Cuts also what lies between ops of the chain alone, and small storages of one number for each row, with the
        ops that touch them: what follows from a slice alone need not wait for the others."""
        again = True
        while again:
            again = False
            near = dict.fromkeys(v for k, axis in ops.items() for v in self.parts(k, axis))
            for v in near:
                s = self.graph.values[v].storage
                if s in cut or s in blocked or not self.may_be_cut(s):
                    continue
                base = self.graph.values[self.program.bases[s]]
                rows = prod(base.shape) == base.shape[self.dim(self.program.bases[s]) or 0]
                inside = all(k in ops for k in self.touching[s])
                made_here = any(k in ops for k in self.graph.uses.writers[s])
                if not inside and not (rows and made_here):
                    continue
                chosen = {k: self.choose(k, cut | {s}) for k in self.touching[s]}
                if all(axis is not None for axis in chosen.values()):
                    cut.add(s)
                    ops.update({k: axis for k, axis in chosen.items() if axis is not None})
                    again = True
                else:
                    blocked.add(s)


def _outermost(value: Value, base: Value) -> int | None:
    """The dimension along which equal parts of a value lie in equal parts of its storage."""
    count = prod(base.shape)
    if value.dtype != base.dtype or base.offset or count < 2:
        return None
    if 1 + sum((n - 1) * s for n, s in zip(base.shape, base.stride, strict=True)) != count:
        return None
    for d, (n, s) in enumerate(zip(value.shape, value.stride, strict=True)):
        rest = sum(
            (m - 1) * t for e, (m, t) in enumerate(zip(value.shape, value.stride, strict=True)) if e != d
        )
        if n > 1 and n * s == count and value.offset + rest < s:
            return d
    return None


# --- recording a program in slices ----------------------------------------------------------------------------


def split(program: Program, slices: Mapping[Chain, int]) -> Program:
    """``program`` with the ops of each of these of its chains in so many slices.

    Raises ``Unsupported`` where the results of slices do not look like parts of the whole.
    """
    for chain, count in slices.items():
        if not 2 <= count <= chain.units:
            rule = "there are 2 slices at least, and no empty one"
            raise Unsupported(f"{count} slices of {chain.units} equal parts", rule)
    return _Splitter(program, slices).program_in_slices()


_OUT = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out, aten.bmm.default: aten.bmm.out}
"""What writes its result into a place that is there already."""


_Part = tuple[int, int] | None
"""Chain and slice whose part of a whole is touched; None: all of it."""


@dataclass
class _Tag:
    """Where a record of the new program comes from: the chain, by its seed, and the slice (-1: none). ``parts`` are
    the whole storages of which it touches nothing but the slice's part."""

    chain: int
    slice: int
    parts: frozenset[int] = field(default=frozenset())


class _Splitter:
    def __init__(self, program: Program, slices: Mapping[Chain, int]) -> None:
        self.old, self.graph = program, program.graph
        self.chain = {k: chain for chain in slices for k in chain.ops}
        self.cut = {s for chain in slices for s in chain.storages}
        self.bounds = {chain.seed: bounds_of(chain.units, count) for chain, count in slices.items()}
        self.tape = Tape()
        self.mode = compat.fake_mode()
        self.tracker = Tracker({})
        self.recorder = Recorder(self.tape, self.mode, self.tracker)
        self.tags: list[_Tag] = []
        self.home: dict[int, int] = {}  # storages of the tape by those of the program
        self.flat: dict[int, torch.Tensor] = {}  # a fake tensor in a storage of the tape
        self.part: dict[tuple[int, int], torch.Tensor] = {}  # by storage and slice
        self.stands_for: dict[int, int] = {}
        self.slot: dict[int, Slot] = {}
        for s in program.slots:
            self.slot.setdefault(self.graph.values[s.value].storage, s)

    @cached_property
    def device(self) -> str:
        return next((op.device for op in self.graph.ops if op.device != "cpu"), "cpu")

    def program_in_slices(self) -> Program:
        self.tape.on_cuda = self.device.startswith("cuda")
        self.tape.slots = [(self.value(s.value), s.role, s.key) for s in self.old.slots]
        for k in range(len(self.graph.ops)):
            first = len(self.tape.records)
            if k in self.chain:
                self.in_slices(k, self.chain[k].ops[k])
                op = self.graph.ops[k]
                for r in self.tape.records[first:]:
                    r.origin, r.phase = Origin(op.module, op.source), op.phase
                    r.asked = self.old.asked[k] if self.old.asked else -1
            else:
                self.plain(k)
        self.tape.records = _ordered(self.tape, self.tags)
        results = [self.value(v) for v in self.old.results]
        losses = [self.value(v) for v in self.old.results if self.kind(v) == "output"]
        made = finish(
            self.tape, results, result_spec=self.old.result_spec, name=self.graph.name, guards=self.old.guards,
            batch=self.old.batch, notes=self.old.notes, losses=losses,
        )  # fmt: skip
        return replace(made, constants=self.old.constants, gradients=self.old.gradients)

    def length(self, k: int, i: int, whole: int) -> tuple[int, int]:
        """Where slice ``i`` of an op begins along a dimension of that length, and how long it is."""
        chain = self.chain[k]
        return narrowed(whole, chain.units, self.bounds[chain.seed][i])

    def kind(self, v: int) -> str:
        return self.graph.storages[self.graph.values[v].storage].kind

    # --- storages and values ---

    def storage(self, s: int) -> int:
        """The tape's storage that is ``s``, as a whole."""
        if s not in self.home:
            planned, slot = self.graph.storages[s], self.slot.get(s)
            device = "cpu" if planned.pool == "host" else self.device
            base = self.graph.values[self.old.bases[s]]
            last = base.offset + sum((n - 1) * t for n, t in zip(base.shape, base.stride, strict=True))
            nbytes = (last + 1) * dtype_of(base.dtype).itemsize if prod(base.shape) else 0
            if planned.pool != "host" and aligned(nbytes, alignment_of(device)) != planned.size:
                nbytes = planned.size
            self.home[s] = len(self.tape.storages)
            known = TapeStorage(planned.size, nbytes, device, -1, name=planned.name)
            if slot is not None:
                known.role, known.key = slot.role, slot.key
            self.tape.storages.append(known)
            known.base = self.value(self.old.bases[s])
        return self.home[s]

    def value(self, v: int) -> int:
        x = self.graph.values[v]
        return self.tape.intern(
            TapeValue(self.storage(x.storage), dtype_of(x.dtype), x.shape, x.stride, x.offset)
        )

    def become(self, v: int, tensor: torch.Tensor) -> None:
        """The value of the program, the base of its storage, is this tensor, which ops have made."""
        x = self.graph.values[v]
        self.check(tensor, x, x.shape)
        made = self.tape.storage(self.tape.value(tensor))
        self.home[x.storage] = made
        self.tape.storages[made].name = self.graph.storages[x.storage].name
        self.flat[made] = tensor

    def check(self, tensor: torch.Tensor, x: Value, shape: tuple[int, ...]) -> None:
        stride = zip(shape, tensor.stride(), x.stride, strict=True)
        alike = tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype_of(x.dtype)
        if not alike or tensor.storage_offset() != x.offset or any(n > 1 and a != b for n, a, b in stride):
            raise Unsupported(f"splitting {x.name}", "a slice of it is not laid out as the whole")

    def fake(self, v: int, part: tuple[int, int, int] | None = None) -> torch.Tensor:
        """A fake tensor of a whole value; ``part``: of the part of it that a slice of an op has along a dimension."""
        x = self.graph.values[v]
        home = self.storage(x.storage)
        if home not in self.flat:
            known = self.tape.storages[home]
            flat_one = compat.blank_like(
                self.mode, (known.nbytes,), (1,), 0, torch.uint8, torch.device(known.device)
            )
            self.tape.know(flat_one, home)
            self.flat[home] = flat_one
        dtype, device = dtype_of(x.dtype), torch.device(self.tape.storages[home].device)
        if part is None:
            return compat.blank_like(self.mode, x.shape, x.stride, x.offset, dtype, device, self.flat[home])
        k, i, d = part
        shape = list(x.shape)
        start, shape[d] = self.length(k, i, x.shape[d])
        # In a storage of its own: calls that differ in offsets alone are asked of PyTorch once.
        alone = compat.blank_like(self.mode, tuple(shape), x.stride, 0, dtype, device)
        there = TapeValue(home, dtype, tuple(shape), x.stride, x.offset + start * x.stride[d])
        self.stands_for[self.tape.value(alone)] = self.tape.intern(there)
        return alone

    def own(self, v: int, k: int, i: int, d: int) -> torch.Tensor:
        """The part of a value that slice ``i`` of op ``k`` has for itself."""
        x = self.graph.values[v]
        base, shape = self.part[x.storage, i], list(x.shape)
        shape[d] = self.length(k, i, x.shape[d])[1]
        return compat.blank_like(
            self.mode, tuple(shape), x.stride, x.offset, dtype_of(x.dtype), base.device, base
        )

    # --- ops ---

    def plain(self, k: int) -> None:
        """The op as it is."""
        op, call = self.graph.ops[k], self.old.calls[k]
        if (
            call.fn is aten.ones_like.default
            and op.phase == "backward"
            and not self.graph.values[op.inputs[0]].shape
        ):
            x = self.graph.values[call.results[0]]  # the gradient of the loss does not wait for the loss
            with self.recording(k, -1):
                ones = aten.ones.default([], dtype=dtype_of(x.dtype), device=torch.device(op.device))
                self.become(call.results[0], ones)
            self.tape.records[-1].asked = self.old.asked[k] if self.old.asked else -1
            self.tape.records[-1].phase = op.phase
            return
        moved = self.moved(call)
        r = Record(moved.fn, op.target, moved.args, moved.kwargs, moved.results)
        r.reads = tuple(dict.fromkeys(refs_in((moved.args, moved.kwargs))))
        r.writes = tuple(self.storage(s) for s in op.mutates)
        r.updates = tuple(self.storage(s) for s in op.updates)
        r.random, r.effect, r.flops, r.device, r.phase = op.random, op.effect, op.flops, op.device, op.phase
        r.replay = self.moved(self.old.replays[k]) if k in self.old.replays else None
        r.origin, r.asked = Origin(op.module, op.source), self.old.asked[k] if self.old.asked else -1
        r.samples = self.old.samples.get(k, {})
        self.tape.records.append(r)
        self.tags.append(_Tag(-1, -1))

    def moved(self, call: Call) -> Call:
        args, kwargs = substitute((call.args, call.kwargs), lambda v: Ref(self.value(v)))
        return Call(call.fn, args, kwargs, tuple(self.value(v) if v >= 0 else -1 for v in call.results))

    @contextmanager
    def recording(self, k: int, i: int, parts: Iterable[int] = ()) -> Iterator[None]:
        first = len(self.tape.records)
        with torch.no_grad(), self.mode, self.recorder, self.recorder.in_phase(self.graph.ops[k].phase):
            yield
        touched = frozenset(self.home[s] for s in parts if s in self.home)
        chain = self.chain[k].seed if k in self.chain else -1
        for r in self.tape.records[first:]:
            self.tags.append(_Tag(chain, i, touched))
            self.put_in_place(r)

    def put_in_place(self, r: Record) -> None:
        """Parts of wholes in the place of their stand-ins."""
        if any(v in self.stands_for for v in r.reads):
            values = {v: self.stands_for.get(v, v) for v in r.reads}
            r.args, r.kwargs = substitute((r.args, r.kwargs), lambda v: Ref(values[v]))
            homes = {self.tape.storage(v): self.tape.storage(w) for v, w in values.items()}
            r.writes = tuple(homes.get(s, s) for s in r.writes)
            r.reads = tuple(dict.fromkeys(values.values()))

    def in_slices(self, k: int, axis: Axis) -> None:
        call, values = self.old.calls[k], self.graph.values
        total = None
        if axis.counted:
            total = self.counted(k, call)
        wholes = {}
        for n, v in enumerate(call.results):
            if v >= 0 and axis.results[n] != SUM and values[v].storage not in self.cut:
                wholes[n] = v
                self.allocate(k, v)
        sums: dict[int, torch.Tensor] = {}
        for i in range(len(self.bounds[self.chain[k].seed])):
            self.slice(k, axis, i, wholes, sums)
        if total is not None:
            self.divided(k, call, sums, total)
        else:
            for n, tensor in sums.items():
                if self.wide(k):
                    with self.recording(k, -1):
                        dtype = dtype_of(self.graph.values[call.results[n]].dtype)
                        tensor = aten._to_copy.default(tensor, dtype=dtype)
                self.become(call.results[n], tensor)

    def allocate(self, k: int, v: int) -> None:
        """A whole that slices write into."""
        x = self.graph.values[v]
        with self.recording(k, -1):
            whole = aten.empty_strided.default(
                list(x.shape),
                list(x.stride),
                dtype=dtype_of(x.dtype),
                device=torch.device(self.graph.ops[k].device),
            )
            self.become(v, whole)

    def given(self, k: int, axis: Axis, i: int) -> tuple[list[Any], set[int]]:
        """The arguments of a slice, and the wholes of which it is given a part."""
        call, values = self.old.calls[k], self.graph.values
        args, parts = [], set()
        for p, x in enumerate(call.args):
            if axis.sizes is not None and axis.sizes[0] == p:
                d = axis.sizes[1]
                sizes = list(x)
                sizes[d] = self.length(k, i, sizes[d])[1]
                args.append(sizes)
            elif not isinstance(x, Ref):
                args.append(x)
            elif values[x.value].storage in self.cut:
                args.append(self.own(x.value, k, i, axis.args[p]))
            elif p in axis.args:
                args.append(self.fake(x.value, (k, i, axis.args[p])))
                parts.add(values[x.value].storage)
            else:
                args.append(self.fake(x.value))
        return args, parts

    def slice(
        self, k: int, axis: Axis, i: int, wholes: Mapping[int, int], sums: dict[int, torch.Tensor]
    ) -> None:
        call, values = self.old.calls[k], self.graph.values
        args, parts = self.given(k, axis, i)
        if axis.counted and call.args[3] == 1:
            args[3] = 2  # the sum of each slice, divided at last
        if wholes.keys() == {0} and call.fn in _OUT and len(call.results) == 1:
            into = self.fake(wholes[0], (k, i, axis.results[0]))
            if into.is_contiguous():
                with self.recording(k, i, parts | {values[wholes[0]].storage}):
                    _OUT[call.fn](*args, **call.kwargs, out=into)
                return
        if self.wide(k):
            with self.recording(k, i, parts):
                args = [
                    aten._to_copy.default(x, dtype=torch.float32) if isinstance(x, torch.Tensor) else x
                    for x in args
                ]
            parts = set()
        if i and call.fn is aten.mm.default and 0 in sums:
            with self.recording(k, i, parts):
                aten.addmm_.default(sums[0], *args)
            return
        with self.recording(k, i, parts):
            made = flat(call.fn(*args, **call.kwargs))
        for n, v in enumerate(call.results):
            if v < 0:
                continue
            if n in wholes:
                with self.recording(k, i, {values[v].storage}):
                    aten.copy_.default(self.fake(v, (k, i, axis.results[n])), made[n])
            elif axis.results[n] == SUM:
                self.add(k, i, n, made[n], sums)
            else:
                d, x = axis.results[n], values[v]
                shape = list(x.shape)
                shape[d] = self.length(k, i, x.shape[d])[1]
                self.check(made[n], x, tuple(shape))
                self.part[x.storage, i] = made[n]

    def wide(self, k: int) -> bool:
        """Whether slices of an op are added up in float32, and rounded at last."""
        call = self.old.calls[k]
        if call.results[0] < 0 or self.chain[k].ops[k].results.get(0) != SUM:
            return False
        return added_wide(call.fn, call.kwargs, dtype_of(self.graph.values[call.results[0]].dtype))

    def add(self, k: int, i: int, n: int, part: torch.Tensor, sums: dict[int, torch.Tensor]) -> None:
        if self.chain[k].ops[k].counted:
            with self.recording(k, i):  # a few numbers only: rounded once, at last
                part = aten._to_copy.default(part, dtype=torch.float64)
        if n not in sums:
            sums[n] = part
            return
        with self.recording(k, i):
            aten.add_.Tensor(sums[n], part)

    def counted(self, k: int, call: Call) -> torch.Tensor:
        """What the mean of a loss is divided by: how many targets are not ignored, or their weights' sum."""
        target = self.fake(call.args[1].value)
        dtype = dtype_of(self.graph.values[call.args[0].value].dtype)
        with self.recording(k, -1):
            used = aten.ne.Scalar(target, call.args[4])
            if call.args[2] is None:
                return aten._to_copy.default(aten.sum.default(used), dtype=dtype)
            weight = self.fake(call.args[2].value)
            classes = aten.mul.Tensor(target, used)  # of what is ignored, some class that there is
            found = aten.index.Tensor(weight, [classes])
            return aten.sum.default(aten.mul.Tensor(found, used))

    def divided(self, k: int, call: Call, sums: dict[int, torch.Tensor], total: torch.Tensor) -> None:
        if call.results[1] >= 0:
            self.become(call.results[1], total)
        if call.results[0] < 0:
            return
        loss, dtype = sums[0], dtype_of(self.graph.values[call.results[0]].dtype)
        with self.recording(k, -1):
            if call.args[3] == 1:
                loss = aten.div.Tensor(loss, total)
            self.become(call.results[0], aten._to_copy.default(loss, dtype=dtype))


# --- the order of the ops -------------------------------------------------------------------------------------


def _ordered(tape: Tape, tags: Sequence[_Tag]) -> list[Record]:
    """The records, slice by slice as far as they need nothing of other slices: what slices wait for first, then each
    slice's ops as soon as they can run, then the rest."""
    records = tape.records
    after = _followers(tape, tags)
    waits = [0] * len(records)
    for row in after:
        for j in row:
            waits[j] += 1
    cut = [tag.slice >= 0 for tag in tags]
    behind, before = _reached(after, cut), _reached(_reversed(after), cut)

    def key(j: int) -> tuple[int, int, int]:
        if cut[j]:
            return 1, tags[j].slice, j
        return (0, 0, j) if before[j] and not behind[j] else (2, 0, j)

    ready = [key(j) for j in range(len(records)) if not waits[j]]
    heapq.heapify(ready)
    order: list[Record] = []
    while ready:
        j = heapq.heappop(ready)[2]
        order.append(records[j])
        for n in after[j]:
            waits[n] -= 1
            if not waits[n]:
                heapq.heappush(ready, key(n))
    return _allocated_late(tape, order)


def _allocated_late(tape: Tape, order: Sequence[Record]) -> list[Record]:
    """Wholes that slices write into are there from the first of these on."""
    waiting = {tape.storage(r.results[0]): r for r in order if r.fn is aten.empty_strided.default}
    rows: list[Record] = []
    for r in order:
        if r.fn is aten.empty_strided.default:
            continue
        for s in dict.fromkeys((*r.writes, *(tape.storage(v) for v in r.reads))):
            if s in waiting:
                rows.append(waiting.pop(s))
        rows.append(r)
    return [*waiting.values(), *rows]


def _reversed(after: Sequence[Sequence[int]]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in after]
    for j, row in enumerate(after):
        for n in row:
            rows[n].append(j)
    return rows


def _reached(after: Sequence[Sequence[int]], start: Sequence[bool]) -> list[bool]:
    """What can be reached from the marked ones."""
    found = [False] * len(after)
    work = [n for j, marked in enumerate(start) if marked for n in after[j]]
    while work:
        j = work.pop()
        if not found[j]:
            found[j] = True
            work += after[j]
    return found


def _followers(tape: Tape, tags: Sequence[_Tag]) -> list[list[int]]:
    """Which records have to run behind each: readers behind what has written before, writers behind both. Slices that
    touch their own parts of a whole are in nobody's way. Random ops and effects keep their order."""
    after: list[set[int]] = [set() for _ in tags]
    writes: dict[int, list[tuple[int, _Part]]] = {}  # by storage: record, and the part that it writes
    reads: dict[int, list[tuple[int, _Part]]] = {}
    chained = -1
    for j, (r, tag) in enumerate(zip(tape.records, tags, strict=True)):

        def part(s: int, tag: _Tag = tag) -> _Part:
            return (tag.chain, tag.slice) if s in tag.parts else None

        def behind(rows: list[tuple[int, _Part]], p: _Part, j: int = j) -> None:
            for n, q in rows:
                if n != j and (p is None or q is None or p[0] != q[0] or p == q):
                    after[n].add(j)

        read = {tape.storage(v) for v in r.reads}
        written = {tape.storage(v) for v in r.results if v >= 0} | set(r.writes)
        for s in read | written:
            behind(writes.get(s, []), part(s))
        for s in written:
            behind(reads.get(s, []), part(s))
            writes.setdefault(s, []).append((j, part(s)))
        for s in read:
            reads.setdefault(s, []).append((j, part(s)))
        if r.random or r.effect:
            if chained >= 0:
                after[chained].add(j)
            chained = j
    return [sorted(row) for row in after]
