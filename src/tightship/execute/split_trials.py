"""Are slices what the whole is? An op is run on random data as a whole and in slices, once for calls that are alike.

It gives the ``same`` bits, ``rounds`` otherwise and is no further from a float64 reference, or is ``wrong``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tightship.analysis.patches import DIM, Finder, Region, Rows, Take, bounds_of, made_rows
from tightship.frontends.torch import compat, compat_optimizers
from tightship.frontends.torch.optimizer.copy import bare
from tightship.frontends.torch.optimizer.given import independent
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.frontends.torch.program import Call, Program, Ref, dtype_of, flat, map_tree, substitute
from tightship.frontends.torch.split_chains import dims_of, narrowed, seen
from tightship.frontends.torch.split_norm import normalized, normalized_backward
from tightship.frontends.torch.split_rules import (
    SUM,
    Axis,
    Place,
    added_wide,
    axes,
    cut_size,
    from_behind,
    mapped,
    most_index,
)
from tightship.frontends.torch.split_windows import slice_args, windows
from tightship.graph import Value

__all__ = ["patch_verdict", "same_in_pieces", "verdict"]

aten = torch.ops.aten


_TOLERANCE = 1.05
"""How much further from the reference a result may be: errors of random data differ by so much by chance."""
_NEAR = 1.0
"""Both are near the reference, or something else than rounding is wrong: half of the digits are right."""
_SAMPLED = 64
"""Of a dimension that has nothing to do with slices, so many are compared with the reference."""
_PRIME = 65_521
"""Random numbers that are drawn for a tensor and repeated."""
_FEW = 2
"""Slices that are looked at where bits need not be the same, of ops whose results lie side by side."""
_KNOWN: dict[Any, str] = {}


def verdict(program: Program, k: int, axis: Axis, units: int, slices: int, *, bits: bool = True) -> str:
    """Whether an op gives the ``same`` bits in slices, ``rounds`` otherwise and is no further from a float64
    reference, or is ``wrong``. It is run on random data, once for calls that are alike; in its first slices alone
    where ``bits`` need not be the same and nothing is added up."""
    call, values = program.calls[k], program.graph.values
    looks = substitute(
        (call.args, call.kwargs), lambda v: (values[v].dtype, values[v].shape, values[v].stride)
    )
    key: tuple[Any, ...] = (str(call.fn), repr(looks), repr(axis), units, slices, bits)
    key = (*key, torch.get_num_threads())
    if key not in _KNOWN:
        with compat.plain_execution(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _KNOWN[key] = _Trial(program, k, axis, bounds_of(units, slices), units, bits).verdict()
    return _KNOWN[key]


_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
"""Optimizers of torch's that treat the elements of a parameter independently."""


