"""Who shares a budget: the graphs that a compiled model falls into, the optimizer's state and step, and gradients.

With an optimizer a budget is of the whole step, from the forward pass to ``zero_grad``. In memory all along are its
parameters and state and the graphs' inputs. While a graph runs, gradients are there as far as graphs have handed
them out, and all of them where they are accumulated; while the optimizer steps, all of them, what it makes itself,
and the last graph's results. What the caller's own code makes or keeps beside that is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tightship.errors import Infeasible
from tightship.execute import allocator
from tightship.frontends.torch.compat_ddp import Buckets
from tightship.graph import aligned
from tightship.integrations.optimizer_memory import StepMemory
from tightship.units import Budget, format_bytes

__all__ = ["Entry", "Ledger", "StepBytes"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one graph takes, in bytes. ``static``: the caller's tensors no earlier graph has counted.
    ``dynamic``: the most it needs beyond its inputs while it runs, ``forward`` while its forward pass does. ``rest``:
    what stays between its two passes. ``gradients``: what it hands out in the backward pass, ``results``: in the
    forward pass, if no other graph follows. ``unplanned_*`` are the same if everything was kept. ``beside``: earlier
    graphs may be between their two passes meanwhile."""

    static: int
    dynamic: int
    rest: int
    gradients: int
    unplanned: int
    unplanned_rest: int
    results: int = 0
    forward: int = 0
    beside: bool = True


@dataclass
class _Share:
    """What a percentage came to, in bytes, once the graphs in ``frames`` were known."""

    limit: int | None = None
    frames: set[int] = field(default_factory=set)


_OPTIMIZER: Final = -2
"""Stands in the place of a frame for what the optimizer has."""

_ACCUMULATE: Final = (
    "give accumulate=True, which plans for gradients that are there, or clear them before each forward pass: "
    "optimizer.zero_grad(set_to_none=True)"
)


