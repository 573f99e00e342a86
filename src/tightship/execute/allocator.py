"""torch's CPU allocator, replaced once by one that counts, records, and serves a planned step from one arena.

Byte counts are requests rounded up to 64 bytes, as torch's allocator sees them: op temporaries and oneDNN
scratch included, bookkeeping not. A request for 0 bytes has no block and is not counted.

`load` compiles ``allocator.cpp`` with the user's C++ compiler on first use (two seconds; kept in the user's
cache) and installs it for the rest of the process; with nothing active it is the default allocator plus two
counters. Recording and replay concern the calling thread only: requests of other threads are plain heap, and
blocks may be freed on any thread. Blocks from before `load`, and later resizes of them, are not counted.

``python -m tightship.execute.allocator`` prints what a request and a `Replay.seek` cost.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.build import NoCompiler, build_and_import

__all__ = [
    "Arena",
    "Event",
    "Miss",
    "NoCompiler",
    "Recording",
    "Replay",
    "ReplayStats",
    "Script",
    "aside",
    "available",
    "load",
    "record",
    "replay",
    "reserved",
    "suspended",
]

_lock = threading.RLock()
_native: Any = None
_failure: str | None = None


def load() -> Any:
    """Builds the extension if needed, installs it as torch's CPU allocator once, and returns the C functions.

    Raises `NoCompiler` if it cannot be built (the same again on later calls, without another attempt),
    `Unsupported` if an allocator of higher priority is installed.
    """
    global _native, _failure
    if _native is not None:
        return _native
    with _lock:
        if _failure is not None:
            raise NoCompiler(_failure)
        if _native is None:
            try:
                native = build_and_import()
            except NoCompiler as error:
                _failure = error.why
                raise
            if not native.install():
                raise Unsupported("serving a step from an arena", "another CPU allocator has priority")
            _native = native
    return _native


def available() -> bool:
    """Whether `load` works here; builds and installs the allocator if it does."""
    try:
        load()
    except Unsupported:
        return False
    return True


# ---- replay


class Arena:
    """One reservation that the blocks of a step are served from.

    ``size`` is in bytes. The memory is given back when this object is gone and no block in it is alive, so a
    tensor that escapes keeps it. Raises `BadInput` for a negative size, `MemoryError` if there is no such
    memory.
    """

    def __init__(self, size: int) -> None:
        try:
            self._handle = load().arena_create(size)
        except (ValueError, OverflowError) as error:
            raise BadInput("an arena's size is a number of bytes from 0 to 2**63", size, "Arena") from error

    @property
    def base(self) -> int:
        """The address of offset 0, at the start of a page."""
        return int(load().arena_info(self._handle)[0])

    @property
    def size(self) -> int:
        """Bytes reserved."""
        return int(load().arena_info(self._handle)[1])

    @property
    def live(self) -> int:
        """Bytes of all live blocks of this arena's sessions, those served from the heap included."""
        return int(load().arena_info(self._handle)[2])


