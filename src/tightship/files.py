"""Files read whole and written whole: a file appears complete or not at all, and what the system refuses is said."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeAlias

from tightship.errors import BadInput

__all__ = ["PathLike", "read_bytes", "unreadable", "unwritable", "write_file"]

PathLike: TypeAlias = str | os.PathLike[str]


def unreadable(error: Exception, place: str) -> BadInput:
    """What is said of a file that the system does not give: in words, without error numbers."""
    return BadInput(f"cannot read {place!r}: {getattr(error, 'strerror', None) or error}")


def unwritable(error: Exception, path: str) -> BadInput:
    """What is said of a file that the system does not take."""
    return BadInput(f"cannot write {path!r}: {getattr(error, 'strerror', None) or error}")


def read_bytes(path: PathLike, limit: int, what: str = "file") -> bytes:
    """What is in a regular file of at most ``limit`` bytes. Raises ``BadInput`` for all others: a pipe would wait."""
    name = os.fspath(path)
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise BadInput("not a regular file", place=name)
        size, data = about.st_size, b""
        if size <= limit:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise unreadable(error, name) from error
    if max(size, len(data)) > limit:
        raise BadInput(
            f"{what} of {max(size, len(data))} bytes is too large: at most {limit} are read", place=name
        )
    return data


def write_file(path: PathLike, data: bytes) -> None:
    """A new file beside the old one takes its name when it is complete; a link stays a link."""
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # a device is written to, not replaced
            target.write_bytes(data)
            return
        beside = target.with_name(f".{target.name[:50]}.{os.urandom(4).hex()}.tmp")
        # Opened this way, and not by tempfile, the file gets the permissions that the umask asks for.
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise unwritable(error, os.fspath(path)) from error
