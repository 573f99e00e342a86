"""What ranks that run graphs of torch.compile together tell one another, in the store of the process group.

Each has a board: how often it has run which code, which it could not compile, and why it ends. A thread listens for
the others. A rank that ends by an error of the caller's own code, wherever that is, says so before its process does;
the others hear it at their next graph, in a graph's collectives, and where torch's own collectives break off.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Final, NamedTuple

from torch import distributed as dist

from tightship.errors import PeerFailed
from tightship.execute.deadlock import Deadlock
from tightship.execute.first_failure import GONE, FirstFailure, in_words, words_of
from tightship.execute.last_words import tell_of_errors
from tightship.frontends.torch import compat_distributed, compat_waits

__all__ = ["Board", "Failure", "board_of_all"]

_POLL: Final = 0.2
"""Seconds between two questions how far others are, of up to `_FEW` ranks; with more of them it is longer."""
_FEW: Final = 16
_AT_ONCE: Final = 8
"""Ranks that are asked with one question."""
_LISTENS: Final = timedelta(minutes=10)
"""How long a rank's listener waits at once: nobody asks the store again before."""
_WHERE: Final = "where "
"""What one rings with who asks where ranks are; the question follows."""
_SILENT: Final = 4.0
"""Seconds without an answer after which a rank is not waited for: torch's own collectives find out what it is."""
_LOG: Final = logging.getLogger("tightship")


class Failure(NamedTuple):
    """A rank that could not compile ``code``, which it had run ``runs`` times, by itself."""

    rank: int
    code: str
    runs: int
    text: str


class _Process:
    """Of this process: what it says to others, and the default group that it does it in."""

    of: Any = None
    board: Board | None = None
    groups: int = 0  # how many there have been, which may have had the same store


_process = _Process()


@atexit.register
def _let_go() -> None:
    """The thread ends while there is an interpreter."""
    if _process.board is not None and os.getpid() == _process.board.process:
        _process.board.end()
    _process.of = _process.board = None


def board_of_all() -> Board | None:
    """The board of the ranks of the default process group; None where there are no others, or no store."""
    if compat_distributed.world_size() < 2 or compat_distributed.imagined_ranks():
        return None
    world = dist.group.WORLD
    if _process.of is not world:
        if _process.board is not None:
            _process.board.end()
        tell_of_errors(_tell)
        _process.groups += 1
        _process.of, _process.board = world, None
        with suppress(RuntimeError):  # the store is gone, as torch's own collectives will say
            _process.board = Board(_process.groups)
        compat_waits.watch_waits(_lost)
    return _process.board


def _lost(error: RuntimeError) -> PeerFailed | None:
    """What is raised in the place of an error of torch's own collectives."""
    return None if _process.board is None else _process.board.lost(error)


def _tell(error: BaseException) -> None:
    """The others hear of an error of the caller's own, from a rank, too, that has not come to its first graph."""
    board = None if isinstance(error, PeerFailed) else board_of_all()
    if (
        board is not None and board.process == os.getpid()
    ):  # and not that of a process that was forked from it
        board.says(error)


if compat_distributed.world_size() > 1 or compat_distributed.launched_together():
    tell_of_errors(_tell)


