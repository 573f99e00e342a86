"""Several ranks of torch.distributed train one model: they agree before anything is sent, and end together.

What ranks tell one another before and between steps goes over a group of its own (gloo, which waits as long as it
takes). Whatever one does by itself, `Ranks.agreed` says to all: a rank that fails says why instead, and every rank
raises the same error. Inside of a step collectives are waited for in short turns; a rank that fails there leaves a
note in the store that the process group was made with, and the others, who look there between turns, end as well.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from time import monotonic, perf_counter, sleep
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist

from tightship.errors import BadInput, PeerFailed
from tightship.execute.early_end import all_know
from tightship.execute.first_failure import GONE, HEARD, FirstFailure, in_words, words_of
from tightship.execute.last_words import tell_of_errors
from tightship.execute.meeting import LEFT, TURN, met
from tightship.execute.standstill import GATHER, Lookout
from tightship.frontends.torch import collectives, compat_checkpoints, compat_distributed
from tightship.process_local import NotCopied

__all__ = ["Ranks", "marked", "together"]

T = TypeVar("T")

_CONNECTION: Final = timedelta(minutes=1)
"""Within which all ranks join the control group, once all are there."""
_LONGEST: Final = timedelta(days=7)
"""Of the control group: one rank may evaluate, or plan, while the others wait."""
_SLOT: Final = 512
"""Bytes that each rank says in one go; what is longer takes a second one."""
_PROBED: Final = (64, 1 << 20)
"""Bytes of the messages whose times give the cost of sending."""


class _Process:
    """Of this process: the control group, the default group it belongs to, what looks where ranks stand, and how many
    times ranks have met; the default group that waits for what is not sent any more."""

    group: Any = None
    of: Any = None
    lookout: Lookout | None = None
    unfinished: Any = None
    meetings: int = 0


_process = _Process()
_living: weakref.WeakSet[Ranks] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """Groups end, with their threads, while there is an interpreter: what holds them may live to its end."""
    if _process.lookout is not None:
        _process.lookout.end()
    collectives.waiting(lambda work: work.wait())
    _process.group = _process.of = _process.unfinished = _process.lookout = None
    for ranks in [*_living]:
        ranks.let_go()


def together(*, in_parts: bool = False) -> Ranks | None:
    """The ranks of the world, which all call this at the same point; None where all are imagined, or where there is
    one, unless torch has divided its model (``in_parts``): what it sends to itself alone is sent as well.

    Raises ``BadInput`` if some do not come, or if an error has left collectives unfinished, ``PeerFailed`` if one has
    ended.
    """
    alone = compat_distributed.world_size() < 2 and not (in_parts and compat_distributed.alone())
    if alone or compat_distributed.imagined_ranks():
        return None
    world = dist.group.WORLD
    if _process.unfinished is world:
        rule = (
            "collectives of a step that failed were left unfinished, and what is sent now would be taken for theirs: "
            "start the ranks again, from a checkpoint"
        )
        raise BadInput(rule, place="fit")
    if _process.of is not world or (_process.lookout is not None and _process.lookout.left):
        _process.group, _process.of = None, world
    collectives.waiting(_between_steps)
    tell_of_errors(_tell)
    compat_checkpoints.save_over_own_group()
    key, store = f"tightship/{_process.meetings + 1}", compat_distributed.process_groups_store()
    name, kept = met(store, key, None if _process.group is None else _process.lookout)
    if not kept:
        _process.group = None
    key = f"{key}/{name}"
    _process.meetings += 1
    if _process.group is None:
        group = _process.group = compat_distributed.gloo_group(f"{key}/group", _CONNECTION)
        compat_distributed.set_timeout(group, _LONGEST)
        if _process.lookout is not None:
            _process.lookout.end()
        _process.lookout = Lookout(store, key, dist.get_rank(), dist.get_world_size())
        _process.lookout.meetings = _process.meetings
        ranks = Ranks(group, store, key)
        with ranks.ending_together("meeting"):
            ranks.same("versions (install the same on every rank)", _versions)
            with ranks.sending(writing=False):
                ranks.measure()
        return ranks
    if _process.lookout is not None:
        _process.lookout.meetings = _process.meetings
    return Ranks(_process.group, store, key)


def _between_steps(work: Any) -> None:
    """Waits for what is sent outside of steps (parameters in parts, which an evaluation gathers) as long as no rank
    has failed in one: who waits there for others says so, and ends. Raises ``PeerFailed``."""
    living = [ranks for ranks in _living if ranks.lives]
    if living:
        living[0].wait_beside(work, living)
    else:
        work.wait()


def _tell(error: BaseException) -> None:
    """The others, which wait for this rank in a step, or come to one, hear of an error between steps that ends it."""
    living = [ranks for ranks in _living if ranks.lives and ranks.process == os.getpid()]
    if isinstance(error, PeerFailed) or not living or all_know():
        return
    for ranks in living:
        ranks.first.leaves(PeerFailed({ranks.rank: words_of(error)}, "between steps"))
    end = monotonic() + HEARD
    while monotonic() < end and not any(ranks.first.is_heard() for ranks in living):
        sleep(0.02)


def _versions() -> str:
    return f"tightship {version('tightship')}, torch {torch.__version__}, Python {platform.python_version()}"


class Ranks(NotCopied):
    """``group`` is the control group; notes of failures lie in ``store`` under ``key``."""

    def __init__(self, group: Any, store: Any, key: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group, self._store, self._key = group, store, key
        self.first, self.process = FirstFailure(store, key, self.rank, self.size), os.getpid()
        self._ended: PeerFailed | None = None
        self._place, self._begun, self._writes = "", False, False
        _living.add(self)

    @property
    def lives(self) -> bool:
        """Whether its steps may still be called."""
        return self._store is not None and self._ended is None

    def let_go(self) -> None:
        self._group = self._store = self.first = None  # type: ignore[assignment]

    # --- saying and hearing ---

    def exchange(self, data: bytes) -> list[bytes]:
        """What each rank says, by rank."""
        rows = self._gathered(len(data).to_bytes(8, "little") + data[: _SLOT - 8], _SLOT)
        counts = [int.from_bytes(row[:8], "little") for row in rows]
        if max(counts) > _SLOT - 8:
            return [row[:n] for row, n in zip(self._gathered(data, max(counts)), counts, strict=True)]
        return [row[8 : 8 + n] for row, n in zip(rows, counts, strict=True)]

    def _gathered(self, data: bytes, slot: int) -> list[bytes]:
        """A sum of rows of which each rank has written one: gloo reduces in place, and copies what it gathers."""
        buffer = bytearray(slot * self.size)
        buffer[self.rank * slot : self.rank * slot + len(data)] = data
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from None
        self._wait(work, _process.lookout)
        return [bytes(buffer[r * slot : (r + 1) * slot]) for r in range(self.size)]

    def agreed(self, place: str, own: Callable[[], T], said: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """What ``own()`` returns here, and what every rank has ``said`` of its own (as JSON has it), when all have
        run theirs. Where one raises, all raise ``PeerFailed``, or, if all raise the same, just that."""
        self._place = place
        try:
            result = own()
            text = "+" + json.dumps([place, said(result)])
        except PeerFailed:
            raise
        except BaseException as error:
            self._share(error)
            raise
        rows, failed = self._shared(text, None)
        if failed is not None:
            raise failed
        return result, rows

    def told(self, place: str, own: Any) -> list[Any]:
        """What every rank has to say (as JSON has it), in the middle of what runs for another exchange."""
        outer = self._place
        _, rows = self.agreed(place, lambda: None, lambda _: own)
        self._place = outer
        return rows

    def _share(self, error: BaseException) -> None:
        """Says to all what has failed here; returns where all raise the same, and raises what all raise otherwise."""
        _, failed = self._shared("-" + json.dumps([self._place, words_of(error)]), error)
        if failed is not error:
            raise failed from error

    def _shared(self, text: str, error: BaseException | None) -> tuple[list[Any], Any]:
        """What all have said, and the error that all raise if one has one; ``text`` begins with - for ``error``."""
        told = [row.decode() for row in self.exchange(text.encode())]
        rows = [json.loads(row[1:]) for row in told]
        failures = {r: rows[r][1] for r, row in enumerate(told) if row[0] == "-"}
        if not failures:
            places = [place for place, _ in rows]
            if len(set(places)) > 1:
                return [], self.differ("calls that do not go together", places)
            return [said for _, said in rows], None
        alike = len(failures) == self.size and len(set(failures.values())) == 1
        if error is not None and (alike or not isinstance(error, Exception)):
            return [], marked(error)
        return [], marked(PeerFailed(failures, rows[min(failures)][0]))

    def same(self, what: str, own: Callable[[], str]) -> None:
        """Raises ``PeerFailed`` unless ``own()`` is the same on all ranks."""
        _, told = self.agreed(f"comparing {what}", own, lambda text: text)
        if len(set(told)) > 1:
            raise self.differ(f"different {what}", told)

    def differ(self, place: str, texts: Sequence[str]) -> PeerFailed:
        """The error where ranks have to say the same and do not."""
        return marked(PeerFailed(dict(enumerate(texts)), place))

    # --- failing ---

    @contextmanager
    def ending_together(self, place: str) -> Iterator[None]:
        """If what runs inside fails on one rank, it fails on all; once it has begun (`begin`) it ends for good.
        Collectives inside are waited for in turns."""
        if self._ended is not None:
            raise self._ended
        self._place, self._begun, self._writes = place, False, False
        if _process.lookout is not None:
            _process.lookout.follow()
            if _process.lookout.left:
                self._ended = self._noted(PeerFailed({}, place, LEFT))
                raise self._ended
        try:
            with collectives.sending(self.wait):
                yield
        except PeerFailed as error:
            if not _ismarked(error):
                self._ended = error
            raise
        except BaseException as error:
            if _ismarked(error) or self.size == 1:  # nobody else is to hear of it
                raise
            if not self._begun and isinstance(error, Exception):
                self._share(error)
                raise
            own = PeerFailed({self.rank: words_of(error)}, self._place, writing=self._writes)
            self._ended = self._noted(own)
            if isinstance(error, Exception):
                raise self._ended from error
            raise

    @contextmanager
    def calling_out(self, place: str) -> Iterator[None]:
        """Around code of the caller's that sends by itself, from `begin` on: where a connection has ended in it,
        another rank has."""
        self.begin(place)
        try:
            yield
        except RuntimeError as error:
            if compat_distributed.is_of_connection(error):
                raise self._lost(error) from None
            raise

    def begin(self, place: str = "") -> None:
        """All are ready: from here on an error cannot be said in the next exchange, as nobody comes to one."""
        self._place = place or self._place
        self._begun = self._writes = True

    @contextmanager
    def sending(self, *, writing: bool) -> Iterator[None]:
        """Inside, as from `begin` on; ``writing`` parameters or not."""
        self._begun, self._writes = True, writing
        yield
        self._begun = self._writes = False

    def _noted(self, own: PeerFailed, gone: Sequence[int] = ()) -> PeerFailed:
        """The error that all raise: the first that a rank has noted, which is this one if there was none before."""
        self._abandon()
        found, begun = self.first.noted(own, self._begun, gone)
        if begun:
            _process.unfinished = dist.group.WORLD
        return found

    def wait(self, work: Any) -> None:
        """Waits for what is sent, as long as no rank has failed. Raises ``PeerFailed``."""
        self._wait(work, None)

    def wait_beside(self, work: Any, others: Sequence[Ranks]) -> None:
        """As `wait`, outside of steps; a failure may be one of any of the others' steps."""
        self._place, self._begun, self._writes = "parameters gathered outside of a step", False, False
        try:
            self._wait(work, None, others)
        except PeerFailed as error:
            for ranks in others:
                ranks._ended = error
            raise

    def _wait(self, work: Any, lookout: Lookout | None, others: Sequence[Ranks] = ()) -> None:
        """``lookout``: that of ranks which come from the caller's own code, and may not."""
        start = monotonic()
        while True:
            try:
                work.wait(TURN)
                break
            except RuntimeError as error:
                if work.is_completed():
                    try:
                        work.wait()
                        break
                    except RuntimeError:
                        raise self._lost(error) from None
            seconds = monotonic() - start
            failed = next(filter(None, (ranks._failed() for ranks in others or (self,))), None)
            failed = failed or self._stand(lookout, seconds) or self._silent(seconds)
            if failed is not None:
                raise failed
        if lookout is not None:
            lookout.heard()

    def _stand(self, lookout: Lookout | None, seconds: float) -> PeerFailed | None:
        """The error where others wait for this rank at another place than where it waits for them."""
        try:
            standing = {} if lookout is None else lookout.asked(seconds)
        except RuntimeError as error:
            return self._lost(error)
        if not standing:
            return None
        assert lookout is not None
        lookout.leave()
        if any(text.startswith(f"waits in {GATHER}") for text in standing.values()):
            self._begun = True  # that rank ends, too, and what it has sent stays
        return self._noted(PeerFailed(standing, self._place), [*standing])

    def _silent(self, seconds: float) -> PeerFailed | None:
        """The error where a rank has not answered for as long as the process group waits."""
        try:
            missing = () if _process.lookout is None else _process.lookout.roll_call.missing(seconds)
        except RuntimeError as error:
            return self._lost(error)
        if not missing:
            return None
        limit = compat_distributed.seconds_of_timeout()
        reason = f"has not answered for {limit:.0f} s, the timeout of the process group"
        failures = dict.fromkeys(missing, reason)
        return self._noted(PeerFailed(failures, self._place, writing=self._writes), missing)

    def _failed(self) -> PeerFailed | None:
        """What other ranks have noted; or who is gone, where one of them asks who is there."""
        try:
            if self.first.is_noted():
                return self._noted(PeerFailed({}))
            return self._called() if self._store.check([f"{self._key}/calling"]) else None
        except RuntimeError as error:
            return self._lost(error)

    def _lost(self, error: Exception) -> PeerFailed:
        """A connection has ended: because a rank has failed and said so, or has been ended."""
        self._abandon()
        try:
            if self.first.is_noted():
                return self._noted(PeerFailed({}))
            self._store.set(f"{self._key}/calling", b"1")
            return self._called()
        except RuntimeError:  # the store is gone, with the rank that has it
            if self._begun:
                _process.unfinished = dist.group.WORLD
            gone = self.first.without_store()
            return PeerFailed(gone, self._place, in_words(error), writing=self._writes)

    def _abandon(self) -> None:
        """The control group is not used any more. Others may never come to what has been begun in it, and a group
        that is let go of waits for them: this one never is."""
        if _process.group is not None and self._group is not None:
            compat_distributed.hold_for_good(self._group)
        _process.group = None

    def _called(self) -> PeerFailed:
        """Whoever does not say soon that it is there has ended. Raises ``RuntimeError`` without a store."""
        missing = self.first.missing()
        reason = "all ranks are there, and a connection between them is not"
        failures = dict.fromkeys(missing, GONE)
        return self._noted(PeerFailed(failures, self._place, reason, writing=self._writes), missing)

    # --- what sending costs ---

    def measure(self) -> None:
        """What sending costs, timed by all ranks together."""
        times = []
        for nbytes in _PROBED:
            tensor = torch.zeros(nbytes, dtype=torch.uint8)
            best = float("inf")
            for _ in range(3):
                start = perf_counter()
                self.wait(dist.all_reduce(tensor, group=self._group, async_op=True))
                best = min(best, perf_counter() - start)
            times.append(best)
        per_byte = max(times[1] - times[0], 0.0) / (_PROBED[1] - _PROBED[0]) / 2
        collectives.figures.latency, collectives.figures.per_byte = times[0], per_byte


def marked(error: Any) -> Any:
    """Every rank raises it, so that none needs to be told."""
    error._on_all_ranks = True
    return error


def _ismarked(error: BaseException) -> bool:
    return getattr(error, "_on_all_ranks", False)