class Script:
    """What a step will ask for, and where it goes.

    Request ``k`` is for ``sizes[k]`` bytes (rounded up to 64) and lies at ``offsets[k]`` (a multiple of 64),
    or on the heap if that is -1: values that escape to the user. The requests of step ``s`` are those from
    ``step_start[s]`` up to ``step_start[s + 1]``. A request that would bring the arena's live bytes (arena
    and heap together) above ``limit`` bytes fails with a RuntimeError that names the step. Raises `BadInput`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        offsets: Sequence[int],
        step_start: Sequence[int],
        limit: int | None = None,
    ) -> None:
        if limit is not None and limit < 0:
            raise BadInput("a limit is a number of bytes", limit, "Script")
        try:
            buffers = [np.ascontiguousarray(item, dtype=np.int64) for item in (sizes, offsets, step_start)]
            self._handle = load().script_create(*buffers, -1 if limit is None else limit)
        except (ValueError, OverflowError) as error:
            raise BadInput(str(error), place="Script") from error


@dataclass(frozen=True, slots=True)
class Miss:
    """A request that was not served as planned and went to the heap.

    ``kind``: "size" (asked for other than planned), "extra" (more requests in the step than planned,
    ``planned`` is -1), "occupied" (a block that should be dead still lies there).
    """

    step: int
    request: int
    asked: int
    planned: int
    kind: Literal["size", "extra", "occupied"]


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """What happened in one session, in bytes unless said otherwise; requests == served + escaped + misses."""

    requests: int  # count
    served: int  # count, at the planned offset
    escaped: int  # count, from the heap as planned
    misses: int  # count, from the heap against the plan
    occupied: int  # count, those of the misses whose place was not free
    short: int  # steps that did not make all their requests
    start: int  # live when the session began: blocks of earlier sessions of this arena
    peak: int  # most live at once, arena and heap, blocks of earlier sessions included
    heap_peak: int  # most live at once on the heap
    high_water: int  # end of the highest byte served from the arena
    live: int  # live when the session ended
    failed_step: int | None  # the last step that asked for more than the limit leaves
    first_misses: tuple[Miss, ...]  # at most 8

    @property
    def as_planned(self) -> bool:
        """Whether each step made exactly its requests and each was served where planned."""
        return self.misses == 0 and self.short == 0 and self.failed_step is None


class Replay:
    """A session of `replay`. ``seek(step)`` announces the step whose requests follow; call it before each."""

    def __init__(self, seek: Callable[[int], None]) -> None:
        self.seek = seek
        self._stats: ReplayStats | None = None

    @property
    def stats(self) -> ReplayStats:
        """The counts, once the session has ended; RuntimeError before."""
        if self._stats is None:
            raise RuntimeError("the replay has not ended yet")
        return self._stats


@contextlib.contextmanager
def replay(arena: Arena, script: Script) -> Iterator[Replay]:
    """Serves this thread's requests from ``arena`` as ``script`` says; what deviates is served from the heap.

    Nothing is ever placed over a live block of the same arena. Blocks may outlive the session, and a later
    session on the same arena counts them. Raises `BadInput` if the script reaches beyond the arena,
    RuntimeError if this thread is replaying or recording already.
    """
    native = load()
    try:
        native.begin(arena._handle, script._handle)
    except ValueError as error:
        raise BadInput(str(error), place="replay") from error
    session = Replay(native.seek)
    try:
        yield session
    finally:
        stats = native.end()
        stats["first_misses"] = tuple(Miss(*miss) for miss in stats["first_misses"])
        stats["failed_step"] = None if stats["failed_step"] < 0 else stats["failed_step"]
        session._stats = ReplayStats(**stats)


def aside() -> None:
    """Until the next `Replay.seek`, this thread's requests are served from the heap as if planned there, whatever
    they are for: they count, also against the limit, and none is a miss. Nothing happens outside of a replay.
    """
    load().aside()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Makes this thread's requests plain heap, unknown to its replay or recording (but not to a meter)."""
    native = load()
    native.pause()
    try:
        yield
    finally:
        native.resume()


def reserved() -> int:
    """Bytes of all arenas whose memory has not been given back."""
    return int(load().reserved())


# ---- recording


@dataclass(frozen=True, slots=True)
class Event:
    """A request or its end. ``id`` counts requests from 0; ``step`` is what `seek` last announced, or -1."""

    kind: Literal["alloc", "free"]
    id: int
    nbytes: int
    data_ptr: int
    step: int


class Recording:
    """A run of `record`. ``seek(step)``, if called, marks the events that follow as those of this step."""

    def __init__(self, seek: Callable[[int], None]) -> None:
        self.seek = seek
        self._events: list[Event] | None = None

    @property
    def events(self) -> list[Event]:
        """What happened, in order, once the recording has ended; RuntimeError before."""
        if self._events is None:
            raise RuntimeError("the recording has not ended yet")
        return self._events


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Logs this thread's requests and the frees of the blocks they got; a block freed elsewhere never ends.

    Raises RuntimeError if this thread is replaying or recording already.
    """
    native = load()
    native.record_begin()
    recording = Recording(native.seek)
    try:
        yield recording
    finally:
        recording._events = [Event(*event) for event in native.record_end()]


def _benchmark() -> None:
    from timeit import repeat

    def measure(what: str, run: Callable[[], object], count: int = 50_000) -> None:
        print(f"{what:44} {min(repeat(run, number=count, repeat=7)) / count * 1e9:7.0f} ns")

    def request() -> object:
        return torch.empty(256)

    measure("request + free, torch's own allocator", request)
    native = load()
    measure("request + free, passive", request)
    arena = Arena(1 << 20)
    measure("request + free, passive, an arena exists", request)
    with replay(arena, Script([1024], [0], [0, 1])) as one:
        measure("seek", lambda: one.seek(0))
        measure("seek + request + free, served", lambda: (one.seek(0), request()))
    with replay(arena, Script([1024] * 512, range(0, 512 * 1024, 1024), range(513))) as many:
        kept = [(many.seek(k), torch.empty(256))[1] for k in range(511)]
        measure("the same among 511 live blocks", lambda: (many.seek(511), request()))
        kept.clear()
    native.record_begin()
    measure("request + free, recorded", request)
    native.record_end()


if __name__ == "__main__":
    _benchmark()
