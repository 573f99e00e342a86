"""A program recorded anew with ops in slices, so that their large intermediates never exist as a whole.

`split` takes the chains that `split_chains` finds, and the regions that are computed patch by patch
(`tightship.analysis.patches`). Of storages within, each slice has a part of its own; what others read is written
into its place of the whole; what all slices add to is added up in the order of the slices. Slices are ops like
others: they are measured, planned and recomputed one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tightship.analysis.patches import DIM, Finder, Region, Rows, Window, bounds_of, made_rows
from tightship.cached import cached_property
from tightship.errors import Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.lower import finish
from tightship.frontends.torch.capture.recorder import Recorder
from tightship.frontends.torch.capture.tape import Origin, Record, Tape, TapeStorage, TapeValue, Tracker
from tightship.frontends.torch.program import Call, Program, Ref, Slot, dtype_of, flat, refs_in, substitute
from tightship.frontends.torch.split_chains import Chain, dims_of, narrowed, seen
from tightship.frontends.torch.split_check import check_slices
from tightship.frontends.torch.split_norm import normalized, normalized_backward
from tightship.frontends.torch.split_order import Tag, ordered
from tightship.frontends.torch.split_rules import SUM, Axis, Place, added_wide, cut_size, from_behind, mapped
from tightship.frontends.torch.split_windows import slice_args, windows
from tightship.graph import Value, aligned, alignment_of

__all__ = [
    "split",
]

aten = torch.ops.aten


def split(
    program: Program, slices: Mapping[Chain, int], patches: Sequence[tuple[Region, int]] = ()
) -> Program:
    """``program`` with the ops of each of these of its chains, and of its regions, in so many slices.

    Raises ``Unsupported`` where the results of slices do not look like parts of the whole.
    """
    for chain, count in slices.items():
        if not 2 <= count <= chain.units:
            rule = "there are 2 slices at least, and no empty one"
            raise Unsupported(f"{count} slices of {chain.units} equal parts", rule)
    for region, count in patches:
        if not 2 <= count <= region.rows:
            raise Unsupported(
                f"{count} slices of {region.rows} rows", "there are 2 at least, and no empty one"
            )
    return _Splitter(program, slices, patches).program_in_slices()


_OUT = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out, aten.bmm.default: aten.bmm.out}
"""What writes its result into a place that is there already."""


@dataclass
class _Rows:
    """A part of a storage: a tensor whose first row is this one of the whole; it may have more than are wanted."""

    tensor: torch.Tensor
    start: int

    def of(self, rows: Rows) -> torch.Tensor:
        """These of its rows."""
        a, b = rows[0] - self.start, rows[1] - self.start
        if (a, b) == (0, self.tensor.shape[DIM]):
            return self.tensor
        part: torch.Tensor = aten.slice.Tensor(self.tensor, DIM, a, b)
        return part


class _Splitter:
    def __init__(
        self, program: Program, slices: Mapping[Chain, int], patches: Sequence[tuple[Region, int]] = ()
    ) -> None:
        self.old, self.graph = program, program.graph
        self.chain = {k: chain for chain in slices for k in chain.ops}
        self.seed = {k: chain.seed for k, chain in self.chain.items()}
        self.seed |= {k: region.end for region, _ in patches for k in region.ops}
        self.patches = {region.first: (region, count) for region, count in patches}
        self.cut = {s for chain in slices for s in chain.storages}
        self.bounds = {chain.seed: bounds_of(chain.units, count) for chain, count in slices.items()}
        self.tape = Tape()
        self.mode = compat.fake_mode()
        self.tracker = Tracker({})
        self.recorder = Recorder(self.tape, self.mode, self.tracker)
        self.tags: list[Tag] = []
        self.home: dict[int, int] = {}  # storages of the tape by those of the program
        self.flat: dict[int, torch.Tensor] = {}  # a fake tensor in a storage of the tape
        self.part: dict[tuple[int, int], torch.Tensor] = {}  # by storage and slice
        self.stands_for: dict[int, int] = {}
        self.made_from: dict[int, int] = {}  # ops of the program, by the identity of records of patches
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
            if k in self.patches:
                self.in_patches(*self.patches[k])
            elif k in self.chain:
                self.in_slices(k, self.chain[k].ops[k])
                self.label(k, first)
            elif k not in self.seed:
                self.plain(k)
        self.tape.records = ordered(self.tape, self.tags)
        check_slices(self.old, self.tape, self.tape.records, self.made_from)
        results = [self.value(v) for v in self.old.results]
        losses = [self.value(v) for v in self.old.results if self.kind(v) == "output"]
        made = finish(
            self.tape, results, result_spec=self.old.result_spec, name=self.graph.name, guards=self.old.guards,
            batch=self.old.batch, notes=self.old.notes, losses=losses,
        )  # fmt: skip
        old = self.old
        return replace(
            made, constants=old.constants, gradients=old.gradients, apart=old.apart, extra=old.extra
        )

    def label(self, k: int, first: int) -> None:
        """The records from ``first`` on are those of an op."""
        op = self.graph.ops[k]
        for r in self.tape.records[first:]:
            r.origin, r.phase = Origin(op.module, op.source), op.phase
            r.asked = self.old.asked[k] if self.old.asked else -1

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

    def fake(self, v: int, part: tuple[int, int, int] | None = None, x: Value | None = None) -> torch.Tensor:
        """A fake tensor of a whole value; ``part``: of the part of it that a slice of an op has along a dimension.
        ``x``: the value as the op has it."""
        x = self.graph.values[v] if x is None else x
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
        return self.piece(x, d, *self.length(k, i, x.shape[d]))

    def piece(self, x: Value, d: int, start: int, length: int) -> torch.Tensor:
        """A stand-in for a part of a whole value along a dimension: calls that differ in offsets alone are asked of
        PyTorch once."""
        home, dtype = self.storage(x.storage), dtype_of(x.dtype)
        shape = (*x.shape[:d], length, *x.shape[d + 1 :])
        alone = compat.blank_like(
            self.mode, shape, x.stride, 0, dtype, torch.device(self.tape.storages[home].device)
        )
        there = TapeValue(home, dtype, shape, x.stride, x.offset + start * x.stride[d])
        self.stands_for[self.tape.value(alone)] = self.tape.intern(there)
        return alone

    def own(self, x: Value, k: int, i: int, d: int) -> torch.Tensor:
        """The part of a value that slice ``i`` of op ``k`` has for itself."""
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
        self.tags.append(Tag(-1, -1))

    def moved(self, call: Call) -> Call:
        args, kwargs = substitute((call.args, call.kwargs), lambda v: Ref(self.value(v)))
        return Call(call.fn, args, kwargs, tuple(self.value(v) if v >= 0 else -1 for v in call.results))

    @contextmanager
    def recording(self, k: int, i: int, parts: Collection[int] = ()) -> Iterator[None]:
        first = len(self.tape.records)
        with torch.no_grad(), self.mode, self.recorder, self.recorder.in_phase(self.graph.ops[k].phase):
            yield
        touched = frozenset(self.home[s] for s in parts if s in self.home)
        chain = self.seed.get(k, -1)
        for r in self.tape.records[first:]:
            self.tags.append(Tag(chain, i, touched))
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
        wholes: dict[int, int] = {}
        for n, v in enumerate(call.results):
            if v >= 0 and axis.results[n] != SUM and values[v].storage not in self.cut:
                wholes[n] = v
                self.allocate(k, v)
        sums: dict[int, torch.Tensor] = {}
        if axis.normalizes:
            sums = self.normalized(k, axis, wholes)
        else:
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

    def given(self, k: int, axis: Axis, i: int) -> tuple[list[Any], dict[str, Any], set[int]]:
        """The arguments of a slice, and the wholes of which it is given a part."""
        call, whole, parts = self.old.calls[k], axis.merge == 1, set[int]()

        def part(p: Place, x: Any) -> Any:
            if axis.sizes is not None and axis.sizes[0] == p:
                return cut_size(x, axis.sizes[1], lambda n: self.length(k, i, n)[1])
            if not isinstance(x, Ref):
                return x
            value = seen(self.old, k, axis, x.value)
            if value.storage in self.cut:
                return self.own(value, k, i, axis.args[p])
            if p in axis.coarse:
                return self.piece(value, 0, self.row(k, axis, i, p, value), 1)
            if p not in axis.args:
                return self.fake(x.value, None, value)
            parts.add(value.storage)
            return self.fake(x.value, (k, i, axis.args[p]), value)

        given = call.args if whole else from_behind(call.fn, call.args, dims_of(self.old, k))
        args, kwargs = mapped(given, call.kwargs, part)
        return args, kwargs, parts

    def row(self, k: int, axis: Axis, i: int, p: Place, x: Value) -> int:
        """The row of a coarse argument that a slice lies in."""
        try:
            return axis.row(p, *self.length(k, i, x.shape[0] * axis.coarse[p]))
        except ValueError as no:
            count = len(self.bounds[self.chain[k].seed])
            raise Unsupported(f"{count} slices of {self.graph.ops[k].name}", str(no)) from None

    def slice(
        self, k: int, axis: Axis, i: int, wholes: Mapping[int, int], sums: dict[int, torch.Tensor]
    ) -> None:
        call, values = self.old.calls[k], self.graph.values
        args, kwargs, parts = self.given(k, axis, i)
        if axis.counted and call.args[3] == 1:
            args[3] = 2  # the sum of each slice, divided at last
        if wholes.keys() == {0} and call.fn in _OUT and len(call.results) == 1:
            into = self.fake(wholes[0], (k, i, axis.results[0]), seen(self.old, k, axis, wholes[0]))
            if into.is_contiguous():
                with self.recording(k, i, parts | {values[wholes[0]].storage}):
                    _OUT[call.fn](*args, **kwargs, out=into)
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
            made = flat(call.fn(*args, **kwargs))
        for n, v in enumerate(call.results):
            if v < 0:
                continue
            if n not in wholes and axis.results[n] == SUM:
                self.add(k, i, n, made[n], sums)
            else:
                self.put(k, axis, i, n, made[n], wholes)

    def put(self, k: int, axis: Axis, i: int, n: int, made: torch.Tensor, wholes: Mapping[int, int]) -> None:
        """A result of a slice: into its place of the whole, if there is one."""
        v, d = self.old.calls[k].results[n], axis.results[n]
        x = seen(self.old, k, axis, v)
        if n in wholes:
            with self.recording(k, i, {x.storage}):
                aten.copy_.default(self.fake(v, (k, i, d), x), made)
            return
        shape = list(x.shape)
        shape[d] = self.length(k, i, x.shape[d])[1]
        self.check(made, x, tuple(shape))
        self.part[x.storage, i] = made

    def normalized(self, k: int, axis: Axis, wholes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """A batch norm; what its slices add up to, by the position among its results."""
        given = [self.given(k, axis, i) for i in range(len(self.bounds[self.chain[k].seed]))]

        def at(i: int) -> AbstractContextManager[None]:
            return self.recording(k, i, given[i][2] if i >= 0 else ())

        def keep(i: int, made: torch.Tensor) -> None:
            if self.old.calls[k].results[0] >= 0:
                self.put(k, axis, i, 0, made, wholes)

        call = self.old.calls[k]
        run = normalized if call.fn is aten.native_batch_norm.default else normalized_backward
        sums = dict(enumerate(run([args for args, _, _ in given], at, keep), 1))
        return {n: t for n, t in sums.items() if call.results[n] >= 0}

    # --- regions, patch by patch ---

    def in_patches(self, region: Region, count: int) -> None:
        """The ops of a region for the rows of each slice in turn, which are written into their place."""
        uses = self.graph.uses
        maker, first = uses.definer[region.end], len(self.tape.records)
        end = self.old.bases[region.end]
        self.allocate(maker, end)
        self.label(maker, first)
        finder = Finder(self.graph, lambda k: windows(self.old, k))
        for i, rows in enumerate(bounds_of(region.rows, count)):
            wanted, parts = finder.wanted(region, rows), dict[int, _Rows]()
            for k in region.ops:
                first = len(self.tape.records)
                self.patch(k, i, region, wanted, parts)
                self.label(k, first)
                self.made_from |= {id(r): k for r in self.tape.records[first:]}
            first = len(self.tape.records)
            with self.recording(region.stop - 1, i, {region.end}):
                place = self.piece(self.graph.values[end], DIM, rows[0], rows[1] - rows[0])
                aten.copy_.default(place, parts[region.end].of(rows))
            self.label(region.stop - 1, first)
            self.made_from[id(self.tape.records[-1])] = maker

    def patch(
        self,
        k: int,
        i: int,
        region: Region,
        wanted: Mapping[int, Rows],
        parts: dict[int, _Rows],
    ) -> None:
        """One op for one slice."""
        rows, graph, call = made_rows(self.graph, k, wanted), self.graph, self.old.calls[k]
        if rows is None:
            return
        cut = region.windows[k]
        take = next(iter(cut.values())).take(rows)
        every = [v for v in refs_in(call.args) if graph.values[v].storage in cut]
        alone = len(every) == 1 and graph.values[every[0]].storage in parts
        passes = alone and self.passes(k, every[0])
        whole = set[int]()
        with self.recording(k, i, whole):

            def given(v: int) -> torch.Tensor:
                s = graph.values[v].storage
                if s not in cut:
                    return self.fake(v)
                if s not in parts:
                    whole.add(s)
                    return self.piece(graph.values[v], DIM, take.start, take.stop - take.start)
                return parts[s].tensor if passes else parts[s].of((take.start, take.stop))

            args = slice_args(self.old, k, list(substitute(call.args, given)), take)
            made = flat(call.fn(*args, **call.kwargs))
        begin = parts[graph.values[every[0]].storage].start if passes else rows[0] - take.skip
        for n, v in enumerate(call.results):
            if v >= 0 and graph.values[v].storage in wanted:
                parts[graph.values[v].storage] = _Rows(made[n], begin)

    def passes(self, k: int, v: int) -> bool:
        """Whether rows that are not the slice's go through an op, which would copy what they are cut off from."""
        graph = self.graph
        if self.old.calls[k].fn is aten.convolution.default:
            return False  # its bits follow from the number of rows: it is given those that were probed
        s = graph.values[v].storage
        if not next(iter(self.windows_of(k).values())).pointwise or list(graph.uses.reads[k]).count(s) != 1:
            return False
        made = [x for x in graph.uses.defines[k] if graph.storages[x].size]
        return all(graph.storages[x].size <= graph.storages[s].size for x in made)

    def windows_of(self, k: int) -> Mapping[int, Window]:
        return windows(self.old, k) or {}

    # --- sums ---

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
