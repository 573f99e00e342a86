"""Chains of ops around large storages that may be computed in slices: which ops, cut along which dimension.

Around a large storage, all ops that touch it, and the storages of like size that these make or read, as long as
`split_rules` says how each op is cut. A storage is cut along the dimension that is outermost in memory, so that a
part of it is laid out as the whole is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch

from tightship.frontends.torch.program import Program, Ref, refs_in
from tightship.frontends.torch.split_rules import (
    SUM,
    Axis,
    Place,
    axes,
    from_behind,
    is_aten,
    mapped,
    merged,
    merges,
)
from tightship.graph import Value

__all__ = ["WIDE", "Chain", "chains", "dims_of", "narrowed", "seen"]

_SEEDS = 64
"""Storages around which a chain is looked for, the largest first."""
_SIMILAR, _SMALL, WIDE = 2, 256, 64
"""A chain takes in storages of at least such a part of the one it is found around; chains are looked for around
storages of at least such a part of the largest. Chains that take in storages of a `WIDE` part go through whole
blocks of layers."""


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


def narrowed(length: int, units: int, part: tuple[int, int]) -> tuple[int, int]:
    """Start and length of a part along a dimension of that length."""
    each = length // units
    return part[0] * each, (part[1] - part[0]) * each


def seen(program: Program, k: int, axis: Axis, v: int) -> Value:
    """A value as a slice of op ``k`` is cut from it: with the first dimensions as one, where the axis says so."""
    if axis.merge == 1:
        return program.graph.values[v]
    found = merged(program.graph.values[v], axis.merge, dims_of(program, k))
    if found is None:
        raise ValueError(f"{program.graph.values[v].name} has no such dimension")
    return found


def dims_of(program: Program, k: int) -> int:
    """The most dimensions of an op's values."""
    call, values = program.calls[k], program.graph.values
    given = (*refs_in((call.args, call.kwargs)), *(v for v in call.results if v >= 0))
    return max((len(values[v].shape) for v in given), default=0)


def _placed(program: Program, k: int) -> list[tuple[Place, int]]:
    """The values among the arguments of an op, by their place."""
    found: list[tuple[Place, int]] = []

    def note(p: Place, x: Any) -> Any:
        if isinstance(x, Ref):
            found.append((p, x.value))
        return x

    mapped(program.calls[k].args, program.calls[k].kwargs, note)
    return found


# --- finding chains -------------------------------------------------------------------------------------------


