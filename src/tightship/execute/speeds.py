"""What copies, codecs and random states cost on this machine: the figures of a graph's `Machine`.

What copies take from the ops beside them is the difference between ops alone and the same ops with copies, run in
turns, in seconds of the ops' own thread: what it takes to begin a copy, and what memory and caches are busy with it.
Where ops have a thread on every core, a copy has one of these cores for as long as it takes, and the other threads of
an op wait for that one.
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
from tightship.execute.codecs import compress, decompress
from tightship.execute.file_pool import Spill
from tightship.machine import CODECS, MODELLED, Machine

__all__ = ["speeds"]

_BYTES: Final = 1 << 21
"""Of the full form in each measurement: beyond what a core keeps near, small enough to take milliseconds."""
_REPEATS: Final = 5
_PIECES: Final = 8
"""Copied one after the other, so that memory is read and written as it is in a step."""
_TURNS: Final = (3, 15)
"""Of ops alone and ops beside copies: at least, and at most."""
_LONGEST: Final = 0.25
"""Seconds after which no more of them are taken."""

_here: dict[str, Measurement] = {}
"""What this process has measured, for caches that keep nothing."""


def speeds(cache: Cache, folder: Path | str | None = None) -> Machine:
    """Measured once and kept in ``cache``; ``folder`` is where offloaded bytes go. Takes some tenths of a second.

    The file is written through the page cache: its rates are those of memory until the system runs short of it.
    """

    def kept(name: str, measure: Callable[[], float]) -> float:
        found = cache.get(name) or _here.get(name)
        if found is None:
            found = _here[name] = Measurement(measure())
        if cache.get(name) is None:
            cache.put(name, found)
        return found.time

    place = f"{torch.get_num_threads()}:{'' if folder is None else Path(folder).resolve()}"
    try:
        out, back = (kept(f"copy:{k}:{place}", partial(_copies, k, folder)) for k in ("offload", "fetch"))
        latency = kept(f"copy:latency:{place}", partial(_copies, "offload", folder, 64))
        begin = kept(f"copy:begin:{place}", partial(_taken, folder, 64, 1 << 14, 16))
        whole = kept(f"copy:beside:{place}", partial(_taken, folder, _BYTES, 1 << 19, 1))
        beside = _share(max(0.0, whole - begin), min(out, back)) / _BYTES
        copies = _BYTES / out, _BYTES / back, latency
    except BadInput:  # no such folder: who copies there will say so
        copies, begin, beside = (MODELLED.offload, MODELLED.fetch, MODELLED.latency), 0.0, 0.0
    pack, unpack = (
        tuple(_BYTES / kept(f"speed:{kind}:{codec}", partial(_codecs, kind, codec)) for codec in CODECS)
        for kind in ("compress", "decompress")
    )
    state = kept("speed:state", lambda: _seconds(torch.default_generator.get_state))
    return Machine(*copies, pack, unpack, state, measured=True, begin=begin, beside=beside)


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
    spill = Spill(2 * size, folder)
    memory, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    spill.write(1, memory.data_ptr(), size, 0).result()
    spill.write(1, memory.data_ptr(), size, size).result()
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
                out = spill.write(1, memory.untyped_storage().data_ptr(), size, 0)
                ops()
                torch.empty_strided((16,), (4,))  # what is copied back is made first
                back = spill.read(2, target.untyped_storage().data_ptr(), size, size)
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
    spill.close()
    return max(0.0, statistics.median(taken)) / (2 * pairs)


def _copies(kind: str, folder: Path | str | None, size: int = _BYTES) -> float:
    """Seconds of one copy that is waited for at once, of memory that was last used some copies ago."""
    spill = Spill(_PIECES * size, folder)
    memory = torch.zeros(_PIECES * size, dtype=torch.uint8)
    move = spill.write if kind == "offload" else spill.read
    spill.write(1, memory.data_ptr(), _PIECES * size, 0).result()

    def run(at: int) -> float:
        start = perf_counter()
        move(1, memory.data_ptr() + at, size, at).result()
        return perf_counter() - start

    seconds = min(run(at) for _ in range(_REPEATS) for at in range(0, _PIECES * size, size))
    spill.close()
    return max(seconds, 1e-9)


def _codecs(kind: str, codec: str) -> float:
    dtype = {"bits": torch.bool, "mask": torch.float32, "bf16": torch.float32}.get(codec, torch.int64)
    full = torch.zeros(_BYTES // dtype.itemsize, dtype=dtype)
    full[::3] = 1
    packed = torch.empty(_BYTES, dtype=torch.uint8)
    compress(codec, full, packed)
    if kind == "compress":
        return _seconds(lambda: compress(codec, full, packed))
    return _seconds(lambda: decompress(codec, packed, full))
