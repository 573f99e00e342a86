"""Ranks meet in fit: each waits until all have called it, or one of them says that it never will."""

from __future__ import annotations

import hashlib
import logging
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Final
from uuid import uuid4

from torch import distributed as dist

from tightship.errors import BadInput, PeerFailed
from tightship.execute.early_end import note_of_ends, waits
from tightship.execute.first_failure import FirstFailure, in_words
from tightship.execute.standstill import Lookout

__all__ = ["LEFT", "TURN", "met"]

TURN: Final = timedelta(seconds=0.2)
"""How long others are waited for until their notes are looked at."""
LEFT: Final = "others have ended a step while this rank waited elsewhere"
_ARRIVAL: Final = timedelta(minutes=5)
"""Within which all ranks call fit."""
_LATE: Final = 10.0
"""Seconds after which ranks are named that have not."""
_NEW, _KEPT = b"new", b"kept"
"""What a rank that has come to a fit says of its control group: it needs one, or has one."""
_LOG: Final = logging.getLogger("tightship")


def met(store: Any, key: str, lookout: Lookout | None) -> tuple[str, bool]:
    """When all ranks have come: a name for what these processes do together, and whether all have their control
    group yet, which a rank with a ``lookout`` has.

    Raises ``BadInput`` if some do not come, ``PeerFailed`` if one has ended."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ended = note_of_ends(store, rank, size)
    try:
        waits(store, 1)
        try:
            return _Meeting(store, key, rank, size, lookout, ended).held()
        finally:
            waits(store, -1)
    except RuntimeError as error:  # the store is gone, with the rank that has it
        raise PeerFailed(ended.without_store(), "fit", in_words(error)) from None


class _Meeting:
    """torchrun starts ranks again with the store that those before them wrote to: addresses of theirs that are gone,
    and why they failed. So each rank waits for a word that has its own name, and rank 0 gives it once every rank has
    answered to the name that was read. Where one needs a new control group, all make one."""

    def __init__(
        self, store: Any, key: str, rank: int, size: int, lookout: Lookout | None, ended: FirstFailure
    ) -> None:
        self._store, self._key, self._rank, self._size = store, key, rank, size
        self._lookout, self._ended = lookout, ended
        self._here = [f"{key}/here/{r}" for r in range(size)]
        self._name, self._start, self._said = "", monotonic(), False

    def held(self) -> tuple[str, bool]:
        own = uuid4().hex
        self._store.set(self._here[self._rank], own)
        if self._lookout is not None:
            self._lookout.follow()
        while monotonic() - self._start < _ARRIVAL.total_seconds():
            self._look_for_others(monotonic() - self._start)
            if self._rank == 0 and self._there(self._here):
                self._give_names()
            if self._there([f"{self._key}/{own}"]) and (kept := self._answered(own)) is not None:
                return self._name, kept
        missing = self._missing()
        rule = f"ranks {missing} did not call fit: all {self._size} ranks do, in the same order (or independent=True)"
        raise BadInput(rule, place="fit")

    def _give_names(self) -> None:
        names = [self._store.get(k).decode() for k in self._here]
        word = hashlib.sha256("".join(names).encode()).hexdigest()[:16]
        for one in names:
            self._store.set(f"{self._key}/{one}", word)

    def _answered(self, own: str) -> bool | None:
        """Answers to the name that this rank is given; whether all have a control group, if all have answered."""
        store, lookout = self._store, self._lookout
        self._name = store.get(f"{self._key}/{own}").decode()
        if lookout is not None:  # one that has ended a step says so before it comes here
            self._look_for_others(0.0)
        arrived = [f"{self._key}/{self._name}/here/{r}" for r in range(self._size)]
        store.set(arrived[self._rank], _NEW if lookout is None else _KEPT)
        if self._rank == 0 and self._there(arrived):
            store.set(f"{self._key}/{self._name}/all", b"1")
        if not self._there([f"{self._key}/{self._name}/all"]):
            return None
        if lookout is not None:
            lookout.heard()
        return _NEW not in map(store.get, arrived)

    def _missing(self) -> list[int]:
        keys = [f"{self._key}/{self._name}/here/{r}" for r in range(self._size)] if self._name else self._here
        return [r for r, key in enumerate(keys) if not self._store.check([key])]

    def _look_for_others(self, seconds: float) -> None:
        """Raises ``PeerFailed`` where a rank has ended, and ``BadInput`` where others wait for this rank elsewhere
        than in fit, or have ended a step since it does not come there. Names in the log who is late."""
        if self._ended.is_noted():
            raise self._ended.noted(PeerFailed({}))[0]
        if seconds > _LATE and not self._said:
            self._said = True
            _LOG.warning(
                "ranks %s have not called fit for %d s: rank %d waits for them, up to %d s",
                self._missing(), _LATE, self._rank, _ARRIVAL.total_seconds(),
            )  # fmt: skip
        lookout = self._lookout
        if lookout is None:
            return
        standing = lookout.asked(seconds, "fit")
        if standing or lookout.left:
            lookout.broken = True
        if standing:
            found = "; ".join(f"rank {r} {text}" for r, text in standing.items())
            raise BadInput(f"not all ranks call fit: {found}", place="fit")
        if lookout.left:
            raise BadInput(f"not all ranks call fit: {LEFT}", place="fit")

    def _there(self, keys: list[str]) -> bool:
        """Whether the keys come within one turn; a store's own wait complains of each turn in the log."""
        end = monotonic() + TURN.total_seconds()
        while not self._store.check(keys):
            if monotonic() > end:
                return False
            sleep(0.01)
        return True
