"""Variants of a training step that several ranks settle together: one of those with the same ops plans for them, and
nothing is sent before all are ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tightship.errors import Infeasible, Unplannable, Unsupported
from tightship.execute.agreement import (
    Given,
    Moved,
    Told,
    begun_alike,
    check_orders,
    check_plans,
    check_sequences,
    check_trained,
    follow,
    in_captured_order,
    in_one_order,
    leader_of,
    other_layers,
    read,
    refusal,
    told_of,
    written,
)
from tightship.execute.data_parallel import check_options, digest_of_options
from tightship.execute.in_step import InStep
from tightship.execute.looking import Looking
from tightship.execute.prepared import Prepared, Variant
from tightship.execute.ranks import Ranks
from tightship.execute.replicas import Replicas
from tightship.execute.split import Choice
from tightship.execute.stream import Streamed, moving
from tightship.frontends.torch import compat_distributed, compat_ops
from tightship.frontends.torch.capture.checks import DATA_PARALLEL
from tightship.frontends.torch.capture.incremental import Ending
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.rerun.live_step import Asked
from tightship.frontends.torch.structure import flatten
from tightship.plan import Plan

__all__ = ["OtherLayers", "PlannedTogether"]


class OtherLayers(Unplannable):  # noqa: N818: all ranks go on, in parts
    """Ranks have run other layers, so that their gradients cannot be averaged where each comes up."""

    def __init__(self) -> None:
        super().__init__(
            "a step of other layers on some ranks", "gradients are averaged once all of them are there"
        )


class PlannedTogether(Prepared):
    """What is captured and planned, as far as several ranks are concerned."""

    independent: bool
    """Whether each rank trains a model of its own."""
    _replicas: Replicas | None
    _looking: Looking | None
    """How several ranks look at what their step computes."""
    _preparing: bool

    def _known(self, asked: Asked, ending: Ending) -> Variant | None:
        """The variant that there is for what was asked for."""
        raise NotImplementedError

    def _check_readings(self, asked: Asked) -> None:
        """Raise ``Unplannable`` where the step cannot run while its code does."""
        raise NotImplementedError

    def _modes_of(self, ending: Ending) -> tuple[Any, ...]:
        raise NotImplementedError

    def _resolve_for_parts(self, program: Program) -> None:
        """Make a budget in percent one in bytes."""
        raise NotImplementedError

    def _settled_together(
        self, ranks: Ranks, ask: Callable[[], Asked], batch: Any, ending: Ending, begun: InStep | None
    ) -> tuple[Variant, Asked]:
        """Where a rank has no plan, all take part in making it: nothing is sent before all are ready, but for what
        the step has ``begun``, which is put back where others have begun something else, or nothing."""

        def own() -> tuple[Asked, Variant | None, Program]:
            asked = ask()
            known = self._known(asked, ending)
            if known is not None:
                return asked, known, known.captured
            assert asked.program is not None
            self._check_readings(asked)
            self._check_new(batch, flatten(batch))
            self._check_ranks(asked.program)
            return asked, None, asked.program

        def said(found: tuple[Asked, Variant | None, Program]) -> Told:
            _, known, program = found
            together = self._replicas is not None and not ending.leaves
            options = digest_of_options(self.optimizer) if together else ""
            row = known.told if known is not None else told_of(program)
            return row._replace(options=options, begun=0 if begun is None else begun.sent)  # type: ignore[no-any-return]

        (asked, variant, captured), told = ranks.agreed(self._what_runs(ending), own, said)
        if begun is not None and not begun_alike(told):
            begun.put_back()
        if self._looking is not None:
            self._looking.writes = self._looking.writes or any(Told.of(row).writes for row in told)
        differ = self._replicas is not None and self._replicas.may_differ
        if differ and not ending.leaves and other_layers(told):
            raise OtherLayers
        check_sequences(ranks, told)
        if not (differ and ending.leaves):
            check_trained(ranks, told, captured)
        check_options(ranks, [Told.of(row).options for row in told], self.optimizer)
        if any(row.plan is None for row in map(Told.of, told)):
            variant, told = self._planned_together(ranks, captured, variant, told, ending)
            variant.remember(asked.trace)
        assert variant is not None
        if not in_one_order(told):
            variant = self._in_one_order(ranks, variant, told, ending)
            variant.remember(asked.trace)
        self._use(variant)
        return variant, asked

    def _what_runs(self, ending: Ending) -> str:
        """On all ranks the same, or they would wait for one another at different points."""
        part = "backward pass" if ending.leaves else "step"
        return f"{'preparing' if self._preparing else 'running the code of'} the {part}"

    def _planned_together(
        self, ranks: Ranks, captured: Program, known: Variant | None, told: Sequence[Any], ending: Ending
    ) -> tuple[Variant, list[Any]]:
        """One rank of those with the same ops measures and plans for them; the budget in bytes is one for all."""
        leader, needed = leader_of(ranks, told)
        leads = leader == ranks.rank and needed

        def limit() -> int | None:
            if leads and known is None:
                self._bring_back()  # ops are measured on copies of it
                if ending.part:
                    self._resolve_for_parts(captured)
                self._resolve_limit(self._measured(captured)[0].graph)
            return self._limit

        _, limits = ranks.agreed("measuring", limit, lambda n: n)
        self._limit = max((n for n in limits if n is not None), default=None)

        def plan() -> str:
            if not leads:
                return ""
            if known is not None:
                return known.text or written(known.program, known.executor.plan)
            try:
                found = self._planned(captured, 0)
                return written(found.program, found.plan, self._moved(captured, found))
            except Infeasible as no:
                return refusal(no)

        _, plans = ranks.agreed("planning", plan, lambda text: text)

        check_plans(ranks, plans)

        def bound() -> Variant:
            if known is not None:
                return known
            given = read(captured, plans[leader])
            program, plan, changes = given.program, given.plan, self._stream_as(given)
            if changes:
                program = replace(changes[0].apply(program), notes=program.notes)
                plan = replace(plan, digest=program.graph.digest)
            self._looks.keep()
            variant = self._bound(captured, program, plan, self._modes_of(ending), part=ending.part)
            variant.changes, variant.text = changes, plans[leader] if changes else ""
            variant.told = told_of(captured, plan, program)
            self._variants.insert(0, variant)
            self._use(variant)
            return variant

        return ranks.agreed("verifying the plan and reserving memory", bound, lambda v: v.told)

    def _in_one_order(self, ranks: Ranks, own: Variant, told: Sequence[Any], ending: Ending) -> Variant:
        """Where batches of other shapes have plans that send in other orders: the plan for the largest is what all
        ranks do, each on tensors of its own sizes. Where ranks run other ops beside what they send, or that plan does
        not fit one of them, each plans for itself, and all send once and in the order of their code."""

        def plan() -> tuple[int, str]:
            return own.unplanned, "" if own.changes else written(own.program, own.executor.plan)

        _, plans = ranks.agreed("planning in one order", plan, lambda row: row)
        first = max(range(ranks.size), key=lambda r: (plans[r][0], -r))
        if not plans[first][1]:
            check_orders(ranks, told)

        def followed() -> Plan | None:
            if Told.of(told[ranks.rank]).plan == Told.of(told[first]).plan:
                return own.executor.plan
            try:
                return follow(own.program.graph, plans[first][1], self._limit)
            except (Unsupported, Infeasible):
                return None

        made, could = ranks.agreed("planning in one order", followed, lambda plan: plan is not None)

        def bound() -> Variant:
            if made is own.executor.plan:
                return own
            if made is not None:
                return self._replanned(own, own.program, made, ending)
            program = in_captured_order(own.program)
            return self._replanned(own, program, self._plan_within_budget(program.graph), ending)

        if not all(could):
            made = None
        variant, now = ranks.agreed("verifying the plan and reserving memory", bound, lambda v: v.told)
        check_orders(ranks, now)
        return variant

    def _replanned(self, own: Variant, program: Program, plan: Plan, ending: Ending) -> Variant:
        """The variant in the place of one of the same ops."""
        variant = self._bound(own.captured, program, plan, self._modes_of(ending), part=ending.part)
        variant.told = told_of(own.captured, plan, program)
        self._variants = [variant, *(v for v in self._variants if v is not own)]
        self._use(variant)
        return variant

    def _moved(self, captured: Program, found: Choice) -> Moved | None:
        """What streams by a plan that has not begun."""
        if not found.changes:
            return None
        (streamed,) = found.changes
        assert isinstance(streamed, Streamed)
        values = tuple(slot.value for slot in streamed.slots)
        return Moved(self._measured(captured)[0], values, streamed.pieces)

    def _stream_as(self, given: Given) -> tuple[Streamed, ...]:
        """From here on what a plan says streams."""
        if given.moved is None:
            return ()
        known, by_value = set(self._streams.items), {slot.value: slot for slot in given.program.slots}
        slots = [by_value[v] for v in given.moved.values]
        streamed = moving(given.program, slots, given.moved.pieces, self._streams)
        if known != set(self._streams.items):
            self._variants.clear()  # they have in memory what streams from now on
        self._put_away()
        return (streamed,)

    def _check_ranks(self, program: Program) -> None:
        """Raise ``Unsupported`` where ranks would drift apart without a word."""
        ranks = 1 if self.independent or self._replicas is not None else compat_distributed.world_size()
        if ranks > 1 and not _trains_together(program):
            sends = any(compat_distributed.is_collective(call.fn) for call in program.calls)
            what = (
                "a step whose gradients depend on no collective" if sends else "a step without a collective"
            )
            raise Unsupported(
                f"{what} on {ranks} ranks", "each rank would train a model of its own",
                f"give fit parallel=tightship.DataParallel(), or {DATA_PARALLEL}; "
                f"where that is what you want (an ensemble), fit(…, independent=True)",
            )  # fmt: skip


def _trains_together(program: Program) -> bool:
    """Whether what a step trains depends on what ranks send: not if that is a number for a log."""
    graph, sent = program.graph, set[int]()
    home = [v.storage for v in graph.values]
    for op, call in zip(graph.ops, program.calls, strict=True):
        reads = () if compat_ops.reads_shape_alone(call.fn) else op.inputs
        if compat_distributed.is_collective(call.fn) or not sent.isdisjoint(home[v] for v in reads):
            sent |= {*(home[v] for v in op.outputs), *op.mutates}
    trained = {home[s.value] for s in program.slots if s.role in ("parameter", "gradient")}
    trained |= {home[v] for v in program.results[len(program.results) - len(program.gradients) :]}
    return not sent.isdisjoint(trained)
