"""Whether and how a program is split: tried where a budget is not met without, or slices make the plan faster.

Chains of the same ops in the same sizes (of repeated layers) are split alike, those of the largest storages first, in
2, 4, … slices, as few as the budget allows. Before a chain is split, each of its ops is computed as a whole and in
slices on random data: ``split`` takes chains whose bits are the same, ``split-rounding`` also those whose results are
no further from a float64 reference than the whole's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible, Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Call, Program, Ref, dtype_of, flat, map_tree
from tightship.frontends.torch.split import Chain, bounds_of, chains, narrowed, split
from tightship.frontends.torch.split_rules import SUM, Axis, added_wide, axes, most_index
from tightship.graph import Graph, Value
from tightship.options import Deadline
from tightship.plan import Plan
from tightship.planners.default import Options
from tightship.units import format_bytes

__all__ = ["EXACT", "ROUNDING", "Decision", "Splitting", "advice", "divide_allow", "verdict"]

aten = torch.ops.aten

EXACT, ROUNDING = "split", "split-rounding"
"""Ways that ``allow`` may name: slices with the same bits as the whole, or ones that may round otherwise."""

SLICES: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
_GROUPS = 3
"""Chains that are not alike and are split together, at most."""
_GAIN = 0.01
"""By so much of the unplanned time a plan is slower before slices are tried, and faster with them."""

_ADVICE = 5.0
"""Seconds in which it is found out what slices would come to that were not allowed."""


def divide_allow(options: Options) -> tuple[Options, str]:
    """The planner's options without splitting, and which of `EXACT` and `ROUNDING` was allowed, if any."""
    ways = [way.strip() for way in options.allow.split(",")]
    mode = ROUNDING if ROUNDING in ways else EXACT if EXACT in ways else ""
    rest = ",".join(way for way in ways if way not in (EXACT, ROUNDING))
    return replace(options, allow=rest) if mode else options, mode


@dataclass(frozen=True)
class Decision:
    """Which chains of a captured program run in how many slices."""

    slices: Mapping[Chain, int]
    rounds: bool

    @property
    def most(self) -> int:
        return max(self.slices.values())

    def apply(self, captured: Program) -> Program:
        """``captured``, or a program of the same ops with other numbers, in slices."""
        made = split(captured, self.slices)
        return replace(made, notes=(*made.notes, *self.notes(captured)))

    def notes(self, captured: Program) -> Iterator[str]:
        """What was split, for people."""
        for first, chain_and_count in self._groups(captured).items():
            chain, count, alike = chain_and_count
            name, size = captured.graph.storages[first].name, captured.graph.storages[first].size
            like = f", and {alike - 1} chains like it" if alike > 1 else ""
            rounding = (
                "; sums over slices round otherwise than in eager" if self.rounds else ", bit-identical"
            )
            what = f"{len(chain.ops)} ops around {name} ({format_bytes(size)}){like}"
            yield f"split: {what} in {count} slices{rounding}"

    def _groups(self, captured: Program) -> dict[int, tuple[Chain, int, int]]:
        groups: dict[Any, list[Chain]] = {}
        for chain in self.slices:
            groups.setdefault(chain.pattern(captured), []).append(chain)
        return {row[0].seed: (row[0], self.slices[row[0]], len(row)) for row in groups.values()}


