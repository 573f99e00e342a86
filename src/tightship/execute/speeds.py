"""What copies, codecs and random states cost on this machine: the figures of a graph's `Machine`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from tightship.errors import BadInput
from tightship.execute.cache import Cache, Measurement
from tightship.execute.codecs import compress, decompress
from tightship.execute.spill import Spill
from tightship.machine import CODECS, MODELLED, Machine

__all__ = ["speeds"]

_BYTES: Final = 1 << 21
"""Of the full form in each measurement: beyond what a core keeps near, small enough to take milliseconds."""
_REPEATS: Final = 3

_here: dict[str, Measurement] = {}
"""What this process has measured, for caches that keep nothing."""


def speeds(cache: Cache, folder: Path | str | None = None) -> Machine:
    """Measured once and kept in ``cache``; ``folder`` is where offloaded bytes go. Takes a few dozen milliseconds.

    The file is written through the page cache: its rates are those of memory until the system runs short of it.
    """

    def rate(name: str, prepared: Callable[..., Callable[[], Any]], *what: Any) -> float:
        found = cache.get(name) or _here.get(name)
        if found is None:
            found = _here[name] = Measurement(max(_seconds(prepared(*what)), 1e-9))
        if cache.get(name) is None:
            cache.put(name, found)
        return _BYTES / found.time

    def seconds(name: str, prepared: Callable[..., Callable[[], Any]], *what: Any) -> float:
        return _BYTES / rate(name, prepared, *what)

    place = "" if folder is None else str(Path(folder).resolve())
    try:
        offload, fetch = (rate(f"speed:{k}:{place}", _copies, k, folder) for k in ("offload", "fetch"))
        latency = seconds(f"speed:latency:{place}", _copies, "offload", folder, 64)
    except BadInput:  # no such folder: who copies there will say so
        offload, fetch, latency = MODELLED.offload, MODELLED.fetch, MODELLED.latency
    pack, unpack = (
        tuple(rate(f"speed:{kind}:{codec}", _codecs, kind, codec) for codec in CODECS)
        for kind in ("compress", "decompress")
    )
    state = seconds("speed:state", lambda: torch.default_generator.get_state)
    return Machine(offload, fetch, latency, pack, unpack, state, measured=True)


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return statistics.median(times)


def _copies(kind: str, folder: Path | str | None, size: int = _BYTES) -> Callable[[], Any]:
    spill = Spill(size, folder)
    memory = torch.zeros(size, dtype=torch.uint8)
    move = spill.write if kind == "offload" else spill.read
    spill.write(1, memory.data_ptr(), size, 0).result()
    return lambda: move(1, memory.data_ptr(), size, 0).result()


def _codecs(kind: str, codec: str) -> Callable[[], Any]:
    dtype = {"bits": torch.bool, "mask": torch.float32, "bf16": torch.float32}.get(codec, torch.int64)
    full = torch.zeros(_BYTES // dtype.itemsize, dtype=dtype)
    full[::3] = 1
    packed = torch.empty(_BYTES, dtype=torch.uint8)
    compress(codec, full, packed)
    if kind == "compress":
        return lambda: compress(codec, full, packed)
    return lambda: decompress(codec, packed, full)
