"""Plan: what to do with a graph, as a list of steps and a placement; Problem and Solution for placement alone.

Bytes of a storage can be present in three **forms**: ``full`` (usable by ops, in the device pool), ``packed``
(compressed, in the device pool) and ``host`` (copied out: pinned memory beside a GPU, a file on a CPU; in the host
pool). A fourth, ``state``, belongs to an op rather than a storage: the random state from before it ran, in the
device pool. Each form is resident from the step that makes it to the ``free`` step that ends it.

==========  =====================================================================================================
compute     run ``op``; every storage it defines becomes resident. With ``saves`` the random state is copied first
            and its ``Op.state`` bytes are resident from this step on.
            ``reuses``, pairs (storage read, storage defined) of ``Op.overwrites``: the result takes the place of what
            is read, whose stay ends with the beginning of this step and needs no free.
recompute   run ``op`` again; of the storages it defines, those in ``storages`` become resident again, the others
            exist only while the step runs. ``reuses`` as above, for results that become resident. ``Op.updates`` are
            left alone. A random op needs its saved state: the
            present one is set aside (another ``Op.state`` bytes while the step runs), the saved one set, the op
            run, and the present one put back, so that later draws are what they would have been.
offload     copy ``storages`` to the host pool (form ``host``); the full form stays until it is freed.
fetch       make ``storages`` full again from their host form, which stays until it is freed.
compress    make of each of ``storages`` a packed form of ``nbytes`` with ``codec`` (one of ``machine.CODECS``); the
            full form stays until it is freed.
decompress  make ``storages`` full again from their packed form, which stays until it is freed.
free        end the residence of ``storages`` in ``form``; for ``state``, of the state saved by ``op``.
==========  =====================================================================================================

A packed or host form holds the contents after the writes that had happened when it was made, and gives back
those. An op that runs later and must see other contents makes the plan wrong (``stale``); a codec other than a
lossy one is applied to contents after the last write only, for which its range is known.

**Bytes.** The order of the list is the order in which bytes are taken and given back, whatever the streams: what a
step makes counts from that step on, and what it frees counts while it runs and no longer after it; of a pair in
``reuses`` the bytes count once. While
compress or decompress runs, both forms are there; codecs need nothing else.

**Time.** Streams: 0 computes (and packs), others copy, or gather tensors of which other ranks have parts (compute or
recompute; what reads the result waits for it). Within a stream steps run in order; a step also waits for
the steps in ``waits``, and for nothing else but, if it copies, for what stands before it on stream 0, which begins
copies and loses seconds to each (`Machine.lost`). So a copy must wait for what made its source, ``free`` must wait
for the copies that read what it frees, what uses fetched contents for the fetch, and a fetch for the ``free`` whose
bytes it takes. Freeing takes no time, but waits like any step: a transfer costs what stream 0 loses to it and what
others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from tightship.errors import BadInput
from tightship.graph import MOST_BYTES, Graph

__all__ = [
    "KINDS",
    "TERMINATIONS",
    "Buffer",
    "Gap",
    "Inner",
    "Plan",
    "Pool",
    "Problem",
    "Residence",
    "Solution",
    "Step",
]

KINDS = ("compute", "recompute", "offload", "fetch", "compress", "decompress", "free")
FORMS = ("full", "packed", "host", "state")
TERMINATIONS = ("optimal", "gap", "similar", "stagnation", "work", "seconds", "interrupted")
"""Why a search ended: no plan is faster; none is faster by more than the gap that was asked for; it is as near to
its bound as the plan of the same ops in other sizes that the search began with; more of it gained nothing; the limit
of work; the clock; Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Step:
    kind: str
    op: int = -1
    storages: tuple[int, ...] = ()
    form: str = "full"
    nbytes: int = 0
    stream: int = 0
    waits: tuple[int, ...] = ()
    codec: str = ""
    saves: bool = False
    reuses: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Residence:
    """One stay of a storage in memory: steps ``[start, end)``, at ``offset`` (bytes) of ``pool``.

    ``storage`` is -1 for scratch: a temporary request of the step's op (``request`` is its index in
    ``Op.requests``) or the op's workspace as one block (``request`` -1). A storage that a recomputation makes
    but does not keep is a residence of that one step. Of form ``state``, ``request`` is the op whose random state
    it is: from the step that saves it to the one that frees it, and, of the state set aside, during each
    recomputation. The host form lies in pool ``host``, everything else in ``device``, or in ``out`` for results
    that leave the arena. ``first`` and ``last`` are the events within the first
    step at which the bytes are taken and within the last step at which they are given back (-1: with the
    step itself).
    """

    storage: int
    start: int
    end: int
    size: int
    offset: int = 0
    pool: str = "device"
    form: str = "full"
    request: int = -1
    first: int = -1
    last: int = -1


