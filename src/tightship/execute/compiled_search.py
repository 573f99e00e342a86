"""Which graph is compiled within a budget: candidates are replayed until none is worth a look.

A part of compiled mode, of whole steps (`compiled_step`) and of the torch.compile backend, whose problem and
guarantee these are. A candidate is what Inductor is given: a graph, or the graphs of two passes. Where nothing fits,
the same is done of the graph as it is written for memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from msgspec import structs

from tightship import simulate
from tightship.analysis.bounds import lower_bound
from tightship.errors import BadInput, Infeasible, TightshipError
from tightship.execute.aiming import (
    STOCK,
    Aim,
    Candidate,
    Model,
    fastest,
    found_or_kept,
    row_of,
    source_of,
    unplanned_of,
)
from tightship.execute.cache import KeptPartitions, Partition, Unplanned, plan_of
from tightship.execute.compiled import StepReplay, place
from tightship.frontends.torch.capture.fused import Overwrites, with_overwrites, with_workspaces
from tightship.frontends.torch.compat_inductor import NotLowered, Outdated
from tightship.options import Deadline
from tightship.plan import Plan
from tightship.planners import default
from tightship.units import Budget
from tightship.verify import check

__all__ = ["LEAN", "CompiledSearch"]

_DEAD: Final = 64
"""A lean graph's kernels end where the dead bytes are such a part of what the model has beyond the static set."""
BOUND: Final = 5.0
"""Seconds in which what a model takes at least is looked for."""
LEAN: Final = (
    "nothing else fits: the graph is written for memory (kernels end early, gradients of convolutions are computed "
    "one after the other)"
)
"""The note of what is compiled as it is written for memory."""