def chains(program: Program, similar: int = _SIMILAR, *, fine: bool = False) -> tuple[Chain, ...]:
    """The chains of a program, those of the largest storages first; they share no op. ``similar``: they take in
    storages of such a part of the largest of each. ``fine``: masks that are the same for several slices, as all heads
    of an image, do not keep these together; then no slice may need several of them."""
    finder = _Finder(program, similar, fine)
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
    def __init__(self, program: Program, similar: int = _SIMILAR, fine: bool = False) -> None:
        self.program, self.graph, self.similar, self.fine = program, program.graph, similar, fine
        self.touching: list[dict[int, None]] = [{} for _ in self.graph.storages]
        for k, op in enumerate(self.graph.ops):
            for v in (*op.inputs, *op.outputs):
                self.touching[self.graph.values[v].storage][k] = None
            for s in op.mutates:
                self.touching[s][k] = None
        self._axes: dict[int, list[Axis]] = {}
        self._dims: dict[tuple[int, int, int], int | None] = {}
        self._goes: dict[int, bool] = {}
        self._places: dict[int, list[tuple[Place, int]]] = {}

    def may_be_cut(self, s: int) -> bool:
        """Whether nobody but ops needs it, and its base is whole, so that parts of it are laid out alike."""
        storage, graph = self.graph.storages[s], self.graph
        if s in graph.static or s in graph.kept or storage.pool != "device" or not storage.size:
            return False
        return self.dim(self.program.bases[s]) is not None

    def goes(self, s: int) -> bool:
        """Whether each op that touches it may be cut in some way; without that, no chain takes it in."""
        if s not in self._goes:
            self._goes[s] = all(self.axes(k) for k in self.touching[s])
        return self._goes[s]

    def dim(self, v: int, k: int = -1, axis: Axis | None = None) -> int | None:
        """The dimension of a value along which it is cut where its storage is: the outermost in memory. As op ``k``
        has it that is cut along an axis."""
        key = (v, k, axis.merge) if axis is not None and axis.merge > 1 else (v, -1, 1)
        if key not in self._dims:
            value = self.graph.values[v]
            base = self.graph.values[self.program.bases[value.storage]]
            if axis is not None:
                value = seen(self.program, k, axis, v)
            self._dims[key] = _outermost(value, base)
        return self._dims[key]

    def places(self, k: int) -> list[tuple[Place, int]]:
        if k not in self._places:
            self._places[k] = _placed(self.program, k)
        return self._places[k]

    def axes(self, k: int) -> list[Axis]:
        """How an op may be cut, as far as it goes."""
        if k not in self._axes:
            self._axes[k] = list(self._possible(k))
        return self._axes[k]

    def _possible(self, k: int) -> Iterator[Axis]:
        op, call, values = self.graph.ops[k], self.program.calls[k], self.graph.values
        if op.random or op.effect or op.phase == "update":
            return
        if k in self.program.replays and not op.updates:
            return
        if not is_aten(call.fn):
            return
        if self.program.samples.get(k) or len(self.places(k)) != len(list(refs_in((call.args, call.kwargs)))):
            return
        made = [values[v] if v >= 0 else None for v in call.results]
        if op.mutates and made and made[0] is None:
            made = []
        args, kwargs = mapped(
            call.args, call.kwargs, lambda _, x: values[x.value] if isinstance(x, Ref) else x
        )
        needed = {n for n, v in enumerate(call.results) if v >= 0}
        for axis in self._ways(k, args, kwargs, made):
            written = not op.mutates or (axis.normalizes if op.updates else 0 in axis.args)
            if written and needed <= axis.results.keys() and self._lengths(k, axis) is not None:
                yield axis

    def _ways(
        self, k: int, args: list[Any], kwargs: dict[str, Any], made: list[Value | None]
    ) -> Iterator[Axis]:
        """The rules' axes of a call with values for tensors: those of several dimensions as one come first."""
        fn, dims = self.program.calls[k].fn, dims_of(self.program, k)
        alike = [x for x in (*args, *kwargs.values(), *made) if isinstance(x, Value)]
        for lead in range(dims - 1, 0, -1):
            coarse = dict[Place, int]()
            if lead > 1:
                found = merges(fn, dict[Place, Any](enumerate(args)) | kwargs, lead, dims, fine=self.fine)
                if found is None:
                    continue
                coarse = found
            if lead > 1 and any(merged(x, lead, dims) is None for x in alike):
                continue

            def shape(_: Place, x: Any, lead: int = lead) -> Any:
                x = merged(x, lead, dims) if isinstance(x, Value) else x
                return torch.Size(x.shape) if isinstance(x, Value) else x

            given, named = mapped(args if lead == 1 else from_behind(fn, args, dims), kwargs, shape)
            results = [tuple(shape("", x)) if x is not None else None for x in made]
            for axis in axes(fn, given, results, named):
                if lead == 1:
                    yield axis
                elif axis.results.get(0, axis.args.get(0)) == 0:
                    yield replace(axis, merge=lead, coarse=coarse)

    def _lengths(self, k: int, axis: Axis) -> set[int] | None:
        """The lengths of what is cut; None where there is nothing to cut."""
        call, program = self.program.calls[k], self.program
        found = {seen(program, k, axis, v).shape[axis.args[p]] for p, v in self.places(k) if p in axis.args}
        found |= {
            seen(program, k, axis, v).shape[axis.results[n]]
            for n, v in enumerate(call.results)
            if v >= 0 and axis.results[n] != SUM
        }
        return found if found and min(found) > 1 else None

    def choose(self, k: int, cut: set[int]) -> Axis | None:
        """A way in which an op may be cut along what is cut of its storages: not where it reads some rows of one."""
        call, values = self.program.calls[k], self.graph.values
        for axis in self.axes(k):
            rows = [(v, axis.args.get(p)) for p, v in self.places(k)]
            rows += [(v, axis.results[n]) for n, v in enumerate(call.results) if v >= 0]
            cuts = [(d, self.dim(v, k, axis)) for v, d in rows if values[v].storage in cut]
            if all(d is not None and d == along for d, along in cuts):
                return axis
        return None

    def parts(self, k: int, axis: Axis) -> Iterator[int]:
        """The values of an op of which each slice has a part."""
        for p, v in self.places(k):
            if p in axis.args and axis.args[p] == self.dim(v, k, axis):
                yield v
        for n, v in enumerate(self.program.calls[k].results):
            if v >= 0 and axis.results[n] != SUM and axis.results[n] == self.dim(v, k, axis):
                yield v

    def around(self, seed: int) -> Chain | None:
        """The chain around a storage; None without one."""
        blocked: set[int] = set()
        if not self.goes(seed):
            return None
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
        cut, ops, least = {seed}, dict[int, Axis](), self.graph.storages[seed].size // self.similar
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
                if s not in cut and s not in blocked and large and self.may_be_cut(s) and self.goes(s):
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