@dataclass(frozen=True)
class Plan:
    """A decision about a graph and what it costs. Bytes count the static set too, times are seconds. Raises
    ``BadInput`` on construction for times that are negative or not finite, and for bytes beyond 2^62.

    ``peak`` is the most bytes in use at any time, ``arena`` the bytes the placement spans beyond ``static``,
    ``handed`` the bytes of results that leave the arena for the caller;
    ``host`` the bytes the placement spans in the host pool, which ``host_budget`` limits. ``lower_bound`` is a
    peak no plan of this graph can beat, ``time_bound`` a time no plan within the budget can beat (0: not computed).
    ``termination``: why the search for it ended, one of ``TERMINATIONS`` (empty: nothing was searched).
    ``lossy``: codecs that do not give back the same bits were allowed. ``inner``: plans of what ops run inside
    themselves (loops, branches).
    """

    digest: str
    steps: tuple[Step, ...]
    residences: tuple[Residence, ...] = ()
    budget: int | None = None
    peak: int = 0
    peak_before: int = 0
    static: int = 0
    arena: int = 0
    handed: int = 0
    lower_bound: int = 0
    time: float = 0.0
    time_before: float = 0.0
    time_bound: float = 0.0
    planner: str = ""
    seconds: float = 0.0
    moved: int = 0
    source: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    host: int = 0
    host_budget: int | None = None
    lossy: bool = False
    inner: tuple[Inner, ...] = ()
    termination: str = ""

    def __post_init__(self) -> None:
        _check_numbers(self)

    def __repr__(self) -> str:
        counts = f"{len(self.steps)} steps, {len(self.residences)} residences"
        limit = "no budget" if self.budget is None else f"budget {self.budget}"
        return f"<Plan of {counts}: peak {self.peak}, {self.peak_before} unplanned, {limit}>"

    @property
    def met(self) -> bool:
        """Whether peak and placed bytes are both within the budget (always, when there is none)."""
        placed = self.static + self.arena + self.handed
        return self.budget is None or max(self.peak, placed) <= self.budget

    def count(self, kind: str) -> int:
        return sum(1 for s in self.steps if s.kind == kind)

    @property
    def gap(self) -> float:
        """How far the peak is above the lower bound, as a fraction of the bound."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def time_gap(self) -> float:
        """How far the time lies above what no plan within the budget can beat."""
        return max(0.0, self.time / self.time_bound - 1) if self.time_bound else 0.0


def _check_numbers(plan: Plan) -> None:
    """What can be computed with at all; whether it is right is up to the verifier."""
    if plan.termination not in ("", *TERMINATIONS):
        raise BadInput(f"expected one of {', '.join(TERMINATIONS)}", plan.termination, "Plan.termination")
    for name in ("time", "time_before", "time_bound", "seconds"):
        if not 0 <= getattr(plan, name) < inf:
            raise BadInput(f"time {getattr(plan, name)} is negative or not finite", place=f"Plan.{name}")
    for rows, place, names in (
        (plan.steps, "Plan.steps", ("nbytes",)),
        (plan.residences, "Plan.residences", ("size", "offset")),
    ):
        for name in names:
            numbers = map(attrgetter(name), rows)
            worst = max(numbers, key=abs, default=0)
            if not abs(worst) <= 8 * MOST_BYTES:
                raise BadInput(f"{worst} bytes are beyond 2^62", place=f"{place}.{name}")


@dataclass(frozen=True, slots=True)
class Inner:
    """What op ``op`` runs inside itself, and the plan of it. The workspace of the op covers the peaks, beyond their
    static sets, of all that it runs so, as if they ran at one time."""

    op: int
    graph: Graph
    plan: Plan


@dataclass(frozen=True, slots=True)
class Gap:
    """A part ``[lower, upper)`` of a buffer's life in which only the bytes ``window`` of it, counted from its
    offset, are alive; without a window, none."""

    lower: int
    upper: int
    window: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """Something to place: ``size`` bytes alive in ``[lower, upper)`` (any integer time axis), but for ``gaps``.

    Gaps lie within the live range and do not overlap each other. ``hint`` is an offset worth trying. Buffers of
    one ``group`` are aliases: they share an offset, each alive in its own live range, and are not in one another's
    way. ``pools`` are those it may lie in, by name and best first; none: any of the problem's, in their order.
    ``traffic``: bytes of it that are read and written in all; None: each byte is written once and read once.
    """

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    pinned: int | None = None
    gaps: tuple[Gap, ...] = ()
    hint: int | None = None
    group: str = ""
    pools: tuple[str, ...] = ()
    traffic: int | None = None

    @property
    def gap_fault(self) -> str:
        """What is wrong with a gap, or nothing."""
        since = self.lower
        for gap in sorted(self.gaps, key=lambda gap: gap.lower):
            if not self.lower <= gap.lower < gap.upper <= self.upper:
                return f"gap [{gap.lower}, {gap.upper}) is not within the live range [{self.lower}, {self.upper})"
            if gap.lower < since:
                return f"gap [{gap.lower}, {gap.upper}) overlaps another"
            if gap.window is not None and not 0 <= gap.window[0] < gap.window[1] <= self.size:
                return f"window {list(gap.window)} of a gap is not within the buffer's bytes [0, {self.size})"
            since = gap.upper
        return ""

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """What of it is alive when: ``(since, until, low, high)``, during [since, until) the bytes [low, high),
        in order of time and without the times at which nothing is."""
        since = self.lower
        for gap in sorted(self.gaps, key=lambda gap: gap.lower):
            if since < gap.lower:
                yield since, gap.lower, 0, self.size
            if gap.window is not None:
                yield gap.lower, gap.upper, *gap.window
            since = gap.upper
        if since < self.upper:
            yield since, self.upper, 0, self.size


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory to place in: at most ``capacity`` bytes (None: as many as need be) in heaps of at most ``heap`` bytes
    each (None: one heap). A buffer lies within one heap; offsets are counted from its start. ``speed``: bytes that
    can be read or written in a unit of time, the same unit for all pools of a problem."""

    name: str
    capacity: int | None = None
    heap: int | None = None
    speed: float = 1.0


@dataclass(frozen=True)
class Problem:
    """Buffers to place in an arena of at most ``capacity`` bytes, or in ``pools``.

    Two buffers must not share bytes when they are alive at one time, and also when ``conflicts`` says so: row k
    is a bit set of buffers (bit j: the buffer of index j) that k may be alive together with in some other order
    of execution than the one that live ranges tell. It is symmetric; empty, there is that one order only.
    """

    buffers: tuple[Buffer, ...]
    capacity: int | None = None
    conflicts: tuple[int, ...] = ()
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True)
class Solution:
    """Offsets (bytes) for a problem's buffers, in their order, and the arena they span.

    Of a problem with pools, ``homes`` has the pool and the heap of each buffer, and ``arena`` is the sum of what
    the heaps span."""

    offsets: tuple[int, ...]
    arena: int
    lower_bound: int = 0
    planner: str = ""
    seconds: float = 0.0
    work: int = 0
    homes: tuple[tuple[str, int], ...] = ()

    @property
    def optimal(self) -> bool:
        return self.arena == self.lower_bound
