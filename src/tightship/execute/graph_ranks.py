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

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from time import monotonic, sleep
from typing import Any, Final

import torch
from torch import distributed as dist

from tightship.errors import PeerFailed
from tightship.execute.first_failure import words_of
from tightship.execute.graph_board import Board, board_of_all
from tightship.frontends.torch import collectives

__all__ = ["Turn", "begin", "failed_before"]

_PATIENCE: Final = 0.6
"""Seconds that a rank waits for others until it asks how far they are."""
_LEAST: Final = 2.0
"""Seconds that a rank waits for one that has not come to the same code, at least."""
_HEARD: Final = 3.0
"""Seconds that a rank stays for others to read what it has said: it may have the store."""
_TURN: Final = timedelta(seconds=0.2)
"""How long a collective is waited for until notes are looked at."""


def begin(code: str, frame: str, among: Sequence[int]) -> Turn | None:
    """This rank compiles a graph of the ``code``, in the Python ``frame``, which it will run together with ranks
    ``among``, itself included; None where there are no others."""
    board = board_of_all() if len(among) > 1 else None
    return None if board is None else Turn(board, code, frame, among)


def failed_before(frame: str, among: Sequence[int], error: BaseException) -> None:
    """No graph of the ``frame`` has come to `begin`, as Dynamo has raised ``error``: others need not wait for it."""
    board = board_of_all() if len(among) > 1 else None
    if board is not None:
        with suppress(RuntimeError):
            board.alone(frame, words_of(error))
        board.runs[frame] += 1


class Turn:
    """A graph that ranks compile together, and then run. ``sends``: what it sends inside, in order, once known."""

    def __init__(self, board: Board, code: str, frame: str, among: Sequence[int]) -> None:
        self._board, self._code, self._frame = board, code, frame
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
        except PeerFailed as failed:
            self.count()
            return failed
        found = self._found(error, told)
        if found is not None:
            self.count()
        return found

    def count(self) -> None:
        """This rank has run the code once more, or failed to."""
        self._board.runs[self._code] += 1
        self._board.runs[self._frame] += 1

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
        kind, text = ("", "") if error is None else (type(error).__name__, words_of(error))
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
            self._check(missing)
            if waited > _PATIENCE:
                self._board.ask(missing)
                now = [r for r in missing if store.check([f"{self._key}/said/{r}"])]
                come += now
                missing = [r for r in missing if r not in now and self._will_come(r, waited > patience)]
            sleep(pause)
            pause = min(pause * 1.5, 0.1 * self._board.slower)
        return sorted(come)

    def _check(self, ranks: Sequence[int]) -> None:
        """Raises ``PeerFailed`` where one of the ranks will not come, and has said so."""
        self._board.check()
        for r in ranks:
            if failed := self._board.failed_in(self._frame, r):
                raise PeerFailed({r: failed.text}, f"compiling {failed.code}")

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
        board.check()
        board.deadlock.follow()
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
                board.store.set(key, json.dumps([board.rank, words_of(error)]))
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
                board.check()
                for k, failed in enumerate(board.heard):
                    is_here = (failed.code, failed.runs) == (self._code, run)
                    if failed.rank in self._others and (k >= began or is_here):
                        raise PeerFailed({failed.rank: failed.text}, f"compiling {failed.code}")
            work.wait()

        return wait if dist.get_backend() == "gloo" else lambda work: work.wait()


def _digest(rows: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:8]


def _versions() -> str:
    return f"tightship {version('tightship')}, torch {torch.__version__}"
