"""Who shares a budget: the graphs that a compiled model falls into, the optimizer's state and step, and gradients.

With an optimizer a budget is of the whole step, from the forward pass to ``zero_grad``. In memory all along are its
parameters and state and the graphs' inputs. While a graph runs, gradients are there as far as graphs have handed
them out, and all of them where they are accumulated; while the optimizer steps, all of them, what it makes itself,
and the last graph's results. What the caller's own code makes or keeps beside that is not counted.

One graph may be called several times before the first of its backward passes: layers that are compiled one by one
share their code. Each such call counts as a graph of its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from tightship.errors import Infeasible
from tightship.execute import allocator
from tightship.frontends.torch.compat_ddp import Buckets
from tightship.frontends.torch.compat_gathered import HookMemory
from tightship.graph import aligned
from tightship.integrations.gathered_memory import GatheredMemory
from tightship.integrations.graph_entries import (
    Ahead,
    Entry,
    Part,
    Place,
    divide,
    larger,
    name_of,
    rests,
    top_of,
)
from tightship.integrations.kept_graphs import kept_advice
from tightship.integrations.optimizer_memory import StepMemory
from tightship.units import Budget, format_bytes

__all__ = ["Ledger", "StepBytes"]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is between its two passes as long as one of ``saved`` is there; ``mark`` is the identity of one."""

    place: Place
    entry: Entry
    saved: tuple[Any, ...]
    mark: int

    def waits(self) -> bool:
        return not all(reference.expired() for reference in self.saved)


@dataclass
class _Share:
    """What a percentage came to, in bytes, once the graphs at ``places`` were known."""

    limit: int | None = None
    places: set[Place] = field(default_factory=set)


_OPTIMIZER: Final = (-2, 0)
"""Stands in the place of a graph for what the optimizer has."""

_PARTS: Final = (-3, 0)
"""Stands in the place of a graph for this rank's parts of parameters."""

_ACCUMULATE: Final = (
    "give accumulate=True, which plans for gradients that are there, or clear them before each forward pass: "
    "optimizer.zero_grad(set_to_none=True)"
)


_HOOKS: Final = "whole parameters, gradients and messages of fully_shard"

_GATHERED_MORE: Final = (
    "fully_shard's hooks hold more than when this was planned (set_requires_gradient_sync(False), "
    "set_reshard_after_forward(False), unshard()): set these before the first step, or give more bytes"
)

_CALLED_AGAIN: Final = (
    "the same code runs several times before the first backward pass, which was not known when it was planned: "
    "compile the model that calls it instead, or say how often in the options (calls=…)"
)


