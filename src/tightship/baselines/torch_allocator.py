"""PyTorch's caching allocator for devices, as it decides where requests go: what it reserves for a list of them.

Reproduced are (c10/cuda/CUDACachingAllocator.cpp, torch 2.1 to 2.13): sizes rounded up to 512 bytes, or with
``roundup_power2_divisions``; a pool of small requests (up to 1 MiB, segments of 2 MiB) and one of large ones
(segments of 20 MiB below 10 MiB, else rounded up to 2 MiB) for each stream; the best fit with the lowest address;
when a block is split; free neighbors joined; ``max_split_size_mb``, ``max_non_split_rounding_mb``, and what they give
back before an error; ``garbage_collection_threshold``, which acts below a limit of the process alone;
``empty_cache``, which also comes before an out-of-memory error; and ``expandable_segments``, where a pool is a range
of addresses of which pages of 2 or 20 MiB are mapped. Not reproduced: private pools. A test compares with PyTorch's
own, request by request, in each setting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tightship.baselines.torch_allocator_settings import ROUND, Settings, rounded
from tightship.errors import BadInput

__all__ = ["LARGEST_SMALL", "SMALL_SEGMENT", "CachingAllocator", "OutOfMemory", "taken_of_device"]

LARGEST_SMALL = 1 << 20
SMALL_SEGMENT, _LEAST_LARGE, _ROUND_SEGMENT = 2 << 20, 10 << 20, 2 << 20
_FIRST_ADDRESS = 1 << 40
_DEFAULTS = Settings()
_RANGE = 1 << 44
"""Addresses of one expandable segment where the device's bytes are not known; else there are 9/8 of those."""

Frames = Sequence[dict[str, Any]]


