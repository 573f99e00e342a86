"""The host pool of a plan run on a CPU: a file that no name leads to, written and read by threads.

The file is made in a folder of the user's choice and is gone with the process, however it ends. Its bytes are
reserved before anything runs, so that a disk without room is an error before the step, not in the middle of it.
Reads and writes go through the system's page cache: those pages are not the process's, and are written out
and given up as the system needs memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from tightship.errors import BadInput

__all__ = ["Spill"]

Move = Callable[[int, memoryview, int], int]

_RULE: Final = "the folder for what is offloaded takes {} bytes"


class Spill:
    """``size`` bytes in ``folder`` (default: the system's for temporary files).

    ``write`` and ``read`` begin a copy on a stream of their own and return its `Future`; copies of one stream run
    one after the other. They know addresses only: who begins a copy keeps the memory until it is done. Raises
    ``BadInput`` naming the folder when there is no such folder or no room in it.
    """

    def __init__(self, size: int, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.size = size
        self._streams: dict[int, ThreadPoolExecutor] = {}
        self._running: set[Future[None]] = set()
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            self._reserve()
        except OSError as error:
            raise BadInput(_RULE.format(size), os.strerror(error.errno or 0), str(self.folder)) from error

    def _reserve(self) -> None:
        fallocate = getattr(os, "posix_fallocate", None)
        if fallocate is not None and self.size:
            try:
                fallocate(self._file.fileno(), 0, self.size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise

    def write(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Any:
        """Copies ``size`` bytes of memory to ``offset``, after the copies ``after``."""
        return self._begin(stream, _put, address, size, offset, tuple(after))

    def read(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Any:
        """Copies ``size`` bytes at ``offset`` to memory, after the copies ``after``."""
        return self._begin(stream, _get, address, size, offset, tuple(after))

    def _begin(
        self,
        stream: int,
        move: Callable[[int, memoryview, int], int],
        address: int,
        size: int,
        offset: int,
        after: Sequence[Any],
    ) -> Future[None]:
        if stream not in self._streams:
            self._streams[stream] = ThreadPoolExecutor(1, f"tightship-copies-{stream}")
        job = self._streams[stream].submit(
            _run, move, self._file.fileno(), address, size, offset, tuple(after)
        )
        self._running.add(job)
        job.add_done_callback(self._running.discard)
        return job

    def drain(self) -> None:
        """Waits for every copy, whether it fails or not."""
        wait(list(self._running))

    def close(self) -> None:
        """Waits for what is running and gives the bytes back."""
        for stream in self._streams.values():
            stream.shutdown()
        self._streams.clear()
        self._file.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _run(
    move: Callable[[int, memoryview, int], int],
    file: int,
    address: int,
    size: int,
    offset: int,
    after: tuple[Any, ...],
) -> None:
    for other in after:
        other.result()
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    done = 0
    while done < size:
        moved = move(file, memory[done:], offset + done)
        if not moved:
            raise OSError(errno.EIO, "the file for what is offloaded is shorter than it was")
        done += moved


def _put(file: int, memory: memoryview, offset: int) -> int:
    return os.pwrite(file, memory, offset)


def _get(file: int, memory: memoryview, offset: int) -> int:
    return os.preadv(file, [memory], offset)
