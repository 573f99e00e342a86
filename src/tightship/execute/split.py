"""Whether and how a program is split: tried where a budget is not met without, or slices make the plan faster.

Chains of the same ops in the same sizes (of repeated layers) are split alike, those of the largest storages first, in
2, 4, … slices, as few as the budget allows. Of forward passes, regions run patch by patch
(`tightship.analysis.patches`), with as few operations more as the budget allows. Before anything is split, each of
its ops is computed as a whole and in slices on random data: ``split`` takes what gives the same bits,
``split-rounding`` also results that are no further from a float64 reference than the whole's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from tightship.analysis.bounds import lower_bound
from tightship.analysis.patches import Finder, Patches, Region
from tightship.cached import cached_property
from tightship.errors import Infeasible, Unsupported
from tightship.execute.split_trials import patch_verdict, verdict
from tightship.frontends.torch.collectives import sends
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.split import split
from tightship.frontends.torch.split_chains import WIDE, Chain, chains
from tightship.frontends.torch.split_windows import windows
from tightship.graph import Graph
from tightship.options import Deadline
from tightship.plan import Plan
from tightship.planners.default import EXACT, ROUNDING
from tightship.units import format_bytes

__all__ = ["Change", "Choice", "Decision", "Splitting", "advice", "planned"]

aten = torch.ops.aten

SLICES: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
_GROUPS = 3
"""Chains that are not alike and are split together, at most."""
_GAIN = 0.01
"""By so much of the unplanned time a plan is slower before slices are tried, and faster with them."""

_MOST_OPS = 4000
"""Ops that a chain through whole blocks of layers may come to, in all its slices."""

_TRIES = 8
"""Choices of regions that are planned, each of fewer bytes than the one before."""

_ADVICE = 5.0
"""Seconds in which it is found out what slices would come to that were not allowed."""


class Change(Protocol):
    """What makes another program of a captured one, and of each with the same ops and other numbers."""

    def apply(self, program: Program, /) -> Program: ...


@dataclass(frozen=True)
class Choice:
    """A measured program and its plan; ``changes`` are what made it of the captured one, in order."""

    program: Program
    plan: Plan
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Which chains of a captured program, and which regions, run in how many slices."""

    slices: Mapping[Chain, int]
    rounds: bool
    patches: tuple[tuple[Region, int], ...] = ()

    @property
    def most(self) -> int:
        return max((*self.slices.values(), *(count for _, count in self.patches)))

    def apply(self, captured: Program) -> Program:
        """``captured``, or a program of the same ops with other numbers, in slices."""
        made = split(captured, self.slices, self.patches)
        more = sum(op.flops for op in made.graph.ops) - sum(op.flops for op in captured.graph.ops)
        return replace(made, notes=(*made.notes, *self.notes(captured, more)))

    def notes(self, captured: Program, more: int = 0) -> Iterator[str]:
        """What was split, for people; ``more``: operations beyond those of the whole."""
        graph = captured.graph
        for region, count in self.patches:
            ends = f"{graph.ops[region.first].name} to {graph.ops[region.stop - 1].name}"
            bits = "bits may differ from eager's" if self.rounds else "bit-identical"
            yield f"split: {len(region.ops)} ops from {ends} in {count} slices of {region.rows} rows, {bits}"
        if self.patches:
            whole = sum(op.flops for op in graph.ops)
            yield f"split: {more:,} operations more than in one piece ({100 * more / max(whole, 1):+.2f} %)"
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
    or compress them. ``least_of``: what no plan of a program goes below, where that is not the graph's own bound."""

    def __init__(
        self, captured: Program, mode: str, *, moves: bool = False,
        least_of: Callable[[Program], int] | None = None,
    ) -> None:  # fmt: skip
        self.captured, self.mode, self.moves = captured, mode, moves
        self.least_of = least_of or self._least
        self.measured: Graph | None = None  # of the captured program, with what its ops take for themselves
        self.tried: list[tuple[int, int, bool]] = []
        """Slices that were not enough for the last plan, the bytes they need, and whether a search says so or a
        bound."""
        self._bounds: dict[tuple[tuple[int, int], ...], int | None] = {}

    @cached_property
    def groups(self) -> list[list[Chain]]:
        """Chains by what they look like, those of the largest storages first."""
        found: dict[Any, list[Chain]] = {}
        for chain in self._allowed(chains(self.captured)):
            found.setdefault(chain.pattern(self.captured), []).append(chain)
        return list(found.values())

    @cached_property
    def wide(self) -> tuple[Chain, ...]:
        """Chains through whole blocks of layers, images by images."""
        known = {k for group in self.groups for chain in group for k in chain.ops}
        return tuple(c for c in self._allowed(chains(self.captured, WIDE))[:1] if not c.ops.keys() <= known)

    @cached_property
    def fine(self) -> Mapping[tuple[int, frozenset[int]], Chain]:
        """Chains that can be cut further than those of the groups, by what makes them the same."""
        found = self._allowed(chains(self.captured, fine=True))
        return {(c.seed, frozenset(c.ops)): c for c in found if any(axis.coarse for axis in c.ops.values())}

    def _most(self, chain: Chain) -> int:
        other = self.fine.get((chain.seed, frozenset(chain.ops)))
        return chain.units if other is None else max(chain.units, other.units)

    def _sliced(self, chain: Chain, count: int) -> tuple[Chain, int]:
        """A chain in about so many slices, or the one that can be cut further: as many for each row of its masks."""
        other = self.fine.get((chain.seed, frozenset(chain.ops)))
        if count <= chain.units or other is None:
            return chain, min(count, chain.units)
        return other, min(other.units, -(-count // chain.units) * chain.units)

    def _allowed(self, found: Iterable[Chain]) -> list[Chain]:
        return [c for c in found if self.mode == ROUNDING or not c.adds(self.captured)]

    @cached_property
    def finder(self) -> Finder | None:
        """Finds regions; of forward passes alone, as what a backward pass needs is there as a whole."""
        graph = self.captured.graph if self.measured is None else self.measured
        if any(op.phase != "forward" for op in graph.ops):
            return None
        return Finder(graph, partial(windows, self.captured))

    def patched(self, limit: int) -> Iterator[Decision]:
        """Regions in slices that are within a limit by the bytes of storages, then ones that need less: what ops take
        for themselves is not in it. Each is believed."""
        if self.finder is None:
            return
        bits, tries, choice = self.mode == EXACT, 0, self.finder.best(limit)
        while choice is not None and tries < _TRIES:
            verdicts = {row: _worst_patch(self.captured, *row, bits=bits) for row in choice.slices}
            wrong = [row for row, found in verdicts.items() if found == "wrong"]
            if wrong:
                self.finder.ban(wrong)
                choice = self.finder.best(limit)
                continue
            tries += 1
            yield Decision({}, "rounds" in verdicts.values(), choice.slices)
            limit = self.finder.below(choice)
            choice = self.finder.best(limit)

    def candidates(self) -> Iterator[dict[Chain, int]]:
        """Chains and slices in the order in which they are tried: fewer chains, then fewer slices; then whole blocks
        of layers, as far as that does not make too many ops."""
        for n in range(1, min(_GROUPS, len(self.groups)) + 1):
            for count in SLICES:
                group = [c for group in self.groups[:n] for c in group]
                if count == SLICES[0] or any(self._most(c) > count // 2 for c in group):
                    yield dict(self._sliced(c, count) for c in group)
        for chain in self.wide:
            for count in SLICES:
                if count == SLICES[0] or (chain.units > count // 2 and len(chain.ops) * count <= _MOST_OPS):
                    yield {chain: min(count, chain.units)}

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
        plan_of: Callable[[Program], Choice],
        measured: Callable[[Program], Program],
        limit: int,
    ) -> Choice:
        """The measured program and the plan to run: without slices if they are not needed and gain nothing.
        ``base`` is the captured program, measured; ``plan_of`` plans a program. Raises ``Infeasible``."""
        self.measured, self.tried = base.graph, []
        best: Choice | None = None
        refused: Infeasible | None = None
        hopeless = self.least_of(base) > limit
        try:
            best = None if hopeless else plan_of(base)
        except Infeasible as no:
            refused = no
        if best is not None and best.plan.time <= best.plan.time_before * (1 + _GAIN):
            return best
        least: list[tuple[int, str]] = []
        for decision in self._within(limit, least):
            try:
                found = plan_of(measured(decision.apply(self.captured)))
            except Infeasible as no:
                needed = no.placed or no.best_peak
                self.tried.append((decision.most, needed, True))
                least.append(
                    (needed, f"{decision.most} slices need {format_bytes(needed)}, as far as was searched")
                )
                continue
            except Unsupported:
                continue
            if best is not None and found.plan.time >= best.plan.time * (1 - _GAIN):
                break
            best = replace(found, changes=(decision, *found.changes))
        if best is not None:
            return best
        if refused is None:
            try:
                return plan_of(base)
            except Infeasible as no:
                refused = no
        if not least and (choice := self._least_patches()) is not None:
            least.append((choice.peak, f"slices of rows need about {format_bytes(choice.peak)} at least"))
        said = f"splitting: {min(least)[1]}" if least else f"no chain of ops can be split (allow={self.mode})"
        raise refused.with_advice((*refused.advice, said))

    def _least_patches(self) -> Patches | None:
        return None if self.finder is None else self.finder.least()

    def _within(self, limit: int, above: list[tuple[int, str]]) -> Iterator[Decision]:
        """What may be split and does not need more than the limit in any case; what else does goes to ``above``."""
        yield from self.patched(limit)
        tried: set[tuple[tuple[int, int], ...]] = set()
        for slices in self.candidates():
            bound, most = self.bound(slices), max(slices.values())
            if bound is None:
                continue
            if bound > limit:
                above.append((bound, f"{most} slices need {format_bytes(bound)} at least"))
                self.tried.append((most, bound, False))
                continue
            kept, rounds = self.believed(slices)
            key = tuple(sorted((c.seed, n) for c, n in kept.items()))
            if kept and key not in tried:
                tried.add(key)
                yield Decision(kept, rounds)

    def bound(self, slices: Mapping[Chain, int]) -> int | None:
        """Bytes that no plan of the program in slices goes below; None where it cannot be split so."""
        key = tuple(sorted((c.seed, n) for c, n in slices.items()))
        if key not in self._bounds:
            try:
                self._bounds[key] = self.least_of(split(self.captured, slices))
            except Unsupported:
                self._bounds[key] = None
        return self._bounds[key]

    def floor(self, base: Program) -> int:
        """The least bound, in one piece or of any of the choices that are tried, whether their bits are believed or
        not. ``base`` is the captured program, measured."""
        self.measured = base.graph
        bounds = [self.least_of(base), *(self.bound(slices) for slices in self.candidates())]
        if (choice := self._least_patches()) is not None:
            bounds.append(choice.peak)
        return min(b for b in bounds if b is not None)

    def nearest(self, limit: int, deadline: Deadline) -> tuple[int, dict[Chain, int]] | None:
        """The first choice whose bound is within the limit, or the one of the least bound that time allows to see."""
        best: tuple[int, dict[Chain, int]] | None = None
        for slices in self.candidates():
            if (best is not None and best[0] <= limit) or deadline.over:
                break
            bound = self.bound(slices)
            if bound is not None and (best is None or bound < best[0]):
                best = bound, slices
        return best

    def _least(self, program: Program) -> int:
        away = dict.fromkeys(range(len(program.graph.storages)), 0) if self.moves else None
        return int(lower_bound(program.graph, least=away))


def planned(
    program: Program,
    mode: str,
    plan_of: Callable[[Graph], Plan],
    measured: Callable[[Program], Program],
    limit: int,
    *,
    moves: bool,
) -> tuple[Program, Plan]:
    """What `Splitting.plan` decides of a measured program, the plan with notes of what was split."""

    def choice(other: Program) -> Choice:
        return Choice(other, plan_of(other.graph))

    found = Splitting(program, mode, moves=moves).plan(program, choice, measured, limit)
    made, plan, notes = found.program, found.plan, found.program.notes if found.changes else ()
    return made, replace(plan, notes=(*plan.notes, *(n for n in notes if n.startswith("split: "))))


def advice(
    captured: Program, limit: int, allow: str, least_of: Callable[[Program], int] | None = None
) -> tuple[str, ...]:
    """What splitting would come to where it was not allowed; nothing without a chain that helps, or on several ranks.
    ``least_of``: as for `Splitting`."""
    if sends(captured):
        return ()
    splitting = Splitting(captured, ROUNDING, least_of=least_of)
    if splitting.finder is not None:
        choice = splitting.finder.best(limit) or splitting.finder.least()
        if choice is not None:
            more = 100 * choice.extra / max(sum(op.flops for op in captured.graph.ops), 1)
            return (
                f"splitting (allow={allow},{EXACT}): about {format_bytes(choice.peak)} then, "
                f"{sum(len(r.ops) for r, _ in choice.slices)} ops in slices of rows, {more:+.1f} % operations",
            )
    least, best = splitting.least_of(captured), splitting.nearest(limit, Deadline.after(_ADVICE))
    if best is None or best[0] >= least:
        return ()
    bound, slices = best
    chain = next(iter(slices))
    storage = captured.graph.storages[chain.seed]
    return (
        f"splitting (allow={allow},{ROUNDING}): no less than {format_bytes(bound)} then, with the "
        f"{len(chain.ops)} ops around {storage.name} ({format_bytes(storage.size)}) in {slices[chain]} slices",
    )


def _worst_patch(program: Program, region: Region, slices: int, *, bits: bool) -> str:
    found = [patch_verdict(program, k, region, slices, bits=bits) for k in region.ops]
    return next((v for v in ("wrong", "rounds") if v in found), "same")


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
