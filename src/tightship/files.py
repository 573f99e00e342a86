"""Files read whole and written whole: a file appears complete or not at all, and what the system refuses is said.

JSON is read and written here, because msgspec 0.22 ends the process (SIGSEGV) where memory runs out in ``encode`` or
``decode``: a limit of the address space, a system that does not overcommit. Here that is a ``MemoryError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, TypeAlias, TypeVar

from tightship.errors import BadInput

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "DEFAULT",
    "PathLike",
    "begins_with",
    "default_folder",
    "folder_of",
    "from_json",
    "open_regular",
    "part_of",
    "read_bytes",
    "read_most",
    "remove_parts",
    "scratch_folder",
    "to_json",
    "unreadable",
    "unwritable",
    "write_file",
]

PathLike: TypeAlias = str | os.PathLike[str]

DEFAULT = "default"
"""The folder that the user's environment names."""


def unreadable(error: Exception, place: str) -> BadInput:
    """What is said of a file that the system does not give: in words, without error numbers."""
    return BadInput(f"cannot read {place!r}: {getattr(error, 'strerror', None) or error}")


def unwritable(error: Exception, path: str) -> BadInput:
    """What is said of a file that the system does not take."""
    return BadInput(f"cannot write {path!r}: {getattr(error, 'strerror', None) or error}")


def open_regular(path: PathLike) -> BinaryIO:
    """A regular file to read; ``BadInput`` for all others: a pipe would wait, and what is read of it is gone."""
    file = open(path, "rb", opener=lambda at, flags: os.open(at, flags | _AT_ONCE))  # noqa: SIM115 - the caller closes
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BadInput("not a regular file", place=os.fspath(path))
    return file


_AT_ONCE: Final = getattr(os, "O_NONBLOCK", 0)


def begins_with(path: PathLike, count: int) -> bytes:
    """The first bytes of a regular file; none of what cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(count)
    except (BadInput, OSError, ValueError):
        return b""


def read_bytes(path: PathLike, limit: int, what: str = "file") -> bytes:
    """What is in a regular file of at most ``limit`` bytes. Raises ``BadInput`` for all others: a pipe would wait."""
    name = os.fspath(path)
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise BadInput("not a regular file", place=name)
        size, data = about.st_size, b""
        if size <= limit:
            with open_regular(path) as file:
                data = read_most(file, limit, size)
    except (OSError, ValueError) as error:
        raise unreadable(error, name) from error
    if max(size, len(data)) > limit:
        raise BadInput(
            f"{what} of {max(size, len(data))} bytes is too large: at most {limit} are read", place=name
        )
    return data


def read_most(file: IO[bytes], limit: int, size: int) -> bytes:
    """What is in a file that is said to have ``size`` bytes, and one more byte than ``limit`` at most. Python asks
    for all the memory that it may need before it reads: what that is follows from the size, not from the limit."""
    data = file.read(min(size, limit) + 1)
    while len(data) > size and len(data) <= limit and (more := file.read(min(limit + 1 - len(data), _PIECE))):
        data += more  # it has grown, or its system does not know its size
    return data


_PIECE: Final = 1 << 20

_T = TypeVar("_T")


def to_json(value: Any) -> bytes:
    """JSON of what msgspec knows. Raises ``TypeError`` and others as ``msgspec.json.encode``."""
    import msgspec

    data = bytearray()
    msgspec.json.Encoder().encode_into(
        value, data
    )  # what this cannot make larger is said, unlike by `encode`
    return bytes(data)


def from_json(data: bytes | str, kind: type[_T]) -> _T:
    """What JSON says, of a kind. Raises ``msgspec.ValidationError`` and others as ``msgspec.json.decode``."""
    import msgspec  # here, as numpy: who asks for help needs neither
    import numpy as np

    data = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    np.empty(_decoded_bytes(data), np.uint8)  # takes no memory, but is refused where there is none to have
    return msgspec.json.decode(data, type=kind)


def _decoded_bytes(data: bytes) -> int:
    """At most what the objects of a JSON document take: its text, and by what begins or ends each, strings that are
    no keys (56 bytes), numbers and places in lists (44), lists (72) and structs (240)."""
    text = len(data) if data.isascii() else 4 * len(data)
    strings = max(0, data.count(b'"') - 2 * data.count(b'":'))
    return text + 28 * strings + 44 * data.count(b",") + 72 * data.count(b"[") + 240 * data.count(b"{")


def write_file(path: PathLike, data: bytes) -> None:
    """A new file beside the old one takes its name when it is complete; a link stays a link."""
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # a device is written to, not replaced
            target.write_bytes(data)
            return
        with part_of(target) as part:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise unwritable(error, os.fspath(path)) from error


# --- parts ---

_ENDINGS: Final = (".tmp", ".onnx")
_PARTS: Final = rf"(\.[0-9a-f]{{8}}({'|'.join(map(re.escape, _ENDINGS))}))+"
_LONGEST: Final = 50
"""Characters of a file's name that are in that of its parts."""
_TRIES: Final = 5
_HELD: Final[dict[str, int]] = {}
"""The parts that this process writes, with the open file by which each is locked."""


