"""Requests that a memory snapshot tells of, and what PyTorch's allocator would have reserved for them otherwise.

Every allocation becomes a request that is alive from one event to another; what was allocated before the record began
is alive from its beginning. In a trial the same requests come to a simulated allocator in the same order. Where the
record shows that the cache was emptied, it is emptied there, too; where the device was full, the simulated one is as
large, and empties it by itself. A request that failed in the record is tried again where it stands, and given back
at once: the record does not say how long it would have been kept. Known limits: how large the device is shows only
where it was full; what a limit of the process (``set_per_process_memory_fraction``) was, only where garbage
collection has kept below it. Requests of private pools take no part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tightship.baselines.torch_allocator import CachingAllocator, OutOfMemory, taken_of_device
from tightship.baselines.torch_allocator_settings import ROUND, Settings, rounded
from tightship.cached import cached_property
from tightship.frontends.memory_snapshot import ACTIONS, INACTIVE, Device, Events

__all__ = [
    "Circumstances", "Requests", "Trial", "circumstances_of", "other_settings", "requests_of", "trial", "within",
]  # fmt: skip

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

ALLOC, REQUESTED, COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP, OOM, _ = range(len(ACTIONS))


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

    def taken(self, settings: Settings) -> I64:
        """What each takes of a block."""
        different, which = np.unique(self.size, return_inverse=True)
        sizes: I64 = np.array([rounded(n, settings) for n in different.tolist()], dtype=np.int64)
        return sizes[which]

    def of(self, which: Bools | I64) -> Requests:
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
    private = events.private | within(events.address, device)
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


def within(address: I64, device: Device) -> Bools:
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


# --- trials ---

MOST_EMPTIED = 100_000_000
"""Events times how often the cache was emptied among them; with more it is never emptied in a trial."""


@dataclass(frozen=True)
class Circumstances:
    """What was done beside requests, by event: when the cache was ``emptied``, and requests that ``failed`` (event,
    bytes, stream). ``capacity``: bytes of the device, ``limit``: of the process; None where nothing says so."""

    emptied: tuple[int, ...] = ()
    failed: tuple[tuple[int, int, int], ...] = ()
    capacity: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """The most that was ``reserved``, and how many requests found no memory."""

    reserved: int
    failed: int


def circumstances_of(device: Device, reserved: I64, settings: Settings) -> Circumstances:
    """Those that a record tells of; ``reserved``: bytes of the common pools at the beginning and after each event."""
    events = device.events
    common = ~(events.private | within(events.address, device))
    failed = np.flatnonzero((events.action == OOM) & common)
    capacity = _capacity(events, failed, reserved, settings) if len(failed) else None
    gives = np.isin(events.action, (SEGMENT_FREE, UNMAP)) & common
    starts = np.flatnonzero(gives & ~np.append(False, gives[:-1])[: len(gives)])
    ends = np.flatnonzero(gives & ~np.append(gives[1:], False)[: len(gives)])  # of each run
    after = np.append(events.action, len(ACTIONS))[ends + 1]
    wanted = np.where(np.isin(after, (SEGMENT_ALLOC, MAP, OOM)), np.append(events.size, 0)[ends + 1], 0)
    before, limit = reserved[starts], None
    by_itself = (wanted > 0) & (before + wanted > (1 << 62 if capacity is None else capacity))
    if share := settings.garbage_collection_threshold:
        # More is collected than what the most was with which new memory was taken and nothing collected before it.
        plain = (events.action == SEGMENT_ALLOC) & common & ~np.append(False, gives[:-1])[: len(gives)]
        kept = int(reserved[:-1][plain].max(initial=0))
        collected = (after == SEGMENT_ALLOC) & (before > kept) & ~by_itself
        limit = math.ceil(kept / share) if collected.any() else None
        by_itself |= collected
    emptied = tuple(ends[~by_itself].tolist())
    return Circumstances(
        emptied if len(emptied) * len(events) <= MOST_EMPTIED else (),
        tuple(
            zip(failed.tolist(), events.size[failed].tolist(), events.stream[failed].tolist(), strict=True)
        ),
        capacity,
        limit,
    )


def _capacity(events: Events, failed: I64, reserved: I64, settings: Settings) -> int:
    """Bytes of the device where it was full; where it was not, a limit of the process was, and what it had taken is
    all that is known of it."""
    free = np.maximum(events.address[failed], 0)  # in place of an address
    needs = np.array([taken_of_device(n, settings) for n in events.size[failed].tolist()])
    seen = reserved[failed] + np.where(free < needs, free, 0)
    return int(max(seen.max(), reserved.max()))


def trial(requests: Requests, end: int, settings: Settings, around: Circumstances) -> Trial:
    """Requests in these settings; those that are alive until event ``end`` are never freed."""
    collects = settings.garbage_collection_threshold > 0
    limit = around.capacity if around.limit is None else around.limit
    allocator = CachingAllocator(settings, around.capacity, limit if collects else None)
    count, failed = len(requests), 0
    events = np.array([*around.emptied, *(event for event, _, _ in around.failed)], dtype=np.int64)
    at = np.concatenate([requests.upper, requests.lower, events])
    # At one event nothing is both freed and made, but before the record many are made: by address.
    where = np.concatenate([np.tile(requests.address.view(np.uint64), 2), np.zeros(len(events), np.uint64)])
    never, placed = (requests.upper == end).tolist(), [-1] * count
    size, stream = requests.size.tolist(), requests.stream.tolist()
    for k in np.lexsort((where, at)).tolist():
        if k < count:
            if not never[k] and placed[k] >= 0:
                allocator.free(placed[k])
        elif k >= 2 * count:
            failed += _beside(allocator, around, k - 2 * count)
        else:
            try:
                placed[k - count] = allocator.alloc(size[k - count], stream[k - count])
            except OutOfMemory:
                failed += 1
    return Trial(allocator.peak, failed)


def _beside(allocator: CachingAllocator, around: Circumstances, k: int) -> int:
    """What is no request of the record's; how many requests fail in it."""
    if k < len(around.emptied):
        allocator.empty_cache()
        return 0
    _, nbytes, stream = around.failed[k - len(around.emptied)]
    try:
        allocator.free(allocator.alloc(nbytes, stream))
    except OutOfMemory:
        return 1
    return 0


_TRIED = (
    "expandable_segments:True",
    "roundup_power2_divisions:8",
    "max_split_size_mb:128",
    "garbage_collection_threshold:0.8",
)


def other_settings(recorded: Settings, around: Circumstances) -> Iterator[tuple[str, Settings]]:
    """Each setting that a record has without it, and each that it does not have with it, by what they are called."""
    plain = Settings()
    for text in _TRIED:
        key, tried = text.partition(":")[0], Settings.parse(text)
        name = next(n for n in Settings.__dataclass_fields__ if getattr(tried, n) != getattr(plain, n))
        if getattr(recorded, name) != getattr(plain, name):
            yield f"without {key}", replace(recorded, **{name: getattr(plain, name)})
        elif name != "garbage_collection_threshold" or around.capacity is not None:
            said = key if name == "expandable_segments" else text
            yield said, replace(recorded, **{name: getattr(tried, name)})
