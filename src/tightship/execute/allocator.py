"""torch's allocators, replaced once by ones that count, record, and serve a planned step from one arena.

Devices are of two kinds, ``cpu`` and ``cuda``, with an allocator each; a device is named as torch names it
(``cuda:0``). Byte counts are requests rounded up to 64 bytes (512 on CUDA), as torch's allocator sees them: op
temporaries and oneDNN scratch included, bookkeeping not. A request for 0 bytes has no block and is not counted.

`load` compiles the allocator with the user's C++ compiler on first use (two seconds; kept in the user's cache) and
installs it for the rest of the process; with nothing active it is the default allocator plus two counters (on CUDA:
one that keeps freed blocks for requests of the same size, see `native`). Recording and replay concern the calling
thread only: requests of other threads are plain heap, and blocks may be freed on any thread. Blocks from before
`load`, and later resizes of them, are not counted. `Meter` measures the peak over all threads.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tightship.errors import BadInput, Unsupported
from tightship.execute import native
from tightship.execute.native import NoCompiler
from tightship.process_local import NotCopied

__all__ = [
    "Arena",
    "Event",
    "Meter",
    "Miss",
    "NoCompiler",
    "Recording",
    "Replay",
    "ReplayStats",
    "Script",
    "aside",
    "available",
    "instead",
    "kind_of",
    "load",
    "loaded",
    "open_room",
    "record",
    "replay",
    "reserved",
    "settle",
    "suspended",
    "unplanned",
    "why_not",
]

Integers = Sequence[int] | NDArray[Any]

_lock = threading.RLock()
_natives: dict[str, Any] = {}
_failures: dict[str, Unsupported] = {}


def kind_of(device: str) -> str:
    """``cuda`` for ``cuda:0``."""
    return device.partition(":")[0]


def load(kind: str = "cpu") -> Any:
    """Builds the extension if needed, installs it as torch's allocator once, and returns the C functions.

    Raises `NoCompiler` if it cannot be built (the same again on later calls, without another attempt),
    `Unsupported` if it cannot be installed: an allocator of higher priority is there, or torch's own CUDA
    allocator has been used.
    """
    if kind in _natives:
        return _natives[kind]
    with _lock:
        if kind in _failures:
            raise copy.copy(_failures[kind])
        if kind not in _natives:
            try:
                _natives[kind] = native.install(kind)
            except NoCompiler as error:
                _failures[kind] = error
                raise
    return _natives[kind]


def loaded(kind: str) -> bool:
    """Whether `load` has worked in this process; tries nothing."""
    return kind in _natives


def available(kind: str = "cpu") -> bool:
    """Whether `load` works here; builds and installs the allocator if it does."""
    return why_not(kind) is None


def why_not(kind: str) -> str | None:
    """Why `load` does not work here, for people; None if it does."""
    error = _failure(kind)
    return None if error is None else "no C++ compiler" if isinstance(error, NoCompiler) else error.why


def instead(kind: str) -> str:
    """What to do where `load` does not work here; empty where nothing helps, or it works."""
    error = _failure(kind)
    return "" if error is None or isinstance(error, NoCompiler) else error.instead


def _failure(kind: str) -> Unsupported | None:
    try:
        load(kind)
    except Unsupported as error:
        return error
    return None


# ---- replay


class Arena(NotCopied):
    """One reservation on ``device`` that the blocks of a step are served from.

    ``size`` is in bytes. The memory is given back when this object is gone and no block in it is alive, so a
    tensor that escapes keeps it. Raises `BadInput` for a negative size, `MemoryError` if there is no such
    memory.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.kind, self.device = kind_of(device), device
        self._native = load(self.kind)
        try:
            self._handle = self._native.arena_create(size, int(device.partition(":")[2] or 0))
        except (ValueError, OverflowError) as error:
            raise BadInput("an arena's size must be from 0 to 2**63 bytes", size, "Arena") from error

    @property
    def base(self) -> int:
        """The address of offset 0, at the start of a page."""
        return int(self._native.arena_info(self._handle)[0])

    @property
    def size(self) -> int:
        """Bytes reserved."""
        return int(self._native.arena_info(self._handle)[1])

    @property
    def live(self) -> int:
        """Bytes of all live blocks of this arena's sessions, those served from the heap included."""
        return int(self._native.arena_info(self._handle)[2])


