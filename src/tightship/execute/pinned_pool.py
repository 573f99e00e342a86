"""The host pool of a plan run on a GPU: pinned memory, filled and read by copy streams beside the compute stream.

It has run on PyTorch's CUDA build over a runtime that computes nothing, and **not yet on a GPU**.

Nothing here waits for the device: streams wait for one another, by events. A copy begins when all that was asked of
the compute stream before it is done (what made its source, what used the bytes it writes to), and the copies that its
step waits for. Whoever needs a copy has the compute stream wait for it. So bytes of the device that are given back
after a copy was waited for go to later work of the compute stream, as those of any op do, and no allocator has to
know of the other streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute import cuda
from tightship.process_local import NotCopied

__all__ = ["TO_DEVICE", "TO_HOST", "Copied", "Pinned"]

TO_DEVICE: Final = 1
TO_HOST: Final = 2
_PORTABLE: Final = 1  # pinned for every device of the process


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
                "copying out of a GPU", f"the CUDA runtime cannot be loaded: {error}"
            ) from error
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
        self._register.argtypes = (pointer, size, ctypes.c_uint)
        self._unregister.argtypes = (pointer,)
        self._call.argtypes = (pointer, pointer, pointer)

    def copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        code = self._copy(to, source, size, kind, stream)
        if code:
            raise RuntimeError(f"tightship: copying {size} bytes between GPU and host: CUDA error {code}")

    def call(self, stream: int, function: int, argument: int) -> None:
        """Has the host call a function of C when the stream has come to it."""
        code = self._call(stream, function, argument)
        if code:
            raise RuntimeError(f"tightship: calling the host in the order of a stream: CUDA error {code}")

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


class Pinned(NotCopied):
    """``size`` bytes of pinned memory beside ``device``, to the page: torch's own pinned allocator would take the
    next power of two.

    ``write`` and ``read`` ask for a copy on a stream of their own and return it as `Copied`; stream 0 is the current
    one. They know addresses only: device memory is given back once the copy was waited for. Raises ``BadInput`` when
    so much memory cannot be pinned, ``Unsupported`` without a GPU.
    """

    def __init__(self, size: int, device: str) -> None:
        if not torch.cuda.is_available():
            raise Unsupported(
                f"copying out of {device}", "there is no CUDA device", "plan for it without running"
            )
        torch.cuda.init()
        self.size, self.device = 0, torch.device(device)
        self._runtime = _runtime(cuda.runtime())
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
        rule = "the host has room to pin for what is offloaded"
        try:
            self._memory = mmap.mmap(-1, max(size, 1))
        except (OSError, ValueError, OverflowError) as error:
            raise BadInput(rule, f"{size} bytes: {error}", "the host pool") from error
        first = ctypes.c_char.from_buffer(self._memory)
        self.base = ctypes.addressof(first)
        with torch.cuda.device(self.device):
            code = self._runtime.pin(self.base, len(self._memory))
        if code:
            del first
            self._memory.close()
            raise BadInput(rule, f"{size} bytes: CUDA error {code}", "the host pool")
        self.size, self._first = size, first

    def _shut(self) -> None:
        if self._first is not None:
            torch.cuda.synchronize(self.device)
            self._runtime.unpin(self.base)
            self._first = None
            self._memory.close()

    def write(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Copied:
        """Copies ``size`` bytes of the device to ``offset``, after the copies ``after``."""
        return self._begin(stream, TO_HOST, address, offset, size, after)

    def read(self, stream: int, address: int, size: int, offset: int, after: Sequence[Any] = ()) -> Copied:
        """Copies ``size`` bytes at ``offset`` to the device, after the copies ``after``."""
        return self._begin(stream, TO_DEVICE, address, offset, size, after)

    def _begin(
        self, stream: int, kind: int, address: int, offset: int, size: int, after: Sequence[Any]
    ) -> Copied:
        compute = torch.cuda.current_stream(self.device)
        copies = self._stream(stream) if stream else compute
        if copies != compute:
            copies.wait_stream(compute)
        for other in after:
            copies.wait_event(other.event)
        self._move(copies, stream, kind, address, offset, size)
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
        """Waits for what is running, here and on the device, and gives the bytes back."""
        self._shut()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
