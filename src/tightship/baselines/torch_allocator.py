"""PyTorch's caching allocator for devices, as it decides where requests go: what it reserves for a list of them.

Reproduced are (c10/cuda/CUDACachingAllocator.cpp, torch 2.1 to 2.13): sizes rounded up to 512 bytes; a pool of small
requests (up to 1 MiB, segments of 2 MiB) and one of large ones (segments of 20 MiB below 10 MiB, else rounded up to
2 MiB) for each stream; the best fit with the lowest address; when a block is split; free neighbors joined;
``empty_cache``, which also comes before an out-of-memory error; and ``expandable_segments``, where a pool is one
segment that grows by 2 or 20 MiB. Not reproduced: ``max_split_size_mb``, ``roundup_power2_divisions``, garbage
collection, private pools. A test compares with PyTorch's own, request by request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightship.errors import BadInput

__all__ = ["LARGEST_SMALL", "ROUND", "CachingAllocator", "OutOfMemory", "rounded"]

ROUND = 512
"""Bytes that sizes are multiples of."""
LARGEST_SMALL = 1 << 20
_SMALL_SEGMENT, _LARGE_SEGMENT, _LEAST_LARGE, _ROUND_SEGMENT = 2 << 20, 20 << 20, 10 << 20, 2 << 20
_FIRST_ADDRESS = 1 << 40
_RANGE = 1 << 44
"""Addresses of one expandable segment."""

Frames = Sequence[dict[str, Any]]


class OutOfMemory(Exception):
    """A request does not fit into the capacity, with nothing cached any more."""


def rounded(size: int) -> int:
    """What a request takes of a block."""
    return max(ROUND, -(-size // ROUND) * ROUND)


@dataclass(eq=False, slots=True)
class _Block:
    address: int
    size: int
    segment: _Segment
    requested: int = 0
    used: bool = False
    before: _Block | None = None
    after: _Block | None = None
    frames: Frames = ()


@dataclass(eq=False, slots=True)
class _Segment:
    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    first: _Block | None = None
    last: _Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """``at = a.alloc(nbytes)``, ``a.free(at)``; ``a.reserved`` and ``a.peak`` are what it takes of the device.

    ``capacity``: bytes of the device. ``history``: events are kept, and `snapshot` has them."""

    expandable: bool = False
    capacity: int | None = None
    history: bool = False
    reserved: int = 0
    peak: int = 0
    allocated: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    _free: dict[tuple[int, bool], list[tuple[int, int]]] = field(default_factory=dict)
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _segments: dict[int, _Segment] = field(default_factory=dict)
    _growing: dict[tuple[int, bool], _Segment] = field(default_factory=dict)
    _next: int = _FIRST_ADDRESS
    _clock: int = 0

    def alloc(self, nbytes: int, stream: int = 0, frames: Frames = ()) -> int:
        """The address of ``nbytes``. Raises `OutOfMemory`."""
        size = rounded(nbytes)
        small = size <= LARGEST_SMALL
        block = self._found(size, stream, small, frames)
        least = ROUND if small or self.expandable else LARGEST_SMALL + 1
        if block.size - size >= least:
            self._split(block, size, (stream, small))
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
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._take(other, pool)
                block = self._joined(block, other) if other is block.after else self._joined(other, block)
        insort(self._free.setdefault(pool, []), (block.size, block.address))

    def empty_cache(self) -> None:
        """Give segments that nothing lies in back to the device; of those that grow, what is free at their ends."""
        for segment in list(self._segments.values()):
            pool = segment.stream, segment.small
            if segment.expandable:
                self._shrink(segment, pool)
                continue
            block = segment.first
            if block is not None and not block.used and block.size == segment.size:
                self._take(block, pool)
                del self._blocks[block.address], self._segments[segment.address]
                self.reserved -= segment.size
                self._note("segment_free", segment.address, segment.size, segment.stream)

    def snapshot(self) -> dict[str, Any]:
        """The present state and its history as ``torch.cuda.memory._snapshot`` gives them."""
        segments = [
            self._described(s) for s in sorted(self._segments.values(), key=lambda s: s.address) if s.size
        ]
        settings = {"expandable_segments": self.expandable, "max_split_size": -1}
        return {
            "segments": segments, "device_traces": [list(self.events)], "allocator_settings": settings,
            "external_annotations": [],
        }  # fmt: skip

    # --- parts ---

    def _found(self, size: int, stream: int, small: bool, frames: Frames) -> _Block:
        """A block of at least ``size``, out of its pool."""
        pool = stream, small
        if (block := self._best(size, pool)) is not None:
            return block
        for again in (False, True):
            block = self._grown(size, pool, frames) if self.expandable else self._new(size, pool, frames)
            if block is not None:
                return block
            if not again:
                self.empty_cache()
        left = (self.capacity or 0) - self.reserved
        self.events += [self._event("oom", left, size, stream, frames)] if self.history else []
        raise OutOfMemory(f"{size} bytes were asked for, {left} are left of the device")

    def _best(self, size: int, pool: tuple[int, bool]) -> _Block | None:
        """The best fit; the end of a segment that can grow comes last."""
        free = self._free.get(pool, [])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = self._blocks[free[at][1]]
        if self.expandable and block.after is None and at + 1 < len(free):
            at += 1
            block = self._blocks[free[at][1]]
        del free[at]
        return block

    def _new(self, size: int, pool: tuple[int, bool], frames: Frames) -> _Block | None:
        stream, small = pool
        total = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if size >= _LEAST_LARGE:
            total = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        if not self._takes(total):
            return None
        segment = _Segment(self._next, total, stream, small, False)
        self._next += -(-total // _ROUND_SEGMENT) * _ROUND_SEGMENT
        segment.first = segment.last = block = _Block(segment.address, total, segment)
        self._segments[segment.address], self._blocks[block.address] = segment, block
        self._note("segment_alloc", segment.address, total, stream, frames)
        return block

    def _grown(self, size: int, pool: tuple[int, bool], frames: Frames) -> _Block | None:
        """The end of the pool's segment, after as much was added as is missing."""
        segment = self._growing.get(pool)
        if segment is None:
            segment = _Segment((len(self._growing) + 1) * _RANGE, 0, *pool, True)
            self._growing[pool] = self._segments[segment.address] = segment
        last = segment.last
        tail = last if last is not None and not last.used else None
        unit = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        more = -(-(size - (tail.size if tail else 0)) // unit) * unit
        if not self._takes(more):
            return None
        at = segment.address + segment.size
        self._note("segment_map", at, more, segment.stream, frames)
        segment.size += more
        if tail is not None:
            self._take(tail, pool)
            tail.size += more
            return tail
        block = _Block(at, more, segment, before=last)
        if last is None:
            segment.first = block
        else:
            last.after = block
        segment.last = block
        self._blocks[at] = block
        return block

    def _shrink(self, segment: _Segment, pool: tuple[int, bool]) -> None:
        last = segment.last
        if last is None or last.used:
            return
        unit = _SMALL_SEGMENT if segment.small else _LARGE_SEGMENT
        keep = -(-(last.address - segment.address) // unit) * unit
        less = segment.size - keep
        if not less:
            return
        self._take(last, pool)
        self._note("segment_unmap", segment.address + keep, less, segment.stream)
        segment.size -= less
        self.reserved -= less
        last.size -= less
        if last.size:
            insort(self._free.setdefault(pool, []), (last.size, last.address))
            return
        del self._blocks[last.address]
        segment.last = last.before
        if last.before is None:
            segment.first = None
        else:
            last.before.after = None

    def _takes(self, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return True

    def _split(self, block: _Block, size: int, pool: tuple[int, bool]) -> None:
        rest = _Block(block.address + size, block.size - size, block.segment, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        else:
            block.segment.last = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        insort(self._free.setdefault(pool, []), (rest.size, rest.address))

    def _joined(self, one: _Block, two: _Block) -> _Block:
        """Of two free neighbors, in their order."""
        one.size, one.after = one.size + two.size, two.after
        if two.after is not None:
            two.after.before = one
        else:
            one.segment.last = one
        del self._blocks[two.address]
        return one

    def _take(self, block: _Block, pool: tuple[int, bool]) -> None:
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

    def _described(self, segment: _Segment) -> dict[str, Any]:
        blocks = list(_chain(segment))
        used = [b for b in blocks if b.used]
        total = sum(b.size for b in used)
        return {
            "device": 0, "address": segment.address, "total_size": segment.size, "allocated_size": total,
            "active_size": total, "requested_size": sum(b.requested for b in used), "stream": segment.stream,
            "segment_type": "small" if segment.small else "large", "segment_pool_id": (0, 0),
            "is_expandable": segment.expandable, "frames": [],
            "blocks": [
                {
                    "address": b.address, "size": b.size, "requested_size": b.requested if b.used else 0,
                    "state": "active_allocated" if b.used else "inactive", "frames": b.frames,
                }
                for b in blocks
            ],
        }  # fmt: skip


def _chain(segment: _Segment) -> Iterator[_Block]:
    block = segment.first
    while block is not None:
        yield block
        block = block.after
