"""What ranks tell one another of a compiled step: one of those with the same ops decides, and all compile the same.

Collectives are ops of the compiled graph, in an order that follows from what was decided and how Inductor schedules.
Each rank says in which order its code sends, before it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tightship.errors import Infeasible, Unsupported
from tightship.execute.agreement import (
    Told,
    check_orders,
    check_plans,
    in_one_order,
    leader_of,
    refusal,
    told_of,
)
from tightship.execute.cache import Partition, Unplanned
from tightship.execute.interpreter import Executor
from tightship.execute.prepared import Variant
from tightship.execute.ranks import Ranks
from tightship.execute.train_step import TrainStep
from tightship.files import from_json, to_json
from tightship.frontends.torch.capture.flat import NoFormula
from tightship.frontends.torch.capture.incremental import Ending
from tightship.frontends.torch.program import Program

__all__ = [
    "Decision",
    "apart",
    "check_apart",
    "check_resolved",
    "decision",
    "read_decision",
    "told_of_compiled",
]


class Decision(msgspec.Struct, frozen=True):
    """Within how many bytes a step is compiled (None: any), what Inductor's own takes, and what was chosen."""

    limit: int | None
    unplanned: Unplanned
    chosen: Partition


def decision(limit: int | None, unplanned: Unplanned, chosen: Partition) -> str:
    """As other ranks are told of it."""
    return to_json(Decision(limit, unplanned, chosen)).decode()


def read_decision(text: str) -> Decision:
    """What `decision` has made."""
    return from_json(text.encode(), Decision)


_APART: Final = "apart"


def apart(no: NoFormula) -> str:
    """In the place of a decision: the update cannot be compiled."""
    return _APART + json.dumps([no.what, no.why])


def check_apart(texts: Sequence[str]) -> None:
    """Raises the ``NoFormula`` that a rank had."""
    for text in texts:
        if text.startswith(_APART):
            raise NoFormula(*json.loads(text.removeprefix(_APART)))


_OP_BY_OP: Final = "op by op"


def op_by_op(no: Unsupported | None = None) -> str:
    """In the place of a decision: the step is not compiled, as this rank has found out or knows already."""
    return _OP_BY_OP + json.dumps("" if no is None else f"{no.what} is not supported: {no.why}")


def why_op_by_op(texts: Sequence[str]) -> str | None:
    """Why ranks do not compile a step, empty if that has been said; None if all compile it."""
    found = [json.loads(text.removeprefix(_OP_BY_OP)) for text in texts if text.startswith(_OP_BY_OP)]
    return max(found, default=None)


def check_resolved(ranks: Ranks, told: Sequence[Any], *, resolved: bool) -> None:
    """Raises ``PeerFailed`` where a percentage would be of another step on each rank."""
    rows = [Told.of(row) for row in told]
    if not resolved and len({row.ops for row in rows}) > 1:
        place = "a budget in percent of other first steps (give bytes, or begin with batches of one shape)"
        raise ranks.differ(place, [f"a step of {row.ops[:8]}" for row in rows])


def told_of_compiled(captured: Program, sends: Sequence[int]) -> Told:
    """What a rank says of its step when it is compiled, which ``sends`` the program's collectives in that order."""
    digest = hashlib.sha256(repr(tuple(sends)).encode()).hexdigest()[:32]
    return told_of(captured)._replace(plan=(len(sends), digest))


