"""A scheduled module with regions of its entry in slices: a loop over the slices in place of the instructions.

A region is a set of instructions, each cut as a `Cut` of the table says. A time around the loop takes its part of
what the region reads by dynamic-slice, runs the instructions in the smaller shape, and writes its part of what others
read by dynamic-update-slice, or adds to a sum. XLA keeps a loop: slices that stand one behind another it schedules
side by side, and then needs no less.

Problem: the regions and numbers of slices with which the entry's peak is the least. Measure: the module's peak as XLA
counts it. Source: a region grows around each of the largest arrays at the peak, along each of its dimensions, over
all instructions that touch it or others of like size. Guarantee: the peak is counted on the module that is written.
Known limits: slices are equal, so that their number divides the dimension; in the entry alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd
from typing import Final

from tightship.cached import cached_property
from tightship.hlo.module import Computation, Instruction, Module
from tightship.hlo.remat.instructions import Rewrite
from tightship.hlo.remat.lower import without_dead
from tightship.hlo.remat.peak import module_peak, peak_of
from tightship.hlo.shape import Shape
from tightship.hlo.split_rules import CARRIED, SUM, Cut, cuts, lengths, numbers, part_of

__all__ = ["Choice", "Region", "choices", "regions", "written"]

SLICES: Final = (2, 4, 8, 16, 32, 64)
_SEEDS: Final = 6
"""Arrays at the peak around which regions grow, the largest first."""
_SIMILAR: Final = (2, 64)
"""A region takes in arrays of at least such a part of the one that it grows around."""
_NEAR: Final = 1.02
"""A number of slices is enough that comes so near to the least peak of its region."""
_GAIN: Final = 0.01
"""A region that lowers the peak by less of it is not split, unless the limit is met with it."""
_ROUNDS: Final = 24
"""Regions that are split one after another, at most."""
_BELIEVED: Final = 24
"""Ways to go on that are looked at in each round."""
_INDEX: Final = Shape("s32")


@dataclass(frozen=True)
class Region:
    """``ops``: the instructions in the entry's order, each with how it is cut. There may be ``units`` slices, or a
    divisor of that. ``seed``: the array it grew around."""

    ops: Mapping[str, Cut]
    units: int
    seed: str

    @property
    def rounds(self) -> bool:
        return any(cut.rounds for cut in self.ops.values())

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(n for n in SLICES if self.units % n == 0)


# -- finding regions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finder:
    module: Module
    rounding: bool

    @cached_property
    def entry(self) -> Computation:
        return self.module.entry

    @cached_property
    def tied(self) -> frozenset[str]:
        """Instructions that others wait for."""
        return frozenset(n for i in self.entry.instructions for n in i.control_predecessors)

    @cached_property
    def ways(self) -> Mapping[str, tuple[Cut, ...]]:
        found = {}
        for i in self.entry.instructions:
            rows = () if i.name in self.tied else cuts(self.module, i, self.shapes(i))
            found[i.name] = tuple(c for c in rows if self.rounding or not c.rounds)
        return found

    def shapes(self, i: Instruction) -> list[Shape]:
        return [self.entry.by_name[o].shape for o in i.operands]

    def around(self, seed: str, dim: int, similar: int) -> Region | None:
        """The region that grows around an array cut along a dimension."""
        ops = self._closed(self._grown(seed, dim, self.entry.by_name[seed].shape.nbytes // similar), seed)
        ordered = {i.name: ops[i.name] for i in self.entry.instructions if i.name in ops}
        rows = (lengths(self.entry.by_name[n], self.shapes(self.entry.by_name[n]), c) for n, c in ops.items())
        units = gcd(*(n for row in rows for n in row))
        return Region(ordered, units, seed) if len(ordered) > 1 and units > 1 else None

    def _grown(self, seed: str, dim: int, least: int) -> dict[str, Cut]:
        inside, users = self.entry.by_name, self.entry.users
        ops, wanted = dict[str, Cut](), {seed: dim}
        work, seen = [seed, *users[seed]], set[str]()
        while work:
            name = work.pop(0)
            cut = None if name in ops else self._chosen(name, wanted, ops)
            if cut is None:
                continue
            ops[name] = cut
            near = [*zip(inside[name].operands, cut.operands, strict=True), (name, cut.result)]
            for other, d in near:
                i = inside[other]
                if d < 0 or i.shape.nbytes < least or i.row.makes == "given" or other in seen:
                    continue
                seen.add(other)
                wanted.setdefault(other, d)
                work += [other, *users[other]]
        return ops

    def _chosen(self, name: str, wanted: Mapping[str, int], ops: Mapping[str, Cut]) -> Cut | None:
        """A way to cut an instruction that goes with how what it touches is cut."""
        i, users = self.entry.by_name[name], self.entry.users[name]
        for cut in self.ways[name]:
            if cut.result != wanted.get(name, cut.result):
                continue
            rows = zip(i.operands, cut.operands, strict=True)
            if any(d != (ops[o].result if o in ops else wanted.get(o, d)) for o, d in rows):
                continue
            reads = (
                d
                for u in users
                if u in ops
                for o, d in zip(self.entry.by_name[u].operands, ops[u].operands, strict=True)
                if o == name
            )
            if all(d == cut.result and d >= 0 for d in reads):
                return cut
        return None

    def _closed(self, ops: dict[str, Cut], seed: str) -> dict[str, Cut]:
        """The region with all that lies between its instructions; without what follows, or comes before, those that
        cannot be cut with it."""
        while ops:
            between = (_after(self.entry, ops) & _before(self.entry, ops)) - ops.keys()
            fresh = [i.name for i in self.entry.instructions if i.name in between]
            if not fresh:
                break
            for name in fresh:
                cut = self._chosen(name, {}, ops)
                if cut is not None:
                    ops[name] = cut
                    continue
                after = _after(self.entry, {name}) & ops.keys()
                gone = _before(self.entry, {name}) & ops.keys() if seed in after else after
                ops = {n: c for n, c in ops.items() if n not in gone}
                break
        return ops


def _after(c: Computation, names: Collection[str]) -> set[str]:
    """What needs any of these."""
    found: set[str] = set()
    for i in c.instructions:
        if any(o in found or o in names for o in (*i.operands, *i.control_predecessors)):
            found.add(i.name)
    return found


def _before(c: Computation, names: Collection[str]) -> set[str]:
    """What any of these needs."""
    found: set[str] = set()
    for i in reversed(c.instructions):
        if i.name in names or i.name in found:
            found.update((*i.operands, *i.control_predecessors))
    return found


def regions(module: Module, *, rounding: bool) -> Iterator[Region]:
    """Regions around the largest arrays at the entry's peak, those of the largest first."""
    finder, peak = _Finder(module, rounding), peak_of(module)
    found = [r for r in peak.residents if r.computation == module.entry.name and r.nbytes and not r.index]
    seen: set[frozenset[str]] = set()
    for r in sorted(found, key=lambda r: -r.nbytes)[:_SEEDS]:
        for similar in _SIMILAR:
            for dim, n in enumerate(module.entry.by_name[r.instruction].shape.dims):
                region = finder.around(r.instruction, dim, similar) if n > 1 else None
                if region is not None and region.counts and (key := frozenset(region.ops)) not in seen:
                    seen.add(key)
                    yield region


