"""What copies, codecs and random states cost on this machine: the figures of a graph's `Machine`.

What copies take from the ops beside them is the difference between ops alone and the same ops with copies, run in
turns, in seconds of the ops' own thread: what it takes to begin a copy, and what memory and caches are busy with it.
Where ops have a thread on every core, a copy has one of these cores for as long as it takes, and the other threads of
an op wait for that one.

Beside a GPU, copies to pinned memory and codecs are timed by CUDA's events. What a copy takes from the ops beside it
is what the host needs to begin it and to have it waited for: an engine copies, and what that takes of the GPU's
memory is not counted.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Final

import torch

from tightship.errors import BadInput
from tightship.execute.cache import Cache, Measurement
from tightship.execute.codecs import ON_DEVICE, compress, decompress
from tightship.execute.host_pool import FilePool, pool_beside
from tightship.frontends.torch import compat
from tightship.machine import CODECS, MODELED, Machine

__all__ = ["device_speeds", "speeds"]

_BYTES: Final = 1 << 21
"""Of the full form in each measurement: beyond what a core keeps near, small enough to take milliseconds."""
_DEVICE_BYTES: Final = 1 << 23
"""The same on a GPU: beyond its start of a copy or kernel, well below its memory."""
_REPEATS: Final = 5
_PIECES: Final = 8
"""Copied one after the other, so that memory is read and written as it is in a step."""
_TURNS: Final = (3, 15)
"""Of ops alone and ops beside copies: at least, and at most."""
_LONGEST: Final = 0.25
"""Seconds after which no more of them are taken."""
_BEGINNINGS: Final = 16

_here: dict[str, Measurement] = {}
"""What this process has measured, for caches that keep nothing."""


def speeds(cache: Cache, folder: Path | str | None = None) -> Machine:
    """Measured once and kept in ``cache``; ``folder`` is where offloaded bytes go. Takes some tenths of a second.

    The file is written through the page cache: its rates are those of memory until the system runs short of it.
    """

    kept = partial(_kept, cache)
    where = f"{torch.get_num_threads()}:{'' if folder is None else Path(folder).resolve()}"
    try:
        out, back = (kept(f"copy:{k}:{where}", partial(_copies, k, folder)) for k in ("offload", "fetch"))
        latency = kept(f"copy:latency:{where}", partial(_copies, "offload", folder, 64))
        begin = kept(f"copy:begin:{where}", partial(_taken, folder, 64, 1 << 14, 16))
        whole = kept(f"copy:beside:{where}", partial(_taken, folder, _BYTES, 1 << 19, 1))
        beside = _share(max(0.0, whole - begin), min(out, back)) / _BYTES
        copies = _BYTES / out, _BYTES / back, latency
    except (BadInput, OSError):  # no such folder, or no room: who copies there will say so
        copies, begin, beside = (MODELED.offload, MODELED.fetch, MODELED.latency), 0.0, 0.0
    pack, unpack = (
        tuple(_BYTES / kept(f"speed:{kind}:{codec}", partial(_codecs, kind, codec)) for codec in CODECS)
        for kind in ("compress", "decompress")
    )
    state = kept("speed:state", lambda: _seconds(torch.default_generator.get_state))
    return Machine(*copies, pack, unpack, state, measured=True, begin=begin, beside=beside)


def device_speeds(
    cache: Cache, device: str, pinned: int | None = None, folder: Path | str | None = None
) -> Machine:
    """Measured once and kept in ``cache``. Takes 32 MiB of ``device`` and half of that on the host while it does.

    Where ``pinned`` limits the host's memory, copies are taken to go to the file in ``folder``: which of them do is
    known after planning only. ``mask`` is not compressed on GPUs; its rate is a model's.
    """
    gpu = torch.cuda.get_device_name(device)
    where: tuple[Any, ...] = () if pinned is None else (0, None if folder is None else Path(folder).resolve())

    def seconds(name: str, prepared: Callable[..., Callable[[], float]], *what: Any) -> float:
        key = ":".join(map(str, ("speed", name, gpu, *what)))
        return _kept(cache, key, lambda: max(_median(prepared(device, *what)), 1e-9))

    try:
        offload, fetch = (
            _DEVICE_BYTES / seconds(kind, _copying, kind, _DEVICE_BYTES, *where)
            for kind in ("offload", "fetch")
        )
        copies = offload, fetch, seconds("latency", _copying, "offload", 64, *where)
        begin = seconds("begin", _beginning, *where)
    except (BadInput, OSError):  # nothing can be pinned, or no such folder: who copies there will say so
        copies, begin = (MODELED.offload, MODELED.fetch, MODELED.latency), 0.0
    pack, unpack = (
        tuple(
            _DEVICE_BYTES / seconds(f"{kind}:{codec}", _packing, kind, codec)
            if codec in ON_DEVICE
            else modeled
            for codec, modeled in zip(CODECS, rates, strict=True)
        )
        for kind, rates in (("compress", MODELED.pack), ("decompress", MODELED.unpack))
    )
    return Machine(*copies, pack, unpack, seconds("state", _saving), measured=True, begin=begin)


def _kept(cache: Cache, name: str, measure: Callable[[], float]) -> float:
    """What ``measure`` gives, measured once per machine or, for a cache that keeps nothing, per process."""
    found = cache.get(name) or _here.get(name)
    if found is None:
        found = _here[name] = Measurement(measure())
    if cache.get(name) is None:
        cache.put(name, found)
    return found.time


def _coding(kind: str, codec: str, nbytes: int, device: str = "cpu") -> Callable[[], None]:
    dtype = {"bits": torch.bool, "mask": torch.float32, "bf16": torch.float32}.get(codec, torch.int64)
    full = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    full[::3] = 1
    packed = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if kind == "compress":
        return partial(compress, codec, full, packed)
    compress(codec, full, packed)
    return partial(decompress, codec, packed, full)


# --- on the CPU ---


def _share(taken: float, whole: float) -> float:
    """Of the seconds of a copy, those that ops lose: not more than if they waited for it."""
    count = getattr(os, "sched_getaffinity", None)
    cores = len(count(0)) if count is not None else os.cpu_count() or 1
    return whole if torch.get_num_threads() >= cores else min(taken, whole)


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return max(min(times), 1e-9)


def _taken(folder: Path | str | None, size: int, numbers: int, pairs: int) -> float:
    """Seconds of this thread that a copy of ``size`` bytes takes from ops: of ``pairs`` copies out and as many back,
    each begun before ops that stream ``numbers`` through memory and ops that compute, and waited for after them."""
    pool = FilePool(2 * size, folder)
    memory, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    pool.write(1, memory.data_ptr(), size, 0).result()
    pool.write(1, memory.data_ptr(), size, size).result()
    stream, made = torch.zeros(2, numbers)
    width = max(32, round(numbers ** (1 / 3)) * 4)
    square, product = torch.zeros(2, width, width)

    def ops() -> None:
        for _ in range(2):
            torch.add(stream, 1.0, out=made)
            torch.mm(square, square, out=product)

    def run(copied: bool) -> float:
        start = thread_time()
        for _ in range(pairs):
            if copied:
                out = pool.write(1, memory.untyped_storage().data_ptr(), size, 0)
                ops()
                torch.empty_strided((16,), (4,))  # what is copied back is made first
                back = pool.read(2, target.untyped_storage().data_ptr(), size, size)
                ops()
                out.result()
                back.result()
            else:
                ops()
                ops()
        return thread_time() - start

    run(True)
    taken: list[float] = []
    until = perf_counter() + _LONGEST
    while len(taken) < _TURNS[0] or (len(taken) < _TURNS[1] and perf_counter() < until):
        taken.append(run(True) - run(False))
    pool.close()
    return max(0.0, statistics.median(taken)) / (2 * pairs)


def _copies(kind: str, folder: Path | str | None, size: int = _BYTES) -> float:
    """Seconds of one copy that is waited for at once, of memory that was last used some copies ago."""
    pool = FilePool(_PIECES * size, folder)
    memory = torch.zeros(_PIECES * size, dtype=torch.uint8)
    move = pool.write if kind == "offload" else pool.read
    pool.write(1, memory.data_ptr(), _PIECES * size, 0).result()

    def run(at: int) -> float:
        start = perf_counter()
        move(1, memory.data_ptr() + at, size, at).result()
        return perf_counter() - start

    seconds = min(run(at) for _ in range(_REPEATS) for at in range(0, _PIECES * size, size))
    pool.close()
    return max(seconds, 1e-9)


def _codecs(kind: str, codec: str) -> float:
    return _seconds(_coding(kind, codec, _BYTES))


# --- beside a GPU ---


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


def _copying(device: str, kind: str, size: int, *where: Any) -> Callable[[], float]:
    pool, memory = pool_beside(size, device, *where), torch.zeros(size, dtype=torch.uint8, device=device)
    move = pool.write if kind == "offload" else pool.read
    return lambda: _timed(device, lambda: move(0, memory.data_ptr(), size, 0))


def _beginning(device: str, *where: Any) -> Callable[[], float]:
    pool, memory = pool_beside(64, device, *where), torch.zeros(64, dtype=torch.uint8, device=device)

    def run() -> float:
        start = perf_counter()
        for _ in range(_BEGINNINGS):
            pool.write(1, memory.data_ptr(), 64, 0).result()
        taken = perf_counter() - start
        torch.cuda.synchronize(device)
        return taken / _BEGINNINGS

    return run


def _packing(device: str, kind: str, codec: str) -> Callable[[], float]:
    run = _coding(kind, codec, _DEVICE_BYTES, device)
    return lambda: _timed(device, run)


def _saving(device: str) -> Callable[[], float]:
    generator = compat.generator_of(device)

    def run() -> float:
        start = perf_counter()
        generator.get_state()
        return perf_counter() - start

    return run
