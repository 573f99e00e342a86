"""Ranks of torch.compile that wait for one another in other collectives: one in its own `dist.barrier()`, as it has
had fewer batches or has caught an error, another in a backward pass.

Nobody fails there, and gloo waits until the group's timeout. A thread of each process looks where the caller's code
stands. If that is in a collective of a group in which all have begun as many, it would be over in no time if it were
the same: so if it is not, after some more looks, and another rank is elsewhere, it is another one.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from tightship.errors import PeerFailed
from tightship.execute.connections import Connection, connections, shut
from tightship.execute.standstill import STEPS, Standing, call_in, place_of, standing
from tightship.frontends.torch import compat_distributed

__all__ = ["Deadlock"]

_POLL: Final = 0.5
"""Seconds between two looks. Looks are counted, and not seconds, in which a process may have been stopped."""
_STANDS: Final = 2
"""Looks at the same call after which others are asked."""
_SURE: Final = 5
"""Looks at the same call after all have begun as many, of a message that takes no time."""
_RATE: Final = 1 << 20
"""Bytes of a message for which another look is waited."""
_SAME: Final = frozenset(
    f"torch.distributed.{name}"
    for name in (
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
        "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
        "reduce_scatter_tensor", "scatter", "scatter_object_list",
    )
)  # fmt: skip
"""Calls that are over where all have begun them."""
_LOG: Final = logging.getLogger("tightship")


class _Told(NamedTuple):
    """Where another rank is: how many collectives it has begun of the group, where its code is, and its connections;
    ``meets``: it stands in the same call."""

    begun: int | None
    meets: bool
    place: str
    connections: list[list[str]]


class Deadlock:
    """Of one process. ``ask`` brings a question to other ranks, which `answer`, and ``end`` says to all why none goes
    on; both over the connection to the store that they are given."""

    def __init__(
        self,
        store: Any,
        key: str,
        rank: int,
        ask: Callable[[list[int], str, Any], None],
        end: Callable[[PeerFailed, Any], PeerFailed],
    ) -> None:
        self._store, self._key, self._rank = compat_distributed.other_connection(store), f"{key}/where", rank
        self._ports = compat_distributed.ports_of_store(store)
        self._ask, self._end = ask, end
        self._followed = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tightship-deadlock", daemon=True)
        if self._store is not store:  # with one connection only the main thread may wait in it
            self._thread.start()

    def follow(self) -> None:
        """This thread is the one that calls graphs."""
        self._followed = threading.get_ident()

    def end(self) -> None:
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2)

    def answer(self, store: Any, question: str) -> None:
        """To a rank that asks where this one is, over any connection to the ``store``."""
        asks, number, group, call = json.loads(question)
        mine = standing(self._followed, 0)
        begun = compat_distributed.collectives_begun(group)
        meets = mine is not None and (mine.group, mine.call, mine.begun) == (group, call, begun)
        told = _Told(begun, meets, place_of(self._followed), [[*c] for c in connections()])
        store.set(f"{self._key}/{asks}/{number}/{self._rank}", json.dumps(told))

    # --- the rank that stands ---

    def _look(self) -> None:
        """Ends with the store or the process group, or when told."""
        seen, stood, looks, sure, asked = None, None, 0, 0, 0
        with suppress(RuntimeError):
            while not self._stopped.wait(_POLL) and compat_distributed.world_size() > 1:
                call = call_in(self._followed)
                now = self._stands() if call is not None and call == seen else None
                if now is None or (now != stood and stood is not None):
                    seen, stood, looks, sure = call, None, 0, 0
                    continue
                stood = now
                looks += 1
                if looks < _STANDS:
                    continue
                others = [r for r in compat_distributed.ranks_of_gloo(now.group) if r != self._rank]
                told = self._told(asked, others) if looks > _STANDS else None
                sure = sure + 1 if told is not None and _is_elsewhere(now, told) else 0
                if told is not None and sure >= _SURE + now.size // _RATE:
                    return self._raise(now, told)
                asked += 1
                self._ask(others, json.dumps([self._rank, asked, now.group, now.call]), self._store)

    def _stands(self) -> Standing | None:
        now = standing(self._followed, 0)
        return now if now is not None and now.known and now.call in _SAME else None

    def _told(self, number: int, others: list[int]) -> dict[int, _Told] | None:
        """What the others have answered; None where one has not."""
        keys = [f"{self._key}/{self._rank}/{number}/{r}" for r in others]
        if not self._store.check(keys):
            return None
        told = {r: _Told(*json.loads(self._store.get(key))) for r, key in zip(others, keys, strict=True)}
        for key in keys:
            self._store.delete_key(key)
        return told

    def _raise(self, now: Standing, told: dict[int, _Told]) -> None:
        """All end: they are told why, and then woken."""
        places = [f"rank {r} is elsewhere ({t.place})" for r, t in told.items() if not t.meets]
        text = (
            f"waits in {now.call} ({now.place}), to which others do not come, as {', '.join(places)}: {STEPS}"
        )
        failed = self._end(PeerFailed({self._rank: text}), self._store)
        peers = [Connection(*c) for t in told.values() for c in t.connections]
        if not shut(peers, self._ports):
            _LOG.error(
                "%s\nThe wait cannot be broken off: it ends with the timeout of the process group.", failed
            )


def _is_elsewhere(now: Standing, told: dict[int, _Told]) -> bool:
    """Whether all have begun as many collectives, and one of them stands elsewhere than this rank."""
    begun = [t.begun for t in told.values()]
    return all(n is not None and n >= now.begun for n in begun) and not all(t.meets for t in told.values())