# -- choosing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A module with ``regions`` in so many slices, one after another, and its peak."""

    module: Module
    peak: int
    regions: tuple[tuple[Region, int], ...] = ()

    @property
    def rounds(self) -> bool:
        return any(region.rounds for region, _ in self.regions)

    @property
    def most(self) -> int:
        """The most slices of a region."""
        return max(count for _, count in self.regions)


def choices(
    module: Module, limit: int, *, rounding: bool, believed: Callable[[Choice], bool] = lambda _: True
) -> Iterator[Choice]:
    """The module in slices, in one region more each time, until its peak is within a limit or gets no lower. Slices
    are the fewest that meet the limit, or come near to the least; what is not ``believed`` is left out."""
    at: Choice | None = Choice(module, module_peak(module))
    for _ in range(_ROUNDS):
        if at is None or at.peak <= limit:
            return
        found = sorted(_lower(at, limit, rounding), key=lambda rows: (max(rows[0].peak, limit), rows[0].most))
        tried = islice((c for rows in found for c in rows), _BELIEVED)
        at = next((c for c in tried if believed(c)), None)
        if at is not None:
            yield at


def _lower(at: Choice, limit: int, rounding: bool) -> Iterator[list[Choice]]:
    """What one region more comes to, for each that lowers the peak: first in as many slices as are enough."""
    for region in regions(at.module, rounding=rounding):
        least = _in_slices(at, region, region.counts[-1])
        most = max(int(at.peak * (1 - _GAIN)), limit)
        if least.peak > most:
            continue
        rows = [*(_in_slices(at, region, count) for count in region.counts[:-1]), least]
        enough = max(limit, min(int(least.peak * _NEAR), most))
        first = next(k for k, c in enumerate(rows) if c.peak <= enough)
        yield [c for c in (*rows[first:], *reversed(rows[:first])) if c.peak <= most]