@dataclass
class Ledger:
    """Shares ``budget`` among graphs, by where they are called, in the order they were first called.

    While a graph runs, the inputs of all of them and the rests of the earlier ones are in memory; while the
    backward pass of an earlier graph runs, the gradients that the later ones have handed out.

    A percentage is of the peak that the graphs of the first training step have together if they keep everything.
    It grows with each of them, and from the first backward pass on (`settle`) it is a number of bytes for all that
    comes: other sizes, other modes, other frames, evaluation. Graphs without a backward pass that come before any
    with one share a percentage of what they need themselves.
    """

    budget: Budget | None
    step: StepMemory | None = None
    accumulate: bool = False
    entries: dict[Place, Entry] = field(default_factory=dict)
    _current: dict[Place, Entry] = field(default_factory=dict)  # of the graphs that ran last
    _calls: list[_Call] = field(default_factory=list)  # between their two passes, by age
    _known: dict[Place, list[Entry]] = field(default_factory=dict)  # what was called there
    _storages: dict[int, Place] = field(default_factory=dict)
    _training: _Share = field(default_factory=_Share)
    _evaluation: _Share = field(default_factory=_Share)
    # By frame: calls that the caller says there are, and what a percentage is with all.
    _said: dict[int, tuple[int, int]] = field(default_factory=dict)
    _settled: bool = False
    _postponed: bool = False  # a graph of the first step does not fit the bytes: what all need is to be said
    _unmet: Infeasible | None = None  # why the graphs of the first step do not meet a percentage
    _rows: list[Entry] = field(default_factory=list)  # of the first step, as far as planned again
    _parts: dict[Place, Part] = field(default_factory=dict)  # what they may take of the budget
    _buckets: int = 0
    _most: int = 0  # bytes in use since `begin_step`, gradients included that were there already
    _gathered: GatheredMemory = field(default_factory=GatheredMemory)

    def __post_init__(self) -> None:
        if self.step is not None:
            self.new_static(_OPTIMIZER, self.step.parameters)
            self.entries[_OPTIMIZER] = Entry(
                sum(self.step.parameters.values()) + self.step.state, 0, 0, 0, 0, 0, place=_OPTIMIZER
            )

    def place(self, frame: int) -> Place:
        """Where a graph of this frame is called now."""
        self._calls = [c for c in self._calls if c.waits()]
        return frame, sum(c.place[0] == frame for c in self._calls)

    def new_static(self, place: Place, storages: Mapping[int, int]) -> int:
        """Bytes of ``storages`` (identity: bytes) that no other place has counted."""
        for key in storages:
            self._storages.setdefault(key, place)
        return sum(n for key, n in storages.items() if self._storages[key] == place)

    def uncounted(self, storages: Mapping[int, int]) -> int:
        """Bytes of ``storages`` that nobody has counted."""
        return sum(n for key, n in storages.items() if key not in self._storages)

    def state(self) -> frozenset[int]:
        """The identities of what there is of the optimizer's state, which is counted whole."""
        return frozenset() if self.step is None else self.step.state_storages()

    def begin(
        self,
        entry: Entry,
        storages: Callable[[], Mapping[int, int]],
        *,
        backward: int | None = None,
        elsewhere: bool = False,
    ) -> Place:
        """Takes note of which of a frame's graphs runs now, and of where. ``storages``: the identities and bytes of
        what it is called with; ``backward``: in a backward pass, the mark of what was saved for it; ``elsewhere``:
        what is saved is not kept. Raises ``Infeasible`` where more is there
        than the budget has room for: calls that nobody knew of when the graph was planned, or gradients that nobody
        counted."""
        place = self.place(entry.place[0]) if backward is None else self._ended(entry, backward)
        # A second step, and no backward pass of the first.
        if self.postponed and place in self._current and not self._calls:
            self.settle()
        known = self._known.setdefault(place, [])
        if self._gathered.hooks:
            self._check_hooks(place)
        now = entry.elsewhere() if elsewhere else entry
        if not any(entry is e for e in known):
            if place != entry.place:
                self._again(place, now, storages)
            known.append(entry)
        if place != entry.place:
            now = _at(place, now, self.entries[place].static)
        if backward is None or place not in self._current:
            self._current[place] = now
        entry = self._current[place]
        if self.step is not None and not self.accumulate:
            self._check_existing(place, entry, backward is not None)
        return place

    def keeps(self, place: Place, entry: Entry, saved: Sequence[Any], mark: int) -> None:
        """A forward pass is over: what is between its two passes is there as long as one of these references is."""
        if saved:
            self._calls.append(_Call(place, entry, tuple(saved), mark))

    def _ended(self, entry: Entry, mark: int) -> Place:
        """Where the call was made whose backward pass begins: that of this mark, or the last one of ``entry``."""
        found = [k for k, c in enumerate(self._calls) if c.entry is entry]
        marked = [k for k in found if self._calls[k].mark == mark]
        return self._calls.pop((marked or found)[-1]).place if found else entry.place

    def _again(self, place: Place, entry: Entry, storages: Callable[[], Mapping[int, int]]) -> None:
        """A graph is called at another place than it was planned at."""
        known = self.entries.get(place)
        static = self.new_static(place, storages()) if known is None else known.static
        entry = _at(place, entry, static)
        self.available(
            place, static, entry.unplanned, training=entry.training, results=entry.results,
            gradients=entry.gradients, parameters=entry.parameters,
        )  # fmt: skip
        self._current[place] = entry
        try:
            self.enter(place, entry, current=True, follow=True)
        except Infeasible:  # it does not run there, and will be asked again
            if known is None:
                del self.entries[place], self._current[place]
            raise

    def _check_existing(self, place: Place, entry: Entry, backward: bool) -> None:
        assert self.step is not None
        there, held = self.step.existing_gradients(), self._gathered.passes
        rows = [*self._earlier(place, current=True), entry]
        need = sum(e.static for e in rows) + rests(rows, -1) + there + held
        need += entry.dynamic if backward else entry.forward
        limit, self._most = self.limit, max(self._most, need)
        if there and limit is not None and need > limit:
            raise Infeasible(
                budget=limit, lower_bound=need, best_peak=need, at="a pass with gradients of an earlier one",
                top=[("gradients that are there already", there, "")], advice=(_ACCUMULATE,),
            )  # fmt: skip

    def _check_hooks(self, place: Place) -> None:
        """Raise ``Infeasible`` where hooks hold more than was known when graphs were planned: whole gradients that
        are added up, groups that stay gathered."""
        if not self._known[place]:
            self._note_whole()
        before = self._gathered.passes
        if self._gathered.note():
            try:
                self._check([self._current.get(p, e) for p, e in self.entries.items()])
            except Infeasible as no:
                self._gathered.passes = before  # so is what comes next
                raise no.with_advice((*no.advice, _GATHERED_MORE)) from None

    def sends(self, found: Buckets | None) -> None:
        """Buckets of DistributedDataParallel are there all along, beside gradients or with these inside: counted from
        here on."""
        if self.step is None or found is None or self._buckets:
            return
        self._buckets = sum(map(aligned, found.sizes))
        first, gradients = self.entries[_OPTIMIZER], self.step.gradients
        inside = found.views and self.accumulate
        self.entries[_OPTIMIZER] = replace(first, static=first.static + self._buckets - inside * gradients)
        if found.views:
            self.step = replace(self.step, gradients=0)

    def gathers(self, found: HookMemory | None) -> None:
        """Parts of parameters are there all along, and what hooks of ``fully_shard`` hold while graphs run: counted
        from here on."""
        if found is not None and found.model not in self._gathered.hooks:
            self._gathered.hooks[found.model] = found
            known = self.entries[_PARTS].static if _PARTS in self.entries else 0
            parts = Entry(known + self.new_static(_PARTS, found.parts()), 0, 0, 0, 0, 0, place=_PARTS)
            self.entries = {_PARTS: parts} | self.entries | {_PARTS: parts}
        self._note_whole()
        self._gathered.note()

    def _note_whole(self) -> None:
        """Storages in which parameters are whole are not counted as inputs."""
        self.new_static(_PARTS, dict.fromkeys(self.gathered(), 0))

    def gathered(self) -> frozenset[int]:
        """The identities of the storages that hooks of ``fully_shard`` fill and free."""
        return self._gathered.whole()

    def own_gradients(self, given: Iterable[torch.Tensor]) -> int:
        """Bytes of this rank's parts of the gradients of whole parameters among the tensors."""
        return 0 if self.accumulate else self._gathered.own_gradients(given)

    def _after_hooks(self, rows: Sequence[Entry]) -> int:
        """Bytes beside the static set when a step's last backward pass is over."""
        counted = self._gathered.gradients if self.step is not None and self.accumulate else 0
        return self._gathered.last() - counted + max((e.results for e in rows), default=0)

    def accumulates(self) -> None:
        """Gradients are there while graphs run: all of them are counted from here on."""
        if self.step is not None and not self.accumulate:
            self.accumulate = True
            first = self.entries[_OPTIMIZER]
            self.entries[_OPTIMIZER] = replace(first, static=first.static + self.step.gradients)

    @property
    def limit(self) -> int | None:
        """The budget in bytes, None without one and as long as a percentage is of a step that nobody has seen."""
        if self.budget is None or self.budget.bytes is not None:
            return None if self.budget is None else self.budget.bytes
        return self._training.limit

    def settle(self) -> None:
        """The first backward pass has begun: all graphs of the first training step are known, and what a percentage
        of it is. Raises ``Infeasible`` where they do not meet it."""
        if not self._settled:
            self._settled = True
            self._await_said()
            rows = [self._current.get(p, e) for p, e in self.entries.items()]
            try:
                self._check_step()
                self._check(rows)
                self._divide(rows)
            except Infeasible as no:
                self._unmet = no
        if self._unmet is not None:
            raise copy.copy(self._unmet).with_traceback(None)

    def _await_said(self) -> None:
        """The first step may have fewer calls of a graph than the caller says there are (a pass that finds out about
        shapes, as pipelines make one): a percentage is of all that were said."""
        for frame, (calls, limit) in self._said.items():
            if sum(p[0] == frame for p in self.entries) < calls:
                self._training.limit = max(self._training.limit or 0, limit)

    def _divide(self, rows: list[Entry]) -> None:
        if (limit := self.limit) is not None:
            parts = divide(rows, limit - self._others(rows) - self._gathered.passes)
            self._rows, self._parts = rows, {e.place: part for e, part in zip(rows, parts, strict=True)}

    def postpone(self) -> bool:
        """A graph of the first training step does not fit the budget in bytes, and others follow: it runs within the
        least that is found, and whether all fit, and what they need, is known, and said, with the last of them. False
        where they are known already."""
        if self._settled or self.budget is None or self.budget.bytes is None:
            return False
        self._postponed = True
        return True

    @property
    def postponed(self) -> bool:
        """Whether it is not known yet what the graphs of the first step need, which do not fit the bytes."""
        return self._postponed and not self._settled

    @property
    def settled(self) -> bool:
        """Whether all graphs of the first training step are known."""
        return self._settled

    def part(self, place: Place) -> Part | None:
        """What the graph at ``place`` may take, once all are known."""
        return self._parts.get(place)

    def part_of(self, entry: Entry) -> Part | None:
        """What the graph that takes ``entry`` may take wherever it ran, once all are known."""
        parts = [self._parts[p] for p in self._places_of(entry) if p in self._parts]
        return Part(min(p.most for p in parts), min(p.rest for p in parts)) if parts else None

    def _places_of(self, entry: Entry) -> list[Place]:
        return [p for p, known in self._known.items() if any(entry is e for e in known)]

    def waits(self, entry: Entry) -> bool:
        """Whether a call of the graph that takes ``entry`` is between its two passes."""
        return any(c.entry is entry and c.waits() for c in self._calls)

    def renew(self, old: Entry, new: Entry) -> bool:
        """Takes note that the graph that took ``old`` takes ``new``, wherever it runs; whether that fits."""
        renewed = {p: [new if e is old else e for e in self._known[p]] for p in self._places_of(old)}
        entries = dict(self.entries)
        for place, known in renewed.items():
            static = entries[place].static
            entries[place] = functools.reduce(larger, (_at(place, e, static) for e in known))
        try:
            self._check(list(entries.values()))
        except Infeasible:
            return False
        self.entries = entries
        self._known.update(renewed)
        final = replace(new, unplanned=new.dynamic, unplanned_rest=new.rest)  # it takes no more than that
        self._divide([_at(e.place, final, e.static) if e.place in renewed else e for e in self._rows])
        return True

    def binding(self, training: bool) -> bool:
        """Whether the budget in bytes is known to be meant for such a graph: not where a percentage is of a training
        step that nobody has seen yet."""
        known = self.budget is None or self.budget.bytes is not None or self._training.limit is not None
        return training or known

    def resolved_before(self, place: Place, training: bool) -> bool:
        """Whether the budget is a percentage of something that came before this graph: what did not fit once does not
        fit because it comes again, larger; what ran may be followed by others at its place before the first backward
        pass."""
        share = self._share(training)
        if self.budget is None or self.budget.bytes is not None or share.limit is None:
            return False
        if training:
            return self._settled or (place in share.places and place not in self.entries)
        return self._settled or share is self._training or place in share.places

    def available(
        self,
        place: Place,
        static: int,
        unplanned: int,
        *,
        training: bool,
        current: bool = False,
        results: int = 0,
        gradients: int = 0,
        parameters: int = 0,
        rest: int = 0,
        ahead: Ahead = Ahead(),  # noqa: B008
    ) -> int | None:
        """Bytes this graph may use beyond its static set; None without a budget.

        ``static`` is what `new_static` said, ``unplanned`` the most the graph needs beyond its inputs if everything
        is kept, ``rest`` what then stays between its passes, ``gradients`` what it hands out, of ``parameters`` among
        them. Earlier graphs take the most that any kind of theirs takes or, if ``current``, what those take that ran
        last. With calls ``ahead``: bytes for this graph and them together.
        """
        if self.budget is None:
            return None
        earlier = self._earlier(place, current)
        shared = static + sum(e.static for e in earlier)
        beside = self.beside_earlier(place, training)
        own = [Entry(static, 0, 0, gradients, unplanned, rest, results, parameters=parameters)]
        limit = self._limit(place, self._peak(earlier, own, shared, beside, training), shared, training)
        shared += ahead.static
        if ahead.count:
            own *= 1 + ahead.count
            if self.budget.bytes is None and not self._settled:
                peak = self._peak(earlier, own, shared, beside, training)
                limit = max(limit, self.budget.resolve(peak, static=shared))
                if ahead.said and training:
                    self._said[place[0]] = place[1] + len(own), limit
        rests = sum(e.rest for e in earlier) if beside else 0
        rests += ahead.beside + self._gathered.passes
        return limit - shared - rests - (self._others([*earlier, *own]) if training else 0)

    def _others(self, rows: Sequence[Entry]) -> int:
        """Bytes of gradients that are counted as there while graphs run: of what runs outside of all of them, such as
        the head of a model whose layers are compiled one by one. Of a percentage, and of ``fully_shard``."""
        if self._gathered.hooks:
            counted = self.step is not None and self.accumulate
            return 0 if counted else max(self._gathered.gradients - sum(e.parameters for e in rows), 0)
        percent = self.budget is not None and self.budget.bytes is None
        if self.step is None or self.accumulate or not percent:
            return 0
        return max(self.step.gradients - sum(e.parameters for e in rows), 0)

    def _peak(
        self, earlier: Sequence[Entry], more: Sequence[Entry], shared: int, beside: bool, training: bool
    ) -> int:
        """Bytes in use if all of these keep everything, ``shared`` of them all along."""
        rows = [*earlier, *more]
        later = sum(e.gradients for e in rows)
        peak = kept = 0
        for k, e in enumerate(rows):
            later -= e.gradients
            kept = kept if beside or k < len(earlier) else 0
            peak = max(peak, kept + e.unplanned + later)
            kept += e.unplanned_rest
        peak += self._gathered.passes + (self._others(rows) if training else 0)
        if self._gathered.hooks and training:
            peak = max(peak, self._after_hooks(rows))
        if training and self.step is not None:
            peak = max(peak, self._beside_static(max(e.results for e in rows)))
        return peak + shared

    def share_of(self, place: Place, static: int, rest: int) -> int | None:
        """What a percentage leaves of ``rest`` bytes that stay between a graph's passes; None if it is none, or
        known in bytes."""
        if self.budget is None or self.budget.bytes is not None:
            return None
        static += sum(e.static for e in self._earlier(place, current=False))
        return max(self.budget.resolve(static + rest, static=static) - static, 0)

    def others_train(self, place: Place) -> bool:
        """Whether graphs with a backward pass share the budget with the one at ``place``."""
        return any(e.training for p, e in self.entries.items() if p != place)

    def beside_earlier(self, place: Place, training: bool) -> bool:
        """Whether earlier graphs may be between their two passes while this one runs: one without a backward pass
        (evaluation, a compiled optimizer's step) follows the code that it comes in first."""
        if training:
            return True
        order = {p: k for k, p in enumerate(self.entries)}
        own = order.get(place, len(order))
        return any(order.get(c.place, own) < own for c in self._calls if c.waits())

    def enter(self, place: Place, entry: Entry, *, current: bool = False, follow: bool = False) -> None:
        """Takes note of what a graph takes; ``follow``: others are known to, in the first step. Raises ``Infeasible``
        if the gradients it hands out leave an earlier graph's backward pass too little."""
        before = self.entries.get(place)
        self.entries[place] = entry if before is None else larger(before, entry)
        final = not follow or self._settled or self.budget is None or self.budget.bytes is not None
        if self.postponed and follow:
            return
        if final and entry.training:
            self._check_step()
        earlier = self._earlier(place, current)
        later = [] if current else list(self.entries.values())[len(earlier) + 1 :]
        self._check([*earlier, entry, *later])  # not the most of all its kinds, which none takes

    def _check(self, rows: Sequence[Entry]) -> None:
        """Raise ``Infeasible`` where graphs need more than a budget in bytes, or than a percentage came to."""
        if self.budget is None or (self.budget.bytes is None and not self._settled):
            return
        limit, static = self.limit, sum(e.static for e in rows)
        if limit is None:
            return
        held = self._gathered.passes + (self._others(rows) if self._gathered.hooks else 0)
        needs = {
            k: static + held + rests(rows, k) + e.dynamic + sum(r.gradients for r in rows[k + 1 :])
            for k, e in enumerate(rows)
            if e.place[0] >= 0  # `_check_step` is about others
        }
        k = max(needs, key=needs.__getitem__, default=-1)
        if needs.get(k, 0) > limit:
            raise Infeasible(
                budget=limit, lower_bound=static, best_peak=needs[k], at=f"a pass of {name_of(rows, k)}",
                top=[*top_of(rows, k, static), *self._held_by_hooks()], advice=self._why_again(rows),
            )  # fmt: skip
        if self._gathered.hooks and (last := static + self._after_hooks(rows)) > limit:
            top = [(_HOOKS, last - static, ""), ("parameters, state, buffers and batch", static, "")]
            raise Infeasible(
                budget=limit, lower_bound=last, best_peak=last, at="the end of the backward pass", top=top
            )

    def _held_by_hooks(self) -> list[tuple[str, int, str]]:
        return [(_HOOKS, self._gathered.passes, "")] if self._gathered.passes else []

    def _why_again(self, rows: Sequence[Entry]) -> list[str]:
        """What to do where the same code runs again before the backward pass of an earlier call."""
        if not any(e.place[1] for e in rows):
            return []
        marks = {c.mark for c in self._calls if c.waits()}
        return [*([kept_advice(marks)] if self._settled else []), _CALLED_AGAIN]

    def _beside_static(self, results: int = 0) -> int:
        """Bytes beside the static set while the optimizer steps."""
        assert self.step is not None
        gradients = 0 if self.accumulate else self.step.gradients
        return gradients + self.step.workspace + results

    def step_peak(self, *, current: bool = False) -> int:
        """Bytes in use while the optimizer steps; 0 without one."""
        if self.step is None:
            return 0
        rows = [self._current.get(p, e) if current else e for p, e in self.entries.items()]
        return sum(e.static for e in rows) + self._beside_static(max(e.results for e in rows))

    def _check_step(self) -> None:
        """Raise ``Infeasible`` if the optimizer cannot step within the budget."""
        step, limit, need = self.step, self.limit, self.step_peak()
        if step is None or limit is None or need <= limit:
            return
        spare = step.workspace - step.one_by_one
        advice = (
            [f"give {step.name} foreach=False: it then needs about {format_bytes(spare)} less"]
            if spare > 0
            else []
        )
        advice.append("train with tightship.fit, which steps each parameter at its gradient and frees that")
        state, parameters = step.state, sum(step.parameters.values())
        rows = [
            (f"what {step.name} makes in its step", step.workspace), ("gradients", step.gradients),
            (f"state of {step.name}", state), ("parameters", parameters),
            ("buckets of DistributedDataParallel", self._buckets),
            ("results that the caller still has", max(e.results for e in self.entries.values())),
            ("buffers and batch", sum(e.static for p, e in self.entries.items() if p != _OPTIMIZER)),
        ]  # fmt: skip
        top = sorted(((n, b, "") for n, b in rows if b), key=lambda r: -r[1])
        raise Infeasible(
            budget=limit, lower_bound=need, best_peak=need, top=top, at="optimizer.step()", advice=advice
        )

    def beside(self, place: Place) -> list[tuple[str, int]]:
        """What the optimizer and earlier graphs take of the budget while the graph at ``place`` runs, for people."""
        earlier = [e for e in self._earlier(place, current=True) if e.place[0] >= 0]
        rows = [
            ("what earlier graphs keep for their backward passes", sum(e.rest for e in earlier)),
            ("their parameters, buffers and inputs", sum(e.static for e in earlier)),
        ]
        if (step := self.step) is not None:
            rows += [
                (f"state of {step.name}", step.state),
                ("gradients", step.gradients if self.accumulate else 0),
                ("buckets of DistributedDataParallel", self._buckets),
            ]
        rows.append((_HOOKS, self._gathered.passes))
        return [(name, size) for name, size in rows if size]

    def of_the_whole(self, place: Place, no: Infeasible) -> Infeasible:
        """``no``, which is about the part of the budget that the graph at ``place`` has, of the whole: its numbers
        are those to ask with."""
        limit = self.limit
        if limit is None or no.budget >= limit:
            return no
        rows, shift = self.beside(place), limit - no.budget
        said = ", ".join(f"{name} {format_bytes(size)}" for name, size in rows)
        whose = "the budget" if self.step is None else "the whole step's budget"
        text = f"of {whose} of {format_bytes(limit)} the graph has what others leave: {said}"
        others = shift - sum(size for _, size in rows)
        no = no.beside(shift, [*rows, ("what else shares the budget", others)])
        return no.with_advice((*no.advice, text)) if rows else no

    def planned_step(self) -> int:
        """The most bytes in use in a step like the last: the graphs that ran last, and the optimizer's step."""
        rows = [self._current.get(p, e) for p, e in self.entries.items() if p in self._current or p[0] < 0]
        static = sum(e.static for e in rows)
        peak = max((
            rests(rows, k) + e.dynamic + sum(r.gradients for r in rows[k + 1 :])
            for k, e in enumerate(rows)
        ), default=0)  # fmt: skip
        if self._gathered.hooks:
            peak = max(peak + self._gathered.passes + self._others(rows), self._after_hooks(rows))
        return max(static + peak, self._most, self.step_peak(current=True))

    def begin_step(self) -> None:
        """A step begins, of which `planned_step` is asked when it is over."""
        self._most = 0
        self._current.clear()

    def owned(self) -> int:
        """Bytes of what is there now of the static set: the optimizer's state and gradients as far as they exist."""
        rows = [self._current.get(p, e) for p, e in self.entries.items() if p in self._current or p[0] < 0]
        static = sum(e.static for e in rows)
        if self.step is None:
            return static
        counted = self.step.state + (self.step.gradients if self.accumulate else 0)
        return static - counted + self.step.existing_state() + self.step.existing_gradients()

    def _earlier(self, place: Place, current: bool) -> list[Entry]:
        entries = []
        for p, e in self.entries.items():
            if p == place:
                break
            entries.append(self._current.get(p, e) if current else e)
        return entries

    def _share(self, training: bool) -> _Share:
        return self._training if training or self._training.limit is not None else self._evaluation

    def _limit(self, place: Place, peak: int, static: int, training: bool) -> int:
        """The budget in bytes: ``peak`` is that of all graphs up to this one if they keep everything."""
        assert self.budget is not None
        if self.budget.bytes is not None:
            return self.budget.bytes
        share = self._share(training)
        if share.limit is None or not self.resolved_before(place, training):
            share.limit = max(self.budget.resolve(peak, static=static), share.limit or 0)
            share.places.add(place)
        return share.limit


def _at(place: Place, entry: Entry, static: int) -> Entry:
    """``entry`` where it runs, with so many bytes of inputs there."""
    if place == entry.place:
        return entry
    return replace(entry, static=static, place=place, gradients=entry.parameters)


@dataclass
class StepBytes:
    """A training step from before its forward pass to after ``zero_grad``, in bytes: what was ``planned`` and what
    was ``measured``; None where planning, which takes memory itself, fell into the step."""

    planned: int | None = None
    measured: int | None = None

    @contextmanager
    def measuring(self, ledger: Ledger, graphs: Sequence[Any], kind: str) -> Iterator[StepBytes]:
        known, before = len(graphs), ledger.owned()
        ledger.begin_step()
        with allocator.Meter(kind) as meter:
            yield self
        if known and len(graphs) == known:
            self.planned, self.measured = ledger.planned_step(), before + meter.peak
