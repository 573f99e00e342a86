"""Host pools: where a plan's offloaded bytes go. On a CPU a file, on a GPU pinned memory, or that and then a file.

A pool's ``write`` and ``read`` begin a copy on a stream of their own and return it; its ``result()`` waits for it.
Copies of one stream run one after the other. They know addresses only: who begins a copy keeps the memory until it
is done.

The pools of a GPU have run on PyTorch's CUDA build over a runtime that computes nothing, and **not yet on a GPU**.
There, nothing waits for the device: streams wait for one another, by events. A copy begins when all that was asked of
the compute stream before it is done (what made its source, what used the bytes it writes to), and the copies that its
step waits for. Whoever needs a copy has the compute stream wait for it. So bytes of the device that are given back
after a copy was waited for go to later work of the compute stream, as those of any op do, and no allocator has to
know of the other streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from tightship import _core
from tightship.errors import BadInput, Unsupported
from tightship.execute import native
from tightship.process_local import NotCopied

__all__ = ["Copied", "FilePool", "HostPool", "PinnedPool", "TieredPool", "in_file", "pool_beside"]

TO_DEVICE: Final = 1
TO_HOST: Final = 2
_PORTABLE: Final = 1  # pinned for every device of the process
PIECE: Final = 1 << 23
"""Bytes between device and file at a time."""


class _Pool(NotCopied):
    """What pools have in common: copies are begun in one way, and bytes given back with the pool."""

    def write(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Any:
        """Begins to copy ``size`` bytes of memory to ``offset``, after the copies ``after``."""
        return self._begin(stream, True, address, size, offset, after)

    def read(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Any:
        """Begins to copy ``size`` bytes at ``offset`` to memory, after the copies ``after``."""
        return self._begin(stream, False, address, size, offset, after)

    def _begin(
        self, stream: int, out: bool, address: int, size: int, offset: int, after: Sequence[Any]
    ) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Waits for what is running and gives the bytes back."""
        raise NotImplementedError

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


_MAPPED: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""Files that tensors lie in, and where they begin in memory."""


def in_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the file of a pool."""
    if not _MAPPED or tensor.device.type != "cpu":
        return False
    at = tensor.untyped_storage().data_ptr()
    return any(begin <= at < begin + len(memory) for memory, begin in _MAPPED.items())