class Script(NotCopied):
    """What a step will ask for, and where it goes.

    Request ``k`` is for ``sizes[k]`` bytes (rounded up to 64; on CUDA, 512) and lies at ``offsets[k]`` (a multiple
    of that), or on the heap if that is -1: values that escape to the user. The requests of step ``s`` are those from
    ``step_start[s]`` up to ``step_start[s + 1]``. A request that would bring the arena's live bytes (arena
    and heap together) above ``limit`` bytes fails with a RuntimeError that names the step. With ``over[k]`` a
    request takes the place of an input of its op: a block that lies exactly there may still be held, but no
    longer than to the end of the step, and its bytes count once (on the CPU alone). Raises `BadInput`.
    """

    def __init__(
        self,
        sizes: Integers,
        offsets: Integers,
        step_start: Integers,
        limit: int | None = None,
        kind: str = "cpu",
        over: Integers = (),
    ) -> None:
        if limit is not None and limit < 0:
            raise BadInput("negative limit in bytes", limit, "Script")
        try:
            rows = (sizes, offsets, step_start, over)
            *three, last = (np.ascontiguousarray(item, dtype=np.int64) for item in rows)
            self._handle = load(kind).script_create(*three, -1 if limit is None else limit, last)
        except (ValueError, OverflowError) as error:
            raise BadInput(str(error), place="Script") from error


@dataclass(frozen=True, slots=True)
class Miss:
    """A request that was not served as planned and went to the heap.

    ``kind``: "size" (asked for other than planned), "extra" (more requests in the step than planned,
    ``planned`` is -1), "occupied" (a block that should be dead still lies there), "stream" (asked for on another
    CUDA stream than the first), "held" (the input whose place a result took is still held after the step).
    """

    step: int
    request: int
    asked: int
    planned: int
    kind: Literal["size", "extra", "occupied", "stream", "held"]


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

    _stats: ReplayStats | None = None

    def __init__(self, seek: Callable[[int], None]) -> None:
        self.seek = seek

    @property
    def stats(self) -> ReplayStats:
        """The counts, once the session has ended; RuntimeError before."""
        if self._stats is None:
            raise RuntimeError("the replay has not ended yet")
        return self._stats


@contextlib.contextmanager
def replay(arena: Arena, script: Script) -> Iterator[Replay]:
    """Serves this thread's requests from ``arena`` as ``script`` says; what deviates is served from the heap.

    Nothing is ever placed over a live block of the same arena, but what ``over`` says. Blocks may outlive the
    session, and a later session on the same arena counts them. Raises `BadInput` if the script reaches beyond
    the arena, RuntimeError if this thread is replaying or recording already.
    """
    functions = arena._native
    if arena.kind == "cuda" and torch.cuda.is_initialized():
        _ask_for_workspaces(arena.device)
    try:
        functions.begin(arena._handle, script._handle)
    except ValueError as error:
        raise BadInput(str(error), place="replay") from error
    session = Replay(functions.seek)
    try:
        yield session
    finally:
        stats = functions.end()
        stats["first_misses"] = tuple(Miss(*miss) for miss in stats["first_misses"])
        stats["failed_step"] = None if stats["failed_step"] < 0 else stats["failed_step"]
        session._stats = ReplayStats(**stats)


_asked = threading.local()


def _ask_for_workspaces(device: str) -> None:
    """cuBLAS and cuBLASLt keep a workspace for each thread and stream, which its first matmul, and its first with a
    bias, ask for: no part of a step."""
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
        stream = torch.cuda.current_stream().cuda_stream
        if (device, stream) not in (asked := _asked.__dict__.setdefault("streams", set())):
            square = torch.zeros(16, 16, device=device)
            torch.addmm(square[0], square, square, out=torch.empty_like(square))
            asked.add((device, stream))


def aside(kind: str = "cpu", nbytes: int = -1, slack: int = 0) -> None:
    """Until the next `Replay.seek`, this thread's requests are served from the heap as if planned there, whatever
    they are for: they count, also against the limit, and none is a miss. Nothing happens outside of a replay.

    With ``nbytes`` planned for them they count as so many until `settle`, even if they are fewer, or are ``slack``
    more: for what replaces blocks that were made outside of a replay, whose end is not seen.
    """
    load(kind).aside(nbytes, slack)


