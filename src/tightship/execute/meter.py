"""The physical peak at torch's allocator, op temporaries included: what budgets are checked against."""

import threading
from types import TracebackType
from typing import Any, Final

from tightship.execute.allocator import load

__all__ = ["Meter"]

_lock: Final = threading.Lock()
_running: "list[Meter]" = []


class Meter:
    """Measures how far the bytes of all live blocks rise above their level at entry, over all threads.

    ``with Meter() as meter: ...`` then ``meter.peak``; ``Meter("cuda")`` for CUDA devices, all together. Blocks
    count in multiples of 64 bytes (512 on CUDA), from heap or arena; an arena's unused bytes do not. Blocks
    allocated before the allocator was first loaded were never counted, so freeing them lowers nothing. Meters may
    nest and overlap. Raises `NoCompiler` at construction.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self._native: Any = load(kind)
        self.start_level = 0
        self._highest = 0
        self._last = 0

    def __enter__(self) -> "Meter":
        with _lock:
            if self in _running:
                raise RuntimeError("this meter is already running")
            _fold(self._native)
            self.start_level = self._highest = self._native.meter_current()
            _running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            self._last = self._native.meter_current()
            _fold(self._native)
            _running.remove(self)

    @property
    def current(self) -> int:
        """Bytes above the level at entry: now, or when the meter stopped. Negative if more was freed."""
        with _lock:
            level = self._native.meter_current() if self in _running else self._last
        return int(level - self.start_level)

    @property
    def peak(self) -> int:
        """The most bytes above the level at entry so far, never negative."""
        with _lock:
            if self in _running:
                _fold(self._native)
        return int(self._highest - self.start_level)


def _fold(native: Any) -> None:
    """Starts a new peak at the current level, after every running meter has taken note of the old one."""
    highest = native.meter_reset_peak()
    for meter in (m for m in _running if m._native is native):
        meter._highest = max(meter._highest, highest)