def _in_slices(at: Choice, region: Region, count: int) -> Choice:
    made = written(at.module, region, count)
    return Choice(made, module_peak(made), (*at.regions, (region, count)))


# -- writing -------------------------------------------------------------------------------------------------------


def written(module: Module, region: Region, count: int) -> Module:
    """The module with a region in so many slices: a loop stands where its last instruction stood, and behind it what
    needs it."""
    writer, after = _Writer(module, region, count), _after(module.entry, region.ops)
    loop, last = writer.loop(), list(region.ops)[-1]
    rows, later = list[Instruction](), list[Instruction]()
    for i in module.entry.instructions:
        if i.name == last:
            rows += [*loop, *later]
            later = rows  # what comes now stands behind it
        elif i.name not in region.ops:
            (later if i.name in after else rows).append(i)
    entry = replace(module.entry, instructions=tuple(rows))
    return without_dead(writer.rewrite.written({entry.name: entry}))


class _Writer:
    """The loop of one region: its condition and its body, and what stands in the entry."""

    def __init__(self, module: Module, region: Region, count: int) -> None:
        self.module, self.region, self.count = module, region, count
        self.entry, self.rewrite = module.entry, Rewrite(module)
        self.outer, self.body = list[Instruction](), list[Instruction]()
        inside = self.entry.by_name
        self.given = list(
            dict.fromkeys(o for n in region.ops for o in inside[n].operands if o not in region.ops)
        )
        self.given = [o for o in self.given if not self._copied(o)]
        self.results = [n for n in region.ops if self._needed(n)]
        self.starts: dict[int, str] = {}
        self.parts: dict[tuple[str, int], str] = {}
        self.loop_name = self.rewrite.names.new(f"{region.seed}.slices")

    def _copied(self, name: str) -> bool:
        """A number, which the body has itself."""
        i = self.entry.by_name[name]
        return i.opcode == "constant" and not i.shape.dims

    def _needed(self, name: str) -> bool:
        users = self.entry.users[name]
        summed = self.region.ops[name].result == SUM
        return summed or self.entry.root.name == name or any(u not in self.region.ops for u in users)

    def add(
        self,
        to: list[Instruction],
        opcode: str,
        shape: Shape,
        *operands: str,
        payload: str = "",
        **attributes: str,
    ) -> str:
        name = self.rewrite.names.new(f"{self.region.seed}.{opcode}")
        to.append(Instruction(name, opcode, shape, operands, payload, tuple(attributes.items())))
        return name

    def number(self, to: list[Instruction], value: str, shape: Shape = _INDEX) -> str:
        return self.add(to, "constant", shape, payload=value)

    def loop(self) -> list[Instruction]:
        """What stands in the entry in place of the region."""
        inside = self.entry.by_name
        first = [self.number(self.outer, "0"), *self.given, *map(self.initial, self.results)]
        shapes = [_INDEX, *(inside[n].shape for n in (*self.given, *self.results))]
        carried = Shape("tuple", parts=tuple(shapes))
        parts = self.outer
        start = self.add(parts, "tuple", carried, *first)
        body = self.rewrite.add(self.looped(carried), f"{self.region.seed}.body", self.entry.name)
        condition = self.rewrite.add(
            self.condition(carried), f"{self.region.seed}.condition", self.entry.name
        )
        trips = f'{{"known_trip_count":{{"n":"{self.count}"}}}}'
        attributes = (("condition", f"%{condition}"), ("body", f"%{body}"), ("backend_config", trips))
        parts.append(Instruction(self.loop_name, "while", carried, (start,), attributes=attributes))
        for k, n in enumerate(self.results, 1 + len(self.given)):
            i = inside[n]
            parts.append(_element(n, i.shape, self.loop_name, k, root=i.root))
        return parts

    def initial(self, name: str) -> str:
        """What the first slice writes into, or adds to."""
        i, cut = self.entry.by_name[name], self.region.ops[name]
        if CARRIED in cut.operands:
            return self.add(self.outer, "copy", i.shape, i.operands[cut.operands.index(CARRIED)])
        if cut.result == SUM and i.opcode == "reduce":
            zero = i.operands[1]
        else:
            zero = self.number(self.outer, "false" if i.shape.dtype == "pred" else "0", Shape(i.shape.dtype))
        return self.add(self.outer, "broadcast", i.shape, zero, dimensions="{}") if i.shape.dims else zero

    def condition(self, carried: Shape) -> Computation:
        rows: list[Instruction] = []
        given = self.add(rows, "parameter", carried, payload="0")
        at = self.rewrite.names.new(f"{self.region.seed}.at")
        rows.append(_element(at, _INDEX, given, 0))
        count = self.number(rows, str(self.count))
        self.add(rows, "compare", Shape("pred"), at, count, direction="LT")
        return Computation("condition", (*rows[:-1], replace(rows[-1], root=True)))

    def looped(self, carried: Shape) -> Computation:
        rows, names = self.body, self.rewrite.names
        whole = self.add(rows, "parameter", carried, payload="0")
        taken = {}
        for k, n in enumerate(("", *self.given, *self.results)):
            taken[k] = names.new(f"{n or self.region.seed}.{'given' if n else 'at'}")
            rows.append(_element(taken[k], carried.parts[k], whole, k))
        self.at, self.zero = taken[0], self.number(rows, "0")
        self.whole = {n: taken[k] for k, n in enumerate(self.given, 1)}
        self.out = {n: taken[k] for k, n in enumerate(self.results, 1 + len(self.given))}
        made: dict[str, str] = {}
        for n, cut in self.region.ops.items():
            made[n] = self.slice(self.entry.by_name[n], cut, made)
        after = self.add(rows, "add", _INDEX, self.at, self.number(rows, "1"))
        last = [after, *(self.whole[n] for n in self.given), *(self.put(n, made[n]) for n in self.results)]
        self.add(rows, "tuple", carried, *last)
        return Computation("body", (*rows[:-1], replace(rows[-1], root=True)))

    def slice(self, i: Instruction, cut: Cut, made: Mapping[str, str]) -> str:
        """One instruction for one slice."""
        operands = []
        for o, d in zip(i.operands, cut.operands, strict=True):
            if d == CARRIED:
                operands.append(self.out[i.name])
            elif o in made:
                operands.append(made[o])
            else:
                operands.append(self.part(o, d))
        shape = part_of(i.shape, cut.result, self.count)
        name = self.rewrite.names.new(f"{i.name}.slice")
        kept = tuple((k, v) for k, v in i.attributes if k != "backend_config")
        narrow = replace(i, name=name, shape=shape, operands=tuple(operands), attributes=kept, root=False)
        self.body.append(_resized(narrow, i, cut, self.count))
        counts = i.opcode == "iota" and int(i.attribute("iota_dimension")) == cut.result
        return self.shifted(name, shape, self.start(i.shape.dims[cut.result])) if counts else name

    def shifted(self, name: str, shape: Shape, by: str) -> str:
        """Numbers with those of the slices before added."""
        if shape.dtype != _INDEX.dtype:
            by = self.add(self.body, "convert", Shape(shape.dtype), by)
        wide = self.add(self.body, "broadcast", shape, by, dimensions="{}")
        return self.add(self.body, "add", shape, name, wide)

    def part(self, name: str, dim: int) -> str:
        """A slice's part of what the region is given."""
        key = name, dim
        if key not in self.parts:
            i = self.entry.by_name[name]
            if self._copied(name):
                own = self.rewrite.names.new(f"{name}.own")
                self.body.append(replace(i, name=own))
            elif dim < 0:
                own = self.whole[name]
            else:
                shape = part_of(i.shape, dim, self.count)
                sizes = f"{{{','.join(map(str, shape.dims))}}}"
                at = self.offsets(i.shape, dim)
                own = self.add(
                    self.body, "dynamic-slice", shape, self.whole[name], *at, dynamic_slice_sizes=sizes
                )
            self.parts[key] = own
        return self.parts[key]

    def offsets(self, shape: Shape, dim: int) -> list[str]:
        return [self.start(n) if d == dim else self.zero for d, n in enumerate(shape.dims)]

    def start(self, length: int) -> str:
        """Where the slice begins along a dimension of a length."""
        each = length // self.count
        if each not in self.starts:
            self.starts[each] = self.add(
                self.body, "multiply", _INDEX, self.at, self.number(self.body, str(each))
            )
        return self.starts[each]

    def put(self, name: str, part: str) -> str:
        """The whole with this slice's part in it."""
        i, cut = self.entry.by_name[name], self.region.ops[name]
        if CARRIED in cut.operands:
            return part
        if cut.result == SUM:
            return self.add(self.body, cut.combine, i.shape, self.out[name], part)
        at = self.offsets(i.shape, cut.result)
        return self.add(self.body, "dynamic-update-slice", i.shape, self.out[name], part, *at)


def _element(name: str, shape: Shape, of: str, index: int, *, root: bool = False) -> Instruction:
    return Instruction(
        name, "get-tuple-element", shape, (of,), attributes=(("index", str(index)),), root=root
    )


def _resized(narrow: Instruction, i: Instruction, cut: Cut, count: int) -> Instruction:
    """An instruction of a slice with the sizes that its attributes say."""
    sizes = [n // count if d == cut.result else n for d, n in enumerate(i.shape.dims)]
    if i.opcode == "dynamic-slice":
        return narrow.but(dynamic_slice_sizes=f"{{{','.join(map(str, sizes))}}}")
    if i.opcode == "slice":
        rows = [row.strip("[]").split(":") for row in i.attribute("slice").strip("{} ").split(", ")]
        rows[cut.result][1] = str(sizes[cut.result])
        return narrow.but(slice="{" + ", ".join(f"[{':'.join(row)}]" for row in rows) + "}")
    if i.opcode == "gather" and cut.operands[1] < 0:
        taken = list(numbers(i.attribute("slice_sizes")))
        taken[cut.operands[0]] //= count
        return narrow.but(slice_sizes=f"{{{','.join(map(str, taken))}}}")
    return narrow