class Board:
    """Of one rank of the default process group. Its thread waits until one rings for it: who asks how often it has
    run which code, who has failed, and who calls the roll. It asks nothing of the store meanwhile."""

    def __init__(self, number: int) -> None:
        self.process, self.rank, self.world = os.getpid(), dist.get_rank(), dist.get_world_size()
        started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # with the store of the ranks before
        self.key = f"tightship/graphs/{started}/{number}"
        self.store = compat_distributed.process_groups_store()
        self.store.check([self.key])  # raises where it is gone; another connection would be tried for minutes
        self.runs: Counter[str] = Counter()
        self.heard: list[Failure] = []  # which others have failed by themselves
        self.ended: PeerFailed | None = None  # what all raise from now on
        self._said = False  # and have heard of
        self._first = self._note(self.store)
        self.slower = max(1.0, self.world / _FEW)
        self._asked: dict[int, float] = {}  # ranks that have not answered, and since when
        self._answers: dict[int, int] = {}
        self._last_asked, self._questions = 0.0, 0
        self._listens = compat_distributed.other_connection(self.store)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="tightship-graphs", daemon=True)
        self._thread.start()
        self.deadlock = Deadlock(self.store, self.key, self.rank, self._ask_where, self._end_over)

    def _note(self, store: Any) -> FirstFailure:
        return FirstFailure(store, f"{self.key}/end", self.rank, self.world)

    def end(self) -> None:
        self._stopped.set()
        self.deadlock.end()
        with suppress(RuntimeError):
            self._ring([self.rank], "end")
        self._thread.join(2)

    def _ring(self, ranks: Sequence[int], what: str, store: Any = None) -> None:
        over = store or self.store
        for r in ranks:
            number = over.add(f"{self.key}/rung/{r}", 1)
            over.set(f"{self.key}/bell/{r}/{number}", what)

    def _ask_where(self, ranks: Sequence[int], question: str, store: Any) -> None:
        self._ring(ranks, f"{_WHERE}{question}", store)

    def _listen(self) -> None:
        """Ends with the store or the process group, or when told."""
        number = 1
        with suppress(RuntimeError):
            while not self._stopped.is_set() and compat_distributed.world_size() > 1:
                bell = f"{self.key}/bell/{self.rank}/{number}"
                if not self._has_rung(bell):
                    continue
                what = self._listens.get(bell).decode()
                self._listens.delete_key(bell)
                number += 1
                if what == "roll":
                    self._first.is_there(self._listens)
                elif what == "failed":
                    self.ended = self.ended or self._first.heard(self._listens)
                elif what == "ask":
                    self._listens.set(f"{self.key}/at/{self.rank}", json.dumps([number, dict(self.runs)]))
                elif what.startswith(_WHERE):
                    self.deadlock.answer(self._listens, what.removeprefix(_WHERE))
                elif what != "end":
                    self.heard.append(Failure(*json.loads(what)))
                    self._say(self.heard[-1])

    def _has_rung(self, bell: str) -> bool:
        """Waits for it; False when that has taken long."""
        if self._listens is self.store:  # whose one connection others need meanwhile
            return not self._stopped.wait(_POLL * self.slower) and bool(self.store.check([bell]))
        try:
            self._listens.wait([bell], _LISTENS)
        except dist.DistStoreError:
            return False
        return True

    def _say(self, failed: Failure) -> None:
        _LOG.error(
            "rank %d has failed in compiling %s, and ranks that wait for it end when it does, or after the timeout "
            "of the process group: %s", failed.rank, failed.code, failed.text,
        )  # fmt: skip

    # --- how far others are ---

    def ask(self, ranks: Sequence[int]) -> None:
        """Has some of these say how far they are, the next ones with the next question."""
        now = monotonic()
        if not ranks or now - self._last_asked < _POLL * self.slower:
            return
        self._last_asked = now
        first = self._questions % len(ranks)
        some = [*ranks[first:], *ranks[:first]][:_AT_ONCE]
        self._questions += len(some)
        for r in some:
            self._asked.setdefault(r, now)
        self._ring(some, "ask")

    def runs_of(self, rank: int, code: str) -> int:
        """How often a rank says it has run the code."""
        key = f"{self.key}/at/{rank}"
        if not self.store.check([key]):
            return 0
        number, runs = json.loads(self.store.get(key))
        if number != self._answers.get(rank):
            self._answers[rank] = number
            self._asked.pop(rank, None)
        return int(runs.get(code, 0))

    def is_silent(self, rank: int) -> bool:
        """Whether it has been asked and does not answer any more."""
        return rank in self._asked and monotonic() - self._asked[rank] > _SILENT

    # --- failing ---

    def alone(self, code: str, text: str) -> None:
        """Says to others that this rank fails where they may wait for it."""
        self._ring(self._others(), json.dumps([self.rank, code, self.runs[code], text]))

    def failed_in(self, code: str, rank: int) -> Failure | None:
        """How a rank has failed by itself that could not compile ``code``, which it had run as often as this one."""
        for failed in self.heard:
            if (failed.rank, failed.code, failed.runs) == (rank, code, self.runs[code]):
                return failed
        return None

    def _others(self) -> list[int]:
        return [r for r in range(self.world) if r != self.rank]

    def says(self, error: BaseException) -> None:
        """The others hear of an error that ends this rank."""
        self._say_end(PeerFailed({self.rank: words_of(error)}))

    def _say_end(self, own: PeerFailed) -> PeerFailed:
        """What all raise from now on, once they have heard of it."""
        return self._end_over(own, self.store)

    def _end_over(self, own: PeerFailed, store: Any) -> PeerFailed:
        """As `_say_end`, over any connection to the ``store``."""
        gone = [r for r, text in own.failures.items() if text == GONE]

        def tell() -> None:
            self._ring([r for r in self._others() if r not in gone], "failed", store)

        if not self._said:
            self._said = True
            self.ended, _ = self._note(store).noted(own, gone=gone, tell=tell)
        return self.ended or own

    def check(self) -> None:
        """Raises ``PeerFailed`` where another rank has ended, or ends."""
        if self.ended is not None:
            raise self._say_end(self.ended)

    def lost(self, error: RuntimeError) -> PeerFailed | None:
        """What is raised where a connection of torch's own collectives has ended: a rank has failed and said so, or
        has been ended. None where ``error`` is that of waiting for too long, and all ranks are there."""
        if self.ended is not None:
            return self._say_end(self.ended)
        try:
            noted = self._first.is_noted()
            missing = [] if noted else self._called()
            if not noted and not missing and "Timed out" in str(error):
                return None
            return self._say_end(PeerFailed(dict.fromkeys(missing, GONE), lost=in_words(error)))
        except RuntimeError:  # the store is gone, with the rank that has it
            self.ended = self.ended or PeerFailed(self._first.without_store(), lost=in_words(error))
            return self.ended

    def _called(self) -> list[int]:
        self._ring(self._others(), "roll")
        return self._first.missing()