class FilePool(_Pool):
    """``size`` bytes in an unnamed file in ``folder`` (default: the system's for temporary files).

    The file is gone with the process, however it ends; its bytes are reserved here, so that a full disk is an error
    before the step. Copies go through the system's page cache, whose pages are not the process's. The threads are the
    core's (`cpp/copier`): copies and what the interpreter does between ops do not wait for one another, and who waits
    for a copy that has not begun makes it.

    ``result()`` raises ``OSError`` where a copy, or one that it came after, has failed. Raises ``BadInput`` naming
    the folder when there is no such folder or no room in it.
    """

    def __init__(self, size: int, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.size = size
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            self._reserve()
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            if "_file" in vars(self):
                self._file.close()
            why = os.strerror(error.errno or 0)
            raise BadInput(f"no room for {size} offloaded bytes: {why}", place=str(self.folder)) from error
        self._copier = _core.Copier(self._file.fileno())
        self._mapping: weakref.ref[mmap.mmap] | None = None

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

    def tensor(
        self, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Bytes of the file as a tensor: what it has is what the file has, from now on and both ways. Its pages are
        the system's, which takes them when they are touched and drops them as it likes; one that cannot be read ends
        the process. It may outlive the pool."""
        memory = self._mapping() if self._mapping is not None else None
        if memory is None:
            memory = mmap.mmap(self.descriptor, self.size)
            _MAPPED[memory] = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            self._mapping = weakref.ref(memory)
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).as_strided(shape, stride)

    def address(self, offset: int) -> int | None:
        """Where in memory a tensor of the file's lies, None where there is none."""
        memory = self._mapping() if self._mapping is not None else None
        return None if memory is None else _MAPPED[memory] + offset

    def _begin(
        self, stream: int, out: bool, address: int, size: int, offset: int, after: Sequence[Any]
    ) -> Any:
        return self._copier.begin(stream, out, address, size, offset, after)

    def drain(self) -> None:
        """Waits for every copy, whether it fails or not."""
        self._copier.drain()

    def close(self) -> None:
        self._copier.close()
        self._file.close()


class _Runtime:
    """The few functions of the CUDA runtime that torch does not hand on, of the one that torch has loaded."""

    def __init__(self, name: str) -> None:
        try:
            library = ctypes.CDLL(name)
            self._copy, self._register = library.cudaMemcpyAsync, library.cudaHostRegister
            self._unregister, self._last = library.cudaHostUnregister, library.cudaGetLastError
            self._call = library.cudaLaunchHostFunc
        except (OSError, AttributeError) as error:
            raise Unsupported(
                "offloading from a GPU", f"the CUDA runtime cannot be loaded: {error}"
            ) from error
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
        self._register.argtypes = (pointer, size, ctypes.c_uint)
        self._unregister.argtypes = (pointer,)
        self._call.argtypes = (pointer, pointer, pointer)

    def copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        if code := self._copy(to, source, size, kind, stream):
            raise RuntimeError(
                f"tightship: CUDA error {code} while copying {size} bytes between GPU and host"
            )

    def call(self, stream: int, function: int, argument: int) -> None:
        """Has the host call a function of C when the stream has come to it."""
        if code := self._call(stream, function, argument):
            raise RuntimeError(
                f"tightship: CUDA error {code} while calling the host in the order of a stream"
            )

    def pin(self, address: int, size: int) -> int:
        """CUDA's error, or 0; the error is read here, or torch would find it later."""
        code = int(self._register(address, size, _PORTABLE))
        if code:
            self._last()
        return code

    def unpin(self, address: int) -> None:
        self._unregister(address)


@lru_cache
def _runtime(name: str) -> _Runtime:
    return _Runtime(name)


class Copied:
    """A copy that has been asked for. ``result`` has the current stream wait for it, and returns at once."""

    __slots__ = ("device", "event")

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event, self.device = event, device

    def result(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class PinnedPool(_Pool):
    """``size`` bytes of pinned memory beside ``device``, to the page: torch's own pinned allocator would take the
    next power of two. Stream 0 is the current one.

    Raises ``BadInput`` when so much memory cannot be pinned, ``Unsupported`` without a GPU.
    """

    def __init__(self, size: int, device: str) -> None:
        if not torch.cuda.is_available():
            raise Unsupported(
                f"offloading from {device}", "there is no CUDA device", "plan for it without running"
            )
        torch.cuda.init()
        self.size, self.device = 0, torch.device(device)
        self._runtime = _runtime(native.runtime())
        self._streams: dict[int, Any] = {}
        self._first: Any = None
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Makes it at least ``size`` bytes, between steps: what it holds is forgotten. Raises ``BadInput`` as at
        first, and is then as large as before."""
        had = self.size
        if size <= had and self._first is not None:
            return
        self._shut()
        try:
            self._open(size)
        except BadInput:
            if had:
                self._open(had)
            raise

    def _open(self, size: int) -> None:
        rule = f"cannot pin {size} bytes of memory for what is offloaded"
        try:
            self._memory = mmap.mmap(-1, max(size, 1))
        except (OSError, ValueError, OverflowError) as error:
            raise BadInput(f"{rule}: {error}", place="the host pool") from error
        first = ctypes.c_char.from_buffer(self._memory)
        self.base = ctypes.addressof(first)
        with torch.cuda.device(self.device):
            code = self._runtime.pin(self.base, len(self._memory))
        if code:
            del first
            self._memory.close()
            raise BadInput(f"{rule}: CUDA error {code}", place="the host pool")
        self.size, self._first = size, first

    def _shut(self) -> None:
        if self._first is not None:
            torch.cuda.synchronize(self.device)
            self._runtime.unpin(self.base)
            self._first = None
            self._memory.close()

    def _begin(
        self, stream: int, out: bool, address: int, size: int, offset: int, after: Sequence[Any]
    ) -> Copied:
        compute = torch.cuda.current_stream(self.device)
        copies = self._stream(stream) if stream else compute
        if copies != compute:
            copies.wait_stream(compute)
        for other in after:
            copies.wait_event(other.event)
        self._move(copies, stream, TO_HOST if out else TO_DEVICE, address, offset, size)
        return Copied(copies.record_event(), self.device)

    def _move(self, copies: Any, stream: int, kind: int, address: int, offset: int, size: int) -> None:
        """Asks ``copies``, the stream of number ``stream``, to copy between device and pool."""
        here = self.base + offset
        to, source = (here, address) if kind == TO_HOST else (address, here)
        self._runtime.copy(to, source, size, kind, copies.cuda_stream)

    def _stream(self, stream: int) -> Any:
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(self.device)
        return self._streams[stream]

    def drain(self) -> None:
        """Has the current stream wait for every copy."""
        current = torch.cuda.current_stream(self.device)
        for stream in self._streams.values():
            current.wait_stream(stream)

    def close(self) -> None:
        self._shut()


class TieredPool(PinnedPool):
    """``size`` bytes beside ``device``, the first ``pinned`` of them in pinned memory, the others in a file in
    ``folder``, as in `FilePool`.

    Between device and file bytes go through a piece of pinned memory of the copy's stream, one after the other: CUDA
    calls the core in the order of the stream to write or read the file, so that the host waits for nothing while the
    step runs. At its end it does: `drain` raises ``OSError`` where a file could not be written or read.
    """

    def __init__(
        self, size: int, device: str, pinned: int, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.limit, self.folder = pinned, folder
        self._pieces: dict[int, PinnedPool] = {}
        self._file: FilePool | None = None
        super().__init__(size, device)

    def _open(self, size: int) -> None:
        self.pinned = min(size, self.limit)
        self._file = FilePool(size - self.pinned, self.folder)
        self._staged = _core.Staged(self._file.descriptor)
        super()._open(self.pinned)
        self.size = size

    def _shut(self) -> None:
        super()._shut()
        if self._file is not None:
            self._file.close()

    def _move(self, copies: Any, stream: int, kind: int, address: int, offset: int, size: int) -> None:
        inside = max(0, min(size, self.pinned - offset))
        if inside:
            super()._move(copies, stream, kind, address, offset, inside)
        for done in range(inside, size, PIECE):
            n = min(PIECE, size - done)
            self._through(copies, self._piece(stream), kind, address + done, offset + done - self.pinned, n)

    def _through(
        self, copies: Any, piece: PinnedPool, kind: int, address: int, offset: int, size: int
    ) -> None:
        function, job = self._staged.job(kind == TO_HOST, piece.base, size, offset)
        if kind == TO_HOST:
            self._runtime.copy(piece.base, address, size, kind, copies.cuda_stream)
            self._runtime.call(copies.cuda_stream, function, job)
        else:
            self._runtime.call(copies.cuda_stream, function, job)
            self._runtime.copy(address, piece.base, size, kind, copies.cuda_stream)

    def _piece(self, stream: int) -> PinnedPool:
        if stream not in self._pieces:
            self._pieces[stream] = PinnedPool(PIECE, str(self.device))
        return self._pieces[stream]

    def drain(self) -> None:
        """Waits for every copy, here and on the device."""
        super().drain()
        torch.cuda.current_stream(self.device).synchronize()
        self._staged.settle()

    def close(self) -> None:
        """Waits for what is running, here and on the device, and gives memory and file back."""
        super().close()
        for piece in self._pieces.values():
            piece.close()


def pool_beside(
    size: int, device: str, pinned: int | None = None, folder: str | os.PathLike[str] | None = None
) -> PinnedPool:
    """``size`` bytes beside a GPU, of which no more than ``pinned`` bytes, if given, are pinned memory."""
    return PinnedPool(size, device) if pinned is None else TieredPool(size, device, pinned, folder)


HostPool = FilePool | PinnedPool
