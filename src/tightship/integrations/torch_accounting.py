"""One budget for all the graphs that a compiled model falls into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tightship.errors import Infeasible
from tightship.units import Budget

__all__ = ["Entry", "Ledger"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one graph takes, in bytes. ``static``: the caller's tensors no earlier graph has counted.
    ``dynamic``: the most it needs beyond its inputs while it runs. ``rest``: what stays between its two
    passes. ``gradients``: what it hands out in the backward pass. ``unplanned_*`` are the same if everything
    was kept."""

    static: int
    dynamic: int
    rest: int
    gradients: int
    unplanned: int
    unplanned_rest: int


@dataclass
class _Share:
    """What a percentage came to, in bytes, once the graphs in ``frames`` were known."""

    limit: int | None = None
    frames: set[int] = field(default_factory=set)


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
    entries: dict[int, Entry] = field(default_factory=dict)
    _current: dict[int, Entry] = field(default_factory=dict)  # of the graphs that ran last
    _storages: dict[int, int] = field(default_factory=dict)
    _training: _Share = field(default_factory=_Share)
    _evaluation: _Share = field(default_factory=_Share)
    _settled: bool = False

    def new_static(self, frame: int, storages: Mapping[int, int]) -> int:
        """Bytes of ``storages`` (identity: bytes) that no other frame has counted."""
        for key in storages:
            self._storages.setdefault(key, frame)
        return sum(n for key, n in storages.items() if self._storages[key] == frame)

    def ran(self, frame: int, entry: Entry) -> None:
        """Takes note of which of a frame's graphs ran last."""
        self._current[frame] = entry

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
        self, frame: int, static: int, unplanned: int, *, training: bool, current: bool = False
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
        peak = kept = 0
        for e in earlier:
            peak = max(peak, kept + e.unplanned)
            kept += e.unplanned_rest
        peak = max(peak, kept + unplanned) + shared
        return self._limit(frame, peak, shared, training) - shared - sum(e.rest for e in earlier)

    def enter(self, frame: int, entry: Entry, *, current: bool = False) -> None:
        """Takes note of what a graph takes. Raises ``Infeasible`` if the gradients it hands out leave an
        earlier graph's backward pass too little."""
        before = self.entries.get(frame)
        self.entries[frame] = entry if before is None else _larger(before, entry)
        if self.budget is None or self.budget.bytes is None:
            return
        rows = [*self._earlier(frame, current), entry] if current else list(self.entries.values())
        static = sum(e.static for e in rows)
        for k, e in enumerate(rows):
            need = (
                static + sum(r.rest for r in rows[:k]) + e.dynamic + sum(r.gradients for r in rows[k + 1 :])
            )
            if need > self.budget.bytes:
                raise Infeasible(
                    budget=self.budget.bytes, lower_bound=static, best_peak=need,
                    top=[(f"gradients of graph {n}", r.gradients, "") for n, r in enumerate(rows) if n > k],
                )  # fmt: skip

    def _earlier(self, frame: int, current: bool) -> list[Entry]:
        found = []
        for f, e in self.entries.items():
            if f == frame:
                break
            found.append(self._current.get(f, e) if current else e)
        return found

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


def _larger(a: Entry, b: Entry) -> Entry:
    pairs = ((getattr(a, n), getattr(b, n)) for n in Entry.__slots__)
    return Entry(*(max(p) for p in pairs))
