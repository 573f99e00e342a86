"""Ranks that run a graph of torch.compile together: where one of them cannot, all of them say so, and why.

Torch's own collectives stand between the graphs (those of DistributedDataParallel and ``fully_shard``) or inside of
them, and a rank that raises instead of running its graph leaves the others in one of these. So before a graph runs
for the first time, each rank says in the store of the process group how it fared, and looks what the others say.
Ranks need not compile alike: one that gets a batch of another size compiles by itself. So a compilation is known by
the code that is compiled and by how often its graphs have run before, and a rank is waited for while it compiles the
same, as long as it answers; one that has run that code meanwhile is not waited for, and one that has not come to it
only for as long as compiling took here. What a collective inside of a graph waits for is waited for in turns, between
which the notes of ranks that have failed in that graph are read.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from time import monotonic, sleep
from typing import Any, Final, NamedTuple

import torch
from torch import distributed as dist

from tightship.errors import PeerFailed, TightshipError
from tightship.frontends.torch import collectives, compat_distributed

__all__ = ["Turn", "begin"]

_POLL: Final = 0.2
"""Seconds between two questions how far others are, of up to `_FEW` ranks; with more of them it is longer."""
_FEW: Final = 16
_AT_ONCE: Final = 8
"""Ranks that are asked with one question."""
_LISTENS: Final = timedelta(minutes=10)
"""How long a rank's listener waits at once: nobody asks the store again before."""
_PATIENCE: Final = 0.6
"""Seconds that a rank waits for others until it asks how far they are."""
_LEAST: Final = 2.0
"""Seconds that a rank waits for one that has not come to the same code, at least."""
_SILENT: Final = 10.0
"""Seconds without an answer after which a rank is not waited for: torch's own collectives find out what it is."""
_HEARD: Final = 3.0
"""Seconds that a rank stays for others to read what it has said: it may have the store."""
_TURN: Final = timedelta(seconds=0.2)
"""How long a collective is waited for until notes are looked at."""
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
    if _process.board is not None:
        _process.board.end()
    _process.of = _process.board = None


def begin(code: str, among: Sequence[int]) -> Turn | None:
    """This rank compiles a graph of the ``code``, which it will run together with ranks ``among``, itself included;
    None where there are no others."""
    if len(among) < 2 or compat_distributed.world_size() < 2 or compat_distributed.imagined_ranks():
        return None
    world = dist.group.WORLD
    if _process.of is not world:
        if _process.board is not None:
            _process.board.end()
        _process.groups += 1
        _process.of, _process.board = world, Board(_process.groups)
    board = _process.board
    assert board is not None
    return Turn(board, code, among)


