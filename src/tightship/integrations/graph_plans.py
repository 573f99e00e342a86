"""Plans of one graph that torch.compile gives the backend, within its part of a budget that others share."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from tightship.errors import Infeasible
from tightship.execute.heap import faster_on_heap, plan_on_heap
from tightship.graph import Graph
from tightship.integrations.accounting import Ledger
from tightship.integrations.graph_entries import Ahead, Part, Place
from tightship.integrations.torch_inductor import CompiledGraph
from tightship.integrations.torch_partition import CompileOptions, Cut, FrameArena, PlannedGraph
from tightship.plan import Plan
from tightship.planners.default import Options as PlannerOptions
from tightship.planners.default import plan as default_plan
from tightship.planners.default import seconds_left
from tightship.planners.hints import matches, parse_hints
from tightship.simulate import baseline, replay

__all__ = ["GraphPlans", "Owner", "Whole"]


class Owner(Protocol):
    """What is used of everything that is planned under one call of torch.compile (`torch_compile.Session`)."""

    options: CompileOptions
    ledger: Ledger
    graphs: list[PlannedGraph | CompiledGraph]
    arenas: dict[int, FrameArena]

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Whole:
    """A graph that keeps everything: the most bytes it needs beyond its inputs, what is ``kept`` between its passes,
    the results it has ``handed`` out, and the gradients, in all and of ``parameters``. ``rest``: what stays between
    its passes, which is what is handed out alone where what it saves is not kept. ``boundary`` is the op between the
    passes."""

    boundary: int
    need: int
    kept: int
    handed: int
    rest: int
    gradients: int
    parameters: int


@dataclass(frozen=True)
class _Held:
    """At most ``rest`` bytes beyond the inputs stay at ``boundary``, the op between the passes."""

    boundary: int
    rest: int

    def plan(self, graph: Graph, limit: int, options: PlannerOptions, known: dict[int, Graph]) -> Plan:
        """A plan within ``limit`` bytes; ``known``: what was planned for others, by the bytes taken, with what plans
        of it reached."""
        held = graph.holding(self.boundary, limit, self.rest)
        held = known.setdefault(held.ops[self.boundary].workspace, held)
        plan = default_plan(held, limit, options)
        taken = held.ops[self.boundary].workspace - graph.ops[self.boundary].workspace
        if not taken:
            return plan
        line, before = replay(graph, plan.steps), replay(graph, baseline(graph))
        bound = max(plan.lower_bound - taken, graph.static_bytes)
        return replace(plan, peak=line.peak, peak_before=before.peak, lower_bound=bound)


@dataclass(frozen=True)
class GraphPlans:
    """Plans of a graph that is called at ``place``; ``followed``: others are known to follow, behind a graph break or
    of other modules. ``began``: when planning it did, by ``time.perf_counter``."""

    session: Owner
    place: Place
    followed: bool
    began: float
    _held: dict[int, Graph] = field(default_factory=dict, init=False)

    def repeated(self, graph: Graph, room: int, whole: Whole, ahead: Ahead) -> Plan:
        """One plan for this call and those ``ahead``, which have ``room`` bytes beyond their inputs together; where
        other graphs follow that nobody knows, half of that if it will do.

        The room is divided as `Ahead.parts` says.
        Where nothing is found the plan keeps as little as it can, and what is said is said of what is called.
        """
        static = graph.static_bytes
        gradients = 0 if self.session.ledger.accumulate else whole.parameters
        if ahead.elsewhere:
            most, _ = ahead.parts(room, whole.need, whole.rest, gradients)[0]
            return self.within(graph, static + most)
        budget = self.session.ledger.budget
        others = (
            self.followed and budget is not None and budget.bytes is not None
        )  # nobody knows what they need
        tried = []
        for most in (room // 2, room) if others else (room,):
            for peak, rest in ahead.parts(most, whole.need, whole.rest, gradients):
                try:
                    return self.within(graph, static + peak, _Held(whole.boundary, rest))
                except Infeasible as no:
                    tried.append((most, rest + no.best_peak - static - peak, peak))
        peak, rest = max((p, r) for most, r, p in tried if most == room)
        try:
            return self.within(graph, static + peak, _Held(whole.boundary, rest))
        except Infeasible:  # gradients of calls ahead may take more than there is: that is missing, too
            return self.within(graph, static + min(peak, room - ahead.count * gradients))

    def first(self, graph: Graph, room: int | None, static: int, whole: Whole) -> Plan | None:
        """The plan of a first training step in which others share the budget and nobody knows yet what they need: it
        takes half of what it would, if that will do, and keeps as little as it can between its passes, if others
        follow. It is made `again` when all are known. None where everything can be kept, or nothing is found."""
        ledger, budget = self.session.ledger, self.session.ledger.budget
        if budget is None or room is None or whole.boundary < 0 or ledger.settled:
            return None
        if not self.followed and not ledger.others_train(self.place):
            return None
        need = whole.need
        if not ledger.postponed:
            if (share := ledger.share_of(self.place, static, whole.rest)) is not None:
                if share >= whole.rest:
                    return None
            elif need <= room // 4 or room <= 0:
                return None
            else:
                need = min(need, room)
        rest = min(whole.handed, whole.rest) if self.followed else whole.rest
        most, limit = (graph.static_bytes + n for n in (need // 2, need))
        return self._keeping(graph, most, limit, _Held(whole.boundary, rest))

    def _keeping(self, graph: Graph, most: int, limit: int, held: _Held) -> Plan | None:
        """A plan within ``most`` bytes or somewhat more, at most ``limit``, that leaves what may stay, or what it has
        to; None where none is found.

        A plan whose peak is above its limit leaves at most so much more than it may. The first that was reached is
        asked for as it is, after a try at its peak that leaves no more; then, within ``limit``, more and more may
        stay."""
        boundary, rest = held.boundary, held.rest
        try:
            return self.within(graph, most, held)
        except Infeasible as no:
            reached, left = no.best_peak, rest + no.best_peak - most
        tries = [(reached, rest), (reached, left)] if reached <= limit else []
        for peak, stays in tries:
            with suppress(Infeasible):
                return self.within(graph, peak, _Held(boundary, stays))
        rest = left if most == limit else rest
        for _ in range(3):
            try:
                return self.within(graph, limit, _Held(boundary, rest))
            except Infeasible as no:
                rest += no.best_peak - limit
        return None

    def again(self, graph: Graph, part: Part | None, room: int | None, whole: Whole) -> Plan | None:
        """A plan within its ``part`` of the budget, once all graphs are known, with at most ``room`` bytes beyond its
        inputs; None where there is none."""
        if part is None or whole.boundary < 0:
            return None
        limit = graph.static_bytes + (part.most if room is None else min(part.most, room))
        held = None if part.rest >= whole.rest else _Held(whole.boundary, part.rest)
        try:
            return self.within(graph, limit, held)
        except Infeasible:
            return None

    def resting(self, graph: Graph, plan: Plan, where: Cut, static: int, whole: Whole) -> Plan:
        """``plan``; or, where others follow to which it would leave less than if everything was kept, one that keeps
        less between its passes."""
        if not self.followed or whole.boundary < 0 or plan.budget is None:
            return plan
        share = self.session.ledger.share_of(self.place, static, whole.rest)
        rest = whole.rest if share is None else share
        if where.resident - graph.static_bytes <= rest:
            return plan
        try:
            return self.within(graph, plan.budget, _Held(whole.boundary, rest))
        except Infeasible:
            return plan

    def halved(self, graph: Graph, free: int | None, training: bool) -> Plan:
        """A plan that needs at most ``free`` bytes beyond the inputs. Where more graphs are to come, and
        nobody knows yet what they need: at most half of that or, if that is too little, about the least
        possible."""
        if free is None:
            return self.within(graph, None)
        whole = graph.static_bytes + free
        budget, ledger = self.session.ledger.budget, self.session.ledger
        known = budget is not None and budget.bytes is not None
        if free > 0 and self.followed and (known or ledger.resolved_before(self.place, training)):
            limit = graph.static_bytes + free // 2
            for _ in range(2):
                try:
                    return self.within(graph, limit)
                except Infeasible as error:
                    limit = error.best_peak
                if limit >= whole:
                    break
        return self.within(graph, whole)

    def within(self, graph: Graph, limit: int | None, held: _Held | None = None) -> Plan:
        """With an arena, unless one (and results beside it) needs more than the budget although the peak
        does not, or, on the CPU, only fits with more recomputation. No arena where what stays between the passes is
        ``held``: another call's would lie there."""
        if limit is not None and limit < 0:  # others take more than there is
            try:
                return self.within(graph, 0, held)
            except Infeasible as no:
                raise no.with_budget(limit) from None
        options, notes = self._options(graph)
        arena = self.session.options.arena and held is None

        def now(place: bool) -> PlannerOptions:
            # Where a pass runs on the heap, for its arena is taken, no result lies over an input.
            left = seconds_left(options.seconds, time.perf_counter() - self.began)
            return replace(options, reuse=False, seconds=left, place=place)

        if held is not None and limit is not None:
            plan = held.plan(graph, limit, now(False), self._held)
            return replace(plan, notes=(*plan.notes, *notes))
        try:
            plan = default_plan(graph, limit, now(arena))
        except Infeasible as error:
            if error.impossible or not arena:
                raise
            plan = plan_on_heap(graph, limit, now(False))
        else:
            if limit is not None:
                plan = faster_on_heap(graph, limit, plan, lambda: default_plan(graph, limit, now(False)))
        return replace(plan, notes=(*plan.notes, *notes))

    def _options(self, graph: Graph) -> tuple[PlannerOptions, tuple[str, ...]]:
        """The options without hints that are about other graphs of a model with graph breaks; a note of those."""
        options = self.session.options.planner
        if not self.followed and not self.session.graphs:
            return options, ()
        here = {h: matches(graph, h[0]) for h in parse_hints(options.hints)}
        notes = tuple(
            f"no module of this graph is meant by the hint {a}={b}" for (a, b), yes in here.items() if not yes
        )
        return replace(options, hints=",".join(f"{a}={b}" for (a, b), yes in here.items() if yes)), notes

    def deferred(self, graph: Graph, static: int, whole: Whole, least: int) -> Plan | None:
        """A plan where a percentage of the graphs so far, or what they leave of a budget in bytes, is too little for
        this one, and others may follow: one that leaves no more between its passes than its part of a percentage, or
        as little as it can, within ``least`` bytes if there is one. Whether all meet the budget is known, and said,
        when the first backward pass begins, or with the last graph."""
        ledger, training = self.session.ledger, whole.boundary >= 0
        rest = ledger.share_of(self.place, static, whole.rest)
        if rest is None:
            if not ledger.postponed and not (training and self.followed and ledger.postpone()):
                return None
            rest = min(whole.handed, whole.rest)
        elif not self.followed and not ledger.others_train(self.place):
            return None
        if not training:
            try:
                return None if ledger.settled else self.within(graph, least)
            except Infeasible:
                return self.within(graph, None)
        half, limit = (graph.static_bytes + n for n in (whole.need // 2, whole.need))
        return self._keeping(graph, min(least, half), limit, _Held(whole.boundary, rest))