How = Literal["whole", "briefly", "least"]
"""How a graph is searched."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class FusedModel(Model, Protocol[T_contra]):
    """A model of fused code that says what a candidate computes again: how many kernels, and their seconds; and what
    results ``may`` at most be written over."""

    @property
    def may(self) -> Mapping[int, Overwrites]: ...

    def recompute_time(self, made: T_contra, /) -> tuple[int, float]: ...


class CompiledSearch(ABC, Generic[T]):
    """Which of a graph's candidates: lowered and replayed until nothing faster is to be expected within the budget.

    ``within`` is the budget as the user gave it; ``kept`` has what earlier runs have chosen, which counts if this
    search ``looks``. After `run`, ``unplanned`` is what Inductor's own takes, ``budget`` the most bytes, ``count``
    how many were lowered, and ``row`` what was chosen as it is kept.
    """

    shares: tuple[float | None, ...] = (*STOCK, None)
    """Whose saved sets are looked at beside ours, as `Seeds` has them."""
    placed = True
    """Whether what is compiled is placed in an arena."""
    held: int | None = None
    """Bytes beyond the static set that may stay between the passes, where there is such a limit."""
    unplanned: Unplanned
    row: Partition

    def __init__(
        self, options: default.Options, within: Budget | None, kept: KeptPartitions, *, looks: bool
    ) -> None:
        self.options, self.within_user, self.kept, self.looks = options, within, kept, looks
        self.budget: int | None = None
        self.dead = 0  # in a lean graph: bytes for which a kernel ends
        self.lean_search: CompiledSearch[T] | None = None
        self.leaned = False  # whether what is chosen is of the lean graph
        self.count = 0
        self.notes: list[str] = []
        self.failed: list[str] = []  # why Inductor failed at candidates
        self.seen: dict[Hashable, Candidate[T]] = {}
        self.aim: Aim[T] | None = None  # at the budget
        self.aimed: dict[Any, Any] = {}  # what aims came to, by what they were at

    # --- what a kind of candidates is ---

    @property
    @abstractmethod
    def model(self) -> FusedModel[T] | None:
        """The model of the fused graph; None where there is none, and candidates are Inductor's own alone."""

    @property
    @abstractmethod
    def static(self) -> int:
        """Bytes that are always in use."""

    @abstractmethod
    def limit(self, unplanned: Unplanned) -> int | None:
        """The most bytes, of a graph that takes so many as Inductor has it."""

    @abstractmethod
    def key(self, made: T) -> Hashable:
        """Equal for candidates that are lowered to the same."""

    @abstractmethod
    def replay(self, made: T, *, likely: bool) -> StepReplay:
        """A candidate, lowered. ``likely`` as in `compat_inductor.Lower`. Raises `NotLowered`."""

    @abstractmethod
    def stock(self, *, likely: bool = True) -> Candidate[T]:
        """Inductor's own."""

    @abstractmethod
    def seed(self, share: float | None) -> T | None:
        """What keeps for the backward pass what Inductor would at an ``activation_memory_budget``; for None, what a
        checkpoint around each block does, if there are blocks."""

    @abstractmethod
    def least(self, made: T) -> int:
        """Bytes that a candidate's peak is not below."""

    @abstractmethod
    def planned(self, plan: Plan) -> T:
        """What a plan of the model says."""

    @abstractmethod
    def of_lean_graph(self) -> CompiledSearch[T]:
        """The search of the graph as it is written for memory."""

    # --- the search ---

    def run(self) -> Candidate[T]:
        """The fastest within the budget. Raises ``Infeasible``."""
        known = self.known()
        likely = self.within_user is None or not self.within_user.below_unplanned
        first = self.stock(likely=likely) if known is None else None
        self.unplanned = known[0] if known is not None else unplanned_of(first)
        budget = self.budget = self.limit(self.unplanned)
        if self.held is not None:
            known = self.known()
            self.seen = {
                key: replace(c, needed=self.needs(c.replay)) for key, c in self.seen.items() if c.replay
            }
            first = None if first is None else self.stock(likely=likely)
        row = self.chosen({} if known is None else known[1], budget)
        if row is not None:
            self.row = row
            return self.again(row)
        best = first = first or self.stock(likely=likely)
        if budget is not None and first.needed > budget:
            try:
                best = found_or_kept(
                    self.kept, self.unplanned, budget, partial(self.within, budget, first),
                    self._instead if self.looks else None, self._least_row,
                )  # fmt: skip
            except Infeasible as no:
                raise no.with_advice((*no.advice, *self.failed)) from None
        self.notes += self.failed
        self.row = row_of(best, self.count, lean=self.leaned)
        self.kept.keep(self.unplanned, budget, self.row)
        return best

    def known(self) -> tuple[Unplanned, Mapping[str, Partition]] | None:
        """What earlier runs have found: what Inductor's own takes, and what was chosen, by budget."""
        return self.kept.read() if self.looks else None

    def chosen(self, known: Mapping[str, Partition], budget: int | None) -> Partition | None:
        """What was chosen before within this budget."""
        return known.get(str(budget))

    def _instead(self, row: Partition) -> Candidate[T]:
        """What was found for another budget, where this search has found nothing."""
        self._stays()
        return self.again(row)

    def _least_row(self) -> Partition:
        """The least that was found, of this graph or of the lean one."""
        searches = [self, *([] if self.lean_search is None else [self.lean_search])]
        found = [(c.needed, k, c) for k, one in enumerate(searches) for c in one.seen.values()]
        _, k, least = min(found, key=lambda row: row[:2])
        return row_of(least, self.count, lean=k > 0)

    def again(self, row: Partition) -> Candidate[T]:
        """A candidate that was chosen in an earlier run. Raises ``Outdated`` where it is not this graph's."""
        if row.lean:
            lean = self.lean()
            if lean is None:
                raise Outdated("a partition of another graph")
            found = lean.again(structs.replace(row, lean=False))
            self.count = row.lowered
            return found
        try:
            plan = self.plan_of(row)
            if plan is not None and self.model is not None:
                check(self.model.graph, plan)
                made: T | None = self.planned(plan)
            else:
                made = self.without_plan(row)
            if made is None:
                raise BadInput("a kept choice is Inductor's own, a checkpoint's, or of a plan")
        except TightshipError as error:
            raise Outdated(str(error)) from error
        self.count = row.lowered
        return Candidate(
            made, row.source, row.peak, row.needed, None, row.recomputed, row.seconds, row.share, plan
        )

    def plan_of(self, row: Partition) -> Plan | None:
        """The plan of what was chosen in an earlier run."""
        return plan_of(row)

    def without_plan(self, row: Partition) -> T | None:
        """What was chosen in an earlier run, where no plan says it."""
        known = row.share is not None or row.source == source_of(None)
        return self.seed(row.share) if known else None

    def within(self, budget: int, first: Candidate[T]) -> Candidate[T]:
        """The fastest within the budget; of the lean graph only where nothing of this one is, or, at first, nothing
        was near it. Where nothing fits, the least of both is looked for, whatever the budget is, so that what is
        reported can be had; it may fit. Where nothing can fit by the models of both, nothing else is looked at.
        Raises ``Infeasible``."""
        reached: list[int] = []
        best = self._tried(self, budget, first, reached, "briefly")
        lean = self.lean() if best is None else None
        modeled = None if best is not None else self._modeled(budget, first, lean, reached)
        other: Candidate[T] | None = None
        if lean is not None and modeled is None:
            lean.unplanned, lean.count = self.unplanned, self.count
            with suppress(NotLowered):
                other = lean.stock()
            best = other and self._tried(lean, budget, other, reached)
        if best is not None and lean is not None:
            best = self._unless_others(budget, first, best)
        if best is None:
            self._stays()
        if best is None and modeled is None:
            best = self._tried(self, budget, first, reached)
        if best is None and self.model is not None and budget > self.static:
            best = self._tried(self, budget, first, reached, "least")
            if best is None and lean is not None and other is not None:
                self._leans()
                best = self._tried(lean, budget, other, reached, "least")
        if best is None:
            raise Infeasible(
                budget=budget, lower_bound=self.static, best_peak=min(reached), compiled=True, modeled=modeled
            ) from None
        return best

    def _modeled(
        self, budget: int, first: Candidate[T], lean: CompiledSearch[T] | None, reached: Sequence[int]
    ) -> int | None:
        """The bytes that both graphs take at least by their models, where that is above the budget, and no replay has
        been below."""
        least = min(search.bound(first) for search in (self, lean) if search is not None)
        return least if budget < least <= min(reached) else None

    def bound(self, first: Candidate[T]) -> int:
        """Bytes that every candidate takes by the model, and by the workspaces of what was replayed ``first``."""
        model = self.model
        if model is None:
            return 0
        graph = with_workspaces(with_overwrites(model.graph, model.may), model.calls, first.workspaces())
        return int(lower_bound(graph, deadline=Deadline.after(BOUND)))

    def _tried(
        self, search: CompiledSearch[T], budget: int, first: Candidate[T], reached: list[int], how: How = "whole"
    ) -> Candidate[T] | None:  # fmt: skip
        """What a search, of this graph or the lean one, finds; or what it has ``reached``."""
        search.count = self.count
        try:
            return search.search(budget, first, how)
        except Infeasible as error:
            reached.append(error.best_peak)
            return None
        finally:
            self.count = search.count

    def _unless_others(self, budget: int, first: Candidate[T], lean: Candidate[T]) -> Candidate[T]:
        """What the lean graph came to, or what others would save of this one, where that is faster."""
        best = fastest([first, lean], self.shares, self, budget, self.static, self.aim)
        if best is not lean:
            self._stays()
        return best

    def lean(self) -> CompiledSearch[T] | None:
        """The search on the graph as it is written for memory: what is chosen is of it from now on."""
        if self.model is None:
            return None
        lean = self.of_lean_graph()
        if lean.model is None:
            return None
        graph = lean.model.graph
        beyond = simulate.replay(graph, simulate.baseline(graph)).peak - graph.static_bytes
        lean.dead = max(beyond // _DEAD, 1)
        self.lean_search, lean.notes, lean.failed = lean, self.notes, self.failed
        self._leans()
        return lean

    def _leans(self) -> None:
        self.leaned = True
        self.notes.append(LEAN)

    def _stays(self) -> None:
        """What is chosen is of this graph, not of the lean one."""
        self.leaned = False
        self.notes[:] = [n for n in self.notes if n != LEAN]

    def search(self, budget: int, first: Candidate[T], how: How = "whole") -> Candidate[T]:
        """The fastest within the budget of this graph; or what comes to the ``least`` bytes, if it is within the
        budget. ``briefly``: no more than what our plans come to at first, if that is far. Raises ``Infeasible``."""
        model, static = self.model, self.static
        if model is None:
            return fastest([first], STOCK, self, budget, static)
        if how == "least":
            aim = Aim(
                model, self.options, self.ours, static, static, first.workspaces(), self.aimed, thorough=True
            )
            return fastest([first, *aim.run()], (), self, budget, static, aim)
        if self.aim is None:
            self.aim = Aim(model, self.options, self.ours, budget, static, first.workspaces(), self.aimed)
        found = [first, *self.aim.run(briefly=how == "briefly")]
        fits = any(c.needed <= budget for c in found)
        return fastest(found, self.shares if fits or how == "whole" else (), self, budget, static, self.aim)

    # --- candidates ---

    def candidate(
        self,
        made: T,
        source: str,
        *,
        share: float | None = None,
        plan: Plan | None = None,
        likely: bool = True,
    ) -> Candidate[T]:
        """``made``, lowered and replayed once. Raises `NotLowered`."""
        key = self.key(made)
        if key not in self.seen:
            try:
                replay = self.replay(made, likely=likely)
            except NotLowered as error:
                self.failed += [] if str(error) in self.failed else [str(error)]
                raise
            self.count += 1
            peak, needed = max(replay.peaks), self.needs(replay)
            self.seen[key] = Candidate(made, source, peak, needed, replay, *self.cost(made), share, plan)
        return self.seen[key]

    def needs(self, replay: StepReplay) -> int:
        """Bytes that a candidate needs."""
        peak = max(replay.peaks)
        return max(peak, replay.static + place(replay)[1]) if self.placed else peak

    def ours(self, plan: Plan) -> Candidate[T]:
        return self.candidate(self.planned(plan), "tightship", plan=plan)

    def lowered(self, made: T, share: float | None) -> Candidate[T]:
        return self.candidate(made, source_of(share), share=share)

    def cost(self, made: T) -> tuple[int, float]:
        """How many kernels run again, and their seconds, modeled."""
        return (0, 0.0) if self.model is None else self.model.recompute_time(made)

    def seconds(self, made: T) -> float:
        return self.cost(made)[1]