class Board:
    """What ranks tell one another, in the store of the default process group. A thread of each waits until one rings
    for it: who asks how often it has run which code, and who has failed. It asks nothing of the store meanwhile."""

    def __init__(self, number: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # with the store of the ranks before
        self.key = f"tightship/graphs/{started}/{number}"
        self.store = compat_distributed.process_groups_store()
        self.runs: Counter[str] = Counter()
        self.heard: list[Failure] = []  # which others have failed by themselves
        self.slower = max(1.0, self.world / _FEW)
        self._asked: dict[int, float] = {}  # ranks that have not answered, and since when
        self._answers: dict[int, int] = {}
        self._last_asked, self._questions = 0.0, 0
        self._listens = compat_distributed.other_connection(self.store)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="tightship-graphs", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        with suppress(RuntimeError):
            self._ring([self.rank], "end")
        self._thread.join(2)

    def _ring(self, ranks: Sequence[int], what: str) -> None:
        for r in ranks:
            number = self.store.add(f"{self.key}/rung/{r}", 1)
            self.store.set(f"{self.key}/bell/{r}/{number}", what)

    def _listen(self) -> None:
        """Ends with the store or the process group, or when told."""
        number = 1
        with suppress(RuntimeError):
            while not self._ended.is_set() and compat_distributed.world_size() > 1:
                bell = f"{self.key}/bell/{self.rank}/{number}"
                if not self._has_rung(bell):
                    continue
                what = self._listens.get(bell).decode()
                self._listens.delete_key(bell)
                number += 1
                if what == "ask":
                    self._listens.set(f"{self.key}/at/{self.rank}", json.dumps([number, dict(self.runs)]))
                elif what != "end":
                    self.heard.append(Failure(*json.loads(what)))
                    self._say(self.heard[-1])

    def _has_rung(self, bell: str) -> bool:
        """Waits for it; False when that has taken long."""
        if self._listens is self.store:  # whose one connection others need meanwhile
            return not self._ended.wait(_POLL * self.slower) and bool(self.store.check([bell]))
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

    def alone(self, code: str, text: str) -> None:
        """Says to others that this rank fails where they may wait for it."""
        others = [r for r in range(self.world) if r != self.rank]
        self._ring(others, json.dumps([self.rank, code, self.runs[code], text]))


class Turn:
    """A graph that ranks compile together, and then run. ``sends``: what it sends inside, in order, once known."""

    def __init__(self, board: Board, code: str, among: Sequence[int]) -> None:
        self._board, self._code = board, code
        self._others = [r for r in among if r != board.rank]
        self._key = f"{board.key}/{hashlib.sha256(code.encode()).hexdigest()[:16]}/{board.runs[code]}"
        self._began, self._passes = monotonic(), Counter[str]()
        self.sends: list[str] | None = None
        with suppress(RuntimeError):
            board.store.set(f"{self._key}/begun/{board.rank}", b"1")
            if board.store.check([f"{self._key}/said/{board.rank}"]):  # Dynamo starts over
                board.store.delete_key(f"{self._key}/said/{board.rank}")

    # --- before the first run ---

    def withdraw(self) -> None:
        """Dynamo starts over: nothing has come of it."""
        with suppress(RuntimeError):
            self._board.store.delete_key(f"{self._key}/begun/{self._board.rank}")

    def agreed(self, error: Exception | None) -> Exception | None:
        """Says how this rank has fared, and returns what it raises in place of running its graph: ``error``, or the
        ``PeerFailed`` that all raise. Where the store is gone, torch's own collectives say so."""
        try:
            told = self._told(error)
        except RuntimeError:
            return error
        found = self._found(error, told)
        if found is not None:
            self.count()
        return found

    def count(self) -> None:
        """This rank has run the code once more, or failed to."""
        self._board.runs[self._code] += 1

    def _found(self, error: Exception | None, told: dict[int, list[Any]]) -> Exception | None:
        failures = {r: row[1] for r, row in told.items() if row[0]}
        if not failures:
            return self._difference(told)
        if len({row[0] for row in told.values()}) == 1 or len(told) == 1:
            return error  # all fail alike, each with its own figures; or nobody else has come to this graph
        return PeerFailed(failures, f"compiling {self._code}")

    def _told(self, error: Exception | None) -> dict[int, list[Any]]:
        """What each rank says that has come to this graph: the kind of its error and its text (empty if there is
        none), versions, and what it sends."""
        board, mine = self._board, self._board.rank
        kind, text = ("", "") if error is None else (type(error).__name__, _words(error))
        sends = None if self.sends is None else [len(self.sends), _digest(self.sends)]
        row = [kind, text, _versions(), sends]
        board.store.set(f"{self._key}/said/{mine}", json.dumps(row))
        said = {mine: row}
        for r in self._come():
            said[r] = json.loads(board.store.get(f"{self._key}/said/{r}"))
        if any(row[0] for row in said.values()):
            self._stay(said)
        if error is not None and len(said) == 1:
            board.alone(self._code, text)
        return dict(sorted(said.items()))

    def _come(self) -> list[int]:
        """The other ranks that have said how they have fared, when all have that will."""
        store, start = self._board.store, monotonic()
        patience = max(start - self._began, _LEAST)
        missing, pause = [*self._others], 0.02
        come: list[int] = []
        while missing:
            if store.check([f"{self._key}/said/{r}" for r in missing]):
                come, missing = [*come, *missing], []
                break
            waited = monotonic() - start
            if waited > _PATIENCE:
                self._board.ask(missing)
                now = [r for r in missing if store.check([f"{self._key}/said/{r}"])]
                come += now
                missing = [r for r in missing if r not in now and self._will_come(r, waited > patience)]
            sleep(pause)
            pause = min(pause * 1.5, 0.1 * self._board.slower)
        return sorted(come)

    def _will_come(self, rank: int, late: bool) -> bool:
        """Whether the rank is to be waited for."""
        board = self._board
        runs = board.runs_of(rank, self._code)
        if board.store.check([f"{self._key}/begun/{rank}"]):
            return not board.is_silent(rank)
        return runs <= board.runs[self._code] and not late

    def _stay(self, said: dict[int, Any]) -> None:
        """Until all have read what this rank has said."""
        store, end = self._board.store, monotonic() + _HEARD
        store.set(f"{self._key}/heard/{self._board.rank}", b"1")
        keys = [f"{self._key}/heard/{r}" for r in said]
        while not store.check(keys) and monotonic() < end:
            sleep(0.02)

    def _difference(self, told: dict[int, list[Any]]) -> PeerFailed | None:
        """The error where ranks would send other things, or have other versions."""
        if len({row[2] for row in told.values()}) > 1:
            place = "different versions (install the same on every rank)"
            return PeerFailed({r: row[2] for r, row in told.items()}, place)
        sends = {r: row[3] for r, row in told.items() if row[3] is not None}
        if len({tuple(row) for row in sends.values()}) < 2:
            return None
        place = f"{self._code}, which would send other things (batches or models of other shapes)"
        return PeerFailed({r: f"{n} collectives ({digest})" for r, (n, digest) in sends.items()}, place)

    # --- each run ---

    @contextmanager
    def running(self, *, backward: bool = False) -> Iterator[None]:
        """Around each pass. What this rank fails with, those hear that wait for it in collectives inside."""
        board, name = self._board, "backward" if backward else "forward"
        if not backward:
            self.count()
        self._passes[name] += 1
        if self.sends == []:
            yield
            return
        key = f"{self._key}/{name}/{self._passes[name]}"
        place = f"the {name} pass of {self._code}"
        try:
            with collectives.sending(self._waiting(key, place)):
                yield
        except PeerFailed:
            raise
        except BaseException as error:
            with suppress(RuntimeError):
                board.store.set(key, json.dumps([board.rank, _words(error)]))
            raise

    def _waiting(self, key: str, place: str) -> Callable[[Any], None]:
        """Waits for a collective of this pass. Raises ``PeerFailed`` where a rank has failed in it, or before it."""
        board, store = self._board, self._board.store
        began, run = len(board.heard), board.runs[self._code] - 1

        def wait(work: Any) -> None:
            ended = False
            while not ended:  # an error is not kept: it has the frames that hold what is being sent
                try:
                    work.wait(_TURN)
                    return
                except RuntimeError:
                    ended = bool(work.is_completed())
                with suppress(RuntimeError):
                    if store.check([key]):
                        rank, text = json.loads(store.get(key))
                        raise PeerFailed({rank: text}, place)
                for k, failed in enumerate(board.heard):
                    is_here = (failed.code, failed.runs) == (self._code, run)
                    if failed.rank in self._others and (k >= began or is_here):
                        raise PeerFailed({failed.rank: failed.text}, f"compiling {failed.code}")
            work.wait()

        return wait if dist.get_backend() == "gloo" else lambda work: work.wait()


def _words(error: BaseException) -> str:
    text = str(error) if isinstance(error, TightshipError) else f"{type(error).__name__}: {error}"
    return text or type(error).__name__


def _digest(rows: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:8]


def _versions() -> str:
    return f"tightship {version('tightship')}, torch {torch.__version__}"