def taken_of_device(size: int, settings: Settings) -> int:
    """What a request of (rounded) bytes takes of the device where no block is free for it."""
    page = SMALL_SEGMENT if size <= LARGEST_SMALL else settings.large_segment_size
    if settings.expandable_segments:
        return -(-size // page) * page
    return page if size < _LEAST_LARGE else -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT


class OutOfMemory(Exception):
    """A request does not fit into the capacity, with nothing cached any more."""


@dataclass(eq=False, slots=True)
class _Block:
    address: int
    size: int
    segment: _Segment
    requested: int = 0
    used: bool = False
    mapped: bool = True
    before: _Block | None = None
    after: _Block | None = None
    frames: Frames = ()
    since: int = 0
    """How often its pool had been searched when it was freed."""

    @property
    def growable(self) -> int:
        """Its size with the addresses behind it that nothing is mapped at."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)


@dataclass(eq=False, slots=True)
class _Segment:
    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    first: _Block | None = None


_Pool = tuple[int, bool]
"""A stream, and whether requests are small."""


@dataclass(slots=True)
class CachingAllocator:
    """``at = a.alloc(nbytes)``, ``a.free(at)``; ``a.reserved`` and ``a.peak`` are what it takes of the device.

    ``capacity``: bytes of the device; ``limit``: what the process may take of them
    (``set_per_process_memory_fraction``). ``history``: events are kept, and `snapshot` has them."""

    settings: Settings = _DEFAULTS
    capacity: int | None = None
    limit: int | None = None
    history: bool = False
    reserved: int = 0
    peak: int = 0
    allocated: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    _free: dict[_Pool, list[tuple[int, int]]] = field(default_factory=dict)
    _unmapped: dict[_Pool, list[int]] = field(default_factory=dict)
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _segments: dict[int, _Segment] = field(default_factory=dict)
    _searched: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _next: int = _FIRST_ADDRESS
    _clock: int = 0

    def alloc(self, nbytes: int, stream: int = 0, frames: Frames = ()) -> int:
        """The address of ``nbytes``. Raises `OutOfMemory`."""
        size = rounded(nbytes, self.settings)
        pool = stream, size <= LARGEST_SMALL
        block = self._found(size, pool, frames)
        if self._splits(block, size, pool[1]):
            self._split(block, size, pool)
        block.used, block.requested, block.frames = True, nbytes, frames
        self.allocated += block.size
        self._note("alloc", block.address, nbytes, stream, frames)
        return block.address

    def free(self, address: int, frames: Frames = ()) -> None:
        """Give back what was allocated there."""
        block = self._blocks.get(address)
        if block is None or not block.used:
            raise BadInput(f"nothing is allocated at {address}", place="free")
        stream, pool = block.segment.stream, (block.segment.stream, block.segment.small)
        self._note("free_requested", address, block.requested, stream, frames)
        self._note("free_completed", address, block.requested, stream, frames)
        self.allocated -= block.size
        block.used, block.frames = False, ()
        self._put(self._joined(block, pool), pool)

    def empty_cache(self) -> None:
        """Give segments that nothing lies in back to the device; of expandable ones, every page that nothing lies
        in."""
        for pool, free in list(self._free.items()):
            for _, address in list(free):
                block = self._blocks[address]
                if block.segment.expandable:
                    self._unmap(block, pool)
                elif block.size == block.segment.size:
                    self._release(block, pool)

    def snapshot(self) -> dict[str, Any]:
        """The present state and its history as ``torch.cuda.memory._snapshot`` gives them."""
        runs = [run for s in sorted(self._segments.values(), key=lambda s: s.address) for run in _runs(s)]
        set_ = self.settings
        settings = {
            "PYTORCH_CUDA_ALLOC_CONF": str(set_),
            "max_split_size": -1 if set_.max_split_size is None else set_.max_split_size,
            "garbage_collection_threshold": set_.garbage_collection_threshold,
            "expandable_segments": set_.expandable_segments,
            "roundup_power2_divisions": {str(1 << k): n for k, n in enumerate(set_.roundup_power2_divisions)},
        }
        return {
            "segments": [_described(*run) for run in runs], "device_traces": [list(self.events)],
            "allocator_settings": settings, "external_annotations": [],
        }  # fmt: skip

    # --- a block for a request ---

    def _found(self, size: int, pool: _Pool, frames: Frames) -> _Block:
        """A block of at least ``size``, out of its pool; what is cached is given back only where it has to be."""
        if (block := self._best(size, pool)) is not None:
            return block
        if self.limit is not None and self.settings.garbage_collection_threshold:
            self._collect(self.settings.garbage_collection_threshold * self.limit)
        for again in range(3):
            if again == 1 and not self._release_oversize(size, pool):
                continue
            if again == 2:
                self.empty_cache()
            if (block := self._more(size, pool, frames)) is not None:
                return block
        left = max(0, ((self.capacity if self.limit is None else self.limit) or 0) - self.reserved)
        self._note("oom", left, size, pool[0], frames)
        raise OutOfMemory(f"{size} bytes were asked for, {left} are left of the device")

    def _best(self, size: int, pool: _Pool) -> _Block | None:
        """The best fit; of expandable segments, a block counts with what it may grow to."""
        self._searched[pool[1]] += 1
        free, most = self._free.get(pool, []), self.settings.max_split_size
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = self._blocks[free[at][1]]
        while block.segment.expandable and at + 1 < len(free):
            following = self._blocks[free[at + 1][1]]
            if following.growable >= block.growable:
                break
            at, block = at + 1, following
        if most is not None:
            if size < most <= block.size:
                return None
            if size >= most and block.size >= size + self.settings.max_non_split_rounding:
                return None
        del free[at]
        return block

    def _splits(self, block: _Block, size: int, small: bool) -> bool:
        rest, most = block.size - size, self.settings.max_split_size
        if small or self.settings.expandable_segments:
            return rest >= ROUND
        return (most is None or size < most) and rest > LARGEST_SMALL

    def _more(self, size: int, pool: _Pool, frames: Frames) -> _Block | None:
        """A block of new memory of the device; None where there is too little."""
        total = taken_of_device(size, replace(self.settings, expandable_segments=False))
        if self.limit is not None and self.reserved + total > self.limit:
            return None
        if self.settings.expandable_segments:
            return self._grown(size, pool, frames)
        if not self._takes(total):
            return None
        block = self._segment(total, pool, expandable=False)
        self._note("segment_alloc", block.address, total, pool[0], frames)
        return block

    def _segment(self, total: int, pool: _Pool, *, expandable: bool) -> _Block:
        """The one block of a new segment."""
        segment = _Segment(self._next, total, *pool, expandable)
        segment.first = block = _Block(self._next, total, segment, mapped=not expandable)
        self._next += -(-total // _ROUND_SEGMENT) * _ROUND_SEGMENT
        self._segments[segment.address] = segment
        self._blocks[block.address] = block
        return block

    # --- expandable segments ---

    def _grown(self, size: int, pool: _Pool, frames: Frames) -> _Block | None:
        """The first run of free and unmapped addresses that is long enough, with as much mapped as is missing."""
        block: _Block | None = self._room(size, pool)
        while block is not None and (block.size < size or not block.mapped):
            more = block.after if block.mapped else block
            if more is None or more.mapped:
                return None  # it is larger than the addresses of a device
            missing = size - block.size if block.mapped else size
            block = self._map(more, min(missing, more.size), pool, frames)
        if block is not None:
            self._take(block, pool)
        return block

    def _room(self, size: int, pool: _Pool) -> _Block:
        for address in self._unmapped.get(pool, []):
            block = self._blocks[address]
            if block.before is not None and not block.before.used:
                block = block.before
            total: int = 0
            other: _Block | None = block
            while total < size and other is not None and not other.used:
                total, other = total + other.size, other.after
            if total >= size:
                return block
        page = self._page(pool)
        room = max(_RANGE, size) if self.capacity is None else self.capacity + self.capacity // 8
        total = -(-room // page) * page
        block = self._segment(total, pool, expandable=True)
        insort(self._unmapped.setdefault(pool, []), block.address)
        return block

    def _map(self, block: _Block, size: int, pool: _Pool, frames: Frames) -> _Block | None:
        """What the first pages of an unmapped block are when memory is mapped there: it joins what is free beside
        it."""
        page = self._page(pool)
        more = -(-size // page) * page
        if not self._takes(more):
            return None
        self._unmapped[pool].remove(block.address)
        block.mapped = True
        if more < block.size:
            rest = self._cut(block, more)
            rest.mapped = False
            insort(self._unmapped[pool], rest.address)
        self._note("segment_map", block.address, more, pool[0], frames)
        block = self._joined(block, pool)
        self._put(block, pool)
        return block

    def _unmap(self, block: _Block, pool: _Pool) -> None:
        """Give back the pages that lie within a free block."""
        page, first = self._page(pool), block.segment.address
        begin = first - (first - block.address) // page * page
        end = first + (block.address + block.size - first) // page * page
        if begin >= end:
            return
        self._take(block, pool)
        if begin > block.address:
            rest = self._cut(block, begin - block.address)
            self._put(block, pool)
            block = rest
        if end < block.address + block.size:
            self._put(self._cut(block, end - block.address), pool)
        self.reserved -= block.size
        self._note("segment_unmap", block.address, block.size, pool[0])
        block.mapped = False
        block = self._joined(block, pool)
        if block.size == block.segment.size:
            del self._blocks[block.address], self._segments[block.segment.address]
        else:
            insort(self._unmapped.setdefault(pool, []), block.address)

    def _page(self, pool: _Pool) -> int:
        return SMALL_SEGMENT if pool[1] else self.settings.large_segment_size

    # --- giving back ---

    def _release(self, block: _Block, pool: _Pool) -> None:
        """Give a whole segment back."""
        segment = block.segment
        self._take(block, pool)
        del self._blocks[block.address], self._segments[segment.address]
        self.reserved -= segment.size
        self._note("segment_free", segment.address, segment.size, segment.stream)

    def _release_oversize(self, size: int, pool: _Pool) -> bool:
        """Of the blocks that are not split, one that is large enough, or the largest until they are together."""
        most = self.settings.max_split_size
        if most is None or self.settings.expandable_segments:
            return False
        wanted, free = max(size, most), self._free.get(pool, [])
        at = bisect_left(free, (wanted, -1))
        if at < len(free):
            self._release(self._blocks[free[at][1]], pool)
            return True
        total = 0
        while total < wanted and free and free[-1][0] >= most:
            total += free[-1][0]
            self._release(self._blocks[free[-1][1]], pool)
        return total >= wanted

    def _collect(self, threshold: float) -> None:
        """Give back large segments that were not used for longer than others, until no more than ``threshold`` is
        reserved."""
        wanted = self.reserved - int(threshold)
        if wanted <= 0:
            return
        now = self._searched[False]
        whole = [
            (self._blocks[address], pool)
            for pool, free in self._free.items()
            if not pool[1]
            for _, address in free
        ]
        whole = [(b, pool) for b, pool in whole if b.before is None and b.after is None]
        released = 0
        while whole and released < wanted:
            age = sum(now - b.since for b, _ in whole) / len(whole)
            old = [(b, pool) for b, pool in whole if now - b.since >= age]
            whole = [(b, pool) for b, pool in whole if now - b.since < age]
            for block, pool in old:
                released += block.size
                self._release(block, pool)

    # --- blocks ---

    def _takes(self, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def _split(self, block: _Block, size: int, pool: _Pool) -> None:
        self._put(self._cut(block, size), pool)

    def _cut(self, block: _Block, size: int) -> _Block:
        """The rest of a block that keeps ``size`` bytes."""
        rest = _Block(
            block.address + size, block.size - size, block.segment, mapped=block.mapped, before=block,
            after=block.after, since=block.since,
        )  # fmt: skip
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        return rest

    def _joined(self, block: _Block, pool: _Pool) -> _Block:
        """With the neighbors that are free like it; it is in no list."""
        for other in (block.before, block.after):
            if other is None or other.used or other.mapped is not block.mapped:
                continue
            if other.mapped:
                self._take(other, pool)
            else:
                self._unmapped[pool].remove(other.address)
            one, two = (block, other) if other is block.after else (other, block)
            one.size, one.after = one.size + two.size, two.after
            if two.after is not None:
                two.after.before = one
            del self._blocks[two.address]
            block = one
        return block

    def _put(self, block: _Block, pool: _Pool) -> None:
        block.since = self._searched[pool[1]]
        insort(self._free.setdefault(pool, []), (block.size, block.address))

    def _take(self, block: _Block, pool: _Pool) -> None:
        free = self._free[pool]
        del free[bisect_left(free, (block.size, block.address))]

    def _note(self, action: str, address: int, size: int, stream: int, frames: Frames = ()) -> None:
        if self.history:
            self.events.append(self._event(action, address, size, stream, frames))

    def _event(self, action: str, address: int, size: int, stream: int, frames: Frames) -> dict[str, Any]:
        self._clock += 1
        where = "device_free" if action == "oom" else "addr"
        return {
            "action": action, where: address, "size": size, "stream": stream, "time_us": self._clock,
            "pool_id": (0, 0), "frames": frames,
        }  # fmt: skip


def _runs(segment: _Segment) -> Iterator[tuple[_Segment, list[_Block]]]:
    """Blocks one after the other that memory is mapped at; of a segment that is not expandable, all."""
    run: list[_Block] = []
    block = segment.first
    while block is not None:
        if block.mapped:
            run.append(block)
        elif run:
            yield segment, run
            run = []
        block = block.after
    if run:
        yield segment, run


def _described(segment: _Segment, blocks: Sequence[_Block]) -> dict[str, Any]:
    used = [b for b in blocks if b.used]
    total = sum(b.size for b in used)
    return {
        "device": 0, "address": blocks[0].address, "total_size": sum(b.size for b in blocks),
        "allocated_size": total, "active_size": total, "requested_size": sum(b.requested for b in used),
        "stream": segment.stream, "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, 0), "is_expandable": segment.expandable, "frames": [],
        "blocks": [
            {
                "address": b.address, "size": b.size, "requested_size": b.requested if b.used else 0,
                "state": "active_allocated" if b.used else "inactive", "frames": b.frames,
            }
            for b in blocks
        ],
    }  # fmt: skip
