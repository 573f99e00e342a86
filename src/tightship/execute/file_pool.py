"""The host pool of a plan run on a CPU: a file that no name leads to, written and read by threads.

The file is made in a folder of the user's choice and is gone with the process, however it ends. Its bytes are
reserved before anything runs, so that a disk without room is an error before the step, not in the middle of it.
Reads and writes go through the system's page cache: those pages are not the process's, and are written out
and given up as the system needs memory. The threads are the core's (`cpp/copier`): they need no interpreter, so that
copies and what the interpreter does between ops do not wait for one another. Who waits for a copy that has not begun
makes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tightship import _core
from tightship.errors import BadInput
from tightship.process_local import NotCopied

__all__ = ["Spill"]

_RULE: Final = "the folder for what is offloaded takes {} bytes"


class Spill(NotCopied):
    """``size`` bytes in ``folder`` (default: the system's for temporary files).

    ``write`` and ``read`` begin a copy on a stream of their own and return it; its ``result()`` waits for it and
    raises ``OSError`` where it, or one that it came after, has failed. Copies of one stream run one after the other.
    They know addresses only: who begins a copy keeps the memory until it is done. Raises ``BadInput`` naming the
    folder when there is no such folder or no room in it.
    """

    def __init__(self, size: int, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.size = size
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            self._reserve()
        except OSError as error:
            raise BadInput(_RULE.format(size), os.strerror(error.errno or 0), str(self.folder)) from error
        self._copier = _core.Copier(self._file.fileno())

    def _reserve(self) -> None:
        fallocate = getattr(os, "posix_fallocate", None)
        if fallocate is not None and self.size:
            try:
                fallocate(self._file.fileno(), 0, self.size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def write(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Any:
        """Copies ``size`` bytes of memory to ``offset``, after the copies ``after``."""
        return self._copier.begin(stream, True, address, size, offset, after)

    def read(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Any:
        """Copies ``size`` bytes at ``offset`` to memory, after the copies ``after``."""
        return self._copier.begin(stream, False, address, size, offset, after)

    def drain(self) -> None:
        """Waits for every copy, whether it fails or not."""
        self._copier.drain()

    def close(self) -> None:
        """Waits for what is running and gives the bytes back."""
        self._copier.close()
        self._file.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