class Splitting:
    """Splits the chains of one captured program as ``mode`` allows; ``moves``: plans may move storages out of memory
    or compress them."""

    def __init__(self, captured: Program, mode: str, *, moves: bool = False) -> None:
        self.captured, self.mode, self.moves = captured, mode, moves

    @cached_property
    def groups(self) -> list[list[Chain]]:
        """Chains by what they look like, those of the largest storages first."""
        found: dict[Any, list[Chain]] = {}
        for chain in chains(self.captured):
            if self.mode == ROUNDING or not chain.adds(self.captured):
                found.setdefault(chain.pattern(self.captured), []).append(chain)
        return list(found.values())

    def candidates(self) -> Iterator[dict[Chain, int]]:
        """Chains and slices in the order in which they are tried: fewer chains, then fewer slices."""
        for n in range(1, min(_GROUPS, len(self.groups)) + 1):
            for count in SLICES:
                chosen = {c: min(count, c.units) for group in self.groups[:n] for c in group}
                if count == SLICES[0] or any(c.units > count // 2 for c in chosen):
                    yield chosen

    def believed(self, slices: Mapping[Chain, int]) -> tuple[dict[Chain, int], bool]:
        """Those of the chains that may be split so, as probes say, and whether any of them rounds."""
        kept, rounds, known = {}, False, {}
        for chain, count in slices.items():
            key = chain.pattern(self.captured), count
            if key not in known:
                known[key] = _worst(self.captured, chain, count, bits=self.mode == EXACT)
            if known[key] == "same" or (known[key] == "rounds" and self.mode == ROUNDING):
                kept[chain] = count
                rounds |= known[key] == "rounds"
        return kept, rounds

    def plan(
        self,
        base: Program,
        plan_of: Callable[[Any], Plan],
        measured: Callable[[Program], Program],
        limit: int,
    ) -> tuple[Program, Plan, Decision | None]:
        """The measured program and the plan to run: without slices if they are not needed and gain nothing.
        ``base`` is the captured program, measured; ``plan_of`` plans a graph. Raises ``Infeasible``."""
        best: tuple[Program, Plan, Decision | None] | None = None
        refused: Infeasible | None = None
        hopeless = self._least(base.graph) > limit
        try:
            best = None if hopeless else (base, plan_of(base.graph), None)
        except Infeasible as no:
            refused = no
        if best is not None and best[1].time <= best[1].time_before * (1 + _GAIN):
            return best
        least: list[tuple[int, str]] = []
        for decision in self._within(limit, least):
            try:
                program = measured(decision.apply(self.captured))
                plan = plan_of(program.graph)
            except Infeasible as no:
                needed = no.placed or no.best_peak
                least.append(
                    (needed, f"{decision.most} slices need {format_bytes(needed)}, as far as was searched")
                )
                continue
            except Unsupported:
                continue
            if best is not None and plan.time >= best[1].time * (1 - _GAIN):
                break
            best = program, plan, decision
        if best is not None:
            return best
        if refused is None:
            try:
                return base, plan_of(base.graph), None
            except Infeasible as no:
                refused = no
        said = f"splitting: {min(least)[1]}" if least else f"no chain of ops can be split (allow={self.mode})"
        raise refused.with_advice((*refused.advice, said))

    def _within(self, limit: int, above: list[tuple[int, str]]) -> Iterator[Decision]:
        """What may be split and does not need more than the limit in any case; what else does goes to ``above``."""
        tried: set[tuple[tuple[int, int], ...]] = set()
        for slices in self.candidates():
            bound, most = self.bound(slices), max(slices.values())
            if bound is None or bound > limit:
                above += (
                    [] if bound is None else [(bound, f"{most} slices need {format_bytes(bound)} at least")]
                )
                continue
            kept, rounds = self.believed(slices)
            key = tuple(sorted((c.seed, n) for c, n in kept.items()))
            if kept and key not in tried:
                tried.add(key)
                yield Decision(kept, rounds)

    def bound(self, slices: Mapping[Chain, int]) -> int | None:
        """Bytes that no plan of the program in slices goes below; None where it cannot be split so."""
        try:
            graph = split(self.captured, slices).graph
        except Unsupported:
            return None
        return self._least(graph)

    def _least(self, graph: Graph) -> int:
        away = dict.fromkeys(range(len(graph.storages)), 0) if self.moves else None
        return int(lower_bound(graph, least=away))


def advice(captured: Program, limit: int, allow: str) -> tuple[str, ...]:
    """What splitting would come to where it was not allowed; nothing without a chain that helps."""
    splitting, least = Splitting(captured, ROUNDING), int(lower_bound(captured.graph))
    best: tuple[int, dict[Chain, int]] | None = None
    deadline = Deadline.after(_ADVICE)
    for slices in splitting.candidates():
        if (best is not None and best[0] <= limit) or deadline.over:
            break
        bound = splitting.bound(slices)
        if bound is not None and bound < (least if best is None else best[0]):
            best = bound, slices
    if best is None:
        return ()
    bound, slices = best
    chain = next(iter(slices))
    storage = captured.graph.storages[chain.seed]
    return (
        f"splitting (allow={allow},{ROUNDING}): no less than {format_bytes(bound)} then, with the "
        f"{len(chain.ops)} ops around {storage.name} ({format_bytes(storage.size)}) in {slices[chain]} slices",
    )


# --- are slices what the whole is? ------------------------------------------------------------------------------


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


def _worst(program: Program, chain: Chain, slices: int, *, bits: bool) -> str:
    """``bits``: whether anything but the same is of no use."""
    worst = "same" if bits else "rounds"
    for k, axis in chain.ops.items():
        found = verdict(program, k, axis, chain.units, slices, bits=bits)
        if bits and found != "same":
            return "wrong"
        if found == "wrong":
            return found
        if found == "rounds":
            worst = found
    return worst


def verdict(program: Program, k: int, axis: Axis, units: int, slices: int, *, bits: bool = True) -> str:
    """Whether an op gives the ``same`` bits in slices, ``rounds`` otherwise and is no further from a float64
    reference, or is ``wrong``. It is run on random data, once for calls that are alike; in its first slices alone
    where ``bits`` need not be the same and nothing is added up."""
    call, values = program.calls[k], program.graph.values
    looks = [
        (values[x.value].dtype, values[x.value].shape, values[x.value].stride) if isinstance(x, Ref) else x
        for x in call.args
    ]
    key: tuple[Any, ...] = (str(call.fn), repr(looks), repr(call.kwargs), repr(axis), units, slices, bits)
    key = (*key, torch.get_num_threads())
    if key not in _KNOWN:
        with compat.plain_execution(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _KNOWN[key] = _Trial(program, k, axis, bounds_of(units, slices), units, bits).verdict()
    return _KNOWN[key]


@dataclass
class _Trial:
    program: Program
    k: int
    axis: Axis
    bounds: Sequence[tuple[int, int]]
    units: int
    bits: bool
    args: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        call, values, device = (
            self.program.calls[self.k],
            self.program.graph.values,
            self.program.graph.ops[self.k].device,
        )
        shapes = [torch.Size(values[x.value].shape) if isinstance(x, Ref) else x for x in call.args]
        adds = any(v >= 0 and self.axis.results[n] == SUM for n, v in enumerate(call.results))
        given: list[Any] = [values[x.value] if isinstance(x, Ref) else x for x in call.args]
        if not self.bits and not adds and len(self.bounds) > _FEW:
            units, self.bounds = self.bounds[_FEW][0], self.bounds[:_FEW]
            for p, d in self.axis.args.items():
                shape = list(given[p].shape)
                shape[d] = shape[d] // self.units * units
                given[p] = replace(given[p], shape=tuple(shape))
            if self.axis.sizes is not None:
                p, d = self.axis.sizes
                given[p] = [n // self.units * units if e == d else n for e, n in enumerate(given[p])]
            self.units = units
        self.args = [
            _drawn(x, most_index(call.fn, shapes, p), device) if isinstance(x, Value) else x
            for p, x in enumerate(given)
        ]

    @property
    def call(self) -> Call:
        return self.program.calls[self.k]

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The results; of an op in place, what it has written."""
        if self.program.graph.ops[self.k].mutates:
            first = args[0].clone()
            self.call.fn(first, *args[1:], **self.call.kwargs)
            return [first]
        return flat(self.call.fn(*args, **self.call.kwargs))

    def wanted(self) -> list[int]:
        if self.program.graph.ops[self.k].mutates:
            return [0]
        known = [n for n, v in enumerate(self.call.results) if v >= 0]
        return [0] if self.axis.counted else known

    def part(self, i: int, args: Sequence[Any]) -> list[Any]:
        return _cut(args, self.axis, lambda n: narrowed(n, self.units, self.bounds[i]))

    def verdict(self) -> str:
        try:
            whole = self.run(self.args)
            sliced = self.sliced(self.args)
            if all(self.same(n, whole[n], sliced[n]) for n in self.wanted()):
                return "same"
            return "rounds" if all(self.sound(n, whole[n], sliced[n]) for n in self.wanted()) else "wrong"
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return "wrong"

    def sliced(self, args: Sequence[Any]) -> dict[int, Any]:
        """The results of the slices, put together as `split` does; parts in a list."""
        out: dict[int, Any] = {}
        wide = self.axis.results.get(0) == SUM and added_wide(
            self.call.fn, self.call.kwargs, self.run_dtype(0)
        )
        for i in range(len(self.bounds)):
            given = self.part(i, args)
            if self.axis.counted and self.call.args[3] == 1:
                given[3] = 2
            adds = self.axis.results.get(0) == SUM
            if wide:
                given = [x.float() if isinstance(x, torch.Tensor) else x for x in given]
            if i and adds and self.call.fn is aten.mm.default:
                out[0].addmm_(*given)
                continue
            made = self.run(given)
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
        args, cut = self.sampled(n, self.args, whole)
        reference, ours, d = self.reference(args)[n], sliced, self.axis.results[n]
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
            least = torch.finfo(self.run_dtype(n)).eps * float(self.reference(magnitudes)[n].abs())
            return mine <= max(theirs * _TOLERANCE, least)
        return theirs <= near and mine <= theirs * _TOLERANCE

    def run_dtype(self, n: int) -> torch.dtype:
        known = n < len(self.call.results) and self.call.results[n] >= 0
        v = self.call.results[n] if known else self.call.args[0].value
        return dtype_of(self.program.graph.values[v].dtype)

    def sampled(
        self, n: int, args: Sequence[Any], whole: torch.Tensor
    ) -> tuple[list[Any], Callable[[torch.Tensor], torch.Tensor]]:
        """Some rows of another dimension of the result, with the arguments that they follow from."""
        shapes = [x.shape if isinstance(x, torch.Tensor) else x for x in args]
        results: list[Any] = [None] * len(self.call.results)
        results[n] = tuple(whole.shape)
        for other in axes(self.call.fn, shapes, results):
            d = other.results.get(n, SUM)
            if d in (SUM, self.axis.results[n]) or not other.args or other.sizes is not None:
                continue
            count = min(_SAMPLED, whole.shape[d])
            given = _cut(args, other, partial(_first, count))
            return given, partial(torch.narrow, dim=d, start=0, length=count)
        return list(args), lambda t: t

    def reference(self, args: Sequence[Any]) -> list[Any]:
        """The results in float64."""

        def wide(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                return x.double()
            return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

        kwargs = map_tree(wide, self.call.kwargs)
        given = map_tree(wide, list(args))
        if self.program.graph.ops[self.k].mutates:
            self.call.fn(*given, **kwargs)
            return [given[0]]
        return flat(self.call.fn(*given, **kwargs))


def _cut(args: Sequence[Any], axis: Axis, place: Callable[[int], tuple[int, int]]) -> list[Any]:
    """Arguments cut along an axis; ``place``: where of a dimension of that length, and how much."""
    given = list(args)
    for p, d in axis.args.items():
        if isinstance(given[p], torch.Tensor):
            start, length = place(given[p].shape[d])
            given[p] = given[p].narrow(d, start, length)
    if axis.sizes is not None:
        p, d = axis.sizes
        sizes = list(given[p])
        sizes[d] = place(sizes[d])[1]
        given[p] = sizes
    return given


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