@dataclass
class Ledger:
    """Shares ``budget`` among graphs, by the number of their Python frame, in the order they were first
    compiled.

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
    entries: dict[int, Entry] = field(default_factory=dict)
    _current: dict[int, Entry] = field(default_factory=dict)  # of the graphs that ran last
    _waiting: set[int] = field(default_factory=set)  # frames of graphs that are between their two passes
    _storages: dict[int, int] = field(default_factory=dict)
    _training: _Share = field(default_factory=_Share)
    _evaluation: _Share = field(default_factory=_Share)
    _settled: bool = False
    _buckets: int = 0
    _most: int = 0  # bytes in use since `begin_step`, gradients included that were there already

    def __post_init__(self) -> None:
        if self.step is not None:
            self.new_static(_OPTIMIZER, self.step.parameters)
            self.entries[_OPTIMIZER] = Entry(
                sum(self.step.parameters.values()) + self.step.state, 0, 0, 0, 0, 0
            )

    def new_static(self, frame: int, storages: Mapping[int, int]) -> int:
        """Bytes of ``storages`` (identity: bytes) that no other frame has counted."""
        for key in storages:
            self._storages.setdefault(key, frame)
        return sum(n for key, n in storages.items() if self._storages[key] == frame)

    def begin(self, frame: int, entry: Entry, *, backward: bool = False) -> None:
        """Takes note of which of a frame's graphs runs now. Raises ``Infeasible`` where gradients are there that
        nobody counted and for which the budget has no room."""
        self._current[frame] = entry
        if backward or not entry.rest:
            self._waiting.discard(frame)
        else:
            self._waiting.add(frame)
        if self.step is None or self.accumulate:
            return
        there = self.step.existing_gradients()
        rows = [*self._earlier(frame, current=True), entry]
        need = sum(e.static for e in rows) + _rests(rows, -1) + there
        need += entry.dynamic if backward else entry.forward
        limit, self._most = self.limit, max(self._most, need)
        if there and limit is not None and need > limit:
            raise Infeasible(
                budget=limit, lower_bound=need, best_peak=need, at="a pass with gradients of an earlier one",
                top=[("gradients that are there already", there, "")], advice=(_ACCUMULATE,),
            )  # fmt: skip

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
        """The first backward pass has begun: all graphs of the first training step are known."""
        self._settled = True

    def binding(self, training: bool) -> bool:
        """Whether the budget in bytes is known to be meant for such a graph: not where a percentage is of a training
        step that nobody has seen yet."""
        known = self.budget is None or self.budget.bytes is not None or self._training.limit is not None
        return training or known

    def resolved_before(self, frame: int, training: bool) -> bool:
        """Whether the budget is a percentage of something that came before this graph."""
        share = self._share(training)
        return self.budget is not None and self.budget.bytes is None and share.limit is not None and (
            self._settled or frame in share.frames or (share is self._training and not training)
        )  # fmt: skip

    def available(
        self,
        frame: int,
        static: int,
        unplanned: int,
        *,
        training: bool,
        current: bool = False,
        results: int = 0,
    ) -> int | None:
        """Bytes this graph may use beyond its static set; None without a budget.

        ``static`` is what `new_static` said, ``unplanned`` the most the graph needs beyond its inputs if
        everything is kept. Earlier graphs take the most that any kind of theirs takes or, if ``current``, what those
        take that ran last.
        """
        if self.budget is None:
            return None
        earlier = self._earlier(frame, current)
        shared = static + sum(e.static for e in earlier)
        beside = self.beside_earlier(frame, training)
        peak = kept = 0
        for e in earlier:
            peak = max(peak, kept + e.unplanned)
            kept += e.unplanned_rest
        kept = kept if beside else 0
        peak = max(peak, kept + unplanned) + shared
        if training and self.step is not None:
            peak = max(peak, shared + self._beside_static(max([results, *(e.results for e in earlier)])))
        rests = sum(e.rest for e in earlier) if beside else 0
        return self._limit(frame, peak, shared, training) - shared - rests

    def beside_earlier(self, frame: int, training: bool) -> bool:
        """Whether earlier graphs may be between their two passes while this one runs: one without a backward pass
        (evaluation, a compiled optimizer's step) follows the code that it comes in first."""
        return training or any(
            f in self._waiting for f in itertools.takewhile(lambda f: f != frame, self.entries)
        )

    def enter(self, frame: int, entry: Entry, *, current: bool = False) -> None:
        """Takes note of what a graph takes. Raises ``Infeasible`` if the gradients it hands out leave an
        earlier graph's backward pass too little."""
        before = self.entries.get(frame)
        self.entries[frame] = entry if before is None else _larger(before, entry)
        self._check_step(entry)
        if self.budget is None or self.budget.bytes is None:
            return
        rows = [*self._earlier(frame, current), entry] if current else list(self.entries.values())
        static = sum(e.static for e in rows)
        for k, e in enumerate(rows):
            need = static + _rests(rows, k) + e.dynamic + sum(r.gradients for r in rows[k + 1 :])
            if need > self.budget.bytes:
                raise Infeasible(
                    budget=self.budget.bytes, lower_bound=static, best_peak=need,
                    top=[(f"gradients of graph {n}", r.gradients, "") for n, r in enumerate(rows) if n > k],
                )  # fmt: skip

    def _beside_static(self, results: int = 0) -> int:
        """Bytes beside the static set while the optimizer steps."""
        assert self.step is not None
        gradients = 0 if self.accumulate else self.step.gradients
        return gradients + self.step.workspace + results

    def step_peak(self, *, current: bool = False) -> int:
        """Bytes in use while the optimizer steps; 0 without one."""
        if self.step is None:
            return 0
        rows = [self._current.get(f, e) if current else e for f, e in self.entries.items()]
        return sum(e.static for e in rows) + self._beside_static(max(e.results for e in rows))

    def _check_step(self, entry: Entry) -> None:
        """Raise ``Infeasible`` if the optimizer cannot step within the budget."""
        step, limit, need = self.step, self.limit, self.step_peak()
        if step is None or limit is None or need <= limit or not entry.gradients:
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
            ("buffers and batch", sum(e.static for f, e in self.entries.items() if f != _OPTIMIZER)),
        ]  # fmt: skip
        top = sorted(((n, b, "") for n, b in rows if b), key=lambda r: -r[1])
        raise Infeasible(
            budget=limit, lower_bound=need, best_peak=need, top=top, at="optimizer.step()", advice=advice
        )

    def beside(self) -> str:
        """What the optimizer takes of the budget while a graph runs, for people; empty without one."""
        if self.step is None or self.limit is None:
            return ""
        step, name = self.step, self.step.name
        rows = [
            (f"state of {name}", step.state), ("gradients", step.gradients if self.accumulate else 0),
            ("buckets of DistributedDataParallel", self._buckets),
        ]  # fmt: skip
        text = ", ".join(f"{n} {format_bytes(b)}" for n, b in rows if b)
        return (
            f"of the whole step's budget of {format_bytes(self.limit)} the graph has what is left: {text}"
            if text
            else ""
        )

    def planned_step(self) -> int:
        """The most bytes in use in a step like the last: the graphs that ran last, and the optimizer's step."""
        rows = [
            self._current.get(f, e) for f, e in self.entries.items() if f in self._current or f == _OPTIMIZER
        ]
        static = sum(e.static for e in rows)
        peak = max((
            _rests(rows, k) + e.dynamic + sum(r.gradients for r in rows[k + 1 :])
            for k, e in enumerate(rows)
        ), default=0)  # fmt: skip
        return max(static + peak, self._most, self.step_peak(current=True))

    def begin_step(self) -> None:
        """A step begins, of which `planned_step` is asked when it is over."""
        self._most = 0

    def owned(self) -> int:
        """Bytes of what is there now of the static set: the optimizer's state and gradients as far as they exist."""
        rows = [
            self._current.get(f, e) for f, e in self.entries.items() if f in self._current or f == _OPTIMIZER
        ]
        static = sum(e.static for e in rows)
        if self.step is None:
            return static
        counted = self.step.state + (self.step.gradients if self.accumulate else 0)
        return static - counted + self.step.existing_state() + self.step.existing_gradients()

    def _earlier(self, frame: int, current: bool) -> list[Entry]:
        entries = []
        for f, e in self.entries.items():
            if f == frame:
                break
            entries.append(self._current.get(f, e) if current else e)
        return entries

    def _share(self, training: bool) -> _Share:
        return self._training if training or self._training.limit is not None else self._evaluation

    def _limit(self, frame: int, peak: int, static: int, training: bool) -> int:
        """The budget in bytes: ``peak`` is that of all graphs up to this one if they keep everything."""
        assert self.budget is not None
        if self.budget.bytes is not None:
            return self.budget.bytes
        share = self._share(training)
        if share.limit is None or not self.resolved_before(frame, training):
            share.limit = max(self.budget.resolve(peak, static=static), share.limit or 0)
            share.frames.add(frame)
        return share.limit


def _rests(rows: Sequence[Entry], k: int) -> int:
    """Bytes of what earlier graphs keep between their passes while the ``k``-th of them runs."""
    return sum(r.rest for r in rows[:k]) if rows[k].beside else 0


def _larger(a: Entry, b: Entry) -> Entry:
    pairs = ((getattr(a, n), getattr(b, n)) for n in Entry.__slots__)
    return Entry(*(max(p) for p in pairs))


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
