"""Why a device was full: what a memory snapshot of PyTorch's says of its peak, of what lay idle, and of the least.

The least arena is a placement of all requests of a stream (`diagnose/snapshot_requests`), found by the placement
planners and checked; the bound is the most bytes of them alive at one time. Requests of different streams share no
bytes there, as in PyTorch's allocator: its own order of events does not say when one stream may use what another
has freed. Private pools (of CUDA graphs) keep their bytes whatever is freed in them, so they are counted beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tightship.baselines.torch_allocator import LARGEST_SMALL, SMALL_SEGMENT, taken_of_device
from tightship.baselines.torch_allocator_settings import ROUND, Settings
from tightship.cached import cached_property
from tightship.diagnose.snapshot_requests import (
    Circumstances,
    Requests,
    circumstances_of,
    other_settings,
    requests_of,
    trial,
    within,
)
from tightship.frontends.memory_snapshot import ACTIONS, NO_STACK, Device, Events, Snapshot, Stacks
from tightship.plan import Buffer, Problem
from tightship.planners.packing import Search, pack

__all__ = [
    "MOST_SIMULATED", "DeviceReport", "Failure", "Layout", "Line", "Pin", "PinningStack", "Requests", "Saving",
    "explain_snapshot", "requests_of",
]  # fmt: skip

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_SIMULATED = 300_000
"""Requests of one device that are simulated; it takes some ten microseconds for each."""
MOST_TRIED = 100_000
"""Requests of one device that are simulated in every setting, not only as they were and with expandable segments."""
MOST_PAGES = 1 << 22
"""Pages of expandable segments that are looked at one by one; 8 TiB have so many."""
STACKS = 50
"""Call stacks of a device that are said."""

_, _, _, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP, OOM, _ = range(len(ACTIONS))


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
class PinningStack:
    """The same of one call stack, whose lines are ``frames``, innermost first."""

    frames: tuple[str, ...]
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
    what was reserved; it ``takes`` so much of the device, as a segment or in pages."""

    event: int
    asked: int
    free: int
    idle: int
    takes: int = 0


@dataclass(frozen=True, slots=True)
class Saving:
    """What a change would have reserved at most; ``how`` the number was found: counted, simulated or placed.
    ``failed``: how many requests find no memory on that device; None where nothing says how large it was."""

    name: str
    reserved: int
    saves: int
    how: str
    failed: int | None = None


@dataclass(frozen=True)
class DeviceReport:
    """What is known of one device. ``peak`` is the most bytes alive as they were asked for, ``reserved`` the most
    that were taken of the device, both in the common pools; ``private`` what pools of their own hold at the end.

    ``arena`` is the least that was found for the same requests, and none can do with less than ``lower_bound``.
    ``timeline`` has rows of seconds, bytes alive and bytes reserved, the most in each stretch of time. ``simulated``
    is what the simulated allocator reserves in the recorded ``settings`` (empty: the defaults), beside which
    ``reserved`` stands. ``capacity``: bytes of the device, where the record shows them."""

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
    settings: str = ""
    capacity: int | None = None
    stacks: tuple[PinningStack, ...] = ()

    @property
    def optimal(self) -> bool:
        return self.arena == self.lower_bound

    @property
    def fragmentation(self) -> float:
        """The share of what was reserved that the least arena does without."""
        return 1 - self.arena / self.reserved if self.reserved > self.arena else 0.0


# --- one device ---


def explain_snapshot(
    snapshot: Snapshot, *, seconds: float = 10.0, columns: int = 400, settings: Settings | None = None
) -> tuple[DeviceReport, ...]:
    """A report of each device. ``seconds``: what the search for the least arena may take of each; ``columns``: rows
    of the timeline; ``settings``: of the allocator, which are tried, too."""
    return tuple(_Explaining(d, snapshot, settings).report(seconds, columns) for d in snapshot.devices)


