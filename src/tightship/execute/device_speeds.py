"""What copies to pinned memory, codecs and random states cost beside a GPU: the figures of a graph's `Machine`.

Copies and codecs are timed by CUDA's events. What a copy takes from the ops beside it is what the host needs to begin
it and to have it waited for: an engine copies, and what that takes of the GPU's memory is not counted. It has not yet
run on a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from tightship.errors import BadInput
from tightship.execute.cache import Cache, Measurement
from tightship.execute.device_codecs import PACKED, compress, decompress
from tightship.execute.tiered_pool import host_pool
from tightship.frontends.torch import compat
from tightship.machine import CODECS, MODELLED, Machine

__all__ = ["device_speeds"]

_BYTES: Final = 1 << 23
"""Of the full form in each measurement: beyond a GPU's start of a copy or kernel, well below its memory."""
_REPEATS: Final = 5
_MANY: Final = 16

_here: dict[str, Measurement] = {}
"""What this process has measured, for caches that keep nothing."""


def device_speeds(
    cache: Cache, device: str, pinned: int | None = None, folder: Path | str | None = None
) -> Machine:
    """Measured once and kept in ``cache``. Takes 32 MiB of ``device`` and half of that on the host while it does.

    Where ``pinned`` limits the host's memory, copies are taken to go to the file in ``folder``: which of them do is
    known after planning only. ``mask`` is not packed on GPUs; its rate is a model's.
    """
    gpu = torch.cuda.get_device_name(device)
    place: tuple[Any, ...] = () if pinned is None else (0, None if folder is None else Path(folder).resolve())

    def seconds(name: str, prepared: Callable[..., Callable[[], float]], *what: Any) -> float:
        key = ":".join(map(str, ("speed", name, gpu, *what)))
        found = cache.get(key) or _here.get(key)
        if found is None:
            found = _here[key] = Measurement(max(_median(prepared(device, *what)), 1e-9))
        if cache.get(key) is None:
            cache.put(key, found)
        return found.time

    try:
        offload, fetch = (
            _BYTES / seconds(kind, _copying, kind, _BYTES, *place) for kind in ("offload", "fetch")
        )
        copies = offload, fetch, seconds("latency", _copying, "offload", 64, *place)
        begin = seconds("begin", _beginning, *place)
    except BadInput:  # nothing can be pinned, or there is no such folder: who copies there will say so
        copies, begin = (MODELLED.offload, MODELLED.fetch, MODELLED.latency), 0.0
    pack, unpack = (
        tuple(
            _BYTES / seconds(f"{kind}:{codec}", _packing, kind, codec) if codec in PACKED else modelled
            for codec, modelled in zip(CODECS, rates, strict=True)
        )
        for kind, rates in (("compress", MODELLED.pack), ("decompress", MODELLED.unpack))
    )
    return Machine(*copies, pack, unpack, seconds("state", _saving), measured=True, begin=begin)


def _median(run: Callable[[], float]) -> float:
    run()
    return statistics.median(run() for _ in range(_REPEATS))


def _timed(device: str, run: Callable[[], Any]) -> float:
    """Seconds of what ``run`` asks of the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _copying(device: str, kind: str, size: int, *place: Any) -> Callable[[], float]:
    pool, memory = host_pool(size, device, *place), torch.zeros(size, dtype=torch.uint8, device=device)
    move = pool.write if kind == "offload" else pool.read
    return lambda: _timed(device, lambda: move(0, memory.data_ptr(), size, 0))


def _beginning(device: str, *place: Any) -> Callable[[], float]:
    pool, memory = host_pool(64, device, *place), torch.zeros(64, dtype=torch.uint8, device=device)

    def run() -> float:
        start = perf_counter()
        for _ in range(_MANY):
            pool.write(1, memory.data_ptr(), 64, 0).result()
        taken = perf_counter() - start
        torch.cuda.synchronize(device)
        return taken / _MANY

    return run


def _packing(device: str, kind: str, codec: str) -> Callable[[], float]:
    dtype = {"bits": torch.bool, "bf16": torch.float32}.get(codec, torch.int64)
    full = torch.zeros(_BYTES // dtype.itemsize, dtype=dtype, device=device)
    packed = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    if kind == "compress":
        return lambda: _timed(device, lambda: compress(codec, full, packed))
    return lambda: _timed(device, lambda: decompress(codec, packed, full))


def _saving(device: str) -> Callable[[], float]:
    generator = compat.generator_of(device)

    def run() -> float:
        start = perf_counter()
        generator.get_state()
        return perf_counter() - start

    return run
