"""fit's compiled mode: forward pass, backward pass and update as what Inductor makes of them in one graph.

Each kind of batch, and each part of a step that runs by itself, is captured as in exact mode (a `Program`, whose
code runs in every step and is compared with what was captured), written out as one fx graph (``capture.flat``) and
compiled. Problem, measure and guarantee are those of the torch.compile backend's compiled mode
(``integrations.torch_inductor``), without a boundary between two passes: the planner decides on a model of fused code
(``capture.fused``) in which order ops run and what runs again; the lines that Inductor lowers a candidate to are
replayed to the byte; what runs was replayed and is within the budget, or ``Infeasible`` has the least peak replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final, cast

from tightship import simulate
from tightship.errors import Infeasible, Unsupported
from tightship.execute.binding import Binding
from tightship.execute.compiled_code import Compilation, Compiled, WholePlan
from tightship.execute.compiled_ranks import CompiledTogether, Decision, read_decision
from tightship.execute.interpreter import Fallback
from tightship.execute.parts import bytes_of_inputs, gradients_of
from tightship.execute.prepared import Thrashing, Variant, log_plan
from tightship.execute.train_variants import callers_level
from tightship.frontends.torch import compat_inductor
from tightship.frontends.torch.capture.expectations import Expectation
from tightship.frontends.torch.capture.flat import NoFormula, fixed_settings
from tightship.frontends.torch.capture.number_inputs import (
    OpNumber,
    changed_places,
    places_said_by_data,
    takes,
)
from tightship.frontends.torch.capture.readings import Read
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.program import Program
from tightship.plan import Plan

__all__ = ["CompiledStep", "WholePlan"]


_NUMBER: Final = 64
"""Bytes that a number takes as an input, at least."""


class CompiledStep(CompiledTogether):
    """A `TrainStep` whose parts are compiled. ``plan`` is a `WholePlan`.

    Results and what is trained are Inductor's: of the same numbers as eager's, rounded as fused kernels do, with
    masks that Inductor draws. Learning rates, betas, momenta and weight decay are read at each step; a change of any
    other number that is of the ops compiles again, which ``notes`` says.
    """

    _shares_updates = _looks_beside_ranks = False

    def __init__(self, *args: Any, **more: Any) -> None:
        compat_inductor.require_inductor()
        self._apart = False  # whether the update is not compiled
        self._update_peak = 0
        super().__init__(*args, **more)
        optimizers = each(self.optimizer) if self.optimizer is not None else ()
        if self.loop.scaler is not None and any(hasattr(o, "_step_supports_amp_scaling") for o in optimizers):
            raise Unsupported(
                "a GradScaler with a fused optimizer in compiled mode", "its step unscales gradients by itself",
                "leave out fused=True: a compiled step is fused anyway",
            )  # fmt: skip

    def _modes(self) -> tuple[Any, ...]:
        return *super()._modes(), () if self._apart else fixed_settings(self.optimizer)

    @property
    def _in_parts(self) -> bool:
        return self._apart or super()._in_parts

    def __call__(self, batch: Any) -> Any:
        with self._exclusive():
            self._renew()
        if not self._variants and not self._in_parts and self._for_now() is None:
            self._prepare_first(batch)
        return super().__call__(batch)

    def _prepare_first(self, batch: Any) -> None:
        """Says whether the update is apart, before the code has run for good."""
        if self._tries_again:
            with self._exclusive():
                self._plan_once_more(self._filled(batch))
        else:
            self.prepare(batch)

    def _prepare_now(self, batch: Any) -> Plan:
        try:
            return super()._prepare_now(batch)
        except NoFormula as no:
            if self._in_parts:
                raise
            self._step_apart(no)
            return super()._prepare_now(batch)

    def _step_apart(self, no: NoFormula) -> None:
        self._apart = True
        note = (
            f"the update runs op by op, as in exact mode, after a compiled backward pass: {no.what}: {no.why}"
        )
        self._notes += [] if note in self._notes else [note]

    @property
    def plan(self) -> Any:
        return self._latest.executor.plan

    def _variant(
        self, captured: Program, modes: tuple[Any, ...], *, part: str = "", beside: int = 0
    ) -> Variant:
        if part == "update" and self._apart:
            return super()._variant(captured, modes, part=part, beside=beside)
        look = _first_look(captured)
        if look is not None:
            self._note_look(look)
            return super()._variant(captured, modes, part=part, beside=beside)
        if part != "update":
            self._note_return(captured.graph)
        try:
            executor = self._first_compiled(captured, beside)
        except NoFormula as no:
            if part != "update":
                raise
            self._step_apart(no)
            return super()._variant(captured, modes, part=part, beside=beside)
        except Unsupported as no:
            if self.settings.strict or self.ranks is not None:
                raise
            found = super()._variant(captured, modes, part=part, beside=beside)
            self._note_op_by_op(f"{no.what} is not supported: {no.why}")
            return found
        return self._compiled_variant(captured, executor, modes, part)

    def _note_op_by_op(self, why: str) -> None:
        self._warn_once(
            f"the step is not compiled and runs op by op, as in exact mode, within the budget: {why}"
        )

    def _warn_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)
            warnings.warn(note, Fallback, stacklevel=callers_level())

    def _note_look(self, place: str) -> None:
        """Says that a step is not compiled whose code looks at what it computes. Raises ``Unsupported`` if that is to
        be strict."""
        if self.settings.strict:
            raise Unsupported(
                f"looking at what a step computes at {place}, in compiled mode",
                "a compiled step runs as a whole, when its code has ended",
                'look at what the step returns instead, use mode="exact", or leave out strict=True: such steps '
                "then run op by op, within the budget",
            )  # fmt: skip
        self._warn_once(
            f"steps whose code looks at what they compute, at {place}, run op by op, as in exact mode, within the "
            "budget: a compiled step runs as a whole. Look at what the step returns instead"
        )

    def _first_compiled(self, captured: Program, beside: int) -> Any:
        """With the numbers that data have said as inputs, where there is room for these."""
        numbers = places_said_by_data(captured)
        try:
            return self._compiled(captured, beside, numbers=numbers)
        except Infeasible as no:
            if no.missing > _NUMBER * len(numbers):  # it is not for want of room for them
                raise
        return self._compiled(captured, beside)

    def _compiled_variant(
        self, captured: Program, executor: Any, modes: tuple[Any, ...], part: str
    ) -> Variant:
        captured.forget_samples()
        log_plan(executor.plan, part)
        return Variant(
            captured, executor, Binding(captured, self.model, self.optimizer), modes, captured, part=part
        )

    def _compiled(
        self, program: Program, beside: int, given: Decision | None = None, *, follows: bool = False,
        numbers: Collection[OpNumber] = (), before: Compiled | None = None,
    ) -> Any:  # fmt: skip
        alone = self.ranks is None
        with self.settings.progress.stage("compiling"), compat_inductor.compiling():
            return Compilation(
                program, self.optimizer, self.settings, self._resolved, beside, given, alone=alone,
                follows=follows, numbers=numbers, before=before,
            ).run()  # fmt: skip

    def _resolved(self, static: int, peak: int, beside: int) -> int | None:
        """The most bytes that a part may take, whose peak was ``peak`` as Inductor has it. A percentage is of the
        first one."""
        budget = self.settings.budget
        if self._limit is None and budget is not None:
            self._limit = budget.resolve(max(peak + beside, self._update_peak), static=static + beside)
        return None if self._limit is None else max(self._limit - beside, 0)

    def _change(self, variant: Variant, captured: Program, numbers: dict[int, tuple[Any, ...]]) -> None:
        """What was compiled runs with other numbers where they are inputs. Where they are not, it is compiled again,
        and those that have changed are inputs from then on, where they can be."""
        executor = variant.executor
        if not isinstance(executor, Compiled):
            super()._change(variant, captured, numbers)
            return
        places = changed_places(variant.captured, numbers)
        if executor.takes(places, captured):
            executor.change_numbers(captured)
        else:
            variant.executor = self._compiled_again(variant, captured, places)
        captured.forget_samples()
        variant.program = variant.captured = captured
        variant.binding = Binding(captured, self.model, self.optimizer)
        self._share_arena()

    def _compiled_again(self, variant: Variant, captured: Program, places: Collection[OpNumber]) -> Any:
        before = cast(Compiled, variant.executor)
        ops = ", ".join(sorted({captured.graph.ops[n.op].name for n in places}))
        text = f"compiled again: another number in {ops}"
        beside = 0 if variant.part != "update" else self._beside
        inputs = frozenset(n for n in places if takes(captured, n))
        if self.ranks is None and inputs == places:
            self._note(f"{text}, which is an input of the compiled step from now on")
            known = (n for n in before.flat.op_numbers if takes(captured, n))
            with suppress(Infeasible):  # it takes some bytes more, which may be more than there are
                return self._compiled(captured, beside, numbers=inputs.union(known), before=before)
        text = f"{text}, which compiled code has in it"
        self._note(text)
        warnings.warn(
            f"{text}. What changes often belongs into a tensor of the batch", Thrashing, stacklevel=7
        )
        given = read_decision(variant.text) if variant.text else None
        return self._compiled(
            captured, beside, given, before=before
        )  # the order of what is sent stays as it is

    def _note(self, text: str) -> None:
        self._notes += [] if text in self._notes else [text]

    def _resolve_for_parts(self, program: Program) -> None:
        """The budget is resolved when the first part is lowered. An update that is not compiled counts as it is in
        exact mode."""
        if (
            self._apart
            and self._limit is None
            and self.settings.budget is not None
            and self._updates is not None
        ):
            graph = self._measured(self._captured_update(gradients_of(program)))[0].graph
            self._update_peak = (
                bytes_of_inputs(program) + simulate.replay(graph, simulate.baseline(graph)).peak
            )

    def _of_all_parts(self, no: Infeasible, batch: Any, backward: Program, *, adds: bool) -> Infeasible:
        return no


def _first_look(program: Program) -> str | None:
    """Where the step's code first looks at what it computes, or goes by an answer about that."""
    for call in program.calls:
        if isinstance(call.fn, Read) or (isinstance(call.fn, Expectation) and not call.fn.raises):
            return call.fn.place
    return None
