"""Why a device was full: what a memory snapshot of PyTorch's says of its peak, of what lay idle, and of the least.

Every allocation becomes a request that is alive from one event to another. What was allocated before the record began
is alive from its beginning. The least arena is a placement of all requests of a stream, found by the placement
planners and checked; the bound is the most bytes of them alive at one time. Requests of different streams share no
bytes there, as in PyTorch's allocator: its own order of events does not say when one stream may use what another
has freed. Private pools (of CUDA graphs) keep their bytes whatever is freed in them, so they are counted beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tightship.baselines.torch_allocator import CachingAllocator
from tightship.baselines.torch_allocator_settings import ROUND, Settings
from tightship.frontends.memory_snapshot import (
    ACTIONS,
    INACTIVE,
    NO_STACK,
    Device,
    Events,
    Snapshot,
    Stacks,
)
from tightship.plan import Buffer, Problem
from tightship.planners.packing import Search, pack

__all__ = [
    "MOST_SIMULATED", "DeviceReport", "Failure", "Layout", "Line", "Pin", "Requests", "Saving", "explain_snapshot",
    "requests_of",
]  # fmt: skip

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_SIMULATED = 300_000
"""Requests of one device that are simulated in other settings; it takes some ten microseconds for each."""

ALLOC, REQUESTED, COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP, OOM, _ = range(len(ACTIONS))


# --- what was found ---


@dataclass(frozen=True, slots=True)
class Line:
    """``count`` requests of ``bytes`` together, made on a line."""

    line: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A line whose ``count`` requests of ``bytes`` keep free bytes from being given back: ``alone`` lie in segments
    that nothing else keeps, ``shared`` in segments that other lines keep, too."""

    line: str
    bytes: int
    count: int
    alone: int
    shared: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What ``reserved`` bytes are at one moment: ``requested`` by those alive, ``rounding`` beside them,
    ``stranded`` (free, in segments in which something is alive) and ``cached`` (segments in which nothing is).
    ``when`` says which moment it is."""

    when: str
    event: int
    reserved: int
    requested: int
    rounding: int
    stranded: int
    cached: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ran out of memory: so much ``asked`` for, so much ``free`` on the device, so much ``idle`` in
    what was reserved."""

    event: int
    asked: int
    free: int
    idle: int


@dataclass(frozen=True, slots=True)
class Saving:
    """What a change would have reserved at most; ``how`` the number was found: counted, simulated or placed."""

    name: str
    reserved: int
    saves: int
    how: str


@dataclass(frozen=True)
class DeviceReport:
    """What is known of one device. ``peak`` is the most bytes alive as they were asked for, ``reserved`` the most
    that were taken of the device, both in the common pools; ``private`` what pools of their own hold at the end.

    ``arena`` is the least that was found for the same requests, and none can do with less than ``lower_bound``.
    ``timeline`` has rows of seconds, bytes alive and bytes reserved, the most in each stretch of time. ``simulated``
    is what the simulated allocator reserves in its default settings, beside which ``reserved`` stands."""

    device: int
    requests: int
    events: int
    seconds: float
    streams: int
    peak: int
    reserved: int
    private: int
    arena: int
    lower_bound: int
    layout: Layout
    lines: tuple[Line, ...]
    pins: tuple[Pin, ...]
    failures: tuple[Failure, ...]
    savings: tuple[Saving, ...]
    timeline: tuple[tuple[float, int, int], ...]
    notes: tuple[str, ...]
    simulated: int | None = None

    @property
    def optimal(self) -> bool:
        return self.arena == self.lower_bound

    @property
    def fragmentation(self) -> float:
        """The share of what was reserved that the least arena does without."""
        return 1 - self.arena / self.reserved if self.reserved > self.arena else 0.0


# --- requests ---


