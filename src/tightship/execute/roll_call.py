"""Ranks that do not answer: a process that is stopped (SIGSTOP, a debugger), or a machine that is gone or swaps.

A stopped rank fails nothing and ends nothing, its connections stand, and what stopped it may let it go on. So the
ranks that wait for it say, after some seconds, whom they wait for, and end when the process group's own timeout is
over, as eager's collectives do. Whoever computes, loads or evaluates answers from a thread.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any, Final

__all__ = ["RollCall"]

_PATIENCE: Final = 5.0
"""Seconds that a rank waits for others until it calls the roll."""
_BETWEEN: Final = 2.0
"""Seconds from one call to the next, and between two looks at who has answered."""
_SILENT: Final = 10.0
"""Seconds without an answer after which a rank is named."""
_LOG: Final = logging.getLogger("tightship")


class RollCall:
    """Of ranks that share a store, under ``key``. There is one call at a time, by number; ``limit`` is how many
    seconds a rank may not answer. Who waits calls, and a thread of each rank answers over its ``own`` connection."""

    def __init__(self, store: Any, own: Any, key: str, rank: int, size: int, limit: float) -> None:
        self._store, self._own, self._key, self._rank, self._size = store, own, f"{key}/roll", rank, size
        self._limit = limit
        self._answered = self._looked_at = 0
        self._since = self._looked = 0.0
        self._named: tuple[int, ...] = ()

    def answer(self) -> None:
        """To be called now and then by a thread of each rank."""
        if not self._own.check([f"{self._key}/call"]):
            return
        number = int(self._own.get(f"{self._key}/call"))
        if number != self._answered:
            self._answered = number
            self._own.set(f"{self._key}/here/{self._rank}", str(number))
            self._own.add(f"{self._key}/count/{number}", 1)

    def missing(self, seconds: float) -> tuple[int, ...]:
        """To be called in turns by a rank that has waited for so many ``seconds``: the ranks that have not answered
        for longer than they may. Those that have not for a while are named in the log."""
        now = monotonic()
        if seconds < _PATIENCE or now - self._looked < _BETWEEN:
            return ()
        self._looked = now
        if not self._store.check([f"{self._key}/call"]):
            self._call(0)
            return ()
        number = int(self._store.get(f"{self._key}/call"))
        if number != self._looked_at:
            self._looked_at, self._since = number, now
        elif self._store.add(f"{self._key}/count/{number}", 0) >= self._size:
            self._name(())
            self._call(number)
        elif now - self._since > _SILENT:
            silent = tuple(r for r in range(self._size) if not self._is_here(r, number))
            self._name(silent)
            return silent if now - self._since > self._limit else ()
        return ()

    def _call(self, number: int) -> None:
        """The next call, unless another rank has begun it."""
        before = str(number) if number else ""
        if self._store.compare_set(f"{self._key}/call", before, str(number + 1)).decode() == str(number + 1):
            self._store.delete_key(f"{self._key}/count/{number - 1}")

    def _is_here(self, rank: int, number: int) -> bool:
        here = f"{self._key}/here/{rank}"
        return bool(self._store.check([here])) and int(self._store.get(here)) == number

    def _name(self, silent: tuple[int, ...]) -> None:
        """Of those that wait, the first one says it."""
        if silent == self._named or self._rank != next(r for r in range(self._size) if r not in silent):
            return
        ranks = f"rank{'s'[: len(silent) != 1]} {', '.join(map(str, silent or self._named))}"
        if silent:
            _LOG.warning(
                "%s: no answer for %d s (stopped by a signal or a debugger, swapping, or its machine is gone): the "
                "other ranks wait, and end after %d s, the timeout of the process group",
                ranks, _SILENT, self._limit,
            )  # fmt: skip
        else:
            _LOG.warning("%s: answers again", ranks)
        self._named = silent