def same_in_pieces(
    update: Updater, shape: Sequence[int], dtype: str, pieces: Sequence[tuple[int, int]]
) -> bool:
    """Whether an update of rows after rows gives the bits that it gives of all: of the first two pieces and the last
    of random data, in three steps. Alike ones are tried once."""
    optimizer, member = update.optimizer, update.members[0]
    if type(optimizer).__name__ not in _ELEMENTWISE or not independent(optimizer):
        return False
    group = {n: x for n, x in optimizer.param_groups[member.group].items() if n != "params"}
    looks = sorted((n, x.item() if isinstance(x, torch.Tensor) else repr(x)) for n, x in group.items())
    key: Any = (type(optimizer).__name__, looks, tuple(shape[1:]), dtype, pieces[0], pieces[-1])
    key = (repr(key), torch.get_num_threads())
    if key not in _KNOWN:
        sizes = [b - a for a, b in dict.fromkeys((*pieces[:2], pieces[-1]))]
        device = "cpu" if member.param.is_meta or compat.is_fake(member.param) else member.param.device
        with compat.plain_execution(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            rows = (sum(sizes), *shape[1:])
            data = [torch.randn(rows, dtype=torch.float32).to(device, dtype_of(dtype)) for _ in range(4)]
            whole = _updated(optimizer, group, data)
            cut = [
                _updated(optimizer, group, part) for part in zip(*(x.split(sizes) for x in data), strict=True)
            ]
        same = all(
            torch.equal(w, torch.cat(parts)) for w, *parts in zip(whole, *cut, strict=True) if w.ndim
        ) and all(
            torch.equal(w, p) for w, *parts in zip(whole, *cut, strict=True) for p in parts if not w.ndim
        )
        _KNOWN[key] = "same" if same else "wrong"
    return _KNOWN[key] == "same"


def _updated(optimizer: Any, group: Mapping[str, Any], data: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first of the tensors, updated with each of the others as its gradient; then what the optimizer keeps."""
    one, param = bare(optimizer), torch.nn.Parameter(data[0].clone())
    one.__dict__.update({n: x for n, x in vars(optimizer).items() if n not in vars(one) and n != "step"})
    one.state, one.param_groups = defaultdict(dict), [{**group, "params": [param]}]
    for gradient in data[1:]:
        param.grad = gradient.clone()
        compat_optimizers.plain_step(type(optimizer))(one)
    kept = one.state[param].values()
    return [param.detach(), *(x for x in kept if isinstance(x, torch.Tensor))]


@dataclass
class _Trial:
    program: Program
    k: int
    axis: Axis
    bounds: Sequence[tuple[int, int]]
    units: int
    bits: bool
    args: list[Any] = field(init=False)
    kwargs: dict[str, Any] = field(init=False)
    shortened: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        call, axis, device = self.call, self.axis, self.program.graph.ops[self.k].device
        adds = any(v >= 0 and axis.results[n] == SUM for n, v in enumerate(call.results))
        self.shortened = not (self.bits or adds or axis.coarse) and len(self.bounds) > _FEW
        units = self.units
        if self.shortened:
            units, self.bounds = self.bounds[_FEW][0], self.bounds[:_FEW]

        def short(n: int) -> int:
            return n // self.units * units

        def value(p: Place, x: Any) -> Any:
            if axis.sizes is not None and p == axis.sizes[0]:
                return cut_size(x, axis.sizes[1], short)
            if not isinstance(x, Ref):
                return x
            found = seen(self.program, self.k, axis, x.value)
            if p in axis.args:
                d = axis.args[p]
                shape = tuple(short(n) if e == d else n for e, n in enumerate(found.shape))
                found = replace(found, shape=shape)
            return found

        dims = dims_of(self.program, self.k)
        given = call.args if axis.merge == 1 else from_behind(call.fn, call.args, dims)
        self.args, self.kwargs = mapped(given, call.kwargs, value)
        shapes = mapped(self.args, {}, lambda _, x: torch.Size(x.shape) if isinstance(x, Value) else x)[0]

        def drawn(p: Place, x: Any) -> Any:
            most = most_index(call.fn, shapes, p) if isinstance(p, int) else 0
            return _drawn(x, most, device) if isinstance(x, Value) else x

        self.args, self.kwargs = mapped(self.args, self.kwargs, drawn)
        self.units = units

    @property
    def call(self) -> Call:
        return self.program.calls[self.k]

    @property
    def writes(self) -> bool:
        """Whether the op maps its first argument in place; others have running statistics at most."""
        op = self.program.graph.ops[self.k]
        return bool(op.mutates) and not op.updates

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The results; of an op in place, what it has written."""
        if self.writes:
            first = args[0].clone()
            self.call.fn(first, *args[1:], **kwargs)
            return [first]
        return flat(self.call.fn(*args, **kwargs))

    def whole(self) -> list[Any]:
        """The results in one piece, of the tensors as the op has them."""
        if self.axis.merge == 1 or self.shortened:  # such ops take dimensions that lie so for one themselves
            return self.run(self.args, self.kwargs)
        values = self.program.graph.values
        drawn = {p: x for p, x in (*enumerate(self.args), *self.kwargs.items())}

        def asked(p: Place, x: Any) -> Any:
            if not isinstance(x, Ref):
                return x
            own = drawn[p[0]][p[1]] if isinstance(p, tuple) else drawn[p]
            return own.as_strided(values[x.value].shape, values[x.value].stride)

        made = self.run(*mapped(self.call.args, self.call.kwargs, asked))
        lead = self.axis.merge - 1
        return [x.flatten(0, lead) if isinstance(x, torch.Tensor) and x.ndim > lead else x for x in made]

    def wanted(self) -> list[int]:
        if self.writes:
            return [0]
        known = [n for n, v in enumerate(self.call.results) if v >= 0]
        return [0] if self.axis.counted else known

    def part(self, i: int) -> tuple[list[Any], dict[str, Any]]:
        return _cut(self.args, self.kwargs, self.axis, lambda n: narrowed(n, self.units, self.bounds[i]))

    def verdict(self) -> str:
        try:
            whole = self.whole()
            sliced = self.sliced()
            if all(self.same(n, whole[n], sliced[n]) for n in self.wanted()):
                return "same"
            return "rounds" if all(self.sound(n, whole[n], sliced[n]) for n in self.wanted()) else "wrong"
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return "wrong"

    def sliced(self) -> dict[int, Any]:
        """The results of the slices, put together as `split` does; parts in a list."""
        out, args = dict[int, Any](), self.args
        if self.axis.normalizes:
            return self.normalized()
        wide = self.axis.results.get(0) == SUM and added_wide(
            self.call.fn, self.call.kwargs, self.run_dtype(0)
        )
        for i in range(len(self.bounds)):
            given, kwargs = self.part(i)
            if self.axis.counted and self.call.args[3] == 1:
                given[3] = 2
            adds = self.axis.results.get(0) == SUM
            if wide:
                given = [x.float() if isinstance(x, torch.Tensor) else x for x in given]
            if i and adds and self.call.fn is aten.mm.default:
                out[0].addmm_(*given)
                continue
            made = self.run(given, kwargs)
            for n in self.wanted():
                if self.axis.counted:
                    made[n] = made[n].double()
                if self.axis.results[n] != SUM:
                    out.setdefault(n, []).append(made[n])
                elif n in out:
                    out[n].add_(made[n])
                else:
                    out[n] = made[n]
        if self.axis.counted and self.call.args[3] == 1:
            used, weight = args[1] != args[4], args[2]
            total = used.sum().to(args[0].dtype) if weight is None else (weight[args[1] * used] * used).sum()
            out[0] = out[0] / total
        if self.axis.counted or wide:
            out[0] = out[0].to(args[0].dtype)
        return out

    def normalized(self) -> dict[int, Any]:
        """The same of a batch norm."""
        rows = list[torch.Tensor]()
        run = normalized if self.call.fn is aten.native_batch_norm.default else normalized_backward
        parts = [self.part(i)[0] for i in range(len(self.bounds))]
        added = run(parts, lambda _: nullcontext(), lambda _, made: rows.append(made))
        return {0: rows, **dict(enumerate(added, 1))}

    def same(self, n: int, whole: torch.Tensor, sliced: Any) -> bool:
        if (
            self.axis.results[n] == SUM
        ):  # of floating point they may be the same for some data and not for other
            return not whole.is_floating_point() and _same_bits(whole, sliced)
        d = self.axis.results[n]
        for i, part in enumerate(sliced):
            start, length = narrowed(whole.shape[d], self.units, self.bounds[i])
            if not _same_bits(whole.narrow(d, start, length), part):
                return False
        return True

    def sound(self, n: int, whole: torch.Tensor, sliced: Any) -> bool:
        """Whether slices are no further from the reference than the whole is."""
        if not whole.is_floating_point():
            return False
        args, kwargs, cut = self.sampled(n, whole)
        reference, ours, d = self.reference(args, kwargs)[n], sliced, self.axis.results[n]
        if d != SUM:  # the first slice is enough
            length = narrowed(whole.shape[d], self.units, self.bounds[0])[1]
            reference, whole, ours = reference.narrow(d, 0, length), whole.narrow(d, 0, length), sliced[0]
        whole, ours = cut(whole).double(), cut(ours).double()
        theirs, mine = float((whole - reference).norm()), float((ours - reference).norm())
        near = _NEAR * torch.finfo(self.run_dtype(n)).eps ** 0.5 * float(reference.norm())
        if reference.numel() == 1:  # the error of a single number is a matter of chance
            magnitudes = [
                x.abs() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
            ]
            least = torch.finfo(self.run_dtype(n)).eps * float(self.reference(magnitudes, kwargs)[n].abs())
            return mine <= max(theirs * _TOLERANCE, least)
        return theirs <= near and mine <= theirs * self.tolerance(whole)

    def tolerance(self, whole: torch.Tensor) -> float:
        """Errors of a batch norm are those of a few numbers of each channel, which differ more by chance."""
        if not self.axis.normalizes:
            return _TOLERANCE
        return max(_TOLERANCE, 1 + 2 / (whole.shape[min(1, whole.ndim - 1)] or 1) ** 0.5)

    def run_dtype(self, n: int) -> torch.dtype:
        known = n < len(self.call.results) and self.call.results[n] >= 0
        v = self.call.results[n] if known else self.call.args[0].value
        return dtype_of(self.program.graph.values[v].dtype)

    def sampled(
        self, n: int, whole: torch.Tensor
    ) -> tuple[list[Any], dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]:
        """Some rows of another dimension of the result, with the arguments that they follow from."""

        def shape(_: Place, x: Any) -> Any:
            return x.shape if isinstance(x, torch.Tensor) else x

        shapes, named = mapped(self.args, self.kwargs, shape)
        results: list[Any] = [None] * len(self.call.results)
        results[n] = tuple(whole.shape)
        for other in axes(self.call.fn, shapes, results, named):
            d = other.results.get(n, SUM)
            if d in (SUM, self.axis.results[n]) or not other.args or other.sizes is not None:
                continue
            count = min(_SAMPLED, whole.shape[d])
            given, kwargs = _cut(self.args, self.kwargs, other, partial(_first, count))
            return given, kwargs, partial(torch.narrow, dim=d, start=0, length=count)
        return self.args, self.kwargs, lambda t: t

    def reference(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The results in float64."""

        def wide(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                return x.double()
            return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

        kwargs = map_tree(wide, dict(named))
        given = map_tree(wide, list(args))
        if self.writes:
            self.call.fn(*given, **kwargs)
            return [given[0]]
        return flat(self.call.fn(*given, **kwargs))


def _cut(
    args: Sequence[Any], kwargs: Mapping[str, Any], axis: Axis, place: Callable[[int], tuple[int, int]]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments cut along an axis; ``place``: where of a dimension of that length, and how much."""

    def part(p: Place, x: Any) -> Any:
        if axis.sizes is not None and p == axis.sizes[0]:
            return cut_size(x, axis.sizes[1], lambda n: place(n)[1])
        if p in axis.coarse:
            return x.narrow(0, axis.row(p, *place(x.shape[0] * axis.coarse[p])), 1)
        if p in axis.args and isinstance(x, torch.Tensor):
            return x.narrow(axis.args[p], *place(x.shape[axis.args[p]]))
        return x

    return mapped(args, kwargs, part)


def _first(count: int, length: int) -> tuple[int, int]:
    """Of a dimension, so many from the first on."""
    return 0, min(count, length)


def _drawn(value: Any, most: int, device: str) -> torch.Tensor:
    """Random contents for a value; ``most``: of indices."""
    dtype = dtype_of(value.dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(min(extent, _PRIME), dtype=dtype if dtype.itemsize > 2 else torch.float32).to(
            dtype
        )
        flat_one = drawn.repeat(-(-extent // _PRIME))[:extent]  # no row has the same as another
    elif dtype == torch.bool:
        flat_one = torch.rand(extent) > 0.5
    else:
        flat_one = torch.randint(0, max(2, most) if most != 1 else 1, (extent,), dtype=dtype)
    return flat_one.to(device).as_strided(value.shape, value.stride)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


# --- patches ---


def patch_verdict(program: Program, k: int, region: Region, slices: int, *, bits: bool = True) -> str:
    """The verdict on an op of a region in so many slices: on those at the borders and one between. ``bits``: whether
    anything but the same is of no use."""
    call, values = program.calls[k], program.graph.values
    takes = _takes(program, k, region, slices)
    looks = substitute(call.args, lambda v: (values[v].dtype, values[v].shape, values[v].stride))
    key = (str(call.fn), repr(looks), repr(call.kwargs), repr(takes), bits, torch.get_num_threads())
    if key not in _KNOWN:
        with compat.plain_execution(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                _KNOWN[key] = _PatchTrial(program, k, region).verdict(takes, bits)
            except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
                _KNOWN[key] = "wrong"
    return _KNOWN[key]


def _takes(program: Program, k: int, region: Region, slices: int) -> list[tuple[Rows, Take]]:
    """The rows that slices of an op make, and what of; of those that are alike but for their place, one."""
    finder = Finder(program.graph, lambda k: windows(program, k))
    found: dict[tuple[int, ...], tuple[Rows, Take]] = {}
    for rows in bounds_of(region.rows, slices):
        wanted = made_rows(program.graph, k, finder.wanted(region, rows))
        if wanted is not None:
            take = next(iter(region.windows[k].values())).take(wanted)
            like = (take.stop - take.start, take.before, take.after, take.skip, wanted[1] - wanted[0])
            found.setdefault(like, (wanted, take))
    return list(found.values())


class _PatchTrial:
    """An op of a region on random data."""

    def __init__(self, program: Program, k: int, region: Region) -> None:
        self.program, self.k, self.call = program, k, program.calls[k]
        graph = program.graph
        self.cut = {v for v in graph.ops[k].inputs if graph.values[v].storage in region.windows[k]}
        outside = {s for s in graph.uses.reads[k] if graph.uses.definer[s] not in region.ops}
        self.views = {v for v in self.cut if graph.values[v].storage in outside}
        self.drawn = {v: _drawn(graph.values[v], 0, graph.ops[k].device) for v in graph.ops[k].inputs}
        for v, t in self.drawn.items():
            if v not in self.cut and t.is_floating_point():
                t.abs_()  # variances are not below zero

    def run(self, take: Take | None, *, wide: bool = False) -> Any:
        """The first result, or what is written in place: of the whole, or of a slice."""

        def given(v: int) -> Any:
            t = self.drawn[v]
            if take is not None and v in self.cut:
                t = t.narrow(DIM, take.start, take.stop - take.start)
                t = t if v in self.views else t.clone()
            return t.double() if wide and t.is_floating_point() else t

        args = list(substitute(self.call.args, given))
        if self.program.graph.ops[self.k].mutates:
            args[0] = args[0].clone()
        if take is not None:
            args = slice_args(self.program, self.k, args, take)
        made = flat(self.call.fn(*args, **self.call.kwargs))
        return args[0] if self.program.graph.ops[self.k].mutates else made[0]

    def verdict(self, takes: Sequence[tuple[Rows, Take]], bits: bool) -> str:
        whole, worst = self.run(None), "same"
        for (a, b), take in takes:
            theirs = whole.narrow(DIM, a, b - a)
            ours = self.run(take).narrow(DIM, take.skip, b - a)
            if _same_bits(theirs, ours):
                continue
            if bits or not whole.is_floating_point():
                return "wrong"
            reference = self.run(take, wide=True).narrow(DIM, take.skip, b - a)
            near = _NEAR * torch.finfo(whole.dtype).eps ** 0.5 * float(reference.norm())
            other, mine = float((theirs - reference).norm()), float((ours - reference).norm())
            if other > near or mine > other * _TOLERANCE:
                return "wrong"
            worst = "rounds"
        return worst
