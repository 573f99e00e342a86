"""A compiled graph's part of a budget, which is shared as in exact mode (`accounting`): its limits before it is
compiled, what it takes when it is, and where its passes begin and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import Infeasible
from tightship.execute.cache import Unplanned
from tightship.execute.compiled import StepReplay
from tightship.frontends.torch import compat, compat_capture
from tightship.integrations.accounting import Ledger
from tightship.integrations.graph_entries import Ahead, Entry, Place

__all__ = ["Shares"]


@dataclass
class Shares:
    """A graph's part of the budget. ``storages``: the identities and bytes of the caller's tensors, of so many
    bytes in all; ``given``: the same of arguments; ``last``: no other graph follows; ``ahead``: calls of it that
    do; ``passed_on``: bytes of its gradients that an earlier graph's backward pass begins with; ``deferred``: a
    percentage of the graphs so far, or half of what is left in bytes, is too little for it: whether all meet the
    budget is known when the others are; ``inner``: code calls it that was to be compiled, too; ``stepped``: bytes
    of gradients among its inputs, which are there while it runs and not all along; ``attempt``: which division of
    the bytes for calls ahead is tried; ``missing``: bytes that others take beyond the budget."""

    ledger: Ledger
    place: Place
    storages: Callable[[int], Mapping[int, int]]
    given: Callable[[Sequence[Any]], Mapping[int, int]]
    last: bool
    ahead: Ahead = Ahead()  # noqa: RUF009
    passed_on: int = 0
    deferred: bool = False
    inner: bool = False
    stepped: int = 0
    attempt: int = 0
    divisions: int = 1
    entry: Entry | None = None
    static: int = 0
    missing: int = 0
    # Bytes that calls ahead are left, and gradients that each hands out.
    _division: tuple[int, int] | None = None

    def describe(self) -> object:
        """What limits depend on besides this graph, in short: kept code of another one is found out by its limit."""
        return (
            self.last,
            len(self.ledger.entries),
            self.ledger.accumulate,
            self.ledger.step is None,
            self.ahead,
            self.deferred,
            self.inner,
            self.attempt,
        )

    @property
    def followed(self) -> bool:
        """Whether other graphs, or calls of this one, are known to follow."""
        return bool(self.ahead.count) or self.ahead.others or self.inner or not self.last

    @property
    def percent(self) -> bool:
        return self.ledger.budget is not None and self.ledger.budget.bytes is None

    def limit(self, static: int, need: int) -> int | None:
        """The most bytes for a forward pass alone, of ``static`` bytes of inputs, that needs ``need`` beyond them;
        None without a budget."""
        self.static = self.ledger.new_static(self.place, self.storages(static))
        later = not self.ledger.binding(training=False) or (self.deferred and self.percent)
        if later and self.ledger.budget is not None:
            return None
        beside = self._beside_inputs()
        free = self.ledger.available(self.place, self.static, need + beside, training=False)
        return None if free is None else self._left(static + free - beside)

    def training_limit(self, u: Unplanned) -> tuple[int | None, int | None]:
        """The most bytes for a graph that takes ``u`` as Inductor has it; and, where calls of it are ahead, how many
        beyond its inputs may stay between its passes."""
        self.static, ledger = self.ledger.new_static(self.place, self.storages(u.static)), self.ledger
        need, gradients = max(u.peaks) - u.static, self._stay(u.handed[-1])
        self._division = None
        rest = u.handed[0] if self.ahead.elsewhere else u.rest
        room = ledger.available(
            self.place, self.static, need, training=True, results=u.handed[0] if self.last else 0,
            gradients=gradients, parameters=gradients, rest=rest, ahead=self.ahead,
        )  # fmt: skip
        if room is not None and self.deferred and self.percent:
            return u.static + max(room, need), None
        if room is not None and self.ahead.others and not self.deferred and not self.percent:
            room //= 2  # others follow, and nobody knows what they need
        if room is None or not self.ahead.count:
            return None if room is None else self._left(u.static + room), self._most_kept(u)
        parts = self.ahead.parts(room, need, rest, gradients)
        self.divisions = len(parts)
        most, rest = parts[min(self.attempt, len(parts) - 1)]
        if self.ahead.elsewhere:
            return self._left(u.static + most), None
        self._division = room - most, gradients
        return u.static + most, rest

    def beyond(self, rest: int) -> int:
        """Bytes that calls ahead which keep ``rest`` between their passes take beyond what the division tried leaves
        them; negative where they leave some of it to the one that runs, 0 where nothing is divided."""
        if self._division is None:
            return 0
        others, gradients = self._division
        return self.ahead.count * max(rest, gradients) - others

    def of_all_calls(self, no: Infeasible) -> Infeasible:
        """``no``, which is about one call, with what all need who share its bytes."""
        if not self.ahead.count or no.at:  # or it is about all of them already
            return no
        return no.needing(no.missing * (1 if self.ahead.elsewhere else 1 + self.ahead.count))

    def _beside_inputs(self) -> int:
        """Bytes of gradients among the inputs that nobody has counted as there all along."""
        return 0 if self.ledger.accumulate else self.stepped

    def _left(self, room: int) -> int:
        """What there is, nothing where others take more than the budget."""
        self.missing = max(-room, 0)
        return max(room, 0)

    def _most_kept(self, u: Unplanned) -> int | None:
        """Of a percentage, where others follow in the first step: its part of what it would keep between its passes,
        as they have theirs."""
        if self.deferred or not self.followed or self.ledger.settled or self.ahead.elsewhere:
            return None
        share = self.ledger.share_of(self.place, self.static, u.rest)
        return None if share is None or share >= u.rest else max(share, u.handed[0])

    def _stay(self, handed: int) -> int:
        """Bytes of the gradients that stay, of those that are handed out."""
        return 0 if self.ledger.accumulate else max(handed - self.passed_on, 0)

    def enter(self, replay: StepReplay, unplanned: StepReplay | Unplanned) -> None:
        """Takes note of what the graph takes. Raises ``Infeasible`` where other graphs are left too little."""
        training, beside = len(replay.peaks) > 1, self._beside_inputs()
        self.entry = Entry(
            static=self.static,
            dynamic=max(replay.peaks) - replay.static + beside,
            rest=replay.rest if training else 0,
            gradients=self._stay(replay.handed[-1]) if training else 0,
            unplanned=max(unplanned.peaks) - unplanned.static + beside,
            unplanned_rest=unplanned.rest if training else 0,
            results=replay.handed[0] if self.last else 0,
            forward=replay.peaks[0] - replay.static + beside,
            beside=self.ledger.beside_earlier(self.place, training),
            place=self.place,
            handed=replay.handed[0],
            parameters=self._stay(replay.handed[-1]) if training else 0,
        )
        elsewhere = training and self.ahead.elsewhere
        entry = self.entry.elsewhere() if elsewhere else self.entry
        self.ledger.enter(self.place, entry, follow=self.followed)

    def ends(self, saved: Sequence[Any]) -> None:
        """The backward pass begins, for which these tensors were made and saved."""
        assert self.entry is not None
        self.ledger.settle()
        self.ledger.begin(self.entry, dict, backward=_mark(saved))

    def begin(self, args: Sequence[Any]) -> Place:
        """The forward pass (or the only one) begins, with ``args``."""
        assert self.entry is not None
        elsewhere = compat_capture.saving_hooks()
        return self.ledger.begin(self.entry, lambda: self.given(args), elsewhere=elsewhere)

    def keeps(self, place: Place, handed: Sequence[Any], saved: Sequence[Any]) -> None:
        """The forward pass is over, which has ``handed`` out these tensors and ``saved`` those."""
        assert self.entry is not None
        saved = () if compat_capture.saving_hooks() else saved
        given = [compat.storage_reference(t) for t in saved or handed if isinstance(t, torch.Tensor)]
        self.ledger.keeps(place, self.entry, given, _mark(saved))


def _mark(saved: Sequence[Any]) -> int:
    """The identity of something that was saved, 0 of nothing."""
    return compat.storage_key(saved[0]) if saved else 0
