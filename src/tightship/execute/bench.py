"""Bench: runs one call over and over to see what it asks of the allocator and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

import torch

from tightship.execute import allocator

__all__ = ["Bench", "Row", "workspace_of"]

Row = tuple[int, int, int, int]
"""A request: bytes, the defined storage it becomes or -1, first event, event of its end or -1."""

_LONG: Final = 0.25  # seconds; what takes longer is not run again only for its time
_REPEATS: Final = 20


class Bench:
    """``seconds`` bounds how long a call is repeated for its time; ``recording``: requests are wanted too.
    ``device``: where the calls run."""

    def __init__(self, seconds: float, recording: bool, device: str = "cpu") -> None:
        self._seconds, self._recording, self._device = seconds, recording, device
        self._kind = allocator.kind_of(device)
        self._arena: allocator.Arena | None = None

    def run(
        self, call: Callable[[], list[Any]], kept: Sequence[int], *, prepared: bool = False
    ) -> tuple[list[Any], list[allocator.Event], float]:
        """One run that counts, after one that does not, unless it is ``prepared``: kernels have a first time.

        Of its results those at the positions ``kept`` survive. Returns them with the events of the run, the
        last of which are the ends of the other results, and its seconds.
        """
        if not prepared:
            call()
        if not self._recording:
            start = self._now()
            results = call()
            return results, [], self._now() - start
        with allocator.record(self._kind) as recording:
            start = self._now()
            results = call()
            seconds = self._now() - start
            results = [r if position in kept else None for position, r in enumerate(results)]
        return results, recording.events, seconds

    def time(self, call: Callable[[], list[Any]], sizes: Sequence[int], once: float) -> float:
        """Median seconds of a call whose requests are ``sizes``, when it has taken ``once`` seconds before.

        It is run as it will be: from an arena, whose pages are there already.
        """
        if once >= _LONG:
            return once
        repeats = max(1, min(_REPEATS, int(self._seconds / max(once, 1e-7))))
        if not self._recording:
            return statistics.median(self._seconds_of(call) for _ in range(repeats))
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        script = allocator.Script(sizes, offsets[:-1], (0, len(sizes)), kind=self._kind)
        with allocator.replay(self.room(offsets[-1]), script) as session:
            times = []
            for _ in range(repeats + 1):
                session.seek(0)
                times.append(self._seconds_of(call))
        return statistics.median(times[1:])

    def room(self, size: int) -> allocator.Arena:
        """An arena of at least so many bytes."""
        if self._arena is None or self._arena.size < size:
            self._arena = None  # given back before the larger one is taken
            self._arena = allocator.Arena(size * 5 // 4, self._device)
        return self._arena

    def _now(self) -> float:
        """Seconds, once everything asked of the device is done."""
        if self._kind == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _seconds_of(self, call: Callable[[], list[Any]]) -> float:
        start = self._now()
        call()
        return self._now() - start


def workspace_of(
    events: Sequence[allocator.Event], made: dict[int, int], results: int
) -> tuple[int, tuple[Row, ...], int]:
    """Bytes a call needs beyond its ``results`` bytes, its requests, and bytes it keeps to itself.

    ``made`` says which request (by id) became which defined storage.
    """
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    sizes: dict[int, int] = {}
    live = most = 0
    for number, event in enumerate(events):
        if event.kind == "alloc":
            starts[event.id], sizes[event.id] = number, event.nbytes
            live += event.nbytes
        else:
            ends[event.id] = number
            live -= event.nbytes
        most = max(most, live)
    kept = sum(sizes[i] for i in starts if i not in ends and i not in made)
    rows = tuple((sizes[i], made.get(i, -1), starts[i], ends.get(i, -1)) for i in sorted(starts))
    return max(0, most - results), rows, kept