@dataclass(frozen=True)
class Requests:
    """Requests alive during events [``lower``, ``upper``); a lower of -1 is before the record. ``private``: of a pool
    of its own."""

    lower: I64
    upper: I64
    address: I64
    size: I64
    stream: I64
    stack: I64
    private: Bools
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def rounded(self) -> I64:
        return np.maximum(ROUND, -(-self.size // ROUND) * ROUND)

    def of(self, which: Bools) -> Requests:
        names = ("lower", "upper", "address", "size", "stream", "stack", "private")
        return Requests(*(getattr(self, n)[which] for n in names))

    def alive(self, event: int) -> Bools:
        """Which are alive after an event."""
        return (self.lower <= event) & (event < self.upper)


def requests_of(device: Device) -> Requests:
    """Every request that the record and the blocks at the end tell of."""
    events = device.events
    count = len(events)
    notes: list[str] = []
    ends = COMPLETED if (events.action == COMPLETED).any() else REQUESTED
    if ends == REQUESTED and (events.action == REQUESTED).any():
        notes.append("no free_completed events were recorded: bytes count as free once that is requested")
    at = np.flatnonzero((events.action == ALLOC) | (events.action == ends))
    address = events.address[at]
    order = np.lexsort((at, address))
    at, address = at[order], address[order]
    begins = events.action[at] == ALLOC
    same = np.append(address[1:] == address[:-1], False)
    follows = np.append(at[1:], count)
    again = np.append(begins[1:], False) & same & begins
    if again.any():
        notes.append(
            f"{int(again.sum())} allocations lie where another was never freed: that record is incomplete"
        )
    upper = np.where(same, follows, count)[begins]
    # A free whose allocation is not in the record: alive since before, or since the last free at its address.
    first = ~begins & ~(np.append(False, same[:-1]) & np.append(False, begins[:-1]))
    since = np.where(np.append(False, same[:-1]), np.append(-1, at[:-1]), -1)[first]
    made, early = at[begins], at[first]
    blocks = device.blocks
    open_ = made[upper == count]
    held = (blocks.state != INACTIVE) & ~np.isin(blocks.address, events.address[open_])
    if (
        lost := int((~np.isin(events.address[open_], blocks.address[blocks.state != INACTIVE])).sum())
    ) and len(device.segments):
        notes.append(f"{lost} allocations were not freed, but are in no segment at the end")
    if len(early) or held.any():
        nbytes = int(events.size[early].sum() + blocks.requested[held].sum())
        notes.append(_late(len(early) + int(held.sum()), nbytes, bool(count)))
    private = events.private | _within(events.address, device)
    streams = device.segments.stream[blocks.segment[held]]
    pools = device.segments.private[blocks.segment[held]]
    many = int(held.sum())
    found = Requests(
        np.concatenate([made, since, np.full(many, -1)]),
        np.concatenate([upper, early, np.full(many, count)]),
        np.concatenate([events.address[made], events.address[early], blocks.address[held]]),
        np.concatenate([events.size[made], events.size[early], blocks.requested[held]]),
        np.concatenate([events.stream[made], events.stream[early], streams]),
        np.concatenate([events.stack[made], np.full(len(early), -1), blocks.stack[held]]),
        np.concatenate([private[made], private[early], pools]),
        tuple(notes),
    )
    return found


def _late(count: int, nbytes: int, recorded: bool) -> str:
    from tightship.units import format_bytes

    if not recorded:
        return (
            "there is no record of events, only what is allocated at the end: "
            "torch.cuda.memory._record_memory_history() begins one"
        )
    return (
        f"the record begins after {count} allocations ({format_bytes(nbytes)}): it was begun late, or its ring "
        "buffer (max_entries) lost the beginning; peaks before it are not known"
    )


def _within(address: I64, device: Device) -> Bools:
    """Whether addresses lie in segments of private pools."""
    s = device.segments
    start = s.address[s.private].view(np.uint64)
    order = np.argsort(start)
    start, size = start[order], s.size[s.private][order].view(np.uint64)
    at = np.searchsorted(start, address.view(np.uint64), side="right") - 1
    if not len(start):
        return np.zeros(len(address), dtype=bool)
    inside: Bools = (at >= 0) & (address.view(np.uint64) - start[at] < size[at])
    return inside


# --- one device ---


def explain_snapshot(
    snapshot: Snapshot, *, seconds: float = 10.0, columns: int = 400
) -> tuple[DeviceReport, ...]:
    """A report of each device. ``seconds``: what the search for the least arena may take of each; ``columns``: rows
    of the timeline."""
    return tuple(_Explaining(d, snapshot).report(seconds, columns) for d in snapshot.devices)


@dataclass(frozen=True)
class _Explaining:
    device: Device
    snapshot: Snapshot

    @property
    def events(self) -> Events:
        return self.device.events

    @property
    def stacks(self) -> Stacks:
        return self.snapshot.stacks

    @cached_property
    def everything(self) -> Requests:
        return requests_of(self.device)

    @cached_property
    def common(self) -> Requests:
        """Requests of the common pools."""
        return self.everything.of(~self.everything.private)

    @cached_property
    def live(self) -> I64:
        """Bytes alive, as asked for, at the beginning and after each event."""
        return _load(self.common.lower, self.common.upper, self.common.size, len(self.events))

    @cached_property
    def reserved(self) -> I64:
        """Bytes of the device in the common pools, at the beginning and after each event."""
        events, segments = self.events, self.device.segments
        mine = ~(events.private | _within(events.address, self.device))
        sign = np.isin(events.action, (SEGMENT_ALLOC, MAP)).astype(np.int64)
        sign -= np.isin(events.action, (SEGMENT_FREE, UNMAP))
        change = np.append(0, np.cumsum(np.where(mine, sign * events.size, 0)))
        at_end = int(segments.size[~segments.private].sum())
        found: I64 = change + (at_end - change[-1])
        return found - min(0, int(found.min()))

    def report(self, seconds: float, columns: int) -> DeviceReport:
        peak = int(self.live.max())
        layout, pins = self._layout()
        arena, bound, streams = self._arena(seconds)
        reserved = int(self.reserved.max())
        plain, savings = self._savings(reserved, layout, arena)
        time, private = self.events.time, self.device.segments.private
        timed = len(time) > 0 and time[0] > 0 and int(time[-1]) > int(time[0])
        return DeviceReport(
            self.device.number, len(self.everything), len(self.events),
            (int(time[-1]) - int(time[0])) / 1e6 if timed else 0.0,
            streams, peak, reserved, int(self.device.segments.size[private].sum()), arena, bound, layout,
            self._lines(self.common.alive(int(self.live.argmax()) - 1)), pins, self._failures(), savings,
            self._timeline(columns, timed), tuple(self._notes()), plain,
        )  # fmt: skip

    def _lines(self, which: Bools) -> tuple[Line, ...]:
        """Who makes up what is alive, by line, largest first."""
        chosen = self.common.of(which)
        line, names = self.stacks.lines(chosen.stack)
        nbytes, count = _sums(line, chosen.size, len(names)), np.bincount(line, minlength=len(names))
        rows = [Line(name, int(nbytes[k]), int(count[k])) for k, name in enumerate(names)]
        return tuple(sorted(rows, key=lambda row: (-row.bytes, row.line)))

    # --- what is idle ---

    def _moment(self) -> tuple[int, str]:
        """The event after which what is idle says most: an out-of-memory error, or the growth to the peak."""
        failed = np.flatnonzero(self.events.action == OOM)
        moving = bool(np.isin(self.events.action, (MAP, UNMAP)).any())
        last = len(self.events) - 1
        end = "when the snapshot was taken"
        if moving:
            return last, end  # segments that grow and shrink are known at the end alone
        if len(failed):
            return int(failed[-1]), "at the last out-of-memory error"
        first = int(self.reserved.argmax()) - 1
        if first < 0:
            return last, end
        return min(first + 1, last), "at most"

    def _layout(self) -> tuple[Layout, tuple[Pin, ...]]:
        event, when = self._moment()
        start, size = self._segments(event)
        chosen = self.common.of(self.common.alive(event))
        at = np.searchsorted(start, chosen.address.view(np.uint64), side="right") - 1
        inside = np.zeros(len(chosen), dtype=bool)
        if len(start):
            inside = (at >= 0) & (chosen.address.view(np.uint64) - start[at] < size[at].view(np.uint64))
        taken = _sums(at[inside], chosen.rounded[inside], len(size))
        free = np.maximum(size - taken, 0)
        holding = np.bincount(at[inside], minlength=len(size)) > 0
        requested, rounding = int(chosen.size.sum()), int((chosen.rounded - chosen.size).sum())
        layout = Layout(
            when,
            event,
            int(size.sum()),
            requested,
            rounding,
            int(free[holding].sum()),
            int(free[~holding].sum()),
        )
        return layout, self._pins(chosen.of(inside), at[inside], free)

    def _segments(self, event: int) -> tuple[NDArray[np.uint64], I64]:
        """Where segments of the common pools begin after an event, in order, and their sizes."""
        events, last = self.events, self.device.segments
        at = np.flatnonzero(np.isin(events.action, (SEGMENT_ALLOC, SEGMENT_FREE)))
        at = at[at > event][::-1]
        common = ~last.private
        there = dict(zip(last.address[common].tolist(), last.size[common].tolist(), strict=True))
        private = _within(events.address, self.device) | events.private
        for k in at.tolist():  # back from the end
            if private[k]:
                continue
            address = int(events.address[k])
            if events.action[k] == SEGMENT_ALLOC:
                there.pop(address, None)
            else:
                there[address] = int(events.size[k])
        start = np.array(list(there), dtype=np.int64).view(np.uint64)
        order = np.argsort(start)
        return start[order], np.array(list(there.values()), dtype=np.int64)[order]

    def _pins(self, chosen: Requests, segment: I64, free: I64) -> tuple[Pin, ...]:
        line, names = self.stacks.lines(chosen.stack)
        pairs = (
            np.unique(np.stack([segment, line], axis=1), axis=0) if len(line) else np.zeros((0, 2), np.int64)
        )
        many = np.bincount(pairs[:, 0], minlength=len(free)) > 1
        idle, shared = free[pairs[:, 0]], many[pairs[:, 0]]
        alone = _sums(pairs[:, 1], np.where(shared, 0, idle), len(names))
        beside = _sums(pairs[:, 1], np.where(shared, idle, 0), len(names))
        nbytes, count = _sums(line, chosen.size, len(names)), np.bincount(line, minlength=len(names))
        rows = [
            Pin(name, int(nbytes[k]), int(count[k]), int(alone[k]), int(beside[k]))
            for k, name in enumerate(names)
        ]
        rows = [row for row in rows if row.alone or row.shared]
        return tuple(sorted(rows, key=lambda row: (-row.alone, -row.shared, row.line)))

    def _failures(self) -> tuple[Failure, ...]:
        found = []
        for k in np.flatnonzero(self.events.action == OOM).tolist():
            idle = max(0, int(self.reserved[k + 1]) - int(self.live[k + 1]))
            found.append(Failure(k, int(self.events.size[k]), int(self.events.address[k]), idle))
        return tuple(found)

    # --- what it could be ---

    def _arena(self, seconds: float) -> tuple[int, int, int]:
        """The least arena that is found for all requests, its bound, and how many streams there are."""
        streams = np.unique(self.common.stream)
        arena = bound = 0
        for stream in streams.tolist():
            mine = self.common.of(self.common.stream == stream)
            rows = zip(mine.lower.tolist(), mine.upper.tolist(), mine.rounded.tolist(), strict=True)
            # A request of which nothing was recorded between its two events takes no part in the arena.
            buffers = [Buffer(str(k), a + 1, b + 1, n, ROUND) for k, (a, b, n) in enumerate(rows) if a < b]
            if not buffers:
                continue
            solution = pack(Problem(tuple(buffers)), search=Search(seconds=seconds / len(streams)))
            arena, bound = arena + solution.arena, bound + solution.lower_bound
        return arena, bound, len(streams)

    def _savings(self, reserved: int, layout: Layout, arena: int) -> tuple[int | None, tuple[Saving, ...]]:
        """What the simulated allocator reserves as it is, and what changes would save."""
        rows = [
            Saving("empty_cache() at that moment", layout.reserved - layout.cached, layout.cached, "counted")
        ]
        plain = None
        if len(self.common) <= MOST_SIMULATED:
            plain = _replayed(self.common, expandable=False)
            if not self.device.segments.expandable.any() and not (self.events.action == MAP).any():
                grown = _replayed(self.common, expandable=True)
                rows.append(Saving("expandable_segments", grown, reserved - grown, "simulated"))
        rows.append(Saving("a planned arena", arena, reserved - arena, "placed"))
        return plain, tuple(rows)

    # --- the rest ---

    def _timeline(self, columns: int, timed: bool) -> tuple[tuple[float, int, int], ...]:
        """The most alive and the most reserved in each stretch of events."""
        count = len(self.live)
        edges = np.unique(np.linspace(0, count, min(columns, count) + 1).astype(np.int64))
        live = np.maximum.reduceat(self.live, edges[:-1])
        reserved = np.maximum.reduceat(self.reserved, edges[:-1])
        time = self.events.time
        at = np.maximum(edges[:-1] - 1, 0)
        when = (time[at] - time[0]) / 1e6 if timed else edges[:-1].astype(np.float64)
        return tuple(zip(when.tolist(), live.tolist(), reserved.tolist(), strict=True))

    def _notes(self) -> Iterator[str]:
        from tightship.units import format_bytes

        yield from self.everything.notes
        others = int((self.events.action >= len(ACTIONS)).sum())
        if others:
            yield f"{others} events of kinds that are not known here were left out"
        if private := int(self.device.segments.size[self.device.segments.private].sum()):
            yield f"{format_bytes(private)} are held by private pools (CUDA graphs), counted in nothing else here"
        if len(np.unique(self.common.stream)) > 1:
            yield "several streams: the arena gives each its own bytes, as PyTorch's allocator does"
        if any(name == NO_STACK for name in self.stacks.lines(self.common.stack)[1]):
            yield f"{NO_STACK}: allocated before the record began, or recorded without stacks"
        if len(self.common) > MOST_SIMULATED:
            yield f"more than {MOST_SIMULATED:,} requests: other settings of the allocator were not simulated"
        settings = self.snapshot.settings
        off = {"max_split_size": (-1,), "garbage_collection_threshold": (0, 0.0)}
        for name, plain in off.items():
            if settings.get(name, plain[0]) not in plain:
                yield f"recorded with {name}={settings[name]}, which the simulation does not have"


def _sums(which: I64, values: I64, count: int) -> I64:
    """Sums of integers by row; `bincount` would add them as floats."""
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, which, values)
    return total


def _load(lower: I64, upper: I64, size: I64, count: int) -> I64:
    """What is alive at the beginning and after each of ``count`` events."""
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, lower + 1, size)
    np.subtract.at(change, upper + 1, size)
    return np.cumsum(change)[: count + 1]


def _replayed(requests: Requests, *, expandable: bool) -> int:
    """What PyTorch's allocator would reserve at most for the same requests, alone on its device."""
    allocator = CachingAllocator(Settings(expandable_segments=expandable))
    count = len(requests)
    at = np.concatenate([requests.upper, requests.lower])
    # At one event nothing is both freed and made, but before the record many are made: by address.
    order = np.lexsort((np.tile(requests.address.view(np.uint64), 2), at))
    last = int(requests.upper.max(initial=0))
    size, stream, address = requests.size.tolist(), requests.stream.tolist(), [0] * count
    never = requests.upper == last
    for k in order.tolist():
        if k >= count:
            address[k - count] = allocator.alloc(size[k - count], stream[k - count])
        elif not never[k]:
            allocator.free(address[k])
    return allocator.peak