@dataclass(frozen=True)
class _Explaining:
    device: Device
    snapshot: Snapshot
    tried: Settings | None = None

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
    def settings(self) -> Settings:
        """Those it was recorded in. Segments are what they were, whatever was set when the snapshot was taken."""
        found = Settings.recorded(self.snapshot.settings)
        grows = bool(self.device.segments.expandable.any() or (self.events.action == MAP).any())
        return replace(found, expandable_segments=True) if grows else found

    @cached_property
    def around(self) -> Circumstances:
        return circumstances_of(self.device, self.reserved, self.settings)

    @cached_property
    def live(self) -> I64:
        """Bytes alive, as asked for, at the beginning and after each event."""
        return _load(self.common.lower, self.common.upper, self.common.size, len(self.events))

    @cached_property
    def reserved(self) -> I64:
        """Bytes of the device in the common pools, at the beginning and after each event."""
        events, segments = self.events, self.device.segments
        mine = ~(events.private | within(events.address, self.device))
        sign = np.isin(events.action, (SEGMENT_ALLOC, MAP)).astype(np.int64)
        sign -= np.isin(events.action, (SEGMENT_FREE, UNMAP))
        change = np.append(0, np.cumsum(np.where(mine, sign * events.size, 0)))
        at_end = int(segments.size[~segments.private].sum())
        found: I64 = change + (at_end - change[-1])
        return found - min(0, int(found.min()))

    def report(self, seconds: float, columns: int) -> DeviceReport:
        peak = int(self.live.max())
        layout, pins, stacks = self._layout()
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
            self._timeline(columns, timed), tuple(self._notes()), plain, str(self.settings),
            self.around.capacity, stacks,
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

    def _layout(self) -> tuple[Layout, tuple[Pin, ...], tuple[PinningStack, ...]]:
        event, when = self._moment()
        start, size = self._segments(event)
        chosen = self.common.of(self.common.alive(event))
        each = chosen.taken(self.settings)
        if not self.settings.expandable_segments:
            each = _with_unsplit_ends(chosen.address, each, start, size)
        part, at, taken = _parts(chosen.address, each, start, size)
        free = np.maximum(size - _sums(at, taken, len(size)), 0)
        holding = np.bincount(at, minlength=len(size)) > 0
        requested, rounding = int(chosen.size.sum()), int((each - chosen.size).sum())
        stranded, cached = int(free[holding].sum()), int(free[~holding].sum())
        layout = Layout(when, event, int(size.sum()), requested, rounding, stranded, cached)
        line, names = self.stacks.lines(chosen.stack)
        pins = [Pin(names[k], *row) for k, row in _pinned(chosen, line, part, at, free)]
        pins.sort(key=lambda row: (-row.alone, -row.shared, row.line))
        return layout, tuple(pins), self._pinning_stacks(chosen, part, at, free)

    def _segments(self, event: int) -> tuple[NDArray[np.uint64], I64]:
        """Where segments of the common pools begin after an event, in order, and their sizes; of expandable segments
        pages, which can be given back one by one."""
        events, last = self.events, self.device.segments
        at = np.flatnonzero(np.isin(events.action, (SEGMENT_ALLOC, SEGMENT_FREE)))
        at = at[at > event][::-1]
        common = ~last.private
        there = dict(zip(last.address[common].tolist(), last.size[common].tolist(), strict=True))
        private = within(events.address, self.device) | events.private
        for k in at.tolist():  # back from the end
            if private[k]:
                continue
            address = int(events.address[k])
            if events.action[k] == SEGMENT_ALLOC:
                there.pop(address, None)
            else:
                there[address] = int(events.size[k])
        start, size = (np.array(list(row), dtype=np.int64) for row in (there, there.values()))
        if last.expandable[common].any() and int(size.sum()) // SMALL_SEGMENT < MOST_PAGES:
            large = self.settings.large_segment_size
            page = np.where(last.expandable[common], np.where(last.small[common], SMALL_SEGMENT, large), size)
            count = -(-size // np.maximum(page, 1))
            nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            start = np.repeat(start, count) + nth * np.repeat(page, count)
            size = np.minimum(np.repeat(page, count), np.repeat(size, count) - nth * np.repeat(page, count))
        order = np.argsort(start.view(np.uint64))
        return start.view(np.uint64)[order], size[order]

    def _pinning_stacks(self, chosen: Requests, part: I64, at: I64, free: I64) -> tuple[PinningStack, ...]:
        """Call stacks whose requests lie in segments with free bytes; those that read the same are one."""
        part, at = part[free[at] > 0], at[free[at] > 0]
        kept, part = np.unique(part, return_inverse=True)
        chosen = chosen.of(kept)  # by number
        different, which = np.unique(chosen.stack, return_inverse=True)
        texts: dict[tuple[str, ...], int] = {}
        number = [texts.setdefault(self.stacks.frames(s), len(texts)) for s in different.tolist()]
        stack, names = np.array(number, dtype=np.int64)[which], list(texts)
        found = [PinningStack(names[k], *row) for k, row in _pinned(chosen, stack, part, at, free)]
        return tuple(sorted(found, key=lambda row: (-row.alone, -row.shared, row.frames))[:STACKS])

    def _failures(self) -> tuple[Failure, ...]:
        found = []
        for k in np.flatnonzero(self.events.action == OOM).tolist():
            idle = max(0, int(self.reserved[k + 1]) - int(self.live[k + 1]))
            asked, free = int(self.events.size[k]), int(self.events.address[k])
            found.append(Failure(k, asked, free, idle, taken_of_device(asked, self.settings)))
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
        plain, count = None, len(self.common)
        if count <= MOST_SIMULATED:
            plain = self._trial(self.settings, reserved, "").reserved
            others = dict(other_settings(self.settings, self.around))
            if count > MOST_TRIED:
                others = {name: s for name, s in others.items() if "expandable_segments" in name}
            if self.tried is not None:
                others[str(self.tried) or "the default settings"] = self.tried
            rows += [self._trial(settings, reserved, name) for name, settings in others.items()]
        rows.append(Saving("a planned arena", arena, reserved - arena, "placed"))
        return plain, tuple(rows)

    def _trial(self, settings: Settings, reserved: int, name: str) -> Saving:
        found = trial(self.common, len(self.events), settings, self.around)
        failed = None if self.around.capacity is None else found.failed
        return Saving(name, found.reserved, reserved - found.reserved, "simulated", failed)

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
        if (count := len(self.common)) > MOST_TRIED:
            which = "" if count > MOST_SIMULATED else " but expandable_segments"
            most = MOST_SIMULATED if count > MOST_SIMULATED else MOST_TRIED
            yield f"more than {most:,} requests: no other setting of the allocator{which} was simulated"
        share = self.settings.garbage_collection_threshold
        if share and self.around.limit is None and self.around.capacity is None:
            yield (
                f"garbage_collection_threshold:{share} acts below set_per_process_memory_fraction alone, and "
                "nothing was collected in the record: the simulation does not collect either"
            )


def _with_unsplit_ends(address: I64, size: I64, start: NDArray[np.uint64], length: I64) -> I64:
    """Sizes of blocks: a large one is split only if more than `LARGEST_SMALL` is left, so that what is free up to the
    next block, or to the end of the segment, and is no more than that, is its own."""
    if not len(start):
        return size
    begin = address.view(np.uint64)
    order = np.argsort(begin, kind="stable")
    at = np.maximum(np.searchsorted(start, begin, side="right").astype(np.int64) - 1, 0)
    end = start[at] + length[at].view(np.uint64)
    following = np.append(begin[order][1:], np.uint64(2**64 - 1))
    until = np.empty_like(begin)
    until[order] = following
    # of a request beyond what there is the gap is huge, and left alone
    gap = np.minimum(until, end) - (begin + size.view(np.uint64))
    own = (size > LARGEST_SMALL) & (gap <= LARGEST_SMALL)
    return size + np.where(own, gap, 0).astype(np.int64)


def _parts(address: I64, size: I64, start: NDArray[np.uint64], length: I64) -> tuple[I64, I64, I64]:
    """Which request lies in which segment with how many bytes; in pages of expandable segments with some of them."""
    begin_at = address.view(np.uint64)
    end_at = begin_at + np.minimum(
        (np.maximum(size, 1) - 1).view(np.uint64), ~begin_at
    )  # not beyond what there is
    first = np.searchsorted(start, begin_at, side="right") - 1
    last = np.searchsorted(start, end_at, side="right") - 1
    count = np.where(first >= 0, last - first + 1, 0)
    if int(count.sum()) > len(size) + len(start):
        count = np.minimum(count, 1)  # requests that share bytes: not what an allocator does
    part = np.repeat(np.arange(len(size)), count)
    at = np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count) + first[part]
    begin = np.maximum((begin_at[part] - start[at]).view(np.int64), 0)
    ahead = np.maximum((start[at] - begin_at[part]).view(np.int64), 0)
    taken = np.minimum(length[at] - begin, size[part] - ahead)
    inside = taken > 0
    return part[inside], at[inside], taken[inside]


def _pinned(
    chosen: Requests, group: I64, part: I64, segment: I64, free: I64
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each group that keeps free bytes its bytes, how many requests, and the free bytes of segments that it alone
    keeps and that others keep, too."""
    groups = int(group.max(initial=-1)) + 1
    pairs = np.unique(np.stack([segment, group[part]], axis=1), axis=0)
    many = np.bincount(pairs[:, 0], minlength=len(free)) > 1
    idle, shared = free[pairs[:, 0]], many[pairs[:, 0]]
    alone = _sums(pairs[:, 1], np.where(shared, 0, idle), groups)
    beside = _sums(pairs[:, 1], np.where(shared, idle, 0), groups)
    there = np.unique(part)
    nbytes = _sums(group[there], chosen.size[there], groups)
    count = np.bincount(group[there], minlength=groups)
    for k in np.flatnonzero((alone > 0) | (beside > 0)).tolist():
        yield k, (int(nbytes[k]), int(count[k]), int(alone[k]), int(beside[k]))


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
