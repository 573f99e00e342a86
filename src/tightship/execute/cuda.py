"""torch's CUDA allocator, replaced by one that serves a planned step from one arena.

It has been tested against a stand-in for the CUDA runtime, and **not yet run on a GPU**.

torch takes another CUDA allocator (``CUDAPluggableAllocator``) only as long as its own has served nothing, so the
first thing a program does is ``allocator.load("cuda")``, before anything is put on the device. A ``MemPool`` with
this allocator would need no such order, but torch's own allocator would then ask for large segments and cut them up
itself, and the requests of a step would never be seen.

Outside of planned steps, freed blocks are kept for requests of the same size on the same stream, and given back when
the device has no more memory. Blocks used on other streams (``record_stream``) are waited for. CUDA graphs cannot be
captured, and ``torch.cuda.memory_stats`` knows nothing: ``Meter("cuda")`` counts.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tightship.errors import Unsupported

__all__ = ["check", "install"]

_WHAT = "serving a step on CUDA from an arena"


def check() -> None:
    """Raises ``Unsupported`` where it is clear beforehand that the allocator cannot be installed."""
    if not torch.cuda.is_available():
        raise Unsupported(_WHAT, "there is no CUDA device", "plan for it without running")
    if torch.cuda.is_initialized() and torch.cuda.memory.get_allocator_backend() == "pluggable":
        raise Unsupported(_WHAT, "another allocator has been installed")


def install(native: Any) -> None:
    """Makes torch ask ``native``, the extension module for CUDA. Raises ``Unsupported`` if it is too late."""
    try:
        native.open(runtime())
    except OSError as error:
        raise Unsupported(_WHAT, f"the CUDA runtime cannot be loaded: {error}") from error
    memory = torch.cuda.memory
    pluggable = memory.CUDAPluggableAllocator(native.__file__, "ts_malloc", "ts_free")
    library = ctypes.CDLL(native.__file__)
    torch_side = pluggable.allocator()
    if hasattr(torch_side, "set_record_stream_fn"):
        torch_side.set_record_stream_fn(ctypes.cast(library.ts_record_stream, ctypes.c_void_p).value)
    try:
        memory.change_current_allocator(pluggable)
    except RuntimeError as error:
        raise Unsupported(
            _WHAT,
            "torch's own CUDA allocator has been used already",
            'call tightship.execute.allocator.load("cuda") before anything is put on the device',
        ) from error


def runtime() -> str:
    """The CUDA runtime that torch has loaded, by name."""
    return f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}".rstrip(".")