@contextlib.contextmanager
def part_of(target: Path, ending: str = ".tmp") -> Iterator[Path]:
    """An empty file beside ``target``, to be written and to take its name. It is gone with the context, and so are
    parts that processes left which were killed: whoever lives has a lock on theirs, also on a part that a part of its
    own has replaced. Raises ``OSError``."""
    part, handle = target, -1
    try:
        for _ in range(_TRIES):
            part = target.with_name(f"{_begin(target.name)}.{os.urandom(4).hex()}{ending}")
            # Opened this way, and not by tempfile, the file gets the permissions that the umask asks for.
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            if _lock(handle, where_there_are_none=True) and os.fstat(handle).st_nlink:
                break
            os.close(handle)  # somebody else took it for one that was left
            handle = -1
        _HELD[os.path.realpath(part)] = handle
        yield part
    finally:
        handle = _HELD.pop(os.path.realpath(part), handle)
        if part != target:
            part.unlink(missing_ok=True)
        outer = os.path.realpath(target)
        if handle >= 0 and outer in _HELD and os.fstat(handle).st_nlink:  # it is what lies there now
            handle, _HELD[outer] = _HELD[outer], handle
        if handle >= 0:
            os.close(handle)
    remove_parts(target.parent, target.name)


def _begin(name: str) -> str:
    """How the names of a file's parts begin, and those of the parts' own: with its name, of which a long one is cut
    and told from others by its checksum; never a part's, or its parts would look like those of the file itself."""
    name = name.lstrip(".")
    if len(name) > _LONGEST and not re.fullmatch(rf".{{1,{_LONGEST}}}{_PARTS}", name):
        name = f"{name[: _LONGEST - 9]}-{zlib.crc32(name.encode(errors='surrogateescape')):08x}"
    return f".{name}"


def remove_parts(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes left of a file's parts, or (``name`` None) of those of all files in a folder that
    nobody else writes to."""
    begin = r"\..+" if name is None else re.escape(_begin(name))
    known = re.compile(begin + _PARTS)
    with contextlib.suppress(OSError), os.scandir(folder) as rows:
        for row in rows:
            if known.fullmatch(row.name):
                with contextlib.suppress(OSError):
                    _remove_if_left(row.path)


def _remove_if_left(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        if _lock(handle, where_there_are_none=False):
            _remove_folder(path) if stat.S_ISDIR(os.fstat(handle).st_mode) else os.unlink(path)
    finally:
        os.close(handle)


_SCRATCH: Final = "tightship-scratch-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder where the system has its temporary files. It is gone with the context, and so are those that processes
    left which were killed. Raises ``BadInput`` where there can be none."""
    import secrets  # here, because few commands need them
    import tempfile

    folder, handle = "", -1
    try:
        try:
            for _ in range(_TRIES):
                # Not by mkdtemp: nobody knows the name of what it has made when a signal comes.
                folder = os.path.join(tempfile.gettempdir(), _SCRATCH + secrets.token_hex(8))
                os.mkdir(folder, 0o700)
                if fcntl is None:
                    break
                with contextlib.suppress(FileNotFoundError):
                    handle = os.open(folder, os.O_RDONLY)
                    if _lock(handle, where_there_are_none=True) and os.path.isdir(folder):
                        break
                    os.close(handle)
                handle = -1  # somebody else took it for one that was left
            else:
                raise FileNotFoundError(errno.ENOENT, "what is made there is removed at once", folder)
            _remove_scratch(os.path.dirname(folder))
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"there can be no temporary folder: {why}") from error
        yield Path(folder)
    finally:
        _remove_folder(folder)
        if handle >= 0:
            os.close(handle)


def _remove_folder(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def _remove_scratch(parent: str) -> None:
    with contextlib.suppress(OSError), os.scandir(parent) as rows:
        for row in rows:
            if row.name.startswith(_SCRATCH):
                with contextlib.suppress(OSError):
                    _remove_if_left(row.path)


def _lock(handle: int, *, where_there_are_none: bool) -> bool:
    """Whether nobody else has this file locked; some network folders know no locks."""
    if fcntl is None:
        return where_there_are_none
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return where_there_are_none
    return True


def default_folder() -> Path | None:
    """Where the environment variable ``TIGHTSHIP_CACHE`` says (``off``: nowhere, None), else ``tightship`` in the
    user's cache folder; nowhere where there is no such folder."""
    chosen = os.environ.get("TIGHTSHIP_CACHE", "")
    if chosen.lower() == "off":
        return None
    try:
        return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightship")
    except RuntimeError:  # a user whom the system does not know, without HOME: containers run so
        return None


def folder_of(cache: Path | str | None) -> Path | None:
    """The folder that a ``cache=`` of the public functions names."""
    return default_folder() if cache == DEFAULT else None if cache is None else Path(cache)