class CompiledTogether(TrainStep):
    """A step whose parts are compiled, as far as several ranks are concerned."""

    def _compiled(
        self, program: Program, beside: int, given: Decision | None = None, *, follows: bool = False
    ) -> Any:
        """What runs the program. ``given``: what another rank has decided, of the same tensors or, if this one
        ``follows``, of others."""
        raise NotImplementedError

    def _compiled_variant(
        self, captured: Program, executor: Any, modes: tuple[Any, ...], part: str
    ) -> Variant:
        raise NotImplementedError

    def _note_op_by_op(self, why: str) -> None:
        """Warn, once, that a step is not compiled, and run op by op."""
        raise NotImplementedError

    def _planned_together(
        self, ranks: Ranks, captured: Program, known: Variant | None, told: Sequence[Any], ending: Ending
    ) -> tuple[Variant, list[Any]]:
        """One rank of those with the same ops decides; then all compile that, and say in which order it sends."""
        leader, needed = leader_of(ranks, told)
        resolved = (
            self._limit is not None or self.settings.budget is None or self.settings.budget.bytes is not None
        )
        check_resolved(ranks, told, resolved=resolved)
        made: list[Any] = []

        def decided() -> str:
            if leader != ranks.rank or not needed:
                return ""
            if known is not None:
                return op_by_op() if _runs_op_by_op(known) else known.text
            try:
                made.append(self._compiled(captured, 0))
            except NoFormula as no:
                return apart(no)
            except Unsupported as no:
                if self.settings.strict:
                    raise
                return op_by_op(no)
            except Infeasible as no:
                return refusal(no)
            return decision(self._limit, made[0].unplanned, made[0].chosen)

        _, texts = ranks.agreed("compiling", decided, lambda text: text)
        if (why := why_op_by_op(texts)) is not None:
            if why:
                self._note_op_by_op(why)
            return self._op_by_op_together(ranks, captured, known, ending)
        check_plans(ranks, texts)

        def compiled() -> Variant:
            check_apart(texts)
            if known is not None:
                return known
            given = read_decision(texts[leader])
            self._limit = given.limit if self._limit is None else self._limit
            executor = made[0] if made else self._compiled(captured, 0, given)
            if ending.part != "update":
                self._note_return(captured.graph)
            variant = self._compiled_variant(captured, executor, self._modes_of(ending), ending.part)
            variant.text, variant.told = texts[leader], told_of_compiled(captured, executor.sends)
            self._variants.insert(0, variant)
            self._use(variant)
            return variant

        return ranks.agreed("compiling and reserving memory", compiled, lambda v: v.told)

    def _op_by_op_together(
        self, ranks: Ranks, captured: Program, known: Variant | None, ending: Ending
    ) -> tuple[Variant, list[Any]]:
        """All plan a step as in exact mode, also those that have compiled it."""
        if known is not None and not _runs_op_by_op(known):
            self._variants.remove(known)
            known = None
        _, told = ranks.agreed(
            "planning op by op",
            lambda: known.told if known is not None else told_of(captured),
            lambda row: row,
        )
        if all(Told.of(row).plan is not None for row in told):
            assert known is not None
            return known, told
        return super()._planned_together(ranks, captured, known, told, ending)

    def _in_one_order(self, ranks: Ranks, own: Variant, told: Sequence[Any], ending: Ending) -> Variant:
        """Where batches of other shapes have plans that gather in another order: all do what was decided for the
        largest. If one of them is not compiled, none is."""
        _, kinds = ranks.agreed("comparing ways to run", lambda: _runs_op_by_op(own), lambda yes: yes)
        if any(kinds):
            own, told = self._op_by_op_together(ranks, own.captured, own, ending)
            return own if in_one_order(told) else super()._in_one_order(ranks, own, told, ending)

        def said() -> tuple[int, str]:
            return own.unplanned, own.text

        _, texts = ranks.agreed("compiling in one order", said, lambda row: row)
        first = max(range(ranks.size), key=lambda r: (texts[r][0], -r))

        def compiled() -> Variant:
            if Told.of(told[ranks.rank]).plan == Told.of(told[first]).plan:
                return own
            executor = self._compiled(own.captured, 0, read_decision(texts[first][1]), follows=True)
            variant = self._compiled_variant(own.captured, executor, own.modes, own.part)
            variant.text = decision(self._limit, executor.unplanned, executor.chosen)
            variant.told = told_of_compiled(own.captured, executor.sends)
            self._variants = [variant, *(v for v in self._variants if v is not own)]
            self._use(variant)
            return variant

        variant, now = ranks.agreed("compiling and reserving memory", compiled, lambda v: v.told)
        check_orders(ranks, now)
        return variant


def _runs_op_by_op(variant: Variant) -> bool:
    return isinstance(variant.executor, Executor)
