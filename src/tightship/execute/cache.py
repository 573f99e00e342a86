"""Measurements kept on disk, per machine: JSON in the user's cache folder, safe with several processes.

A file that cannot be read, or holds something else, is as good as none: the measurements are made again and
the file is replaced. Writing merges with what others wrote meanwhile; losing a race costs a measurement,
never a wrong one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import threading
from pathlib import Path

import msgspec
import torch

__all__ = ["Cache", "Measurement", "default_folder", "machine"]

VERSION = 2
"""Raised when measurements change their meaning."""


class Measurement(msgspec.Struct, frozen=True, array_like=True):
    """Of one call: seconds, bytes beyond its results, requests as (size, storage, start, end), and which of the
    values it is given its result was laid over without changing (None: not tried)."""

    time: float
    workspace: int = 0
    requests: tuple[tuple[int, int, int, int], ...] = ()
    over: tuple[int, ...] | None = None


class _File(msgspec.Struct):
    machine: str
    entries: dict[str, Measurement]


def default_folder() -> Path:
    """``tightship`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightship"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = [x.partition(":")[2].strip() for x in lines if x.startswith(("model name", "flags", "Features"))]
    return " ".join(dict.fromkeys(found)) or platform.machine()


def machine(measured: bool) -> str:
    """What measurements depend on besides the op; ``measured``: requests were recorded, not only times."""
    what = (VERSION, _processor(), os.cpu_count(), torch.get_num_threads(), torch.__version__, measured)
    flags = (torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.is_available())
    return hashlib.sha256(repr((what, flags, torch.get_float32_matmul_precision())).encode()).hexdigest()[:32]


class Cache:
    """Measurements of one machine. ``note`` says what was wrong with the file, if something was.

    ``folder`` None keeps them in memory only.
    """

    def __init__(self, folder: Path | str | None, machine: str) -> None:
        self.machine = machine
        self.path = None if folder is None else Path(folder) / f"profile-{machine}.json"
        self.note = ""
        self._new: dict[str, Measurement] = {}
        self._known = self._read()

    def get(self, key: str) -> Measurement | None:
        return self._new.get(key) or self._known.get(key)

    def put(self, key: str, measurement: Measurement) -> None:
        self._new[key] = measurement

    def save(self) -> None:
        """Writes what was measured since the last save. Not being able to is a note, not an error."""
        if self.path is None or not self._new:
            return
        self._known = {**self._read(), **self._known, **self._new}
        self._new = {}
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(_File(self.machine, self._known)))
            os.replace(part, self.path)
        except OSError as error:
            self.note = f"measurements could not be kept: {error}"
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _read(self) -> dict[str, Measurement]:
        if self.path is None:
            return {}
        try:
            file = msgspec.json.decode(self.path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            self.note = (
                f"the measurements kept in {self.path.name} cannot be read and are made again: {error}"
            )
            return {}
        return file.entries if file.machine == self.machine else {}
