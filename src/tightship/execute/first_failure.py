"""What has failed first among ranks that share a store: every rank raises the same, whoever else fails because of it.

Who fails writes why, unless somebody has before. Where a connection ends without a word, ranks say that they are
there, and who does not is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Final

from tightship.errors import PeerFailed, TightshipError
from tightship.frontends.torch import compat_distributed

__all__ = ["GONE", "HEARD", "FirstFailure", "in_words", "words_of"]

HEARD: Final = 3.0
"""Seconds that a rank stays for the others to read why they end: it may have the store."""
_ROLL_CALL: Final = 1.5
"""Seconds within which ranks say that they are there, where a connection has ended."""
GONE: Final = "has ended, or does not answer any more"


class FirstFailure:
    """As rank ``rank`` of ``size`` knows it. What ranks say lies in ``store``, under ``key``. Methods raise
    ``RuntimeError`` where the store is gone."""

    def __init__(self, store: Any, key: str, rank: int, size: int) -> None:
        self._store, self._key, self._rank, self._size = store, key, rank, size

    def is_noted(self) -> bool:
        return bool(self._store.check([f"{self._key}/failed"]))

    def noted(
        self,
        own: PeerFailed,
        begun: bool = False,
        gone: Collection[int] = (),
        tell: Callable[[], None] = lambda: None,
    ) -> tuple[PeerFailed, bool]:
        """The error that all raise, which is ``own`` if there was none before, and whether what its rank was doing
        had ``begun`` to send. Who is first is to ``tell`` the others. Stays for them, but those that are ``gone``, to
        read it. Needs no store."""
        given = written = _written(own, begun)
        with suppress(RuntimeError):  # the rank that has the store may be gone
            written = self._store.compare_set(f"{self._key}/failed", "", given).decode()
            if written == given:
                tell()
            self._store.set(f"{self._key}/heard/{self._rank}", b"1")
            keys = [f"{self._key}/heard/{r}" for r in range(self._size) if r not in gone]
            self._come(keys, HEARD)
        return _read(written)

    def leaves(self, own: PeerFailed) -> None:
        """As `noted`, by a rank that ends: to be heard later (`is_heard`), as it may have more than one to tell."""
        self._store.compare_set(f"{self._key}/failed", "", _written(own, False))
        self._store.set(f"{self._key}/heard/{self._rank}", b"1")

    def is_heard(self) -> bool:
        """Whether all ranks know of it."""
        return bool(self._store.check([f"{self._key}/heard/{r}" for r in range(self._size)]))

    def heard(self, store: Any) -> PeerFailed:
        """What has been noted, over another connection to the ``store``."""
        found, _ = _read(store.get(f"{self._key}/failed").decode())
        store.set(f"{self._key}/heard/{self._rank}", b"1")
        return found

    def is_there(self, store: Any) -> None:
        """To be called by each rank when the roll is called, over any connection to the ``store``."""
        store.set(f"{self._key}/there/{self._rank}", b"1")

    def missing(self) -> list[int]:
        """Who does not say soon that it is there, and so has ended."""
        self.is_there(self._store)
        keys = [f"{self._key}/there/{r}" for r in range(self._size)]
        self._come(keys, _ROLL_CALL)
        return [r for r, key in enumerate(keys) if not self._store.check([key])]

    def _come(self, keys: list[str], seconds: float) -> None:
        """Returns when all keys have come, or so late; a store's own wait complains of that in the log."""
        end = monotonic() + seconds
        while not self._store.check(keys) and monotonic() < end:
            sleep(0.02)

    def without_store(self) -> dict[int, str]:
        """Who is gone where the store is: the rank that has it, if it is known."""
        others = [r for r in range(self._size) if r != self._rank]
        gone = others[0] if len(others) == 1 else 0
        known = gone != self._rank and not compat_distributed.store_of_launcher()
        return {gone: GONE} if known else {}


def _written(own: PeerFailed, begun: bool) -> str:
    return json.dumps([own.failures, own.place, own.lost, own.writing, begun])


def _read(written: str) -> tuple[PeerFailed, bool]:
    failures, place, lost, writing, begun = json.loads(written)
    return PeerFailed({int(r): text for r, text in failures.items()}, place, lost, writing=writing), begun


def in_words(error: Exception) -> str:
    """The first line of what torch says."""
    return str(error).strip().splitlines()[0][:200]


def words_of(error: BaseException) -> str:
    """What a rank says of its error: of one that is not ours its first paragraph."""
    if isinstance(error, TightshipError):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n\n")[0].strip().removesuffix(":")
