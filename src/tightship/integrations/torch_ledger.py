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
class Ledger:
    """Shares ``budget`` among graphs, by the number of their Python frame, in the order they were first
    compiled.

    While a graph runs, the inputs of all of them and the rests of the earlier ones are in memory; while the
    backward pass of an earlier graph runs, the gradients that the later ones have handed out.
    """

    budget: Budget | None
    entries: dict[int, Entry] = field(default_factory=dict)
    _storages: dict[int, int] = field(default_factory=dict)

    def new_static(self, frame: int, storages: Mapping[int, int]) -> int:
        """Bytes of ``storages`` (identity: bytes) that no other frame has counted."""
        for key in storages:
            self._storages.setdefault(key, frame)
        return sum(n for key, n in storages.items() if self._storages[key] == frame)

    def _earlier(self, frame: int) -> list[Entry]:
        found = []
        for f, e in self.entries.items():
            if f == frame:
                break
            found.append(e)
        return found

    def available(self, frame: int, static: int, unplanned: int) -> int | None:
        """Bytes this graph may use beyond its static set; None without a budget.

        ``static`` is what `new_static` said, ``unplanned`` the most the graph needs beyond its inputs if
        everything is kept. A percentage is of the peak that all graphs so far would have if they kept
        everything.
        """
        if self.budget is None:
            return None
        earlier = self._earlier(frame)
        shared = static + sum(e.static for e in earlier)
        peak = kept = 0
        for e in earlier:
            peak = max(peak, kept + e.unplanned)
            kept += e.unplanned_rest
        peak = max(peak, kept + unplanned) + shared
        return self.budget.resolve(peak) - shared - sum(e.rest for e in earlier)

    def enter(self, frame: int, entry: Entry) -> None:
        """Takes note of what a graph takes. Raises ``Infeasible`` if the gradients it hands out leave an
        earlier graph's backward pass too little."""
        before = self.entries.get(frame)
        self.entries[frame] = entry if before is None else _larger(before, entry)
        if self.budget is None or self.budget.bytes is None:
            return
        rows = list(self.entries.values())
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


def _larger(a: Entry, b: Entry) -> Entry:
    pairs = ((getattr(a, n), getattr(b, n)) for n in Entry.__slots__)
    return Entry(*(max(p) for p in pairs))