def open_room(kind: str = "cpu", *, loose: bool = False) -> None:
    """Until `settle`, all that this thread asks for lies in the one block that is planned for this step, wherever it
    fits first; the block counts as a whole. What does not fit is a miss or, if ``loose``, served from the heap as if
    planned there. Does nothing where a step has no or several requests planned, and outside of a replay.
    """
    load(kind).open_room(loose)


def settle(kind: str = "cpu") -> int:
    """Ends `open_room`, and `aside` with bytes, whose survivors stand for what they replaced. Returns how many
    blocks are still alive in the room."""
    return int(load(kind).settle())


@contextlib.contextmanager
def suspended(kind: str = "cpu") -> Iterator[None]:
    """Makes this thread's requests plain heap, unknown to its replay or recording (but not to a meter)."""
    functions = load(kind)
    functions.pause()
    try:
        yield
    finally:
        functions.resume()


def unplanned(device: str) -> contextlib.AbstractContextManager[None]:
    """What is asked for inside is no request of the step that runs, if one does."""
    kind = kind_of(device)
    return suspended(kind) if loaded(kind) else contextlib.nullcontext()


def reserved(kind: str = "cpu") -> int:
    """Bytes of all arenas whose memory has not been given back."""
    return int(load(kind).reserved())


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
    """A run of `record`. ``seek(step)``, if called, marks the events that follow as those of this step. ``beside``:
    bytes that workers of parallel kernels asked for meanwhile, as many as each held at once, all at the same time."""

    def __init__(self, seek: Callable[[int], None]) -> None:
        self.seek = seek
        self.beside = 0
        self._events: list[Event] | None = None

    @property
    def events(self) -> list[Event]:
        """What happened, in order, once the recording has ended; RuntimeError before."""
        if self._events is None:
            raise RuntimeError("the recording has not ended yet")
        return self._events


@contextlib.contextmanager
def record(kind: str = "cpu") -> Iterator[Recording]:
    """Logs this thread's requests and the frees of the blocks they got; a block freed elsewhere never ends.

    Raises RuntimeError if this thread is replaying or recording already.
    """
    functions = load(kind)
    functions.record_begin()
    recording = Recording(functions.seek)
    try:
        yield recording
    finally:
        events, recording.beside = functions.record_end()
        recording._events = [Event(*event) for event in events]


# ---- measuring


_meter_lock = threading.Lock()
_meters: "list[Meter]" = []
"""Those that are running."""


class Meter:
    """Measures how far the bytes of all live blocks rise above their level at entry, over all threads: the physical
    peak, op temporaries included, that budgets are checked against.

    ``with Meter() as meter: ...`` then ``meter.peak``; ``Meter("cuda")`` for CUDA devices, all together. Blocks
    count in multiples of 64 bytes (512 on CUDA), from heap or arena; an arena's unused bytes do not. Blocks
    allocated before the allocator was first loaded were never counted, so freeing them lowers nothing. Meters may
    nest and overlap. Raises `NoCompiler` at construction.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self._native: Any = load(kind)
        self.start_level = self._highest = self._last = 0

    def __enter__(self) -> Self:
        with _meter_lock:
            if self in _meters:
                raise RuntimeError("this meter is already running")
            _fold(self._native)
            self.start_level = self._highest = self._native.meter_current()
            _meters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _meter_lock:
            self._last = self._native.meter_current()
            _fold(self._native)
            _meters.remove(self)

    @property
    def current(self) -> int:
        """Bytes above the level at entry: now, or when the meter stopped. Negative if more was freed."""
        with _meter_lock:
            level = self._native.meter_current() if self in _meters else self._last
        return int(level - self.start_level)

    @property
    def peak(self) -> int:
        """The most bytes above the level at entry so far, never negative."""
        with _meter_lock:
            if self in _meters:
                _fold(self._native)
        return int(self._highest - self.start_level)


def _fold(native: Any) -> None:
    """Starts a new peak at the current level, after every running meter has taken note of the old one."""
    highest = native.meter_reset_peak()
    for meter in (m for m in _meters if m._native is native):
        meter._highest = max(meter._highest, highest)
